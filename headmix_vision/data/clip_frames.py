"""Decide which frames of a video make a clip."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headmix_vision.errors import InputError, check_counts, check_positive

_INSTANT_S = 1e-6
_LEAST_SHARE = 0.99  # of the wanted frame rate: 29.97 frames a second serve as 30


@dataclass(frozen=True)
class ClipConfig:
    """The frames of a video that a clip is made of; how many is up to the network.

    Args:
        frame_rate: Frames per second of a clip, at most the video's: of its frames, the nearest ones are taken.
        frame_stride: Instead, every so many frames of the video, whatever its frame rate.

    Raises:
        InputError: Both are given, or one is out of range.
    """

    frame_rate: float | None = None
    frame_stride: int | None = None

    def __post_init__(self) -> None:
        if self.frame_rate is not None:
            if self.frame_stride is not None:
                raise InputError(
                    f"the frame rate is {self.frame_rate} and the stride is {self.frame_stride}: set one of them"
                )
            check_positive(frame_rate=self.frame_rate)
        if self.frame_stride is not None:
            check_counts(1, **{"the stride of frames": self.frame_stride})

    def rate_of(self, frame_rate: float) -> float:
        """Frames a second of the clips of a video with `frame_rate`."""
        return self.frame_rate or frame_rate / (self.frame_stride or 1)

    def frames(
        self,
        count: int,
        available: int,
        frame_rate: float | None,
        place: float,
        times: Sequence[float] | None = None,
    ) -> list[int]:
        """Numbers of the frames of a clip.

        Args:
            count: Frames of the clip.
            available: Frames of the video.
            frame_rate: Frames a second of the video; None where it states none.
            place: Where the clip begins, from 0, the first frame that it can begin with, to 1, the last one.
            times: When each frame begins to show and the last one ends, in seconds, where they do not follow each other
                evenly: those nearest to the times of the clip are taken.

        Raises:
            InputError: The video is too short, or its frame rate too low.
        """
        step = float(self.frame_stride or 1)
        if self.frame_rate is not None:
            if frame_rate is None:
                raise InputError("it states no frame rate: choose frames by a stride instead of a rate")
            if frame_rate < _LEAST_SHARE * self.frame_rate:
                raise InputError(f"it has {frame_rate:g} frames a second, fewer than the {self.frame_rate:g} of a clip")
            if times is not None:
                return self._frames_by_time(count, times, place)
            step = frame_rate / self.frame_rate
        offsets = [round(number * step) for number in range(count)]
        spare = available - offsets[-1]
        if spare < 1:
            raise InputError(f"it has {available} frames, a clip needs {offsets[-1] + 1}")
        start = min(int(place * spare), spare - 1)
        return [start + offset for offset in offsets]

    def _frames_by_time(self, count: int, times: Sequence[float], place: float) -> list[int]:
        assert self.frame_rate is not None
        *shown, end = times
        wanted = np.arange(count) / self.frame_rate
        spare = bisect_right(shown, end - wanted[-1] - 1 / self.frame_rate + _INSTANT_S)
        if spare < 1:
            raise InputError(f"it lasts {end - times[0]:.3g} s, a clip needs {wanted[-1] + 1 / self.frame_rate:.3g} s")
        start = min(int(place * spare), spare - 1)
        nearest = np.interp(shown[start] + wanted, shown, np.arange(len(shown))).round()
        return [int(number) for number in nearest]


DEFAULT_CLIP = ClipConfig()
