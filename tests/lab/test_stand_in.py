"""A Hopper GPU in place of another card."""

import pytest
import torch

from headmix_lab.stand_in import main, padded


def test_padding_lets_as_many_programs_run() -> None:
    assert padded(72 << 10, 4) == 227 << 10  # one
    for shared in range(0, 99 << 10, 500):
        for warps in (1, 2, 4, 8):
            held = min(24, 48 // warps, (100 << 10) // (shared + 1024))
            assert padded(shared, warps) >= shared
            assert (228 << 10) // (padded(shared, warps) + 1024) == held, (shared, warps)


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_without_a_hopper_gpu_nothing_runs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["benchmarks.bench_mhla", "--tiny"])
    assert ended.value.code == 2
    assert capsys.readouterr().err == "error: a Hopper GPU can stand in for other cards, and there is none here\n"
