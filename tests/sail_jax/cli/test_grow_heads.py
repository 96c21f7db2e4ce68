"""`sail-jax grow` and `align` of networks with the heads of transformers, from files to files."""

import json

import numpy as np
import pytest
from cells import soak_unless
from known_networks import HEADS, model

from sail_jax.architectures import forward
from sail_jax.checkpoint import load_checkpoint, open_checkpoint, save_checkpoint
from sail_jax.checkpoint.sources.agreement import certified
from sail_jax.cli import main as cli


def saved(folder, name, more=None):
    config = json.dumps(HEADS[name]["config"]).encode()
    save_checkpoint(folder, model(name).params | (more or {}), extras={"config.json": config})
    return folder


def done(capsys, *argv):
    code = cli.main([*map(str, argv), "--quiet"])
    shown = capsys.readouterr()
    return code, shown.out, shown.err


CLASSIFIERS = ["BertForSequenceClassification", "RobertaForSequenceClassification"]
CLASSIFIERS += ["LlamaForSequenceClassification"]


@pytest.mark.soak
@pytest.mark.parametrize(
    "name", [soak_unless(n == "LlamaForSequenceClassification", n) for n in CLASSIFIERS]
)
def test_classifiers_are_certified_by_their_logits(tmp_path, capsys, name):
    old = saved(tmp_path / "old", name)
    grown = ["grow", old, tmp_path / "new", "--width", "2x", "--certify", "--lossless"]
    code, out, err = done(capsys, *grown)
    assert (code, err) == (0, "")
    assert "the function is preserved. Both networks were run" in out
    labels = {k: x for k, x in load_checkpoint(tmp_path / "new").items() if len(x) == 3}
    assert {x.shape[1:] for x in labels.values()} <= {(16,), ()}
    code, out, err = done(capsys, "align", old, old, tmp_path / "aligned", "--certify")
    assert (code, err) == (0, "")
    assert "the function is preserved. Both networks were run" in out


@pytest.mark.slow
def test_the_projection_of_clip_stays(tmp_path, capsys):
    old = saved(tmp_path / "old", "CLIPModel")
    assert done(capsys, "grow", old, tmp_path / "new", "--width", "2x", "--no-certify")[0] == 0
    config = json.loads((tmp_path / "new" / "config.json").read_text())
    assert (config["projection_dim"], config["text_config"]["hidden_size"]) == (6, 16)
    assert load_checkpoint(tmp_path / "new")["text_projection.weight"].shape == (6, 16)


@pytest.mark.slow
def test_outputs_of_another_size_are_said(tmp_path, capsys):
    old = saved(tmp_path / "old", "CLIPModel")
    said = "outputs of another size: projection_dim 6 to 12"
    code, out, _ = done(capsys, "grow", old, "--to", "projection_dim=12", "--plan")
    assert code == 0
    assert said in out
    to = ["grow", old, tmp_path / "new", "--to", "projection_dim=12"]
    code, out, _ = done(capsys, *to)
    assert code == 0
    assert said in out
    assert "outputs in float32: not finite, or different in shape" in out
    about = json.loads((tmp_path / "new" / "growth.json").read_text())
    assert about["exact"] is False
    assert about["agreement"][0]["largest"] is None
    assert "or different in shape" in (tmp_path / "new" / "README.md").read_text()
    code, _, err = done(capsys, *to[:2], tmp_path / "other", *to[3:], "--lossless")
    assert code != 0
    assert said in err
    assert not (tmp_path / "other").exists()


def test_an_unknown_head_is_refused_by_name(tmp_path, capsys):
    more = {"v_head.summary.weight": np.zeros((1, 8), np.float32)}
    old = saved(tmp_path / "old", "LlamaForSequenceClassification", more)
    code, _, err = done(capsys, "grow", old, tmp_path / "new", "--width", "2x")
    assert code != 0
    assert "v_head.summary.weight" in err
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_embeddings_are_compared_as_well_as_cosines(tmp_path):
    """Both projections rotated alike: the cosines stay, and the embeddings do not."""
    m, config = model("CLIPModel"), HEADS["CLIPModel"]["config"]
    turn = np.linalg.qr(np.random.default_rng(0).normal(size=(6, 6)))[0].astype(np.float32)

    def renew(tensors):
        names = ("text_projection.weight", "visual_projection.weight")
        return {**tensors, **{name: turn @ tensors[name] for name in names}}, config

    old = forward.clip(m.params, config, m.inputs)
    new = forward.clip(renew(m.params)[0], config, m.inputs)
    scale = np.abs(old["logits_per_image"]).max()
    assert np.abs(old["logits_per_image"] - new["logits_per_image"]).max() < 1e-5 * scale
    with open_checkpoint(saved(tmp_path / "old", "CLIPModel")) as checkpoint:
        (seen,) = certified(checkpoint.tensors, config, renew)
    assert not seen.preserved
    assert seen.largest > 0.1
