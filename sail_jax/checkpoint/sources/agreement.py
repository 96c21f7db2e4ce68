"""Certifies changed networks by the differences of their outputs on probe inputs.

Growth and alignment of checkpoints run the old and the new network, if a forward pass is known or
given.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from os import PathLike
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sail_jax import architectures
from sail_jax.architectures.table import stated
from sail_jax.basis.certificate import Verdict, certificate
from sail_jax.checkpoint.executor import resident
from sail_jax.checkpoint.formats.files import CheckpointError
from sail_jax.checkpoint.sources.programs import in_own_width
from sail_jax.checks import argument
from sail_jax.configurations import Config
from sail_jax.interop import transformers
from sail_jax.merging.tensors import Tensors, read_whole

# The largest number of bytes of both networks in float32 for a run without an explicit request.
FITS = 1 << 30

Arrays = Mapping[str, jax.Array]
"""The arrays of a network, by name."""
Certify = bool | Callable[[Arrays, Config], Any] | None
"""Whether a network is run before and after a change.

None means: if its forward pass is known and both networks fit in 1 GiB. A function
`outputs(tensors, config)` runs the network itself: it takes arrays by name, and returns a pytree of
arrays. It must always use the same probe inputs.
"""


class Agreement(NamedTuple):
    """The difference between the outputs of a network before and after a change, on probe inputs.

    If there are several arrays of outputs, `largest`, `scale` and `tolerance` belong to the array
    with the worst agreement.

    Attributes:
      by: The forward pass that ran the networks.
      dtype: The floating-point dtype of the run.
      largest: max |new - old|.
      mean: The mean of |new - old| over all outputs.
      scale: max |old|.
      tolerance: The largest effect of rounding, as `sail_jax.certificate` estimates it.
      preserved: Whether every array of outputs agrees within its tolerance.
    """

    by: str
    dtype: str
    largest: float
    mean: float
    scale: float
    tolerance: float
    preserved: bool

    def record(self) -> dict[str, str | float | None]:
        """Makes the record of the run for a file."""
        return {k: None if v == np.inf else v for k, v in self._asdict().items()}

    def __str__(self) -> str:
        if not np.isfinite(self.largest):
            return f"outputs in {self.dtype}: not finite, or different in shape"
        within = "within" if self.preserved else "more than"
        return (
            f"outputs in {self.dtype}: largest difference {self.largest:.2g}, mean {self.mean:.2g},"
            f" largest output {self.scale:.2g}; {within} rounding ({self.tolerance:.2g})"
        )


def verdict(agreed: Sequence[Agreement]) -> Verdict:
    """Combines the runs of a changed network in all dtypes.

    Args:
      agreed: The runs; may be empty.

    Returns:
      Whether the function is preserved according to the runs.
    """
    if not agreed:
        return Verdict()
    worst = next((run for run in agreed if not run.preserved), agreed[0])
    return Verdict(worst.by, worst.preserved, worst.largest)


class _DoesNotFitError(ValueError):
    """The changed tensors do not fit the changed configuration: the network does not run."""

    def __str__(self) -> str:
        return f"the network runs before the change, but not after it: {self.args[0]}"


Renew = Callable[[Arrays], tuple[Arrays, Config]]
"""Changes a network given as arrays by name: returns its tensors and its configuration."""


def wanted(
    certify: Certify,
    entries: int,
    path: str | PathLike[str],
    run: Callable[[], tuple[Agreement, ...]],
    max_memory: int | None = None,
) -> tuple[tuple[Agreement, ...], tuple[str, ...]]:
    """Runs both networks if the caller requests it or the run is cheap.

    With `certify=None` a run is cheap if both networks fit in 1 GiB as float32 and, with their
    intermediate results, in `max_memory`. If such a run fails, the failure is only noted.

    Args:
      certify: Whether to run the networks, or the function that runs them.
      entries: The total number of entries of both networks.
      path: The checkpoint, for messages.
      run: Runs both networks; returns nothing if no forward pass is known.
      max_memory: Bytes that the process may use; None for no limit.

    Returns:
      The agreements, and the reason if a run failed; either may be empty.

    Raises:
      CheckpointError: If only the changed network fails, if a requested run failed, or if no
        forward pass is known.
    """
    fits = 4 * entries <= FITS
    # In float32 both networks take 4 bytes per entry; the rest is for intermediate results.
    fits &= max_memory is None or resident() + 10 * entries <= max_memory
    if not (fits if certify is None else certify):
        return (), ()
    try:
        agreed = run()
    except _DoesNotFitError as error:
        raise CheckpointError(f"{path}: {error}") from error
    except ValueError as error:
        sentence = f"no certificate: {' '.join(str(error).split())}"
        if certify:
            raise CheckpointError(f"{path}: {sentence}") from error
        return (), (sentence,)
    if certify and not agreed:
        raise CheckpointError(
            f"{path}: no certificate, because no forward pass of this network is known: give one "
            f"with {argument('certify', '...')} (MODULE:FUNCTION), or leave out "
            f"{argument('certify', 'True')}"
        )
    return agreed, ()


def certified(
    tensors: Tensors, config: Config, renew: Renew, certify: Certify = None
) -> tuple[Agreement, ...]:
    """Runs a network before and after a change, in float32 and in its own dtype.

    Both networks are in memory, in float32. The probe inputs are drawn for the configuration, or
    come from the given function.

    Args:
      tensors: The network before the change, by name.
      config: Its configuration.
      renew: Makes the changed tensors and their configuration from arrays by name.
      certify: A function `outputs(tensors, config)` that runs a network. The default is the forward
        pass of the configuration's architecture.

    Returns:
      The agreement in each dtype. Empty if no forward pass is known, or tensors are complex.

    Raises:
      ValueError: If the network cannot be run.
    """
    # The networks are run in real dtypes, and complex tensors cannot be cast to them.
    if any(np.iscomplexobj(np.empty(0, x.dtype)) for x in tensors.values()):
        return ()
    forward = _given(certify) if callable(certify) else _known(config, tensors)
    if forward is None:
        return ()
    with in_own_width(tensors.values()):
        return _certified(forward, tensors, config, renew)


class _Forward(NamedTuple):
    """Runs a network: `at(config)(tensors)` returns its outputs."""

    name: str
    at: Callable[[Config], Callable[[Arrays], Any]]


def _given(function: Callable[..., Any]) -> _Forward:
    """Wraps the user's function as a forward pass; errors get a sentence with its name."""
    name = f"{function.__module__}:{getattr(function, '__qualname__', function)}"

    def outputs(config: Config, tensors: Arrays) -> Any:
        try:
            return jax.tree.map(np.asarray, function(tensors, config))
        except Exception as error:
            raise ValueError(f"{name} raised {type(error).__name__}: {error}") from error

    return _Forward(name, lambda config: partial(outputs, config))


def _known(config: Config, tensors: Tensors) -> _Forward | None:
    """Returns the forward pass of an architecture, with inputs for it; None if it is unknown."""
    try:
        family = architectures.of(config)
    except ValueError:
        family = None
    outputs = family and family.outputs
    if family is None or outputs is None:
        name = transformers.name_of(config)
        if not name:
            return None
        return _Forward(
            f"the forward pass of {name}",
            lambda config: transformers.outputs_of_config(config, tensors),
        )
    # The inputs are drawn once for both networks, with a fixed seed, so equal commands give equal
    # certificates.
    inputs = family.inputs(stated(config), np.random.default_rng(0))

    return _Forward(
        f"the forward pass of {family.name} in sail_jax",
        # The configuration is closed over, because it determines how many layers are traced.
        lambda config: jax.jit(lambda tensors: outputs(tensors, stated(config), inputs)),
    )


def _certified(
    forward: _Forward, tensors: Tensors, config: Config, renew: Renew
) -> tuple[Agreement, ...]:
    """Runs both networks in float32, and in their floating-point dtype of lowest precision."""
    old = {name: jnp.asarray(read_whole(x)) for name, x in tensors.items()}
    dtypes = {x.dtype for x in old.values() if jnp.issubdtype(x.dtype, jnp.floating)}
    # In the coarsest dtype, rounding could hide or simulate a difference.
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
    """Runs two networks in one dtype, and compares their outputs.

    Args:
      forward: The forward pass.
      old: The tensors of the first, by name, in `dtype`.
      config: Its configuration.
      new: The tensors of the second, by name, in `dtype`.
      new_config: Its configuration.
      dtype: The dtype.

    Returns:
      The agreement of the outputs.

    Raises:
      ValueError: If only the first network runs, or if the outputs do not depend on the tensors,
        because agreement would then prove nothing.
    """
    networks = {0: forward.at(config), 1: forward.at(new_config)}
    outputs: list[list[np.ndarray]] = []

    def run(network: tuple[int, Arrays], _: None) -> Any:
        which, tensors = network
        try:
            y = networks[which](tensors)
        except (ValueError, TypeError) as error:
            if which:
                raise _DoesNotFitError(" ".join(str(error).split())) from error
            raise
        outputs.append([np.asarray(x, np.float64) for x in jax.tree.leaves(y)])
        return y

    # The number next to the tensors identifies the network; the two may require different programs.
    # The outputs of each run are stored here, for the mean, which `certificate` does not report.
    measured = certificate(run, (0, old), (1, new), None, dtype=dtype)
    # `certificate` also runs the old network with slightly perturbed tensors.
    before, after, moved = outputs
    # A function that ignores its tensors, for example by loading its own model, always agrees.
    if all(map(np.array_equal, before, moved)):
        raise ValueError(f"the outputs of {forward.name} do not change with the tensors")
    distance = np.concatenate(
        [
            np.abs(b - a).ravel() if a.shape == b.shape else np.array([np.inf])
            for a, b in zip(before, after, strict=True)
        ]
    )
    return Agreement(
        forward.name, str(dtype), measured.absolute, float(np.mean(distance)), measured.scale,
        measured.tolerance, measured.preserved,
    )  # fmt: skip
