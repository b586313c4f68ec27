"""Models, registered with timm.

>>> import timm, torch, headmix_vision
>>> classifier = timm.create_model("deit_mhla_tiny", num_classes=10, depth=1)
>>> classifier(torch.rand(2, 3, 224, 224)).shape
torch.Size([2, 10])
>>> generator = timm.create_model("dit_mhla_s_2", depth=1)
>>> generator(torch.randn(2, 4, 32, 32), t=torch.rand(2), y=torch.tensor([3, 7])).shape
torch.Size([2, 4, 32, 32])
"""

from typing import TYPE_CHECKING

from headmix_vision.errors import imported_when_used, require_extra

require_extra("models", __name__)

import headmix_vision.models.headmix_dit_names  # noqa: F401  (registers them)
from headmix_vision.models.compress import compress_heads
from headmix_vision.models.headmix_vit import HeadMixVisionTransformer
from headmix_vision.models.swap import SwapReport, swap_attention
from headmix_vision.models.swap_files import from_pretrained, save_pretrained

if TYPE_CHECKING:
    from headmix_vision.models.headmix_dit import HeadMixDiT, HeadMixVideoDiT

__all__ = [
    "HeadMixDiT",
    "HeadMixVideoDiT",
    "HeadMixVisionTransformer",
    "SwapReport",
    "compress_heads",
    "from_pretrained",
    "save_pretrained",
    "swap_attention",
]
__getattr__ = imported_when_used(__name__, "headmix_dit", ("HeadMixDiT", "HeadMixVideoDiT"), "diffusion")
