"""The help of the training commands, without an import of torch; `--help-all` shows every option.

Defaults stand in brackets; a test compares them with the options themselves.
"""

import argparse
import textwrap
from collections.abc import Sequence

from headmix_vision.console import command_words
from headmix_vision.errors import InputError
from headmix_vision.recipes import recipe_names

Options = dict[str, str]

KINDS = {
    "classifier": ("Train and evaluate image classifiers.", ("fit", "validate", "test", "predict")),
    "generator": ("Train generators of images and videos.", ("fit", "validate")),
    "distilled": (
        "Train a generator to match a teacher with another attention. For classifiers: headmix distill classifier fit.",
        ("fit", "validate"),
    ),
    "distilled_classifier": (
        "Swap the attention of a classifier or backbone, and train it to match the original.",
        ("fit", "validate", "test", "predict"),
    ),
}
GENERATORS = ("generator", "distilled")
RECIPES = {"classifier": "cls", "generator": "gen", "distilled": "gen", "distilled_classifier": "distill"}
DESCRIPTIONS = {
    "fit": "Train a model; without a recipe, a small one on handwritten digits.",
    "validate": "Evaluate the model of a run on the validation split.",
    "test": "Evaluate the model of a run on the test split.",
    "predict": "Predict the classes of images with the model of a run.",
}
_FIT = {  # where it is another than above
    "distilled": "Train a student to match a teacher: --model.teacher RUN, or --model.transformer PIPELINE.",
    "distilled_classifier": "Train a student to match a teacher; without a recipe, on handwritten digits.",
}

_HELP = ("-h", "--help", "--help-all")
_START: Options = {
    "config": "recipes or YAML files; later ones win",
    "run_dir": "folder of the run",
}
_RUN: Options = {
    "overwrite": "replace an earlier run in the folder",
    "ckpt_path": "resume: last, auto (last if any), a file",
    "seed_everything": "seed of all random numbers",
    "print_config": "print the values of all options, and end",
}
_EVALUATION: Options = {
    "ckpt_path": "best, last or a file; best if not given",
    "trust_config": "let the YAML name any class or address",
}
_DRY: Options = {"dry_run": "try everything with one batch, write nothing"}
_NETWORK: Options = {
    "model.name": "name in timm",
    "model.num_classes": "classes; the model's if not given",
    "model.model_args": "others: --model.model_args.cpe true",
    "model.checkpoint": "weights to start from",
}
_TRAINING: Options = {
    "trainer.max_epochs": "epochs of the run",
    "model.optimizer.opt": "optimizer in timm (adamw)",
    "ema.decay": "decay of the EMA; null for none (0.9996)",
    "analysis.every_n_epochs": "epochs between ranks of attention",
}
_DATA: Options = {
    "data.dataset": "digits, folder, torch/NAME, ... (digits)",
    "data.root": "folder or file of the data",
    "data.num_workers": "worker processes that read images",
}
_DEVICES: Options = {
    "trainer.accelerator": "cpu, gpu or auto (auto)",
    "trainer.devices": "number of devices (auto)",
    "trainer.precision": "32-true, bf16-mixed or 16-mixed",
}
_CLASSIFIER: Options = {
    "model.optimizer.lr": "peak learning rate (0.001)",
    "model.optimizer.weight_decay": "weight decay (0.05)",
    "model.schedule.warmup_epochs": "epochs of warm-up (10.0)",
    "model.loss.smoothing": "label smoothing (0.1)",
    "model.mixup.mixup_alpha": "mixup; 0 for none (0.2)",
    "model.mixup.cutmix_alpha": "CutMix; 0 for none (1.0)",
    "best.monitor": "metric of best.ckpt (val/top1)",
}
_GENERATOR: Options = {
    "model.optimizer.lr": "peak learning rate (0.0001)",
    "model.optimizer.weight_decay": "weight decay",
    "model.schedule.warmup_epochs": "epochs of warm-up",
    "model.vae": "autoencoder of latents; none for pixels",
    "model.objective.kind": "flow or ddpm (flow)",
    "samples.every_n_steps": "steps between samples (1000)",
    "fid.every_n_epochs": "epochs between scores of samples",
}

_CONVERTED: Options = {
    "model.transformer": "Wan or Sana pipeline to convert to MHLA",
    "model.layers": "its layers to convert; all if not given",
}
_TEACHER: Options = {
    "model.teacher": "run or .ckpt of a generator",
    "model.distill_steps": "steps on attention layers (1000)",
    "model.teacher_weight": "weight of the teacher's prediction after",
}
_STUDENT: Options = {
    "model.teacher": "run, file, name in timm, local-dir:FOLDER",
    "model.teacher_checkpoint": "weights of a name in timm",
    "model.core": "new core (mhla)",
    "model.layers": "layers to swap; all if not given",
    "model.softmax_every": "k: keep the first of each k layers",
    "model.swap_args": "others: --model.swap_args.block_grid '[4,4]'",
    "model.img_size": "input size; the teacher's if not given",
    "model.labelled": "whether the data have labels",
}
_STAGES: Options = {
    "model.attention.steps": "steps on outputs of attention layers (1000)",
    "model.attention.lr": "their peak learning rate (0.0005)",
    "model.features.steps": "steps on the last features (200)",
    "model.features.lr": "their peak learning rate (2e-05)",
    "model.labels.steps": "steps on labels",
    "model.labels.lr": "their peak learning rate (5e-05)",
    "model.optimizer.opt": "optimizer in timm (adamw)",
    "ema.decay": "decay of the EMA; null for none (0.9996)",
    "early_stopping.patience": "validations without gain to end a stage",
    "best.monitor": "metric of best.ckpt (val/feature_cosine)",
}


def common_options(subcommand: str, kind: str) -> dict[str, Options]:
    """Return the common options of a subcommand with their help, by the title of their group.

    Args:
        subcommand: `fit`, `validate`, `test` or `predict`.
        kind: What is trained, a name in `KINDS`.
    """
    generator = kind in GENERATORS
    if subcommand != "fit":
        paths = {"data.predict_path": "image or folder of images"} if subcommand == "predict" else {}
        batch = {"data.eval_batch_size": "samples per process and step"}
        return {"run": _START | _EVALUATION | _DRY, "data": paths | _DATA | batch, "devices": _DEVICES}
    if kind == "distilled_classifier":
        run, data = _START | _RUN | _DRY, _DATA | {"data.batch_size": "samples per process and step (128)"}
        return {"run": run, "model": _STUDENT, "training": _STAGES, "data": data, "devices": _DEVICES}
    size = {"model.input_size" if generator else "model.img_size": "input size; the model's if not given"}
    batch = {"data.batch_size": f"samples per process and step ({256 if generator else 128})"}
    training = _TRAINING | (_GENERATOR if generator else _CLASSIFIER)
    pipeline = _CONVERTED if generator else {}
    return {
        "run": _START | _RUN | _DRY,
        "model": (_TEACHER if kind == "distilled" else {}) | _NETWORK | size | pipeline,
        "training": training,
        "data": _DATA | batch,
        "devices": _DEVICES,
    }


def _about(subcommand: str, kind: str) -> str:
    return (_FIT.get(kind) if subcommand == "fit" else None) or DESCRIPTIONS[subcommand]


def subcommand_help(subcommand: str, kind: str) -> str:
    """Return the help of a subcommand: its common options."""
    prog = " ".join([*command_words(), subcommand])
    shown = argparse.ArgumentParser(
        prog,
        f"{prog} [-c RECIPE ...] [--OPTION VALUE ...]",
        _about(subcommand, kind),
        epilog=f"All options, which are the keys of a recipe's YAML file:\n  {prog} --help-all",
        add_help=False,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=34),
    )
    for title, options in common_options(subcommand, kind).items():
        group = shown.add_argument_group(title)
        for name, text in options.items():
            names = ["-c", "--config"] if name == "config" else [spelled(f"--{name}")]
            group.add_argument(*names, action="store_true", help=text)
    return shown.format_help()


def command_help(kind: str) -> str:
    """Return the help of a command: its subcommands and recipes."""
    about, subcommands = KINDS[kind]
    prog = " ".join(command_words())
    lines = [f"  {name:10}{_about(name, kind)}" for name in subcommands]
    usage = f"usage: {prog} {{{','.join(subcommands)}}} [-c RECIPE ...] [--OPTION VALUE ...]"
    recipes = textwrap.wrap(f"Recipes: {', '.join(recipe_names(RECIPES[kind]))}.", 80, break_on_hyphens=False)
    ending = f"{prog} {subcommands[0]} --help shows its options."
    return "\n".join([usage, "", about, "", *lines, "", *recipes, "", ending]) + "\n"


def asked_help(kind: str, args: Sequence[str]) -> str | None:
    """Return the help that a command line asks for; None if it asks for something else, or for help among options."""
    *words, last = args or [""]
    if not words and last in _HELP:
        return command_help(kind)
    if last not in ("-h", "--help"):
        return None
    if len(words) == 1 and words[0] in KINDS[kind][1]:
        return subcommand_help(words[0], kind)
    return None


def check_subcommand(kind: str, args: Sequence[str]) -> None:
    """Raise `InputError` for a command line that does not begin with what is to be done."""
    *first, last = KINDS[kind][1]
    word = args[0] if args else ""
    if word not in (*first, last, *_HELP):
        raise InputError(
            f"the first word must be {', '.join(first)} or {last}, got {repr(word) if word else 'nothing'}"
        )


def spelled(option: str) -> str:
    """Spell an option for a person: with hyphens, unless it is a key within a group of a YAML file."""
    return option if "." in option else option.replace("_", "-")
