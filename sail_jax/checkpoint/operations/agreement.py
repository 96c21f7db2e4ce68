"""How far two networks agree: their outputs on probe inputs, for checkpoints that were changed."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sail_jax import architectures
from sail_jax.architectures.table import stated
from sail_jax.basis.certificate import Report, Verdict, certificate
from sail_jax.checkpoint.engine.executor import resident
from sail_jax.checkpoint.formats.files import CheckpointError
from sail_jax.merging.tensors import Tensors, read_whole

__all__ = ["Agreement", "Certify", "agreement", "certified", "verdict", "wanted"]

FITS = 1 << 30  # bytes in float32 of both networks, up to which they are compared unasked

Certify = bool | Callable[[Mapping[str, Any], Mapping[str, Any]], Any] | None
"""Whether a network is run before and after a change. None: where its forward pass is known and
both networks fit in 1 GB. Or what runs it: `outputs(tensors, config)` of arrays by name, any pytree
of arrays, the same for the same tensors, on probe inputs of its own."""


class Agreement(NamedTuple):
    """How far the outputs of the changed network are from those of the one before, on probe inputs:
    what ran them, max and mean |new - old|, max |old|, and the tolerance of
    `sail_jax.certificate`."""

    by: str
    dtype: str
    largest: float
    mean: float
    scale: float
    tolerance: float
    preserved: bool

    def __str__(self) -> str:
        within = "within rounding" if self.preserved else "more than rounding"
        return (
            f"outputs in {self.dtype}: differ by at most {self.largest:.2g}, {self.mean:.2g} on "
            f"average, of {self.scale:.2g}: {within} ({self.tolerance:.2g})"
        )


def verdict(report: Report, agreed: Sequence[Agreement]) -> Verdict:
    """What is known of a change by its axes, and by the runs that there were."""
    by = agreed[0].by if agreed else ""
    return Verdict(report.exact, by, bool(agreed) and all(run.preserved for run in agreed))


Renew = Callable[[Mapping[str, Any]], tuple[Mapping[str, Any], Mapping[str, Any]]]


def wanted(
    certify: Certify,
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
    if not (fits if certify is None else certify):
        return (), ()
    try:
        agreed = run()
    except ValueError as error:
        sentence = f"no certificate: {' '.join(str(error).split())}"
        if certify:
            raise CheckpointError(f"{path}: {sentence}") from error
        return (), (sentence,)
    if certify and not agreed:
        raise CheckpointError(
            f"{path}: no certificate, as no forward pass of this network is known: give one, "
            "certify=... (MODULE:FUNCTION), or leave out certify=True"
        )
    return agreed, ()


def certified(
    tensors: Tensors, config: Mapping[str, Any], renew: Renew, certify: Certify = None
) -> tuple[Agreement, ...]:
    """A network before and after a change, run on probe inputs: in float32 and in its own dtype.

    renew: the changed tensors of arrays by name, and their configuration. Empty where no forward
    pass is known or given (`certify`). Both networks are in memory, in float32.

    Raises ValueError, in one sentence, where the network cannot be run.
    """
    if any(np.iscomplexobj(np.empty(0, x.dtype)) for x in tensors.values()):
        return ()
    forward = _given(certify) if callable(certify) else _known(config)
    if forward is None:
        return ()
    wide = any(x.dtype == np.float64 for x in tensors.values())
    with jax.enable_x64(True) if wide else contextlib.nullcontext():
        return _certified(forward, tensors, config, renew)


class _Forward(NamedTuple):
    """What runs a network: `at(config)(tensors)` are its outputs."""

    name: str
    at: Callable[[Mapping[str, Any]], Callable[[Mapping[str, Any]], Any]]


def _given(function: Callable[..., Any]) -> _Forward:
    """Code of the user's: whatever it raises is said in one sentence, as nothing of ours failed."""
    name = f"{function.__module__}:{getattr(function, '__qualname__', function)}"

    def outputs(config: Mapping[str, Any], tensors: Mapping[str, Any]) -> Any:
        try:
            return jax.tree.map(np.asarray, function(tensors, config))
        except Exception as error:
            raise ValueError(f"{name} raised {type(error).__name__}: {error}") from error

    return _Forward(name, lambda config: partial(outputs, config))


def _known(config: Mapping[str, Any]) -> _Forward | None:
    """That of the architecture, on inputs drawn for the configuration; None where there is none."""
    try:
        family = architectures.of(config)
    except ValueError:
        return None
    logits = family.logits
    if logits is None:
        return None
    inputs = family.inputs(stated(config), np.random.default_rng(0))

    return _Forward(
        f"the forward pass of {family.name} in sail_jax",
        lambda config: jax.jit(lambda tensors: logits(tensors, stated(config), inputs)),
    )


def _certified(
    forward: _Forward, tensors: Tensors, config: Mapping[str, Any], renew: Renew
) -> tuple[Agreement, ...]:
    old = {name: jnp.asarray(read_whole(x)) for name, x in tensors.items()}
    dtypes = {x.dtype for x in old.values() if jnp.issubdtype(x.dtype, jnp.floating)}
    own = max(dtypes, key=lambda dtype: float(jnp.finfo(dtype).eps), default=jnp.dtype("float32"))
    agreements = []
    for dtype in dict.fromkeys([jnp.dtype("float32"), own]):
        cast = {
            name: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x
            for name, x in old.items()
        }
        agreements.append(agreement(forward, cast, config, *renew(cast), dtype))
    return tuple(agreements)


def agreement(
    forward: _Forward, old: Any, config: Any, new: Any, new_config: Any, dtype: Any
) -> Agreement:
    """Two networks run in a dtype; ValueError if the outputs do not depend on the tensors, so that
    their agreement would say nothing."""
    networks = {0: forward.at(config), 1: forward.at(new_config)}
    outputs: list[list[np.ndarray]] = []

    def run(network: tuple[int, Any], _: None) -> Any:
        which, tensors = network
        y = networks[which](tensors)
        outputs.append([np.asarray(x, np.float64) for x in jax.tree.leaves(y)])
        return y

    measured = certificate(run, (0, old), (1, new), None, dtype=dtype)
    before, after, moved = outputs  # `certificate` also runs the old network a little moved
    if all(map(np.array_equal, before, moved)):
        raise ValueError(f"the outputs of {forward.name} do not change with the tensors")
    distance = np.concatenate([np.abs(b - a).ravel() for a, b in zip(before, after, strict=True)])
    return Agreement(
        forward.name, str(dtype), measured.absolute, float(np.mean(distance)), measured.scale,
        measured.tolerance, measured.preserved,
    )  # fmt: skip
