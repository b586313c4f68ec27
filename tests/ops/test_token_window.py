import itertools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from headmix_vision.errors import InputError
from headmix_vision.ops import TokenGrid, TokenWindow
from headmix_vision.ops.token_window import _cached_mask

WINDOWS = [
    (TokenGrid((7,)), (3,)),
    (TokenGrid((5,), 2, 3), (5,)),
    (TokenGrid((1,)), (1,)),
    (TokenGrid((4, 5)), (1, 1)),
    (TokenGrid((4, 5), 1), (3, 5)),
    (TokenGrid((3, 6), 2, 2), (3, 1)),
    (TokenGrid((2, 3, 4), 1), (1, 3, 3)),
    (TokenGrid((3, 3, 2), 0, 2), (3, 1, 1)),
]


@pytest.mark.parametrize(("grid", "extent"), WINDOWS)
def test_mask_and_number_of_pairs(grid, extent):
    """Written out place by place: prefix tokens see all and are seen, others see what is half a window away."""
    positions = [None] * grid.num_prefix_tokens + [*itertools.product(*map(range, grid.shape))]
    places = [position for position in positions for _ in range(grid.repeats)]

    def sees(one, other):
        if one is None or other is None:
            return True
        return all(abs(a - b) <= w // 2 for a, b, w in zip(one, other, extent, strict=True))

    expected = torch.tensor([[sees(one, other) for other in places] for one in places])
    window = TokenWindow(grid, extent)
    assert torch.equal(window.mask(torch.empty(0)), expected)
    assert window.num_pairs == expected.sum()


def test_one_number_is_for_all_axes():
    grid = TokenGrid((8, 5, 5), 1)
    assert TokenWindow.of(grid, 3) == TokenWindow.of(grid, [3, 3, 3]) == TokenWindow(grid, (3, 3, 3))
    assert len({TokenWindow.of(grid, 3), TokenWindow.of(grid, (3, 3, 3)), TokenWindow.of(grid, 1)}) == 2


def test_sizes_of_numpy_are_sizes():
    numpy = pytest.importorskip("numpy")
    window = TokenWindow.of(TokenGrid((8, 8)), numpy.int64(3))
    assert window == TokenWindow.of(TokenGrid((8, 8)), (numpy.int32(3), 3)) and type(window.num_pairs) is int


@pytest.mark.parametrize(
    ("extent", "message"),
    [
        *((extent, r"window .* must be odd numbers of tokens") for extent in (0, 2, -1, (3, 4), (0, 3))),
        *((extent, r"window .* is larger than the token grid \(5, 7\)") for extent in (7, (7, 3), (1, 9))),
        *((extent, r"window .* must have the same number of axes") for extent in ((3,), (3, 3, 3), ())),
        *(
            (extent, "window must be one whole number for each axis, got")
            for extent in (True, 3.0, "3", None, (3, 3.0), (True, 3), (3, "3"), {3: 3})
        ),
    ],
)
def test_wrong_windows_are_refused(extent, message):
    with pytest.raises(InputError, match=message):
        TokenWindow.of(TokenGrid((5, 7)), extent)


def test_a_shape_is_no_grid():
    with pytest.raises(InputError, match=r"grid must be a TokenGrid, got \(5, 7\)"):
        TokenWindow((5, 7), (3, 3))


def test_masks_do_not_leak_between_fake_and_real_tensors():
    window = TokenWindow(TokenGrid((3, 7)), (3, 3))
    with FakeTensorMode():
        fake = window.mask(torch.empty(2))
    real = window.mask(torch.empty(2))
    with FakeTensorMode():
        assert type(window.mask(torch.empty(2))) is type(fake)
    assert type(real) is torch.Tensor


def test_few_masks_are_kept():
    """Of N x N numbers each: a model that meets many resolutions would fill the memory."""
    for size in range(3, 20):
        TokenWindow(TokenGrid((size,)), (3,)).mask(torch.empty(0))
    assert _cached_mask.cache_info().currsize <= 8
    window = TokenWindow(TokenGrid((19,)), (3,))
    assert window.mask(torch.empty(0)) is window.mask(torch.empty(0))
