"""Layers of a class in a new order: what counts as another function, and what merges say of it."""

import json

import pytest
import small_checkpoints

from sail_jax.checkpoint import RunOptions, merge_recipe
from sail_jax.checkpoint.recipe.yaml_tree import RecipeError
from sail_jax.interop import layers

ORDER = [0, 1, 0, 1, 2]
OLD = {"num_hidden_layers": 3, "depth_scale": 2, "first": 1, "last": True}


def built(config, count):
    """The layers of a class whose first ones are dense; one value has the depth of the network."""
    return [
        {"": "Layer", "place": 2 * i + 1, "depth": count, "dense": i < config["first"],
         "scale": config["depth_scale"] * count ** -0.5}
        for i in range(count)
    ]  # fmt: skip


@pytest.fixture
def stub(monkeypatch):
    monkeypatch.setattr(layers, "_built", built)


@pytest.mark.usefixtures("stub")
def test_a_layer_of_another_kind_is_named_with_the_entry_that_states_it():
    got = layers.compared(OLD, OLD | {"num_hidden_layers": 5}, ORDER)
    assert (
        got
        == "'dense' of layer 2, made of layer 0, would be False for True; it follows from 'first' 1"
    )


@pytest.mark.usefixtures("stub")
def test_values_that_depend_on_the_depth_are_named():
    got = layers.compared(OLD | {"first": 0}, OLD | {"num_hidden_layers": 5, "first": 0}, ORDER)
    assert got.startswith("'scale' of layer 0, made of layer 0, would be 0.894")
    assert got.endswith("it follows from 'depth_scale' 2")


def test_numbers_of_layers_and_their_count_are_no_difference(monkeypatch):
    monkeypatch.setattr(
        layers, "_built", lambda config, n: [{"place": 3 * i, "depth": n} for i in range(n)]
    )
    assert layers.compared(OLD, OLD, ORDER) == ""


def test_kinds_of_layers_without_a_number_have_none_in_their_new_place(monkeypatch):
    def mixed(config, n):
        return [
            {"place": i, "kind": 0} if config["kinds"][i % len(config["kinds"])] else {"kind": 1}
            for i in range(n)
        ]

    monkeypatch.setattr(layers, "_built", mixed)
    old = OLD | {"kinds": [True, False, True]}
    assert layers.compared(old, OLD | {"kinds": [True, False, True, False, True]}, ORDER) == ""
    got = layers.compared(old, OLD | {"kinds": [True, False, True, True, True]}, ORDER)
    assert got.startswith("'kind' of layer 3, made of layer 1, would be 0 for 1")


def test_a_factor_that_grows_with_the_layers_is_a_difference(monkeypatch):
    """As in differential attention, whose formula contains the number of the layer."""
    monkeypatch.setattr(layers, "_built", lambda _, n: [{"factor": 0.1 * i} for i in range(n)])
    got = layers.compared(OLD, OLD, ORDER)
    assert got == "'factor' of layer 2, made of layer 0, would be 0.2 for 0.0"


def test_a_network_that_cannot_be_built_is_a_difference_only_if_the_old_one_can_be(monkeypatch):
    def fails(config, count):
        if count == config["num_hidden_layers"] == 5:
            raise ValueError("no layer 5")
        return built(config, count)

    monkeypatch.setattr(layers, "_built", fails)
    assert layers.compared(OLD, OLD | {"num_hidden_layers": 5}, ORDER) == "no layer 5"
    with pytest.raises(ValueError, match="no layer 5"):
        layers.compared(OLD | {"num_hidden_layers": 5}, OLD, ORDER)


def test_merges_of_slices_are_refused_unless_crimes_are_allowed(tmp_path, monkeypatch):
    small_checkpoints.save(tmp_path / "a", small_checkpoints.tensors(), small_checkpoints.CONFIG)
    asked = []
    monkeypatch.setattr(layers, "available", lambda: True)
    monkeypatch.setattr(
        layers, "changed_kind", lambda old, new, order: asked.append((new, order)) or "'x' differs"
    )
    part = {"sources": [{"model": str(tmp_path / "a"), "layer_range": [0, 1]}]}
    recipe = {"merge_method": "passthrough", "slices": [part, part, part]}
    (tmp_path / "r.json").write_text(json.dumps(recipe))
    with pytest.raises(RecipeError, match="in their new order: 'x' differs; allow_crimes=True"):
        merge_recipe(tmp_path / "r.json", tmp_path / "out")
    ((new, order),) = asked
    assert (order, new["num_hidden_layers"]) == ([0, 0, 0], 3)
    done = merge_recipe(tmp_path / "r.json", tmp_path / "out", run=RunOptions(allow_crimes=True))
    assert "a layer computes another function than before: 'x' differs" in done.notes


@pytest.mark.slow
def test_a_process_that_fails_finds_nothing(monkeypatch):
    """Without transformers, or for a class of none of its versions."""
    assert layers.changed_kind({"model_type": "none", "num_hidden_layers": 1}, {}, [0]) == ""
