"""Small modules of other packages as functions of their parameters.

Torch modules are functions in JAX by `sail_jax.interop.torch`, and also run in torch.
"""

import importlib
import re
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import diffusers
import equinox as eqx
import jax
import numpy as np
import torch
import torch_geometric.nn as graphs
from cases import IMAGES
from flax import linen, nnx
from torch import nn

from sail_jax.interop.torch import jax_function
from sail_jax.trees import leaf_paths

sys.path.append(str(IMAGES))
try:
    vision: Any = importlib.import_module("torchvision.models")
except RuntimeError:
    # Its operators are missing: see `.ci/peers`. Models do not use them, but it describes two.
    for _name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{_name}", "(Tensor a, Tensor b, float c) -> Tensor")
    vision = importlib.import_module("torchvision.models")
timm: Any = importlib.import_module("timm.models")
layers: Any = importlib.import_module("timm.layers")

Arrays = tuple[np.ndarray, ...]


class Runs(NamedTuple):
    """A module as a function of its parameters.

    Attributes:
      apply: The traced function, called as `apply(params, *inputs)`.
      params: Its parameters, none of them 0 or 1 as at their start.
      run: Writes parameters into the module and runs it, called as `run(params, inputs)`.
      resized: Runs the module's code with parameters of other shapes.
    """

    apply: Callable[..., Any]
    params: Any
    run: Callable[[Any, Arrays], Any]
    resized: Callable[[Any, Arrays], Any]


class Own(NamedTuple):
    """A module that a user may have.

    Attributes:
      kind: Its package and class.
      make: Builds it, called with 1, and with 2 for twice the widths.
      inputs: Makes inputs, with another batch, length or graph for each number.
      wider: Whether its constructor has arguments for its widths.
    """

    kind: str
    make: Callable[[int], Runs]
    inputs: Callable[[int], Arrays]
    wider: bool = True


def first(out: Any) -> torch.Tensor:
    """The first of several outputs."""
    return out if isinstance(out, torch.Tensor) else out[0]


def of_torch(module: nn.Module) -> Runs:
    """A module of torch."""
    module = module.eval()
    with torch.no_grad():
        for name, x in module.state_dict(keep_vars=True).items():
            if x.is_floating_point():
                x.copy_(torch.from_numpy(_drawn(name, tuple(x.shape))))
    apply, params = jax_function(module, outputs=first)

    def tensors(params: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        return {name: torch.from_numpy(np.array(x)) for name, x in params.items()}

    @torch.no_grad()
    def resized(params: Mapping[str, Any], inputs: Arrays) -> np.ndarray:
        given = tuple(map(torch.from_numpy, inputs))
        # With it, an LSTM does not check the shapes of its weights.
        with torch.backends.mkldnn.flags(enabled=False):
            return first(torch.func.functional_call(module, tensors(params), given)).numpy()

    def run(params: Mapping[str, Any], inputs: Arrays) -> np.ndarray:
        state = module.state_dict()
        # Counters of batches, and the second names of tied weights, are in no function.
        state |= tensors(params)
        module.load_state_dict(state)
        return resized({}, inputs)

    return Runs(apply, params, run, resized)


def of_equinox(module: Any) -> Runs:
    """A module of Equinox for one example."""
    arrays, static = eqx.partition(eqx.nn.inference_mode(module), eqx.is_inexact_array)

    def apply(arrays: Any, *inputs: Any) -> Any:
        return jax.vmap(eqx.combine(arrays, static))(*inputs)

    def run(arrays: Any, inputs: Arrays) -> Any:
        return apply(arrays, *inputs)

    return Runs(apply, _random(arrays), run, run)


def of_linen(module: linen.Module, inputs: Callable[[int], Arrays]) -> Runs:
    """A module of Linen."""
    variables = module.init(jax.random.key(0), *inputs(0))

    def run(variables: Any, inputs: Arrays) -> Any:
        return module.apply(variables, *inputs)

    return Runs(module.apply, _random(variables), run, run)


def of_nnx(module: Any) -> Runs:
    """A module of NNX."""
    module.eval()
    graph, params = nnx.split(module)

    def apply(params: Any, *inputs: Any) -> Any:
        return nnx.merge(graph, params)(*inputs)

    def run(params: Any, inputs: Arrays) -> Any:
        nnx.update(module, params)
        return module(*inputs)

    def resized(params: Any, inputs: Arrays) -> Any:
        return apply(params, *inputs)

    return Runs(apply, _random(params), run, resized)


def _random(params: Any) -> Any:
    """Random parameters of the same shapes."""
    leaves, structure = jax.tree.flatten(params)
    paths = leaf_paths(params)
    drawn = [
        jax.numpy.asarray(_drawn(path, x.shape)) if eqx.is_inexact_array(x) else x
        for path, x in zip(paths, leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, drawn)


def _drawn(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """A random parameter: gains near 1, positive variances, and matrices that keep magnitudes."""
    rng = np.random.default_rng(list(name.encode()))
    x = rng.normal(size=shape)
    if re.search(r"(^|[/.])(running_)?var|^state", name):
        return (np.abs(x) + 0.5).astype(np.float32)
    if len(shape) > 1:
        return (x * (min(shape) / np.prod(shape)) ** 0.5).astype(np.float32)
    return (0.3 * x + name.endswith(("weight", "scale", "scale/value"))).astype(np.float32)


def _normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def images(size: int, channels: int, other: int) -> Arrays:
    """Random images, with another number of them for each number."""
    return (_normal(other, 2 + other, channels, size, size),)


def last(size: int, other: int) -> Arrays:
    """Random images with channels on the last axis."""
    return (_normal(other, 2 + other, size, size, 3),)


def noisy(channels: int, other: int) -> Arrays:
    """Random images, and the step of each."""
    return (*images(8, channels, other), np.arange(2 + other) + 3)


def labelled(other: int) -> Arrays:
    """Random images, and the step and the class of each."""
    return (*noisy(4, other), np.arange(2 + other) % 2)


def rows(other: int) -> Arrays:
    """Sequences of vectors."""
    return (_normal(other, 2 + other, 7 - 2 * other, 6),)


def vectors(other: int) -> Arrays:
    """Vectors."""
    return (_normal(other, 3 + other, 6),)


def graph(other: int) -> Arrays:
    """A graph: vectors of its nodes, and its edges."""
    nodes = 6 + other
    edges = np.random.default_rng(other).integers(nodes, size=(2, 9 - other))
    return _normal(other, nodes, 6), edges


class Chain(nn.Sequential):
    """A layer of torch between two linear layers; it may return several outputs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Runs the layers one after the other."""
        for layer in self:
            x = first(layer(x))
        return x


class Attends(nn.Module):
    """Attention or a decoder layer, with its input as its memory."""

    def __init__(self, layer: nn.Module, count: int) -> None:
        super().__init__()
        self.layer, self.count = layer, count

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Runs the layer."""
        return first(self.layer(*[x] * self.count))


def between(layer: nn.Module, width: int, out: int | None = None) -> nn.Module:
    """A layer of torch between two linear layers."""
    return Chain(nn.Linear(6, width), layer, nn.Linear(out or width, 3))


def _torchvision() -> dict[str, tuple[Callable[[int], nn.Module], Callable[[int], Arrays]]]:
    """Models of torchvision by name, built with k times their widths, and their inputs."""
    conv, swin, net = vision.convnext, vision.swin_transformer, vision.efficientnet
    norm, merge = swin.SwinTransformerBlockV2, swin.PatchMergingV2
    mobile, regnet = vision.mobilenetv3.InvertedResidualConfig, vision.regnet
    small, large = partial(images, 16, 3), partial(images, 32, 3)

    def efficientnet(k: int) -> nn.Module:
        layers = [
            net.MBConvConfig(1, 3, 1, 8 * k, 8 * k, 1),
            net.FusedMBConvConfig(2, 3, 2, 8 * k, 16 * k, 1),
            net.MBConvConfig(4, 3, 2, 16 * k, 16 * k, 2),
        ]
        return vision.EfficientNet(layers, 0.1, num_classes=5, last_channel=24 * k)

    def mobilenet(k: int) -> nn.Module:
        layers = [
            mobile(8, 3, 16, 8, True, "RE", 1, 1, k),
            mobile(8, 5, 24, 16, True, "HS", 2, 1, k),
            mobile(16, 3, 32, 16, False, "HS", 1, 1, k),
        ]
        return vision.MobileNetV3(layers, 24 * k, num_classes=5)

    def convnext(k: int) -> nn.Module:
        layers = [conv.CNBlockConfig(8 * k, 16 * k, 1), conv.CNBlockConfig(16 * k, None, 1)]
        return vision.ConvNeXt(layers, num_classes=5)

    def swins(k: int, **more: Any) -> nn.Module:
        heads = [2 * k, 4 * k]
        return vision.SwinTransformer([2, 2], 8 * k, [2, 1], heads, [2, 2], num_classes=5, **more)

    def regnets(k: int) -> nn.Module:
        sizes = regnet.BlockParams([1, 1], [8 * k, 16 * k], [4, 4], [1.0, 1.0], [2, 2], 0.25)
        return vision.RegNet(sizes, num_classes=5, stem_width=8 * k)

    return {
        "ResNet": (
            lambda k: vision.ResNet(vision.resnet.BasicBlock, [1] * 4, num_classes=5), large),
        "DenseNet": (lambda k: vision.DenseNet(4 * k, (2, 2), 8 * k, 2, num_classes=5), large),
        "MobileNetV3": (mobilenet, large),
        "EfficientNet": (efficientnet, large),
        "ConvNeXt": (convnext, large),
        "ViT": (lambda k: vision.VisionTransformer(16, 4, 1, 2 * k, 8 * k, 12 * k, num_classes=5),
                small),
        "Swin": (swins, small),
        "Swin V2": (partial(swins, block=norm, downsample_layer=merge), small),
        "MaxViT": (lambda k: vision.MaxVit((16, 16), 8 * k, 2, [8 * k], [1], 4, 0.0,
                                           num_classes=5), small),
        "ShuffleNet": (lambda k: vision.ShuffleNetV2(
            [2, 1, 1], [8 * k, 8 * k, 16 * k, 32 * k, 24 * k], 5), large),
        "RegNet": (regnets, large),
    }  # fmt: skip


def _timm() -> dict[str, tuple[Callable[[int], nn.Module], Callable[[int], Arrays]]]:
    """Models of timm by name, built with k times their widths, and their inputs."""
    mlp, meta = timm.mlp_mixer, timm.metaformer
    small, large = partial(images, 16, 3), partial(images, 32, 3)

    def mlps(k: int, **more: Any) -> nn.Module:
        return mlp.MlpMixer(5, 16, 3, 4, 1, 8 * k, **more)

    one = {"num_classes": 5, "depth": 1}
    return {
        "MLP-Mixer": (mlps, small),
        "ResMLP": (partial(mlps, block_layer=mlp.ResBlock, norm_layer=mlp.Affine, mlp_ratio=2),
                   small),
        "gMLP": (partial(mlps, block_layer=mlp.SpatialGatingBlock, mlp_layer=layers.GatedMlp,
                         mlp_ratio=2), small),
        "PoolFormer": (lambda k: meta.MetaFormer(depths=(1, 1), dims=(8 * k, 16 * k), num_classes=5,
                                                 norm_layers=meta.GroupNorm1), large),
        "DeiT": (lambda k: timm.deit.VisionTransformerDistilled(
            img_size=16, patch_size=4, embed_dim=8 * k, num_heads=2 * k, **one), small),
        "ConvMixer": (lambda k: timm.convmixer.ConvMixer(8 * k, 2, 3, 4, num_classes=5), large),
        "XCiT": (lambda k: timm.xcit.Xcit(16, 8, embed_dim=8 * k, num_heads=2 * k,
                                          cls_attn_layers=1, **one), small),
        "EVA-02": (lambda k: timm.eva.Eva(16, 4, embed_dim=8 * k, num_heads=2 * k, qkv_fused=False,
                                          swiglu_mlp=True, use_rot_pos_emb=True, **one), small),
        "NFNet": (lambda k: timm.nfnet.NormFreeNet(timm.nfnet.NfCfg(
            depths=(1, 1), channels=(16 * k, 24 * k), stem_chs=8 * k, num_features=32 * k),
            num_classes=5), large),
    }  # fmt: skip


def _diffusers() -> dict[str, tuple[Callable[[int], nn.Module], Callable[[int], Arrays]]]:
    """Models of diffusers by name, built with k times their widths, and their inputs."""

    return {
        "UNet2DModel": (lambda k: diffusers.UNet2DModel(
            8, down_block_types=("DownBlock2D",) * 2, up_block_types=("UpBlock2D",) * 2,
            block_out_channels=(8 * k, 16 * k), norm_num_groups=4, layers_per_block=1,
            attention_head_dim=4), partial(noisy, 3)),
        "AutoencoderKL": (lambda k: diffusers.AutoencoderKL(
            block_out_channels=(8 * k,), norm_num_groups=4), partial(images, 8, 3)),
        "DiTTransformer2DModel": (lambda k: diffusers.DiTTransformer2DModel(
            2 * k, 4, in_channels=4, out_channels=4, num_layers=1, sample_size=8,
            num_embeds_ada_norm=10, norm_num_groups=2), labelled),
    }  # fmt: skip


def _layers() -> dict[str, tuple[Callable[[int], nn.Module], Callable[[int], Arrays]]]:
    """Layers of torch and torch_geometric by name, with k times their widths, and their inputs."""
    heads = {"batch_first": True}
    return {
        "LSTM": (lambda k: between(nn.LSTM(8 * k, 10 * k, 2, **heads), 8 * k, 10 * k), rows),
        "GRU": (lambda k: between(nn.GRU(8 * k, 10 * k, **heads), 8 * k, 10 * k), rows),
        "MultiheadAttention": (lambda k: between(
            Attends(nn.MultiheadAttention(8 * k, 2 * k, **heads), 3), 8 * k), rows),
        "TransformerEncoderLayer": (lambda k: between(
            nn.TransformerEncoderLayer(8 * k, 2 * k, 12 * k, **heads), 8 * k), rows),
        "TransformerDecoderLayer": (lambda k: between(
            Attends(nn.TransformerDecoderLayer(8 * k, 2 * k, 12 * k, **heads), 2), 8 * k), rows),
    }  # fmt: skip


def _graphs() -> dict[str, tuple[Callable[[int], nn.Module], Callable[[int], Arrays]]]:
    """Networks of torch_geometric by name, with k times their widths, and their inputs."""
    # Which edges are self-loops depends on values, and a traced function has none.
    plain = {"add_self_loops": False}
    return {
        "GCN": (lambda k: graphs.GCN(6, 8 * k, 2, 5, **plain), graph),
        "GAT": (lambda k: graphs.GAT(6, 8 * k, 2, 5, heads=2 * k, **plain), graph),
        "GraphSAGE": (lambda k: graphs.GraphSAGE(6, 8 * k, 2, 5), graph),
        "GIN": (lambda k: graphs.GIN(6, 8 * k, 2, 5), graph),
    }  # fmt: skip


def _torch(package: str, found: Mapping[str, Any]) -> dict[str, Own]:
    return {
        name: Own(package, lambda k, make=make: of_torch(make(k)), inputs, name != "ResNet")
        for name, (make, inputs) in found.items()
    }


class Attending(eqx.Module):
    """Attention of Equinox between linear layers."""

    enter: eqx.nn.Linear
    layer: eqx.nn.MultiheadAttention
    leave: eqx.nn.Linear

    def __call__(self, x: Any) -> Any:
        """Runs the layers on a sequence."""
        h = jax.vmap(self.enter)(x)
        return jax.vmap(self.leave)(self.layer(h, h, h))


class Recurrent(eqx.Module):
    """A recurrent cell of Equinox between linear layers."""

    enter: eqx.nn.Linear
    cell: Any
    leave: eqx.nn.Linear
    start: Callable[[int], Any] = eqx.field(static=True)

    def __call__(self, x: Any) -> Any:
        """Runs the cell along a sequence."""
        state = self.start(self.cell.hidden_size)
        step = jax.lax.scan(lambda s, y: (self.cell(y, s),) * 2, state, jax.vmap(self.enter)(x))
        return jax.vmap(self.leave)(jax.tree.leaves(step[1])[0])


class Stated(eqx.Module):
    """A model of Equinox with its state."""

    model: Any
    state: eqx.nn.State

    def __call__(self, x: Any) -> Any:
        """Runs the model."""
        return self.model(x, self.state)[0]


def _equinox() -> dict[str, Own]:
    """Layers of Equinox between others."""
    key, zeros = jax.random.key(0), jax.numpy.zeros

    def linear(old: int, new: int) -> eqx.nn.Linear:
        return eqx.nn.Linear(old, new, key=key)

    def attention(k: int) -> Any:
        layer = eqx.nn.MultiheadAttention(2 * k, 8 * k, key=key)
        return Attending(linear(6, 8 * k), layer, linear(8 * k, 3))

    def recurrent(cell: Any, start: Any, k: int) -> Any:
        layer = cell(8 * k, 10 * k, key=key)
        return Recurrent(linear(6, 8 * k), layer, linear(10 * k, 3), start)

    def convolutions(k: int) -> Any:
        layers = [
            eqx.nn.Conv2d(3, 8 * k, 3, key=key),
            eqx.nn.GroupNorm(4, 8 * k),
            eqx.nn.Lambda(jax.nn.relu),
            eqx.nn.Conv2d(8 * k, 12 * k, 3, groups=2, key=key),
            eqx.nn.Lambda(jax.nn.gelu),
            eqx.nn.ConvTranspose2d(12 * k, 2, 2, key=key),
        ]
        return eqx.nn.Sequential(layers)

    def normed(k: int) -> Any:
        def layers() -> Any:
            norm = eqx.nn.BatchNorm(8 * k, "batch", mode="batch")
            return eqx.nn.Sequential(
                [linear(6, 8 * k), norm, eqx.nn.Lambda(jax.nn.relu), linear(8 * k, 3)]
            )

        return Stated(*eqx.nn.make_with_state(layers)())

    made = {
        "Equinox MLP": (lambda k: eqx.nn.MLP(6, 3, 8 * k, 2, key=key), vectors),
        "Equinox MultiheadAttention": (attention, rows),
        "Equinox GRUCell": (partial(recurrent, eqx.nn.GRUCell, zeros), rows),
        "Equinox LSTMCell": (partial(recurrent, eqx.nn.LSTMCell, lambda n: (zeros(n),) * 2), rows),
        "Equinox BatchNorm": (normed, vectors),
        "Equinox convolutions": (convolutions, partial(images, 8, 3)),
    }
    return {
        name: Own("equinox", lambda k, make=make: of_equinox(make(k)), inputs)
        for name, (make, inputs) in made.items()
    }


def _nnx() -> dict[str, Own]:
    """Layers of NNX between others."""
    seed: dict[str, Any] = {"rngs": nnx.Rngs(0)}

    def attention(k: int) -> Any:
        layer = nnx.MultiHeadAttention(2 * k, 8 * k, decode=False, **seed)
        return nnx.Sequential(nnx.Linear(6, 8 * k, **seed), layer, nnx.Linear(8 * k, 3, **seed))

    def recurrent(cell: Any, k: int) -> Any:
        layer = nnx.RNN(cell(8 * k, 10 * k, **seed))
        return nnx.Sequential(nnx.Linear(6, 8 * k, **seed), layer, nnx.Linear(10 * k, 3, **seed))

    def convolutions(k: int) -> Any:
        return nnx.Sequential(
            nnx.Conv(3, 8 * k, (3, 3), **seed),
            nnx.BatchNorm(8 * k, **seed),
            nnx.relu,
            nnx.Conv(8 * k, 12 * k, (3, 3), **seed),
            nnx.GroupNorm(12 * k, 4, **seed),
            nnx.silu,
            nnx.ConvTranspose(12 * k, 2, (2, 2), **seed),
        )

    made = {
        "NNX MultiHeadAttention": (attention, rows),
        "NNX LSTMCell": (partial(recurrent, nnx.OptimizedLSTMCell), rows),
        "NNX GRUCell": (partial(recurrent, nnx.GRUCell), rows),
        "NNX convolutions": (convolutions, partial(last, 8)),
    }
    return {
        name: Own("flax", lambda k, make=make: of_nnx(make(k)), inputs)
        for name, (make, inputs) in made.items()
    }


def _linen() -> dict[str, Own]:
    """Layers of Linen between others."""

    def attention(k: int) -> Any:
        layer = linen.MultiHeadDotProductAttention(2 * k)
        return linen.Sequential([linen.Dense(8 * k), layer, linen.Dense(3)])

    def recurrent(cell: Any, k: int) -> Any:
        return linen.Sequential([linen.Dense(8 * k), linen.RNN(cell(10 * k)), linen.Dense(3)])

    made = {
        "Linen MultiHeadDotProductAttention": (attention, rows),
        "Linen LSTMCell": (partial(recurrent, linen.OptimizedLSTMCell), rows),
        "Linen MGUCell": (partial(recurrent, linen.MGUCell), rows),
    }
    return {
        name: Own("flax", lambda k, make=make, i=inputs: of_linen(make(k), i), inputs)
        for name, (make, inputs) in made.items()
    }


MODULES: dict[str, Own] = {
    **_torch("torchvision", _torchvision()),
    **_torch("timm", _timm()),
    **_torch("diffusers", _diffusers()),
    **_torch("torch", _layers()),
    **_torch("torch_geometric", _graphs()),
    **_equinox(),
    **_nnx(),
    **_linen(),
}
