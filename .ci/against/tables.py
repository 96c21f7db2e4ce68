"""Tables of architectures as data, found by tracing the classes of transformers.

`python .ci/against/tables.py [TYPE ...]` writes `sail_jax/architectures/tables/TYPE.json`, for all
types or some. As a subject of `.ci/peers`, each case finds its table again and compares it with the
file. It then builds every class of the type with other sizes and another number of layers, infers
the spaces of its tensors, and compares them with what the file's table states for these tensors:
the difference is the number of axes that are not the same.
"""

import re
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import transformers
from cases import Case, Outcome
from spaces import MODELS
from transformers.models.auto import modeling_auto
from united import united
from variations import varied_table

from sail_jax import architectures, growth
from sail_jax.architectures.files import Table, read, written
from sail_jax.basis.spaces import Spec
from sail_jax.interop.settings import Network
from sail_jax.interop.transformers import outputs_of_config, probe_config
from sail_jax.tracing.multiples import Multiples

FILES = Path(architectures.__file__).parent / "tables"
_MOST = 1000
WHY = "--why" in sys.argv

# Sizes that a configuration is built with where it has the entry.
_SMALL = {
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 50, "max_position_embeddings": 36,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "type_vocab_size": 3,
    "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 20, "image_size": 16, "patch_size": 4, "sliding_window": 4,
    "encoder_stride": 4, "word_embed_proj_dim": 32,
}  # fmt: skip

# What else differs: the number of heads of keys is varied alone, and has to divide that of queries.
_OWN = {
    "helium": {"hidden_size": 64, "num_attention_heads": 8},
    # By default it has no shared expert.
    "granitemoeshared": {"shared_intermediate_size": 28},
}

# Model types, and what differs from the sizes above.
_PLAIN = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "olmo", "olmo2"),
    *("olmo3", "phi", "phi3", "cohere", "cohere2", "granite", "glm", "glm4", "nemotron", "smollm3"),
    *("stablelm", "starcoder2", "gpt_neox", "gpt2", "gpt_bigcode", "gptj", "opt"),
    *("bloom", "falcon", "mpt", "arcee", "apertus", "helium", "seed_oss", "exaone4"),
    *("ernie4_5", "biogpt", "xglm", "persimmon", "nanochat", "vaultgemma"),
    *("bitnet", "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss"),
    *(
        "granitemoe",
        "granitemoeshared",
        "phimoe",
        "mamba",
        "falcon_mamba",
        "bert",
        "roberta",
        "xlm-roberta",
    ),
    *(
        "camembert",
        "distilbert",
        "albert",
        "electra",
        "mpnet",
        "modernbert",
    ),
    *("megatron-bert", "nystromformer", "data2vec-text", "ernie"),
    *("vit", "deit"),
    *("beit", "ijepa"),
    "siglip_vision_model",
)
_TASKS = (
    *("SEQ_TO_SEQ_CAUSAL_LM", "CAUSAL_LM", "MASKED_LM", "IMAGE_CLASSIFICATION"),
    *("SPEECH_SEQ_2_SEQ", "PRETRAINING", "SEQUENCE_CLASSIFICATION", "TOKEN_CLASSIFICATION"),
    *("QUESTION_ANSWERING", "MASKED_IMAGE_MODELING", "MULTIPLE_CHOICE"),
    "NEXT_SENTENCE_PREDICTION",
)


def classes(model_type: str) -> tuple[str, list[str], list[str]]:
    """The main class of a model type, its other classes with heads, and those without."""
    found: list[str] = []
    for task in _TASKS:
        names = getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES").get(model_type, ())
        found += [names] if isinstance(names, str) else names
    found += ["GPT2DoubleHeadsModel"] * (model_type == "gpt2")
    bare = modeling_auto.MODEL_MAPPING_NAMES.get(model_type, ())
    without = [bare] if isinstance(bare, str) else [*bare]
    found = [name for name in dict.fromkeys(found) if name not in without]
    return (found or without)[0], found[1:], without if found else []


def configuration(model_type: str, name: str) -> dict[str, Any]:
    """A small configuration of a class."""
    kind = getattr(transformers, name).config_class
    others = [
        own
        for path, own, _ in MODELS.values()
        if getattr(getattr(transformers, path, None), "config_class", None) is kind
    ]
    default = kind()
    small = {k: n for k, n in _SMALL.items() if isinstance(getattr(default, k, None), int)}
    small = dict(others[0] if others else small) | _OWN.get(model_type, {})
    if hasattr(default, "num_key_value_heads"):
        # Heads of keys that serve several queries each: others are the case of one query.
        small.setdefault("num_key_value_heads", _SMALL["num_key_value_heads"])
    if hasattr(default, "encoder_stride"):
        small.setdefault("encoder_stride", small["patch_size"])
    made = kind(**small)
    return made.to_dict() | {"architectures": [name], "model_type": model_type}


def _probe(prefix: str, config: Mapping[str, Any]) -> Network:
    """The network of a configuration, with the prefix of names that the main class has."""
    found = probe_config(config, _MOST)
    own = f"{getattr(transformers, config['architectures'][0]).base_model_prefix}."
    if not prefix or any(path.startswith(prefix) for path in found.shapes):
        return found
    bare = not any(path.startswith(own) for path in found.shapes)

    def named(path: str) -> str:
        if bare:
            return prefix + path
        return prefix + path.removeprefix(own) if path.startswith(own) else path

    known = found.multiples or Multiples()
    return Network(
        Spec(
            tuple(leaf._replace(path=named(leaf.path)) for leaf in found.spec.leaves),
            found.spec.spaces,
        ),
        {named(path): size for path, size in found.shapes.items()},
        Multiples(
            tuple(n._replace(leaf=named(n.leaf) if n.leaf else "") for n in known.numbers),
            {named(g): tuple(map(named, r)) for g, r in known.readers.items()},
        ),
    )


def _resolve(kind: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    """What a class takes the entries of a configuration for, those that it lacks included."""
    try:
        return kind.from_dict({k: v for k, v in config.items() if k != "architectures"}).to_dict()
    except Exception as error:  # whatever the class makes of entries that do not fit
        raise ValueError(str(error)) from error


def make(model_type: str, names: Mapping[str, str] | None = None) -> Table:
    """Finds the table of a model type."""
    main, others, bare = classes(model_type)
    kind = getattr(transformers, main)
    listed = [getattr(transformers, name) for name in (main, *others)] if others or bare else []
    prefixes = tuple(dict.fromkeys(f"{one.base_model_prefix}." for one in listed))
    prefix = prefixes[0] if prefixes else ""
    find = partial(
        varied_table, probe=partial(_probe, prefix), prefixes=prefixes,
        resolve=partial(_resolve, kind.config_class),
    )  # fmt: skip
    table = find(configuration(model_type, main), vary=True, names=names)
    made: dict[str, dict[str, Table]] = {"heads": {}, "bare": {}}
    # What heads add is as wide as the stream.
    axes, sizing = dict(table.axes), {key for key, name in table.settings if name == "resid"}
    for group, kinds in (("heads", others), ("bare", bare)):
        for name in kinds:
            try:
                found = find(configuration(model_type, name), names=axes, only=sizing)
            except (ValueError, AttributeError) as error:
                if group == "bare":
                    # Without it, nothing would show which spaces such a network hands out.
                    raise
                print(f"  {model_type}: no {name}: {str(error)[:150]}", file=sys.stderr)
                continue
            axes = {**found.axes, **axes}
            made[group][name] = found
    table = united(table, made["heads"], [*made["bare"].values()])
    return tried(table, configuration(model_type, main))


def tried(table: Table, config: Mapping[str, Any]) -> Table:
    """Adds what shows when networks that have grown are run.

    Where a layer of zero output changes the outputs, norms come after the sums; a layer has one
    only if the space that it writes is known. Where rotary
    positions turn halves of a head, as growth takes them to, keys are in the dual of queries.
    """
    streams = any(re.search(r"\bresid\b", text) for text in table.axes.values())
    if table.layers and streams and preserved(table, config, {"depth": 2}, "pairs") is False:
        table = table._replace(post_norm=True)
    starred = {p: _starred(p, text, table) for p, text in table.axes.items()}
    if starred != table.axes:
        turned = table._replace(axes=starred)
        (size,) = {key for key, name in table.settings if name.startswith("qk")} or {""}
        # A norm over a head averages over its units, and growth says so of keys in the dual.
        normed = any("diag(qk." in text for text in table.axes.values())
        if size == "head_dim" and (
            normed or preserved(turned, config, {size: "2x"}, "hypercloning")
        ):
            table = turned
    return table


def _starred(pattern: str, text: str, table: Table) -> str:
    """Axes of keys with a star on the units that rotary positions keep in order."""
    if not re.search(r"[._]k(ey)?(_proj)?[._]", pattern) or table.spaces.get("qk.{i}") != "outer":
        return text
    return re.sub(r"(?<!diag\()qk\.\{i\}\)", "qk.{i}*)", text)


def preserved(
    table: Table, config: Mapping[str, Any], to: Mapping[str, Any], method: str
) -> bool | None:
    """Whether a network has the same outputs when it has grown; None if it does not grow."""
    shapes = probe_config(config, _MOST).shapes
    rng = np.random.default_rng(0)
    params = {
        name: rng.normal(size=size).astype(np.float32) * 0.2 + (len(size) == 1)
        for name, size in shapes.items()
    }
    key = jax.random.key(0)
    try:
        new, made = growth.grow(params, dict(config), to, method, key=key, rules=table.rules)
        before = outputs_of_config(config, params)(params)
        after = outputs_of_config(made.config, new)(new)
    except (ValueError, TypeError) as error:
        print(f"  not grown to {to}: {str(error)[:150]}", file=sys.stderr)
        return None
    pairs = [*zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)]
    if any(a.shape != b.shape for a, b in pairs):
        return None
    apart = max(float(jnp.abs(a - b).max() / jnp.abs(a).max()) for a, b in pairs)
    return apart < 1e-4


def _others(config: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Configurations with other sizes and depths, of which the first that can be built counts."""
    sizes = {
        k: 2 * v for k, v in config.items()
        if k in _SMALL and isinstance(v, int) and v > 1
    }  # fmt: skip
    yield {**config, **sizes}
    yield {**config, **{k: v for k, v in sizes.items() if k != "head_dim"}}
    yield dict(config)


def compare(model_type: str, _folder: Path) -> Outcome:
    """Finds a table again, and compares it with what other networks show."""
    kept = read(model_type)
    if written(make(model_type, kept.axes)) != (FILES / f"{model_type}.json").read_text("utf-8"):
        raise RuntimeError("the table that is found now is not the one in the file")
    return elsewhere(model_type, kept)


def elsewhere(model_type: str, kept: Table) -> Outcome:
    """Compares a table with what networks of other sizes show."""
    wrong, total, notes = 0, 0, []
    main, others, bare = classes(model_type)
    for name in (main, *others, *bare):
        for config in _others(configuration(model_type, name)):
            try:
                found = probe_config(config, _MOST)
            except (ValueError, AttributeError):
                continue
            shapes = {
                path: jax.ShapeDtypeStruct(size, jnp.float32) for path, size in found.shapes.items()
            }
            a, b = _axes_apart(kept.rules(config).spec(shapes), found.spec)
            wrong, total = wrong + a, total + b
            notes.append(name)
            break
    return Outcome(wrong, max(total, 1), 0, f"{total} axes of {', '.join(notes)}")


def _axes_apart(ours: Spec, theirs: Spec) -> tuple[int, int]:
    """How many axes are in a space that inference does not give them, and how many there are."""
    names: dict[str, str] = {}
    other = dict(theirs.leaves)
    wrong = total = 0
    for path, axes in ours.leaves:
        for mine, found in zip(axes, other[path], strict=True):
            total += 1
            inner = [f for f in mine if "outer" not in ours.space(f.space).nonlinearity.split()]
            if not inner:
                continue
            same = len(mine) == len(found) and all(
                f.role == g.role and f.block == g.block
                and ours.space(f.space).size == theirs.space(g.space).size
                and names.setdefault(f.space, g.space) == g.space
                for f, g in zip(mine, found, strict=False) if f in inner
            )  # fmt: skip
            wrong += not same
            if not same and WHY:
                print(path, mine, found, sep="\n  ", file=sys.stderr)
    for name, own in names.items():
        mine = {*ours.space(name).nonlinearity.split()}
        # Whether logits are divided by the root of a size is seen at two sizes alone.
        mine |= {"dot"} if "linear" in mine else set()
        said = {*theirs.space(own).nonlinearity.split()} <= mine
        wrong += not said
        if not said and WHY:
            print(name, mine, theirs.space(own), file=sys.stderr)
    return wrong, total


CASES = [
    Case(name, "axes that a network of other sizes shows otherwise", partial(compare, name))
    for name in _PLAIN
    if (FILES / f"{name}.json").exists()
]


def main(wanted: list[str]) -> None:
    """Writes the tables."""
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    for name in wanted or _PLAIN:
        start = time.process_time()
        path = FILES / f"{name}.json"
        try:
            text = written(make(name, read(name).axes if path.exists() else None))
            path.write_text(text, "utf-8")
            read.cache_clear()
            got = elsewhere(name, read(name))
            line = f"{got.difference} of {got.note}"
            if got.difference:
                path.unlink()
        except Exception as error:
            path.unlink(missing_ok=True)
            line = f"FAILED {type(error).__name__}: {str(error)[:300]}"
            if len(wanted) == 1:
                raise
        print(f"{name}: {line} [{time.process_time() - start:.1f} s]", flush=True)


if __name__ == "__main__":
    main([name for name in sys.argv[1:] if name != "--why"])
