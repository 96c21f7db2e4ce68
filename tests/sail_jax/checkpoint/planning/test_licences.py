"""A merge's model card states the licence of its inputs, or lists them."""

import pytest
import small_checkpoints

from sail_jax.checkpoint import merge_checkpoints
from sail_jax.checkpoint.formats.extras import licence_of


def card(folder, licences):
    for name, text in licences.items():
        small_checkpoints.save(folder / name, small_checkpoints.tensors())
        if text is not None:
            (folder / name / "README.md").write_text(f"---\ntags: [a]\nlicense: {text}\n---\n# x\n")
    merge_checkpoints([folder / name for name in licences], folder / "out")
    return (folder / "out/README.md").read_text()


def test_one_licence_of_all_inputs_is_the_merges(tmp_path):
    text = card(tmp_path, {"a": "apache-2.0", "b": "'apache-2.0'"})
    assert "\nlicense: apache-2.0\n" in text.split("---")[1]
    assert "Licences" not in text


@pytest.mark.parametrize("other", ["llama3.1", None])
def test_different_licences_are_listed(tmp_path, other):
    text = card(tmp_path, {"a": "mit", "b": other})
    assert "license:" not in text.split("---")[1]
    assert f"- `a`: mit\n- `b`: {other or 'none stated'}\n" in text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "license: mit",
        "# a\n---\nlicense: mit\n---\n",
        "---\nlicense: mit\n",  # without an end
        "---\nlicense: [mit]\n---\n",
        "---\nlicense: mit\n  apache\ntags: x\n--",
        "---\nlicense: <b>\n---\n",
        "---\nlicense: " + "a" * 100 + "\n---\n",
        "---\nlicense_name: mit\n---\n",
    ],
)
def test_what_is_no_licence_is_none(tmp_path, text):
    (tmp_path / "README.md").write_bytes(text.encode() + b"\xff")
    assert licence_of(tmp_path) == ""


def test_a_card_that_cannot_be_read_has_no_licence(tmp_path):
    assert licence_of(tmp_path) == ""
    (tmp_path / "README.md").mkdir()
    assert licence_of(tmp_path) == ""
