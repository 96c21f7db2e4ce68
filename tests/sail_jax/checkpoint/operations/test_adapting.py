"""`lora`: adapters extracted, merged and applied on disk, compared with NumPy in float64."""

import json
import math
import re
import shutil

import ml_dtypes
import numpy as np
import pytest

from sail_jax.checkpoint import (
    CheckpointError,
    RunOptions,
    apply_adapter,
    extract_adapter,
    load_checkpoint,
    merge_adapters,
    open_checkpoint,
    save_checkpoint,
)
from sail_jax.checkpoint.operations import adapting
from sail_jax.checkpoint.operations.spooling import FactorSpool
from sail_jax.checkpoint.output.writer import Writer
from sail_jax.cli import main as cli

EPS = 2.0**-23
PREFIX = "base_model.model."
SHAPES = {
    "model.embed_tokens.weight": (12, 8),
    "model.layers.0.self_attn.q_proj.weight": (8, 8),
    "model.layers.0.self_attn.q_proj.bias": (8,),
    "model.layers.0.mlp.up_proj.weight": (12, 8),
    "model.layers.0.mlp.down_proj.weight": (8, 12),
    "model.norm.weight": (8,),
    "lm_head.weight": (12, 8),
}
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False}
GPT2 = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}
UP = "model.layers.0.mlp.up_proj"


def tensors(shapes, seed):
    random = np.random.default_rng(seed)
    return {name: random.normal(size=shape).astype("f") for name, shape in shapes.items()}


def models(folder, shapes=SHAPES, config=LLAMA):
    """Writes `base` and `tuned`; returns both, and the differences in float64."""
    base, more = tensors(shapes, 0), tensors(shapes, 1)
    tuned = {name: x + y / 4 for (name, x), y in zip(base.items(), more.values(), strict=True)}
    for name, model in (("base", base), ("tuned", tuned)):
        save_checkpoint(folder / name, model, extras={"config.json": json.dumps(config).encode()})
    return base, tuned, {name: tuned[name].astype(float) - base[name] for name in base}


def adapter(path):
    """The tensors of an adapter without PEFT's prefix, in float64, and its config."""
    found = load_checkpoint(path)
    assert all(name.startswith(PREFIX) for name in found)
    config = json.loads((path / "adapter_config.json").read_text())
    return {name.removeprefix(PREFIX): x.astype(float) for name, x in found.items()}, config


def best(delta, rank):
    """Computes the smallest error of a rank, by Eckart and Young, divided by the norm."""
    s = np.linalg.svd(delta, compute_uv=False)
    return np.linalg.norm(s[rank:]) / np.linalg.norm(s)


@pytest.mark.slow
def test_extracted_factors_are_the_best_of_their_rank_in_peft_s_layout(tmp_path):
    """Linear layers, embedding and head; SVD in float32: 20 eps."""
    _, _, deltas = models(tmp_path)
    run = RunOptions(max_memory=10**9, threads=1)
    done = extract_adapter(
        tmp_path / "base", tmp_path / "tuned", tmp_path / "lora", rank=3, run=run
    )
    found, config = adapter(tmp_path / "lora")
    matrices = {name: x for name, x in deltas.items() if x.ndim == 2}
    assert [row.name for row in done.rows] == [name.removesuffix(".weight") for name in matrices]
    for row in done.rows:
        delta = matrices[f"{row.name}.weight"]
        if row.name == "model.embed_tokens":
            A, B = (found[f"{row.name}.lora_embedding_{side}"] for side in "AB")
            product = (B @ A).T
        else:
            A, B = (found[f"{row.name}.lora_{side}.weight"] for side in "AB")
            product = B @ A
        assert row.shape == (B.shape[0], A.shape[1])
        error = np.linalg.norm(delta - product) / np.linalg.norm(delta)
        assert abs(error - best(delta, 3)) < 20 * EPS
        assert abs(row.error - error) < 20 * EPS
        assert math.isclose(row.norm, np.linalg.norm(delta), rel_tol=8 * EPS)
        assert math.isclose(row.energy, 1 - error**2, rel_tol=40 * EPS)
    assert (config["r"], config["lora_alpha"], config["rank_pattern"]) == (3, 3, {})
    assert config["task_type"] == "CAUSAL_LM"
    assert sorted(done.lost) == ["model.layers.0.self_attn.q_proj.bias", "model.norm.weight"]
    assert [file.name for file in sorted((tmp_path / "lora").iterdir())] == [
        ".sail-jax", "adapter_config.json", "adapter_model.safetensors",
    ]  # fmt: skip
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "lora", "tuned"]


@pytest.mark.slow
def test_energy_gives_each_module_the_least_rank(tmp_path):
    _, _, deltas = models(tmp_path)
    done = extract_adapter(tmp_path / "base", tmp_path / "tuned", tmp_path / "lora", energy=0.8)
    ranks = {}
    for row in done.rows:
        s = np.linalg.svd(deltas[f"{row.name}.weight"], compute_uv=False)
        ranks[row.name] = int(np.searchsorted(np.cumsum(s**2), 0.8 * np.sum(s**2))) + 1
        assert row.energy >= 0.8 - 8 * EPS
    assert {row.name: row.rank for row in done.rows} == ranks
    assert len(set(ranks.values())) > 1
    found, config = adapter(tmp_path / "lora")
    for name, rank in ranks.items():
        if name != "model.embed_tokens":
            assert found[f"{name}.lora_A.weight"].shape[0] == rank
    most = max(ranks.values())
    assert len(config["rank_pattern"]) == sum(rank != most for rank in ranks.values())


@pytest.mark.slow
@pytest.mark.parametrize("config", [LLAMA, GPT2, LLAMA | {"tie_word_embeddings": True}])
def test_a_whole_adapter_applied_to_the_base_is_the_tuned_model(config, tmp_path):
    """Ranks are full, and the rest is stored. Conv1D of GPT-2 lie as [in, out], the square one too;
    the head of a tie has the factors of the embedding."""
    shapes = dict(SHAPES)
    if config is GPT2:
        h = "transformer.h.0."
        shapes = {
            "transformer.wte.weight": (12, 8), "transformer.wpe.weight": (8, 8),
            f"{h}attn.c_attn.weight": (8, 12), f"{h}attn.c_attn.bias": (12,),
            f"{h}attn.c_proj.weight": (8, 8), f"{h}ln_1.weight": (8,), f"{h}ln_1.bias": (8,),
        }  # fmt: skip
    elif config["tie_word_embeddings"]:
        del shapes["lm_head.weight"]
    _, tuned, deltas = models(tmp_path, shapes, config)
    done = extract_adapter(
        tmp_path / "base", tmp_path / "tuned", tmp_path / "lora", rank=12, modules_to_save=["rest"]
    )
    assert not done.lost
    found, said = adapter(tmp_path / "lora")
    if config is GPT2:
        assert said["fan_in_fan_out"] is True
        A, B = (found[f"{h}attn.c_proj.lora_{side}.weight"] for side in "AB")
        np.testing.assert_allclose((B @ A).T, deltas[f"{h}attn.c_proj.weight"], atol=50 * EPS)
        assert "transformer.wpe.lora_embedding_A" in found
        assert f"{h}attn.c_attn.base_layer.bias" in found
        assert said["modules_to_save"] == ["transformer.h.0.ln_1"]
    elif config["tie_word_embeddings"]:
        for one, other in ("AB", "BA"):
            head = found[f"lm_head.lora_{one}.weight"]
            np.testing.assert_array_equal(
                head.T, found[f"model.embed_tokens.lora_embedding_{other}"]
            )
    else:
        assert (said["modules_to_save"], said["bias"]) == (["model.norm"], "all")
    back = apply_adapter(tmp_path / "base", tmp_path / "lora", tmp_path / "back")
    assert back.changed == len(tuned)
    got = load_checkpoint(back.out)
    assert got.keys() == tuned.keys()
    for name, want in tuned.items():
        np.testing.assert_allclose(got[name], want, rtol=0, atol=50 * EPS, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("prefixed", [[], ["tuned"]])
def test_gpt2_as_it_was_published_lacks_the_prefix_of_its_head(prefixed, tmp_path):
    """PEFT wraps the model with its head: keys have the prefix, whichever file has it."""
    _, tuned, _ = models(tmp_path, {"wte.weight": (8, 8), "h.0.attn.c_proj.weight": (8, 8)}, GPT2)
    if prefixed:
        again = {f"transformer.{name}": x for name, x in tuned.items()}
        save_checkpoint(tmp_path / "again", again)
    paths = tmp_path / "base", tmp_path / ("again" if prefixed else "tuned")
    extract_adapter(*paths, tmp_path / "lora", rank=8)
    found, _ = adapter(tmp_path / "lora")
    assert "transformer.h.0.attn.c_proj.lora_A.weight" in found
    assert "lm_head.lora_A.weight" in found
    back = load_checkpoint(apply_adapter(paths[0], tmp_path / "lora", tmp_path / "back").out)
    for name, want in tuned.items():
        np.testing.assert_allclose(back[name], want, rtol=0, atol=50 * EPS, err_msg=name)


@pytest.mark.slow
def test_modules_are_stored_whole_where_a_pattern_names_them(tmp_path):
    _, tuned, _ = models(tmp_path)
    done = extract_adapter(
        tmp_path / "base", tmp_path / "tuned", tmp_path / "lora", rank=1,
        modules_to_save=["lm_head", "*.norm"], dtype="bfloat16",
    )  # fmt: skip
    found, config = adapter(tmp_path / "lora")
    assert config["modules_to_save"] == ["lm_head", "model.norm"]
    for name in ("lm_head.weight", "model.norm.weight"):
        np.testing.assert_array_equal(found[name], tuned[name])
    assert sorted(done.lost) == ["model.layers.0.self_attn.q_proj.bias"]
    with open_checkpoint(tmp_path / "lora") as opened:
        factor = opened.tensors[f"{PREFIX}{UP}.lora_A.weight"]
        assert factor.dtype == ml_dtypes.bfloat16


@pytest.mark.slow
def test_what_did_not_change_has_no_factors(tmp_path):
    base, tuned, _ = models(tmp_path)
    some = base | {f"{UP}.weight": tuned[f"{UP}.weight"]}
    save_checkpoint(tmp_path / "some", some)
    done = extract_adapter(tmp_path / "base", tmp_path / "some", tmp_path / "lora", rank=2)
    assert [row.name for row in done.rows] == [UP]
    assert not done.lost


# --- merging


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Two adapters: of all modules with rank 2, and of one with rank 3, alpha 6, rsLoRA."""
    folder = tmp_path_factory.mktemp("two")
    models(folder)
    extract_adapter(folder / "base", folder / "tuned", folder / "a", rank=2)
    random = np.random.default_rng(5)
    factors = {
        f"{PREFIX}{UP}.lora_A.weight": random.normal(size=(3, 8)).astype("f"),
        f"{PREFIX}{UP}.lora_B.weight": random.normal(size=(12, 3)).astype("f"),
    }
    config = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "use_rslora": True}
    extras = {"adapter_config.json": json.dumps(config).encode()}
    save_checkpoint(folder / "b" / "adapter_model.safetensors", factors)
    (folder / "b" / "adapter_config.json").write_bytes(extras["adapter_config.json"])
    return folder


def changes(folder):
    """Computes the change of the module that is in both adapters, in float64."""
    parts = [adapter(folder / name)[0] for name in "ab"]
    products = [x[f"{UP}.lora_B.weight"] @ x[f"{UP}.lora_A.weight"] for x in parts]
    return products[0], 6 / math.sqrt(3) * products[1]


def merged(path):
    found, config = adapter(path)
    assert config["rank_pattern"] == config["alpha_pattern"]
    return found[f"{UP}.lora_B.weight"] @ found[f"{UP}.lora_A.weight"], found


@pytest.mark.slow
def test_sums_are_exact_and_ranks_add_up(two, tmp_path):
    done = merge_adapters([two / "a", two / "b"], tmp_path / "sum", weights=[0.5, -2])
    got, found = merged(tmp_path / "sum")
    a, b = changes(two)
    want = 0.5 * a - 2 * b
    np.testing.assert_allclose(got, want, atol=20 * EPS * float(np.linalg.norm(want)))
    assert {row.name: row.rank for row in done.rows}[UP] == 5
    head = found["lm_head.lora_B.weight"] @ found["lm_head.lora_A.weight"]
    one, _ = adapter(two / "a")
    alone = one["lm_head.lora_B.weight"] @ one["lm_head.lora_A.weight"]
    np.testing.assert_allclose(head, 0.5 * alone, atol=20 * EPS)


@pytest.mark.slow
def test_a_rank_takes_the_best_of_the_sum(two, tmp_path):
    done = merge_adapters([two / "a", two / "b"], tmp_path / "sum", rank=2)
    got, _ = merged(tmp_path / "sum")
    want = sum(changes(two))
    error = np.linalg.norm(want - got) / np.linalg.norm(want)
    assert abs(error - best(want, 2)) < 20 * EPS
    row = next(row for row in done.rows if row.name == UP)
    assert row.rank == 2
    assert abs(row.error - error) < 20 * EPS


@pytest.mark.slow
def test_a_method_merges_core_matrices(two, tmp_path, monkeypatch):
    """MagMax, which takes the larger entry; its own singular vectors in float64."""
    marks, spooled = [], adapting._spooled

    def noted(make, names, out, mark, *more):
        marks.append(mark)
        return spooled(make, names, out, mark, *more)

    monkeypatch.setattr(adapting, "_spooled", noted)
    merge_adapters([two / "a", two / "b"], tmp_path / "max", method="magmax")
    assert " at 0x" not in marks[0]  # the resuming process has different addresses
    got, _ = merged(tmp_path / "max")
    a, b = changes(two)
    # Full rank in their own spaces: the singular vectors of the stacked factors.
    parts = [adapter(two / name)[0] for name in "ab"]
    scale = 6 / math.sqrt(3)
    B = np.concatenate(
        [parts[0][f"{UP}.lora_B.weight"], scale * parts[1][f"{UP}.lora_B.weight"]], 1
    )
    A = np.concatenate([x[f"{UP}.lora_A.weight"] for x in parts])
    U, Vt = np.linalg.svd(B, full_matrices=False)[0], np.linalg.svd(A, full_matrices=False)[2]
    cores = [U.T @ x @ Vt.T for x in (a, b)]
    want = U @ np.where(abs(cores[0]) >= abs(cores[1]), *cores) @ Vt
    np.testing.assert_allclose(got, want, atol=100 * EPS * float(np.linalg.norm(want)))


# --- interrupts, memory, and what is refused


@pytest.mark.slow
def test_stopped_while_it_factors_it_resumes_to_the_same_bytes(tmp_path, monkeypatch):
    models(tmp_path)
    paths = tmp_path / "base", tmp_path / "tuned"
    extract_adapter(*paths, tmp_path / "whole", rank=2)
    kept, keep = [], FactorSpool.keep

    def stop(spool, name, factors):
        if len(kept) == 2:
            raise KeyboardInterrupt
        kept.append(name)
        keep(spool, name, factors)

    out = tmp_path / "lora"
    with monkeypatch.context() as patched:
        patched.setattr(FactorSpool, "keep", stop)
        with pytest.raises(KeyboardInterrupt):
            extract_adapter(*paths, out, rank=2, run=RunOptions(threads=1))
    assert not out.exists()
    with pytest.raises(CheckpointError, match="of the same run; continue it with resume=True"):
        extract_adapter(*paths, out, rank=2)
    with pytest.raises(CheckpointError, match="unfinished work of another run"):
        extract_adapter(*paths, out, rank=1, run=RunOptions(resume=True))
    seen = []
    run = RunOptions(resume=True, progress=lambda *x: seen.append(x))
    done = extract_adapter(*paths, out, rank=2, run=run)
    assert {name for *_, name in seen}.isdisjoint(kept)
    assert seen[-1][0] == seen[-1][1] == 2 * 4 * (3 * 12 * 8 + 12 * 8 + 8 * 8)
    assert len(done.rows) == 5
    name = "adapter_model.safetensors"
    assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert not (tmp_path / ".lora.factors").exists()
    assert extract_adapter(*paths, out, rank=2, run=RunOptions(resume=True)).unchanged


@pytest.mark.slow
def test_stopped_before_its_factors_are_laid_out_it_computes_none_again(tmp_path, monkeypatch):
    models(tmp_path)
    paths, out = (tmp_path / "base", tmp_path / "tuned"), tmp_path / "lora"

    commit = Writer.commit

    def stop(writer):
        if writer.out == out:
            raise KeyboardInterrupt
        commit(writer)

    with monkeypatch.context() as patched:
        patched.setattr(Writer, "commit", stop)
        with pytest.raises(KeyboardInterrupt):
            extract_adapter(*paths, out, rank=2)
    assert not out.exists()
    seen = []
    run = RunOptions(resume=True, progress=lambda *x: seen.append(x))
    done = extract_adapter(*paths, out, rank=2, run=run)
    assert not seen
    assert done.rows == extract_adapter(*paths, tmp_path / "whole", rank=2).rows
    name = "adapter_model.safetensors"
    assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "lora", "tuned", "whole"]


REFUSED = {
    "no rank": (["extract", "base", "tuned", "out"], "--rank or --energy: expected at least one"),
    "memory": (
        ["extract", "base", "tuned", "out", "--rank", "1", "--max-memory", "1MB"],
        "--max-memory: .* needs 3.. MiB",
    ),
    "a file": (["extract", "base", "tuned", "out.npz", "--rank", "1"], "is a folder, not a .npz"),
    "no change": (["extract", "base", "base", "out", "--rank", "1"], "no change to factor"),
    "no module": (
        ["extract", "base", "tuned", "out", "--rank", "1", "--modules-to-save", "head"],
        "--modules-to-save: no module 'head' in .*nearest: 'lm_head'",
    ),
    "resized": (
        ["extract", "base", "wide", "out", "--rank", "1"],
        r"'lm_head.weight' has shape \[13, 8\], .*store it whole with --modules-to-save lm_head",
    ),
    "NaN": (["extract", "base", "nan", "out", "--rank", "1"], "NaN or infinity in .*q_proj"),
    "weights": (["merge", "a", "b", "out", "--weights", "1"], "--weights: expected 2 finite"),
    "no adapter": (["merge", "a", "base", "out"], "base is not an adapter"),
    "a method": (["merge", "a", "b", "out", "--method", "tise"], "no merging method 'tise'"),
    "its option": (
        ["merge", "a", "b", "out", "--method", "ties", "--set", "dens=1"],
        "unknown option 'dens' of ties .nearest: 'density'",
    ),
    "an option alone": (
        ["merge", "a", "b", "out", "--set", "x=1"],
        "--set x needs --method",
    ),
    "more": (["merge", "saved", "b", "out"], "saved: expected only factors of matrices, got more"),
    "applied": (["apply", "base", "tuned", "out"], "tuned is not an adapter"),
}


@pytest.mark.slow
def test_what_does_not_fit_is_refused_in_one_line(two, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(two)
    base = load_checkpoint("base")
    wide = base | {"lm_head.weight": np.ones((13, 8), np.float32)}
    save_checkpoint("wide", wide)
    name = "model.layers.0.self_attn.q_proj.weight"
    save_checkpoint("nan", base | {name: np.full((8, 8), np.nan, np.float32)})
    extract_adapter("base", "tuned", "saved", rank=1, modules_to_save=["model.norm"])
    before = sorted(path.name for path in two.iterdir())
    for words, said in REFUSED.values():
        assert cli.main(["lora", *words, "--quiet"]) in (1, 2), words
        errors = capsys.readouterr().err.splitlines()
        assert len(errors) == 1, errors
        assert re.search(said, errors[0]), (words, errors)
        # Work done before the NaN was found is kept, to be resumed.
        shutil.rmtree(".out.factors", ignore_errors="nan" not in words)
        assert sorted(path.name for path in two.iterdir()) == before, words


@pytest.mark.slow
def test_force_replaces_what_each_of_the_three_wrote(two, tmp_path):
    out, forced = tmp_path / "out", RunOptions(force=True)
    a, b = two / "a", two / "b"
    for write in (
        lambda run: apply_adapter(two / "base", a, out, run=run),
        lambda run: extract_adapter(two / "base", two / "tuned", out, rank=2, run=run),
        lambda run: merge_adapters([a, b], out, run=run),
    ):
        if out.exists():
            with pytest.raises(CheckpointError, match=r"or force=True replaces it"):
                write(RunOptions())
        write(forced)
    assert merged(out)[1].keys() == adapter(a)[0].keys()


@pytest.mark.slow
def test_the_memory_in_which_an_output_is_made_counts(two, tmp_path):
    """A library makes orbax's folders of their tensors; without its share 400 MB were enough."""
    run = RunOptions(format="orbax", max_memory=400_000_000)
    with pytest.raises(ValueError, match="max_memory: an output of this format needs"):
        apply_adapter(two / "base", two / "a", tmp_path / "out", run=run)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_table_is_printed(two, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(two)
    words = ["lora", "extract", "base", "tuned", str(tmp_path / "out"), "--rank", "8", "--quiet"]
    assert cli.main(words) == 0
    out, err = capsys.readouterr()
    assert "all 5 modules: error" in out
    assert "lost: model.norm.weight (shape [8], only matrices have factors)" in err


def test_an_extracted_adapter_has_the_names_in_memory(tmp_path):
    """PEFT knows GPT-NeoX's head as lm_head; files have embed_out. `apply` finds it again."""
    model = {"model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"]}
    extras = {"config.json": json.dumps(model | {"tie_word_embeddings": False}).encode()}
    head = np.arange(12, dtype=np.float32).reshape(4, 3)
    for name, by in (("base", 0), ("tuned", 1)):
        tensors = {"embed_out.weight": head + by, "gpt_neox.embed_in.weight": head}
        save_checkpoint(tmp_path / name, tensors, extras=extras)
    extract_adapter(tmp_path / "base", tmp_path / "tuned", tmp_path / "lora", rank=1)
    with open_checkpoint(tmp_path / "lora") as lora:
        assert set(lora.tensors) == {f"{PREFIX}lm_head.lora_{side}.weight" for side in "AB"}
    out = load_checkpoint(apply_adapter(tmp_path / "base", tmp_path / "lora", tmp_path / "out").out)
    assert set(out) == {"embed_out.weight", "gpt_neox.embed_in.weight"}
    np.testing.assert_allclose(out["embed_out.weight"], head + 1, rtol=8 * EPS)
