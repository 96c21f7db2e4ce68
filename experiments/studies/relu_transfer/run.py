"""The run of `relu_transfer`: its stages, and the resulting dataset."""

import dataclasses
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr

from experiments.lab.config import picked
from experiments.lab.progress import Stage
from experiments.lab.store import direct
from experiments.lab.sweep import over_devices, sweep
from experiments.studies.relu_transfer.config import Config
from theory import student_teacher as st

PROBES = 20  # inputs of the Gram matrices


def run(config: Config, stage: Stage = direct) -> xr.Dataset:
    """Trains students from scratch and by transfer on the same samples of the target.

    Returns a dataset over teacher, draw, mu and n: `scratch_risk` and `linear_risk` of the same
    samples; `gain`, their mean difference in units of the target's variance; the power `law`
    through the scratch risks; the part of the target that frozen features cannot express
    (`outside`, for several kinds of features); and the `boundary` that the two predict. Without any
    mu it contains only the scratch law. With `descend_transfer` it also contains `descended_risk`
    and `descended_gain`, for the output layer fitted by descent.
    """
    pairs = [(mu, teacher) for mu in range(len(config.mus)) for teacher in range(config.teachers)]
    samples = [(t, draw) for t in range(config.teachers) for draw in range(config.draws)]
    with jax.enable_x64(True):
        scratch = [
            sweep(
                partial(_scratch, config, i),
                np.array(samples),
                stage,
                f"scratch n={n}",
                chunk=config.chunk * 4,
            )
            for i, n in enumerate(config.ns)
        ]
        if not pairs:
            return _scratch_law(config, scratch)[0]
        trained = sweep(
            partial(_pretrain, config), np.array(pairs), stage, "pretrain", chunk=config.chunk
        )
        transfer = sweep(
            partial(_transfer, config, trained["w"]),
            np.arange(len(pairs)),
            stage,
            "transfer",
            chunk=config.chunk,
        )
        kernels = stage("kernels", partial(_kernels, config, trained["w"]))
    return _dataset(config, trained, scratch, transfer, kernels)


_teacher, _untrained = (jax.jit(make, static_argnums=(1, 2)) for make in (st.teacher, st.student))
_predict = jax.jit(st.predict)


def _key(config: Config, *path: int) -> jax.Array:
    """Derives the key of one random object, which is identified by integers."""
    # The first number selects the object: 0 targets, 1 students, 2 sources, 3 samples, 4 the
    # inputs of the kernels. Networks and samples are drawn again at each use, not stored.
    key = jax.random.key(config.seed)
    for part in path:
        key = jax.random.fold_in(key, part)
    return key


def _target(config: Config, teacher: int) -> st.Network:
    return _teacher(_key(config, 0, teacher), config.sizes.m_star, config.sizes.d)


def _student(config: Config, teacher: int) -> st.Network:
    return _untrained(_key(config, 1, teacher), config.sizes.m, config.sizes.d)


def _source(config: Config, teacher: int, mu: float) -> st.Network:
    """Returns the source of a teacher: the target without a fraction mu of its neurons.

    The same key is used for every mu, so that a larger mu also removes the neurons that a smaller
    one removes.
    """
    return st.ablate(_key(config, 2, teacher), _target(config, teacher), mu)


def _sample(config: Config, teacher: int, draw: int, i: int) -> tuple[jax.Array, jax.Array]:
    """Draws inputs `(n, d)` of the i-th size, and the target's labels for them."""
    x = jax.random.normal(_key(config, 3, teacher, draw, i), (config.ns[i], config.sizes.d))
    return x, _predict(_target(config, teacher), x)


def _stack(trees: list[Any]) -> Any:
    return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)


def _side_by_side(config: Config) -> int | None:
    """Returns the batch size for `lax.map`; None processes one problem after another."""
    return config.side_by_side if config.side_by_side > 1 else None


def _options(config: Config) -> tuple[float, int, float]:
    """Returns rate, steps and tolerance, in the order of `theory.student_teacher`."""
    how = config.descent
    return how.rate, how.steps, how.tolerance


def _pretrain(config: Config, pairs: np.ndarray) -> dict[str, jax.Array]:
    """Pretrains the students of some pairs (index of mu, teacher) on their sources."""
    sources = [_source(config, t, config.mus[mu]) for mu, t in pairs]
    students = [_student(config, t) for _, t in pairs]
    train = _train("pretrain", _side_by_side(config))
    descent = train((_stack(students), _stack(sources)), _options(config))
    return {"w": descent.network.w, "loss": descent.loss}


def _scratch(config: Config, i: int, samples: np.ndarray) -> dict[str, jax.Array]:
    """Trains students from scratch on samples of the i-th size.

    Training is in float32, and the risks of the trained networks are in float64.
    """
    students = _stack([_student(config, t) for t, _ in samples])
    data = _stack([_sample(config, t, draw, i) for t, draw in samples])
    single = jax.tree.map(lambda a: a.astype(jnp.float32), (students, *data))
    descent = _train("scratch", _side_by_side(config))(single, _options(config))
    double = jax.tree.map(lambda a: a.astype(float), descent.network)
    targets = _stack([_target(config, t) for t, _ in samples])
    risks = jax.lax.map(lambda pair: st.risk(*pair), (double, targets))
    return {"risk": risks, "loss": descent.loss.astype(float)}


@cache
def _train(kind: str, at_once: int | None) -> Callable[..., st.Descent]:
    """Returns a compiled function from problems and options to their descents, on all devices."""
    train = {"pretrain": st.pretrain, "scratch": st.scratch}[kind]

    @jax.jit
    def descents(problems: tuple, options: tuple) -> st.Descent:
        return jax.lax.map(lambda problem: train(*problem, *options), problems, batch_size=at_once)

    return over_devices(descents)


def _transfer(config: Config, w: np.ndarray, index: np.ndarray) -> dict[str, jax.Array]:
    """Computes the part of the target outside frozen features, and the output layer's risks.

    `index` counts pairs of mu and teacher, with teachers as the fastest index.
    """
    parts = []
    for k in index:
        mu, teacher = divmod(int(k), config.teachers)
        target, features = _target(config, teacher), jnp.asarray(w[k])
        source = _source(config, teacher, config.mus[mu])
        projected = _project(features, target, config.cutoff)
        risks, descended = [], []
        for i in range(len(config.ns)):
            data = _stack([_sample(config, teacher, draw, i) for draw in range(config.draws)])
            risks.append(_linear_risks(features, target, data, config.cutoff))
            if config.descend_transfer:
                descended.append(_descended_risks(features, target, data, *_options(config)))
        parts.append(
            {
                "outside": projected.outside,
                "rank": projected.rank,
                # A cut-off of 1e-10 only drops rounding errors: this is the features' whole span.
                "outside_span": _project(features, target, 1e-10).outside,
                "outside_ideal": _project(source.w, target, 1e-10).outside,
                "risk": np.stack(risks, axis=1),
                **({"descended": np.stack(descended, axis=1)} if descended else {}),
            }
        )
    return _stack(parts)


_project = jax.jit(st.project)


@jax.jit
def _linear_risks(w: jax.Array, target: st.Network, data: tuple, cutoff: float) -> jax.Array:
    """Returns the risk of the refitted network for each of several samples."""

    def risk(sample: tuple[jax.Array, jax.Array]) -> jax.Array:
        return st.risk(st.linear_transfer(w, *sample, cutoff), target)

    return jax.lax.map(risk, data)


@jax.jit
def _descended_risks(
    w: jax.Array, target: st.Network, data: tuple, rate: float, steps: int, tolerance: float
) -> jax.Array:
    """Returns the risk of the network refitted by descent for each of several samples."""

    def risk(sample: tuple[jax.Array, jax.Array]) -> jax.Array:
        return st.risk(st.descended_transfer(w, *sample, rate, steps, tolerance)[0], target)

    return jax.lax.map(risk, data)


def _middle(config: Config) -> int:
    """Returns the index of the mu closest to 1/2. The figure shows its kernels."""
    return int(np.argmin(np.abs(np.array(config.mus) - 0.5)))


def _kernels(config: Config, w: np.ndarray) -> dict[str, Any]:
    """Computes kernel matrices of the first teacher's problem, and scales of each target.

    The kernels belong to the student before and after pretraining, and to the source.
    """
    middle = _middle(config)
    x = jax.random.normal(_key(config, 4), (PROBES, config.sizes.d))
    source = _source(config, 0, config.mus[middle])
    targets = [_target(config, t) for t in range(config.teachers)]
    return {
        "initial": st.kernel(_student(config, 0).w, x),
        "pretrained": st.kernel(jnp.asarray(w[middle * config.teachers]), x),
        "source": st.kernel(source.w, x),
        "outside_untrained": np.stack(
            [
                _project(_student(config, i).w, t, config.cutoff).outside
                for i, t in enumerate(targets)
            ]
        ),
        "norm": np.stack([st.inner(t, t) for t in targets]),
    }


def _scratch_law(config: Config, scratch: list[dict]) -> tuple[xr.Dataset, st.PowerLaw]:
    """Creates the dataset of scratch risks, and the power law through them."""
    shape = (config.teachers, config.draws)
    risks = np.stack([part["risk"].reshape(shape) for part in scratch], axis=-1)
    losses = np.stack([part["loss"].reshape(shape) for part in scratch], axis=-1)
    law = st.fit_power_law(config.ns, risks.mean(axis=1))
    targets = [_target(config, t) for t in range(config.teachers)]
    dataset = xr.Dataset(
        {
            "scratch_risk": (("teacher", "draw", "n"), risks),
            "scratch_loss": (("teacher", "draw", "n"), losses),
            "law": ("n", law(np.array(config.ns))),
            "exponent": ("limit", np.array(law.exponent)),
            "curvature": ("limit", np.array(law.curvature)),
            "variance": ("teacher", np.stack([st.variance(t) for t in targets])),
        },
        {
            "n": ("n", list(config.ns), {"long_name": "target samples"}),
            "limit": ("limit", ["mean", "low", "high"], {"long_name": "mean, 95 % interval"}),
        },
        {
            **dataclasses.asdict(config.sizes),
            **picked(config, "cutoff", "descent.tolerance"),
        },
    )
    return dataset, law


def _dataset(
    config: Config, trained: Mapping, scratch: list, transfer: Mapping, kernels: Mapping
) -> xr.Dataset:
    """Creates the dataset of all risks."""
    grid = (len(config.mus), config.teachers)
    dataset, law = _scratch_law(config, scratch)
    risks, variance = dataset.scratch_risk.values, dataset.variance.values
    linear = transfer["risk"].reshape(*grid, config.draws, len(config.ns))
    edge = st.boundary(law, transfer["outside"].reshape(grid).T)
    edges = st.interval(np.log(edge))
    gain = (risks - linear) / variance[:, None, None]
    pairs = ("mu", "teacher")
    dataset = dataset.assign(
        {
            "linear_risk": (("mu", "teacher", "draw", "n"), linear),
            "gain": (("mu", "n"), gain.mean(axis=(1, 2))),
            "gain_stderr": (
                ("mu", "n"),
                gain.mean(axis=2).std(axis=1, ddof=1) / np.sqrt(config.teachers),
            ),
            "pretrain_loss": (pairs, trained["loss"].reshape(grid)),
            "outside": (pairs, transfer["outside"].reshape(grid)),
            "outside_span": (pairs, transfer["outside_span"].reshape(grid)),
            "outside_ideal": (pairs, transfer["outside_ideal"].reshape(grid)),
            "rank": (pairs, transfer["rank"].reshape(grid)),
            "outside_untrained": ("teacher", kernels["outside_untrained"]),
            "norm": ("teacher", kernels["norm"]),
            "kernel_initial": (("x", "x2"), kernels["initial"]),
            "kernel_pretrained": (("x", "x2"), kernels["pretrained"]),
            "kernel_source": (("x", "x2"), kernels["source"]),
            "boundary": (("limit", "mu"), np.exp(np.stack(edges))),
        }
    )
    if "descended" in transfer:
        descended = transfer["descended"].reshape(linear.shape)
        gain = (risks - descended) / variance[:, None, None]
        dataset = dataset.assign(
            descended_risk=(("mu", "teacher", "draw", "n"), descended),
            descended_gain=(("mu", "n"), gain.mean(axis=(1, 2))),
        )
    label = {"long_name": "fraction of target features missing"}
    dataset = dataset.assign_coords(mu=("mu", list(config.mus), label))
    return dataset.assign_attrs(kernel_mu=config.mus[_middle(config)])
