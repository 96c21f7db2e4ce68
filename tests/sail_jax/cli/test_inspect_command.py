"""Contents of checkpoints: laws of the layout for every architecture, and unusual cases."""

import itertools
import json
from collections import Counter

import jax
import numpy as np
import pytest
from cells import chosen
from known_networks import GOLDEN, NAMES, model
from small_checkpoints import save

from experiments.models.resnet import ResNet
from sail_jax import architectures, spec
from sail_jax.checkpoint import save_checkpoint
from sail_jax.cli import inspect_figure
from sail_jax.cli.commands.inspect import FIGURE
from sail_jax.cli.main import main
from sail_jax.drawing import style
from sail_jax.trees import leaf_paths


def shapes_of(params):
    return dict(zip(leaf_paths(params), (x.shape for x in jax.tree.leaves(params)), strict=True))


def llama(layers=24):
    config = GOLDEN["llama"]["config"] | {"num_hidden_layers": layers}
    shapes = {}
    for name, shape in GOLDEN["llama"]["shapes"].items():
        if ".layers.0." in name:
            for i in range(layers):
                shapes[name.replace(".0.", f".{i}.")] = tuple(shape)
        elif ".layers." not in name:
            shapes[name] = tuple(shape)
    return config, shapes


def resnet(blocks=2):
    widths = (8, 12, 16, 20)
    module = ResNet(widths=widths, inner=widths, blocks=blocks, outputs=10)
    images = np.zeros((1, 16, 16, 3), np.float32)
    shapes = shapes_of(jax.eval_shape(lambda: module.init(jax.random.key(0), images)))
    return {"model_type": "flax_resnet", "widths": list(widths), "blocks": blocks}, shapes


def spec_of(config, shapes):
    like = {k: jax.ShapeDtypeStruct(s, np.float32) for k, s in shapes.items()}
    return architectures.of(config).rules(config).spec(like)


def drawn(found):
    """Tensors, counted with the layers that are like the one drawn."""
    return sum(len(row.paths) * band.repeats for band in found.bands for row in band.rows)


@pytest.mark.parametrize("name", chosen(NAMES, "gpt2", "flax mlp"))
def test_every_tensor_has_its_place_and_every_use_its_mark(name):
    m = model(name)
    found = inspect_figure.layout(m.spec, shapes_of(m.params))
    assert drawn(found) == len(m.spec.leaves)
    shown = [path for band in found.bands for row in band.rows for path in row.paths]
    assert max(Counter(shown).values()) == 1
    for band in found.bands:
        for row in band.rows:
            factors = {
                (f.space, f.role) for p in row.paths for axis in m.spec.axes(p) for f in axis
            }
            assert factors <= set(row.marks)
    touched = {f.space for path in shown for axis in m.spec.axes(path) for f in axis}
    assert {space[0] for space in found.spaces} == touched
    repeats = sum(space[2] for space in found.spaces)
    assert repeats == len(m.spec.spaces)


def test_layers_are_drawn_once():
    config, shapes = llama()
    found = inspect_figure.layout(spec_of(config, shapes), shapes)
    assert [(b.heading, b.repeats) for b in found.bands] == [
        ("", 1), ("model.layers.{0..23}", 24), ("", 1),
    ]  # fmt: skip
    labels = [row.label for row in found.bands[1].rows]
    assert labels == [
        "input_layernorm",
        *(f"self_attn.{p}_proj" for p in "qkvo"),
        "post_attention_layernorm",
        *(f"mlp.{p}_proj" for p in ("gate", "up", "down")),
    ]
    assert ("hidden.0", "hidden.{i}", 24) in found.spaces
    # one layer that differs is drawn apart
    del shapes["model.layers.7.mlp.gate_proj.weight"]
    found = inspect_figure.layout(spec_of(config, shapes), shapes)
    assert [b.repeats for b in found.bands] == [1, 23, 1, 1]


@pytest.mark.slow
def test_stages_differ_and_their_blocks_may_not():
    config, shapes = resnet(blocks=3)
    found = inspect_figure.layout(spec_of(config, shapes), shapes)
    headings = [(b.heading, b.repeats) for b in found.bands if b.heading]
    assert headings[0] == ("stage0_block{0..2}", 3)
    assert headings[1:3] == [("stage1_block0", 1), ("stage1_block{1,2}", 2)]
    assert drawn(found) == len(shapes)


@pytest.mark.slow
@pytest.mark.parametrize("make", [llama, resnet])
def test_the_drawing_is_legible(make):
    """No label covers another, none leaves the page, at sizes that can be read."""
    config, shapes = make()
    s = spec_of(config, shapes)
    figure = inspect_figure.draw(inspect_figure.layout(s, shapes), s, "a title")
    figure.canvas.draw()
    ax, page = figure.axes[0], figure.bbox
    rows = [label.get_window_extent() for label in ax.get_yticklabels()]
    rows.sort(key=lambda box: box.y0)
    assert all(low.y1 <= high.y0 for low, high in itertools.pairwise(rows))
    heads = ax.get_xticklabels()
    for box in [*rows, *(label.get_window_extent() for label in heads)]:
        assert page.x0 <= box.x0
        assert box.x1 <= page.x1
        assert page.y0 <= box.y0
        assert box.y1 <= page.y1
    # slanted labels of two lines: their feet are further apart than both lines are wide
    feet = [ax.transData.transform((x, 0))[0] for x in ax.get_xticks()]
    line = heads[0].get_fontsize() * figure.dpi / 72
    assert min(np.diff(feet)) * np.sin(np.radians(heads[0].get_rotation())) > 2 * line
    assert {text.get_fontsize() for text in ax.texts} <= {7.5, 8.0, 12.0}
    assert style.png(figure) == style.png(figure)
    assert figure.get_size_inches().max() < 20


@pytest.mark.slow
def test_the_command(tmp_path, capsys):
    config, shapes = llama(3)
    params = {k: np.zeros(s, np.float16) for k, s in shapes.items()}
    folder, out = save(tmp_path / "m", params, config), tmp_path / "drawn"
    record = tmp_path / "r.json"
    assert main(["inspect", str(folder), "--out", str(out), "--json", str(record)]) == 0
    shown = capsys.readouterr().out
    about = json.loads(record.read_text())
    total = sum(x.size for x in params.values())
    assert about["parameters"] == total == sum(t["parameters"] for t in about["tensors"])
    assert about["bytes"] == 2 * total
    assert about["architecture"] == "llama (LlamaForCausalLM)"
    assert "model.layers.{0..2}.mlp.up_proj x 3" in shown
    hidden = next(s for s in about["spaces"] if s["name"] == "hidden.1")
    assert [p.rsplit(".", 2)[1] for p in hidden["writers"]] == ["up_proj"]
    assert [p.rsplit(".", 2)[1] for p in hidden["gains"]] == ["gate_proj"]
    assert hidden["parameters"] == 3 * 8 * 12
    resid = next(s for s in about["spaces"] if s["name"] == "resid")
    assert len(resid["gains"]) == 7
    assert (out / FIGURE).read_bytes()[:4] == b"\x89PNG"
    assert main(["inspect", str(folder), "--full"]) == 0
    assert "model.layers.2.mlp.up_proj.weight" in capsys.readouterr().out


def test_names_are_drawn_as_they_are():
    """No name is mathematics, and one of any length has its place."""
    odd = [r"a$\frac$", "b$x$\x1b", "c" * 9999]
    params = {f"layers.{i}.{name}": np.zeros((2, 2)) for i in range(2) for name in odd}
    spaces = dict.fromkeys(params, "u* u")
    found = spec(params, spaces)
    layout = inspect_figure.layout(found, shapes_of(params))
    figure = inspect_figure.draw(layout, found, "$t$" * 99)
    assert figure.get_size_inches().max() < 20
    labels = [text.get_text() for text in figure.axes[0].get_yticklabels()]
    assert len(labels) == 2
    assert all(r" (a\$\frac\$, b\$x\$\x1b," in label for label in labels)
    assert style.png(figure)[:4] == b"\x89PNG"


def test_an_unknown_architecture_is_drafted(tmp_path, capsys):
    params = {f"layers.{i}.w": np.zeros((4, 6), np.float32) for i in range(2)}
    params |= {"scalar.b": np.ones((), np.float32), "steps": np.ones(3, np.int64)}
    config = {"model_type": "novel"}
    folder = save(tmp_path / "m", params, config)
    assert main(["inspect", str(folder), "--out", str(tmp_path / "d")]) == 0
    shown = capsys.readouterr().out
    assert "no table for the architecture 'novel'" in shown
    assert "? layers.0.w: which axis is read, and which is written?" in shown
    assert main(["inspect", str(folder), "--draft"]) == 0
    table = capsys.readouterr().out
    spec = tmp_path / "t.yaml"
    spec.write_text(table)
    assert main(["inspect", str(folder), "--spec", str(spec)]) == 2
    assert "questions are open, such as 'layers" in capsys.readouterr().err
    spec.write_text(table.partition("open:")[0])
    assert main(["inspect", str(folder), "--spec", str(spec)]) == 0


def odd_checkpoints():
    one = np.ones((4, 6), np.float32)
    lora = {
        f"base_model.model.layers.{i}.q_proj.lora_{x}.weight": one for i in range(2) for x in "AB"
    }
    broken = {"model_type": "llama", "hidden_size": 8}
    wrong, _ = llama(1)
    return {
        "lora": (lora, None),
        "numbers": ({"0": one, "1": one, "2.3.4": one}, None),
        "scalars": ({"b": np.ones((), np.float32), "a.b": np.ones((), np.float32)}, None),
        "empty": ({"e": np.ones((0, 3), np.float32)}, None),
        "many axes": ({"c": np.ones((2, 3, 2, 3, 2), np.float32), "k": np.ones(7, bool)}, None),
        "config that says little": ({"w": one}, broken),
        "config of another model": ({"w": one}, wrong),
    }


@pytest.mark.parametrize("name", odd_checkpoints())
def test_never_a_traceback(name, tmp_path, capsys):
    params, config = odd_checkpoints()[name]
    folder = save(tmp_path / "m", params, config)
    if name == "lora":
        about = {"r": 4, "base_model_name_or_path": "some/model"}
        (folder / "adapter_config.json").write_text(json.dumps(about))
    assert main(["inspect", str(folder), "--out", str(tmp_path / "d")]) == 0
    shown = capsys.readouterr()
    total = sum(x.size for x in params.values())
    assert f"{len(params)} tensors, {total:,} parameters" in shown.out
    if name == "lora":
        assert "LoRA adapter (rank 4, of some/model)" in shown.out
    if name.startswith("config"):
        assert "note: " in shown.out
    assert main(["inspect", str(folder), "--draft"]) in (0, 2)
    assert main(["inspect", str(tmp_path / "nowhere")]) == 2
    save_checkpoint(tmp_path / "one.npz", params)
    assert main(["inspect", str(tmp_path / "one.npz")]) == 0
