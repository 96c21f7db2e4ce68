"""Configurations and files of checkpoints.

transformers makes and saves models, sail-jax merges them, and transformers loads the result. The
reference is a model of transformers with the mean of their weights, computed by torch. Means of two
weights may differ in one rounding.
"""

import json
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cases
import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers.models.auto import modeling_auto

from sail_jax.checkpoint.contents.relations import contradictions

SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


def llama(folder: Path, seed: int, rows: int = 64, **settings: Any) -> Path:
    """Saves a small Llama with random weights."""
    torch.manual_seed(seed)
    settings = SIZES | {"vocab_size": rows, "initializer_range": 0.2} | settings
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings))
    model.save_pretrained(folder)
    return folder


def tokenizer(folder: Path, added: list[str]) -> None:
    """Saves a tokenizer of 60 words, and tokens added to it."""
    core = Tokenizer(models.WordLevel({f"t{i}": i for i in range(60)}, unk_token="t0"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=core, unk_token="t0")
    fast.add_special_tokens({"additional_special_tokens": added})
    fast.save_pretrained(folder)


def patch(folder: Path, **entries: Any) -> None:
    """Changes entries of a config.json; None removes one."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | entries
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def merge(folder: Path, *paths: Path, more: str = "") -> Path:
    """Merges models linearly, all with the same weight."""
    listed = "".join(f"  - {{model: {p}, parameters: {{weight: 1}}}}\n" for p in paths)
    (folder / "recipe.yaml").write_text(f"merge_method: linear\nmodels:\n{listed}{more}\n")
    cases.sail_jax("merge", folder / "recipe.yaml", folder / "out", "--quiet")
    return folder / "out"


def compared(ours: Any, theirs: Any, note: str = "", roundings: int = 2) -> cases.Outcome:
    """Compares the logits of two models."""
    got, want = cases.logits(ours), cases.logits(theirs)
    difference, scale = float((got - want).abs().max()), float(want.abs().max())
    return cases.Outcome(difference, scale, cases.rounding(ours, roundings), note)


def mean(first: Any, *others: Any) -> Any:
    """Makes the first model the mean of all of them."""
    with torch.no_grad():
        for weights in zip(*(m.parameters() for m in (first, *others)), strict=True):
            weights[0].copy_(torch.stack([w.double() for w in weights]).mean(0))
    return first


def refused(load: Callable[[], Any]) -> Exception:
    """The exception by which a program refuses an input; AssertionError if it does not."""
    try:
        load()
    except Exception as error:
        return error
    raise AssertionError("the input is not refused")


def refuses(folder: Path) -> str:
    """A note that transformers does not load an input as it is; AssertionError if it does."""
    error = refused(lambda: cases.loaded(folder))
    return f"transformers refuses the input: {type(error).__name__}"


def stale_quantization(folder: Path) -> cases.Outcome:
    a, b = llama(folder / "a", 1), llama(folder / "b", 2)
    theirs = mean(cases.loaded(a), cases.loaded(b))
    patch(a, quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    note = refuses(a)
    return compared(cases.loaded(merge(folder, a, b)), theirs, note)


def stale_vocabulary(folder: Path) -> cases.Outcome:
    a, b = llama(folder / "a", 1, rows=67), llama(folder / "b", 2, rows=67)
    theirs = mean(cases.loaded(a), cases.loaded(b))
    patch(a, vocab_size=64)
    note = refuses(a)
    return compared(cases.loaded(merge(folder, a, b)), theirs, note)


def stale_depth(folder: Path) -> cases.Outcome:
    a, b = llama(folder / "a", 1), llama(folder / "b", 2)
    theirs = mean(cases.loaded(a), cases.loaded(b))
    patch(a, num_hidden_layers=3)
    note = refuses(a)
    return compared(cases.loaded(merge(folder, a, b)), theirs, note)


def stale_labels(folder: Path) -> cases.Outcome:
    kind, paths = transformers.BertForSequenceClassification, []
    for seed, name in enumerate("ab"):
        torch.manual_seed(seed)
        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
        config = transformers.BertConfig(
            vocab_size=40, num_attention_heads=2, num_labels=5, initializer_range=0.2, **sizes
        )
        kind(config).save_pretrained(folder / name)
        paths.append(folder / name)
    theirs = mean(*map(cases.loaded, paths))
    patch(paths[0], id2label=None, label2id=None)
    note = refuses(paths[0])
    return compared(cases.loaded(merge(folder, *paths)), theirs, note)


def own_head_called_tied(folder: Path) -> cases.Outcome:
    a, b = llama(folder / "a", 1), llama(folder / "b", 2)
    theirs = mean(cases.loaded(a), cases.loaded(b))
    patch(a, tie_word_embeddings=True)
    patch(b, tie_word_embeddings=True)
    return compared(cases.loaded(merge(folder, a, b)), theirs)


def copied_head_called_tied(folder: Path) -> cases.Outcome:
    paths = [llama(folder / n, s, tie_word_embeddings=True) for s, n in enumerate("ab")]
    theirs = mean(*map(cases.loaded, paths))
    stored = load_file(paths[0] / "model.safetensors")
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"].clone()
    save_file(stored, paths[0] / "model.safetensors", {"format": "pt"})
    ours = cases.loaded(out := merge(folder, *paths))
    kept = "lm_head.weight" not in load_file(out / "model.safetensors")
    assert kept, "the head was written"
    return compared(ours, theirs)


def tied_with_untied(folder: Path) -> cases.Outcome:
    a, b = llama(folder / "a", 1, tie_word_embeddings=True), llama(folder / "b", 2)
    first, second = cases.loaded(a), cases.loaded(b)
    theirs = cases.loaded(b)
    with torch.no_grad():
        for name, weight in theirs.named_parameters():
            one = first.get_parameter(name.replace("lm_head", "model.embed_tokens"))
            weight.copy_((one.double() + second.get_parameter(name).double()) / 2)
    return compared(cases.loaded(merge(folder, a, b)), theirs)


def float8_first(folder: Path) -> cases.Outcome:
    a, b = llama(folder / "a", 1), llama(folder / "b", 2)
    narrow = {n: x.to(torch.float8_e4m3fn) for n, x in load_file(a / "model.safetensors").items()}
    save_file(narrow, a / "model.safetensors", {"format": "pt"})
    theirs = cases.loaded(b)
    with torch.no_grad():
        for name, weight in theirs.named_parameters():
            middle = (narrow[name].double() + weight.double()) / 2
            weight.copy_(middle.to(torch.float8_e4m3fn).float())
    out = merge(folder, a, b)
    stated = json.loads((out / "config.json").read_text())
    dtype = stated.get("dtype", stated.get("torch_dtype"))
    assert dtype == "float8_e4m3fn", f"config.json states {dtype}"
    return compared(cases.loaded(out), theirs)


def rows_by_token(folder: Path) -> cases.Outcome:
    """Runs both models on the same text, each by its own tokenizer: hidden states of embeddings."""
    a, b = llama(folder / "a", 1, rows=62), llama(folder / "b", 2, rows=64)
    tokenizer(a, ["<end>", "<tool>"])
    tokenizer(b, ["<start>", "<end>", "<x>", "<tool>"])
    refusal = refused(lambda: merge(folder, a, b))
    assert "tokenizer: {source: union}" in str(refusal), refusal
    out = merge(folder, a, b, more="tokenizer: {source: union}")
    words = transformers.AutoTokenizer.from_pretrained
    text, rows = "t3 <end> t7 <tool> t59", []
    for path in (a, b, out):
        table = cases.loaded(path).get_input_embeddings()
        with torch.no_grad():
            rows.append(table(torch.tensor(words(path)(text)["input_ids"])).double())
    want = (rows[0] + rows[1]) / 2
    difference, scale = float((rows[2] - want).abs().max()), float(want.abs().max())
    last = max(words(out).get_vocab().values())
    assert last < len(cases.loaded(out).get_input_embeddings().weight), "a token without a row"
    return cases.Outcome(difference, scale, cases.EPS * scale, "rows of the embedding")


def relations(_: Path) -> cases.Outcome:
    """Counts what the configurations of all classes state and their own tensors contradict."""
    count = broken = 0
    example = ""
    for config, tensors in every_class():
        found = contradictions(config, tensors)
        count, broken = count + 1, broken + bool(found)
        example = example or (f"{config['architectures'][0]}: {found[0]}" if found else "")
    if count < 900:
        raise AssertionError(f"{count} classes could be built")
    note = example or "classes whose configuration contradicts their tensors"
    return cases.Outcome(float(broken), float(count), 0.0, note)


def every_class() -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yields the configuration of every class at its defaults, and its tensors without values."""
    tasks = ("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL", "SEQUENCE_CLASS", "TOKEN_CLASS")
    tasks += ("IMAGE_CLASS", "QUESTION_ANSWERING")
    names = [n for n in dir(modeling_auto) if n.startswith("MODEL_FOR_") and n.endswith("_NAMES")]
    names = [n for n in names if any(task in n for task in tasks)]
    seen = set()
    for mapping in (*names, "MODEL_MAPPING_NAMES"):
        for kind, classes in getattr(modeling_auto, mapping).items():
            for name in [classes] if isinstance(classes, str) else classes:
                if (kind, name) not in seen:
                    seen.add((kind, name))
                    if (built := build(kind, name)) is not None:
                        yield built


def build(kind: str, name: str) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """A class at its defaults, of at most six layers; None if it cannot be built within 25 s."""
    signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(TimeoutError()))
    signal.alarm(25)
    try:
        cls = getattr(transformers, name)
        config = cls.config_class() if cls.config_class else transformers.CONFIG_MAPPING[kind]()
        for part in (config, getattr(config, "text_config", None)):
            for key in ("num_hidden_layers", "n_layer", "num_layers"):
                layers = getattr(part, key, None)
                if type(layers) is int and layers > 6 and not getattr(part, "layer_types", None):
                    setattr(part, key, 6)
        with torch.device("meta"):
            model = cls(config)
        tied = set(getattr(model, "all_tied_weights_keys", None) or {})
        stated = json.loads(config.to_json_string(use_diff=False)) | {"architectures": [name]}
        tensors = {
            key: SimpleNamespace(name=key, shape=tuple(x.shape), dtype=np.dtype("float32"))
            for key, x in model.state_dict().items()
            if key not in tied
        }
        # At its defaults a class states no dtype; the tensors here are float32 whatever it is.
        return stated | {"dtype": None}, tensors
    # Some need libraries that are not here, or sizes that their defaults lack.
    except Exception:
        return None
    finally:
        signal.alarm(0)


CASES = [
    cases.Case(function.__name__.replace("_", " "), what, partial(function))
    for function, what in {
        stale_quantization: "a quantization_config that stayed behind after dequantisation",
        stale_vocabulary: "vocab_size 64 where the embedding has 67 rows",
        stale_depth: "num_hidden_layers 3 where two layers are stored",
        stale_labels: "a classifier of five labels without id2label",
        own_head_called_tied: "tie_word_embeddings, and a stored head with other values",
        copied_head_called_tied: "tie_word_embeddings, and a stored copy as the head",
        tied_with_untied: "a tied model merged with an untied one",
        float8_first: "float8 without scales, merged with float32 and written in float8",
        rows_by_token: "tokenizers that give equal rows to other tokens",
        relations: "every class of transformers that can be built, at its defaults",
    }.items()
]
