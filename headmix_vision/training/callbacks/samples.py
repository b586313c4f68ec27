"""Draw samples of a generator while it trains, as pictures and for a score."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor

from headmix_vision.data.batches import deal_batches
from headmix_vision.diffusion.denoising import Guidance, NonFiniteSamplesError, create_scheduler, set_steps
from headmix_vision.diffusion.objectives import NUM_TIMESTEPS
from headmix_vision.diffusion.pipeline import HeadMixDiTPipeline
from headmix_vision.errors import InputError
from headmix_vision.evaluation.extractors import FeatureExtractor, open_extractor
from headmix_vision.evaluation.frechet import Gaussian, Moments, Statistics, frechet_distance
from headmix_vision.evaluation.sample_sets import SampleSet, describe_size
from headmix_vision.evaluation.sample_sources import TensorSamples
from headmix_vision.evaluation.scores import Scorer, open_side
from headmix_vision.files.pictures import write_png
from headmix_vision.files.video import write_video
from headmix_vision.models.autoencoders import check_source, downsampling, load_autoencoder
from headmix_vision.processes import Processes
from headmix_vision.sampling.folder import draw_grid, draw_strips
from headmix_vision.sampling.planning import SamplingPlan, named, sample_batch
from headmix_vision.training.callbacks.ema import EmaWithWarmup
from headmix_vision.training.callbacks.non_finite import NonFiniteError
from headmix_vision.training.options import FidConfig, SampleGridConfig
from headmix_vision.training.sharding import whole_network

T = TypeVar("T")


class ImageSampler:
    """Draw samples of a module that is being trained, or of its average, for all callbacks with one autoencoder.

    The autoencoder lives here, outside of the module, so that neither the average nor a checkpoint copies it.

    Args:
        vae: Autoencoder of the latents, a local directory or a hub id; None for pixels.
        fetch: Whether a hub id is fetched; else it must be in the hub's cache.

    Raises:
        InputError: If `vae` is neither a folder nor a hub id.
    """

    def __init__(self, vae: str | None, *, fetch: bool = False) -> None:
        if vae is not None:
            check_source(vae)
        self.vae_source, self._fetch = vae, fetch
        self._vae: Any = None

    def check(self, module: LightningModule, plan: SamplingPlan, option: str) -> None:
        """Check that a plan can be drawn with a module, before any training.

        Raises:
            InputError: If scheduler, steps or guidance do not fit the model; it names the group of options.
        """
        net: Any = module.net
        scheduler = create_scheduler(plan.scheduler, module.objective_config)  # type: ignore[arg-type]
        if plan.steps > NUM_TIMESTEPS:
            raise InputError(f"{option}.steps must be at most {NUM_TIMESTEPS}, got {plan.steps}")
        with named(f"{option}.steps={plan.steps}"):
            set_steps(scheduler, plan.steps, "cpu")
        if plan.guidance.enabled and not net.has_null_class:
            raise InputError(f"{option}.guidance={plan.guidance.scale} needs a model with a null class: set it to 1")

    def makes_images(self, module: LightningModule) -> bool:
        """Return whether the model makes pixels, or latents that can be decoded."""
        net: Any = module.net
        return self.vae_source is not None or net.in_channels in (1, 3)

    def open(self) -> None:
        """Load the autoencoder, unless it is here already.

        Raises:
            InputError: If there is none.
        """
        if self.vae_source is not None and self._vae is None:
            self._vae = load_autoencoder(self.vae_source, fetch=self._fetch).module

    def image_shape(self, module: LightningModule) -> tuple[int, int, int]:
        """Return channels, height and width of the images, or of a clip's frames, in pixels; after `open`."""
        net: Any = module.net
        height, width = net.input_size[-2:]
        if self._vae is None:
            return net.in_channels, height, width
        factor = downsampling(self._vae)
        return int(self._vae.config.get("out_channels", 3)), height * factor, width * factor

    def frame_rate(self, module: LightningModule) -> float:
        """Return the frames a second of the clips that a model makes, in training; after `open`."""
        return self._pipeline(module, None).check_frame_rate(None)

    def draw(self, trainer: Trainer, module: LightningModule, plan: SamplingPlan, indices: Sequence[int]) -> np.ndarray:
        """Draw samples in the trainer's precision.

        Args:
            trainer: The module's trainer.
            module: The module, or its average.
            plan: What to draw.
            indices: Which samples of the plan.

        Returns:
            uint8 [N, H, W, channels], or clips [N, T, H, W, channels].

        Raises:
            NonFiniteError: If a sample became infinite or not a number.
        """
        net: Any = module.net
        was_training = net.training
        net.eval()
        try:
            pipeline = self._pipeline(module, plan.scheduler)
            pipeline.set_progress_bar_config(disable=True)
            with trainer.precision_plugin.forward_context():
                return sample_batch(pipeline, plan, indices)
        except NonFiniteSamplesError as error:
            raise NonFiniteError(f"{error} (drawn after step {trainer.global_step} of training)") from None
        finally:
            net.train(was_training)

    def draw_shared(
        self,
        trainer: Trainer,
        module: LightningModule,
        plan: SamplingPlan,
        num: int,
        batch_size: int,
        then: Callable[[np.ndarray], T],
    ) -> Iterator[T]:
        """Draw samples 0 to `num` - 1 on all processes of the trainer, which share the batches.

        Every batch the network sees has `batch_size` samples, the last one filled up, so that a sample does not depend
        on the number of processes. All processes draw equally many batches, some of them the last one again, as
        networks whose weights are spread over processes compute together.

        Args:
            trainer: The module's trainer.
            module: The module, or its average.
            plan: What to draw.
            num: Number of samples.
            batch_size: Samples at a time in each process.
            then: What to make of the samples of a batch, without those that fill it up, where they were drawn.

        Yields:
            What `then` returned for each batch, in the order of samples, on all processes.
        """
        rank, world_size = trainer.global_rank, trainer.world_size
        batches = deal_batches(range(num), batch_size)
        rounds = -(-len(batches) // world_size)

        def share() -> Iterator[T | None]:
            for place in range(rank, rounds * world_size, world_size):
                indices = batches[min(place, len(batches) - 1)]
                filled = indices + [indices[-1]] * (batch_size - len(indices))
                samples = self.draw(trainer, module, plan, filled)[: len(indices)]
                yield then(samples) if place < len(batches) else None

        return Processes(rank, world_size).in_turn(share(), rounds)

    def _pipeline(self, module: LightningModule, scheduler: str | None) -> HeadMixDiTPipeline:
        net: Any = module.net
        objective: Any = module.objective_config
        return HeadMixDiTPipeline(
            net,
            create_scheduler(scheduler, objective, clip=self._vae is None),
            vae=self._vae.to(module.device) if self._vae is not None else None,
            objective=asdict(objective),
        )


class SampleGrids(Callback):
    """Draw samples from fixed noise and labels, once with the weights being trained and once with their average.

    Files are `step_00001000_raw.png` and `step_00001000_ema.png`, tags in TensorBoard `samples/raw` and `samples/ema`.
    The picture of clips is a contact sheet, one row of frames for the first clip of each class; all clips move in a
    `.gif` beside it.

    Args:
        folder: Folder of the pictures.
        config: What to draw, and after how many steps, which must be given.
        sampler: Draws the samples.
        average: The EMA callback, if there is one.
        seed: Seed of the noise.
    """

    def __init__(
        self, folder: Path, config: SampleGridConfig, sampler: ImageSampler, average: EmaWithWarmup | None, seed: int
    ) -> None:
        assert config.every_n_steps is not None
        self.folder = folder
        self.config, self.every_n_steps = config, config.every_n_steps
        self.sampler = sampler
        self.average = average
        self.seed = seed
        self._last_step = self._end_step = 0

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Load the autoencoder, and check scheduler and labels before any training.

        Raises:
            InputError: If there is no such autoencoder, scheduler or class, or guidance is asked of a model without a
                null class.
        """
        net: Any = pl_module.net
        plan = self._plan(net)
        self.sampler.check(pl_module, plan, "samples")
        if plan.classes is not None and not all(0 <= label < net.num_classes for label in plan.classes):
            raise InputError(f"samples.classes must be from 0 to {net.num_classes - 1}, got {self.config.classes}")
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        if not self.sampler.makes_images(pl_module):
            raise InputError(
                f"the model makes latents of {net.in_channels} channels: set model.vae to see samples,"
                " or samples.every_n_steps to null"
            )
        self.sampler.open()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remember where this run starts and ends."""
        self._last_step, self._end_step = trainer.global_step, int(trainer.estimated_stepping_batches)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Draw every `every_n_steps` steps, and after the last one."""
        step, stepped = trainer.global_step, trainer.global_step != self._last_step
        self._last_step = step
        due = step % self.every_n_steps == 0 or step >= self._end_step
        if not (stepped and due) or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        average = self.average.average if self.average is not None else None
        for module, kind in ((pl_module, "raw"), (average, "ema")):
            if module is not None:
                with whole_network(trainer, module):
                    self.draw(trainer, module, kind)

    def draw(self, trainer: Trainer, module: LightningModule, kind: str) -> None:
        """Draw the samples of one module, `raw` or `ema`, of the present step; all processes share the rows."""
        plan, config = self._plan(module.net), self.config
        columns = len(plan.classes) if plan.classes is not None else 10
        num = columns * config.rows
        images = np.concatenate([*self.sampler.draw_shared(trainer, module, plan, num, columns, np.asarray)])
        if not trainer.is_global_zero:
            return
        labels = plan.labels(range(num))
        names = getattr(trainer.lightning_module, "class_names", None)  # the average was copied before data were open
        captions = None if labels is None else [names[label] if names else str(label) for label in labels]
        weights = "EMA" if kind == "ema" else "weights being trained"
        title = f"step {trainer.global_step}, {weights}, {config.steps} steps, guidance {config.guidance:g}"
        picture = draw_grid(images, captions, title, columns)
        path = self.folder / f"step_{trainer.global_step:08d}_{kind}"
        if images.ndim == 5:
            rate = self.sampler.frame_rate(module)
            write_video(path.with_suffix(".gif"), picture, rate)
            picture = draw_strips(images[:columns], captions, title, rate)
        write_png(path.with_suffix(".png"), picture)
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_image(f"samples/{kind}", picture, trainer.global_step, dataformats="HWC")

    def _plan(self, net: Any) -> SamplingPlan:
        config, classes = self.config, None
        if net.num_classes:
            classes = tuple(config.classes if config.classes is not None else range(min(10, net.num_classes)))
        return SamplingPlan(self.seed, classes, config.steps, config.scheduler, Guidance(config.guidance), None)


class SampleFid(Callback):
    """Score samples from fixed noise every few epochs and log `val/fid`.

    All processes draw and extract features: they share the batches of samples, and of real images. Each batch is one
    that a single process would have, and the features are summed up in the order of samples, so that the score does not
    depend on the number of processes. The extractor lives here, outside of the module.

    Args:
        config: What to score, and after how many epochs, which must be given.
        sampler: Draws the samples.
        average: The EMA callback, if there is one.
        root: Place of the real images' data set, if it needs one.
        seed: Seed of the noise.
        background: Colour behind transparent pixels of the real images.
    """

    def __init__(
        self,
        config: FidConfig,
        sampler: ImageSampler,
        average: EmaWithWarmup | None,
        root: str | None,
        seed: int,
        background: str = "white",
    ) -> None:
        assert config.every_n_epochs is not None
        self.config, self.every_n_epochs = config, config.every_n_epochs
        self.sampler = sampler
        self.average = average
        self.root = root
        self.background = background
        self.seed = seed
        self._extractor: FeatureExtractor | None = None
        self._real: Gaussian | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Open extractor, autoencoder and real images before any training, and read the real images' features.

        Raises:
            InputError: If one of them is missing, or does not fit the images that the model makes.
        """
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        if len(pl_module.net.input_size) != 2:  # type: ignore[union-attr, arg-type]
            raise InputError(
                "fid.every_n_epochs must be null for a model of clips: FID is of images;"
                " draw clips by headmix sample videos and score them by headmix evaluate fvd"
            )
        self.sampler.check(pl_module, self._plan(pl_module), "fid")
        if not self.sampler.makes_images(pl_module):
            channels = pl_module.net.in_channels  # type: ignore[union-attr]
            raise InputError(f"the model makes latents of {channels} channels: fid needs model.vae")
        self._extractor = open_extractor(self.config.features, pl_module.device)
        self.sampler.open()
        channels, height, width = self.sampler.image_shape(pl_module)
        real = open_side(
            self.config.real,
            self._extractor,
            image_size=height if height == width else None,
            root=self.root,
            background=self.background,
        )
        black = SampleSet(
            TensorSamples(torch.zeros(2, channels, height, width, dtype=torch.uint8)), self._extractor.mode
        )
        size = real.description.get("size", black.size)
        if list(size) != list(black.size):
            raise InputError(
                f"fid.real={self.config.real} is of {describe_size(size)}, the model makes {describe_size(black.size)}"
            )
        self._real = self._real_gaussian(trainer, real)
        num_features = self._extractor(next(black.batches(2)))["features"].shape[1]
        if len(self._real.mean) != num_features:
            raise InputError(
                f"fid.real={self.config.real} is of {len(self._real.mean)} features,"
                f" fid.features={self.config.features} makes {num_features}"
            )

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Score after every `every_n_epochs` epochs."""
        if self._real is None or (trainer.current_epoch + 1) % self.every_n_epochs:
            return
        average = self.average.average if self.average is not None else None
        module, size = average or pl_module, min(self.config.batch_size, self.config.num)
        with whole_network(trainer, module):
            drawn = self.sampler.draw_shared(trainer, module, self._plan(module), self.config.num, size, self._features)
            fake = self._gaussian(drawn)
        if trainer.is_global_zero:
            value = frechet_distance(self._real, fake)
            pl_module.log_now({"val/fid": value}, trainer.global_step - 1)  # type: ignore[operator]

    def _real_gaussian(self, trainer: Trainer, real: SampleSet | Statistics) -> Gaussian:
        if isinstance(real, Statistics):
            return real.gaussians["features"]
        assert self._extractor is not None
        processes = Processes(trainer.global_rank, trainer.world_size)
        scorer = Scorer(self._extractor, self.config.batch_size, processes=processes)
        made = scorer.of_all(real, lambda first, batch, outputs: {"features": outputs["features"]})
        return self._gaussian(batch["features"] for batch in made)

    def _features(self, pixels: np.ndarray) -> Tensor:
        """Extract the features of images, uint8 [B, H, W, channels]."""
        assert self._extractor is not None
        images = SampleSet(TensorSamples(torch.from_numpy(pixels).permute(0, 3, 1, 2)), self._extractor.mode)
        return self._extractor(next(images.batches(len(pixels))))["features"].cpu()

    def _gaussian(self, features: Iterable[Tensor]) -> Gaussian:
        """Compute the Gaussian of features that come in batches."""
        assert self._extractor is not None
        moments = Moments()
        for batch in features:
            moments.update(batch.to(self._extractor.device))
        return moments.gaussian()

    def _plan(self, module: LightningModule) -> SamplingPlan:
        config, num_classes = self.config, int(module.net.num_classes)  # type: ignore[arg-type, union-attr]
        classes = tuple(range(num_classes)) if num_classes else None
        return SamplingPlan(self.seed, classes, config.steps, config.scheduler, Guidance(config.guidance), None)
