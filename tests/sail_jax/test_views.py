"""Views of results in notebooks: at most ten rows, and text of others is text."""

import re

import jax.numpy as jnp
import numpy as np
import small_checkpoints

from sail_jax import growth, methods, spec
from sail_jax.basis.certificate import certificate
from sail_jax.checkpoint import merge_checkpoints
from sail_jax.views import ROWS, view


def rows(html):
    return [re.findall(r"<t[dh]>(.*?)</t[dh]>", row) for row in re.findall("<tr>(.*?)</tr>", html)]


def test_ten_rows_are_shown_and_the_others_counted():
    html = view("title\nabout <it>", [(i, i * i) for i in range(14)], ("i", "square"))
    assert html.startswith("<strong>title</strong><p>about &lt;it&gt;</p><table>")
    assert rows(html) == [["i", "square"], *([str(i), str(i * i)] for i in range(ROWS))]
    assert html.endswith("<p>and 4 more</p>")


def test_text_of_others_is_escaped_and_shortened():
    html = view("<script>", [("<b>\x1b[31m", "x" * 10**6)])
    assert "<b>" not in html
    assert "<script>" not in html
    assert "\x1b" not in html
    assert len(html) < 1000


def test_results_have_views(tmp_path):
    assert rows(methods.ties(density=0.2)._repr_html_()) == [
        ["density", "0.2"], ["base", "required"], ["models", "1 to any number"],
    ]  # fmt: skip
    assert ["models", "2"] in rows(methods.slerp(t=0.5)._repr_html_())
    net = {"a": jnp.eye(3), "b": jnp.ones((1, 3))}
    found = spec(net, {"a": "hidden x*", "b": "y hidden*"}, spaces={"{x,y}": "outer"})
    assert rows(found._repr_html_())[1][:2] == ["hidden", "3"]
    kept = certificate(lambda p, x: p["b"] @ p["a"] @ x, net, net, np.ones(3, np.float32))
    assert "<strong>the function is preserved</strong>" in kept._repr_html_()
    config = {"model_type": "mlp", "inputs": 1, "widths": [2]}
    net = {
        "layers.0.kernel": jnp.array([[1.0, 2.0]]), "layers.0.bias": jnp.zeros(2),
        "out.kernel": jnp.array([[3.0], [4.0]]), "out.bias": jnp.zeros(1),
    }  # fmt: skip
    grown = growth.plan(net, config, {"width": 2}, "lemon")
    assert ["hidden.0", "2 to 4"] in rows(grown._repr_html_())
    assert "no loss" in grown.report._repr_html_()
    small_checkpoints.save(tmp_path / "a", small_checkpoints.tensors())
    done = merge_checkpoints([tmp_path / "a"] * 2, tmp_path / "b")
    assert rows(done._repr_html_())[0] == ["tensors", str(done.tensors)]
