"""Quantised checkpoints are recognised; those with unsupported schemes are rejected with the
scheme's name.
"""

from types import MappingProxyType, SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from small_checkpoints import save

from sail_jax.checkpoint import (
    CheckpointError,
    align_checkpoints,
    compare_checkpoints,
    grow_checkpoint,
    load_checkpoint,
    merge_checkpoints,
)
from sail_jax.checkpoint.formats.quantized import quantization
from sail_jax.checkpoint.sources.quantised import open_values
from sail_jax.cli.main import main

F8, BF16 = ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16
E8M0 = ml_dtypes.float8_e8m0fnu

# The method of config.json, the name that is told, and types by name, as files on hubs have them.
CODES = {
    "fp8 of blocks": ("fp8", "fp8", {"q.weight": F8, "q.weight_scale_inv": np.float32}),
    "fp8 of channels": ("fbgemm_fp8", "fbgemm_fp8", {"q.weight": F8, "q.weight_scale": BF16}),
    "mxfp8": (None, "FP8", {"q.weight": F8, "q.scale": E8M0}),
    "fp8 of a root": (None, "FP8", {"w": F8, "w_scale_inv": np.float32}),
    "fp8 of flax": (None, "FP8", {"q/kernel": F8, "q/kernel_scale": np.float32}),
    "gptq": (
        *("gptq", "gptq"),
        {"q.qweight": np.int32, "q.qzeros": np.int32, "q.scales": np.float16, "q.g_idx": np.int32},
    ),
    "awq": ("awq", "awq", {"q.qweight": np.int32, "q.qzeros": np.int32, "q.scales": np.float16}),
    "4 bits": (
        *("bitsandbytes", "bitsandbytes"),
        {
            "q.weight": np.uint8,
            "q.weight.absmax": np.float32,
            "q.weight.quant_map": np.float32,
            "q.weight.quant_state.bitsandbytes__nf4": np.uint8,
        },
    ),
    "8 bits": (None, "bitsandbytes", {"q.weight": np.int8, "q.SCB": np.float32}),
    "packed": (
        *("compressed-tensors", "compressed-tensors"),
        {"q.weight_packed": np.int32, "q.weight_scale": BF16, "q.weight_shape": np.int64},
    ),
    "w8a8": (None, "integers with scales", {"q.weight": np.int8, "q.weight_scale": BF16}),
    "nvfp4": (None, "compressed-tensors", {"q.weight_packed": np.uint8, "q.weight_scale": F8}),
    "mxfp4": (
        *("mxfp4", "mxfp4"),
        {"experts.up_blocks": np.uint8, "experts.up_scales": np.uint8, "experts.up_bias": BF16},
    ),
    "quanto": (None, "quanto", {"q.weight._data": np.int8, "q.weight._scale": np.float16}),
    "hqq": (None, "HQQ", {"q.W_q": np.uint8, "q.scale": np.float16, "q.zero": np.float16}),
    "eetq": ("eetq", "eetq", {"q.weight": np.int8, "q.weight_scales": np.float16}),
    "a scheme of its own": ("torchao", "torchao", {"q.weight": np.int8, "norm.weight": BF16}),
}
NOT_READ = ("4 bits", "8 bits", "quanto", "hqq", "eetq", "a scheme of its own")
VALUES = {
    "plain float8": ({}, {"q.weight": F8, "norm.weight": F8}),
    "float8 with its own scales": ({}, {"norm.weight": F8, "norm.scale": F8}),
    "scales of a network": ({}, {"q.scales": np.float32, "q.weight": BF16, "q.qzeros": BF16}),
    "a learned scale": ({}, {"q.weight": BF16, "q.weight_scale": BF16}),
    "blocks": ({}, {"up_blocks": np.float32, "up_scales": np.float32}),
    "counts": ({}, {"bn.weight": BF16, "bn.num_batches_tracked": np.int64, "m.bias": np.uint8}),
    "null": ({"quantization_config": None}, {"q.weight": BF16, "m": np.int32}),
    "empty": ({"quantization_config": {}}, {"q.weight": BF16, "m": np.int32}),
    "a configuration left": ({"quantization_config": {"quant_method": "fp8"}}, {"q.weight": BF16}),
}


def saved(folder, types, config):
    return save(folder, {name: np.ones((2, 2), dtype) for name, dtype in types.items()}, config)


def stating(method):
    about = {"quantization_config": {"quant_method": method}} if method else {}
    return {"model_type": "x", "text_config": about}


def like(types):
    each = {n: SimpleNamespace(name=n, dtype=np.dtype(x)) for n, x in types.items()}
    return MappingProxyType(each)


@pytest.mark.parametrize("case", CODES)
def test_codes_are_recognised(case):
    """They are recognised by the configuration, or else by names and types alone."""
    method, told, types = CODES[case]
    assert quantization(like(types), stating(method)).startswith(f"{told} (")
    assert bool(quantization(like(types), {})) == (case != "a scheme of its own")


@pytest.mark.parametrize("case", NOT_READ)
def test_codes_that_are_not_read_are_refused_by_name(tmp_path, case):
    method, told, types = CODES[case]
    folder = saved(tmp_path / "a", types, stating(method))
    with pytest.raises(CheckpointError, match="Dequantise it first") as caught:
        open_values(folder)
    message = str(caught.value).removeprefix(str(folder))
    assert message.startswith(f" is quantised by {told} (")
    assert len(message) < 250
    assert "\n" not in message


OPERATIONS = {
    "merge": lambda a, b, out: merge_checkpoints([a, b], out),
    "grow": lambda a, b, out: grow_checkpoint(a, out, {"hidden_size": 4}),
    "align": align_checkpoints,
    "compare": lambda a, b, out: compare_checkpoints([a, b]),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_operations_refuse_codes_that_are_not_read(tmp_path, operation):
    a, b = (saved(tmp_path / x, CODES["8 bits"][2], {"model_type": "x"}) for x in "ab")
    with pytest.raises(CheckpointError, match=f"{a} is quantised by bitsandbytes"):
        OPERATIONS[operation](a, b, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("case", VALUES)
def test_values_are_no_codes(case):
    config, types = VALUES[case]
    assert quantization(like(types), config) == ""


@pytest.mark.parametrize("case", ["plain float8", "a configuration left"])
def test_values_are_merged(tmp_path, case):
    config, types = VALUES[case]
    a, b = (saved(tmp_path / x, types, config) for x in "ab")
    merged = load_checkpoint(merge_checkpoints([a, b], tmp_path / "out").out)
    assert merged.keys() == types.keys()
    for name, array in merged.items():
        np.testing.assert_array_equal(array.astype(np.float32), np.ones((2, 2)), err_msg=name)


def test_inspect_says_that_values_are_codes(tmp_path, capsys):
    _, _, types = CODES["4 bits"]
    folder = saved(tmp_path / "a", types, {"model_type": "x"})
    assert main(["inspect", str(folder)]) == 0
    assert "note: quantised by bitsandbytes (uint8 in 'q.weight'" in capsys.readouterr().out
    for command in (["inspect", "--draft"], ["grow", "--draft"]):
        assert main([*command, str(folder)]) != 0
        assert "is quantised by bitsandbytes" in capsys.readouterr().err
