"""Outputs in FP8: codes, scales and errors follow from the definition, in float64."""

import json
import re

import ml_dtypes
import numpy as np
import pytest
from small_checkpoints import save

from sail_jax.checkpoint import (
    CheckpointError,
    RunOptions,
    average_checkpoints,
    load_checkpoint,
    merge_checkpoints,
    merge_recipe,
)
from sail_jax.checkpoint.executor import CONSTANT, MergeError
from sail_jax.checkpoint.output import coding
from sail_jax.checkpoint.sources.quantised import open_values
from sail_jax.merging.tensors import read_whole

F8, BF16, F16, F32 = ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16, np.float16, np.float32
# The numbers of float8_e4m3fn from 0 to 448, in the order of their codes.
GRID = np.array(
    [m / 8 * 2.0**-6 for m in range(8)]
    + [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)][:-1]
)
FP8 = RunOptions(requantize="fp8")
PLAIN = {"quantization_config": {"quant_method": "fp8"}}


def nearest(values):
    """Codes by a search: the nearest number, of two as near the even code, at most 448."""
    size = np.minimum(np.abs(values), 448.0)
    above = np.clip(np.searchsorted(GRID, size), 1, len(GRID) - 1)
    low, high = size - GRID[above - 1], GRID[above] - size
    code = np.where((low < high) | ((low == high) & (above % 2 == 1)), above - 1, above)
    return (code | np.where(np.signbit(values), 128, 0)).astype(np.uint8)


def quantised(x, high, wide, dtype=F32, *, powers=False):
    """Codes and scales of a matrix from the definition, a block after the other.

    Only the quotient is rounded to float32, as in transformers: it decides what is a tie.
    """
    x, (rows, columns) = x.astype(np.float64), x.shape
    scales = np.ones((-(-rows // high), -(-columns // wide)), dtype)
    codes, values = np.empty(x.shape, np.uint8), np.empty(x.shape)
    for i, j in np.ndindex(*scales.shape):
        at = np.s_[i * high : (i + 1) * high, j * wide : (j + 1) * wide]
        if largest := np.abs(x[at]).max():
            scale = largest / 448
            scales[i, j] = 2.0 ** np.ceil(np.log2(scale)) if powers else scale
        codes[at] = nearest((x[at] / np.float64(scales[i, j])).astype(F32))
        values[at] = codes[at].view(F8).astype(np.float64) * np.float64(scales[i, j])
    error = np.linalg.norm(values - x) / max(np.linalg.norm(x), 1e-300)
    return codes.view(F8), scales, (error, np.abs(values - x).max())


ROWS, COLUMNS = 40, 72
CHANNELS = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "kv_cache_scheme": {"num_bits": 8, "type": "float"},
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
            "input_activations": {"num_bits": 8, "type": "float", "strategy": "tensor"},
        }
    },
}
# The configuration, the name and shape of scales, rows and columns of a block, dtype, powers of 2.
SCHEMES = {
    "tensor": ({"quant_method": "fp8"}, "weight_scale_inv", (), ROWS, COLUMNS, F32, False),
    "tensor in a list": ({"quant_method": "fp8"}, "scale", (1,), ROWS, COLUMNS, F32, False),
    "channel": (CHANNELS, "weight_scale", (ROWS, 1), 1, COLUMNS, BF16, False),
    "channel in a row": ({"quant_method": "fp8"}, "weight_scale", (ROWS,), 1, COLUMNS, F16, False),
    # The last blocks have 8 rows, and 24 columns.
    "block": (
        {"quant_method": "fp8", "weight_block_size": [16, 48], "activation_scheme": "static"},
        *("weight_scale_inv", (3, 2), 16, 48, F32, False),
    ),
    "powers": (
        {"quant_method": "fp8", "weight_block_size": [8, 24], "scale_fmt": "ue8m0"},
        *("weight_scale_inv", (5, 3), 8, 24, F32, True),
    ),
}


def weights(seed):
    """Makes a matrix with rows of different scales, and a corner of zeros."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(ROWS, COLUMNS)) * np.exp(2 * rng.normal(size=(ROWS, 1)))
    x[:16, :48] = 0
    return x


def saved(folder, scheme, seed=0):
    """Makes a checkpoint in FP8 with a quantised weight and unquantised tensors."""
    about, name, shape, high, wide, dtype, powers = SCHEMES[scheme]
    codes, scales, _ = quantised(weights(seed), high, wide, dtype, powers=powers)
    stored = {
        "layers.0.q.weight": codes,
        f"layers.0.q.{name}": scales.reshape(shape),
        "layers.0.q.input_scale": np.ones((), F32),
        # Not in codes, although the layer before it is.
        "layers.1.q.weight": weights(seed + 5).astype(BF16),
        "lm_head.weight": weights(seed + 9).astype(BF16),
    }
    return save(folder, stored, {"model_type": "x", "quantization_config": about})


def same(a, b):
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    assert a.tobytes() == b.tobytes()


def test_codes_are_the_nearest():
    """All numbers of float16, all ties between two codes, and their neighbours."""
    middles = ((GRID[1:] + GRID[:-1]) / 2).astype(F32)
    near = [np.nextafter(middles, F32(x)) for x in (0, 500)]
    halves = np.arange(1 << 16, dtype=np.uint16).view(F16).astype(F32)
    values = np.concatenate([middles, *near, halves[np.isfinite(halves)], [1e-40, 3e38]]).astype(
        F32
    )
    values = np.concatenate([values, -values])
    assert np.array_equal(coding.codes_of(values), nearest(values.astype(np.float64)))
    assert np.array_equal(GRID, np.arange(127, dtype=np.uint8).view(F8).astype(np.float64))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_merge_in_fp8_is_the_plain_one_in_codes(tmp_path, scheme):
    """Weights equal those of the unquantised merge, quantised like the base."""
    models = [saved(tmp_path / name, scheme, seed) for seed, name in enumerate("ab")]
    merged = merge_checkpoints(models, tmp_path / "out", run=FP8)
    plain = load_checkpoint(merge_checkpoints(models, tmp_path / "plain").out)
    about, name, shape, high, wide, dtype, powers = SCHEMES[scheme]
    codes, scales, (relative, largest) = quantised(
        plain["layers.0.q.weight"], high, wide, dtype, powers=powers
    )
    arrays = load_checkpoint(merged.out)
    others = ["layers.1.q.weight", "lm_head.weight"]
    assert [*arrays] == ["layers.0.q.weight", f"layers.0.q.{name}", *others]
    same(arrays["layers.0.q.weight"], codes)
    same(arrays[f"layers.0.q.{name}"], scales.reshape(shape))
    for other in others:
        same(arrays[other], plain[other])
    ((_, error),) = merged.requantized.items()
    assert error == pytest.approx((relative, largest), rel=1e-5)
    assert 0.001 < error.relative < 0.06
    record = json.loads((merged.out / "requantization.json").read_text())
    assert record["tensors"] == {"layers.0.q.weight": error._asdict()}
    stated = json.loads((merged.out / "config.json").read_text())["quantization_config"]
    # Entries on activations have a separate test.
    apart = ("config_groups", "kv_cache_scheme", "activation_scheme")
    assert stated.keys() == about.keys()
    assert all(stated[key] == value for key, value in about.items() if key not in apart)
    # Zeros stay zeros: their blocks have a scale of 1.
    assert not codes[:16, :48].astype(F32).any()
    with open_values(merged.out) as opened:
        assert not opened.tensors["layers.0.q.weight"].dtype.name.startswith("float8")


@pytest.mark.parametrize("scheme", ["tensor", "channel", "block"])
def test_codes_of_one_model_come_back(tmp_path, scheme):
    """Each block has a code of 448. bfloat16, of 8 bits, rounds its value by 2^-8 at most.

    The scale moves by as much, and one in bfloat16 by up to a step, 2^-7. Both values that are
    compared are rounded by 2^-8, too. Codes are 2^-4 apart or more: they stay.
    """
    a = saved(tmp_path / "a", scheme)
    before, out = load_checkpoint(a), merge_checkpoints([a], tmp_path / "out", run=FP8).out
    after = load_checkpoint(out)
    same(after["layers.0.q.weight"], before["layers.0.q.weight"])
    with open_values(a) as one, open_values(out) as two:
        x, y = (read_whole(m.tensors["layers.0.q.weight"]).astype(np.float64) for m in (one, two))
    bound = (4 if scheme == "channel" else 3) * 2.0**-8 * 1.01
    assert (np.abs(x - y) <= bound * np.abs(x)).all()
    assert np.count_nonzero(x) > x.size // 2


def test_scales_that_are_too_small_for_their_dtype_are_its_smallest(tmp_path):
    smallest = F16(2.0**-24)
    codes = np.random.default_rng(0).integers(-90, 90, (4, 8)).astype(F32).astype(F8)
    stored = {"q.weight": codes, "q.weight_scale": np.full((4, 1), smallest)}
    a = save(tmp_path / "a", stored, PLAIN)
    arrays = load_checkpoint(merge_checkpoints([a], tmp_path / "b", run=FP8).out)
    same(arrays["q.weight_scale"], stored["q.weight_scale"])
    same(arrays["q.weight"], codes)


def test_measured_scales_of_activations_are_replaced(tmp_path):
    out = merge_checkpoints([saved(tmp_path / "a", "channel")], tmp_path / "out", run=FP8).out
    stated = json.loads((out / "config.json").read_text())["quantization_config"]
    group = stated["config_groups"]["group_0"]
    assert stated["kv_cache_scheme"] is None
    assert group["input_activations"]["dynamic"] is True
    assert group["weights"] == CHANNELS["config_groups"]["group_0"]["weights"]
    out = merge_checkpoints([saved(tmp_path / "b", "block")], tmp_path / "other", run=FP8).out
    stated = json.loads((out / "config.json").read_text())["quantization_config"]
    assert stated["activation_scheme"] == "dynamic"


@pytest.mark.parametrize("scheme", ["tensor", "channel", "block"])
def test_pieces_of_any_size_and_order_give_the_same_codes(tmp_path, scheme, monkeypatch):
    """Entries are buffered in memory or in a file, and strips have several parts."""
    models = [saved(tmp_path / name, scheme, seed) for seed, name in enumerate("ab")]
    whole = merge_checkpoints(models, tmp_path / "whole", run=FP8)
    write, order = coding.Coding.write, np.random.default_rng(1)

    def shuffled(self, name, array, start=0):
        cuts = [0, *np.sort(order.choice(np.arange(1, array.size), 20, replace=False)), array.size]
        for k in order.permutation(len(cuts) - 1):
            write(self, name, array[cuts[k] : cuts[k + 1]], start + int(cuts[k]))

    monkeypatch.setattr(coding.Coding, "write", shuffled)
    monkeypatch.setattr(coding, "_BLOCK", 5 * COLUMNS)
    monkeypatch.setattr(coding, "_STRIP", 0)
    pieces = merge_checkpoints(models, tmp_path / "pieces", run=FP8)
    for name, array in load_checkpoint(whole.out).items():
        same(load_checkpoint(pieces.out)[name], array)
    for name, error in whole.requantized.items():
        assert pieces.requantized[name] == pytest.approx(error, rel=1e-12)


def test_stacked_experts_have_scales_of_their_own(tmp_path):
    parts = [quantised(weights(seed), ROWS, COLUMNS) for seed in range(3)]
    codes, scales = (np.stack([part[k] for part in parts]) for k in (0, 1))
    stored = {"experts.up_proj": codes, "experts.up_proj_scale_inv": scales}
    a = save(tmp_path / "a", stored, PLAIN)
    arrays = load_checkpoint(merge_checkpoints([a], tmp_path / "b", run=FP8).out)
    same(arrays["experts.up_proj"], codes)
    assert arrays["experts.up_proj_scale_inv"].shape == (3, 1, 1)
    assert np.allclose(arrays["experts.up_proj_scale_inv"], scales, rtol=2.0**-8)


def test_an_interrupted_run_is_finished_with_all_errors(tmp_path):
    """The results of the first run are kept; the output is the same as without an interrupt."""
    folder, about = tmp_path / "a", SCHEMES["block"][0]
    stored = {}
    for k in range(4):
        codes, scales, _ = quantised(weights(k), 16, 48)
        stored |= {f"layers.{k}.weight": codes, f"layers.{k}.weight_scale_inv": scales}
    save(folder, stored, {"quantization_config": about})
    whole = merge_checkpoints([folder], tmp_path / "whole", run=FP8)

    def stop(done, total, name):
        if done > total // 2:
            raise KeyboardInterrupt

    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        merge_checkpoints([folder], out, run=RunOptions(requantize="fp8", progress=stop, threads=1))
    with open(tmp_path / ".out.partial" / "errors", "ab") as file:
        assert len((tmp_path / ".out.partial" / "errors").read_bytes().splitlines()) == 3
        file.write(b'["layers.3.wei')
    # The error of one was not noted, although its codes were finished.
    errors = (tmp_path / ".out.partial" / "errors").read_bytes()
    (tmp_path / ".out.partial" / "errors").write_bytes(errors.partition(b"\n")[2])
    for _ in range(2):
        resumed = merge_checkpoints(
            [folder], out, run=RunOptions(requantize="fp8", resume=True, threads=1)
        )
        assert resumed.requantized == whole.requantized
        for file in whole.out.iterdir():
            if not file.name.startswith(("README", ".")):
                assert (out / file.name).read_bytes() == file.read_bytes(), file.name
    assert resumed.unchanged


def test_a_memory_limit_counts_what_waits(tmp_path):
    a = saved(tmp_path / "a", "block")
    merge_checkpoints([a], tmp_path / "plain", run=RunOptions(max_memory=CONSTANT + (8 << 20)))
    with pytest.raises(MergeError, match="needs"):
        merge_checkpoints(
            [a], tmp_path / "out", run=RunOptions(requantize="fp8", max_memory=CONSTANT + (8 << 20))
        )
    limited = RunOptions(requantize="fp8", max_memory=CONSTANT + (24 << 20))
    merge_checkpoints([a], tmp_path / "out", run=limited)


def recipe(folder, more=""):
    return f"merge_method: passthrough\nmodels: [{{model: {folder}}}]\n{more}"


REFUSED = {
    "plain": (None, "is not quantised; expected a checkpoint in FP8"),
    "int8": (
        {"codes": np.int8},
        "is not stored as float8_e4m3fn codes with plain scales",
    ),
    "e5m2": ({"codes": ml_dtypes.float8_e5m2}, "'q.weight' is not stored as float8_e4m3fn codes"),
    "modelopt": ({"quant_method": "modelopt"}, "modelopt needs scales of activations"),
    "zeros": ({"quant_method": "compressed-tensors"}, "with plain scales"),
    "nothing stated": ({}, "quantization_config is missing in its config.json"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_schemes_are_refused_in_a_line(tmp_path, case):
    changes, message = REFUSED[case]
    stored = {"q.weight": np.ones((4, 4), BF16)}
    about = {}
    if changes is not None:
        codes = np.ones((4, 4), F32).astype(changes.get("codes", F8))
        stored = {"q.weight": codes, "q.weight_scale": np.ones((), F32)}
        about = {"quant_method": changes.get("quant_method", "fp8")} if changes else {}
    if case == "zeros":
        stored["q.weight_zero_point"] = np.ones((), F8)
        about["config_groups"] = {"group_0": {"weights": {"symmetric": False}}}
    save(tmp_path / "a", stored, {"quantization_config": about} if about else {"a": 1})
    text = recipe(tmp_path / "a", "requantize: fp8")
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        merge_recipe(text, tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert re.search("requantize", str(caught.value))
    assert not (tmp_path / "out").exists()


def test_what_writes_no_codes_refuses(tmp_path):
    a = saved(tmp_path / "a", "tensor")
    with pytest.raises(ValueError, match="requantize: expected one of 'fp8'; got 'int8'"):
        RunOptions(requantize="int8")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="requantize"):
        merge_recipe(recipe(a, "requantize: int8"), tmp_path / "out")
    with pytest.raises(CheckpointError, match="requantize=fp8: only merging, growing, aligning"):
        average_checkpoints([a, a], tmp_path / "out", run=FP8)


def test_nan_has_no_code(tmp_path):
    a, b = saved(tmp_path / "a", "block"), tmp_path / "b"
    with open_values(a) as opened:
        arrays = {name: read_whole(x) for name, x in opened.tensors.items()}
    arrays["layers.0.q.weight"][3, 4] = np.nan
    save(b, arrays, {"model_type": "x"})
    loose = RunOptions(requantize="fp8", allow_nonfinite=True)
    with pytest.raises(CheckpointError, match=r"layers.0.q.weight has NaN or infinity, which FP8"):
        merge_checkpoints([b], tmp_path / "out", base=a, method="task_arithmetic", run=loose)
