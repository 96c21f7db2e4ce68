"""Growth of networks without a table, from the spec that their forward pass gives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sail_jax import certificate, growth, spec_of
from sail_jax.growth import plan

TOKENS = jnp.array([[1, 2, 3]])
X = jax.random.normal(jax.random.key(9), (2, 6, 7))


def drawn(**shapes):
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return {
        name: 0.5 * jax.random.normal(key, shape)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def language(p, tokens):
    """A tied table under a norm."""
    x = p["emb"][tokens]
    x = x + jax.nn.silu(x @ p["up"]) @ p["down"]
    x = x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-5) * p["gain"]
    return x @ p["emb"].T


def autoencoder(p, x):
    """A decoder with the transposed weights of the encoder, and nothing that counts units."""
    return jax.nn.relu(jax.nn.relu(x @ p["w"]) @ p["in"]) @ p["out"] @ p["w"].T


def latents(p, x):
    """Latents read the input, and the input reads them. No leaf reads their number."""
    mixed = jax.nn.softmax(p["latent"] @ (x @ p["k"]).swapaxes(-1, -2), -1)
    z = p["latent"] + mixed @ (x @ p["v"])
    z = z + jax.nn.gelu(z @ p["up"]) @ p["down"]
    return jax.nn.softmax((x @ p["q"]) @ z.swapaxes(-1, -2), -1) @ z @ p["head"]


LANGUAGE = drawn(emb=(11, 8), gain=(8,), up=(8, 5), down=(5, 8))
AUTOENCODER = drawn(w=(7, 5), out=(4, 5), **{"in": (5, 4)})
LATENTS = drawn(
    latent=(5, 8), k=(7, 8), v=(7, 8), up=(8, 9), down=(9, 8), q=(7, 8), head=(8, 3)
)  # fmt: skip


@pytest.mark.parametrize(
    ("net", "params", "inputs", "space"),
    [
        (language, LANGUAGE, TOKENS, "up"),
        (autoencoder, AUTOENCODER, X, "in"),
        (latents, LATENTS, X, "up"),
    ],
)
@pytest.mark.parametrize("kind", [int, np.int64, np.uint8])
def test_a_space_grows_whatever_the_other_spaces_are(net, params, inputs, space, kind):
    spec = spec_of(net, params, inputs).spec
    assert all(type(s.size) is int for s in spec.spaces)
    large, grown = growth.grow(params, {}, {space: kind(12)}, "lemon", rules=spec)
    assert not grown.report.lost
    assert certificate(net, params, large, inputs).preserved
    rules = grown.spec.resized(grown.maps)
    old = {space: kind(spec.space(space).size)}
    small, pruned = growth.grow(large, {}, old, "magnitude", rules=rules)
    assert not pruned.report.lost
    assert certificate(net, params, small, inputs).preserved


def test_a_tied_table_grows_exactly_or_the_reason_is_given():
    """A copy that is written by half and read by half would need another table for each use."""
    spec = spec_of(language, LANGUAGE, TOKENS).spec
    with pytest.raises(ValueError, match=r"'emb' is tied.*requires an orthogonal map.*untie=False"):
        plan(LANGUAGE, {}, {"emb": 16}, "lemon", rules=spec)
    with pytest.raises(ValueError, match="the head of 'emb': give a network with a separate head"):
        plan(LANGUAGE, {}, {"emb": 16}, "lemon", rules=spec, untie=True)
    large, grown = growth.grow(LANGUAGE, {}, {"emb": 16}, "lemon", rules=spec, untie=False)
    assert "tied leaf 'emb'" in grown.report.lost
    assert not certificate(language, LANGUAGE, large, TOKENS).preserved

    spec = spec_of(autoencoder, AUTOENCODER, X).spec
    large, grown = growth.grow(AUTOENCODER, {}, {"w": 8}, "pad", rules=spec)
    assert not grown.report.lost
    assert certificate(autoencoder, AUTOENCODER, large, X).preserved


def test_a_set_that_no_leaf_reads_is_grown_with_its_loss():
    """A copied latent gets twice the attention that it had, and the others keep theirs."""
    spec = spec_of(latents, LATENTS, X).spec
    large, grown = growth.grow(LATENTS, {}, {"latent": 7}, "lemon", rules=spec)
    assert grown.report.lost.startswith("'latent': its nonlinearity (softmax) commutes with")
    assert not certificate(latents, LATENTS, large, X).preserved
