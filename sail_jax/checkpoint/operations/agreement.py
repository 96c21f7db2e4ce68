"""How far two networks agree: their outputs on probe inputs, for checkpoints that were changed."""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sail_jax import architectures
from sail_jax.basis.certificate import certificate
from sail_jax.checkpoint.engine.executor import resident
from sail_jax.checkpoint.formats.files import CheckpointError
from sail_jax.merging.tensors import Tensors, read_whole

__all__ = ["Agreement", "agreement", "certified", "wanted"]

FITS = 1 << 30  # bytes in float32 of both networks, up to which they are compared unasked


class Agreement(NamedTuple):
    """How far the outputs of the changed network are from those of the one before, on probe inputs:
    max and mean |new - old|, max |old|, and the tolerance of `sail_jax.certificate`."""

    dtype: str
    largest: float
    mean: float
    scale: float
    tolerance: float
    preserved: bool

    def __str__(self) -> str:
        verdict = "within rounding" if self.preserved else "more than rounding"
        return (
            f"outputs in {self.dtype}: differ by at most {self.largest:.2g}, {self.mean:.2g} on "
            f"average, of {self.scale:.2g}: {verdict} ({self.tolerance:.2g})"
        )


Renew = Callable[[Mapping[str, Any]], tuple[Mapping[str, Any], Mapping[str, Any]]]


def wanted(
    certify: bool | None,
    entries: int,
    path: Any,
    run: Callable[[], tuple[Agreement, ...]],
    max_memory: int | None = None,
) -> tuple[tuple[Agreement, ...], tuple[str, ...]]:
    """run() if it is asked for, or, where nothing is said, if so many entries of both networks fit:
    in float32, and in `max_memory` with what is made of them on the way. And a note, if it failed.

    Raises CheckpointError if it is asked for and nothing can be run.
    """
    fits = 4 * entries <= FITS
    fits &= max_memory is None or resident() + 10 * entries <= max_memory
    found: tuple[Agreement, ...] = ()
    try:
        if certify or (certify is None and fits):
            found = run()
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        sentence = f"no certificate: {' '.join(str(error).split())} ({type(error).__name__})"
        if certify:
            raise CheckpointError(f"{path}: {sentence}") from error
        return (), (sentence,)
    if certify and not found:
        raise CheckpointError(
            f"{path}: no certificate, as no forward pass of this architecture is known; "
            "leave out certify=True"
        )
    return found, ()


def certified(tensors: Tensors, config: Mapping[str, Any], renew: Renew) -> tuple[Agreement, ...]:
    """A network before and after a change, run on probe inputs: in float32 and in its own dtype.

    renew: the changed tensors of arrays by name, and their configuration. Empty where no forward
    pass is known. Both networks are in memory, in float32.
    """
    try:
        family = architectures.of(config)
    except ValueError:
        return ()
    if family.logits is None or any(
        np.iscomplexobj(np.empty(0, x.dtype)) for x in tensors.values()
    ):
        return ()
    wide = any(x.dtype == np.float64 for x in tensors.values())
    with jax.enable_x64(True) if wide else contextlib.nullcontext():
        return _certified(family, tensors, config, renew)


def _certified(
    family: architectures.Architecture, tensors: Tensors, config: Mapping[str, Any], renew: Renew
) -> tuple[Agreement, ...]:
    assert family.logits is not None
    old = {name: jnp.asarray(read_whole(x)) for name, x in tensors.items()}
    dtypes = {x.dtype for x in old.values() if jnp.issubdtype(x.dtype, jnp.floating)}
    own = max(dtypes, key=lambda dtype: float(jnp.finfo(dtype).eps), default=jnp.dtype("float32"))
    inputs = family.inputs(config, np.random.default_rng(0))
    found = []
    for dtype in dict.fromkeys([jnp.dtype("float32"), own]):
        cast = {
            name: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x
            for name, x in old.items()
        }
        found.append(agreement(family.logits, cast, config, *renew(cast), inputs, dtype))
    return tuple(found)


def agreement(
    logits: Any, old: Any, config: Any, new: Any, new_config: Any, inputs: Any, dtype: Any
) -> Agreement:
    run = {0: jax.jit(lambda p, x: logits(p, config, x))}
    run[1] = jax.jit(lambda p, x: logits(p, new_config, x))
    outputs: list[np.ndarray] = []

    def forward(which: tuple[int, Any], inputs: Any) -> Any:
        y = run[which[0]](which[1], inputs)
        outputs.append(np.asarray(y, np.float64))
        return y

    found = certificate(forward, (0, old), (1, new), inputs, dtype=dtype)
    mean = float(np.mean(np.abs(outputs[1] - outputs[0])))
    return Agreement(
        str(dtype), found.absolute, mean, found.scale, found.tolerance, found.preserved
    )
