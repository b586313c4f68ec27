"""The Fréchet distance against closed forms, torch-fidelity, and the singular values of the features themselves."""

import warnings
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch_fidelity.metric_fid import fid_features_to_statistics, fid_statistics_to_metric

from headmix_vision.evaluation.frechet import Gaussian, Moments, frechet_distance


def correlated(count: int, dim: int, seed: int) -> torch.Tensor:
    """Features with a spectrum over three orders of magnitude and a mean away from zero, float64 [count, dim]."""
    generator = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(dim, dim, generator=generator, dtype=torch.float64)).Q
    scales = torch.logspace(0, -3, dim, dtype=torch.float64)
    features = torch.randn(count, dim, generator=generator, dtype=torch.float64) * scales @ basis
    return features + 0.5 + 0.1 * seed


def gaussian(features: torch.Tensor, batch_size: int = 64) -> Gaussian:
    moments = Moments()
    for batch in features.split(batch_size):
        moments.update(batch)
    return moments.gaussian()


@pytest.mark.parametrize("mean", [0.0, 1e6])
@pytest.mark.parametrize("batch_size", [1, 7, 300])
def test_moments_are_those_of_all_features_at_once(mean: float, batch_size: int) -> None:
    features = correlated(300, 10, 0) + mean
    result = gaussian(features, batch_size)
    np.testing.assert_allclose(result.mean, features.numpy().mean(0), rtol=1e-14)
    # features themselves carry 1e-16 of their mean
    np.testing.assert_allclose(result.covariance, np.cov(features.numpy(), rowvar=False), atol=1e-15 * max(1, mean))
    assert result.count == 300


@pytest.mark.parametrize("counts", [(30, 25), (300, 35)])
def test_distance_of_features_at_hand_is_that_of_their_moments(counts: tuple[int, int]) -> None:
    sides = [correlated(count, 40, seed) for seed, count in enumerate(counts)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = frechet_distance(*map(gaussian, sides))
        assert frechet_distance(*map(Gaussian.of_features, sides)) == pytest.approx(expected, rel=1e-12)


def test_float32_features_are_summed_in_float64() -> None:
    features = (correlated(5000, 4, 1) + 100).float()
    np.testing.assert_allclose(
        gaussian(features).covariance, np.cov(features.double().numpy(), rowvar=False), rtol=1e-9
    )


def test_closed_form_of_diagonal_gaussians() -> None:
    mean = torch.tensor([[0.0, 1.0, 2.0], [3.0, 1.0, 1.0]], dtype=torch.float64)
    deviation = torch.tensor([[1.0, 2.0, 0.0], [4.0, 2.0, 3.0]], dtype=torch.float64)
    a, b = (Gaussian(mean[i], deviation[i].square().diag()) for i in range(2))
    assert frechet_distance(a, b) == pytest.approx(9 + 0 + 1 + 9 + 0 + 9, rel=1e-14)


def test_closed_form_of_gaussians_that_do_not_commute() -> None:
    # in two dimensions tr((A B)^(1/2)) = sqrt(tr(A B) + 2 sqrt(det(A) det(B)))
    a = torch.tensor([[2.0, 0.7], [0.7, 1.0]], dtype=torch.float64)
    b = torch.tensor([[0.5, -0.3], [-0.3, 3.0]], dtype=torch.float64)
    zero = torch.zeros(2, dtype=torch.float64)
    root_trace = ((a @ b).trace() + 2 * (a.det() * b.det()).sqrt()).sqrt()
    expected = (a.trace() + b.trace() - 2 * root_trace).item()
    assert frechet_distance(Gaussian(zero, a), Gaussian(zero, b)) == pytest.approx(expected, rel=1e-13)


@pytest.mark.parametrize("dim", [5, 64, 200])
def test_agrees_with_torch_fidelity(dim: int) -> None:
    real, fake = correlated(600, dim, 0), correlated(500, dim, 1)
    expected = fid_statistics_to_metric(*map(fid_features_to_statistics, (real, fake)), verbose=False)
    assert frechet_distance(gaussian(real), gaussian(fake)) == pytest.approx(
        expected["frechet_inception_distance"], rel=1e-6
    )


def test_fewer_images_than_features_is_finite_exact_and_warned_about() -> None:
    real, fake = correlated(30, 100, 0), correlated(20, 100, 1)
    with pytest.warns(UserWarning, match=r"(30|20) images for 100 features"):
        distance = frechet_distance(gaussian(real), gaussian(fake))
    # tr((C_a C_b)^(1/2)) is the nuclear norm of the centred features' products
    a, b = ((x - x.mean(0)) / (len(x) - 1) ** 0.5 for x in (real, fake))
    roots = torch.linalg.svdvals(a @ b.T).sum()
    expected = (real.mean(0) - fake.mean(0)).square().sum() + a.square().sum() + b.square().sum() - 2 * roots
    assert distance == pytest.approx(expected.item(), rel=1e-9)


def test_zero_to_itself_and_no_warning_with_enough_images() -> None:
    side = gaussian(correlated(300, 100, 0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert frechet_distance(side, side) == pytest.approx(0, abs=1e-12)
        frechet_distance(*[gaussian(correlated(6, 5, seed)) for seed in (0, 1)])
    with pytest.warns(UserWarning, match="5 images for 5 features"):
        frechet_distance(*[gaussian(correlated(5, 5, seed)) for seed in (0, 1)])


def test_refusals() -> None:
    moments = Moments()
    with pytest.raises(ValueError, match=r"must be \[B, D\]"):
        moments.update(torch.zeros(3))
    moments.update(torch.zeros(1, 3))
    with pytest.raises(ValueError, match="1 images have no covariance"):
        moments.gaussian()
    moments.update(torch.ones(1, 3))
    assert moments.gaussian().covariance.tolist() == [[0.5] * 3] * 3
    with pytest.raises(ValueError, match=r"must be \[B, 3\]"):
        moments.update(torch.zeros(2, 4))
    with pytest.raises(ValueError, match="not finite"):
        moments.update(torch.full((2, 3), torch.nan))
    with pytest.raises(ValueError, match="do not belong together"):
        Gaussian(torch.zeros(3), torch.zeros(2, 2))
    for smallest, refused in ((-2e-3, True), (-5e-4, False), (1e-20, False)):
        one = Gaussian(torch.zeros(3), torch.tensor([1.0, smallest, 0.5]).double().diag())
        with pytest.raises(ValueError, match="not a covariance matrix") if refused else nullcontext():
            assert one.factor.shape == (3, 2)
    with pytest.raises(ValueError, match="5 and 4 features"):
        frechet_distance(gaussian(correlated(9, 5, 0)), gaussian(correlated(9, 4, 0)))
