"""Phase diagrams of other inputs: by their limit, and by drawn data."""

import numpy as np
import pytest

from theory import deep_linear
from theory.deep_linear import covariance, risks

LOADS, ANGLES = [0.25, 0.5, 1.5], [0.2, 0.9, 1.4]


def values(*args, **options):
    ax = deep_linear.phase_diagram(*args, loads=LOADS, thetas=ANGLES, **options)
    return np.asarray(ax.collections[0].get_array()).reshape(3, 3)


@pytest.mark.slow
def test_isotropic_covariance_is_the_limit():
    limit = risks.transferability_limit(
        "fine_tuning", load=np.array(LOADS), theta=np.array(ANGLES)[:, None], sigma=0.3
    )
    found = values("fine_tuning", covariance=np.ones(40), sigma=0.3)
    np.testing.assert_allclose(found, limit, atol=2e-5)
    # 0.3 of all inputs: the same risks for outputs of 0.3^2
    scaled = values("fine_tuning", covariance=0.09 * np.eye(40), sigma=0.09)
    np.testing.assert_allclose(scaled, 0.09 * limit, atol=2e-6)


@pytest.mark.slow
def test_linear_transfer_agrees_with_drawn_data():
    """The null: the diagram's risk is the mean over 2,000 draws. |z| < 4 at each of three cells;
    1 % of the risk is 3 standard errors."""
    s, n, sigma = np.asarray(covariance.power_law(20, 1.0)), 5, 0.3
    found = values("linear", covariance=np.diag(s), sigma=sigma)[:, 0]
    rng, source = np.random.default_rng(0), np.full(20, 20**-0.5)
    other = source * (-1) ** np.arange(20)
    x = rng.normal(size=(2000, n, 20)) * np.sqrt(s)
    noise = sigma * rng.normal(size=(2000, n))
    for value, theta in zip(found, ANGLES, strict=True):
        target = np.cos(theta) * source + np.sin(theta) * other
        y, z = x @ target + noise, x @ source
        scale = (y * z).sum(-1) / (z * z).sum(-1)
        risk = ((scale[:, None] * source - target) ** 2 @ s)[:, None]
        scratch = covariance.scratch_risk(s, target, n=n, sigma=sigma)
        gain = float(scratch) - risk
        assert abs(value - gain.mean()) < 4 * gain.std() / 2000**0.5


def test_numbers_of_samples_are_the_axis():
    ax = deep_linear.phase_diagram("linear", d=10, n=[3, 5, 8], thetas=ANGLES, cmap="RdBu")
    assert ax.get_xlabel() == "samples $n$"
    by_load = deep_linear.phase_diagram("linear", d=10, loads=[0.3, 0.5, 0.8], thetas=ANGLES)
    np.testing.assert_array_equal(
        *(np.asarray(one.collections[0].get_array()) for one in (ax, by_load))
    )
    single = deep_linear.phase_diagram("linear", width="single", style={"font.size": 8})
    assert single.figure.get_size_inches()[0] == 3.5
    with pytest.raises(ValueError, match="n requires d or covariance"):
        deep_linear.phase_diagram("linear", n=[3])
    with pytest.raises(ValueError, match="loads and n: expected only one"):
        deep_linear.phase_diagram("linear", n=[3], d=5, loads=[0.1])
    for name, given in ("n", [5]), ("n", [5, 3]), ("thetas", [0.1]), ("loads", 0.5):
        with pytest.raises(ValueError, match=f"{name}: expected two or more increasing numbers"):
            deep_linear.phase_diagram("linear", d=10, **{name: given})
    with pytest.raises(ValueError, match="d: expected the size of covariance, 3; got 4"):
        deep_linear.phase_diagram("linear", d=4, covariance=np.ones(3))
