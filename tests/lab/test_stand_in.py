"""A Hopper GPU in place of another card."""

import pytest
import torch

from headmix_lab.stand_in import main, padded


def test_padding_lets_as_many_programs_run() -> None:
    assert padded(72 << 10) == 227 << 10  # one
    for shared in range(3600, 99 << 10, 500):  # at most 24 programs
        assert shared <= padded(shared)
        assert (228 << 10) // (padded(shared) + 1024) == (100 << 10) // (shared + 1024), shared


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_without_a_hopper_gpu_nothing_runs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["benchmarks.bench_mhla", "--tiny"])
    assert ended.value.code == 2
    assert capsys.readouterr().err == "error: a Hopper GPU can stand in for other cards, and there is none here\n"
