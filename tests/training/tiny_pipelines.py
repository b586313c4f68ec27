"""Tiny random pipelines of diffusers with text encoders of transformers, and files with prompts to train them on."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import (
    AutoencoderDC,
    AutoencoderKLWan,
    DPMSolverMultistepScheduler,
    SanaPipeline,
    SanaTransformer2DModel,
    UniPCMultistepScheduler,
    WanPipeline,
    WanTransformer3DModel,
)
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import Gemma2Config, Gemma2Model, PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

from headmix_vision.files.video import write_video

PROMPTS = ["a red square", "a blue square", "a green circle", "a red circle"]
FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True}


def make_tokenizer() -> PreTrainedTokenizerFast:
    words = ["<pad>", "<unk>", *sorted({word for prompt in PROMPTS for word in prompt.split()})]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>")


def make_wan(folder: Path, **options: Any) -> Path:
    """Save a Wan pipeline whose autoencoder compresses 4 x 8 x 8."""
    torch.manual_seed(0)
    vae = AutoencoderKLWan(
        base_dim=3, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True]
    )
    vae.register_to_config(latents_mean=[0.1] * 4, latents_std=[0.5] * 4)
    sizes = {"num_attention_heads": 2, "attention_head_dim": 12, "num_layers": 2, "text_dim": 16, "ffn_dim": 32}
    sizes |= {"in_channels": 4, "out_channels": 4, "freq_dim": 32, "rope_max_seq_len": 32, **options}
    text = UMT5Config(vocab_size=16, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    pipeline = WanPipeline(
        tokenizer=make_tokenizer(),
        text_encoder=UMT5EncoderModel(text),
        vae=vae,
        scheduler=UniPCMultistepScheduler(flow_shift=3.0, **FLOW),
        transformer=WanTransformer3DModel(**sizes),
    )
    pipeline.save_pretrained(folder)
    return folder


def make_sana(folder: Path) -> Path:
    """Save a Sana pipeline whose autoencoder compresses 2 x 2."""
    torch.manual_seed(0)
    blocks = {f"{part}_block_types": "ResBlock" for part in ("encoder", "decoder")}
    blocks |= {f"{part}_block_out_channels": (8, 8) for part in ("encoder", "decoder")}
    blocks |= {f"{part}_layers_per_block": (1, 1) for part in ("encoder", "decoder")}
    blocks |= {f"{part}_qkv_multiscales": ((), ()) for part in ("encoder", "decoder")}
    cross = {"num_cross_attention_heads": 2, "cross_attention_head_dim": 8, "cross_attention_dim": 16}
    sizes = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2, "sample_size": 16}
    text = Gemma2Config(
        vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8,
    )  # fmt: skip
    pipeline = SanaPipeline(
        tokenizer=make_tokenizer(),
        text_encoder=Gemma2Model(text),
        vae=AutoencoderDC(latent_channels=4, **blocks),
        transformer=SanaTransformer2DModel(in_channels=4, out_channels=4, caption_channels=16, **sizes, **cross),
        scheduler=DPMSolverMultistepScheduler(flow_shift=2.0, **FLOW),
    )
    pipeline.save_pretrained(folder)
    return folder


def write_files(folder: Path, *, videos: bool, sizes: list[tuple[int, int]]) -> Path:
    """Write a video or picture for each prompt, of given heights and widths in turn; return the table of prompts."""
    folder.mkdir(parents=True)
    generator = np.random.default_rng(0)
    lines = ["path,prompt"]
    for number, prompt in enumerate(PROMPTS):
        height, width = sizes[number % len(sizes)]
        frames = generator.integers(0, 256, (5, height, width, 3), dtype=np.uint8)
        name = f"{number}.{'mp4' if videos else 'png'}"
        lines.append(f"{name},{prompt}")
        if videos:
            write_video(folder / name, frames, 8)
        else:
            Image.fromarray(frames[0]).save(folder / name)
    table = folder.parent / f"{folder.name}.csv"
    table.write_text("\n".join(lines) + "\n")
    return table
