"""The help of the training commands, without an import of torch; `--help-all` shows every option.

Defaults stand in brackets; a test compares them with the options themselves.
"""

import argparse
from collections.abc import Sequence

from headmix_vision.console import command_words
from headmix_vision.errors import InputError

Options = dict[str, str]

KINDS = {
    "classifier": ("Train and evaluate image classifiers.", ("fit", "validate", "test", "predict")),
    "generator": ("Train generators of images and videos.", ("fit", "validate")),
    "distilled": (
        "Train a generator to match a teacher with another attention. For classifiers: headmix distill classifier.",
        ("fit", "validate"),
    ),
    "distilled_classifier": (
        "Swap the attention of a classifier or backbone, and train it after the original.",
        ("fit", "validate", "test", "predict"),
    ),
}
DESCRIPTIONS = {
    "fit": "Train a model; without a recipe, a small one on handwritten digits.",
    "validate": "Measure a run's model on the validation split.",
    "test": "Measure a run's model on the test split.",
    "predict": "Predict the classes of images with a run's model.",
}

_HELP = ("-h", "--help", "--help-all")
_START: Options = {
    "config": "YAML; later ones win, model_args as a whole",
    "run_dir": "folder of the run",
}
_RUN: Options = {
    "overwrite": "replace an earlier run in the folder",
    "ckpt_path": "go on from: last, auto (last if any), a file",
    "seed_everything": "seed of everything that is random",
    "print_config": "print the values of all options",
}
_EVALUATION: Options = {
    "ckpt_path": "best, last or a file; the best of the run if not given",
    "trust_config": "let the YAML name any class, address and folder",
}
_DRY: Options = {"dry_run": "try everything with one batch, write nothing"}
_NETWORK: Options = {
    "model.name": "name in timm",
    "model.num_classes": "classes; the model's if not given",
    "model.model_args": "further ones: --model.model_args.cpe true",
    "model.checkpoint": "start weights",
}
_TRAINING: Options = {
    "trainer.max_epochs": "length of the run",
    "model.optimizer.opt": "optimizer in timm (adamw)",
    "ema.decay": "decay of the EMA; null for none (0.9996)",
    "analysis.every_n_epochs": "log ranks of attention; never if not given",
}
_DATA: Options = {
    "data.dataset": "digits, folder, torch/NAME, ... (digits)",
    "data.root": "place of the data",
    "data.num_workers": "processes that read images",
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
    "best.monitor": "metric that selects the best checkpoint (val/top1)",
}
_GENERATOR: Options = {
    "model.optimizer.lr": "peak learning rate (0.0001)",
    "model.optimizer.weight_decay": "weight decay",
    "model.schedule.warmup_epochs": "epochs of warm-up",
    "model.vae": "autoencoder of the latents; none for pixels",
    "model.objective.kind": "flow or ddpm (flow)",
    "samples.every_n_steps": "draw samples every so many steps; null for never (1000)",
    "fid.every_n_epochs": "score samples every so many epochs; never if not given",
}

_STUDENT: Options = {
    "model.teacher": "run, .ckpt, export, name in timm, local-dir:FOLDER",
    "model.teacher_checkpoint": "weights of a name in timm",
    "model.core": "new core (mhla)",
    "model.layers": "layers to swap, by number or name; all if not given",
    "model.softmax_every": "k: the first of each k layers stays; 0 for none",
    "model.swap_args": "further ones: --model.swap_args.block_grid '[4,4]'",
    "model.img_size": "size of the input; else the teacher's",
    "model.labelled": "whether accuracy is measured, too",
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
    "early_stopping.patience": "end a stage after so many validations without a gain",
    "best.monitor": "metric that selects the best checkpoint (val/feature_cosine)",
}


def common_options(subcommand: str, recipes: str) -> dict[str, Options]:
    """Return the common options of a subcommand with their help, by the title of their group.

    Args:
        subcommand: `fit`, `validate`, `test` or `predict`.
        recipes: `cls` for classifiers, `gen` for generators, `distill` for distilled classifiers.
    """
    generator = recipes == "gen"
    if subcommand != "fit":
        paths = {"data.predict_path": "image or folder of images"} if subcommand == "predict" else {}
        batch = {"data.eval_batch_size": "samples per process and step"}
        return {"run": _START | _EVALUATION | _DRY, "data": paths | _DATA | batch, "devices": _DEVICES}
    if recipes == "distill":
        run, data = _START | _RUN | _DRY, _DATA | {"data.batch_size": "samples per process and step (128)"}
        return {"run": run, "model": _STUDENT, "training": _STAGES, "data": data, "devices": _DEVICES}
    size = {"model.input_size" if generator else "model.img_size": "size of the input; else the model's"}
    batch = {"data.batch_size": f"samples per process and step ({256 if generator else 128})"}
    training = _TRAINING | (_GENERATOR if generator else _CLASSIFIER)
    return {
        "run": _START | _RUN | _DRY,
        "model": _NETWORK | size,
        "training": training,
        "data": _DATA | batch,
        "devices": _DEVICES,
    }


def subcommand_help(subcommand: str, recipes: str) -> str:
    """Return the help of a subcommand: its common options."""
    prog = " ".join([*command_words(), subcommand])
    shown = argparse.ArgumentParser(
        prog,
        f"{prog} [-c RECIPE ...] [--OPTION VALUE ...]",
        DESCRIPTIONS[subcommand],
        epilog=f"All options, which are the keys of a recipe's YAML file:\n  {prog} --help-all",
        add_help=False,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=32),
    )
    for title, options in common_options(subcommand, recipes).items():
        group = shown.add_argument_group(title)
        for name, text in options.items():
            names = ["-c", "--config"] if name == "config" else [spelled(f"--{name}")]
            group.add_argument(*names, action="store_true", help=text)
    return shown.format_help()


def command_help(kind: str) -> str:
    """Return the help of a command: its subcommands."""
    about, subcommands = KINDS[kind]
    prog = " ".join(command_words())
    lines = [f"  {name:10}{DESCRIPTIONS[name]}" for name in subcommands]
    usage = f"usage: {prog} {{{','.join(subcommands)}}} [-c RECIPE ...] [--OPTION VALUE ...]"
    return "\n".join([usage, "", about, "", *lines, "", f"{prog} {subcommands[0]} --help shows its options."]) + "\n"


def asked_help(kind: str, args: Sequence[str]) -> str | None:
    """Return the help that a command line asks for; None if it asks for something else, or for help among options."""
    *words, last = args or [""]
    if not words and last in _HELP:
        return command_help(kind)
    if last not in ("-h", "--help"):
        return None
    if len(words) == 1 and words[0] in KINDS[kind][1]:
        return subcommand_help(words[0], {"classifier": "cls", "distilled_classifier": "distill"}.get(kind, "gen"))
    return None


def check_subcommand(kind: str, args: Sequence[str]) -> None:
    """Raise `InputError` for a command line that does not begin with what is to be done."""
    *first, last = KINDS[kind][1]
    word = args[0] if args else ""
    if word not in (*first, last, *_HELP):
        raise InputError(f"begin with {', '.join(first)} or {last}, got {repr(word) if word else 'nothing'}")


def spelled(option: str) -> str:
    """Spell an option for a person: with hyphens, unless it is a key within a group of a YAML file."""
    return option if "." in option else option.replace("_", "-")
