"""`convert`: runs of MaxText and Tunix to Hugging Face's folders and back, tensor by tensor."""

import json
import math

import framework_trees as trees
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest

from sail_jax.checkpoint import (
    CheckpointError,
    RunOptions,
    convert_checkpoint,
    load_checkpoint,
    open_checkpoint,
    save_checkpoint,
)
from sail_jax.checkpoint.sources.converted import as_hugging_face, as_tree
from sail_jax.cli import main as cli
from sail_jax.interop.layouts import from_hugging_face, links
from sail_jax.merging.tensors import read_whole


def folder(path, config, dtype=np.float32):
    """A folder of Hugging Face, and its tensors."""
    tensors = trees.tensors(config, dtype)
    save_checkpoint(path, tensors)
    (path / "config.json").write_text(json.dumps(config))
    return tensors


def flat(tree, at=""):
    if not isinstance(tree, dict):
        return {at.removesuffix("/"): tree}
    return {k: v for name, child in tree.items() for k, v in flat(child, f"{at}{name}/").items()}


def test_there_and_back_by_way_of_both_frameworks(tmp_path, capsys):
    config = trees.config("gemma2")
    tensors = folder(tmp_path / "hf", config, ml_dtypes.bfloat16)
    (tmp_path / "hf" / "tokenizer.json").write_text("{}")

    def convert(source, out, *options):
        code = cli.main(["convert", str(tmp_path / source), str(tmp_path / out), *options])
        assert code == 0, capsys.readouterr().err
        return capsys.readouterr()

    said = convert("hf", "mt", "--to", "maxtext", "--dtype", "float32", "--vocab-size", "16")
    assert "5 rows of padding" in said.err
    assert "hugging-face to maxtext" in said.out
    wide = {name: x.astype(np.float32) for name, x in tensors.items()}
    want = flat(from_hugging_face(wide, "maxtext", config, vocab_size=16))
    found = load_checkpoint(tmp_path / "mt")
    assert open_checkpoint(tmp_path / "mt").format == "orbax"
    assert found.keys() == want.keys()
    for name, x in want.items():
        np.testing.assert_array_equal(found[name], x, name)
    convert("mt", "tunix", "--to", "tunix")
    convert("tunix", "back", "--to", "hugging-face", "--dtype", "bfloat16")
    back = load_checkpoint(tmp_path / "back")
    assert back.keys() == tensors.keys()
    for name, x in tensors.items():
        np.testing.assert_array_equal(back[name].view(np.uint16), x.view(np.uint16), name)
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == config
    assert (tmp_path / "back" / "tokenizer.json").read_text() == "{}"


def test_a_tree_is_found_in_the_training_state_of_a_run(tmp_path):
    config = trees.config("qwen3")
    tensors = folder(tmp_path / "hf", config)
    tree = {"params": from_hugging_face(tensors, "maxtext", config)}
    state = {"params": tree, "opt_state": {"mu": tree, "nu": tree}, "step": np.asarray(7, np.int32)}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "run" / "7" / "items", state)
        checkpointer.wait_until_finished()
    done = convert_checkpoint(
        tmp_path / "run", tmp_path / "out", "hugging-face", config=tmp_path / "hf" / "config.json"
    )
    assert done.source == "maxtext"
    assert any("left out, as not selected: 'opt_state/mu/" in note for note in done.notes)
    found = load_checkpoint(tmp_path / "out")
    assert all((found[name] == x).all() for name, x in tensors.items())


def test_a_leaf_is_read_once_for_all_its_tensors(tmp_path):
    config = trees.config("qwen3")
    tensors = trees.tensors(config)
    tree = flat(from_hugging_face(tensors, "maxtext", config))
    save_checkpoint(tmp_path / "tree.npz", tree)
    with open_checkpoint(tmp_path / "tree.npz") as checkpoint:
        reads = []
        for name, tensor in list(checkpoint.tensors.items()):
            read = tensor.read

            def counted(out, start=0, read=read, name=name):
                reads.append(name)
                read(out, start)

            tensor.read = counted
        view = as_hugging_face(checkpoint, links("maxtext", config), config, np.dtype)
        for _ in range(2):
            for name, x in view.tensors.items():
                np.testing.assert_array_equal(read_whole(x).reshape(x.shape), tensors[name])
                assert x.needs >= x.dtype.itemsize * math.prod(x.shape)
        # A leaf is forgotten after the last of its tensors: read again, it is read once more.
        assert sorted(reads) == sorted([*tree, *tree])


def test_layers_of_other_shapes_are_refused(tmp_path):
    config = trees.config("qwen3")
    tensors = trees.tensors(config)
    tensors["model.layers.1.mlp.gate_proj.weight"] = np.ones((9, 12), np.float32)
    save_checkpoint(tmp_path / "hf", tensors)
    with (
        open_checkpoint(tmp_path / "hf") as checkpoint,
        pytest.raises(CheckpointError, match=r"wi_0/kernel': its tensors differ in shape"),
    ):
        as_tree(checkpoint, links("maxtext", config), config, np.dtype)


def test_qwixs_factors_are_folded_on_the_way(tmp_path, capsys):
    config = trees.config("qwen3")
    tensors = folder(tmp_path / "hf", config)
    tree = flat(from_hugging_face(tensors, "maxtext", config))
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(s).astype(np.float32) for s in ((12, 2, 3), (3, 2, 10)))
    tree |= {"decoder/layers/mlp/wi_0/kernel_lora_a": a, "decoder/layers/mlp/wi_0/kernel_lora_b": b}
    save_checkpoint(tmp_path / "run", tree, format="orbax")
    given = {"config": config}
    with pytest.raises(ValueError, match=r"kernel_lora_a' is a factor of low rank.*lora_alpha"):
        convert_checkpoint(tmp_path / "run", tmp_path / "no", "hugging-face", **given)
    convert_checkpoint(tmp_path / "run", tmp_path / "out", "hugging-face", lora_alpha=6.0, **given)
    found = load_checkpoint(tmp_path / "out")
    for n in range(2):
        name = f"model.layers.{n}.mlp.gate_proj.weight"
        # alpha / rank = 2; out = in @ kernel, and the weight of torch is transposed.
        want = tensors[name] + 2.0 * (a[:, n].astype(float) @ b[:, n].astype(float)).T
        np.testing.assert_allclose(found[name], want, atol=20 * np.finfo(np.float32).eps)
    with pytest.raises(ValueError, match="such as 'kernel_lora_a' of qwix, got none"):
        convert_checkpoint(tmp_path / "hf", tmp_path / "no", "tunix", lora_alpha=6.0)
    # Merged apart they would mean nothing.
    recipe = tmp_path / "recipe.yaml"
    models = [{"model": str(tmp_path / "run"), "parameters": {"weight": 1}}] * 2
    recipe.write_text(json.dumps({"models": models, "merge_method": "linear"}))
    assert cli.main(["merge", str(recipe), str(tmp_path / "merged")]) == 2
    assert "holds factors of low rank that qwix stores" in capsys.readouterr().err


def test_resumed_and_refused(tmp_path):
    config = trees.config("qwen3")
    folder(tmp_path / "hf", config)
    first = convert_checkpoint(tmp_path / "hf", tmp_path / "out.npz", "tunix")
    again = convert_checkpoint(
        tmp_path / "hf", tmp_path / "out.npz", "tunix", run=RunOptions(resume=True)
    )
    assert (first.unchanged, again.unchanged) == (False, True)
    refusals = [
        (("hf", "x", "pytorch"), {}, "expected one of 'hugging-face', .*; got 'pytorch'"),
        (("hf", "x", "hugging-face"), {}, "Hugging Face tensors already"),
        (("hf", "x", "maxtext"), {"dtype": "float23"}, "dtype.*got 'float23'.*float32"),
        (("hf", "x", "maxtext"), {"vocab_size": 3}, "hf: vocab_size.*11 rows"),
        (("out.npz", "x", "maxtext"), {}, "Hugging Face config.json of the network is needed"),
    ]
    for (source, out, to), options, message in refusals:
        with pytest.raises(ValueError, match=message):
            convert_checkpoint(tmp_path / source, tmp_path / out, to, **options)
    assert not (tmp_path / "x").exists()


def test_trees_without_a_config_are_recognised(tmp_path, capsys):
    config = trees.config("qwen3")
    tree = flat(from_hugging_face(trees.tensors(config), "maxtext", config))
    save_checkpoint(tmp_path / "run", tree, format="orbax")
    assert cli.main(["inspect", str(tmp_path / "run")]) == 0
    said = capsys.readouterr().out
    assert "maxtext" in said.splitlines()[0]
    assert "layer   2     stack" in said


@pytest.mark.slow
def test_trees_without_a_config_grow(tmp_path):
    config = trees.config("qwen3")
    tree = flat(from_hugging_face(trees.tensors(config), "maxtext", config))
    save_checkpoint(tmp_path / "run", tree, format="orbax")
    grown = [str(tmp_path / "run"), str(tmp_path / "grown"), "--to", "hidden=20"]
    assert cli.main(["grow", *grown, "--quiet"]) == 0
    assert load_checkpoint(tmp_path / "grown")["decoder/layers/mlp/wo/kernel"].shape == (20, 2, 12)
