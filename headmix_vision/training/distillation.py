"""Train a student to compute what its teacher does: attention layer by layer, then features, objective or labels."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.trainer.states import TrainerFn
from timm.task import LogitDistillationTask
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import MeanMetric

from headmix_vision.diffusion.objectives import ObjectiveConfig
from headmix_vision.errors import InputError, check_counts, check_numbers
from headmix_vision.files.reading import check_fields
from headmix_vision.files.tensors import state_sha256
from headmix_vision.models.attention_errors import (
    Pairs,
    attention_errors,
    attention_pairs,
    feature_errors,
    tell_grid,
)
from headmix_vision.models.prompted import open_prompted
from headmix_vision.runs.checkpoints import find_checkpoint
from headmix_vision.runs.networks import open_network
from headmix_vision.runs.teachers import make_student, open_teacher
from headmix_vision.training.base_module import Schedule, make_schedule
from headmix_vision.training.callbacks.non_finite import require_finite
from headmix_vision.training.classifier import Batch, ImageClassifier
from headmix_vision.training.generator import ImageGenerator
from headmix_vision.training.options import (
    DEFAULT_LOSS,
    DEFAULT_OPTIMIZER,
    NO_MIXUP,
    AttentionStage,
    FeaturesStage,
    LabelsStage,
    LossConfig,
    MixupConfig,
    OptimizerConfig,
    ScheduleConfig,
    StageConfig,
)

__all__ = ["DistilledClassifier", "DistilledGenerator", "attention_errors", "attention_pairs"]
_OF_DDPM = ("prediction", "learned_variance", "beta_start", "beta_end")
_STATE = "distillation"  # entry of a checkpoint
_DEFAULT_STAGES = AttentionStage(), FeaturesStage(), LabelsStage()


class _Kept:
    """Hold something outside of the module around it: copies of the module share it, checkpoints lack it."""

    def __init__(self, kept: Any) -> None:
        self.kept = kept

    def __deepcopy__(self, memo: dict[int, Any]) -> _Kept:
        return self


def _check_teacher(checkpoint: dict[str, Any], sha256: str) -> None:
    """Raise InputError if a checkpoint's student was learning from no teacher, or from one with other weights."""
    if "teacher_sha256" not in checkpoint:
        raise InputError("the checkpoint has no teacher: go on with the command that wrote it, not headmix distill")
    if checkpoint["teacher_sha256"] != sha256:
        raise InputError(
            "the teacher has other weights than when this run began: name the teacher of then, or begin anew with"
            " --overwrite and without --ckpt-path"
        )


def _check_objective(theirs: ObjectiveConfig, ours: ObjectiveConfig) -> None:
    """Raise InputError if a teacher predicts something else than its student, or from other noise."""
    for name in ("kind", *(_OF_DDPM if ours.kind == "ddpm" else ())):
        found, given = getattr(theirs, name), getattr(ours, name)
        if found != given:
            raise InputError(f"the teacher was trained with objective.{name}={found}, this run has {given}")


class DistilledGenerator(ImageGenerator):
    """Train a generator first to attend as a trained one does, then on its own objective.

    In the first `distill_steps` steps the loss is the mean of :func:`attention_errors` over the layers that differ, on
    the activations of the teacher, at the noise levels of the objective; only these layers change. Then it is the loss
    of the objective, of all weights, which `val/loss` is from the start, and as much of the squared error against the
    teacher's prediction as is asked for (arXiv 2501.12976).

    Args:
        teacher: Run directory or `.ckpt` of the trained generator, of the same sizes with another attention; null with
            `transformer`.
        distill_steps: Optimizer steps of the first part.
        name: Name of the model in timm, for example `dit_mhla_s_2`; null with `transformer`.
        checkpoint: Start weights; the teacher's when null.
        transformer: Pipeline folder of diffusers: its Wan or Sana transformer teaches, the converted one learns.
        teacher_weight: Weight, in the second part, of the mean squared error against the teacher's prediction.
        options: Further options of a generator.

    Raises:
        InputError: If there is no such teacher, it has another objective, or it and the model have no layers that
            differ.
    """

    def __init__(
        self,
        teacher: str | None = None,
        name: str | None = None,
        distill_steps: int = 1000,
        checkpoint: str | None = None,
        transformer: str | None = None,
        teacher_weight: float = 0.0,
        **options: Any,
    ) -> None:
        check_counts(0, distill_steps=distill_steps)
        check_numbers(0, **{"model.teacher_weight": teacher_weight})
        if (teacher is None) == (transformer is None):
            raise InputError(
                "name one teacher: --model.teacher RUN, or --model.transformer PIPELINE_FOLDER of Wan or Sana"
            )
        source = None if teacher is None else find_checkpoint(Path(teacher))
        start = checkpoint if source is None else checkpoint or str(source)
        super().__init__(name, checkpoint=start, transformer=transformer, **options)
        self.distill_steps, self.teacher_weight = distill_steps, teacher_weight
        if source is None:
            network: nn.Module = open_prompted(str(transformer), [])
        else:
            network, about = open_network(source)
            _check_objective(ObjectiveConfig.from_dict(about["objective"]), self.objective_config)
        attention_pairs(network, self.net)
        self._teacher = _Kept(network.train())  # it drops labels as it did
        self._teacher_sha256 = state_sha256(network.state_dict())

    def on_train_start(self) -> None:
        """Move the teacher to the device of the student."""
        super().on_train_start()
        self._teacher.kept.to(self.device)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep what tells the teacher's weights."""
        super().on_save_checkpoint(checkpoint)
        checkpoint["teacher_sha256"] = self._teacher_sha256

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """As a generator does.

        Raises:
            InputError: Also if the student still learns from the teacher, which had other weights.
        """
        super().on_load_checkpoint(checkpoint)
        learns = checkpoint["global_step"] < self.distill_steps or self.teacher_weight
        if self.trainer.state.fn == "fit" and learns:
            _check_teacher(checkpoint, self._teacher_sha256)

    def _losses(self, x0: Tensor, labels: Tensor, times: Tensor, noise: Tensor) -> Tensor:
        learns_attention = self.trainer.global_step < self.distill_steps
        if not self.training or not (learns_attention or self.teacher_weight):
            return super()._losses(x0, labels, times, noise)
        y, network = self._condition(labels), self._teacher.kept
        if not learns_attention:
            found: list[Tensor] = []

            def predict(x: Tensor, t: Tensor) -> Tensor:
                found.append(self.net(x, t, y))
                return found[0]

            losses = self.objective.losses(predict, x0, times, noise)
            with torch.no_grad():
                wanted = network(self.objective.add_noise(x0, times, noise), times, y).float()
            return losses + self.teacher_weight * (found[0].float() - wanted).square().flatten(1).mean(1)
        with attention_errors(attention_pairs(network, self.net)) as errors, torch.no_grad():
            self.objective.losses(lambda x, t: network(x, t, y), x0, times, noise)
        return torch.stack(errors).mean(0)


class _StageSchedule:
    """Learning rates of a distillation: each stage has a warm-up and a cosine of its own.

    Args:
        module: What is trained; it knows its stage and where that began.
        optimizer: The optimizer.
    """

    def __init__(self, module: DistilledClassifier, optimizer: Optimizer) -> None:
        self.module = module
        groups = optimizer.param_groups
        rates, peak = [group["lr"] for group in groups], module.optimizer_config.lr
        self.schedules = {}
        for stage in module.stages:
            for group, rate in zip(groups, rates, strict=True):
                group.pop("initial_lr", None)
                group["lr"] = rate / peak * stage.lr
            config = ScheduleConfig(
                warmup_epochs=stage.warmup_share * stage.steps, warmup_lr=stage.lr / 100, min_lr=0.0
            )
            self.schedules[type(stage)] = make_schedule(optimizer, config, stage.steps, epoch_steps=1)

    def step_update(self, num_updates: int) -> None:
        """Set the rates of a step."""
        self.schedules[type(self.module.stage)].step_update(max(0, num_updates - self.module.stage_start))


class DistilledClassifier(ImageClassifier):
    """Give a trained classifier or backbone another attention, and train it back to what it computed (ViT-AdaLA).

    The student is the teacher with its attention swapped. It learns in up to three stages (arXiv 2603.16063): the
    outputs of its attention layers on the teacher's activations, then the teacher's last features, then labels. The
    optimizer starts each stage without moments. Validation measures `val/attention_error`, the squared error over the
    teacher's mean square, and `val/feature_cosine`, mean over tokens.

    Args:
        teacher: Run directory, `.ckpt`, exported `.safetensors`, name in timm, or `local-dir:` with a folder that timm
            or transformers (ViT, DeiT, DINOv2, DINOv3) has saved.
        core: New core: `mhla`, `linear`, `hih` or `softmax`.
        head_mix: Mix across feature heads.
        layers: Attention layers to swap, by number or name; all when null.
        softmax_every: k, for an original layer as the first of each k; 0 for none.
        swap_args: Further options of `headmix_vision.swap_attention`, for example `{block_grid: [4, 4]}`.
        teacher_checkpoint: Weights of a teacher that is named in timm.
        teacher_args: Further arguments of `timm.create_model` for such a teacher.
        num_classes: Number of classes of the student. The teacher's classifier stays when null, or where it has as
            many; else the student gets a new one, which the stage of labels trains without the teacher's logits.
        img_size: Image size in pixels, one number or [height, width]; the teacher's when null.
        labelled: Whether validation also measures accuracy, for which the data need labels of the student's classes;
            when null if there is a stage of labels.
        attention: First stage.
        features: Second stage.
        labels: Third stage.
        loss: Loss of labels.
        mixup: Mixup and CutMix of the stage of labels.
        optimizer: Optimizer; each stage has its own learning rate.
        common: `seed`, `compile` and `grad_checkpointing`, see `BaseModule`.

    Raises:
        InputError: If there is no such teacher, nothing in it can be swapped, an option does not fit, no stage has
            steps, or a stage of labels has no classes.
    """

    def __init__(
        self,
        teacher: str,
        core: str = "mhla",
        head_mix: str | None = None,
        layers: list[int | str] | None = None,
        softmax_every: int = 0,
        swap_args: dict[str, Any] | None = None,
        teacher_checkpoint: str | None = None,
        teacher_args: dict[str, Any] | None = None,
        num_classes: int | None = None,
        img_size: int | list[int] | None = None,
        labelled: bool | None = None,
        attention: AttentionStage = _DEFAULT_STAGES[0],
        features: FeaturesStage = _DEFAULT_STAGES[1],
        labels: LabelsStage = _DEFAULT_STAGES[2],
        loss: LossConfig = DEFAULT_LOSS,
        mixup: MixupConfig = NO_MIXUP,
        optimizer: OptimizerConfig = DEFAULT_OPTIMIZER,
        **common: Any,
    ) -> None:
        self.labelled = labels.steps > 0 if labelled is None else labelled
        if labels.steps and not self.labelled:
            raise InputError("model.labelled is false, it must be true or null where model.labels.steps is above 0")
        if num_classes is not None:
            check_counts(2, **{"model.num_classes": num_classes})
        made = open_teacher(teacher, teacher_checkpoint, teacher_args, img_size)
        student = make_student(made, core, layers, head_mix, softmax_every, swap_args)
        arguments = {
            name: value for name, value in student.arguments.items() if name not in ("num_classes", "img_size")
        }
        own_classes = int(made.network.num_classes)  # type: ignore[arg-type]
        if self.labelled and num_classes is None and own_classes < 2:
            raise InputError("the teacher has no classifier: set model.num_classes to the number of classes")
        super().__init__(
            student.name,
            own_classes if num_classes is None else num_classes,
            student.arguments.get("img_size"),
            arguments,
            loss=loss,
            mixup=mixup,
            optimizer=optimizer,
            schedule=ScheduleConfig(warmup_epochs=0),
            **common,
        )
        self.same_classes = self.num_classes == own_classes
        state, own = student.network.state_dict(), self.net.state_dict()
        if not self.same_classes:  # the classifier alone has another shape, or is new
            state = own | {name: value for name, value in state.items() if value.shape == own[name].shape}
        self.net.load_state_dict(state)
        self._teacher = _Kept(made.network)
        self._teacher_sha256 = state_sha256(made.network.state_dict())
        self.stages: list[StageConfig] = [stage for stage in (attention, features, labels) if stage.steps]
        if not self.stages:
            raise InputError(
                "no stage has steps: set model.attention.steps, model.features.steps or model.labels.steps"
            )
        self.stage_number, self.stage_start = 0, 0
        self._task: _Kept | None = None
        self.val_errors, self.val_cosines = MeanMetric(nan_strategy=math.inf), MeanMetric(nan_strategy=math.inf)
        self.pairs()  # refuses layers that do not fit

    def pairs(self) -> Pairs:
        """Return the attention layers of teacher and student that differ."""
        return attention_pairs(self._teacher.kept, self.net)

    @property
    def needs_labels(self) -> bool:
        """Whether the data need labels."""
        return self.labelled

    @property
    def stage(self) -> StageConfig:
        """The stage that is trained."""
        return self.stages[self.stage_number]

    @property
    def figure(self) -> str:
        """Metric of the validation by which the stage is judged."""
        figures = {AttentionStage: "val/attention_error", FeaturesStage: "val/feature_cosine", LabelsStage: "val/top1"}
        return figures[type(self.stage)]

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the run, as far as it is known: a stage may end early."""
        return self.stage_start + sum(stage.steps for stage in self.stages[self.stage_number :])

    def end_stage(self) -> bool:
        """Go on with the next stage; return whether there is one."""
        if self.stage_number + 1 == len(self.stages):
            return False
        self.stage_number, self.stage_start = self.stage_number + 1, self.trainer.global_step
        self._limit_steps()
        return True

    def _limit_steps(self) -> None:
        self.trainer.fit_loop.epoch_loop.max_steps = self.total_steps

    def make_schedule(self, optimizer: Optimizer, total_steps: int, epoch_steps: float) -> Schedule:
        """Make the schedules of the stages."""
        return _StageSchedule(self, optimizer)

    def setup(self, stage: str) -> None:
        """Compare the model with the data; see `ImageClassifier`."""
        super().setup(stage)
        if stage in ("test", "predict") and self.num_classes < 2:
            raise InputError(f"{TrainerFn(stage).value} needs a classifier, and the student has none")

    def on_train_start(self) -> None:
        """Start as every training does, limited to the stages that are left."""
        super().on_train_start()
        self._limit_steps()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Go on with the next stage when it is due; then as every training does."""
        if self.trainer.global_step - self.stage_start >= self.stage.steps:
            self.end_stage()
        if self.trainer.global_step == self.stage_start:
            self.trainer.optimizers[0].state.clear()
        super().on_train_batch_start(batch, batch_idx)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the mean loss of the stage, of images [B, C, H, W], float32, and targets [B], int64."""
        images, stage = batch[0], self.stage
        if isinstance(stage, LabelsStage):
            loss = self._labels_loss(stage, *self.mixed(batch, batch_idx))
        elif isinstance(stage, FeaturesStage):
            with torch.no_grad():
                wanted = self._on_device().forward_features(images)
            cosine, squared = feature_errors(self.net.forward_features(images), wanted)  # type: ignore[operator]
            loss = {"cosine": cosine, "mse": squared, "both": cosine + squared}[stage.loss].mean()
        else:
            loss = torch.stack(self._attention_errors(images, learn=True)[0]).mean()
        self.track_loss(loss, len(images))
        return loss

    def _attention_errors(self, images: Tensor, learn: bool) -> tuple[list[Tensor], Tensor]:
        """Return the errors of all layers, [B] each, and the last features of the teacher."""
        teacher, pairs = self._on_device(), self.pairs()
        tell_grid(pairs, images)
        with attention_errors(pairs, learn=learn) as errors, torch.no_grad():
            features = teacher.forward_features(images)
        return errors, features

    def _labels_loss(self, stage: LabelsStage, images: Tensor, targets: Tensor) -> Tensor:
        if not self.same_classes or not stage.distill_weight:
            return self.criterion(self.net(images).float(), targets)
        if self._task is None:
            task = LogitDistillationTask(
                self.net,
                self._on_device(),
                self.criterion,
                distill_loss_weight=stage.distill_weight,
                temperature=stage.temperature,
                device=self.device,
                verbose=False,
            )
            self._task = _Kept(task)
        loss: Tensor = self._task.kept(images, targets)["loss"]
        return loss

    def _on_device(self) -> Any:
        """Return the teacher, on the device of the student."""
        network: nn.Module = self._teacher.kept
        if next(network.parameters()).device != self.device:
            network.to(self.device)
        return network

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Let only the weights of the stage change; then as every training does."""
        stage = self.stage
        if isinstance(stage, AttentionStage) or (isinstance(stage, FeaturesStage) and stage.learn == "attention"):
            learning = {parameter for _, layer in self.pairs() for parameter in layer.parameters()}
            for parameter in {*self.net.parameters()} - learning:
                parameter.grad = None
        super().on_before_optimizer_step(optimizer)

    def validation_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        """Compare student and teacher; return predicted classes [B] where there are labels."""
        images, targets = batch
        if not len(images):  # none of the batch was readable
            return None
        errors, wanted = self._attention_errors(images, learn=False)
        found = self.net.forward_features(images)  # type: ignore[operator]
        self.val_errors.update(torch.stack(errors).mean(0))
        self.val_cosines.update(1 - feature_errors(found, wanted)[0])
        if not self.labelled:
            return None
        logits = self.net.forward_head(found).float()  # type: ignore[operator]
        self.val_metrics.update(logits, targets)
        return logits.argmax(-1)

    def on_validation_epoch_end(self) -> None:
        """Log the errors against the teacher, and where there are labels loss and accuracy."""
        for name, metric in (("attention_error", self.val_errors), ("feature_cosine", self.val_cosines)):
            value = metric.compute()
            metric.reset()
            require_finite(value, f"val/{name}", self.trainer)
            self.log(f"val/{name}", value, prog_bar=True)
        if self.labelled:
            super().on_validation_epoch_end()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep the stage, and what tells the teacher's weights."""
        super().on_save_checkpoint(checkpoint)
        checkpoint["teacher_sha256"] = self._teacher_sha256
        checkpoint[_STATE] = {"stage": self.stage_number, "start": self.stage_start}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Load what a classifier has, and restore the stage.

        Raises:
            InputError: Also if the teacher has other weights, or there are other stages.
        """
        super().on_load_checkpoint(checkpoint)
        if self.trainer.state.fn != "fit":
            return
        _check_teacher(checkpoint, self._teacher_sha256)
        where = f"the entry {_STATE!r} of the checkpoint"
        found = check_fields(where, checkpoint.get(_STATE), {"stage": int, "start": int})
        if not (0 <= found["stage"] < len(self.stages) and 0 <= found["start"] <= checkpoint["global_step"]):
            raise InputError(f"{where} is {found}, which these {len(self.stages)} stages do not have")
        self.stage_number, self.stage_start = found["stage"], found["start"]
