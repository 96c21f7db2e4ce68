"""Quantised checkpoints are read as the weights that their codes, scales and zeros define."""

import json
import re

import ml_dtypes
import numpy as np
import pytest
from small_checkpoints import CONFIG, save, tensors

from sail_jax.checkpoint import (
    CheckpointError,
    RunOptions,
    align_checkpoints,
    average_checkpoints,
    compare_checkpoints,
    convert_checkpoint,
    grow_checkpoint,
    load_checkpoint,
    merge_checkpoints,
)
from sail_jax.checkpoint.executor import CONSTANT
from sail_jax.checkpoint.sources import dequantised
from sail_jax.checkpoint.sources.quantised import open_values
from sail_jax.cli.main import main
from sail_jax.merging.tensors import held, read_whole

F8, BF16, F16, F32 = ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16, np.float16, np.float32
FP4 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
UNITS, INPUTS = 24, 64


def rng():
    return np.random.default_rng(0)


def packed(codes, bits, places=None):
    """Rows of codes as rows of little-endian words of 32 bits, made with Python's integers."""
    rows = []
    for row in codes:
        number = 0
        for i, code in enumerate(row):
            number |= int(code) << (bits * (i if places is None else places(i)))
        size = -(-len(row) * bits // 32) * 4
        rows.append(np.frombuffer(number.to_bytes(size, "little"), np.int32))
    return np.array(rows)


def nibbles(codes):
    return (codes[..., 0::2] | codes[..., 1::2] << 4).astype(np.uint8)


def scales(shape, dtype=F32):
    return rng().uniform(0.01, 0.1, shape).astype(dtype)


def entry_by_entry(shape, value, dtype, between=np.float32):
    """A weight from its definition, one entry after the other, in float32."""
    out = np.empty(shape, np.float32)
    for at in np.ndindex(*shape):
        out[at] = value(*at)
    return out.astype(between).astype(dtype)


def fp8(scale_shape, block=None, *, scale_dtype=F32, end="weight_scale_inv", rows=UNITS):
    codes = rng().normal(size=(rows, INPUTS)).astype(F8)
    scale = scales(scale_shape, scale_dtype)
    if scale_dtype == np.uint8:
        scale = rng().integers(120, 130, scale_shape).astype(np.uint8)
    config = {"quant_method": "fp8"} | ({"weight_block_size": list(block)} if block else {})

    def value(i, j):
        height, width = block or (rows, INPUTS)
        if not block and scale.ndim and scale.shape[0] == rows:
            height = 1
        s = scale.reshape(-1)[0] if scale.size == 1 else None
        if s is None:
            s = scale.reshape(scale.shape[0], -1)[i // height, j // width]
        s = F32(2.0 ** (int(s) - 127)) if scale_dtype == np.uint8 else F32(s)
        return F32(codes[i, j]) * s

    stored = {"q.weight": codes, f"q.{end}": scale, "q.input_scale": np.ones((), F32)}
    return config, stored, entry_by_entry(codes.shape, value, BF16)


def integers(bits, groups, *, zeros=False, word=True, scale_dtype=BF16, inputs=INPUTS):
    """compressed-tensors: `pack-quantized`, or one integer an entry."""
    low, span = -(1 << (bits - 1)), 1 << bits
    codes = rng().integers(0, span, (UNITS, inputs))
    zero = rng().integers(0, span, (UNITS, groups)) if zeros else None
    scale = scales((UNITS, groups), scale_dtype)
    weights = {"num_bits": bits, "type": "int", "symmetric": not zeros}
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized" if word else "int-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }

    def value(i, j):
        g = j * groups // inputs
        z = F32(zero[i, g]) if zeros else F32(-low)
        return (F32(codes[i, j]) - z) * F32(scale[i, g])

    stored = {"q.weight_scale": scale}
    if word:
        stored |= {
            "q.weight_packed": packed(codes, bits),
            "q.weight_shape": np.array([UNITS, inputs]),
        }
        if zeros:
            stored["q.weight_zero_point"] = packed(zero.T, bits).T.copy()
    else:
        stored["q.weight"] = (codes + low).astype(np.int8)
        if zeros:
            stored["q.weight_zero_point"] = (zero + low).astype(np.int8)
    return config, stored, entry_by_entry((UNITS, inputs), value, BF16, scale_dtype)


def gptq(bits, *, version="gptq", ordered=False, named=True, inputs=INPUTS):
    units, groups = 32, 4
    codes = rng().integers(0, 1 << bits, (inputs, units))
    zero = rng().integers(0, 1 << bits, (groups, units))
    scale = scales((groups, units), F16)
    group = np.arange(inputs) // (inputs // groups)
    if ordered:
        group = rng().permutation(group)
    one = 1 if version == "gptq" else 0
    config = {
        **{"quant_method": "gptq", "bits": bits, "group_size": inputs // groups},
        **{"desc_act": ordered, "checkpoint_format": version},
    }
    stored = {
        "q.qweight": packed(codes.T, bits).T.copy(),
        "q.qzeros": packed(zero, bits),
        "q.scales": scale,
    }
    if ordered or not named:
        stored["q.g_idx"] = group.astype(np.int32)

    def value(o, i):
        g = group[i]
        return (F32(codes[i, o]) - F32(zero[g, o] + one)) * F32(scale[g, o])

    return config if named else {}, stored, entry_by_entry((units, inputs), value, BF16, F16)


def awq():
    """Column c of eight lies in nibble [0, 4, 1, 5, 2, 6, 3, 7][c] of its word."""
    units, groups = 16, 2
    codes = rng().integers(0, 16, (INPUTS, units))
    zero = rng().integers(0, 16, (groups, units))
    scale = scales((groups, units), F16)

    def place(c):
        return c // 8 * 8 + [0, 4, 1, 5, 2, 6, 3, 7][c % 8]

    stored = {
        "q.qweight": packed(codes, 4, place),
        "q.qzeros": packed(zero, 4, place),
        "q.scales": scale,
    }
    config = {"quant_method": "awq", "bits": 4, "group_size": INPUTS // groups, "version": "GEMM"}

    def value(o, i):
        g = i // (INPUTS // groups)
        return (F32(codes[i, o]) - F32(zero[g, o])) * F32(scale[g, o])

    return config, stored, entry_by_entry((units, INPUTS), value, BF16, F16)


def mxfp4():
    """gpt-oss: of each expert [rows, blocks, 16 bytes], and the weight is its transpose."""
    experts, rows, blocks = 3, 6, 2
    codes = rng().integers(0, 16, (experts, rows, blocks, 32))
    exponent = rng().integers(118, 132, (experts, rows, blocks)).astype(np.uint8)

    def value(e, i, o):
        return F32(FP4[codes[e, o, i // 32, i % 32]]) * F32(2.0) ** (
            int(exponent[e, o, i // 32]) - 127
        )

    stored = {"q.weight_blocks": nibbles(codes), "q.weight_scales": exponent}
    return {"quant_method": "mxfp4"}, stored, entry_by_entry((experts, 64, rows), value, BF16)


def fp4(kind):
    size = 32 if kind == "mx" else 16
    codes = rng().integers(0, 16, (UNITS, INPUTS))
    scale, one = scales((UNITS, INPUTS // size)).astype(F8), F32(3.7)
    if kind == "mx":
        scale = rng().integers(118, 132, scale.shape).astype(np.uint8)

    def value(i, j):
        s = scale[i, j // size]
        s = F32(2.0) ** (int(s) - 127) if kind == "mx" else F32(s)
        s = s / one if kind == "packed" else s * one if kind == "modelopt" else s
        return F32(FP4[codes[i, j]]) * s

    name = "q.weight" if kind == "modelopt" else "q.weight_packed"
    stored = {name: nibbles(codes), "q.weight_scale": scale}
    if kind == "packed":
        stored["q.weight_global_scale"] = np.array([one], F32)
    if kind == "modelopt":
        stored["q.weight_scale_2"] = np.array(one, F32)
    method = "modelopt" if kind == "modelopt" else "compressed-tensors"
    return {"quant_method": method}, stored, entry_by_entry((UNITS, INPUTS), value, BF16)


CASES = {
    "fp8 of a tensor": lambda: fp8(()),
    "fp8 of channels": lambda: fp8((UNITS, 1), end="weight_scale"),
    "fp8 of channels in a row": lambda: fp8((UNITS,), end="weight_scale"),
    "fp8 of blocks": lambda: fp8((3, 4), (8, 16)),
    # For 24 rows in two blocks, the first has 16: determined by the configuration, not the
    # quotient.
    "fp8 of blocks that end early": lambda: fp8((2, 2), (16, 48)),
    "fp8 with exponents": lambda: fp8((3, 4), (8, 16), scale_dtype=np.uint8, end="scale"),
    "int8": lambda: integers(8, 1, word=False),
    "int8 with zeros": lambda: integers(8, 1, word=False, zeros=True, scale_dtype=F32),
    "int8 in words": lambda: integers(8, 1),
    "int4": lambda: integers(4, 4),
    "int4 with zeros": lambda: integers(4, 2, zeros=True),
    "int4 of a width that fills no word": lambda: integers(4, 1, inputs=61),
    "int3 with zeros": lambda: integers(3, 2, zeros=True, scale_dtype=F16),
    "gptq": lambda: gptq(4),
    "gptq in an order of its own": lambda: gptq(4, ordered=True),
    "gptq of 3 bits": lambda: gptq(3, version="gptq_v2"),
    "gptq of 8 bits": lambda: gptq(8),
    "gptq without a configuration": lambda: gptq(2, named=False),
    "awq": awq,
    "mxfp4": mxfp4,
    "mxfp4 of compressed-tensors": lambda: fp4("mx"),
    "nvfp4 of compressed-tensors": lambda: fp4("packed"),
    "nvfp4 of modelopt": lambda: fp4("modelopt"),
}
NORM = np.linspace(0.5, 1.5, 8, dtype=np.float32).astype(BF16)


def saved(folder, tensors, about=None, **config):
    config = {"model_type": "x", **config} | ({"quantization_config": about} if about else {})
    return save(folder, {"norm.weight": NORM, **tensors}, config)


def same(a, b):
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize("case", CASES)
def test_weights_are_those_of_the_definition(tmp_path, case, monkeypatch):
    """Reads whole tensors, blocks of two rows, and pieces that begin and end anywhere."""
    about, stored, weight = CASES[case]()
    with open_values(saved(tmp_path / "a", stored, about)) as opened:
        assert set(opened.tensors) == {"norm.weight", "q.weight"}
        tensor = opened.tensors["q.weight"]
        assert tensor.name == "q.weight"
        same(read_whole(tensor), weight)
        monkeypatch.setattr(dequantised, "_BLOCK", 2 * weight.shape[-1])
        same(read_whole(tensor), weight)
        flat, pieces = weight.reshape(-1), np.empty(weight.size, BF16)
        for start in range(0, weight.size, 37):
            tensor.read(pieces[start : start + 37], start)
        same(pieces, flat)
        for start, stop in ((5, 6), (60, 200), (weight.size - 3, weight.size)):
            piece = np.empty(stop - start, BF16)
            tensor.read(piece, start)
            same(piece, flat[start:stop])
        assert 0 < held(tensor) < 1 << 23


@pytest.mark.parametrize("case", ["fp8 of blocks", "int4 with zeros", "gptq", "awq", "mxfp4"])
def test_a_merge_is_that_of_dequantised_weights(tmp_path, case):
    about, stored, weight = CASES[case]()
    other = saved(tmp_path / "other", {"q.weight": weight[::-1].copy()})
    a, plain = saved(tmp_path / "a", stored, about), saved(tmp_path / "p", {"q.weight": weight})
    small = RunOptions(max_memory=CONSTANT + (16 << 20), threads=1)
    merged, expected = (
        merge_checkpoints([x, other], tmp_path / f"out-{x.name}", run=run)
        for x, run in ((a, small), (plain, RunOptions()))
    )
    arrays, wanted = load_checkpoint(merged.out), load_checkpoint(expected.out)
    assert arrays.keys() == wanted.keys()
    for name, array in arrays.items():
        same(array, wanted[name])
    assert json.loads((merged.out / "config.json").read_text()) == {"model_type": "x"}


def test_the_dtype_is_the_one_that_the_configuration_states(tmp_path):
    about, stored, weight = fp8(())
    a = saved(tmp_path / "a", stored, about, torch_dtype="float32")
    with open_values(a) as opened:
        array = read_whole(opened.tensors["q.weight"])
    assert array.dtype == np.float32
    same(array.astype(BF16), weight)


def test_a_file_beside_config_json_describes_codes(tmp_path):
    about, stored, weight = gptq(4, version="gptq_v2")
    folder = saved(tmp_path / "a", stored)
    (folder / "quantize_config.json").write_text(json.dumps(about))
    with open_values(folder) as opened:
        same(read_whole(opened.tensors["q.weight"]), weight)
        assert "quantize_config.json" not in opened.extras


# Changes of a case: of its stored tensors, or of what its configuration states.
def lacking(name):
    return lambda about, stored: (about, {k: x for k, x in stored.items() if k != f"q.{name}"})


def damaged(**changes):
    new = {f"q.{name}": array for name, array in changes.items()}
    return lambda about, stored: (about, stored | new)


def stating(**entries):
    return lambda about, stored: (about | entries, stored)


I32 = np.int32
HOSTILE = {
    "no scale": ("int4", lacking("weight_scale"), "'q.weight_scale' is missing"),
    "no shape": ("int4", lacking("weight_shape"), "'q.weight_shape' is missing"),
    "no zeros": ("int4 with zeros", lacking("weight_zero_point"), "is missing"),
    "no zeros of gptq": ("gptq", lacking("qzeros"), "'q.qzeros' is missing"),
    "no order": ("gptq in an order of its own", lacking("g_idx"), "'q.g_idx' is missing"),
    "fp8 alone": ("fp8 of a tensor", lacking("weight_scale_inv"), "codes (float8_e4m3fn)"),
    "other scales": (
        "fp8 of blocks",
        damaged(weight_scale_inv=scales((5, 4))),
        "'q.weight_scale_inv': expected scales of 'q.weight' [24, 64], got shape [5, 4]",
    ),
    "scales in a row": ("fp8 of a tensor", damaged(weight_scale_inv=scales((2,))), "got shape [2]"),
    "empty scales": ("fp8 of blocks", damaged(weight_scale_inv=scales((0, 4))), "got shape [0, 4]"),
    "scales that are integers": (
        "int4",
        damaged(weight_scale=np.ones((UNITS, 4), I32)),
        "expected scales, got int32",
    ),
    "a shape that lies": (
        "int4",
        damaged(weight_shape=np.array([UNITS, 72])),
        "packs with 4 bits, got [24, 72]",
    ),
    "a vast shape": ("int4", damaged(weight_shape=np.array([UNITS, 1 << 60])), "'q.weight_shape'"),
    "a negative shape": ("int4", damaged(weight_shape=np.array([-1, 64])), "got [-1, 64]"),
    "a shape of text": (
        "int4",
        damaged(weight_shape=np.ones(3, F32)),
        "expected 2 integers, got float32[3]",
    ),
    "few zeros": (
        "int4 with zeros",
        damaged(weight_zero_point=np.ones((1, 2), I32)),
        "expected one for each of the scales",
    ),
    "few zeros of gptq": (
        "gptq",
        damaged(qzeros=np.ones((2, 4), I32)),
        "'q.qzeros': expected shape [4, 4], got [2, 4]",
    ),
    "another size of groups": ("gptq", stating(group_size=8), "'q.scales': expected scales"),
    "other bits": ("gptq", stating(bits=8), "expected codes of 8 bits, as is stated"),
    "gptq called awq": ("gptq", stating(quant_method="awq"), "expected shapes of AWQ"),
    "a layout of gptq": (
        "gptq",
        stating(checkpoint_format="marlin"),
        "its checkpoint_format 'marlin' is not read",
    ),
    "a layout of awq": ("awq", stating(version="GEMV"), "its version 'gemv' is not read"),
    "a format": ("int4", stating(format="marlin-24"), "its format 'marlin-24' is not read"),
    "rotated": ("int4", stating(transform_config={"a": 1}), "transform_config"),
    "blocks of 0": (
        "fp8 of blocks",
        stating(weight_block_size=[0, 128]),
        "'weight_block_size': expected two integers >= 1, got [0, 128]",
    ),
    "few exponents": (
        "mxfp4",
        damaged(weight_scales=np.ones((3, 6, 1), np.uint8)),
        "expected exponents of shape [3, 6, 2]",
    ),
    "two factors": (
        "nvfp4 of modelopt",
        damaged(weight_scale_2=np.ones(2, F32)),
        "expected one number, got float32[2]",
    ),
    "codes and weights": (
        "gptq",
        damaged(weight=np.ones((32, 64), BF16)),
        "stores both 'q.weight' and its codes",
    ),
    "a method": ("fp8 of a tensor", stating(quant_method="hqq"), "is quantised by hqq"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_what_does_not_fit_is_refused_in_a_line(tmp_path, case):
    name, change, message = HOSTILE[case]
    about, stored, _ = CASES[name]()
    about, stored = change(about, stored)
    folder = saved(tmp_path / "a", stored, about)
    with pytest.raises(CheckpointError, match=re.escape(message)) as caught:
        open_values(folder)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"{folder} is quantised by") or "stores both" in message


VALUES = {
    "NaN": ("fp8 of a tensor", {"weight_scale_inv": np.array(np.nan, F32)}, "not finite"),
    "infinite": ("gptq", {"scales": np.full((4, 32), np.inf, F16)}, "'q.scales' has scales that"),
    "NaN of exponents": (
        "mxfp4", {"weight_scales": np.full((3, 6, 2), 255, np.uint8)},
        "'q.weight_scales' has scales that are not finite",
    ),
    "a factor of 0": (
        "nvfp4 of compressed-tensors", {"weight_global_scale": np.zeros(1, F32)}, "0"
    ),
    "beyond": (
        "gptq in an order of its own", {"g_idx": np.full(INPUTS, 4, I32)},
        "'q.g_idx' has the group 4; expected 0 to 3",
    ),
    "before": ("gptq in an order of its own", {"g_idx": np.full(INPUTS, -1, I32)}, "group -1"),
}  # fmt: skip


@pytest.mark.parametrize("case", VALUES)
def test_values_that_are_none_are_refused_when_read(tmp_path, case):
    name, changes, message = VALUES[case]
    about, stored, _ = CASES[name]()
    about, stored = damaged(**changes)(about, stored)
    folder = saved(tmp_path / "a", stored, about)
    with open_values(folder) as opened, pytest.raises(CheckpointError, match=message):
        read_whole(opened.tensors["q.weight"])


def test_eetq_is_named_without_a_configuration(tmp_path):
    stored = {"q.weight": np.ones((4, 4), np.int8), "q.weight_scales": np.ones(4, F16)}
    with pytest.raises(CheckpointError, match=r"is quantised by EETQ \(int8 in 'q.weight' next to"):
        open_values(saved(tmp_path / "a", stored))


def test_inspect_lists_weights_and_how_they_are_read(llamas, capsys):
    assert main(["inspect", str(llamas / "a")]) == 0
    printed = capsys.readouterr().out
    assert "a: llama" in printed.splitlines()[0]
    assert "note: quantised by fp8 (quantization_config" in printed
    assert "dequantised into bfloat16 as it is read" in printed


COMMANDS = {
    "convert": lambda a, b, out: convert_checkpoint(a, out, "tunix"),
    "average": lambda a, b, out: average_checkpoints([a, b], out),
    "grow": lambda a, b, out: grow_checkpoint(a, out, {"intermediate_size": 40}),
}
SLOW = ("grow",)


@pytest.fixture(scope="module")
def llamas(tmp_path_factory):
    """Makes two tiny Llamas in FP8, and the same two unquantised."""
    folder = tmp_path_factory.mktemp("llamas")
    for seed, name in enumerate("ab"):
        codes, weights = {}, {}
        for key, array in tensors(seed).items():
            array = array.astype(BF16)
            if not key.endswith("_proj.weight"):
                codes[key] = weights[key] = array
                continue
            scale = F32(np.abs(array.astype(F32)).max() / 448)
            codes[key] = (array.astype(F32) / scale).astype(F8)
            codes[f"{key}_scale"] = np.array([scale])
            weights[key] = (codes[key].astype(F32) * scale).astype(BF16)
        about = {"quantization_config": {"quant_method": "fp8"}}
        for end, arrays, config in (("", codes, CONFIG | about), ("-plain", weights, CONFIG)):
            save(folder / f"{name}{end}", arrays, config)
    return folder


# Growing compiles programs of its own.
@pytest.mark.parametrize(
    "command", [pytest.param(x, marks=[pytest.mark.slow] * (x in SLOW)) for x in COMMANDS]
)
def test_commands_compute_with_the_weights(llamas, tmp_path, command):
    outs = []
    for end in ("", "-plain"):
        out = tmp_path / f"out{end}"
        COMMANDS[command](llamas / f"a{end}", llamas / f"b{end}", out)
        outs.append((load_checkpoint(out), json.loads((out / "config.json").read_text())))
    (arrays, config), (wanted, other) = outs
    assert config == other
    assert arrays.keys() == wanted.keys()
    for name, array in arrays.items():
        same(array, wanted[name])


@pytest.mark.slow
def test_codes_are_compared_as_weights(llamas):
    found = compare_checkpoints([llamas / "a", llamas / "a-plain"])
    assert found.equal.all()


AGAIN = {
    "merge": lambda a, b, out, run: merge_checkpoints([a, b], out, run=run),
    "deeper": lambda a, b, out, run: grow_checkpoint(
        a, out, {"num_hidden_layers": 3}, certify=False, run=run
    ),
    "align": lambda a, b, out, run: align_checkpoints(a, b, out, certify=False, run=run),
}


@pytest.mark.parametrize(
    "command", [pytest.param(x, marks=[pytest.mark.slow] * (x != "merge")) for x in AGAIN]
)
def test_weights_are_written_in_fp8_again(llamas, tmp_path, command):
    """Old and new layers are quantised alike; everything else is as without quantisation."""
    do, a, b = AGAIN[command], llamas / "a", llamas / "b"
    plain = load_checkpoint(do(a, b, tmp_path / "plain", RunOptions()).out)
    done = do(a, b, tmp_path / "out", RunOptions(requantize="fp8"))
    coded = {name for name in plain if name.endswith("_proj.weight")}
    assert len(coded) == 7 * (3 if command == "deeper" else 2)
    assert done.requantized.keys() == coded
    assert any(f"{len(coded)} weights are written in float8_e4m3fn" in x for x in done.notes) or (
        command == "merge" and any("in float8_e4m3fn" in x for x in done.plan.notes)
    )
    arrays = load_checkpoint(done.out)
    assert arrays.keys() == plain.keys() | {f"{name}_scale" for name in coded}
    with open_values(done.out) as opened:
        for name, wanted in plain.items():
            if name not in coded:
                same(arrays[name], wanted)
                continue
            assert (arrays[name].dtype, arrays[f"{name}_scale"].shape) == (F8, (1,))
            wanted, got = wanted.astype(F32), read_whole(opened.tensors[name]).astype(F32)
            # Half a step of a code of four bits, and of the smallest codes; bfloat16 rounds it.
            step = 2.0**-10 * F32(arrays[f"{name}_scale"][0])
            assert (np.abs(got - wanted) <= (2.0**-4 + 2.0**-8) * np.abs(wanted) + step).all()
    assert json.loads((done.out / "config.json").read_text())["quantization_config"] == {
        "quant_method": "fp8"
    }


@pytest.mark.slow
def test_the_command_line_writes_fp8_and_prints_the_error(llamas, tmp_path, capsys):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"merge_method: linear\nmodels: [{{model: {llamas}/a, parameters: {{weight: 1}}}}]\n"
    )
    out, report = tmp_path / "out", tmp_path / "report"
    words = ["merge", str(recipe), str(out), "--requantize", "fp8", "--report", str(report)]
    assert main([*words, "--quiet"]) == 0
    printed = capsys.readouterr().out
    record = json.loads((out / "requantization.json").read_text())["tensors"]
    name, worst = next(iter(record.items()))
    said = (
        rf"FP8 changes weights by .* \(median of 14\), at most {worst['relative']:.3g} \({name}\)"
    )
    assert re.search(said, printed)
    assert re.search(said, json.loads((report / "report.json").read_text())["about"]["requantize"])
    assert "14 weights are written in float8_e4m3fn" in (out / "README.md").read_text()
