"""The ways from a small trained network to a larger one that `growth_training` compares."""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import optax
from jaxtyping import PRNGKeyArray, PyTree

from experiments.models.presets import build
from experiments.studies.growth_training.tasks import ADAM, Data, Masked, draw, evaluate, init
from sail_jax import architectures, change_basis, growth
from sail_jax.basis.maps import SpaceMap
from sail_jax.basis.spaces import Spec
from sail_jax.growth import learned, networks

SCRATCH, MSG, LEARNED = "scratch", "msg", ("ligo", "sail")

# A method of `growth.grow` and the options it is given, by what it is called here.
WIDTH: dict[str, tuple[str, dict[str, Any]]] = {
    "net2net": ("net2net", {}),
    "fpi": ("fpi", {}),
    "aki": ("aki", {}),
    "hypercloning": ("hypercloning", {}),
    "hypercloning_noise": ("hypercloning", {"snr_db": 20.0}),
    "lemon": ("lemon", {}),
    "sail_svd": ("sail_svd", {"random": True}),
    "sail_random": ("sail_random", {}),
    "interpolate": ("interpolate", {}),
    "pad": ("pad", {}),
}
DEPTH: dict[str, tuple[str, dict[str, Any]]] = {
    name: (name, {})
    for name in ("stack", "g_stack", "interpolate_depth", "dus", "llama_pro", "identity", "mix")
}
OWN_LAW = ("aki", "sail_svd")  # what they do to parameters is not (only) a change of basis
LAYERS = "block_{i}"  # how a GPT lists them
LAYERS_OF = f"params/{LAYERS}"


class Grown(NamedTuple):
    """Where the training of a large network starts.

    masked: what a ramp is yet to bring in; exact: whether growth is stated to preserve the
    function; moved: whether Adam's state came along.
    """

    variables: PyTree
    state: PyTree
    masked: Masked | None = None
    exact: bool = False
    moved: bool = False


def restarted(variables: PyTree) -> Grown:
    """Training that starts without a past."""
    return Grown(variables, ADAM.init(variables["params"]))


def rules(sizes: Mapping[str, Any], variables: PyTree) -> Spec:
    return architectures.of(sizes).rules(sizes).spec(variables)


def shapes(sizes: Mapping[str, Any], data: Data) -> PyTree:
    """The variables of a network that learns from these data, as shapes."""
    return jax.eval_shape(partial(init, build(sizes)), data, jax.random.key(0))


def masked(source: Mapping[str, Any], target: Mapping[str, Any], data: Data) -> Masked:
    """Which units are new, between two networks of equal depth."""
    before, after = (rules(sizes, shapes(sizes, data)) for sizes in (source, target))
    pairs = [(space.name, after.space(space.name).size) for space in before.spaces]
    return Masked(before, tuple((n, new) for n, new in pairs if new != before.space(n).size))


def grow(
    method: str,
    variables: PyTree,
    state: PyTree,
    source: Mapping[str, Any],
    target: Mapping[str, Any],
    data: Data,
    key: PRNGKeyArray,
    *,
    move: bool,
) -> Grown:
    """A method of `WIDTH`, `DEPTH` or `MSG`; Adam's state comes along where it has a law, if
    `move`."""
    if method == MSG:
        return _msg(variables, state, source, target, data, key, move=move)
    name, options = (WIDTH | DEPTH)[method]
    large, plan = networks.grow(variables, source, target, name, key=key, **options)
    grown = restarted(large)._replace(exact=plan.report.exact)
    if move and method in WIDTH and method not in OWN_LAW:
        return _carried(grown, state, plan.spec, plan.maps)
    return grown


def _msg(
    variables: PyTree,
    state: PyTree,
    source: Mapping[str, Any],
    target: Mapping[str, Any],
    data: Data,
    key: PRNGKeyArray,
    *,
    move: bool,
) -> Grown:
    """Masked structural growth (Yao et al. 2023): random new units, absent at first."""
    ramped = masked(source, target, data)
    wide = change_basis(variables, ramped.spec, ramped.maps)
    wide = growth.fresh_units(wide, ramped.spec, ramped.maps, key)
    grown = restarted(wide)._replace(masked=ramped, exact=True)
    return _carried(grown, state, ramped.spec, ramped.maps) if move else grown


def _carried(grown: Grown, state: PyTree, spec: Spec, maps: Mapping[str, SpaceMap]) -> Grown:
    # the moments are trees of parameters, without the collection that the spec's paths start with
    nested = lambda s: s._replace(mu={"params": s.mu}, nu={"params": s.nu})  # noqa: E731
    moved, report = growth.change_state(nested(state), nested(grown.state), spec, maps)
    state = moved._replace(mu=moved.mu["params"], nu=moved.nu["params"])
    return grown._replace(state=state, moved=report.exact)


class Learning(NamedTuple):
    """A short phase in which the maps of `way` ("ligo" or "sail") are learned with Adam."""

    way: str
    steps: int
    batch: int
    rate: float


def learn(
    how: Learning,
    variables: PyTree,
    source: Mapping[str, Any],
    target: Mapping[str, Any],
    data: Data,
    key: PRNGKeyArray,
) -> Grown:
    """The network that the learned maps make of the small one, which stays as it is."""
    return restarted(_learn(how, _frozen(source), _frozen(target), variables, data, key))


def _frozen(sizes: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple((k, tuple(v) if isinstance(v, list) else v) for k, v in sizes.items())


@partial(jax.jit, static_argnums=(0, 1, 2))
def _learn(
    how: Learning, source: Any, target: Any, variables: PyTree, data: Data, key: PRNGKeyArray
) -> PyTree:
    source, target = dict(source), dict(target)
    net, (first, second) = build(target), jax.random.split(key)
    deepens = target.get("layers") != source.get("layers")
    if deepens:
        variables = growth.stack_layers(variables, LAYERS_OF)
        spec, new = _stacked(source, variables), {"layer": target["layers"]}
    else:
        ramped = masked(source, target, data)
        spec, new = ramped.spec, dict(ramped.sizes)
    if how.way == "ligo":
        free_spec, maps = learned.ligo_spec(spec), learned.ligo_maps
        free = learned.ligo_init(spec, new, first)
    else:
        free_spec, maps = learned.sail_spec(spec), learned.sail_maps
        free = learned.sail_init(variables, spec, new, key=first)
    keys = jax.random.split(second, how.steps)
    batches = jax.vmap(lambda k: draw(net, data, k, how.batch))(keys)
    unstacked = lambda v: growth.unstack_layers(v, LAYERS_OF) if deepens else v  # noqa: E731
    got = learned.learn_maps(
        lambda grown, batch: evaluate(net, unstacked(grown), batch)[0],
        variables,
        free_spec,
        free,
        maps,
        batches,
        steps=how.steps,
        optimizer=optax.adam(how.rate),
    )
    return unstacked(got.params)


def _stacked(sizes: Mapping[str, Any], variables: PyTree) -> Spec:
    """The spec of a GPT whose layers are stacked, in the space "layer"."""
    listed = architectures.of(sizes).rules(sizes)
    axes = []
    for pattern, text in listed.axes:
        if LAYERS in pattern:
            pattern, text = pattern.replace(LAYERS, "block_stack"), f"layer {text}"
        axes.append((pattern, text.replace(".{i}", "")))
    spaces = {name.replace(".{i}", ""): word for name, word in listed.spaces.items()}
    return listed._replace(axes=tuple(axes), spaces={**spaces, "layer": "stack"}).spec(variables)
