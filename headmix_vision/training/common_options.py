"""Names the options that `--help` of a subcommand shows; `--help-all` shows every option."""

Options = dict[str, str]

DESCRIPTIONS = {
    "fit": "Train a model; without a recipe, a small one on handwritten digits.",
    "validate": "Measure a run's model on the validation split.",
    "test": "Measure a run's model on the test split.",
    "predict": "Predict the classes of images with a run's model.",
}

_START: Options = {
    "config": "YAML; later ones win, model_args as a whole",
    "run_dir": "folder of the run",
}
_RUN: Options = {
    "overwrite": "true replaces an earlier run in the folder",
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
    "model.optimizer.opt": "optimizer in timm",
    "model.optimizer.lr": "peak learning rate",
    "model.optimizer.weight_decay": "weight decay",
    "model.schedule.warmup_epochs": "epochs of warm-up",
    "ema.decay": "averaging of weights; null for none",
    "analysis.every_n_epochs": "log ranks of attention; never if not given",
}
_DATA: Options = {
    "data.dataset": "digits, folder, torch/NAME, ...",
    "data.root": "place of the data",
    "data.batch_size": "samples per process and step",
    "data.num_workers": "processes that read images",
}
_DEVICES: Options = {
    "trainer.accelerator": "cpu, gpu or auto",
    "trainer.devices": "number of devices",
    "trainer.precision": "32-true, bf16-mixed or 16-mixed",
}
_CLASSIFIER: Options = {
    "model.loss.smoothing": "label smoothing",
    "model.mixup.mixup_alpha": "mixup; 0 for none",
    "model.mixup.cutmix_alpha": "CutMix; 0 for none",
    "best.monitor": "what best.ckpt is the best of",
}
_GENERATOR: Options = {
    "model.vae": "autoencoder of the latents; none for pixels",
    "model.objective.kind": "flow or ddpm",
    "samples.every_n_steps": "draw samples every so many steps; null for never",
    "fid.every_n_epochs": "score samples every so many epochs; never if not given",
}


def common_options(subcommand: str, *, generator: bool) -> dict[str, Options]:
    """Return the common options of a subcommand with their help, by the title of their group.

    Args:
        subcommand: `fit`, `validate`, `test` or `predict`.
        generator: Whether generators are trained; else classifiers.
    """
    size = {"model.input_size" if generator else "model.img_size": "size of the input; else the model's"}
    if subcommand != "fit":
        paths = {"data.predict_path": "image or folder of images"} if subcommand == "predict" else {}
        evaluated = {name: text for name, text in _DATA.items() if name != "data.batch_size"}
        evaluated |= {"data.eval_batch_size": "samples per process and step"}
        return {"run": _START | _EVALUATION | _DRY, "data": paths | evaluated, "devices": _DEVICES}
    training = _TRAINING | (_GENERATOR if generator else _CLASSIFIER)
    return {
        "run": _START | _RUN | _DRY,
        "model": _NETWORK | size,
        "training": training,
        "data": _DATA,
        "devices": _DEVICES,
    }
