"""Train a small autoencoder of images on the frames of clips: diffusers' AutoencoderKL, by absolute error and some KL.

    python -m headmix_lab.autoencoder --root data/animated_emoji --run-dir runs/emoji_vae
    headmix cache-latents --dataset videos --root data/animated_emoji --vae runs/emoji_vae/vae ...

A latent place stands for 4 x 4 pixels. The run keeps `last.ckpt`, from which the same command goes on exactly; its
result is the folder `vae`, for `--vae` everywhere, and `scores.json`: PSNR on the validation split and, with
--features, the Fréchet distance of its frames from their reconstructions.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning
import torch
from diffusers import AutoencoderKL
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from headmix_lab.scoring import RememberingScorer
from headmix_vision.console import OneLineParser, default_device, one_line_errors
from headmix_vision.data import GenerationData
from headmix_vision.data.clip_frames import ClipConfig
from headmix_vision.data.seeding import derive_seed
from headmix_vision.errors import InputError, check_counts, check_positive
from headmix_vision.evaluation.extractors import open_extractor
from headmix_vision.evaluation.sample_sets import SampleSet
from headmix_vision.evaluation.sample_sources import TensorSamples
from headmix_vision.evaluation.scores import fid
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
        frames = batch[0].transpose(1, 2).flatten(0, 1)
        generator = torch.Generator(self.device).manual_seed(derive_seed(self.given.seed, self.global_step))
        posterior = self.vae.encode(frames).latent_dist
        error = (self.vae.decode(posterior.sample(generator)).sample - frames).abs().mean()
        self.log("loss", error, prog_bar=True)
        return error + self.given.kl * posterior.kl().mean() / frames[0].numel()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.vae.parameters(), lr=self.given.lr, betas=(0.9, 0.99), weight_decay=0.0)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.given.steps, 0.01 * self.given.lr)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@torch.inference_mode()
def reconstruct(vae: Any, clips: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Reconstruct the frames of clips [B, C, T, H, W] in [-1, 1].

    Returns:
        Frames and reconstructions, uint8 [B * T, C, H, W], and samples of the latents.
    """
    frames = clips.transpose(1, 2).flatten(0, 1).to(vae.device)
    posterior = vae.encode(frames).latent_dist
    made = vae.decode(posterior.mode()).sample
    pixels, others = (((side + 1) * 127.5).round().clamp(0, 255).to(torch.uint8).cpu() for side in (frames, made))
    return pixels, others, posterior.sample(torch.Generator(vae.device).manual_seed(0)).cpu()


def score(vae: Any, data: GenerationData, features: str | None) -> tuple[dict[str, float], float]:
    """Score reconstructions of the validation split; return the scores and the deviation of its latents."""
    found = [reconstruct(vae, clips) for clips, _ in data.val_dataloader()]
    frames, made, latents = (torch.cat(parts) for parts in zip(*found, strict=True))
    errors = (frames.double() - made.double()).square().flatten(1).mean(1)
    scores = {"psnr_db": (10 * torch.log10(255**2 / errors.clamp_min(1e-6))).mean().item(), "frames": len(frames)}
    if features is not None:
        scorer = RememberingScorer(open_extractor(features, default_device()))
        sides = (SampleSet(TensorSamples(side), scorer.extractor.mode) for side in (frames, made))
        scores["reconstruction_fid"] = fid(scorer, *sides)["fid"]
    return scores, latents.std().item()


def train(given: argparse.Namespace) -> dict[str, float]:
    """Train, or go on; return the scores."""
    check_counts(1, **{f"--{name}": getattr(given, name) for name in ("frames", "channels", "steps", "batch", "every")})
    check_positive(**{"--lr": given.lr, "--kl": given.kl})
    for name, multiple in (("size", FACTOR), ("width", _GROUPS)):
        if (number := getattr(given, name)) < multiple or number % multiple:
            raise InputError(f"--{name} is {number}, it must be a multiple of {multiple}")
    if (given.run_dir / "vae").exists():
        raise InputError(f"{given.run_dir} holds a finished autoencoder; choose another --run-dir or remove it")
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
            precision="bf16-mixed" if torch.cuda.is_available() else "32-true",
            gradient_clip_val=1.0,
            callbacks=[keep],
            logger=False,
            limit_val_batches=0,
            num_sanity_val_steps=0,
            enable_model_summary=False,
            use_distributed_sampler=False,
            default_root_dir=given.run_dir,
        )
        trainer.fit(module, datamodule=data, ckpt_path=str(last) if last.exists() else None, weights_only=True)
        vae = module.vae.to(default_device()).eval()
        scores, deviation = score(vae, data, given.features)
        vae.register_to_config(scaling_factor=1 / deviation)
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
    add("--every", type=int, default=500, help="steps between checkpoints (%(default)s)")
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
