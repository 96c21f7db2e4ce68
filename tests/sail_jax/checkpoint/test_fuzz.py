"""Mutated inputs of all readers give the correct answer or a documented error, in bounded time and
memory.

`pytest tests/sail_jax/checkpoint/test_fuzz.py -m "" --fuzz N` tries N inputs for each target, `-rP`
shows what became of them; a failure names its seed, which `-k TARGET --fuzz 1 --fuzz-seed S` tries
alone.
"""

import collections
import contextlib
import functools
import io
import json
import shutil
import warnings
import zipfile
from unittest import mock

import flax.serialization
import fuzzing
import hostile_files
import msgpack
import numpy as np
import pytest
import safetensors.numpy
from cells import slow_unless
from fuzzing import WrongError, called, fuzz, little_memory, refused, told
from small_checkpoints import CONFIG, GEMMA
from small_checkpoints import tensors as llama
from torch_files import FakeTorch, Storage, archive

from sail_jax.checkpoint import load_checkpoint, save_checkpoint
from sail_jax.checkpoint.formats.files import CheckpointError
from sail_jax.checkpoint.recipe import mergekit
from sail_jax.checkpoint.recipe.recipes import RecipeError, parse
from sail_jax.cli.finder import commands

ARRAYS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.arange(5, dtype=np.int16),
    "c/d": np.ones((), np.float64),
}


def _same(x, y):
    return x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()


def _loaded(path):
    """Returns what is read from a checkpoint; None if it is rejected."""
    try:
        return load_checkpoint(path, allow_pickle=True)
    except CheckpointError as error:
        refused(error)
        return None


def _agrees(got, data, peer):
    """WrongError unless the format's own library reads the same of these bytes; if it refuses them
    and those of the tensors are as they were, unless what is read is what was written."""
    try:
        want = peer(data)
    except Exception:
        if not all(x.tobytes() in data for x in ARRAYS.values()):
            return
        want = ARRAYS
    if got.keys() != want.keys() or not all(_same(got[name], want[name]) for name in got):
        raise WrongError(f"expected {want}, read as {got}")


def _flat(node, at=()):
    if isinstance(node, list):
        node = dict(enumerate(node))
    if isinstance(node, dict):
        return {k: x for key, part in node.items() for k, x in _flat(part, (*at, key)).items()}
    leaf = isinstance(node, np.ndarray | np.generic | int | float | complex)
    return {"/".join(map(str, at)): np.asarray(node)} if leaf else {}


def _npz(data):
    with np.load(io.BytesIO(data)) as file:
        return {name: file[name] for name in file.files}


def _msgpack(data):
    # Flax refuses keys that are integers before 0.12.8.
    lenient = functools.partial(msgpack.unpackb, strict_map_key=False)
    with mock.patch.object(msgpack, "unpackb", lenient):
        return _flat(flax.serialization.msgpack_restore(data))


PEERS = {
    "safetensors": safetensors.numpy.load,
    "npz": _npz,
    "msgpack": _msgpack,
}


def _of_format(name, *, packed=False):
    """A file of one format, its structure mutated or all of it."""

    def make(folder, monkeypatch):
        path = folder / f"model.{name}"
        save_checkpoint(path, ARRAYS)
        if packed:
            np.savez_compressed(path, allow_pickle=False, **ARRAYS)
        data = path.read_bytes()

        def attempt(mutations):
            mutated = mutations.bytes_of(data)
            path.write_bytes(mutated)
            got = _loaded(path)
            if got is not None:
                _agrees(got, mutated, PEERS[name])
            return got is not None

        return attempt

    return make


def _safetensors_header(folder, monkeypatch):
    path = folder / "model.safetensors"
    save_checkpoint(path, ARRAYS)
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])

    def attempt(mutations):
        text = mutations.json_of(header)
        mutated = len(text).to_bytes(8, "little") + text + data[end:]
        path.write_bytes(mutated)
        got = _loaded(path)
        if got is not None:
            _agrees(got, mutated, safetensors.numpy.load)
        return got is not None

    return attempt


def _safetensors_index(folder, monkeypatch):
    save_checkpoint(folder, ARRAYS, shard_bytes=20)
    index = folder / "model.safetensors.index.json"
    tree = json.loads(index.read_text())

    def attempt(mutations):
        index.write_bytes(mutations.json_of(tree))
        got = _loaded(folder)
        if got is not None:
            _agrees(got, b"", lambda _: ARRAYS)
        return got is not None

    return attempt


def _chunked_msgpack(folder, monkeypatch):
    """Arrays in chunks, as flax writes those above 2^30 bytes."""
    monkeypatch.setattr(flax.serialization, "MAX_CHUNK_SIZE", 8)
    data = flax.serialization.msgpack_serialize({"a": ARRAYS["a"], "b": ARRAYS["b"]})
    path = folder / "m.msgpack"

    def attempt(mutations):
        mutated = mutations.bytes_of(data)
        path.write_bytes(mutated)
        got = _loaded(path)
        if got is not None:
            _agrees(got, mutated, PEERS["msgpack"])
        return got is not None

    return attempt


def _orbax(folder, monkeypatch):
    """Orbax keeps checksums: of what it reads nothing may differ from what was written, but names,
    which have none."""
    save_checkpoint(folder / "right", ARRAYS, format="orbax")
    path = folder / "mutated"

    def attempt(mutations):
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(folder / "right", path)
        file = mutations.one(sorted(x for x in path.rglob("*") if x.is_file()))
        file.write_bytes(mutations.bytes_of(file.read_bytes()))
        got = _loaded(path)
        for name in () if got is None else got.keys() & ARRAYS.keys():
            if not _same(got[name], ARRAYS[name]):
                raise WrongError(
                    f"{file.name}: {ARRAYS[name]!r} was written, read as {got[name]!r}"
                )
        return got is not None

    return attempt


def _torch(folder, monkeypatch):
    """A pickle in its archive: what is read of the one storage as float32 is of its values."""
    fake = FakeTorch(monkeypatch)
    storage = Storage("0", "Float", np.arange(24, dtype=np.float32))
    tree = collections.OrderedDict(a=fake.tensor(storage, (4, 6)), b=fake.tensor(storage, (3,)))
    data, path = fake.pickled(tree), folder / "m.bin"

    def attempt(mutations):
        whole = mutations.often(0.3)
        kind = zipfile.ZIP_DEFLATED if mutations.often(0.3) else zipfile.ZIP_STORED
        archive(path, data if whole else mutations.bytes_of(data, 2), [storage], kind)
        if whole:
            path.write_bytes(mutations.bytes_of(path.read_bytes()))
        got = _loaded(path)
        for name, x in ({} if got is None or whole else got).items():
            if x.dtype == np.float32 and not np.isin(x, storage.array).all():
                raise WrongError(f"{name} is read as {x!r}")
        return got is not None

    return attempt


def _torch_views(folder, monkeypatch):
    path = folder / "m.bin"

    def attempt(mutations):
        wanted = hostile_files.torch_views(mutations, path, monkeypatch)
        got = _loaded(path)
        if got is None:
            if wanted is not None and not any(x is ... for x in wanted.values()):
                raise WrongError(f"refused, expected {wanted}")
            return False
        if wanted is None or got.keys() != wanted.keys():
            raise WrongError(f"read as {got}, expected {wanted}")
        for name, x in wanted.items():
            if x is not ... and not _same(got[name], x):
                raise WrongError(f"{name}: expected {x!r}, read as {got[name]!r}")
        return True

    return attempt


def _npz_members(folder, monkeypatch):
    path = folder / "m.npz"
    warnings.simplefilter("ignore")  # NumPy's, of names that occur twice and of huge shapes

    def attempt(mutations):
        data = hostile_files.npz_members(mutations)
        path.write_bytes(data)
        if (got := _loaded(path)) is None:
            return False
        for name, x in _npz(data).items():  # it fails if NumPy does
            native = x.astype(x.dtype.newbyteorder("="))
            plain = x.dtype.kind != "V"
            if got[name].shape != x.shape or (plain and got[name].dtype != native.dtype):
                raise WrongError(f"{name}: expected {x!r}, read as {got[name]!r}")
            if got[name].tobytes() != native.tobytes():
                raise WrongError(f"{name}: expected {x!r}, read as {got[name]!r}")
        return True

    return attempt


def _msgpack_trees(folder, monkeypatch):
    path = folder / "m.msgpack"

    def attempt(mutations):
        size = 8 if mutations.often(0.3) else 2**30
        monkeypatch.setattr(flax.serialization, "MAX_CHUNK_SIZE", size)
        data = hostile_files.msgpack_bytes(hostile_files.msgpack_tree(mutations))
        if data is None:
            return False
        data = mutations.bytes_of(data) if mutations.often(0.4) else data
        path.write_bytes(data)
        if (got := _loaded(path)) is None:
            return False
        try:
            wanted = _msgpack(data)
        except Exception:
            return True
        # The two join empty keys differently.
        plain = not any("" in name.split("/") for name in (*got, *wanted))
        same = got.keys() == wanted.keys() and all(_same(got[name], wanted[name]) for name in got)
        if plain and not same:
            raise WrongError(f"expected {wanted}, read as {got}")
        return True

    return attempt


def _index_names(folder, monkeypatch):
    names = hostile_files.shards(folder)
    inside = folder / "in"
    index = inside / "model.safetensors.index.json"

    def attempt(mutations):
        weights = {"a": "s0.safetensors", "b": "s1.safetensors"}
        for name in weights:
            if mutations.often(0.6):
                weights[name] = mutations.one(names)
        index.write_bytes(
            mutations.json_of({"weight_map": weights})
            if mutations.often(0.1)
            else json.dumps({"weight_map": weights}).encode()
        )
        got = _loaded(index if mutations.often(0.5) else inside)
        if any(x.any() for x in ({} if got is None else got).values()):
            raise WrongError(f"read from outside: {index.read_text()}")
        return got is not None

    return attempt


READERS = {
    "safetensors": (_of_format("safetensors"), 300),
    "safetensors header": (_safetensors_header, 300),
    "safetensors index": (_safetensors_index, 200),
    "npz": (_of_format("npz"), 200),
    "packed npz": (_of_format("npz", packed=True), 200),
    "msgpack": (_of_format("msgpack"), 300),
    "chunked msgpack": (_chunked_msgpack, 200),
    "torch": (_torch, 200),
    "orbax": (_orbax, 5),
    "torch views": (_torch_views, 60),
    "npz members": (_npz_members, 60),
    "msgpack trees": (_msgpack_trees, 60),
    "index names": (_index_names, 60),
}
# They start no threads, and compile nothing.
ALONE = {*READERS, "recipes", "recipe texts"} - {"orbax"}


@pytest.fixture
def tried(request, tmp_path, monkeypatch):
    """Tries a target, and fails with what it did wrong."""

    def tried(name, make, few):
        folder = tmp_path / "work"
        folder.mkdir()
        monkeypatch.chdir(folder)
        attempt = make(folder, monkeypatch)
        options = request.config.option
        count = few if options.fuzz is None else options.fuzz
        with little_memory() if name in ALONE else contextlib.nullcontext():
            tally = fuzz(name, attempt, range(options.fuzz_seed, options.fuzz_seed + count))
        print(tally)
        assert not tally.faults, f"{tally}\n{told(tally.faults)}"
        assert tally.refused or count < 100

    return tried


def _spin():
    while True:
        pass


FAULTS = {
    "wrong exception": lambda: {}["x"],
    "hang": _spin,
    "memory": lambda: bytearray(60 << 20).count(1) > 0,
    "wrong": lambda: refused(ValueError("two\nlines")),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_what_is_wrong_is_found(kind, monkeypatch):
    if kind == "hang":  # what fills memory may take longer on a busy machine
        monkeypatch.setattr(fuzzing, "SECONDS", 0.2)
    monkeypatch.setattr(fuzzing, "MEMORY", 50 << 20)
    tally = fuzz("x", lambda mutations: mutations.identity or FAULTS[kind](), range(7, 9))
    assert [fault[:2] for fault in tally.faults] == [(7, kind), (8, kind)]
    assert "2 x" in told(tally.faults)
    assert "--fuzz-seed 7" in told(tally.faults)


@pytest.mark.parametrize("name", READERS)
def test_readers(name, tried):
    tried(name, *READERS[name])


def _recipe_of(name):
    """A recipe that sets every parameter of a method."""
    entry = mergekit.entry(name)
    shared, own = {}, {}
    for parameter in entry.parameters.values():
        value = 0.5 if parameter.default is mergekit.REQUIRED else parameter.default
        if value is not None:
            (own if parameter.per_model else shared)[parameter.name] = value
    few = 1 if entry.most == 1 and entry.base == "required" else min(2, entry.most or 2)
    base = {"base_model": "base"} if entry.base in ("required", "first") else {}
    models = ["base", "b"] if entry.base == "first" else ["b", "a"]
    return {
        "merge_method": name,
        "models": [{"model": model, "parameters": own} for model in models[:few]],
        "parameters": shared,
        **base,
    }


EVERY_KEY = {
    "merge_method": "linear",
    "models": [
        {
            "model": "a",
            "parameters": {"weight": [{"filter": "mlp", "value": [0, 1]}, {"value": 1}]},
        },
        {"model": {"model": "b", "align": {"to": "a", "seed": 1, "max_sweeps": 2}}},
    ],
    "parameters": {"weight": 1, "normalize": False},
    **{"dtype": "float32", "out_dtype": "bfloat16", "chat_template": "auto", "seed": 3},
    **{"compat": "paper", "missing": "error", "extra": "ignore"},
    "rename": {r"^(model)\.norm": r"\1.last"},
    "tokenizer": {
        "source": "union",
        "tokens": {"t1": {"source": "a", "force": True}, "new": {"source": {"kind": "zero"}}},
        **{"pad_to_multiple_of": 8, "transplant": "nearest", "k": 3},
    },
}
SLICES = {
    "merge_method": "passthrough",
    "modules": {
        "": {
            "slices": [
                {"sources": [{"model": "a", "layer_range": [0, 1], "parameters": {"scale": 0.5}}]},
                {"sources": [{"model": "b", "layer_range": [0, 2]}]},
            ]
        }
    },
    "tokenizer_source": "base",
}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 4}
STEPS = {
    "merge_method": "task_arithmetic",
    "base_model": {"model": "a", "grow": {"to": {"width": 2}, "method": "lemon", "seed": 1}},
    "models": [
        {
            "model": "b+lora",
            "grow": {"to": {"hidden_size": 32, "intermediate_size": 48, **HEADS}},
            "align": {"to": {"model": "a", "grow": {"to": {"width": 2}}}, "family": "signed"},
            "parameters": {"weight": 0.5, "density": 0.5},
        }
    ],
}
LORA = {
    **{"peft_type": "LORA", "r": 2, "lora_alpha": 8, "use_rslora": True, "fan_in_fan_out": False},
    **{"rank_pattern": {"layers.0.q_proj": 2}, "alpha_pattern": {"q_proj": 3.5}, "bias": "none"},
    **{"modules_to_save": None, "target_modules": ["q_proj"], "init_lora_weights": True},
}
TOKENIZER = {
    "version": "1.0",
    "model": {"type": "BPE", "vocab": {f"t{i}": i for i in range(19)}, "merges": [["a", "b"]]},
    "added_tokens": [{"id": 19, "content": "<s>", "special": True, "normalized": False}],
}
UNIGRAM = TOKENIZER | {"model": {"type": "Unigram", "vocab": [[f"t{i}", -1.0] for i in range(19)]}}
TABLE = {
    "axes": {
        "model.embed_tokens.weight": "vocab* resid",
        "model.norm.weight": "diag(resid)",
        "model.layers.{i}.norm.weight": "diag(resid)",
        "model.layers.{i}.mlp.{gate,up}.weight": "hidden.{i} resid*",
        "model.layers.{i}.mlp.down.weight": "resid hidden.{i}*",
        "lm_head.weight": "vocab resid*",
    },
    "spaces": {"resid": "rmsnorm", "hidden.{i}": "elementwise", "vocab": "outer"},
    "sizes": {"resid": 8},
    "settings": {
        "hidden_size": "resid",
        "intermediate_size": ["hidden.{i}"],
        "vocab_size": "vocab",
    },
    "layers": {"num_hidden_layers": "model.layers.{i}."},
    "optional": ["lm_head.weight"],
    "scales": {"model.embed_tokens.weight": "resid^0.5"},
}
YAML = """\
merge_method: ties  # of two
base_model: base
models:
  - &one {model: a, parameters: {weight: 1e-1, density: [0.2, .8]}}
  - <<: *one
    model: b
parameters: {lambda: !!float 0.7, int8_mask: yes}
rename: {'^x': "\\u0041"}
"""


def _stock(folder):
    """Small models, and a document of each kind beside them."""
    config = CONFIG | {"torch_dtype": "bfloat16", "rope_theta": 1e4, "hidden_act": "silu"}
    for seed, name in enumerate(["a", "b", "base"]):
        extras = {"config.json": config, "tokenizer.json": TOKENIZER}
        extras |= {"tokenizer_config.json": {"chat_template": "{{ messages }}"}}
        extras = {name: json.dumps(tree).encode() for name, tree in extras.items()}
        save_checkpoint(folder / name, llama(seed), extras=extras)
    even = {"type": "BPE", "vocab": {f"t{2 * i}": i for i in range(19)}, "merges": []}
    words = {"config.json": config, "tokenizer.json": TOKENIZER | {"model": even}}
    words = {name: json.dumps(tree).encode() for name, tree in words.items()}
    save_checkpoint(folder / "words", llama(3), extras=words)
    q = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    factors = {f"{q}A.weight": np.ones((2, 16), np.float32)}
    factors |= {f"{q}B.weight": np.ones((16, 2), np.float32)}
    save_checkpoint(folder / "lora" / "adapter_model.safetensors", factors)
    rng, shapes = np.random.default_rng(0), {"embed_tokens": (11, 8), "norm": (8,)}
    for i in range(2):
        for name, shape in {"norm": (8,), "gate": (12, 8), "up": (12, 8), "down": (8, 12)}.items():
            shapes[f"layers.{i}.{'' if name == 'norm' else 'mlp.'}{name}"] = shape
    other = {f"model.{n}.weight": rng.normal(size=x).astype("f") for n, x in shapes.items()}
    other["lm_head.weight"] = other["model.embed_tokens.weight"] * 2
    gemma = {"config.json": json.dumps(GEMMA).encode()}
    for name in "gh":
        save_checkpoint(folder / name, other, extras=gemma)
    np.savez(folder / "x.npz", tokens=np.arange(24).reshape(6, 4) % 20, labels=np.ones((6, 4), int))
    recipes = {"r": _recipe_of("linear"), "t": _recipe_of("ties"), "steps": STEPS}
    recipes |= {"union": _recipe_of("linear") | {"tokenizer_source": "union"}}
    recipes |= {
        "lora": _recipe_of("linear")
        | {"models": [{"model": "a+lora"}], "parameters": {"weight": 1}}
    }
    documents = {f"{name}.yaml": recipe for name, recipe in recipes.items()}
    documents |= {
        "m.yaml": {
            "base_model": "a",
            "gate_mode": "cheap_embed",
            "experts": [{"source_model": m, "positive_prompts": [[k]]} for k, m in enumerate("ab")],
        }
    }
    documents |= {"spec.yaml": TABLE, "lora/adapter_config.json": LORA}
    documents |= {"to.json": config | {"hidden_size": 32, "intermediate_size": 48}}
    for file, tree in documents.items():
        (folder / file).write_text(json.dumps(tree))
    (folder / "loop").symlink_to("loop")
    (folder / "none").mkdir()


def _command(folder, argv):
    """The error of a command, "" if there is none; what it wrote is there as it should be, and is
    removed."""
    before = {path.name for path in folder.iterdir()}
    try:
        error = called(*argv)
    except StartedError:
        error = ""
    for path in folder.iterdir():
        if path.name not in before:
            if not error and path.name == "out" and argv[0] != "examples":
                load_checkpoint(path)
            elif error and not path.name.startswith("."):
                raise WrongError(f"refused, and {path.name} is there")
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return error


WIDER = ["--width", "2x"]
OUT = ["out", "--quiet", "--no-certify"]
DOCUMENTS = {
    "config.json": (
        [("a/config.json", CONFIG), ("a/config.json", CONFIG | {
            "text_config": {"vocab_size": 20}, "layer_types": ["full_attention"] * 2})],
        [["grow", "a", "--plan", *WIDER], ["inspect", "a"], ["merge", "r.yaml", "--plan"],
         ["grow", "a", *OUT, *WIDER],
         ["align", "a", "b", "--plan"], ["align", "b", "a", *OUT], ["merge", "r.yaml", *OUT[:2]],
         ["inspect", "a", "--draft"], ["inspect", "a", "b"]],
    ),
    "tokenizer.json": (
        [("a/tokenizer.json", TOKENIZER), ("a/tokenizer.json", UNIGRAM),
         ("a/tokenizer_config.json", {
             "chat_template": [{"name": "x", "template": "{{ x }}"}],
             "added_tokens_decoder": {"19": {"content": "<s>"}}})],
        [["merge", "union.yaml", "--plan"], ["merge", "union.yaml", *OUT[:2]]],
    ),
    "adapter_config.json": (
        [("lora/adapter_config.json", LORA)],
        [["merge", "lora.yaml", "--plan"], ["merge", "lora.yaml", *OUT[:2]]],
    ),
    "table of spaces": (
        [("spec.yaml", TABLE)],
        [[*words, "--spec", "spec.yaml"] for words in (
            ["inspect", "g"], ["grow", "g", "--plan", *WIDER], ["align", "g", "h", "--plan"],
            ["grow", "g", *OUT, *WIDER], ["align", "g", "h", *OUT])],
    ),
    "target": (
        [("to.json", CONFIG | {"hidden_size": 32, "head_dim": 4}), ("to.json", {"width": 2})],
        [["grow", "a", "--to", "to.json", "--plan"], ["grow", "a", *OUT, "--to", "to.json"]],
    ),
    "recipe": (
        [("m.yaml", recipe) for recipe in (
            EVERY_KEY, SLICES, STEPS, *map(_recipe_of, mergekit.names()))],
        # planned only: to carry one out is to compile its method, which takes its seconds
        [["merge", "m.yaml", "--plan"], ["merge", "m.yaml", "--plan", "--full"]],
    ),
}  # fmt: skip


def _document(name):
    """A document mutated, and a command that reads it."""
    documents, commands = DOCUMENTS[name]

    def make(folder, monkeypatch):
        _stock(folder)
        for i, (file, tree) in enumerate(documents[:3]):
            (folder / file).write_text(json.dumps(tree))
            for argv in commands[: None if i == 0 else 1]:
                if error := _command(folder, argv):
                    raise WrongError(f"{argv} is refused with {tree}: {error}")

        def attempt(mutations):
            file, tree = mutations.one(documents)
            right = (folder / file).read_bytes()
            (folder / file).write_bytes(mutations.json_of(tree))
            try:
                return not _command(folder, mutations.one(commands))
            finally:
                (folder / file).write_bytes(right)

        return attempt

    return make


# what compiles, and what takes seconds
DEAR = {"config.json", "recipe", "table of spaces", "merge", "inspect", "align", "grow"}


def cells(names, quick=()):
    """Parametrises over targets, the dear ones slow, or all but the quick ones."""
    return pytest.mark.parametrize(
        "name", [slow_unless(n in quick if quick else n not in DEAR, n) for n in names]
    )


@pytest.mark.slow
@cells(DOCUMENTS)
def test_documents(name, tried):
    tried(name, _document(name), 20)


def _parsed(text):
    """What parses, alone: no file is opened. `text` makes a recipe of mutations."""

    def attempt(mutations):
        try:
            parse(text(mutations))
        except RecipeError as error:
            refused(error)
            return False
        return True

    return lambda folder, monkeypatch: attempt


@pytest.mark.slow
def test_recipes_of_every_method(tried):
    recipes = [EVERY_KEY, SLICES, STEPS, *map(_recipe_of, mergekit.names())]
    for recipe in recipes:
        parse(json.dumps(recipe))

    def text(mutations):
        changed = mutations.json_of(mutations.one(recipes))
        return mutations.bytes_of(YAML.encode()) if mutations.often(0.2) else changed

    tried("recipes", _parsed(text), 500)


@pytest.mark.slow
def test_recipes_as_text(tried):
    text = functools.partial(hostile_files.recipe_text, trees=(EVERY_KEY, SLICES, STEPS))
    tried("recipe texts", _parsed(text), 20)


COMMAND_LINES = {
    "merge": [
        ["r.yaml", "--plan", "--full", "--max-memory", "4GB"], ["--methods"],
        ["r.yaml", "out", "--quiet", "--threads", "1", "--format", "npz", "--report", "page"],
        ["t.yaml", "out", "--resume", "--shard-size", "1MB", "--allow-nonfinite"],
        ["r.yaml", "out", "--part", "1/2", "--shard-size", "1KB", "--wait", "0"],
        ["r.yaml", "--plan", "--part", "2/3", "--shard-size", "1KB"],
    ],
    "grow": [
        ["a", "--plan", "--to", "hidden_size=32", "--to", "head_dim=4"], ["--methods"],
        ["a", "out", "--depth", "2x", "--method", "llama_pro", "--seed", "1", "--no-certify"],
        ["a", "--plan", "--width", "2x", "--set", "untie=false", "--config", "b"],
        ["g", "--plan", "--width", "1.5", "--spec", "spec.yaml"], ["a", "--draft"],
    ],
    "align": [
        ["a", "b", "--plan", "--full"], ["a", "b", "out", "--family", "signed", "--no-certify"],
        ["a", "b", "out", "--spaces", "resid", "--weights", "lm_head.weight=0", "--no-certify",
         "--family", "resid=signed", "--seed", "2", "--max-sweeps", "3", "--config", "b"],
    ],
    "convert": [
        ["a", "out.npz", "--to", "maxtext", "--param-scan-axis", "0", "--vocab-size", "24"],
        ["a", "out.npz", "--to", "tunix", "--dtype", "float32", "--config", "b", "--quiet"],
    ],
    "transplant": [
        ["a", "words", "out", "--k", "3", "--quiet"], ["words", "a", "out.npz", "--method", "mean"],
        ["a", "words", "out", "--method", "nearest", "--pad-to-multiple-of", "8", "--threads", "1"],
    ],
    "upcycle": [
        ["a", "--plan", "--experts", "3", "--experts-per-token", "1", "--router", "zero"],
        ["a", "out", "--drop", "0.5", "--noise", "0.1", "--seed", "1", "--quiet"],
        ["m.yaml", "out", "--max-memory", "1GB", "--no-certify"],
    ],
    "average": [
        ["a", "b", "--plan", "--shape", "cosine"], ["a", "b", "out", "--as", "params", "--quiet"],
        ["a", "b", "out", "--as", "params", "--part", "2/2", "--shard-size", "1KB", "--quiet"],
        ["a", "b", "out.npz", "--weights", "1,3", "--at", "means", "--max-memory", "1GB"],
    ],
    "lora": [
        ["extract", "base", "a", "out", "--rank", "2", "--modules-to-save", "rest", "--quiet"],
        ["extract", "base", "b", "out", "--energy", "0.5", "--dtype", "bfloat16", "--seed", "1"],
        ["merge", "lora", "lora", "out", "--weights", "1,-0.5", "--rank", "1", "--full"],
        ["merge", "lora", "lora", "out", "--method", "ties", "--set", "density=0.5"],
        ["apply", "base", "lora", "out", "--max-memory", "1GB", "--format", "npz"],
    ],
    "inspect": [
        ["a", "--full"], ["a", "b", "--base", "base", "--data", "x.npz"], ["a", "--draft"],
        ["g", "--spec", "spec.yaml", "--json", "record.json"], ["a", "b", "--json", "j.json"],
    ],
    "search": [
        ["a", "b", "--base", "base", "--data", "x.npz", "--plan", "--budget", "9"],
        ["a", "b", "--data", "x.npz", "--methods", "linear,slerp", "--out", "found", "--seed", "1"],
    ],
    "run": [
        ["ledger", "--preset", "tiny", "--out", "new"], ["--help"], ["ledger", "--seed", "1"],
        ["ledger", "--preset", "tiny", "--sweep", "seed=0:9:2,3", "--on", "local:2"],
    ],
    "verify": [["--quick", "--claims", "*", "--seed", "1"], ["--json", "l.json"], ["--coverage"]],
    "quickstart": [["--quick", "--out", "page", "--seed", "1"]],
    "explore": [["--quick", "--out", "page.html", "--seed", "1"]],
    "examples": [["out", "--seed", "1", "--force"]],
    "plot": [["run"]],
    "report": [["run", "--out", "page.html"]],
    "data": [[], ["digits"]],
    "list": [[]],
    "bench": [["--help"], []],
}  # fmt: skip


class StartedError(Exception):
    """Raised when long work starts, which is skipped."""


def _without_work(monkeypatch):
    def start(*_, **__):
        raise StartedError

    for work in WORK:
        monkeypatch.setattr(work, start)


WORK = (
    *("experiments.lab.store.complete", "experiments.studies.ledger.run.run"),
    "experiments.lab.grid.compute",
    "sail_jax.searching.search_with",
    *(
        "experiments.data.example_checkpoints.train",
        "experiments.pages.explorer.simulated.compute",
    ),
)


def _command_line(name):
    def make(folder, monkeypatch):
        _stock(folder)
        if error := called("run", "ledger", "--preset", "tiny", "--out", "run"):
            raise WrongError(error)
        _without_work(monkeypatch)
        for argv in COMMAND_LINES[name]:
            if error := _command(folder, [name, *argv]):
                raise WrongError(f"{name} {argv} is refused: {error}")

        def attempt(mutations):
            argv = [name, *mutations.one(COMMAND_LINES[name])]
            return not _command(folder, mutations.words_of(argv))

        return attempt

    return make


@pytest.mark.slow
@cells(commands(), quick=("average",))
def test_command_lines(name, tried):
    tried(name, _command_line(name), 10)


def _run_on_disk(folder, monkeypatch):
    """A finished run and a finished sweep, one of whose files is damaged."""
    for more in ((), ("--sweep", "seed=0,1")):
        out = "sweep" if more else "run"
        if error := called("run", "ledger", "--preset", "tiny", "--out", out, *more):
            raise WrongError(error)
    # the runs of the points are runs like the first
    made = sorted((folder / "run").rglob("*")), sorted((folder / "sweep").glob("*"))
    files = [
        (out, file)
        for out, found in zip(("run", "sweep"), made, strict=True)
        for file in found
        if file.is_file()
    ]

    def attempt(mutations):
        out, file = mutations.one(files)
        right = file.read_bytes()
        file.write_bytes(mutations.bytes_of(right))
        try:
            return not called(mutations.one(["plot", "report"]), out)
        finally:
            file.write_bytes(right)

    return attempt


@pytest.mark.slow
def test_stored_runs(tried):
    tried("stored run", _run_on_disk, 10)
