"""Growth methods of `growth_training`. Each gives the initial weights of a large network.

They call `sail_jax.growth`. `growth_tasks.train` trains their results.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.traverse_util import flatten_dict
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from experiments.models.presets import build
from experiments.studies.shared.growth_tasks import (
    ADAM,
    Data,
    Masked,
    Schedule,
    draw,
    evaluate,
    init,
    train,
)
from sail_jax import align, architectures, change_basis, growth
from sail_jax.basis.maps import SpaceMap
from sail_jax.basis.spaces import Spec
from sail_jax.growth import learned, networks

SCRATCH, MSG, LEARNED, TRANSPORT = "scratch", "msg", ("ligo", "sail"), "transport"
PREPARED = (*LEARNED, TRANSPORT)  # these train the large network before its actual training

# By their names here: a method of `growth.grow` and its options.
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
OWN_LAW = ("aki", "sail_svd")  # these change parameters by more than a change of basis
# The nonlinearities of the units of MLPs and ResNets.
WRITERS = nn.Dense, nn.BatchNorm
MATCHED = 256  # examples by which the units of two networks are matched
LAYERS = "block_{i}"  # a GPT's names of its layers
LAYERS_OF = f"params/{LAYERS}"
Frozen = tuple[tuple[str, Any], ...]


class Grown(NamedTuple):
    """The initial state of a large network's training.

    Attributes:
      variables: The variables of the large network.
      state: Adam's state for them.
      masked: The units that a ramp will activate, if any.
      exact: Whether it follows from the axes that growth is lossless; the findings compare the
        first losses.
      moved: Whether Adam's moments were moved exactly from the small network.
    """

    variables: PyTree
    state: PyTree
    masked: Masked | None = None
    exact: bool = False
    moved: bool = False


def restarted(variables: PyTree) -> Grown:
    """Starts a training with a new Adam state.

    Args:
      variables: The variables to train.

    Returns:
      The initial state, without a mask, and with `exact` and `moved` False.
    """
    return Grown(variables, ADAM.init(variables["params"]))


def rules(sizes: Mapping[str, Any], variables: PyTree) -> Spec:
    """Finds the feature spaces of a network's parameters.

    Args:
      sizes: The network's configuration.
      variables: Its variables, or their shapes.

    Returns:
      The spec.
    """
    return architectures.of(sizes).rules(sizes).spec(variables)


def shapes(sizes: Mapping[str, Any], data: Data) -> PyTree:
    """Computes the shapes of a network's variables, without computing values.

    Args:
      sizes: The network's configuration.
      data: The training data.

    Returns:
      The variables as `jax.ShapeDtypeStruct`s.
    """
    return jax.eval_shape(partial(init, build(sizes)), data, jax.random.key(0))


def masked(source: Mapping[str, Any], target: Mapping[str, Any], data: Data) -> Masked:
    """Finds which spaces grow between two networks of equal depth."""
    before, after = (rules(sizes, shapes(sizes, data)) for sizes in (source, target))
    return Masked(before, tuple(growing(before, after).items()))


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
    """Grows a trained network by a method without learned maps.

    Args:
      method: A name in `WIDTH` or `DEPTH`, or `MSG`.
      variables: The small network's variables.
      state: The small network's Adam state.
      source: The small network's configuration.
      target: The large network's configuration.
      data: The data, for the shape of an input.
      key: The random key for the method's draws.
      move: Whether to move Adam's moments. This is only defined for changes of width, except those
        in `OWN_LAW`; other methods always restart Adam.

    Returns:
      The initial state of the large network's training.
    """
    if method == MSG:
        # Masked structural growth (Yao et al. 2023): random new units, absent at first. Padding
        # makes them zero; they then get random weights, which are masked at first.
        ramped = masked(source, target, data)
        wide = change_basis(variables, ramped.spec, ramped.maps)
        wide = growth.fresh_units(wide, ramped.spec, ramped.maps, key)
        grown = restarted(wide)._replace(masked=ramped, exact=True)
        return _carried(grown, state, ramped.spec, ramped.maps) if move else grown
    name, options = (WIDTH | DEPTH)[method]
    large, plan = networks.grow(variables, source, target, name, key=key, **options)
    grown = restarted(large)._replace(exact=not plan.report.lost)
    if move and method in WIDTH and method not in OWN_LAW:
        return _carried(grown, state, plan.spec, plan.maps)
    return grown


def _carried(grown: Grown, state: PyTree, spec: Spec, maps: Mapping[str, SpaceMap]) -> Grown:
    """Returns the initial state with Adam's moments moved by `growth.change_state`."""
    # The moments are trees of parameters, without the collection at the start of the spec's paths.
    nested = lambda s: s._replace(mu={"params": s.mu}, nu={"params": s.nu})  # noqa: E731
    moved, report = growth.change_state(nested(state), nested(grown.state), spec, maps)
    state = moved._replace(mu=moved.mu["params"], nu=moved.nu["params"])
    return grown._replace(state=state, moved=report.exact)


class Learning(NamedTuple):
    """A short training with Adam of the maps that grow a network.

    Attributes:
      way: The parametrisation of the maps, "ligo" or "sail".
      steps: Number of steps.
      batch: Examples per step.
      rate: Adam's learning rate.
    """

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
    """Learns the maps that grow a network, and applies them.

    The maps minimise the large network's loss; the small network's weights do not change.

    Args:
      how: The settings of learning the maps.
      variables: The small network's variables.
      source: The small network's configuration.
      target: The large network's configuration.
      data: The training data.
      key: A random key, for initial maps and minibatches.

    Returns:
      The initial state of the large network's training, with a new Adam state.
    """
    return restarted(_learn(how, _frozen(source), _frozen(target), variables, data, key))


def _frozen(sizes: Mapping[str, Any]) -> Frozen:
    """Converts a configuration to nested tuples, which are hashable and can be static under jit."""
    return tuple((k, tuple(v) if isinstance(v, list) else v) for k, v in sizes.items())


@partial(jax.jit, static_argnums=(0, 1, 2))
def _learn(
    how: Learning, small: Frozen, large: Frozen, variables: PyTree, data: Data, key: PRNGKeyArray
) -> PyTree:
    """Compiles `learn`; returns the variables of the large network."""
    source, target = dict(small), dict(large)
    net, (first, second) = build(target), jax.random.split(key)
    deepens = target.get("layers") != source.get("layers")
    if deepens:
        variables = growth.stack_layers(variables, LAYERS_OF)
        spec, new = stacked(source, variables), {"layer": target["layers"]}
    else:
        ramped = masked(source, target, data)
        spec, new = ramped.spec, dict(ramped.sizes)
    keys = jax.random.split(second, how.steps)
    batches = jax.vmap(lambda k: draw(net, data, k, how.batch))(keys)
    unstacked = lambda v: growth.unstack_layers(v, LAYERS_OF) if deepens else v  # noqa: E731
    loss = lambda grown, batch: evaluate(net, unstacked(grown), batch)[0]  # noqa: E731
    return unstacked(by_maps(loss, variables, spec, new, batches, how.rate, first, way=how.way))


def by_maps(
    loss: Callable[[PyTree, Any], Array],
    variables: PyTree,
    spec: Spec,
    new: Mapping[str, int],
    batches: PyTree,
    rate: float,
    key: PRNGKeyArray,
    way: str = "ligo",
) -> PyTree:
    """Grows a network by maps that minimise the large network's loss, learned by Adam.

    Args:
      loss: The large network's loss: `(variables, batch) -> scalar`.
      variables: The small network's variables.
      spec: Their axes.
      new: The new size of each space that grows, from `growing`.
      batches: The minibatches of all steps, leaves `(step, ...)`.
      rate: Adam's learning rate.
      key: The key of the initial maps.
      way: The parametrisation of the maps, "ligo" or "sail".

    Returns:
      The variables of the large network.

    References:
      Wang et al., Learning to Grow Pretrained Models (LiGO), 2023 (arXiv 2303.00980).
    """
    if way == "ligo":
        free_spec, maps = learned.ligo_spec(spec), learned.ligo_maps
        free = learned.ligo_init(spec, dict(new), key)
    else:
        free_spec, maps = learned.sail_spec(spec), learned.sail_maps
        free = learned.sail_init(variables, spec, dict(new), key=key)
    steps = len(jax.tree.leaves(batches)[0])
    adam = optax.adam(rate)
    return learned.learn_maps(
        loss, variables, free_spec, free, maps, batches, steps=steps, optimizer=adam
    ).params


def transport(
    schedule: Schedule,
    variables: PyTree,
    source: Mapping[str, Any],
    target: Mapping[str, Any],
    data: Data,
    key: PRNGKeyArray,
) -> Grown:
    """Moves a small MLP or ResNet into the basis of a large network after a short training.

    The units of a large network with random weights cannot be matched, so it is first trained for a
    short time.

    Args:
      schedule: The training of the large network.
      variables: The small network's variables.
      source: The small network's configuration.
      target: The large network's configuration, of equal depth.
      data: The training data.
      key: A random key, for initial weights and minibatches.

    Returns:
      The initial state of the large network's training, with a new Adam state.

    References:
      Cui et al., Transport and Merge, 2026 (arXiv 2602.05495).
    """
    first, second, third = jax.random.split(key, 3)
    net = build(target)
    large = init(net, data, first)
    large, _, _ = train(net, schedule, large, ADAM.init(large["params"]), data, second)
    inputs = draw(net, data, third, MATCHED).inputs
    return restarted(carried(variables, large, source, target, data, inputs))


def carried(
    variables: PyTree,
    large: PyTree,
    source: Mapping[str, Any],
    target: Mapping[str, Any],
    data: Data,
    inputs: Array,
) -> PyTree:
    """Expresses a small network in units similar to those of the large network.

    The units of each growing space are coupled by transport of their activations. Each large unit
    becomes the mean of the small units that are coupled with it.

    Args:
      variables: The small network's variables.
      large: The large network's variables.
      source: The small network's configuration, of an MLP or a ResNet.
      target: The large network's configuration, of equal depth.
      data: The data, for the shape of an input.
      inputs: Examples on which both networks are run.

    Returns:
      The variables of a network of the large size.
    """
    spec, new = masked(source, target, data)[:2]
    small, other = (
        _written(sizes, of, inputs, spec) for sizes, of in ((source, variables), (target, large))
    )
    maps = {
        name: align.barycentric(align.transport_units(small[name], other[name])[0])
        for name, _ in new
    }
    return change_basis(variables, spec, maps)


def _written(
    sizes: Mapping[str, Any], variables: PyTree, inputs: Array, spec: Spec
) -> dict[str, Float[Array, "n units"]]:
    """Computes the outputs of a network's layers into each space, before a ReLU.

    After a ReLU, some units are constant. If several layers write into one space, such as the
    stream of a ResNet, their outputs are treated as separate samples.
    """
    _, seen = build(sizes).apply(
        variables, inputs, capture_intermediates=lambda module, _: isinstance(module, WRITERS)
    )
    layers: Any = flatten_dict(seen["intermediates"])
    found: dict[str, list[Array]] = {}
    for path, (value,) in layers.items():
        name = spec.axes("/".join(("params", *path[:-1], "bias")))[0][0].space
        found.setdefault(name, []).append(value.reshape(-1, value.shape[-1]))
    return {name: jnp.concatenate(values) for name, values in found.items()}


def growing(before: Spec, after: Spec) -> dict[str, int]:
    """Finds the spaces that grow between two networks of equal depth.

    Args:
      before: The axes of the small network.
      after: The axes of the large network.

    Returns:
      The new size of each space with a changed size.
    """
    sizes = {space.name: after.space(space.name).size for space in before.spaces}
    return {name: size for name, size in sizes.items() if size != before.space(name).size}


def stacked(sizes: Mapping[str, Any], variables: PyTree) -> Spec:
    """Finds the feature spaces of a network with layers stacked on an axis.

    Args:
      sizes: The configuration of a GPT, a Llama or an OLMo.
      variables: Its variables or their shapes, stacked by `growth.stack_layers` at `LAYERS_OF`.

    Returns:
      The spec, with that axis in the space "layer".
    """
    listed = architectures.of(sizes).rules(sizes)
    axes = []
    for pattern, text in listed.axes:
        if LAYERS in pattern:
            pattern, text = pattern.replace(LAYERS, "block_stack"), f"layer {text}"
        axes.append((pattern, text.replace(".{i}", "")))
    of_one = lambda names: {name.replace(".{i}", ""): value for name, value in names.items()}  # noqa: E731
    spaces, known = {**of_one(listed.spaces), "layer": "stack"}, of_one(listed.sizes)
    return listed._replace(axes=tuple(axes), spaces=spaces, sizes=known).spec(variables)
