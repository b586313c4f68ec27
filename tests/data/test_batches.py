"""The order of samples: independent of the number of processes and workers, exact from any position."""

import random
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from headmix_vision.data.batches import SampleKey, TrainBatchSampler, TrainSamples, UnreadableImages, eval_batches
from headmix_vision.data.datasets.digits import Digits
from headmix_vision.data.seeding import derive_seed, seeded


def flatten(batches: list[list[SampleKey]]) -> list[SampleKey]:
    return [key for batch in batches for key in batch]


def test_derive_seed_is_pure_spread_and_counts_its_indices() -> None:
    assert derive_seed(0, 1) == derive_seed(0, 1) == 2024819301478721300
    grid = [derive_seed(s, e, i) for s in range(4) for e in range(16) for i in range(64)]
    assert len(set(grid)) == len(grid)
    assert all(0 <= value < 2**63 for value in grid)
    ones = sum(bin(value).count("1") for value in grid) / len(grid)
    assert ones == pytest.approx(31.5, abs=0.3)
    assert len({derive_seed(0), derive_seed(0, 0), derive_seed(0, 0, 0), derive_seed(1, 0), derive_seed(-1)}) == 5


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_seeded_covers_three_generators_and_restores_them() -> None:
    with seeded(5):
        expected = draw()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    before = draw()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    with pytest.raises(KeyError), seeded(5):
        assert draw() == expected
        raise KeyError
    assert draw() == before
    with seeded(6):
        assert all(a != b for a, b in zip(draw(), expected, strict=True))


@pytest.mark.parametrize("fails", [False, True])
def test_a_batch_leaves_the_random_states_of_training_alone(fails: bool) -> None:
    def transform(image: torch.Tensor) -> torch.Tensor:
        drawn = draw()
        if fails and len(seen) == 1:
            raise KeyError
        seen.append(drawn)
        return image

    seen: list[tuple[float, float, float]] = []
    samples = TrainSamples(Digits("train"), transform, 0, UnreadableImages(9, 0.0))
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = draw()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    with pytest.raises(KeyError) if fails else nullcontext():
        samples.__getitems__([SampleKey(3, 0, 0), SampleKey(4, 0, 0)])
    assert draw() == expected
    assert len(set(seen)) == (1 if fails else 2)


def test_epoch_is_a_permutation_from_seed_and_epoch() -> None:
    sampler = TrainBatchSampler(96, 8, seed=1)
    keys = flatten(list(sampler))
    assert sorted(key.sample for key in keys) == list(range(96))
    assert {key.epoch for key in keys} == {0}
    second = flatten(list(TrainBatchSampler(96, 8, seed=1, first_batch=lambda: 12)))
    assert {key.epoch for key in second} == {1}
    assert [key.sample for key in second] != [key.sample for key in keys]
    assert flatten(list(TrainBatchSampler(96, 8, seed=2))) != keys


def test_the_last_incomplete_global_batch_is_dropped() -> None:
    sampler = TrainBatchSampler(100, 8, world_size=3)
    assert len(sampler) == len(list(sampler)) == 4
    assert len(TrainBatchSampler(102, 34, world_size=3)) == 1
    with pytest.raises(ValueError, match=r"has 100 images, fewer than one global batch of 102 \(batch_size 34 x 3"):
        TrainBatchSampler(100, 34, world_size=3)


@pytest.mark.parametrize("repeats", [1, 3])
@pytest.mark.parametrize("world_size", [2, 4])
def test_processes_share_the_global_batches_of_one_process(world_size: int, repeats: int) -> None:
    one = list(TrainBatchSampler(100, 8, seed=7, repeats=repeats))
    shares = [
        list(TrainBatchSampler(100, 8 // world_size, seed=7, repeats=repeats, rank=rank, world_size=world_size))
        for rank in range(world_size)
    ]
    for step, batch in enumerate(one):
        for rank, share in enumerate(shares):
            assert share[step] == batch[rank::world_size]


@pytest.mark.parametrize("start", [0, 1, 11, 12, 17, 30])
def test_starting_anywhere_continues_the_same_stream(start: int) -> None:
    stream = [batch for epoch in range(4) for batch in TrainBatchSampler(100, 8, first_batch=lambda e=epoch: 12 * e)]
    sampler = TrainBatchSampler(100, 8, first_batch=lambda: start)
    assert list(sampler) == stream[start : start + len(sampler)]


def test_position_is_read_when_iteration_begins() -> None:
    position = [2]
    sampler = TrainBatchSampler(100, 8, first_batch=lambda: position[0])
    iterator = iter(sampler)
    position[0] = 5
    assert next(iterator) == list(TrainBatchSampler(100, 8))[2]


def test_repeated_augmentation_keeps_the_epoch_length_and_neighbours() -> None:
    sampler = TrainBatchSampler(90, 6, repeats=3, seed=4)
    keys = flatten(list(sampler))
    assert len(keys) == 90
    assert [key.repeat for key in keys] == [0, 1, 2] * 30
    assert all(len({key.sample for key in keys[i : i + 3]}) == 1 for i in range(0, 90, 3))
    assert len({key.sample for key in keys}) == 30
    over_ranks = [next(iter(TrainBatchSampler(90, 2, repeats=3, seed=4, rank=r, world_size=3))) for r in range(3)]
    assert len({batch[0].sample for batch in over_ranks}) == 1
    assert {batch[0].repeat for batch in over_ranks} == {0, 1, 2}


@pytest.mark.parametrize("num_samples", [4, 7, 16, 17, 33, 50])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_evaluation_covers_everything_once_in_equally_many_batches(num_samples: int, world_size: int) -> None:
    shares = [eval_batches(num_samples, 4, rank, world_size) for rank in range(world_size)]
    assert sorted(i for share in shares for batch in share for i in batch) == list(range(num_samples))
    assert len({len(share) for share in shares}) == 1
    assert all(1 <= len(batch) <= 4 for share in shares for batch in share)
    for rank, share in enumerate(shares):
        assert [i for batch in share for i in batch] == list(range(rank, num_samples, world_size))


def test_evaluation_that_cannot_be_shared() -> None:
    with pytest.raises(ValueError, match="3 images cannot be shared by 4 processes"):
        eval_batches(3, 8, 0, 4)
    with pytest.raises(ValueError, match="5 images do not divide among 2 processes at eval_batch_size 1"):
        eval_batches(5, 1, 1, 2)
