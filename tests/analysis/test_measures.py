"""Numbers that sum up weights and matrices."""

import pytest
import torch

from headmix_vision.analysis.measures import effective_count, effective_rank, mean_cosine, relative_distance


def test_effective_rank_counts_equal_directions():
    """The exponential of the entropy of the normalised singular values (Roy and Vetterli, 2007)."""
    assert effective_rank(torch.eye(5)) == pytest.approx(5)
    assert effective_rank(3 * torch.eye(5)[:3]) == pytest.approx(3)
    assert effective_rank(torch.ones(4, 6)) == pytest.approx(1)
    shares = torch.tensor([0.75, 0.25])
    assert effective_rank(shares.diag()) == pytest.approx(float((-shares * shares.log()).sum().exp()))


def test_effective_count_is_of_shares_whatever_their_sign_and_scale():
    weights = torch.tensor([[1.0, 1, 1, 1], [5, -5, 0, 0], [0, 0, -0.1, 0], [0, 0, 0, 0]])
    torch.testing.assert_close(effective_count(weights), torch.tensor([4, 2, 1, 1]).double())


def test_cosines_are_means_over_pairs():
    row = torch.tensor([1.0, 2, 3])
    assert mean_cosine(torch.stack([row, 2 * row])) == pytest.approx(1)
    assert mean_cosine(torch.stack([row, -row, torch.zeros(3)])) == pytest.approx(-1 / 3)
    assert mean_cosine(row[None]) is None


def test_distance_is_relative_to_the_start():
    assert relative_distance(torch.eye(4), torch.eye(4)) == 0
    assert relative_distance(torch.zeros(4, 4), torch.eye(4)) == 1
    assert relative_distance(3 * torch.eye(4), torch.eye(4)) == 2
