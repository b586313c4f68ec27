"""Define the command line that trains generators: `fit` and `validate`."""

from pathlib import Path
from typing import Any, ClassVar

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.cli import LightningArgumentParser

from headmix_vision.data.datasets.latents import MANIFEST, find_caches, read_manifest
from headmix_vision.data.generation import GenerationData
from headmix_vision.errors import InputError
from headmix_vision.models.autoencoders import PIXELS
from headmix_vision.runs.directory import CURVES, SAMPLES
from headmix_vision.training.base_cli import RunCLI
from headmix_vision.training.callbacks.curves import GENERATOR_PANELS, LearningCurves
from headmix_vision.training.callbacks.ema import EmaWithWarmup
from headmix_vision.training.callbacks.samples import ImageSampler, SampleFid, SampleGrids
from headmix_vision.training.generator import ImageGenerator
from headmix_vision.training.options import FidConfig, SampleGridConfig


class GenerationCLI(RunCLI):
    """Train generators from the command line: `headmix train-gen`."""

    module_class: ClassVar[type[LightningModule]] = ImageGenerator
    data_class = GenerationData
    kind = "generator"
    runs_folder = "runs/gen"

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the options of samples and scores while training."""
        super().add_arguments_to_parser(parser)
        parser.add_class_arguments(SampleGridConfig, "samples")
        parser.add_class_arguments(FidConfig, "fid")

    def default_run_name(self) -> str:
        """Join the names of the config files and of the pipeline of a transformer; else as for all runs."""
        transformer = self.options.model.transformer
        return (
            super().default_run_name()
            if transformer is None
            else "-".join([*self.config_names(), Path(transformer).name])
        )

    def check_model(self, checkpoint: dict[str, Any]) -> None:
        """Leave the comparison of a transformer to the module, which knows it."""
        if self.options.model.transformer is None:
            super().check_model(checkpoint)

    def complete_options(self) -> None:
        """Refuse samples while a transformer of diffusers trains.

        Raises:
            InputError: If samples or scores are asked for.
        """
        options = self.options
        if options.model.transformer is None or self.config.subcommand != "fit":
            return
        for name in ("samples.every_n_steps", "fid.every_n_epochs"):
            if options.get(name) is not None:
                raise InputError(f"{name} must be null for model.transformer: diffusers draws after headmix export")

    def fit_callbacks(self, run_dir: Path, average: EmaWithWarmup | None) -> list[Callback]:
        """Return sample grids and scores where they are asked for, and learning curves."""
        options, made = self.options, self.config_init[self.config.subcommand]
        vae, seed = options.model.vae, options.seed_everything
        self._check_vae(vae)
        sampler = ImageSampler(vae, fetch=self.trust.knows(vae))
        callbacks: list[Callback] = []
        if made.samples.every_n_steps is not None:
            callbacks.append(SampleGrids(run_dir / SAMPLES, made.samples, sampler, average, seed))
        if made.fid.every_n_epochs is not None:
            background = options.data.background
            callbacks.append(SampleFid(made.fid, sampler, average, options.data.root, seed, background))
        curves = LearningCurves(
            run_dir / CURVES, lambda: self.metrics.rows, panels=GENERATOR_PANELS, needs="train/loss"
        )
        return [*callbacks, curves]

    def _check_vae(self, vae: str | None) -> None:
        """Refuse a recipe's autoencoder where another one, which is here, made the latents."""
        made_by = None if vae is None or "model.vae" in self.given else self._autoencoder()
        if made_by is not None and made_by != vae and Path(made_by).is_dir():
            root = self.options.data.root
            raise InputError(
                f"the recipe decodes with {vae}, but {made_by} made the latents of {root}: give --model.vae"
                f" {made_by}, or --model.vae {vae} if both are the same autoencoder"
            )

    def _autoencoder(self) -> str | None:
        """Return where the autoencoder lay that made the training latents; None without latents of one."""
        data = self.options.data
        if data.dataset != "latents" or data.root is None:
            return None
        cache, *_ = find_caches(data.root, data.train_split, data.train_split)
        if not (cache / MANIFEST).is_file():
            return None  # the data set refuses its root
        source: str | None = read_manifest(cache)["autoencoder"].get("source")
        return None if source == PIXELS else source

    def after_fit(self) -> None:
        """Sum up the training loss, if an epoch was finished, and where the files are."""
        rows = [row for row in self.metrics.rows if "train/loss" in row]
        run_dir = Path(self.options.run_dir)
        if not self.trainer.is_global_zero or self.options.trainer.fast_dev_run:
            return
        loss = f"training loss {rows[-1]['train/loss']:.4f} (epoch {rows[-1]['epoch'] + 1:.0f}) · " if rows else ""
        samples = "videos" if len(self.model.net.input_size) == 3 else "images"
        drawn = f" · samples {run_dir / SAMPLES}" if (run_dir / SAMPLES).is_dir() else ""
        where = f"run {run_dir}{drawn}"
        made_by = None if self.options.model.vae else self._autoencoder()
        decoded = f" --vae {made_by}" if made_by else ""
        self.summary = f"{loss}{where} · next: headmix sample {samples} --model {run_dir}{decoded}"
        if self.options.model.transformer is not None:
            self.summary = f"{loss}run {run_dir} · next: headmix export {run_dir} --out FOLDER"
