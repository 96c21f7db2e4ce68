"""Opens quantised checkpoints for arithmetic, pairing codes with their scales by scheme."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from typing import Any, NamedTuple

import numpy as np

from sail_jax.checkpoint.formats.extras import config_of
from sail_jax.checkpoint.formats.files import DTYPES, CheckpointError
from sail_jax.checkpoint.formats.open import Checkpoint, closed_on_error, open_checkpoint
from sail_jax.checkpoint.formats.quantized import (
    KEYS,
    Layout,
    Scheme,
    method,
    quantization,
    statements,
)
from sail_jax.checkpoint.sources.dequantised import (
    E2M1,
    E8M0,
    Blocks,
    Codes,
    Dequantised,
    integers,
)
from sail_jax.configurations import CONV1D, Config, look_up
from sail_jax.merging.selection import Select
from sail_jax.merging.tensors import Shape, Tensor, Tensors, read_whole

# Supported values of `quant_method`. "modelopt" is NVIDIA's Model Optimizer.
_READ = ("fp8", "fbgemm_fp8", "compressed-tensors", "gptq", "awq", "mxfp4", "modelopt")
# Supported formats of compressed-tensors; others are sparse, or pack codes differently.
_FORMATS = (
    *("dense", "int-quantized", "float-quantized", "naive-quantized", "pack-quantized"),
    *("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized", "mixed-precision"),
)
# Files that describe codes, in addition to config.json or instead of its entry.
_FILES = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")
# Entries about activations with few bits, which do not affect weights.
_ACTIVATIONS = (
    *("input_scale", "input_scale_inv", "activation_scale", "input_global_scale"),
    *("input_zero_point", "output_scale", "k_scale", "v_scale", "q_scale", "k_zero_point"),
    *("v_zero_point", "input_scale_ub"),
)
# The positions of the eight columns in a word of AWQ, in units of a code.
_AWQ = (0, 4, 1, 5, 2, 6, 3, 7)


def open_values(
    path: str | PathLike[str],
    *,
    allow_pickle: bool = False,
    offline: bool = False,
    select: Select = None,
) -> Checkpoint:
    """Opens a checkpoint for arithmetic; codes are dequantised as they are read.

    For a training state, only the weights are in `tensors`, unless others are selected.

    Args:
      path: As `open_checkpoint` takes it.
      allow_pickle: As `open_checkpoint` takes it.
      offline: As `open_checkpoint` takes it.
      select: The tensors that are selected; see `sail_jax.merging.selection`.

    Returns:
      The open checkpoint. Codes of FP8, compressed-tensors, GPTQ, AWQ, MXFP4 and NVFP4 become
      weights with the dtype in config.json, or bfloat16 without one. The entry about codes is
      removed from config.json.

    Raises:
      CheckpointError: As `open_checkpoint` does, and if the tensors are codes of another scheme, or
        codes and scales are inconsistent.
      ValueError: If nothing is selected.
    """
    checkpoint = open_checkpoint(path, allow_pickle=allow_pickle, offline=offline)
    with closed_on_error(checkpoint):
        # The leaves of a state are selected first, because an optimiser's state may also contain
        # codes.
        checkpoint.select()
        _decode(checkpoint)
        if select is not None:
            checkpoint.select(select)
    return checkpoint


def read_if_possible(checkpoint: Checkpoint) -> str:
    """Replaces codes by weights if the scheme is supported; otherwise keeps the codes.

    Args:
      checkpoint: A checkpoint as `open_checkpoint` opens it, which is changed.

    Returns:
      A sentence that states why the tensors remain codes; "" if they are plain values now.
    """
    try:
        _decode(checkpoint)
    except CheckpointError as error:
        scheme = quantization(checkpoint.tensors, config_of(checkpoint.extras))
        return f"quantised by {scheme}: values, shapes and counts describe the codes; {error}"
    return ""


def _decode(checkpoint: Checkpoint) -> None:
    """Replaces codes by weights, and removes the entry about them from config.json."""
    config = config_of(checkpoint.extras)
    if not (scheme := quantization(checkpoint.tensors, config)):
        return
    checkpoint.tensors, left, dtype, checkpoint.scheme = _values(checkpoint, scheme)
    checkpoint.decoded = f"quantised by {scheme}: dequantised into {dtype} as it is read"
    if left:
        checkpoint.decoded += f"; {left} scales of activations are left out"
    for file in _FILES:
        checkpoint.extras.pop(file, None)
    if config:
        checkpoint.extras["config.json"] = json.dumps(_without(config), indent=2).encode() + b"\n"


def _without(config: Config) -> dict[str, Any]:
    """Returns a configuration without the entries about codes, also within its parts."""
    return {
        key: _without(value) if key == "text_config" and isinstance(value, Mapping) else value
        for key, value in config.items()
        if key not in KEYS
    }


def _scheme(
    config: Config,
    about: Mapping[str, Any],
    named: str,
    found: Sequence["_Found"],
    names: Iterable[str],
) -> Scheme:
    """Returns the scheme for an output with the same codes, or the reason why there is none."""
    entries = {place: _unmeasured(stated) for place, stated in statements(config).items()}
    layouts = {x.weight.name: x.layout for x in found if x.layout is not None}
    other = next((x.weight.name for x in found if x.layout is None), None)
    refused = ""
    if named in ("modelopt", "fbgemm_fp8"):
        refused = f"{named} needs scales of activations, which have to be measured"
    elif other is not None:
        refused = f"'{other}' is not stored as float8_e4m3fn codes with plain scales"
    elif not entries:
        refused = (
            "quantization_config is missing in its config.json, so readers would take codes for "
            "weights"
        )
    powers = about.get("scale_fmt") == "ue8m0"
    return Scheme(entries, layouts, frozenset(names) - layouts.keys(), refused, powers)


def _unmeasured(stated: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the entry about codes, with dynamic scales of activations.

    The measured scales belong to another network.
    """
    changed = dict(stated)
    if "activation_scheme" in stated:
        changed["activation_scheme"] = "dynamic"
    if stated.get("kv_cache_scheme"):
        changed["kv_cache_scheme"] = None
    groups = stated.get("config_groups")
    if isinstance(groups, Mapping):
        changed["config_groups"] = {key: _dynamic(group) for key, group in groups.items()}
    return changed


def _dynamic(group: Any) -> Any:
    """Returns a group of compressed-tensors without measured scales of activations."""
    if not isinstance(group, Mapping):
        return group
    changed = dict(group)
    for key in ("input_activations", "output_activations"):
        stated = group.get(key)
        if isinstance(stated, Mapping) and not stated.get("dynamic"):
            changed[key] = {**stated, "dynamic": True, "observer": None}
    return changed


def _values(checkpoint: Checkpoint, scheme: str) -> tuple[dict[str, Tensor], int, np.dtype, Scheme]:
    """Returns the tensors with weights instead of codes, the number omitted, the dtype, the scheme.

    The scheme contains the layout of each weight's codes.
    """
    path, config = checkpoint.path, config_of(checkpoint.extras)
    about = _about(config, checkpoint)
    refused = CheckpointError(
        f"{path} is quantised by {scheme}: its numbers are codes. Dequantise it first (in "
        "transformers: model.dequantize(), then save_pretrained), or use the original "
        "checkpoint"
    )
    named = method(config)
    named = "compressed-tensors" if named in _FORMATS else named
    if named and named not in _READ:
        raise refused
    stated = look_up(config, "dtype") or look_up(config, "torch_dtype")
    stated = stated.removeprefix("torch.") if isinstance(stated, str) else ""
    dtype = DTYPES[stated if stated in ("float16", "float32") else "bfloat16"]
    try:
        _check(about, config)
        finder = _Finder(checkpoint.tensors, about, named, dtype)
        made, used, every = dict[str, tuple[str, Tensor]](), set[str](), list[_Found]()
        for name in checkpoint.tensors:
            if (found := finder(name)) is not None:
                made[name] = (found.weight.name, found.weight)
                used |= {name, *found.others}
                every.append(found)
    except CheckpointError as error:
        raise CheckpointError(f"{path} is quantised by {scheme}: {error}") from error
    tensors, left = dict[str, Tensor](), 0
    for name, tensor in checkpoint.tensors.items():
        if name in made:
            name, tensor = made[name]
        elif name in used:
            continue
        elif name.rpartition(".")[2] in _ACTIVATIONS:
            left += 1
            continue
        if name in tensors or (name != tensor.name and name in checkpoint.tensors):
            raise CheckpointError(f"{path} stores both '{name}' and its codes")
        tensors[name] = tensor
    if quantization(tensors, {}):
        raise refused
    for name, tensor in tensors.items():
        whole = tensor.dtype.kind in "iu" and name.endswith(("weight", "weight_packed", "_blocks"))
        if tensor.dtype.name.startswith("float8") or whole:
            raise CheckpointError(
                f"{path} is quantised by {scheme}: '{name}' has codes ({tensor.dtype}), but its "
                "scales are missing"
            )
    if not made:
        raise refused
    return tensors, left, dtype, _scheme(config, about, named, every, tensors)


def _about(config: Config, checkpoint: Checkpoint) -> dict[str, Any]:
    """Returns the entries about codes in config.json or a separate file."""
    found = [*statements(config).values()]
    for file in _FILES if not found else ():
        part = config_of(checkpoint.extras, file)
        found += [inner if isinstance(inner := part.get("quantization"), Mapping) else part]
    return {key: value for part in reversed(found) for key, value in part.items()}


def _check(about: Mapping[str, Any], config: Config) -> None:
    """Refuses unsupported entries about the codes."""
    named = about.get("quant_method")
    stated: list[tuple[str, object, tuple[str | None, ...]]] = []
    if named == "compressed-tensors":
        stated = [("format", x.get("format"), (None, *_FORMATS)) for x in (about, *_groups(about))]
        if isinstance(sparse := about.get("sparsity_config"), Mapping):
            stated.append(("sparse format", sparse.get("format"), (None, "dense")))
        if about.get("transform_config"):
            raise CheckpointError("its weights are transformed (transform_config): not read")
    if named == "gptq":
        version = about.get("checkpoint_format") or about.get("format") or "gptq"
        stated = [("checkpoint_format", version, ("gptq", "gptq_v2"))]
        if config.get("model_type") in CONV1D:
            raise CheckpointError(
                f"a linear weight of {config['model_type']} is stored as [in, out], which is not "
                "supported"
            )
    if named == "awq":
        version = str(about.get("version") or about.get("format") or "gemm").lower()
        stated = [("version", version, ("gemm",))]
    for what, value, read in stated:
        if value not in read:
            raise CheckpointError(f"its {what} {value!r} is not read")


def _groups(about: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Returns the groups of layers of compressed-tensors."""
    groups = about.get("config_groups")
    groups = groups.values() if isinstance(groups, Mapping) else ()
    return [group for group in groups if isinstance(group, Mapping)]


class _Found(NamedTuple):
    """A weight, the names of the other tensors that it requires, and its layout in FP8."""

    weight: Dequantised
    others: tuple[str, ...]
    layout: Layout | None = None


class _Finder:
    """Finds the weight of a tensor of codes, by name, dtype and shape."""

    def __init__(
        self, tensors: Tensors, about: Mapping[str, Any], named: str, dtype: np.dtype
    ) -> None:
        """Stores the data for finding weights.

        Args:
          tensors: The tensors of the checkpoint.
          about: The entries about the codes.
          named: The stated method; "" without one.
          dtype: The dtype of the weights.
        """
        self._tensors, self._about, self._named, self._dtype = tensors, about, named, dtype
        self._arguments = [
            stated for g in _groups(about) if isinstance(stated := g.get("weights"), Mapping)
        ]

    def __call__(self, name: str) -> _Found | None:
        """Returns the weight of a tensor of codes; None for other tensors."""
        for end, found in (
            ("weight_packed", self._packed),
            ("qweight", self._transposed),
            ("_blocks", self._experts),
        ):
            if name.endswith(end) and self._tensors[name].dtype.kind in "iu":
                return found(name, name.removesuffix(end))
        return self._entries(name)

    def _packed(self, name: str, stem: str) -> _Found:
        """Makes a weight of compressed-tensors with several codes in a word."""
        tensor, scale = self._tensors[name], f"{stem}weight_scale"
        if tensor.dtype == np.uint8:
            factor = f"{stem}weight_global_scale"
            factor = factor if factor in self._tensors else None
            return self._e2m1(f"{stem}weight", name, scale, factor, divided=True)
        self._check(name, tensor.dtype == np.int32 and len(tensor.shape) > 1, "a matrix of int32")
        shape, bits = self._unpacked(name, f"{stem}weight_shape")
        columns = shape[-1]
        words = Codes(
            tensor, _matrices(tensor.shape), shape, integers(bits, 1 << (bits - 1)),
            np.arange(columns) * bits, bits,
        )  # fmt: skip
        zero, group = f"{stem}weight_zero_point", f"{stem}weight_g_idx"
        others = (scale, f"{stem}weight_shape", zero, group)
        return self._found(f"{stem}weight", words, scale, others, zero=zero, group=group)

    def _unpacked(self, name: str, stated: str) -> tuple[Shape, int]:
        """Returns the shape of a packed weight, and the bits of a code."""
        about, words = self._need(stated, name), self._tensors[name].shape
        self._check(
            stated, about.shape == (len(words),) and about.dtype.kind in "iu",
            f"{len(words)} integers, got {about.dtype}{list(about.shape)}",
        )  # fmt: skip
        shape = tuple(map(int, read_whole(about)))
        known = [x.get("num_bits") for x in self._arguments]
        bits = [b for b in range(1, 9) if b in known] or [*range(1, 9)]
        fitting = [b for b in bits if -(-shape[-1] * b // 32) == words[-1]]
        fits = shape[:-1] == words[:-1] and shape[-1] >= 0 and len(fitting) == 1
        self._check(
            stated, fits,
            f"the shape that '{name}' {list(words)} packs with {_listed(bits)} bits, got "
            f"{list(shape)}",
        )  # fmt: skip
        return shape, fitting[0]

    def _e2m1(
        self, weight: str, name: str, scale: str, factor: str | None, *, divided: bool = False
    ) -> _Found:
        """Makes a weight of four-bit floating-point codes: NVFP4, and MXFP4 except gpt-oss's."""
        tensor = self._tensors[name]
        self._check(name, len(tensor.shape) > 1, f"a matrix, got shape {list(tensor.shape)}")
        shape = (*tensor.shape[:-1], 2 * tensor.shape[-1])
        codes = Codes(tensor, _matrices(tensor.shape), shape, E2M1, np.arange(shape[-1]) * 4, 4)
        # Exponents, used as scales, belong to 32 entries each; other scales to 16.
        size = 32 if _exponents(self._need(scale, name)) else 16
        grid = (*shape[:-1], shape[-1] // size)
        given = self._need(scale, name).shape
        self._check(scale, given == grid and not shape[-1] % size, f"shape {list(grid)} for "
                    f"'{name}' {list(tensor.shape)}, got {list(given)}")  # fmt: skip
        others = (scale, *([factor] if factor else []))
        return self._found(
            weight, codes, scale, others, block=(1, size), factor=factor, divided=divided
        )

    def _transposed(self, name: str, stem: str) -> _Found:
        """Makes a weight of GPTQ, with packed rows, or of AWQ, with packed columns."""
        words, scale, zero = name, f"{stem}scales", f"{stem}qzeros"
        tensor, scales, zeros = (self._need(x, name) for x in (words, scale, zero))
        for x in (tensor, scales, zeros):
            self._check(x.name, len(x.shape) == 2, f"a matrix, got shape {list(x.shape)}")
        for x in (tensor, zeros):
            self._check(x.name, x.dtype == np.int32, f"int32, got {x.dtype}")
        (rows, columns), (groups, units) = tensor.shape, scales.shape
        group = f"{stem}g_idx"
        others = (scale, zero, group)
        stored = _matrices(tensor.shape)
        if self._named != "gptq" and 8 * columns == units:
            at = np.arange(units) // 8 * 32 + 4 * np.array(_AWQ)[np.arange(units) % 8]
            codes = Codes(tensor, stored, (units, rows), integers(4, 0), at, 4, turned=True)
            bits, offset = 4, 0
        else:
            bits = 32 * zeros.shape[1] / units if units else 0
            self._check(
                name, self._named != "awq" and columns == units and bits in (2, 3, 4, 8)
                and not 32 * rows % bits,
                f"shapes of {'AWQ' if self._named == 'awq' else 'GPTQ'}; got {list(tensor.shape)} "
                f"with scales {list(scales.shape)} and qzeros {list(zeros.shape)}",
            )  # fmt: skip
            bits, inputs = int(bits), int(32 * rows // bits)
            at = np.arange(inputs) * bits
            codes = Codes(
                tensor, stored, (units, inputs), integers(bits, 0), at, bits, words_turned=True
            )
            # The first version stores zeros minus one.
            v2 = "gptq_v2" in (self._about.get("checkpoint_format"), self._about.get("format"))
            offset, at = (0 if v2 else -1), np.arange(units) * bits
        stated = self._about.get("bits", self._about.get("w_bit"))
        if type(stated) is int and not self._about.get("dynamic"):
            self._check(name, stated == bits, f"codes of {stated} bits, as is stated, got {bits}")
        self._check(
            zero, zeros.shape == (groups, -(-units * bits // 32)),
            f"shape {[groups, -(-units * bits // 32)]}, got {list(zeros.shape)}",
        )  # fmt: skip
        subtracted = Codes(
            zeros, _matrices(zeros.shape), (units, groups), integers(bits, offset), at, bits,
            turned=True,
        )  # fmt: skip
        if self._about.get("desc_act") is True and group not in self._tensors:
            raise CheckpointError(f"'{group}' is missing, which belongs to '{name}' (desc_act)")
        size = self._about.get("group_size", self._about.get("q_group_size"))
        block = (1, size) if type(size) is int and size > 0 else None
        return self._found(
            f"{stem}weight", codes, scale, others, zero=subtracted, group=group, block=block,
            turned=True,
        )  # fmt: skip

    def _experts(self, name: str, stem: str) -> _Found:
        """Makes stacked experts of gpt-oss, which are stored transposed."""
        tensor, scale = self._tensors[name], f"{stem}_scales"
        shape = tensor.shape
        self._check(
            name, tensor.dtype == np.uint8 and len(shape) == 4 and shape[-1] == 16,
            f"uint8 of shape [experts, rows, blocks, 16], got {tensor.dtype}{list(shape)}",
        )  # fmt: skip
        given = self._need(scale, name)
        self._check(
            scale, given.shape == shape[:-1] and _exponents(given),
            f"exponents of shape {list(shape[:-1])}, got {given.dtype}{list(given.shape)}",
        )  # fmt: skip
        experts, rows, blocks, size = shape
        codes = Codes(
            tensor, (experts, rows, blocks * size), (experts, 2 * blocks * size, rows), E2M1,
            np.arange(2 * blocks * size) * 4, 4, turned=True,
        )  # fmt: skip
        # The blocks run along the rows of the computed matrix.
        scales = self._scales(scale, (experts, blocks, rows), turned=True)
        weight = Dequantised(stem, self._dtype, codes, scales, Blocks(2 * size, 1))
        return _Found(weight, (scale,))

    def _entries(self, name: str) -> _Found | None:
        """Makes a weight with one code per entry (float8 or int8), or two in NVFP4."""
        tensor = self._tensors[name]
        floating = tensor.dtype.name.startswith("float8")
        if not floating and tensor.dtype not in (np.int8, np.uint8):
            return None
        scales = [f"{name}_scale_inv", f"{name}_scale"]
        if name.endswith("weight"):
            stem = name.removesuffix("weight")
            scales += [f"{stem}{x}" for x in ("scale_inv", "scale_weight", "scale")]
        scales = [x for x in scales if x in self._tensors]
        # If a whole network is stored in float8, its own scales are also float8.
        if not scales or (floating and self._tensors[scales[0]].dtype == tensor.dtype):
            return None
        scale = scales[0]
        if tensor.dtype == np.uint8:
            if f"{name}_scale_2" not in self._tensors:
                return None
            return self._e2m1(name, name, scale, f"{name}_scale_2")
        if tensor.dtype == np.int8 and _exponents(self._tensors[scale]):
            return self._e2m1(name, name, scale, None)
        self._check(name, len(tensor.shape) > 1, f"a matrix, got shape {list(tensor.shape)}")
        codes = Codes(tensor, _matrices(tensor.shape), tensor.shape)
        block = self._about.get("weight_block_size")
        for arguments in self._arguments:
            block = arguments.get("block_structure") if block is None else block
        if block is None and scale.endswith("_scale_inv"):
            block = (128, 128)
        if block is not None:
            fits = isinstance(block, list | tuple) and len(block) == 2
            self._check(
                "weight_block_size",
                fits and all(type(size) is int and 0 < size < 1 << 31 for size in block),
                f"two integers >= 1, got {block!r:.60}",
            )
        zero = f"{name}_zero_point"
        found = self._found(name, codes, scale, (scale, zero), zero=zero, block=block)
        return found._replace(layout=self._layout(name, scale, block))

    def _layout(self, name: str, scale: str, block: Sequence[int] | None) -> Layout | None:
        """Returns the layout of a weight's FP8 codes; None for other codes, or codes with zeros."""
        tensor, given = self._tensors[name], self._tensors[scale]
        symmetric = all(arguments.get("symmetric", True) for arguments in self._arguments)
        plain = tensor.dtype.name == "float8_e4m3fn" and _floating(given) and symmetric
        if not plain or given.dtype.itemsize not in (2, 4) or given.dtype.name.startswith("float8"):
            return None
        replaces = "" if scale.startswith(name) else "weight"
        after = scale.removeprefix(name.removesuffix(replaces))
        axes, (rows, columns) = len(given.shape), tensor.shape[-2:]
        down, across = self._sides(given.shape, tensor.shape)
        if (
            block is not None
            and axes > 1
            and _sizes((rows, columns), (down, across), block, exact=True)
        ):
            return Layout(after, replaces, given.dtype, axes, *block)
        return Layout(
            after, replaces, given.dtype, axes,
            None if down == 1 else rows // down, None if across == 1 else columns // across,
        )  # fmt: skip

    @staticmethod
    def _sides(scales: Shape, weight: Shape) -> tuple[int, int]:
        """Returns the number of scales along the rows of a matrix, and along its columns."""
        if math.prod(scales) == 1:
            return 1, 1
        return (scales[0], 1) if len(scales) == 1 else (scales[-2], scales[-1])

    def _found(
        self,
        weight: str,
        codes: Codes,
        scale: str,
        others: tuple[str, ...],
        *,
        zero: Codes | str | None = None,
        group: str = "",
        block: Sequence[int] | None = None,
        factor: str | None = None,
        divided: bool = False,
        turned: bool = False,
    ) -> _Found:
        """Pairs codes with scales; the tensors `zero` and `group` may be missing."""
        given = self._need(scale, codes.tensor.name)
        *lead, rows, columns = codes.shape
        shape = tuple(given.shape)[::-1] if turned else tuple(given.shape)
        grouped = self._tensors.get(group)
        if math.prod(shape) == 1:
            shape = (1, 1)
        elif shape == (rows,) and not lead:
            shape = (rows, 1)
        # One matrix of scales for each matrix of the weight, or one scale for all.
        fits = shape == (1, 1) or (len(shape) > 1 and shape[:-2] == tuple(lead))
        sizes = None
        if grouped is not None:
            self._check(
                group, grouped.shape == (columns,) and grouped.dtype.kind in "iu",
                f"{columns} integers, got {grouped.dtype}{list(grouped.shape)}",
            )  # fmt: skip
            sizes = (1, 1) if fits and shape[-2:-1] == (rows,) and 0 not in shape else None
        elif fits:
            sizes = _sizes((rows, columns), shape[-2:], block, exact=turned)
        if sizes is None:
            raise CheckpointError(
                f"'{scale}': expected scales of '{weight}' {list(codes.shape)}, got shape "
                f"{list(given.shape)}"
            )
        scales = self._scales(scale, shape, turned=turned)
        subtracted = self._zeros(zero, codes, given, shape) if isinstance(zero, str) else zero
        one = self._tensors[factor] if factor else None
        if one is not None and factor:
            self._check(factor, math.prod(one.shape) == 1 and _floating(one),
                        f"one number, got {one.dtype}{list(one.shape)}")  # fmt: skip
        # The programs of these schemes compute weights in the dtype of the scales.
        own = self._named == "compressed-tensors" or codes.tensor.dtype.kind in "iu"
        rounded = given.dtype if own and given.dtype.itemsize == 2 and factor is None else None
        made = Dequantised(
            weight, self._dtype, codes, scales, Blocks(*sizes, grouped),
            zero=subtracted, factor=one, divided=divided, rounded=rounded,
        )  # fmt: skip
        return _Found(made, tuple(x for x in others if x in self._tensors))

    def _zeros(self, name: str, codes: Codes, scale: Tensor, shape: Shape) -> Codes | None:
        """Makes the zeros of compressed-tensors, plain or packed along the rows."""
        if name not in self._tensors:
            symmetric = [arguments.get("symmetric", True) for arguments in self._arguments]
            if symmetric and not any(symmetric):
                raise CheckpointError(
                    f"'{name}' is missing, which belongs to '{codes.tensor.name}' (not symmetric)"
                )
            return None
        zeros, bits = self._tensors[name], codes.bits
        packed = (-(-shape[0] * bits // 32), shape[-1])
        if zeros.dtype == np.int32 and bits and len(shape) == 2 and zeros.shape == packed:
            return Codes(
                zeros, _matrices(packed), shape, integers(bits, 1 << (bits - 1)),
                np.arange(shape[0]) * bits, bits, words_turned=True, turned=True,
            )  # fmt: skip
        self._check(
            name, zeros.shape == scale.shape and (zeros.dtype.kind == "i" or _floating(zeros)),
            f"one for each of the scales {list(scale.shape)}, got {zeros.dtype}{list(zeros.shape)}",
        )  # fmt: skip
        return Codes(zeros, _matrices(shape), shape)

    def _scales(self, name: str, shape: Shape, *, turned: bool = False) -> Codes:
        """Returns the scales of a weight; `shape` is the shape of its matrices."""
        tensor = self._tensors[name]
        self._check(name, _floating(tensor) or _exponents(tensor), f"scales, got {tensor.dtype}")
        matrices, *last = _matrices(shape)
        stored = (matrices, *(last[::-1] if turned else last))
        if not _floating(tensor):
            return Codes(tensor, stored, shape, E8M0, np.arange(stored[-1]) * 8, 8, turned=turned)
        return Codes(tensor, stored, shape, turned=turned)

    def _need(self, name: str, codes: str) -> Tensor:
        """Returns a required tensor."""
        if name not in self._tensors:
            raise CheckpointError(f"'{name}' is missing, which belongs to '{codes}'")
        return self._tensors[name]

    def _check(self, name: str, fits: object, expected: str) -> None:
        """Raises a CheckpointError if a tensor differs from the expected one."""
        if not fits:
            raise CheckpointError(f"'{name}': expected {expected}")


def _sizes(
    entries: Shape, grid: Shape, stated: Sequence[int] | None, *, exact: bool
) -> tuple[int, int] | None:
    """Returns the number of rows and columns of a block of a grid; None if no size is possible.

    Stated sizes take precedence, because the grid alone may be misleading: of 192 rows in two
    blocks, the first may have 128. With `exact` no other sizes are tried.
    """
    if stated and all(n == -(-m // size) for m, n, size in zip(entries, grid, stated, strict=True)):
        return (stated[0], stated[1])
    if (stated and exact) or any(not n or m % n for m, n in zip(entries, grid, strict=True)):
        return None
    return (max(1, entries[0] // grid[0]), max(1, entries[1] // grid[1]))


def _matrices(shape: Shape) -> Shape:
    """Returns a shape as (matrices, rows, columns)."""
    return (math.prod(shape[:-2]), *shape[-2:])


def _exponents(tensor: Tensor) -> bool:
    """Checks whether the entries are exponents of 2 that are used as scales."""
    return tensor.dtype == np.uint8 or tensor.dtype.name == "float8_e8m0fnu"


def _floating(tensor: Tensor) -> bool:
    """Checks whether the entries are floating-point numbers."""
    return tensor.dtype.kind == "f" or tensor.dtype.name.startswith(("float", "bfloat"))


def _listed(numbers: list[int]) -> str:
    """Lists numbers, for messages."""
    return " or ".join(map(str, numbers))
