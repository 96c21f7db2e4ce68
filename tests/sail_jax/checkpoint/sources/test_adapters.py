"""Adapters mean what PEFT means: every way in which it saves them, against the definitions."""

import json

import adapter_cases
import numpy as np
import pytest

from sail_jax.checkpoint.formats.open import open_checkpoint
from sail_jax.checkpoint.sources.adapters import with_adapter
from sail_jax.merging.tensors import read_whole

EPS = float(np.finfo(np.float32).eps)


@pytest.fixture
def written(tmp_path):
    """Writes a case, and opens base and adapter."""
    opened = []

    def write(case):
        built = adapter_cases.write(case, tmp_path)
        opened.extend(open_checkpoint(tmp_path / name) for name in ("base", "adapter"))
        return built, *opened

    yield write
    for checkpoint in opened:
        checkpoint.close()


@pytest.mark.parametrize("name", adapter_cases.CASES)
def test_an_adapted_model_is_what_peft_computes(name, written):
    """A product of rank 4, its sum, a norm and a quotient, in float32: 16 roundings of the
    largest entry at most."""
    case = adapter_cases.CASES[name]
    built, base, adapter = written(case)
    view = with_adapter(base, adapter)
    assert view.tensors.keys() == built.right.keys()
    for key, want in built.right.items():
        got = read_whole(view.tensors[key])
        assert view.tensors[key].name == key
        assert got.dtype == np.float32
        assert got.shape == want.shape
        np.testing.assert_allclose(got, want, rtol=0, atol=16 * EPS * np.abs(want).max())
    config = view.extras["config.json"]
    config = json.loads(config if isinstance(config, bytes) else config.read_bytes())
    assert config == {**built.model, **case.says}
