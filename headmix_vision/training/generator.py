"""Define the LightningModule that trains one diffusion transformer.

Shapes: B batch, C channels, *grid the axes of the network's input (H, W of images; T, H, W of clips), which are pixels
in [-1, 1] or scaled latents.
"""

import math
from dataclasses import asdict, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torchmetrics import MeanMetric

from headmix_vision.data.seeding import derive_seed
from headmix_vision.diffusion.objectives import NUM_TIMESTEPS, ObjectiveConfig, create_objective
from headmix_vision.errors import InputError, check_counts
from headmix_vision.models.lora import LoraConfig, LoraTransformer
from headmix_vision.models.pipeline_folder import read_shift
from headmix_vision.models.prompted import PromptedTransformer, open_prompted
from headmix_vision.runs.checkpoints import DESCRIPTION_KEY
from headmix_vision.runs.networks import create_generator
from headmix_vision.runs.prompted import check_latents, load_prompted
from headmix_vision.training.base_module import BaseModule
from headmix_vision.training.callbacks.non_finite import require_finite
from headmix_vision.training.options import OptimizerConfig, ScheduleConfig
from headmix_vision.training.resuming import check_sums

Batch = tuple[Tensor, Tensor]
LEVELS = 10
_VALIDATION = 2  # stream of random numbers, beside the streams of training

DEFAULT_OBJECTIVE = ObjectiveConfig()
DEFAULT_OPTIMIZER = OptimizerConfig(lr=1e-4, weight_decay=0.0)
NO_LORA = LoraConfig()
DEFAULT_SCHEDULE = ScheduleConfig(sched="constant", warmup_epochs=0.0)


class ImageGenerator(BaseModule):
    """Train one diffusion transformer on images, clips or their latents, with labels or prompts.

    Random numbers of a training batch (noise, times, dropped labels) follow from the seed, the epoch, the batch index
    and the rank alone; in validation from the seed and the batch index, so that its loss is comparable.

    Args:
        name: Name of the model in timm, for example `dit_mhla_s_2`; null where `transformer` names the model.
        num_classes: Number of classes, 0 for an unconditional model; the model's default when null.
        input_size: Size of the input, one number or one for each axis of the grid; the model's default when null.
        model_args: Further arguments of `timm.create_model`, for example `{cpe: true, output_gate: true}`; of a
            transformer those of `wan_to_mhla` or `sana_to_mhla`, for example `{block_grid: [3, 5, 10]}`.
        checkpoint: Start weights: a `.ckpt` of this package, a `.safetensors`, or an official DiT's `.pt`. Weights that
            they lack are new.
        vae: Autoencoder of the latents, a local directory or a hub id; null for pixels. It is used to draw samples and
            recorded for `headmix sample`, but not part of the model.
        objective: What is learned.
        optimizer: Optimizer.
        schedule: Learning rate schedule.
        context_parallel: Number of neighbouring processes among which the tokens of each training sample are divided,
            for images or clips that exceed one GPU's memory. It divides the number of processes.
        spread_tokens: Former name of `context_parallel`.
        transformer: Pipeline folder of diffusers whose Wan or Sana transformer is converted and trained on latents with
            prompts.
        pipeline_shift: Whether `objective.shift` is that of the scheduler of the transformer's pipeline.
        core: New core of the transformer.
        layers: Layers of the transformer that get the new core, from 0; all when null.
        lora: Adapters of the transformer.
        common: `seed`, `compile` and `grad_checkpointing`, see `BaseModule`.

    Raises:
        InputError: If the model is unknown or no generator, the start weights do not fit it, or the learned variance is
            asked of one but not of the other.
    """

    level_loss: Tensor
    net: Any

    def __init__(
        self,
        name: str | None = None,
        num_classes: int | None = None,
        input_size: int | list[int] | None = None,
        model_args: dict[str, Any] | None = None,
        checkpoint: str | None = None,
        vae: str | None = None,
        objective: ObjectiveConfig = DEFAULT_OBJECTIVE,
        optimizer: OptimizerConfig = DEFAULT_OPTIMIZER,
        schedule: ScheduleConfig = DEFAULT_SCHEDULE,
        context_parallel: int = 1,
        spread_tokens: int = 1,
        transformer: str | None = None,
        pipeline_shift: bool = True,
        core: Literal["mhla"] = "mhla",
        layers: list[int] | None = None,
        lora: LoraConfig = NO_LORA,
        **common: Any,
    ) -> None:
        super().__init__(optimizer, schedule, **common)
        check_counts(1, **{"model.context_parallel": context_parallel, "model.spread_tokens": spread_tokens})
        self.sharers = max(context_parallel, spread_tokens)
        if 1 < min(context_parallel, spread_tokens) < self.sharers:
            raise InputError(
                f"model.spread_tokens={spread_tokens} is the former name of model.context_parallel={context_parallel}:"
                " set one of them"
            )
        adapters = None
        if transformer is None:
            if lora.rank:
                raise InputError("model.lora applies only to model.transformer: remove it")
            arguments = {"learned_variance": objective.learned_variance, **(model_args or {})}
            self.net = self._create(name, num_classes, input_size, arguments, checkpoint, layers)
        else:
            given = {"name": name, "num_classes": num_classes, "input_size": input_size, "vae": vae}
            if pipeline_shift and objective.shift != DEFAULT_OBJECTIVE.shift:
                raise InputError(f"objective.shift={objective.shift} has no effect: set model.pipeline_shift to false")
            objective = replace(objective, shift=read_shift(transformer)) if pipeline_shift else objective
            if lora.rank and checkpoint is not None:
                raise InputError(
                    f"model.checkpoint={checkpoint} does not apply to model.lora: export its run, and set"
                    " model.transformer to the folder"
                )
            self._convert(transformer, layers, model_args, checkpoint, objective, given)
            if lora.rank:
                self.net = LoraTransformer(self.net.transformer, lora)
                adapters = {**asdict(lora), "layers": layers, "frozen_sha256": self.net.frozen_sha256}
            name, arguments, vae = type(self.net.transformer).__name__, model_args or {}, transformer
        if (self.net.out_channels != self.net.in_channels) != objective.learned_variance:
            raise InputError("model_args.learned_variance and objective.learned_variance must agree")
        if objective.clean_prefix and len(self.net.input_size) != 3:
            raise InputError(f"objective.clean_prefix is of clips: it must be 0 for {name}, a model of images")
        if objective.kind == "ddpm" and getattr(self.net, "block_frames", None):
            raise InputError("core_args.causal='rows' needs objective.kind=flow: DDPM has no noise level of zero")
        if objective.prefix_class_dropout and not self.net.has_null_class:
            raise InputError("objective.prefix_class_dropout needs a model with a null class: set class_dropout")
        self.num_classes = int(self.net.num_classes)
        self.description: dict[str, Any] = {
            "kind": "generator",
            "name": name,
            "num_classes": self.num_classes,
            "input_size": list(self.net.input_size),
            "model_args": arguments,
            "architecture": self.net.architecture,
            "objective": asdict(objective),
            "vae": vae,
            "lora": adapters,
        }
        self.objective_config = objective
        self.objective = create_objective(objective)
        self.vae_source = vae
        self.val_loss = MeanMetric(nan_strategy=math.inf)  # by default it leaves NaN out

    @staticmethod
    def _create(
        name: str | None,
        num_classes: int | None,
        input_size: int | list[int] | None,
        arguments: dict[str, Any],
        checkpoint: str | None,
        layers: list[int] | None,
    ) -> nn.Module:
        """Make a model of timm."""
        if name is None:
            raise InputError("model.name is null: give the name of a generator in timm, or model.transformer")
        if layers is not None:
            raise InputError("model.layers applies only to model.transformer: remove it")
        return create_generator(name, num_classes, input_size, arguments, checkpoint)

    def _convert(
        self,
        folder: str,
        layers: list[int] | None,
        options: dict[str, Any] | None,
        checkpoint: str | None,
        objective: ObjectiveConfig,
        given: dict[str, Any],
    ) -> None:
        """Make the network of a pipeline's transformer; refuse options that are for models of timm."""
        for option, value in given.items():
            if value is not None:
                raise InputError(f"model.{option}={value} does not apply to model.transformer: set it to null")
        for option in ("learned_variance", "clean_prefix"):
            if getattr(objective, option):
                raise InputError(f"objective.{option} does not apply to model.transformer: remove it")
        if objective.kind != "flow":
            raise InputError(f"objective.kind={objective.kind}, it must be flow for model.transformer")
        if self.sharers > 1:
            raise InputError("model.context_parallel must be 1 for model.transformer")
        self.net = open_prompted(folder, layers, options)
        if checkpoint is not None:
            load_prompted(self.net, checkpoint)

    def forward(self, x: Tensor, t: Tensor, y: Any = None) -> Tensor:
        """Return the prediction for x [B, C, *grid] at times t, [B] or [B, T], with labels y [B] or prompts."""
        return self.net(x, t, y)

    def setup(self, stage: str) -> None:
        """Take the class names over from the data, and check that the latents are those of the pipeline.

        Raises:
            InputError: If the latents have other channels, another autoencoder or prompts of another text encoder.
        """
        datamodule = getattr(self.trainer, "datamodule", None)
        self.class_names = getattr(datamodule, "class_names", None) or self.class_names
        if isinstance(self.net, PromptedTransformer) and datamodule is not None:
            made_by = check_latents(self.net, str(self.vae_source), datamodule.manifests())
            self.description["text_encoder"] = made_by

    def configure_model(self) -> None:
        """Set up context parallelism, if asked to; then as for all networks.

        Raises:
            InputError: If the number of processes is not a multiple of `context_parallel`, or the attention does not
                support it.
        """
        net: Any = self.net
        sharers, processes = self.sharers, self.trainer.world_size
        if sharers > 1 and self.trainer.state.fn == "fit":
            if processes % sharers:
                raise InputError(
                    f"model.context_parallel={sharers} needs a multiple of {sharers} processes, got {processes}: set"
                    " trainer.devices"
                )
            device, shape = self.trainer.strategy.root_device.type, (processes // sharers, sharers)
            mesh = init_device_mesh(device, shape, mesh_dim_names=("batches", "tokens"))
            net.context_parallel(mesh["tokens"])
        super().configure_model()

    def on_train_start(self) -> None:
        """Make the schedule and the sums of the loss by noise level."""
        super().on_train_start()
        if not hasattr(self, "level_loss"):
            self.level_loss = torch.zeros(LEVELS, 2)
        self.level_loss = self.level_loss.to(self.device)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the mean loss of x [B, C, *grid], float32, and labels [B], int64."""
        x0, labels = batch
        times = self._draw_times(x0, x0.device)
        losses = self._losses(x0, self._without_some(labels, times), times, torch.randn_like(x0))
        loss = losses.mean()
        self.track_loss(loss, len(x0))
        level = (_noisy_time(times) / NUM_TIMESTEPS * LEVELS).long().clamp(max=LEVELS - 1)
        self.level_loss.index_add_(0, level, torch.stack([losses.detach(), torch.ones_like(losses)], dim=1))
        # gradients belong to a part of the tokens, and processes take their mean where a sum is due
        return loss * self.sharers if self.sharers > 1 else loss

    def _draw_times(self, x0: Tensor, device: torch.device | str = "cpu") -> Tensor:
        """Draw the times of a batch, [B] or, of clips some of which continue a clean prefix, [B, T]."""
        if x0.ndim < 5:
            return self.objective.draw_times(len(x0), device)
        net: Any = self.net
        return self.objective.draw_times(len(x0), device, x0.shape[2], net.block_frames or net.patch_size[0])

    def _without_some(self, labels: Tensor, times: Tensor) -> Tensor:
        """Return the labels [B], that of no class for some of the clips that continue a prefix."""
        share = self.objective_config.prefix_class_dropout
        if not share or times.ndim == 1:
            return labels
        continued = times.amin(1) < times.amax(1)
        dropped = torch.rand(len(labels), device=labels.device) < share
        return torch.where(continued & dropped, self.num_classes, labels)

    def _losses(self, x0: Tensor, labels: Tensor, times: Tensor, noise: Tensor) -> Tensor:
        y = self._condition(labels)
        return self.objective.losses(lambda x, t: self.net(x, t, y), x0, times, noise)

    def _condition(self, labels: Any) -> Any:
        """Return the labels or prompts of a batch; None for a model without."""
        return labels if self.num_classes or isinstance(self.net, PromptedTransformer) else None

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log the mean loss of a finished epoch, also by tenths of the noise level."""
        if self.trainer.is_last_batch:
            sums, counts = self.sums_of_processes(self.level_loss).sum(0).T.tolist()
            means = {f"train/loss_level_{i}": s / n for i, (s, n) in enumerate(zip(sums, counts, strict=True)) if n}
            self.log_now(means, self.trainer.global_step - 1)
            self.level_loss.zero_()
        super().on_train_batch_end(outputs, batch, batch_idx)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Add the loss of x [B, C, *grid] and labels [B], with times and noise that are the same every time."""
        x0, labels = batch
        if not len(x0):
            return
        losses = self._losses(x0, labels, *self._validation_noise(x0, batch_idx))
        self.val_loss.update(losses.mean(), weight=len(x0))

    def network_inputs(self, batch: Batch) -> tuple[Tensor, Tensor, Any]:
        """Return noisy data, times and labels, with the times and noise of a first batch of validation."""
        x0, labels = batch
        times, noise = self._validation_noise(x0, 0)
        return self.objective.add_noise(x0, times, noise), times, self._condition(labels)

    def _validation_noise(self, x0: Tensor, batch_idx: int) -> tuple[Tensor, Tensor]:
        """Draw times, [B] or [B, T], and noise, as x0, that are the same in every validation."""
        seed = derive_seed(self.seed, batch_idx, self.global_rank, _VALIDATION)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            times, noise = self._draw_times(x0), torch.randn(x0.shape)
        return times.to(x0.device), noise.to(x0.device)

    def on_validation_epoch_end(self) -> None:
        """Log the loss of the validation split."""
        if self.val_loss.update_called:
            loss = self.val_loss.compute()
            require_finite(loss, "the validation loss", self.trainer)
            self.log("val/loss", loss, prog_bar=True)
        self.val_loss.reset()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Describe the model, and keep the running means of the loss."""
        checkpoint[DESCRIPTION_KEY] = {**self.description, "class_names": self.class_names}
        super().on_save_checkpoint(checkpoint)
        if hasattr(self, "level_loss"):
            checkpoint["level_loss"] = self.sums_of_processes(self.level_loss)

    def check_settings(self, stored: dict[str, Any]) -> None:
        """Refuse another objective, and other options of a converted transformer."""
        if isinstance(self.net, PromptedTransformer) and stored["architecture"] != self.net.architecture:
            names = [name for name, value in self.net.architecture.items() if stored["architecture"].get(name) != value]
            raise InputError(
                f"the checkpoint has a transformer with other options, first {min(names)} (options model.transformer,"
                " model.layers, model.model_args)"
            )
        if stored.get("lora") != self.description["lora"]:
            raise InputError(
                f"the checkpoint has model.lora={stored.get('lora')}, this run has {self.description['lora']}"
            )
        stored = stored["objective"]
        if ObjectiveConfig.from_dict(stored) != self.objective_config:
            raise InputError(f"the checkpoint was trained with objective {stored} (options model.objective)")

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the running means of the loss, and refuse a checkpoint of another model; see `BaseModule`."""
        super().on_load_checkpoint(checkpoint)
        if "level_loss" in checkpoint:
            check_sums("level_loss", checkpoint["level_loss"], 2 * LEVELS)
            self.level_loss = self.own_sums(checkpoint["level_loss"].view(-1, LEVELS, 2))


def _noisy_time(times: Tensor) -> Tensor:
    """Return the time of each sample, [B], from [B] or from [B, T] with a clean prefix."""
    return times.amax(1) if times.ndim == 2 else times
