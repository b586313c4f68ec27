"""A Hopper GPU in place of another card."""

import pytest
import torch

from headmix_lab.stand_in import CARDS, main, padded


@pytest.mark.parametrize(("name", "kilobytes"), [("rtx", 100), ("a100", 164)])
def test_padding_lets_as_many_programs_run(name: str, kilobytes: int) -> None:
    card = CARDS[name]
    for shared in range(0, card.shared_memory, 500):
        for warps in (1, 2, 4, 8):
            held = min(card.programs, card.warps // warps, (kilobytes << 10) // (shared + 1024))
            assert padded(shared, warps, card) >= shared
            assert (228 << 10) // (padded(shared, warps, card) + 1024) == held, (shared, warps)
    assert padded(card.shared_memory, 4, card) == 227 << 10  # one


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_without_a_hopper_gpu_nothing_runs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["benchmarks.bench_mhla", "--tiny"])
    assert ended.value.code == 2
    assert capsys.readouterr().err == "error: a Hopper GPU can stand in for other cards, and there is none here\n"
