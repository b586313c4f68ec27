"""Train a small autoencoder of images on the frames of clips: diffusers' AutoencoderKL, by absolute error and some KL.

    python -m headmix_lab.autoencoder --root data/animated_emoji --run-dir runs/emoji_vae
    headmix cache-latents --dataset videos --root data/animated_emoji --vae runs/emoji_vae/vae ...

A latent place stands for 4 x 4 pixels. The run keeps `last.ckpt`, from which the same command goes on exactly. Its
result is the folder `vae`, for `--vae` everywhere. The autoencoder states mean and deviation of each latent channel, by
which caches and samplers scale.

`scores.json` has the PSNR of the validation split. With --features it has the Fréchet distance of the frames from their
reconstructions, beside two controls of real frames: from the frames scaled down by 4 and up again (`scaled_fid`), which
a useful autoencoder has to be well below, and between two halves of the clips (`halves_fid`).

B clips of a batch, C channels, T frames, H and W pixels.
"""

import argparse
import json
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import lightning
import torch
from diffusers import AutoencoderKL
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.nn.functional import interpolate

from headmix_lab.scoring import RememberingScorer
from headmix_vision.console import OneLineParser, default_device, one_line_errors, say
from headmix_vision.data import GenerationData
from headmix_vision.data.clip_frames import ClipConfig
from headmix_vision.data.seeding import derive_seed
from headmix_vision.errors import InputError, check_counts, check_positive
from headmix_vision.evaluation.extractors import open_extractor
from headmix_vision.evaluation.frechet import Gaussian, frechet_distance
from headmix_vision.evaluation.sample_sets import SampleSet
from headmix_vision.evaluation.sample_sources import TensorSamples
from headmix_vision.files.writing import atomic_folder, atomic_path, hold_lock

FACTOR = 4
_GROUPS = 16  # of channels, in its norms


class AutoencoderTraining(lightning.LightningModule):
    """Training of an autoencoder on clips, frame by frame.

    Args:
        given: `size` in pixels, `frames` of a clip that are taken together, `channels` of latents, `width` of the first
            level, `kl` the weight of the KL divergence beside the absolute error, `lr`, `steps` and `seed`.
    """

    def __init__(self, given: argparse.Namespace) -> None:
        super().__init__()
        self.given = given
        self.net = SimpleNamespace(in_channels=3, input_size=(given.frames, given.size, given.size), num_classes=0)
        levels = (given.width, 2 * given.width, 2 * given.width)
        self.vae: Any = AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * len(levels),
            up_block_types=("UpDecoderBlock2D",) * len(levels),
            block_out_channels=levels,
            latent_channels=given.channels,
            norm_num_groups=_GROUPS,
            sample_size=given.size,
            scaling_factor=1.0,
        )

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        frames = _frames(batch[0])
        generator = torch.Generator(self.device).manual_seed(derive_seed(self.given.seed, self.global_step))
        posterior = self.vae.encode(frames).latent_dist
        error = (self.vae.decode(posterior.sample(generator)).sample - frames).abs().mean()
        if (step := self.global_step + 1) % self.given.every == 0:
            say(f"step {step} of {self.given.steps}: absolute error {error.item():.4f}")
        return error + self.given.kl * posterior.kl().mean() / frames[0].numel()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.vae.parameters(), lr=self.given.lr, betas=(0.9, 0.99), weight_decay=0.0)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.given.steps, 0.01 * self.given.lr)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def _frames(clips: Tensor) -> Tensor:
    """Take clips [B, C, T, H, W] as frames [B * T, C, H, W]."""
    return clips.transpose(1, 2).flatten(0, 1)


def _pixels(frames: Tensor) -> Tensor:
    """Convert frames in [-1, 1] to uint8 on the CPU."""
    return ((frames + 1) * 127.5).round().clamp(0, 255).to(torch.uint8).cpu()


class Reconstruction(NamedTuple):
    """Frames and what is compared with them, uint8 [B * T, C, H, W], and latents [B * T, channels, H / 4, W / 4].

    Args:
        frames: The frames.
        made: Their reconstructions.
        scaled: The frames scaled down by 4 and up again.
        latents: Samples of the latents, float32.
    """

    frames: Tensor
    made: Tensor
    scaled: Tensor
    latents: Tensor


@torch.inference_mode()
def reconstruct(vae: Any, clips: Tensor) -> Reconstruction:
    """Reconstruct the frames of clips [B, C, T, H, W] in [-1, 1]."""
    frames = _frames(clips).to(vae.device)
    posterior = vae.encode(frames).latent_dist
    made = vae.decode(posterior.mode()).sample
    small = interpolate(frames, scale_factor=1 / FACTOR, mode="bicubic", antialias=True)
    scaled = interpolate(small, size=frames.shape[-2:], mode="bicubic")
    latents = posterior.sample(torch.Generator(vae.device).manual_seed(0)).cpu()
    return Reconstruction(_pixels(frames), _pixels(made), _pixels(scaled), latents)


def psnr(one: Tensor, other: Tensor) -> Tensor:
    """Compute the peak signal-to-noise ratio of frames, uint8 [N, C, H, W], in dB, float64 [N]."""
    errors = (one.double() - other.double()).square().flatten(1).mean(1)
    return 10 * torch.log10(255**2 / errors.clamp_min(1e-6))


def score(
    vae: Any, data: GenerationData, given: argparse.Namespace, scorer: RememberingScorer | None
) -> tuple[dict[str, float], Tensor]:
    """Score reconstructions of the validation split; return the scores and samples of its latents."""
    found = [reconstruct(vae, clips) for clips, _ in data.val_dataloader()]
    ratios = torch.cat([psnr(one.frames, one.made) for one in found])
    frames, made, scaled, latents = (torch.cat(parts) for parts in zip(*found, strict=True))
    scores = {"psnr_db": ratios.mean().item(), "frames": len(frames)}
    if scorer is not None:
        sides = [SampleSet(TensorSamples(side), scorer.extractor.mode) for side in (frames, made, scaled)]
        features, of_made, of_scaled = (scorer.collect(side) for side in sides)
        clips = features.unflatten(0, (-1, given.frames))
        pairs = {"reconstruction": (features, of_made), "scaled": (features, of_scaled)}
        pairs["halves"] = (clips[::2].flatten(0, 1), clips[1::2].flatten(0, 1))
        for name, pair in pairs.items():
            scores[f"{name}_fid"] = frechet_distance(*map(Gaussian.of_features, pair))
    return scores, latents


def train(given: argparse.Namespace) -> dict[str, float]:
    """Train, or go on; return the scores."""
    check_counts(1, **{f"--{name}": getattr(given, name) for name in ("frames", "channels", "steps", "batch", "every")})
    check_positive(**{"--lr": given.lr, "--kl": given.kl})
    for name, multiple in (("size", FACTOR), ("width", _GROUPS)):
        if (number := getattr(given, name)) < multiple or number % multiple:
            raise InputError(f"--{name} is {number}, it must be a multiple of {multiple}")
    if (given.run_dir / "vae").exists():
        raise InputError(f"{given.run_dir} holds a finished autoencoder; choose another --run-dir or remove it")
    if given.minutes is not None:
        check_positive(**{"--minutes": given.minutes})
    scorer = given.features and RememberingScorer(open_extractor(given.features, default_device()))
    with hold_lock(given.run_dir / ".lock", f"run directory {given.run_dir}"):
        lightning.seed_everything(given.seed, verbose=False)
        module = AutoencoderTraining(given)
        data = GenerationData(
            "videos",
            str(given.root),
            batch_size=given.batch,
            hflip=0.5,
            clip=ClipConfig(frame_stride=1),
            seed=given.seed,
            num_workers=given.workers,
        )
        last = given.run_dir / "last.ckpt"
        keep = ModelCheckpoint(given.run_dir, "last", every_n_train_steps=given.every, enable_version_counter=False)
        trainer = lightning.Trainer(
            max_steps=given.steps,
            max_time=given.minutes and timedelta(minutes=given.minutes),
            precision="bf16-mixed" if torch.cuda.is_available() else "32-true",
            gradient_clip_val=1.0,
            callbacks=[keep],
            benchmark=torch.cuda.is_available(),
            enable_progress_bar=False,
            logger=False,
            limit_val_batches=0,
            num_sanity_val_steps=0,
            enable_model_summary=False,
            use_distributed_sampler=False,
            default_root_dir=given.run_dir,
        )
        trainer.fit(module, datamodule=data, ckpt_path=str(last) if last.exists() else None, weights_only=True)
        trainer.save_checkpoint(last)  # the scores may fail
        vae = module.vae.to(default_device()).eval()
        scores, latents = score(vae, data, given, scorer)
        mean, deviation = latents.mean((0, 2, 3)).tolist(), latents.std((0, 2, 3)).tolist()
        vae.register_to_config(latents_mean=mean, latents_std=deviation)
        with atomic_folder(given.run_dir / "vae") as folder:
            vae.save_pretrained(folder)
        with atomic_path(given.run_dir / "scores.json") as temporary:
            temporary.write_text(json.dumps(scores, indent=1) + "\n")
    return scores


def parse_arguments(args: Sequence[str] | None) -> argparse.Namespace:
    parser = OneLineParser(
        prog="python -m headmix_lab.autoencoder",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--root", type=Path, required=True, help="folder of clips, data set `videos`")
    add("--run-dir", type=Path, required=True, help="folder of the run")
    add("--features", help="of the reconstruction's Fréchet distance: lite0:PATH or inception (none)")
    add("--size", type=int, default=64, help="height and width in pixels (%(default)s)")
    add("--channels", type=int, default=8, help="channels of latents (%(default)s)")
    add("--width", type=int, default=64, help="channels of the first level (%(default)s)")
    add("--kl", type=float, default=1e-3, help="weight of the KL divergence beside the absolute error (%(default)s)")
    add("--lr", type=float, default=4e-4, help="learning rate of AdamW (%(default)s)")
    add("--steps", type=int, default=10000, help="training steps (%(default)s)")
    add("--batch", type=int, default=16, help="clips of a step (%(default)s)")
    add("--frames", type=int, default=4, help="frames in a row of each clip (%(default)s)")
    add("--every", type=int, default=500, help="steps between checkpoints and lines of progress (%(default)s)")
    add("--minutes", type=float, help="time after which training ends and what it has reached is the result (none)")
    add("--workers", type=int, help="processes that read clips (as many as the machine serves)")
    add("--seed", type=int, default=0, help="seed of weights, order and noise (%(default)s)")
    return parser.parse_args(args)


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line; wrong input ends the process with one line and exit status 2."""
    given = parse_arguments(args)
    with one_line_errors():
        scores = train(given)
        print(f"{given.run_dir / 'vae'}: " + " · ".join(f"{name} {value:.6g}" for name, value in scores.items()))


if __name__ == "__main__":
    main()
