"""What the clips of a sampling plan are, and drawing them: in one piece, or window by window.

N clips, T frames, H x W pixels, C channels; uint8, channels last.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from headmix_vision.diffusion.pipeline import HeadMixDiTPipeline


@dataclass(frozen=True)
class ClipPlan:
    """Length, frame rate and start of clips.

    With a window longer clips are drawn piece by piece, each of the window's length: the last frames that are there
    are the clean first frames of the next piece. A causal network draws each piece block by block, and has one.

    Args:
        num_frames: Frames of a clip, those of the start included.
        frame_rate: Frames a second; that of training when None.
        start: Known first frames of all clips, uint8 [T0, H, W, C]; they are frames of the samples.
        window: Frames of a piece; None for clips in one piece.
        overlap: Frames that a piece shares with those before it.
        guidance: Guidance scale of pieces that go on from known frames, and of the blocks of a causal network after as
            many frames as in training; that of the others when None.
        block: Latent frames that a causal network draws at a time; None for others.
    """

    num_frames: int
    frame_rate: float | None = None
    start: np.ndarray | None = None
    window: int | None = None
    overlap: int = 0
    guidance: float | None = None
    block: int | None = None

    def known_frames(self, pipeline: Any) -> list[int]:
        """Lists of each piece how many of its frames are known before."""
        there = 0 if self.start is None else len(self.start)
        if self.window is None:
            return [there]
        pieces = []
        while there < self.num_frames:
            known = pipeline.most_frames(min(self.overlap, there)) if there else 0
            pieces.append(known)
            there += self.window - known
        return pieces

    def count_passes(self, pipeline: Any) -> int:
        """Counts how often noise is denoised for a clip."""
        return sum(pipeline.count_blocks(self.window or self.num_frames, n) for n in self.known_frames(pipeline))

    def settings(self) -> dict[str, Any]:
        """Returns the settings as plain values for a JSON file."""
        start = self.start
        return {
            "num_frames": self.num_frames,
            "frame_rate": self.frame_rate,
            "start": None
            if start is None
            else {"frames": len(start), "sha256": hashlib.sha256(start.tobytes()).hexdigest()},
            "window": self.window,
            "overlap": self.overlap,
            "guidance": self.guidance,
            **({} if self.block is None else {"block": self.block}),
        }


def draw_clips(pipeline: HeadMixDiTPipeline, clips: ClipPlan, count: int, options: dict[str, Any]) -> np.ndarray:
    """Draws clips: uint8 [N, T, H, W, C].

    Args:
        pipeline: The generator.
        clips: What they are.
        count: N.
        options: Further arguments of the pipeline's call; random numbers go on from piece to piece.
    """
    frames = None if clips.start is None else np.repeat(clips.start[None], count, axis=0)
    for known in clips.known_frames(pipeline):
        own = {}
        if clips.guidance is not None and (known or clips.block):
            own = {"guidance_scale" if known else "later_guidance_scale": clips.guidance}
        (drawn,) = pipeline(
            num_frames=clips.window or clips.num_frames,
            frame_rate=clips.frame_rate,
            prefix=None if frames is None else frames[:, -known:].astype(np.float32) / 255,
            output_type="np",
            return_dict=False,
            **(options | own),
        )
        piece = np.rint(drawn[:, known:] * 255).astype(np.uint8)
        frames = piece if frames is None else np.concatenate([frames, piece], axis=1)
    assert frames is not None
    return frames[:, : clips.num_frames]
