"""Checkpoints with the tokenizer of another: their rows, and errors."""

import json

import ml_dtypes
import numpy as np
import pytest
from small_checkpoints import CONFIG, tensors

from sail_jax.checkpoint import (
    RunOptions,
    load_checkpoint,
    merge_recipe,
    save_checkpoint,
    transplant_checkpoint,
)
from sail_jax.checkpoint.contents.vocabulary import Vocabulary, byte_table, counterparts
from sail_jax.checkpoint.operations.merging import MergeRequest
from sail_jax.checkpoint.operations.running import planned
from sail_jax.checkpoint.recipe.parts import Ref
from sail_jax.checkpoint.recipe.recipes import simple
from sail_jax.checkpoint.sources import transplanted
from sail_jax.cli import main as cli
from sail_jax.transplant import transplant

EPS = np.finfo(np.float32).eps
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
BIAS = "lm_head.bias"
WORDS = ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j"]
BASE = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in (10, 65)), *(f"▁{w}" for w in WORDS)]
DONOR = ["\u010a", "<|end|>", *(f"Ġ{w}" for w in reversed(WORDS)), "Ġnew", "Ġother", "Ġthird", "A"]
DONOR_WIDTH = 6


def tokenizer(ids, special, **steps):
    """A tokenizer.json: the special tokens are in the core and marked, as in many releases."""
    added = [{"id": ids[t], "content": t, "special": True} for t in special]
    model = {"type": "BPE", "vocab": ids, "merges": []}
    return {"model": model, "added_tokens": added, **steps}


def save(folder, arrays, tokens, special, roles, config=(), generation=(), **steps):
    ids = tokens if isinstance(tokens, dict) else {text: i for i, text in enumerate(tokens)}
    documents = {
        "config.json": CONFIG | {"vocab_size": len(arrays[EMBEDDING]), **dict(config)},
        "tokenizer.json": tokenizer(ids, special, **steps),
        "tokenizer_config.json": roles,
        "generation_config.json": {"eos_token_id": 2, "top_k": 7} | dict(generation),
    }
    extras = {name: json.dumps(document).encode() for name, document in documents.items()}
    save_checkpoint(folder, arrays, extras=extras)


@pytest.fixture
def pair(tmp_path):
    """A base and a donor of a different width; the base's rows are linear images of the donor's."""

    def make(dtype=np.float32, tied=False, padding=0):
        rng = np.random.default_rng(0)
        M = {name: rng.normal(size=(DONOR_WIDTH, 16)) for name in (EMBEDDING, HEAD)}
        donor = {
            name: rng.normal(size=(len(DONOR) + padding, DONOR_WIDTH)).astype(dtype) for name in M
        }
        base = tensors(dtype=dtype)
        for name in M:
            base[name] = rng.normal(size=(len(BASE), 16)).astype(dtype)
            for i, text in enumerate(DONOR):
                same = SAME.get(text, text.replace("Ġ", "▁"))
                if same in BASE:
                    row = donor[name][i].astype(np.float64) @ M[name]
                    base[name][BASE.index(same)] = row.astype(dtype)
        if tied:
            del base[HEAD], donor[HEAD]
        else:
            base[BIAS] = np.arange(1, len(BASE) + 1).astype(dtype)
        config = {"tie_word_embeddings": tied, "bos_token_id": 1, "eos_token_id": 2}
        roles = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
        save(tmp_path / "base", base, BASE, ["<unk>", "<s>", "</s>"], roles, config)
        config = {"hidden_size": DONOR_WIDTH, "tie_word_embeddings": tied, "eos_token_id": 1}
        level = {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "ByteLevel"}]}}
        roles, generated = {"eos_token": {"content": "<|end|>"}}, {"eos_token_id": 1}
        save(tmp_path / "donor", donor, DONOR, ["<|end|>"], roles, config, generated, **level)
        return base, donor, M

    return make


# Tokens that are written differently and stand for the same.
SAME = {"\u010a": "<0x0A>", "A": "<0x41>", "<|end|>": "</s>"}
NEW = [DONOR.index(f"Ġ{word}") for word in ("new", "other", "third")]
KEPT = [i for i in range(len(DONOR)) if i not in NEW]


def kept_rows(base):
    """Returns the base's rows of shared tokens, in the donor's order."""
    texts = [SAME.get(DONOR[i], DONOR[i].replace("Ġ", "▁")) for i in KEPT]
    return base[[BASE.index(text) for text in texts]]


@pytest.mark.slow
def test_rows_are_recovered_and_all_else_stays(pair, tmp_path, monkeypatch):
    """Rows that are linear images of the donor's are what the map makes of its new rows."""
    base, donor, M = pair()
    monkeypatch.chdir(tmp_path)
    assert cli.main(["transplant", "base", "donor", "out", "--k", "8", "--quiet"]) == 0
    made = load_checkpoint("out")
    assert made.keys() == base.keys()
    for name in base.keys() - {*M, BIAS}:
        np.testing.assert_array_equal(made[name], base[name])
    # A number is no combination of others: the bias of a new token is 0.
    np.testing.assert_array_equal(made[BIAS][KEPT], kept_rows(base[BIAS]))
    np.testing.assert_array_equal(made[BIAS][NEW], 0)
    for name, map_ in M.items():
        assert made[name].shape == (len(DONOR), 16)
        np.testing.assert_array_equal(made[name][KEPT], kept_rows(base[name]))
        want = donor[name][NEW].astype(np.float64) @ map_
        # Coefficients are of the size of the condition of the anchors, which has 6 dimensions.
        np.testing.assert_allclose(made[name][NEW], want, rtol=0, atol=200 * EPS * abs(want).max())
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["vocab_size"] == len(DONOR)
    assert (config["eos_token_id"], config["bos_token_id"]) == (1, None)
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation == {"eos_token_id": 1, "top_k": 7}
    for file in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / file).read_bytes() == (tmp_path / "donor" / file).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["omp", "nearest", "mean", "zero"])
def test_methods_on_tied_bfloat16_in_batches(pair, tmp_path, monkeypatch, method):
    base, donor, _ = pair(ml_dtypes.bfloat16, tied=True)
    monkeypatch.setattr(transplanted, "BATCH", 2)
    transplant_checkpoint(
        tmp_path / "base", tmp_path / "donor", tmp_path / "out", method=method, k=3
    )
    made = load_checkpoint(tmp_path / "out")
    assert HEAD not in made
    kept = kept_rows(base[EMBEDDING])
    np.testing.assert_array_equal(made[EMBEDDING][KEPT], kept)
    if method in ("mean", "zero"):
        row = kept.astype(np.float64).mean(0) * (method == "mean")
        want = np.broadcast_to(row, (3, 16))
    else:
        wide = donor[EMBEDDING].astype(np.float32)
        want = transplant(wide[NEW], wide[KEPT], kept.astype(np.float32), method, 3)
    # One rounding to bfloat16, which may depend on the batches.
    np.testing.assert_allclose(
        made[EMBEDDING][NEW].astype(np.float32), want, rtol=2**-8, atol=8 * EPS
    )


@pytest.mark.slow
def test_padding_of_the_donor_is_left_out_unless_asked_for(pair, tmp_path):
    base, *_ = pair(padding=5)
    pad = 8 * -(-len(DONOR) // 8)
    for multiple, rows in ((None, len(DONOR)), (8, pad)):
        out = tmp_path / f"out{multiple}"
        transplant_checkpoint(
            tmp_path / "base", tmp_path / "donor", out, pad_to_multiple_of=multiple
        )
        made = load_checkpoint(out)[EMBEDDING]
        assert made.shape == (rows, 16)
        np.testing.assert_array_equal(made[KEPT], kept_rows(base[EMBEDDING]))
    mean = made[: len(DONOR)].astype(np.float64).mean(0)
    np.testing.assert_allclose(made[len(DONOR) :], np.broadcast_to(mean, (pad - len(DONOR), 16)))


@pytest.mark.slow
def test_runs_are_resumed_and_told_apart(pair, tmp_path):
    pair()
    paths = (tmp_path / "base", tmp_path / "donor", tmp_path / "out")
    assert not transplant_checkpoint(*paths, k=4).unchanged
    first = load_checkpoint(tmp_path / "out")
    less = RunOptions(resume=True, threads=1, max_memory=2 << 30)
    assert transplant_checkpoint(*paths, k=4, run=less).unchanged
    with pytest.raises(ValueError, match="out"):
        transplant_checkpoint(*paths, k=3, run=less)
    marks = set()
    for k in (3, 4):
        tokenizer = {"source": Ref(str(paths[1])), "transplant": "omp", "k": k}
        recipe = simple([paths[0]], method="passthrough", tokenizer=tokenizer)
        with planned(MergeRequest(recipe)) as ready:
            marks.add(ready.fingerprint)
    assert len(marks) == 2
    transplant_checkpoint(*paths[:2], tmp_path / "again", k=4, run=RunOptions(threads=1))
    for name, array in load_checkpoint(tmp_path / "again").items():
        np.testing.assert_array_equal(array, first[name])


@pytest.mark.slow
def test_models_of_a_merge_get_rows_from_one_another(pair, tmp_path):
    """A token that one model added is made for the other from the rows that both have."""
    base, *_ = pair()
    rng = np.random.default_rng(1)
    M, more = rng.normal(size=(16, 16)), rng.normal(size=(1, 16)).astype(np.float32)
    other = dict(base)
    for name in (EMBEDDING, HEAD):
        other[name] = np.concatenate([base[name] @ M, more @ M]).astype(np.float32)
    roles = {"eos_token": "</s>"}
    save(tmp_path / "other", other, [*BASE, "<x>"], ["</s>", "<x>"], roles)
    text = f"""
merge_method: linear
parameters: {{weight: 1}}
models: [{{model: {tmp_path}/base}}, {{model: {tmp_path}/other}}]
tokenizer: {{source: union, transplant: omp}}
"""
    notes = merge_recipe(text, tmp_path / "merged").notes
    assert sum("k 64 is not below the 16 columns of" in note for note in notes) == 1
    merged = load_checkpoint(tmp_path / "merged")[EMBEDDING]
    theirs = other[EMBEDDING]
    own = np.asarray(transplant(theirs[-1:], theirs[:-1], base[EMBEDDING]))
    np.testing.assert_allclose(merged[-1:], (own + theirs[-1:]) / 2, rtol=0, atol=1e-5)
    plain = text.replace(", transplant: omp", "")
    merge_recipe(plain, tmp_path / "plain")
    np.testing.assert_array_equal(load_checkpoint(tmp_path / "plain")[EMBEDDING][-1], theirs[-1])


def vocabulary(tokens, *special, **steps):
    ids = {text: i for i, text in enumerate(tokens)}
    added = {text: {"id": ids[text], "content": text, "special": True} for text in special}
    return Vocabulary(ids, added, {"model": {"vocab": ids}, **steps}, "")


def test_tokens_that_stand_for_the_same():
    level = {"decoder": {"type": "ByteLevel"}}
    letters = byte_table()
    spelled = "".join(letters[b] for b in " ü".encode())
    donor = vocabulary([spelled, "ü", letters[0xFF], "A", "<|end|>", "Ġ", "x"], "<|end|>", **level)
    base = vocabulary(["▁ü", "<0xFF>", "<0x41>", "A", "</s>", "▁", "ü"], "</s>")
    names, own_names = {"eos_token": "<|end|>", "pad_token": "<|end|>"}, {"eos_token": "</s>"}
    found = counterparts(donor, base, names, own_names)
    # "ü" as letters of bytes is another token than the letter ü.
    want = {spelled: "▁ü", letters[0xFF]: "<0xFF>", "A": "A", "<|end|>": "</s>", "Ġ": "▁"}
    assert found == {text: base.ids[same] for text, same in want.items()}
    # Among tokens that are spelled alike, the text decides, and byte tokens are not letters.
    alike = vocabulary(["A", "<0x41>", "▁"])
    assert counterparts(alike, base, {}, {}) == {"A": 3, "<0x41>": 2, "▁": 5}


@pytest.mark.slow
def test_rows_that_cannot_be_made_are_refused(pair, tmp_path):
    _, donor, _ = pair()
    base, out = tmp_path / "base", tmp_path / "out"
    paths = (base, tmp_path / "donor", out)
    with pytest.raises(
        ValueError, match="method: expected one of 'omp', 'nearest', 'mean', 'zero'"
    ):
        transplant_checkpoint(*paths, method="random")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="k: expected an integer >= 1, got 0"):
        transplant_checkpoint(*paths, k=0)
    level = {"pre_tokenizer": {"type": "ByteLevel"}}
    foreign = [f"{i}!" for i in range(len(DONOR))]
    save(tmp_path / "foreign", donor, foreign, [], {}, **level)
    with pytest.raises(ValueError, match="share no token"):
        transplant_checkpoint(base, tmp_path / "foreign", out)
    donor[HEAD][0, 0] = np.nan
    save(tmp_path / "broken", donor, DONOR, [], {}, **level)
    with pytest.raises(ValueError, match=r"NaN or infinity in lm_head.weight of .*broken"):
        transplant_checkpoint(base, tmp_path / "broken", out)
    (tmp_path / "broken" / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"broken has neither tokenizer\.json nor vocab\.json"):
        transplant_checkpoint(base, tmp_path / "broken", out)
    assert not out.exists()
