"""A process that runs commands repeatedly, and fails if bytes differ or there is no progress.

`python repeated_commands.py FOLDER CORES THREADS TIMES NAME...` prints the name of each command and
a digest of its output. If a run takes longer than LIMIT seconds, it prints the stack of each thread
and ends. CORES are numbers with commas between them.
"""

import faulthandler
import hashlib
import json
import os
import shutil
import sys
from pathlib import Path

import ml_dtypes
import numpy as np

LIMIT = 120
WIDTH, INNER, TOKENS, NEW = 64, 96, 600, 300
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": TOKENS,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
COMMANDS = {
    "align": ["align", "a", "b", "--max-sweeps=1", "--no-certify"],
    "average": ["average", "a", "b", "c"],
    "average-ema": ["average", "a", "b", "c", "--shape=ema", "--decay=0.5"],
    "extract": ["lora", "extract", "base", "a", "--rank=4"],
    "apply": ["lora", "apply", "base", "adapter"],
    "merge adapters": ["lora", "merge", "adapter", "adapter"],
    "grow": ["grow", "a", "--width=2x", "--no-certify"],
    "grow-depth": ["grow", "a", "--depth=2x", "--no-certify"],
    "transplant": ["transplant", "base", "donor"],
    "upcycle": ["upcycle", "a", "--experts=2"],
    "convert": ["convert", "tree", "--to=hugging-face"],
}
"""Commands that compute in threads, without their output."""
SPECTRAL = ("tsv_m", "iso_c", "iso_cts", "wudi", "opcm", "regmean")
OFTEN = {*COMMANDS, *(f"merge {name}" for name in SPECTRAL)}
"""Commands that decompose matrices, or compute tensors as they are read."""
IN_PYTHON = ("merge fisher", "merge regmean", "search")
"""What the command line does not have, or not with `--threads`."""


def save(folder: Path, seed: int, first: int) -> None:
    """Saves a small Llama with a tokenizer of TOKENS words, numbered from `first`."""
    from sail_jax.checkpoint import save_checkpoint

    rng = np.random.default_rng(seed)
    block = {
        **{f"self_attn.{k}_proj": (WIDTH, WIDTH) for k in "qkvo"},
        "mlp.gate_proj": (INNER, WIDTH),
        "mlp.up_proj": (INNER, WIDTH),
        "mlp.down_proj": (WIDTH, INNER),
        "input_layernorm": (WIDTH,),
        "post_attention_layernorm": (WIDTH,),
    }
    shapes = {f"model.layers.{i}.{k}.weight": v for i in range(2) for k, v in block.items()}
    shapes |= {"model.norm.weight": (WIDTH,)}
    shapes |= {f"{k}.weight": (TOKENS, WIDTH) for k in ("model.embed_tokens", "lm_head")}
    words = {"<unk>": 0} | {f"t{i + first}": i + 1 for i in range(TOKENS - 1)}
    model = {"type": "WordLevel", "vocab": words, "unk_token": "<unk>"}
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [],
        "normalizer": None, "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None,
        "decoder": None, "model": model,
    }  # fmt: skip
    extras = {"config.json": CONFIG, "tokenizer.json": tokenizer}
    save_checkpoint(
        folder,
        {k: rng.normal(size=v).astype(ml_dtypes.bfloat16) for k, v in shapes.items()},
        extras={k: json.dumps(v).encode() for k, v in extras.items()},
    )


def in_python(name: str, out: Path, threads: int) -> None:
    """Merges with statistics of data, or searches and writes the best merge."""
    from sail_jax import methods
    from sail_jax.checkpoint import RunOptions, load_checkpoint, merge_checkpoints
    from sail_jax.checkpoint.operations.searching import by_function, search_checkpoints

    run, weights = RunOptions(threads=threads, force=True), None
    if name == "search":

        def scores(path: str) -> list[float]:
            table = np.float32(load_checkpoint(path)["model.embed_tokens.weight"])
            return [float(row.sum()) for row in table[:8]]

        found = search_checkpoints(
            [*"abc"], "base", scorer=by_function(scores), budget=8, candidates=["ties", "tsv_m"],
            folder=".", run=run,
        )  # fmt: skip
        method, weights = found.arm.merge(found.options)
    else:
        models = [load_checkpoint(model) for model in "ab"]
        if name == "merge fisher":
            squares = [{k: np.float32(x) ** 2 for k, x in model.items()} for model in models]
            method = methods.fisher(fishers=squares)
        else:
            matrices = [{k: np.float32(x) for k, x in m.items() if x.ndim == 2} for m in models]
            grams = [{k: x.T @ x for k, x in m.items()} for m in matrices]
            method = methods.regmean(grams=grams, input_axes="last")
    models = "abc" if name == "search" else "ab"
    merge_checkpoints([*models], out, base="base", method=method, weights=weights, run=run)


def prepare(folder: Path) -> dict[str, list[str]]:
    """Saves the inputs, and returns all commands: those above and a merge for each method."""
    import merge_cases

    from sail_jax.cli.main import main as run

    for seed, name in enumerate(("base", "a", "b", "c")):
        save(folder / name, seed, 0)
    save(folder / "donor", 9, NEW)
    extract = ["lora", "extract", folder / "base", folder / "a", folder / "adapter", "--rank=2"]
    assert run([*map(str, extract), "--quiet"]) == 0
    tree = ["convert", folder / "base", folder / "tree", "--to=maxtext"]
    assert run([*map(str, tree), "--quiet"]) == 0
    merges = {}
    for name in merge_cases.NAMES:
        least, most = merge_cases.make(name).models
        models = ["base", "a"] if name == "slerp" else "abc"[: max(least, min(3, most or 3))]
        recipe = {"merge_method": name, "models": [{"model": m} for m in models]}
        needs = {"slerp": {"t": 0.3}, "nearswap": {"t": 0.5}}.get(name, {})
        recipe |= {"base_model": "base", "parameters": {"weight": 0.5, **needs}}
        (folder / f"{name}.json").write_text(json.dumps(recipe))
        merges[f"merge {name}"] = ["merge", f"{name}.json"]
    return COMMANDS | merges | {name: [] for name in IN_PYTHON}


def digest(folder: Path) -> str:
    """The bytes of all tensors of an output."""
    files = sorted(folder.glob("*.safetensors"))
    assert files, folder
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def main(folder: str, cores: str, threads: str, times: str, *names: str) -> None:
    # before JAX starts as many threads as there are cores
    os.sched_setaffinity(0, map(int, cores.split(",")))
    from sail_jax.cli.main import main as run

    commands, out = json.loads(Path(folder, "commands.json").read_text()), Path("made")
    for name in names:
        seen = set()
        for _ in range(int(times)):
            faulthandler.dump_traceback_later(LIMIT, exit=True)
            if name in IN_PYTHON:
                in_python(name, out, int(threads))
            else:
                command = [*commands[name], str(out), "--quiet", "--threads", threads, "--force"]
                assert run(command) == 0, command
            faulthandler.cancel_dump_traceback_later()
            seen.add(digest(out))
        shutil.rmtree(out)
        print(name, *seen, sep="\t", flush=True)
        assert len(seen) == 1, f"{name}: bytes differ"


if __name__ == "__main__":
    main(*sys.argv[1:])
