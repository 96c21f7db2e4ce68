"""A small network of every known architecture: parameters, rules, inputs and a forward pass.

`architectures.json` holds, per model, a configuration, the names and shapes of its tensors on disk
and some logits, all three as transformers 5.23.0 with torch 2.13.0 gave them for the weights of
`small_weights`; so names, layouts and forward passes are checked against what made them.

`heads.json` holds the same of each class of transformers 5.24.0, smaller and with all its outputs,
as `.ci/against/heads.py --record` wrote it.
"""

import json
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from small_weights import IMAGES, TOKENS, weights

from experiments.models.gpt import GPT
from experiments.models.mlp import MLP
from experiments.models.resnet import ResNet
from experiments.models.vit import ViT
from sail_jax import architectures
from sail_jax.architectures import Rules
from sail_jax.basis.certificate import certificate

GOLDEN = json.loads((Path(__file__).parent / "architectures.json").read_text())
HEADS = json.loads((Path(__file__).parent / "heads.json").read_text())
BASES = [name for name, golden in HEADS.items() if "last_hidden_state" in golden["outputs"]]
EPS = float(jnp.finfo(jnp.float32).eps)


PAIRS = {"vit": IMAGES, "clip": (TOKENS, IMAGES), "t5": (TOKENS, TOKENS[:, ::-1][:, :6].copy())}
PAIRS |= {"clip_vision_model": IMAGES}


class Model(NamedTuple):
    params: Any
    rules: Rules
    inputs: Any
    apply: Any  # (sizes, params, inputs): the forward pass of a network with a spec's sizes

    @property
    def spec(self):
        return self.rules.spec(self.params)


def hugging_face(name):
    golden = GOLDEN.get(name) or HEADS[name]
    config = golden["config"]
    family = architectures.of(config)
    params = {n: weights(n, s) for n, s in golden["shapes"].items()}
    rules = family.rules(config)

    def apply(sizes):
        # a forward pass only requires the number of heads
        told = tuple(s for s in rules.settings if "head" in s[0].rpartition(".")[2])
        new = rules._replace(settings=told).resized(config, sizes)
        return jax.jit(lambda params, x: family.outputs(params, new, x))

    inputs = PAIRS.get(family.name, TOKENS)
    if name in HEADS and family.name == "t5":
        # Its classifier reads the decoder where the encoder's tokens end.
        inputs = TOKENS, TOKENS[:, ::-1].copy()
    return Model(params, rules, inputs, apply)


def flax_model(name):
    key = jax.random.key(1)
    sizes = {"width": 8, "layers": 2, "heads": 2, "head_dim": 4, "hidden": 12}
    small = IMAGES.transpose(0, 2, 3, 1)
    module, inputs, rules = {
        "flax mlp": (
            lambda f: MLP(widths=(f("hidden.0", 6), f("hidden.1", 5)), outputs=3),
            IMAGES.reshape(2, -1)[:, :7],
            architectures.flax_mlp({"widths": (6, 5)}),
        ),
        "flax resnet": (
            lambda f: ResNet(
                widths=(f("stage.0", 4), f("stage.1", 6)),
                inner=(f("hidden.0.0", 4), f("hidden.1.0", 6)),
                blocks=2,
                outputs=3,
            ),
            small,
            architectures.flax_resnet({"widths": (4, 6), "blocks": 2}),
        ),
        "flax gpt": (partial(_gpt, sizes, False), TOKENS, architectures.flax_gpt({})),
        "flax gpt, tied": (
            partial(_gpt, sizes, True),
            TOKENS,
            architectures.flax_gpt({"tied": True}),
        ),
        "flax vit": (
            lambda f: ViT(outputs=3, patch=4, **{k: f(_SPACE.get(k), n) for k, n in sizes.items()}),
            small,
            architectures.flax_vit({}),
        ),
    }[name]
    like = jax.eval_shape(module(lambda _, n: n).init, key, inputs)

    def draw(path, x):
        """Draws parameters without initial zeros and ones, which would hide mistakes."""
        drawn = weights(jax.tree_util.keystr(path), x.shape)
        return 1 + 0.3 * np.abs(drawn) if path[-1].key in ("scale", "var") else drawn

    params = jax.tree.map_with_path(draw, like)

    def apply(s):
        grown = module(lambda space, n: s.space(space).size if space else n)
        return jax.jit(lambda params, x: grown.apply(params, x))

    return Model(params, rules, inputs, apply)


_SPACE = {"width": "resid", "heads": "head.0", "head_dim": "qk.0", "hidden": "hidden.0"}


def _gpt(sizes, tied, f):
    sizes = {k: f(_SPACE.get(k), n) for k, n in sizes.items()}
    return GPT(vocab=17, context=8, tied=tied, **sizes)


FLAX = ["flax mlp", "flax resnet", "flax gpt", "flax gpt, tied", "flax vit"]
NAMES = [*GOLDEN, *FLAX]
TIED = ["gpt2", "llama, tied, stretched", "qwen2", "bert", "roberta", "t5", "flax gpt, tied"]


@cache
def model(name):
    return flax_model(name) if name in FLAX else hugging_face(name)


@cache
def forward(name, sizes):
    return model(name).apply(sizes)


def run(name, sizes, params):
    m = model(name)
    return forward(name, sizes)(params, m.inputs)


def certify(name, params, sizes, new, new_sizes):
    """Both networks run with the sizes of their own specs."""

    def f(pair, _):
        s, p = pair
        return run(name, s, p)

    return certificate(f, (sizes, params), (new_sizes, new), None)


def inner(m):
    return [x for x in m.spec.spaces if "outer" not in x.nonlinearity.split()]
