"""When do frozen ReLU features beat training from scratch? Student and teacher networks.

Figure 4 of features-are-fate (arXiv 2410.08194): a two-layer network is pretrained on a source that
lacks a fraction mu of the target's neurons; its features are then frozen and the output layer is
fitted to n samples of the target. Scratch training is the same network trained on the same samples.
All risks are exact (no test set); preset `figure_4c` is the law of scratch training alone, at the
paper's sizes. Pretraining and projections run in float64, scratch training,
whose loss is a mean of squares, in float32.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.lab import validate
from experiments.lab.progress import Stage
from experiments.lab.store import direct
from experiments.lab.sweep import over_devices, sweep
from experiments.studies.relu_transfer.plots import plot as plot
from experiments.studies.relu_transfer.plots import summary as summary
from theory import student_teacher as st

if TYPE_CHECKING:
    import xarray as xr

PROBES = 20  # inputs of the Gram matrices


@dataclass(frozen=True)
class Config:
    """Target teachers, the sources cut from them, and samples of the target."""

    d: int = 30
    """Input dimension."""
    m: int = 200
    """Neurons of the student."""
    m_star: int = 30
    """Neurons of the target teacher."""
    mus: tuple[float, ...] = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
    """Fractions of the target's neurons that the source lacks; each times m_star is whole. None:
    scratch training alone."""
    ns: tuple[int, ...] = (20, 40, 80, 160, 320, 640, 1280)
    """Target samples."""
    teachers: int = 5
    """Independent teachers (and students)."""
    draws: int = 4
    """Target data sets per teacher and n."""
    rate: float = 1.0
    """Learning rate in units of the width; time is rate x steps."""
    steps: int = 4000
    """Largest number of steps of a descent."""
    tolerance: float = 1e-6
    """Loss at which a descent stops."""
    cutoff: float = 1e-3
    """Eigenvalues of a kernel below this fraction of the largest (about 0.2) are dropped, in the
    projection and in the fit of the output layer: what descent on that layer for the same
    rate x steps would not learn, 1 / (0.2 x 4000) or so."""
    chunk: int = 5
    """Networks between two points at which a run can be resumed."""
    side_by_side: int = 1
    """Networks trained at once: 1 on a CPU, `chunk` on an accelerator."""
    seed: int = 0
    """Seed of teachers, students and samples."""

    def __post_init__(self):
        validate.at_least(self, d=2, m=2, m_star=2, teachers=2, draws=1, steps=1)
        validate.at_least(self, chunk=1, side_by_side=1)
        validate.positive(self, "rate", "tolerance")
        if not 0 <= self.cutoff < 1:
            raise ValueError(f"cutoff must be a fraction in [0, 1); got {self.cutoff}")
        if len(self.ns) < 3 or list(self.ns) != sorted(set(self.ns)) or self.ns[0] < 1:
            raise ValueError(f"ns must be at least 3 increasing sizes >= 1; got {self.ns}")
        if len(self.mus) == 1 or list(self.mus) != sorted(set(self.mus)):
            raise ValueError(f"mus must be none or 2 and more increasing fractions; got {self.mus}")
        for mu in self.mus:
            whole = abs(mu * self.m_star - round(mu * self.m_star)) < 1e-6 * self.m_star
            if not (0 <= mu < 1 and whole):
                raise ValueError(
                    f"mus must be in [0, 1) and give whole numbers of the {self.m_star} neurons "
                    f"(m_star); got {mu}"
                )

    @classmethod
    def tiny(cls) -> "Config":
        """Seconds, for tests."""
        return cls(
            d=5, m=12, m_star=5, mus=(0.2, 0.6), ns=(10, 20, 40), teachers=2, draws=2, steps=200
        )

    @classmethod
    def figure_4(cls) -> "Config":
        """The paper's sizes: for an accelerator (hours)."""
        return cls(
            d=100,
            m=1000,
            m_star=100,
            ns=(100, 140, 200, 280, 400, 560, 800, 1000),
            teachers=10,
            draws=100,
            rate=0.01,
            steps=100_000,
            cutoff=5e-3,
            chunk=10,
            side_by_side=10,
        )

    @classmethod
    def figure_4c(cls) -> "Config":
        """The scratch law at the paper's sizes and training time, in steps ten times as long."""
        return replace(cls.figure_4(), mus=(), draws=1, rate=0.1, steps=10_000, side_by_side=1)


PRESETS = {
    "default": Config,
    "figure_4": Config.figure_4,
    "figure_4c": Config.figure_4c,
    "tiny": Config.tiny,
}


def run(config: Config, stage: Stage = direct) -> "xr.Dataset":
    """Scratch and transfer risks of the same samples, and the part of the target that frozen
    features cannot express."""
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


# --- one problem --------------------------------------------------------------------------------


def _key(config: Config, *path: int) -> jax.Array:
    key = jax.random.key(config.seed)
    for part in path:
        key = jax.random.fold_in(key, part)
    return key


def _target(config: Config, teacher: int) -> st.Network:
    return st.teacher(_key(config, 0, teacher), config.m_star, config.d)


def _student(config: Config, teacher: int) -> st.Network:
    return st.student(_key(config, 1, teacher), config.m, config.d)


def _source(config: Config, teacher: int, mu: float) -> st.Network:
    """Nested in mu: one key for all."""
    return st.ablate(_key(config, 2, teacher), _target(config, teacher), mu)


def _sample(config: Config, teacher: int, draw: int, i: int) -> tuple[jax.Array, jax.Array]:
    x = jax.random.normal(_key(config, 3, teacher, draw, i), (config.ns[i], config.d))
    return x, st.predict(_target(config, teacher), x)


def _stack(trees: list[Any]) -> Any:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


# --- chunks -------------------------------------------------------------------------------------


def _side_by_side(config: Config) -> int | None:
    return config.side_by_side if config.side_by_side > 1 else None


def _pretrain(config: Config, pairs: np.ndarray) -> dict[str, jax.Array]:
    sources = [_source(config, t, config.mus[mu]) for mu, t in pairs]
    students = [_student(config, t) for _, t in pairs]
    found = _train("pretrain", _side_by_side(config))(
        (_stack(students), _stack(sources)),
        (config.rate, config.steps, config.tolerance),
    )
    return {"w": found.network.w, "loss": found.loss}


def _scratch(config: Config, i: int, samples: np.ndarray) -> dict[str, jax.Array]:
    students = _stack([_student(config, t) for t, _ in samples])
    data = _stack([_sample(config, t, draw, i) for t, draw in samples])
    single = jax.tree.map(lambda a: a.astype(jnp.float32), (students, *data))
    found = _train("scratch", _side_by_side(config))(
        single,
        (config.rate, config.steps, config.tolerance),
    )
    double = jax.tree.map(lambda a: a.astype(float), found.network)
    targets = _stack([_target(config, t) for t, _ in samples])
    risks = jax.lax.map(lambda pair: st.risk(*pair), (double, targets))
    return {"risk": risks, "loss": found.loss.astype(float)}


@cache
def _train(kind: str, at_once: int | None) -> Callable[..., st.Descent]:
    """Of problems and options: their descents, on all devices."""
    train = {"pretrain": st.pretrain, "scratch": st.scratch}[kind]

    @jax.jit
    def each(problems: tuple, options: tuple) -> st.Descent:
        return jax.lax.map(lambda one: train(*one, *options), problems, batch_size=at_once)

    return over_devices(each)


def _transfer(config: Config, w: np.ndarray, index: np.ndarray) -> dict[str, jax.Array]:
    parts = []
    for k in index:
        mu, teacher = divmod(int(k), config.teachers)
        target, features = _target(config, teacher), jnp.asarray(w[k])
        source = _source(config, teacher, config.mus[mu])
        projected = _project(features, target, config.cutoff)
        risks = []
        for i in range(len(config.ns)):
            data = _stack([_sample(config, teacher, draw, i) for draw in range(config.draws)])
            risks.append(_linear_risks(features, target, data, config.cutoff))
        parts.append(
            {
                "outside": projected.outside,
                "rank": projected.rank,
                "outside_span": _project(features, target, 1e-10).outside,
                "outside_ideal": _project(source.w, target, 1e-10).outside,
                "risk": jnp.stack(risks, axis=1),
            }
        )
    return _stack(parts)


_project = jax.jit(st.project)


@jax.jit
def _linear_risks(w: jax.Array, target: st.Network, data: tuple, cutoff: float) -> jax.Array:
    def one(sample: tuple[jax.Array, jax.Array]) -> jax.Array:
        return st.risk(st.linear_transfer(w, *sample, cutoff), target)

    return jax.lax.map(one, data)


def _middle(config: Config) -> int:
    """The mu of the Gram matrices."""
    return int(np.argmin(np.abs(np.array(config.mus) - 0.5)))


def _kernels(config: Config, w: np.ndarray) -> dict[str, jax.Array]:
    """Gram matrices of the first teacher's problem before and after pretraining, and the source's;
    and each task's scales."""
    middle = _middle(config)
    x = jax.random.normal(_key(config, 4), (PROBES, config.d))
    source = _source(config, 0, config.mus[middle])
    targets = [_target(config, t) for t in range(config.teachers)]
    return {
        "initial": st.kernel(_student(config, 0).w, x),
        "pretrained": st.kernel(jnp.asarray(w[middle * config.teachers]), x),
        "source": st.kernel(source.w, x),
        "outside_untrained": jnp.stack(
            [
                _project(_student(config, i).w, t, config.cutoff).outside
                for i, t in enumerate(targets)
            ]
        ),
        "norm": jnp.stack([st.inner(t, t) for t in targets]),
    }


# --- what was found -----------------------------------------------------------------------------


def _scratch_law(config: Config, scratch: list[dict]) -> "tuple[xr.Dataset, st.PowerLaw]":
    """Scratch risks and the power law through them."""
    import xarray as xr

    each = (config.teachers, config.draws)
    risks = np.stack([part["risk"].reshape(each) for part in scratch], axis=-1)
    losses = np.stack([part["loss"].reshape(each) for part in scratch], axis=-1)
    law = st.fit_power_law(config.ns, risks.mean(axis=1))
    targets = [_target(config, t) for t in range(config.teachers)]
    found = xr.Dataset(
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
        {name: getattr(config, name) for name in ("d", "m", "m_star", "cutoff", "tolerance")},
    )
    return found, law


def _dataset(
    config: Config, trained: Mapping, scratch: list, transfer: Mapping, kernels: Mapping
) -> "xr.Dataset":
    grid = (len(config.mus), config.teachers)
    found, law = _scratch_law(config, scratch)
    risks, variance = found.scratch_risk.values, found.variance.values
    linear = transfer["risk"].reshape(*grid, config.draws, len(config.ns))
    edge = st.boundary(law, transfer["outside"].reshape(grid).T)
    edges = st.interval(np.log(edge))
    gain = (risks - linear) / variance[:, None, None]
    pairs = ("mu", "teacher")
    found = found.assign(
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
    label = {"long_name": "fraction of target features missing"}
    found = found.assign_coords(mu=("mu", list(config.mus), label))
    return found.assign_attrs(kernel_mu=config.mus[_middle(config)])
