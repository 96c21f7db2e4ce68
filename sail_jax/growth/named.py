"""The published growth methods for whole networks: `METHODS`.

A `Method` describes the maps of spaces and layers, and further edits of leaves.
`sail_jax.growth.networks` applies them.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from sail_jax.basis.axes import Axis
from sail_jax.basis.change_basis import by_block, change_basis, unfused
from sail_jax.basis.maps import SpaceMap, select
from sail_jax.basis.spaces import Leaf, Space, Spec
from sail_jax.growth import depth, fresh, width
from sail_jax.growth.basic import pad, widen
from sail_jax.growth.fresh import leaf_key
from sail_jax.growth.width import Options, Widths, each_space

Params = dict[str, Array]
Maps = dict[str, SpaceMap]
Step = Callable[[Params, Spec, Maps, Any, Options], Params]
"""A function of parameters, their spec, the maps, a key and options that edits the parameters."""
New = Literal["copy", "zero", "mask", "pair", "fresh"]
"""The treatment of a repeated layer; see `Method`."""


class Method(NamedTuple):
    """A growth method: its changes of width, depth, or both.

    Attributes:
      about: A short description.
      source: The paper.
      options: The names and defaults of its options.
      lossless: Whether it preserves the function if the architecture allows it.
      widths: A function that makes the maps of all changed spaces; None if the method only deepens.
      layers: The old layer that each new layer repeats; see `sail_jax.growth.depth.Order`.
      mixes: The alternative to `layers`: a function of the old and the new number of layers and
        options. It returns the weight of each old layer in each new layer, of shape (new, old).
      new: The treatment of a repeated layer. "copy" keeps it unchanged. "zero" and "mask" multiply
        its output by zero or a mask. "pair" makes units cancel in pairs. "fresh" draws new
        parameters and zeroes the output.
      move: The function that applies maps to a leaf; None for `change_basis`.
      edits: Further edits of a leaf, in order.
      above: Whether a leaf also depends on the leaf of the next layer.
      draws: Whether it requires a key, or the name of the option that requires one.
      prunes: Whether it removes the units with the lowest scores instead (`unit_scores`).
      deepens_by: The default depth method for this method.
    """

    about: str
    source: str
    options: Options = MappingProxyType({})
    lossless: bool = False
    widths: Widths | None = None
    layers: depth.Order | None = None
    mixes: Callable[[int, int, Options], Array] | None = None
    new: New = "copy"
    move: Step | None = None
    edits: tuple[Step, ...] = ()
    above: bool = False
    draws: bool | str = False
    prunes: bool = False
    deepens_by: str = "llama_pro"

    def needs_key(self, options: Options) -> bool:
        """Checks whether the method draws random numbers with these options."""
        if isinstance(self.draws, str):
            return options[self.draws] != self.options[self.draws]
        return self.draws

    @property
    def widens(self) -> bool:
        """Whether the method makes spaces other than layers larger."""
        return self.widths is not None

    @property
    def deepens(self) -> bool:
        """Whether the method changes the number of layers."""
        return self.layers is not None or self.mixes is not None


def _dealt(old: int, new: int, words: set[str], key: PRNGKeyArray | None) -> SpaceMap:
    """Widens at random, with equally many copies of each unit if the new size is a multiple."""
    return widen(old, new, key=key, even=new % old == 0)


def _padded(old: int, new: int, words: set[str], key: PRNGKeyArray | None) -> SpaceMap:
    """Pads with zeros; under a norm, with a padding that keeps the norm's statistics."""
    if not {"layernorm", "rmsnorm"} & words:
        return pad(old, new)
    # Scaled by sqrt(new / old), the old units keep the mean square of the space, the only statistic
    # of RMSNorm.
    scale, live = (new / old) ** 0.5, jnp.arange(new) < old
    write = jnp.where(live, scale, 0.0)
    index = jnp.where(live, jnp.arange(new), 0)
    m = select(index, old, write=write, read=jnp.where(live, 1 / scale, 0.0))
    family = width.tile(2, 3, "zero", isometric=True).family
    if "rmsnorm" in words:
        return SpaceMap(m.write, m.read, family)
    # Under a LayerNorm, the new units contain the mean of the scaled units. They do not contribute
    # to the variance, which therefore does not change.
    m = m.dense()
    return SpaceMap(jnp.where(live[:, None], jnp.asarray(m.write), scale / old), m.read)


def _embedded(spec: Spec, sizes: Mapping[str, int], key: Any, options: Options) -> Maps:
    """Makes random embeddings of the kind in the options."""

    def make(old: int, new: int, words: set[str], key: Any) -> SpaceMap:
        return width.project(old, new, key, how=options["how"])

    return each_space(make)(spec, sizes, key, options)


def _msg(params: Params, spec: Spec, maps: Maps, key: Any, options: Options) -> Params:
    """Makes masked structural growth: fresh, masked units inside layers; streams are padded."""
    # Streams keep the padding of `_padded`, because fresh units there would require masked norms.
    streams = {
        n: m
        for n, m in maps.items()
        if {"layernorm", "rmsnorm"} & set(spec.space(n).nonlinearity.split())
    }
    inner = {n: m for n, m in maps.items() if n not in streams}
    within = spec.resized(streams)
    params = fresh.fresh_units(params, within, inner, key, std=options["std"])
    return fresh.mask_units(params, within, inner, options["mask"])


def _noise(params: Params, spec: Spec, maps: Maps, key: Any, options: Options) -> Params:
    """Adds noise that cancels between copies, if `snr_db` is set."""
    if options["snr_db"] is None:
        return params
    return fresh.noise_pairs(params, spec, maps, key, snr_db=options["snr_db"])


def _symmetry(params: Params, spec: Spec, maps: Maps, key: Any, options: Options) -> Params:
    """Adds noise to the weights that write copies, if `noise` is set."""
    if not options["noise"]:
        return params
    return fresh.break_symmetry(params, spec, maps, key, scale=options["noise"])


def _svd(params: Params, spec: Spec, maps: Maps, key: Any, options: Options) -> Params:
    """SAIL's C = W U~^T for each use of a space, from the leaf unfolded along this axis (App. F.1).

    A fused leaf is treated block by block.
    """
    ((path, axes),) = spec.leaves
    names = iter(unfused(spec)[1])

    # Each block of a fused leaf is a separate matrix with its own singular vectors.
    def block(x: Array, axes: tuple[Axis, ...]) -> Array:
        return _free(next(names), x, axes, spec, maps, key, options)

    return {path: by_block(params[path], axes, spec, block, spec.resized(maps))}


def _free(
    path: str,
    x: Array,
    axes: tuple[Axis, ...],
    spec: Spec,
    maps: Maps,
    key: Any,
    options: Options,
) -> Array:
    """Applies separate maps for each factor of each axis to the leaf, with C on both sides."""
    use = [(f"{k}.{i}", f) for k, axis in enumerate(axes) for i, f in enumerate(axis or (None,))]
    sizes = [x.shape[int(n[0])] if f is None else spec.space(f.space).size for n, f in use]
    split = x.astype(jnp.promote_types(x.dtype, jnp.float32)).reshape(sizes)
    free = {}
    for k, (name, f) in enumerate(use):
        if f is not None and f.space in maps:
            flat = jnp.moveaxis(split, k, 0).reshape(sizes[k], -1)
            draw = leaf_key(key, f"{path}@{name}") if options["random"] else None
            write, _ = width.singular(flat, maps[f.space].new, flat.shape[1], key=draw)
            free[name] = SpaceMap(write, write.T)
    # Every axis gets its own space, so axes do not share maps.
    own = tuple(
        tuple(f._replace(space=f"{k}.{i}", role="write") for i, f in enumerate(axis))
        for k, axis in enumerate(axes)
    )
    named = tuple(Space(n, s, "outer") for (n, f), s in zip(use, sizes, strict=True) if f)
    return change_basis({path: x}, Spec((Leaf(path, own),), named), free)[path]


def _spread(old: int, new: int) -> np.ndarray:
    """Spreads copies evenly, each after the last layer of a group."""
    # The old layers are divided into new - old groups of nearly equal length.
    ends = [max((j + 1) * old // (new - old), 1) - 1 for j in range(new - old)]
    return np.sort(np.concatenate([np.arange(old), np.array(ends, int)]))


def _on_top(old: int, new: int) -> np.ndarray:
    """Repeats the top layer."""
    return np.minimum(np.arange(new), old - 1)


def _whole_stacks(old: int, new: int) -> np.ndarray:
    """Repeats the whole stack; the new number of layers must be a multiple."""
    if new % old:
        raise ValueError(
            f"g_stack repeats whole stacks, but {new} layers are not a multiple of {old}: use stack"
        )
    return depth.stack(old, new)


def _seam(old: int, new: int) -> np.ndarray:
    """Joins two copies of the stack as in `depth_up_scale`, if the numbers allow it."""
    if new % 2 or not old <= new <= 2 * old:
        raise ValueError(
            f"dus joins two copies of the stack, so it takes {old} layers to an even number "
            f"from {old} to {2 * old}, not to {new}"
        )
    return np.concatenate([np.arange(new // 2), np.arange(old - new // 2, old)])


def _mixed(old: int, new: int, options: Options) -> Array:
    """Averages all layers, with the logits in the options or from `mixing_logits`."""
    logits = options["logits"]
    if logits is None:
        logits = depth.mixing_logits(old, new, sharpness=options["sharpness"])
    if np.shape(logits) != (new, old):
        raise ValueError(f"logits must have shape {(new, old)}, got {np.shape(logits)}")
    return jax.nn.softmax(jnp.asarray(logits, float), axis=-1)


def pair_units(n: int) -> SpaceMap:
    """Makes the map that copies units in pairs and reads each pair with opposite signs.

    The weights that write the units are kept, but their readers receive 0. An odd unit is not read.
    This is LEMON's second way to add a layer that does nothing.

    References:
      Wang et al., LEMON: Lossless model expansion, 2024 (arXiv 2310.07999).

    >>> m = pair_units(4)
    >>> m.index.tolist(), m.read.scale.tolist()
    ([0, 0, 2, 2], [1.0, -1.0, 1.0, -1.0])
    """
    at = jnp.arange(n)
    # The last factor excludes an odd unit at the end, which has no partner.
    read = jnp.where(at % 2 == 0, 1.0, -1.0) * (at < n - n % 2)
    return select(at - at % 2, n, read=read)


_DEPTH = {
    "stack": Method(
        "repeats the whole stack: layer k is layer k mod L",
        "StackBERT (Gong et al. 2019)",
        layers=depth.stack,
    ),
    "stack_top": Method(
        "repeats the whole stack; a remainder repeats the topmost layers",
        "bert2BERT (Chen et al. 2022)",
        layers=depth.stack_top,
    ),
    "g_stack": Method(
        "repeats only whole stacks", "G_stack (Du et al. 2024)", layers=_whole_stacks
    ),
    "interpolate_depth": Method(
        "repeats each layer in place",
        "Gong et al. 2019; Dong et al. 2020",
        layers=depth.interpolate,
    ),
    "dus": Method(
        "joins two copies of the stack, without some layers at the seam",
        "SOLAR (Kim et al. 2023)",
        layers=_seam,
    ),
    "llama_pro": Method(
        "spreads copies among the layers, with outputs of zero",
        "LLaMA-Pro (Wu et al. 2024)",
        lossless=True,
        layers=_spread,
        new="zero",
    ),
    "identity": Method(
        "adds fresh layers on top that compute the identity",
        "Net2DeeperNet (Chen et al. 2016)",
        {"std": 0.02},
        lossless=True,
        layers=_on_top,
        new="fresh",
        draws=True,
    ),
    "mix": Method(
        "layer k is the mean of all layers with weights softmax(logits[k])",
        "SAIL, App. F.2",
        {"logits": None, "sharpness": 4.0},
        mixes=_mixed,
    ),
    "mean_depth": Method(
        "layer k is the mean of the old layers at its depth, also for fewer layers",
        "SAIL, eq. (9)",
        mixes=lambda old, new, options: jnp.asarray(depth.mean(old, new)),
    ),
    "mask_depth": Method(
        "spreads copies among the layers, with outputs times a mask",
        "MSG (Yao et al. 2023)",
        {"mask": 0.0},
        lossless=True,
        layers=_spread,
        new="mask",
    ),
    "pairs": Method(
        "spreads copies among the layers, with units that cancel in pairs",
        "LEMON (Wang et al. 2024)",
        lossless=True,
        layers=_spread,
        new="pair",
    ),
}

_WIDTH = {
    "net2net": Method(
        "copies random units and divides their readers evenly",
        "Net2Net (Chen et al. 2016)",
        {"noise": 0.0},
        lossless=True,
        draws="noise",
        widths=each_space(lambda old, new, words, key: widen(old, new, key=key)),
        edits=(_symmetry,),
        deepens_by="identity",
    ),
    "fpi": Method(
        "copies random units, each equally often if the size is a multiple",
        "bert2BERT (Chen et al. 2022)",
        lossless=True,
        widths=each_space(_dealt),
        deepens_by="stack_top",
    ),
    "aki": Method(
        "like fpi, but takes the new units of a layer from the next layer",
        "bert2BERT (Chen et al. 2022)",
        widths=each_space(_dealt),
        above=True,
        deepens_by="stack_top",
    ),
    "hypercloning": Method(
        "tiles all units by integer factors; optional noise cancels between copies",
        "HyperCloning (Samragh et al. 2024)",
        {"snr_db": None},
        lossless=True,
        draws="snr_db",
        widths=lambda spec, sizes, key, options: width.hypercloning(spec, sizes),
        edits=(_noise,),
        deepens_by="llama_pro",
    ),
    "lemon": Method(
        "tiles streams with averages or zeros, to any size; copies may be read unevenly",
        "LEMON (Wang et al. 2024)",
        lossless=True,
        widths=lambda spec, sizes, key, options: width.lemon(spec, sizes, key=key),
        deepens_by="pairs",
    ),
    "msg": Method(
        "adds fresh units under a mask that grows from 0 in training",
        "MSG (Yao et al. 2023)",
        {"mask": 0.0, "std": 0.02},
        lossless=True,
        widths=each_space(_padded),
        edits=(_msg,),
        draws=True,
        deepens_by="mask_depth",
    ),
    "sail_svd": Method(
        "computes C_in theta C_out^T from the singular vectors of each tensor",
        "SAIL, App. F.1",
        {"random": False},
        draws="random",
        widths=each_space(lambda old, new, words, key: pad(old, new)),
        move=_svd,
        deepens_by="mix",
    ),
    "sail_random": Method(
        "embeds every space at random",
        "SAIL, Sec. 4.1",
        {"how": "orthogonal"},
        draws=True,
        widths=_embedded,
        deepens_by="mix",
    ),
    "interpolate": Method(
        "interpolates units linearly, as samples of a function",
        "SAIL, Sec. 4.1",
        widths=each_space(lambda old, new, words, key: width.interpolate(old, new)),
        deepens_by="interpolate_depth",
    ),
    "pad": Method(
        "adds units that are zero",
        "SAIL, App. F.1 (identity)",
        widths=each_space(lambda old, new, words, key: pad(old, new)),
        deepens_by="llama_pro",
    ),
}

_PRUNING = {
    "magnitude": Method(
        "shrinks: removes the units with the smallest weights",
        "Li et al. 2017; DepGraph (Fang et al. 2023)",
        lossless=True,
        prunes=True,
    ),
}

METHODS: dict[str, Method] = _WIDTH | _DEPTH | _PRUNING
"""The growth methods by name. They widen, deepen or prune."""
