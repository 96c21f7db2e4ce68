"""Tokenizers of all kinds: those that are read here, and those that need the package."""

import json
import sys

import numpy as np
import pytest
from small_tokenizers import tokenizer

from experiments.data import choices, gpt2_tokens, instructions
from experiments.data.files import DataError
from sail_jax.checkpoint.contents.encoding import encoder

TEXT = "It's 1234  naïve 日本 🙂\n\n  x = {'a': 1}\tthe the theatre </s><s> e\u0301"
# The patterns of Llama 3 and Qwen 2, which divide digits differently.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{DIGITS}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = ["<unk>", "<s>", "</s>"]


def learnt(kind, size=400):
    """A tokenizer of a kind with the parts that the kind's tokenizer.json has."""
    tokenizers = pytest.importorskip("tokenizers")
    from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

    options, decoder = {"special_tokens": SPECIAL}, decoders.ByteLevel()
    made = tokenizers.Tokenizer(models.BPE())
    if kind in ("llama_2", "mistral"):
        made.model = models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True)
        options["special_tokens"] = [*SPECIAL, *(f"<0x{b:02X}>" for b in range(256))]
        strip = decoders.Strip(" ", 1, 0)
        space = decoders.Replace("▁", " ")
        decoder = decoders.Sequence([space, decoders.ByteFallback(), decoders.Fuse(), strip])
        if kind == "llama_2":
            made.normalizer = normalizers.Sequence(
                [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
            )
        else:
            made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    elif kind == "unigram":
        made = tokenizers.Tokenizer(models.Unigram())
        made.pre_tokenizer, decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
        options["unk_token"] = "<unk>"
    else:
        digits = "{1,3}" if kind == "llama_3" else ""
        pattern = tokenizers.Regex(PATTERN.replace("{DIGITS}", digits))
        level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        split = pre_tokenizers.Split(pattern, "isolated")
        made.pre_tokenizer = pre_tokenizers.Sequence([split, level])
        made.normalizer = normalizers.NFC() if kind == "qwen" else None
        options["initial_alphabet"] = pre_tokenizers.ByteLevel.alphabet()
    trainer = (trainers.UnigramTrainer if kind == "unigram" else trainers.BpeTrainer)(
        vocab_size=size, show_progress=False, **options
    )
    made.train_from_iterator(
        [TEXT.replace("</s><s>", "").replace("🙂", ""), "the the a b"], trainer
    )
    made.decoder = decoder
    made.enable_truncation(4)
    made.enable_padding(length=99)
    return made


KINDS = ("llama_2", "llama_3", "qwen", "mistral")


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_of_every_kind_are_the_text_again(kind, tmp_path):
    """Nothing is cut, padded or added, and special tokens are text."""
    made = learnt(kind)
    path = tmp_path / "tokenizer.json"
    made.save(str(path))
    ids = gpt2_tokens.load(path)(TEXT.encode())
    assert ids.dtype == np.int32
    expected = TEXT.replace("e\u0301", "\u00e9") if kind == "qwen" else TEXT
    assert made.decode(ids.tolist(), skip_special_tokens=False) == expected
    special = {made.token_to_id(token) for token in SPECIAL}
    assert not special & set(ids.tolist())
    recognised = encoder(path.read_bytes(), "x")(TEXT, True)
    assert special - {made.token_to_id("<unk>")} <= set(recognised)
    with pytest.raises(UnicodeDecodeError):
        gpt2_tokens.load(path)(b"\xff")


def test_a_unigram_model_is_read(tmp_path):
    made = learnt("unigram", 60)
    made.save(str(tmp_path / "tokenizer.json"))
    ids = gpt2_tokens.load(tmp_path / "tokenizer.json")(b"the theatre").tolist()
    assert made.decode(ids) == "the theatre"


def test_the_package_and_our_reader_agree(tmp_path):
    pytest.importorskip("tokenizers")
    merges = [("t", "h"), ("Ġ", "th"), ("th", "e"), ("Ġth", "e"), ("1", "2"), ("Ċ", "Ċ")]
    path, _ = tokenizer(tmp_path, merges, normalizer={"type": "NFC"})
    ours = gpt2_tokens.load(path)
    assert not isinstance(ours, gpt2_tokens._Packaged)
    record = json.loads(path.read_text())
    record["pre_tokenizer"]["trim_offsets"] = True
    theirs = encoder(json.dumps({"version": "1.0", "added_tokens": [], **record}).encode(), "x")
    for text in (TEXT, "the  th\n", "we'll go\n\n  12 \u3000x", ""):
        assert ours(text.encode()).tolist() == theirs(text, False)


@pytest.mark.parametrize("kind", ["llama_2", "llama_3"])
def test_a_continuation_has_its_tokens_of_the_whole(kind, tmp_path):
    made = learnt(kind)
    made.save(str(tmp_path / "tokenizer.json"))
    encode = gpt2_tokens.load(tmp_path / "tokenizer.json")
    whole = encode(b"a b the theatre").tolist()
    item = choices.Item("a b", (" the theatre", " b"), 0)
    packed = choices.pack([item], encode, 32)
    assert packed.tokens[0, 0][: len(whole)].tolist() == whole
    assert packed.scored[0, 0].sum() == len(whole) - len(encode(b"a b"))
    (row,) = instructions.pack([instructions.Instruction("a b", " the theatre")], encode, 32).tokens
    assert row[: len(whole)].tolist() == whole


def test_a_continuation_that_is_joined_with_the_text_before_has_its_own_tokens():
    encode = gpt2_tokens._Packaged(lambda text, _: [0] if text == "ab" else [*text.encode()])
    assert gpt2_tokens.following(encode, b"a", b"b").tolist() == [98]
    assert gpt2_tokens.following(encode, b"a", b"bc").tolist() == [98, 99]


BROKEN = {
    "no tokenizer": ({"hidden_size": 8}, "expected a tokenizer.json, whose model"),
    "an unknown model": ({"model": {"type": "Else"}}, "tokenizer.json cannot be read"),
    # Rust panics on this one.
    "a long merge": (
        {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "a"]]}},
        "tokenizer.json cannot be read",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_tokenizer_is_refused_in_one_line(case, tmp_path):
    pytest.importorskip("tokenizers")
    record, message = BROKEN[case]
    (tmp_path / "tokenizer.json").write_text(json.dumps(record))
    with pytest.raises(DataError, match=message) as found:
        gpt2_tokens.load(tmp_path / "tokenizer.json")
    assert "\n" not in str(found.value)


def test_a_kind_that_needs_the_package_says_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    path, _ = tokenizer(tmp_path, [], pre_tokenizer={"type": "Metaspace"})
    with pytest.raises(DataError, match=r"tokenizer.json: .* pip install 'sail-jax\[tokenizers\]'"):
        gpt2_tokens.load(path)
