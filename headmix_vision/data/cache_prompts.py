"""Prompts beside cached latents: a table gives each file its prompt, a text encoder makes its embedding."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from headmix_vision.data.datasets.base import Source
from headmix_vision.data.datasets.image_tables import read_table
from headmix_vision.data.datasets.latents import PROMPT, PROMPT_MASK
from headmix_vision.errors import InputError
from headmix_vision.models.pipeline_folder import TextEncoder

_FRAMES = re.compile(r"\[\d+:\d*\]$")  # of a video, in the name of its clip


@dataclass
class Prompts:
    """Prompts of the samples to cache, and their encoder.

    Args:
        texts: A prompt for each sample, in their order.
        encoder: Text encoder of the pipeline.
        full: Number of prompts encoded so far that fill all tokens; of longer ones the encoder reads the beginning.
    """

    texts: list[str]
    encoder: TextEncoder
    full: int = 0

    def tensors(self, indices: list[int], dtype: torch.dtype) -> dict[str, Tensor]:
        """Tensors of a shard for the prompts of some samples."""
        embeddings, mask = self.encoder.encode([self.texts[index] for index in indices])
        ends = embeddings[:, -1].any(-1) if mask is None else mask[:, -1] > 0  # of Wan padding is zeros
        self.full += int(ends.sum())
        return _tensors(embeddings, mask, dtype)

    def null(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Tensors for the empty prompt."""
        return _tensors(*self.encoder.encode_null(), dtype)


def _tensors(embeddings: Tensor, mask: Tensor | None, dtype: torch.dtype) -> dict[str, Tensor]:
    stored = {PROMPT: embeddings.to("cpu", dtype)}
    return stored if mask is None else {**stored, PROMPT_MASK: mask.to("cpu", torch.int64)}


def read_prompts(table: Path, source: Source, folder: Path) -> list[str]:
    """Read the prompt of each sample of a source from a table with the columns path and prompt.

    Args:
        table: The table; its paths are relative to the folder, or absolute.
        source: The samples.
        folder: What the names of the source's files are relative to.

    Raises:
        InputError: Another table, a path twice, a file without a prompt, or a prompt without a file.
    """
    if table.suffix.lower() != ".csv" or not table.is_file():
        raise InputError(f"--prompts {table} is not a table .csv")
    header, rows = read_table(table)
    if sorted(header) != ["path", "prompt"]:
        raise InputError(f"{table} has the columns {', '.join(header)}; it must have path and prompt")
    prompts: dict[str, str] = {}
    for number, row in rows:
        if not row["path"]:
            raise InputError(f"{table}, line {number}: path is missing")
        path = os.path.relpath(folder / row["path"], folder)
        if path in prompts:
            raise InputError(f"{table}, line {number}: {row['path']} has a prompt already")
        if not (folder / path).exists():
            raise InputError(f"{table}, line {number}: there is no {row['path']!r} in {folder}")
        if not row["prompt"]:
            raise InputError(f"{table}, line {number}: the prompt of {row['path']} is empty")
        prompts[path] = row["prompt"]
    files = source.files()
    if files is None:
        raise InputError(f"--prompts goes with files: {source.name(0)} has none")
    names = [_FRAMES.sub("", name) for name, _ in files]
    missing = [name for name in names if name not in prompts]
    if missing:
        raise InputError(f"{table} has no prompt for {len(missing)} of {len(names)} files, first {missing[0]}")
    return [prompts[name] for name in names]
