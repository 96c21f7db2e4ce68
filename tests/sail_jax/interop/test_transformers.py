"""Behaviour with a simulated class of transformers; `.ci/peers` uses the real ones."""

import importlib.util
import json

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from sail_jax import spec_of
from sail_jax.architectures.files import Table
from sail_jax.cli.main import main
from sail_jax.interop import transformers
from sail_jax.interop.torch import jax_function

CONFIG = {"model_type": "strange", "architectures": ["StrangeModel"], "hidden_size": 3}
SHAPES = {"up.weight": (5, 3), "down.weight": (3, 5)}


def net(params, x):
    return jax.nn.relu(x @ params["up.weight"].T) @ params["down.weight"].T


@pytest.fixture
def call(capsys):
    """Runs a command, and returns its exit code, output and errors."""

    def run(*args):
        code = main([*args])
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def folders(tmp_path):
    """Two checkpoints of one network, whose hidden units stand in another order."""
    rng = np.random.default_rng(0)
    up, down = (rng.normal(size=s).astype(np.float32) for s in SHAPES.values())
    order = [3, 0, 4, 1, 2]
    for name, tensors in {"a": (up, down), "b": (up[order], down[:, order])}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(CONFIG))
        save_file(dict(zip(SHAPES, map(np.ascontiguousarray, tensors), strict=True)),
                  tmp_path / name / "model.safetensors")  # fmt: skip
    return tmp_path


@pytest.fixture
def installed(monkeypatch):
    """Simulates that the class of transformers is `net`."""
    x = np.random.default_rng(1).normal(size=(4, 3)).astype(np.float32)

    def inferred(config, shapes):
        assert config["model_type"] == "strange"
        return spec_of(net, dict(shapes), x)

    monkeypatch.setattr(transformers, "available", lambda: True)
    monkeypatch.setattr(transformers, "name_of", lambda config: "StrangeModel in transformers 0")
    monkeypatch.setattr(transformers, "spec_of_config", inferred)
    monkeypatch.setattr(
        transformers, "outputs_of_config", lambda config, n: lambda tensors: net(tensors, x)
    )


@pytest.mark.slow
def test_a_network_without_a_table_is_aligned_and_certified_by_its_class(call, folders, installed):
    out = folders / "out"
    code, said, err = call("align", str(folders / "a"), str(folders / "b"), str(out))
    assert code == 0, err
    assert "by the forward pass of StrangeModel in transformers 0" in said
    for name in SHAPES:
        a, b = ((folders / f / "model.safetensors").read_bytes() for f in ("a", "out"))
        assert a[-120:] == b[-120:], name


def test_what_the_forward_pass_shows_is_inspected(call, folders, installed):
    code, said, _ = call("inspect", str(folders / "a"))
    assert code == 0
    assert "the spaces are inferred from the forward pass of StrangeModel in transformers 0" in said
    assert "relu" in said


def test_networks_that_state_other_numbers_are_not_aligned(call, folders, installed):
    (folders / "b" / "config.json").write_text(json.dumps(CONFIG | {"num_heads": 2}))
    (folders / "a" / "config.json").write_text(json.dumps(CONFIG | {"num_heads": 4}))
    code, _, err = call("align", str(folders / "a"), str(folders / "b"), str(folders / "out"))
    assert code == 2
    assert "'num_heads'" in err


@pytest.mark.skipif(importlib.util.find_spec("torchax") is not None, reason="torchax is installed")
def test_without_torch_one_line_names_the_extra(call, folders):
    with pytest.raises(ImportError, match=r"pip install 'sail-jax\[torch\]'"):
        jax_function(None)
    assert not transformers.available()
    code, _, err = call("align", str(folders / "a"), str(folders / "b"), str(folders / "out"))
    assert code == 2
    assert "no table for the architecture 'strange'" in err
    assert "sail-jax[torch]" in err


def test_a_configuration_without_a_class_has_no_name():
    assert transformers.name_of({"architectures": [3]}) == ""
    assert transformers.name_of({}) == ""


def test_what_was_found_is_kept(monkeypatch, tmp_path):
    made = []

    def found(config, probe):
        made.append(config)
        return Table({"up.weight": "hidden _"}, spaces={"hidden": "relu"})

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(transformers.importlib.metadata, "version", lambda name: "1")
    monkeypatch.setattr(transformers, "table_by_probing", found)

    def spaces(config):
        return transformers.rules_of_config(config, 2)(config).spaces

    assert spaces(CONFIG) == spaces(CONFIG) == {"hidden": "relu"}
    assert len(made) == 1
    (path,) = (tmp_path / "sail-jax" / "tables").iterdir()
    for wrong in ("", "[]", "{}", '{"axes": 3, "other": 4}'):  # cut short, or of another program
        path.write_text(wrong)
        assert spaces(CONFIG) == {"hidden": "relu"}
    assert len(made) == 5
    spaces(CONFIG | {"hidden_size": 4})
    assert len(made) == 6
