"""The shipped recipes of training, and how `--config NAME` finds them."""

import re
from collections.abc import Sequence
from pathlib import Path

from headmix_vision.errors import InputError, suggest

FOLDER = Path(__file__).parent / "configs"  # a link to the folder of the repository, a copy of it in the wheel
DEFAULT = "digits"
PROMPTED = "prompted"  # of transformers of diffusers
_OPTIONS = ("-c", "--config")
_ATTENTION = "(?:softmax|linear|mhla|hih)(?:_iha|_mea)?"
_FORMER_OVERLAYS = {"overlays/fsdp": "-c overlays/gpu8 --trainer.strategy fsdp2"}
_FORMER_MODELS = {  # model files of earlier versions, by command
    "cls": re.compile(rf"(imagenet/|models/)?deit_(tiny|small)_({_ATTENTION})(_cpe)?(_224|_384)?"),
    "gen": re.compile(rf"(?:models/)?(dit_(?:video_)?)({_ATTENTION})(_cpe_gate)?(_s_2|_xl_2)"),
}


def recipe_names(group: str) -> list[str]:
    """List the recipes of a command (`cls`, `gen`, `distill`) by name, as `--config` takes them: `models/dit_xl_2`."""
    folder = FOLDER / group
    return sorted(path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.yaml"))


def find_config(name: str, group: str) -> str:
    """Find what an option `--config` means.

    Args:
        name: Path of a file, else the name of a shipped recipe, with or without `.yaml`, else text in YAML.
        group: Recipes of which command: `cls` or `gen`.

    Returns:
        The path, or the text as it was given.

    Raises:
        InputError: It is none of these, or a file of an earlier version, which options replace.
    """
    if Path(name).is_file():
        return name
    names = recipe_names(group)
    recipe = name.removeprefix(f"configs/{group}/").removesuffix(".yaml")  # where 0.1.0 had them
    if recipe in names:
        return str(FOLDER / group / f"{recipe}.yaml")
    if any(sign in name for sign in "{:\n"):
        return name
    if options := _FORMER_OVERLAYS.get(recipe) or _options_of_model_file(recipe, group):
        raise InputError(f"--config {name}: options replace this file. Write {options}")
    by_stem = {known.rpartition("/")[2]: known for known in names} | {known: known for known in names}
    hint = suggest(name.removesuffix(".yaml"), by_stem, f"the shipped ones are {', '.join(names)}", most=3)
    raise InputError(f"--config {name} is neither a file nor a shipped recipe{hint}")


def _options_of_model_file(recipe: str, group: str) -> str:
    """Return the options that replace a model file of an earlier version; none for other names."""
    found = _FORMER_MODELS[group].fullmatch(recipe) if group in _FORMER_MODELS else None
    if found is None:
        return ""
    if group == "cls":
        folder, size, attention, cpe, pixels = found.groups()
        recipes = ("-c imagenet " if folder == "imagenet/" else "") + ("-c 384px " if pixels == "_384" else "")
        name = f"deit_{attention}_{size}_patch16_224"
        return f"{recipes}--model.name {name} --model.model_args.cpe {'true' if cpe else 'false'}"
    family, attention, gate, size = found.groups()
    overlay = f"-c models/{family.rstrip('_')}{size} " if size == "_xl_2" else ""
    paper = " --model.model_args.cpe true --model.model_args.output_gate true" if gate else ""
    return f"{overlay}--model.name {family}{attention}{size}{paper}"


def with_config_paths(args: Sequence[str], group: str, default: str | None = None) -> list[str]:
    """Put paths in the place of the names of recipes in a command line.

    Args:
        args: Subcommand and options.
        group: Recipes of which command: `cls` or `gen`.
        default: Config of `fit` when there is none among the options.

    Raises:
        InputError: A config is neither a file nor a shipped recipe.
    """
    found, takes_config, given = [], False, False
    for arg in args:
        option, sign, value = arg.partition("=")
        if takes_config:
            arg = find_config(arg, group)
        elif sign and option in _OPTIONS:
            arg = f"{option}={find_config(value, group)}"
        takes_config = not takes_config and arg in _OPTIONS
        given = given or option in _OPTIONS
        found.append(arg)
    if default is not None and not given and found[:1] == ["fit"]:
        found[1:1] = ["--config", find_config(default, group)]
    return found
