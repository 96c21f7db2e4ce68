"""Names that were changed work for one release, and then their tests fail."""

import importlib
import inspect
import pkgutil
import warnings

import pytest

import sail_jax
from sail_jax.deprecated import UNTIL, former, renamed
from theory import deep_linear


def numbers(version):
    return tuple(map(int, version.split(".")[:2]))


@renamed(until="99.0", ratio="density", knobs="options")
def trim(density, *, options=()):
    """Trims."""
    return density, options


@renamed("n", "d", until="99.0", load="n", mode={"fine_tune": "fine_tuning"})
def risk(mode, *, n, d=2):
    """Computes a risk."""
    return mode, n, d


def test_a_former_name_of_a_package_is_the_new_one_and_warns_where_it_is_used():
    told = "theory.deep_linear.fine_tune_risk is now theory.deep_linear.fine_tuning_risk; the old"
    with pytest.warns(DeprecationWarning, match=f"^{told} name goes in 0.4$") as seen:
        assert deep_linear.fine_tune_risk is deep_linear.fine_tuning_risk  # pyright: ignore[reportAttributeAccessIssue]
    assert seen[0].filename == __file__
    with pytest.warns(DeprecationWarning, match=told) as seen:
        from theory.deep_linear import fine_tune_risk  # pyright: ignore[reportAttributeAccessIssue]
    assert fine_tune_risk is deep_linear.fine_tuning_risk
    assert {warning.filename for warning in seen} == {__file__}
    assert "fine_tune_risk" not in dir(deep_linear)


def test_a_former_keyword_is_taken_for_the_new_one_and_warns_where_it_is_used():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert trim(0.5, options=[1]) == (0.5, [1])
    told = rf"^ratio of {__name__}.trim is now density; the old name goes in 99.0$"
    with pytest.warns(DeprecationWarning, match=told) as seen:
        assert trim(ratio=0.5) == (0.5, ())  # pyright: ignore[reportCallIssue]
    assert seen[0].filename == __file__
    with pytest.raises(TypeError, match="ratio is now density, expected only one"):
        trim(density=1, ratio=0.5)  # pyright: ignore[reportCallIssue]
    assert str(inspect.signature(trim)) == "(density, *, options=())"
    assert trim.__doc__ == "Trims."


def test_arguments_that_were_positional_are_taken_by_name_and_warn_where_they_are_given():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert risk("linear", n=3, d=4) == ("linear", 3, 4)
    told = rf"^n, d of {__name__}.risk is now keyword-only; write risk\(n=..., d=...\) before 99.0$"
    with pytest.warns(DeprecationWarning, match=told) as seen:
        assert risk("linear", 3, 4) == ("linear", 3, 4)  # pyright: ignore[reportCallIssue]
    assert seen[0].filename == __file__
    with pytest.warns(DeprecationWarning, match="^n of"):
        assert risk("linear", 3, d=4) == ("linear", 3, 4)  # pyright: ignore[reportCallIssue]
    for wrong in (("linear", 1, 2, 3), ("linear",)):
        with pytest.raises(TypeError, match=r"positional|required"):
            risk(*wrong)
    with pytest.raises(TypeError, match="positional"):
        risk("linear", 3, n=3)  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize("how", [{"mode": "fine_tune"}, "fine_tune"])
def test_a_former_word_is_taken_for_the_new_one_and_warns_where_it_is_used(how):
    told = r"^mode='fine_tune' of .*risk is now mode='fine_tuning'; the old name goes in 99.0$"
    with pytest.warns(DeprecationWarning, match=told) as seen:
        found = risk(n=1, **how) if isinstance(how, dict) else risk(how, n=1)
    assert found == ("fine_tuning", 1, 2)
    assert seen[0].filename == __file__


def test_a_module_of_its_own_names_alone():
    get = former("sail_jax.checks", {"closest": "nearest"}, until="99.0")
    from sail_jax import checks

    with pytest.warns(DeprecationWarning, match=r"closest is now sail_jax.checks.nearest"):
        assert get("closest") is checks.nearest
    with pytest.raises(
        AttributeError, match=r"module 'sail_jax.checks' has no attribute 'nothing'"
    ):
        get("nothing")


def test_no_former_name_outlives_its_release():
    """If this test fails, remove the former name from the code."""
    for module in pkgutil.iter_modules(sail_jax.__path__, "sail_jax."):
        importlib.import_module(module.name)
    assert "theory.deep_linear.fine_tune_risk" in UNTIL
    assert f"{__name__}.trim(ratio=)" in UNTIL
    passed = [
        name for name, until in UNTIL.items() if numbers(until) <= numbers(sail_jax.__version__)
    ]
    assert not passed
