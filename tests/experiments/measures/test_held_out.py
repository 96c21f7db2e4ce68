"""Held-out examples from files, and their scores by definitions."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_tokenizers import tokenizer

from experiments.data.files import DataError
from experiments.measures import held_out
from sail_jax import architectures
from sail_jax.checkpoint.operations.trying import Running

VOCAB = 258


def lines(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def bigram(params, batch, override=None):
    """A network that is a table of logits of the next token."""
    return params["w"][batch["inputs"]], {}


def running(data):
    family = architectures.of({"model_type": "gpt2"})
    return Running(family, [], bigram, {name: jnp.asarray(x) for name, x in data.items()})


@pytest.mark.slow
def test_questions_are_answered_by_the_most_likely_choice(tmp_path):
    """Per token: the log-probabilities of a choice's tokens are averaged in NumPy."""
    path, _ = tokenizer(tmp_path, [("a", "b")])
    items = [
        {"question": "x", "choices": ["ab", "c"], "answer": 0},
        {"question": "xy", "choices": ["c", "ddd", "ab"], "answer": 1},
    ]
    one = lines(tmp_path / "one.jsonl", items[0])
    two = lines(tmp_path / "two.jsonl", items[1])
    found = held_out.read([one, two], path)
    assert found.kind == "questions"
    assert found.tasks == ["one", "two"]
    assert found.data["tokens"].shape[:2] == (2, 3)
    w = np.random.default_rng(0).normal(size=(VOCAB, VOCAB)).astype(np.float32)
    score, data = held_out.score(running({}), found)
    got = score({"w": jnp.asarray(w)}, data)
    logs = np.asarray(jax.nn.log_softmax(w))
    for k, item in enumerate(items):
        means = []
        for j in range(len(item["choices"])):
            tokens, scored = found.data["tokens"][k, j], found.data["scored"][k, j]
            places = np.flatnonzero(scored)
            means.append(np.mean([logs[tokens[t - 1], tokens[t]] for t in places]))
        assert got[k] == (np.argmax(means) == item["answer"])
    assert held_out.examples(found).inputs.shape == found.data["tokens"][:, 0].shape


def test_texts_are_scored_by_the_mean_log_likelihood(tmp_path):
    path, _ = tokenizer(tmp_path, [])
    file = lines(tmp_path / "t.jsonl", {"text": "hello"}, {"text": "hi"})
    found = held_out.read([file], path)
    assert found.kind == "texts"
    w = np.random.default_rng(1).normal(size=(VOCAB, VOCAB)).astype(np.float32)
    score, data = held_out.score(running(found.data), found)
    got = score({"w": jnp.asarray(w)}, data)
    logs = np.asarray(jax.nn.log_softmax(w))
    for k, size in enumerate((5, 2)):
        row = found.data["inputs"][k]
        expected = np.mean([logs[row[t], row[t + 1]] for t in range(size - 1)])
        np.testing.assert_allclose(got[k], expected, rtol=1e-5)


def test_arrays_of_several_files_are_joined(tmp_path):
    for name, n, width in (("a", 3, 4), ("b", 2, 6)):
        tokens = np.full((n, width), 7, np.int32)
        np.savez(tmp_path / f"{name}.npz", tokens=tokens, labels=np.ones((n, width), np.int32))
    found = held_out.read([tmp_path / "a.npz", tmp_path / "b.npz"])
    assert found.tasks == ["a"] * 3 + ["b"] * 2
    assert found.data["tokens"].shape == (5, 6)
    # Padding is excluded.
    assert (found.data["labels"][:3, 4:] == -100).all()
    assert (found.data["labels"][3:] == 1).all()


def test_refusals(tmp_path):
    path, _ = tokenizer(tmp_path, [])
    texts = lines(tmp_path / "t.jsonl", {"text": "hello"})
    asked = lines(tmp_path / "q.jsonl", {"question": "x", "choices": ["a", "b"], "answer": 0})
    np.savez(tmp_path / "a.npz", x=np.zeros((2, 3)))
    np.savez(tmp_path / "b.npz", y=np.zeros((2, 3)))
    np.savez(tmp_path / "c.npz", x=np.zeros((2, 3)), y=np.zeros(3))
    for files, given, message in (
        ([texts], None, "JSON lines need a tokenizer"),
        ([tmp_path / "a.npz"], path, "a tokenizer is for JSON lines"),
        ([texts, asked], path, "files of one kind"),
        ([tmp_path / "a.npz", tmp_path / "b.npz"], None, "the same arrays"),
        ([tmp_path / "c.npz"], None, "of one length n"),
        ([tmp_path / "none.npz"], None, "none.npz"),
        ([tmp_path / "x.txt"], None, "expected .npz, or .jsonl"),
        ([lines(tmp_path / "z.jsonl", {"z": 1})], path, "the fields of a question"),
    ):
        with pytest.raises((DataError, ValueError), match=message):
            held_out.read(files, given)
    with pytest.raises(ValueError, match="expected 'inputs' or 'tokens'"):
        held_out.examples(held_out.read([tmp_path / "a.npz"]))
    with pytest.raises(ValueError, match="expected 'labels'"):
        held_out.score(running({}), held_out.read([tmp_path / "a.npz"]))
