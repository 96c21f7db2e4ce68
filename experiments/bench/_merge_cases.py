"""The recipes of the parity check, and the allowed differences between the two programs'
outputs."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

ELEMENTWISE = 4  # units of float32 rounding at the tensor's largest entry: sums of a few terms
GEOMETRIC = 32  # the same, for norms and inner products of whole tensors


class Case(NamedTuple):
    """A recipe, with names of models instead of paths, and the rules to compare outputs.

    Entries may differ by rounding. If a method trims, rounding may also decide which entries stay:
    those equal in magnitude to a threshold, or elected by a sum that is 0 up to rounding. `trim`
    lets the comparison distinguish such entries from others.

    Attributes:
      recipe: The recipe, as mergekit and sail-jax read it.
      ulps: The allowed difference of entries, in units of float32 rounding at the tensor's largest
        entry.
      trim: For each model with a trimmed task vector, its density and gamma (the fraction of
        largest entries that is dropped, too).
      random: Whether the method is random. Then statistics over all entries are compared.
      share: The share of other entries that may differ, for the reason in `why`.
      why: The reason, as printed in the verdict.
    """

    recipe: Mapping[str, Any]
    ulps: float = ELEMENTWISE
    trim: Mapping[str, tuple[float, float]] = {}
    random: bool = False
    share: float = 0.0
    why: str = ""


def _merge(
    method: str, *models: str | tuple[str, Mapping[str, Any]], base: str = "base", **parameters: Any
) -> dict[str, Any]:
    """Builds a recipe. Models are names, or pairs of name and parameters.

    A parameter with a Python keyword as its name gets an underscore: `lambda_`.
    """
    entries = []
    for model in models:
        name, own = model if isinstance(model, tuple) else (model, {})
        entries.append({"model": name, **({"parameters": own} if own else {})})
    parameters = {name.rstrip("_"): value for name, value in parameters.items()}
    return {
        "merge_method": method,
        **({"base_model": base} if base else {}),
        "models": entries,
        **({"parameters": parameters} if parameters else {}),
        "dtype": "float32",
    }


def _three(**lists: Sequence[float]) -> list[tuple[str, dict[str, Any]]]:
    """Returns the three fine-tuned models, each with its own entry of the parameter lists."""
    names = ("tuned-0", "tuned-1", "tuned-2")
    return [(n, {k: v[i] for k, v in lists.items()}) for i, n in enumerate(names)]


def _slices(*sources: tuple[str, int, int], **parameters: Any) -> dict[str, Any]:
    """Builds a passthrough recipe of ranges of layers."""
    listed = [{"sources": [{"model": m, "layer_range": [a, b]}]} for m, a, b in sources]
    extra = {"parameters": parameters} if parameters else {}
    return {"merge_method": "passthrough", "slices": listed, **extra, "dtype": "float32"}


_W = {"weight": [0.5, 0.3, 0.4]}
_GRADIENT = [0.0, 0.3, 1.0]
_T = [
    {"filter": "self_attn", "value": [0, 0.5, 0.3, 0.7, 1]},
    {"filter": "mlp", "value": [1, 0.5, 0.7, 0.3, 0]},
    {"value": 0.5},
]
_FILTERED = [{"filter": "mlp", "value": 0.8}, {"filter": "norm", "value": 0.1}, {"value": 0.4}]
_TRIMMED: dict[str, tuple[float, float]] = dict.fromkeys(
    ("tuned-0", "tuned-1", "tuned-2"), (0.4, 0.0)
)
_CRUMBS: dict[str, tuple[float, float]] = dict.fromkeys(_TRIMMED, (0.6, 0.05))
_TWO = ("tuned-0", {"weight": 0.7}), ("tuned-1", {"weight": 0.2})

CASES: dict[str, Case] = {
    "linear": Case(_merge("linear", *_three(**_W), base="")),
    "linear, sum": Case(_merge("linear", *_three(**_W), base="", normalize=False)),
    "linear, gradient and filter": Case(
        _merge(
            "linear",
            ("tuned-0", {"weight": _GRADIENT}),
            ("tuned-1", {"weight": _FILTERED}),
            base="",
        )
    ),
    "linear, negative weight": Case(_merge("linear", *_three(weight=[1.5, -0.8, 0.4]), base="")),
    "task_arithmetic": Case(_merge("task_arithmetic", *_three(**_W), lambda_=0.7)),
    "task_arithmetic, normalize": Case(
        _merge("task_arithmetic", *_three(weight=[1, -0.4, 0.5]), normalize=True)
    ),
    "task_arithmetic, gradient": Case(
        _merge("task_arithmetic", ("tuned-0", {"weight": _GRADIENT}), ("tuned-1", {"weight": 0.5}))
    ),
    "ties": Case(_merge("ties", *_three(**_W, density=[0.4] * 3)), trim=_TRIMMED),
    "ties, default density": Case(_merge("ties", *_three(**_W))),
    "ties, sum, lambda": Case(
        _merge(
            "ties", *_three(**_W, density=[0.4] * 3), normalize=False, lambda_=1.3, int8_mask=True
        ),
        trim=_TRIMMED,
    ),
    "ties, density per model": Case(
        _merge("ties", *_three(**_W, density=[0.2, 0.6, 0.9])),
        trim={"tuned-0": (0.2, 0), "tuned-1": (0.6, 0), "tuned-2": (0.9, 0)},
    ),
    "ties, density below one entry": Case(
        _merge("ties", *_three(**_W, density=[1e-3] * 3)),
        trim=dict.fromkeys(_TRIMMED, (0.001, 0.0)),
    ),
    "breadcrumbs": Case(
        _merge("breadcrumbs", *_three(**_W, density=[0.6] * 3, gamma=[0.05] * 3)), trim=_CRUMBS
    ),
    "breadcrumbs_ties": Case(
        _merge("breadcrumbs_ties", *_three(**_W, density=[0.6] * 3, gamma=[0.05] * 3)), trim=_CRUMBS
    ),
    "sce": Case(_merge("sce", "tuned-0", "tuned-1", "tuned-2"), GEOMETRIC),
    "sce, select_topk": Case(_merge("sce", "tuned-0", "tuned-1", select_topk=0.3), GEOMETRIC),
    "slerp": Case(_merge("slerp", "base", "tuned-0", t=0.3), GEOMETRIC),
    "slerp, far apart": Case(_merge("slerp", "base", "far", t=0.3), GEOMETRIC),
    "slerp, gradients and filters": Case(_merge("slerp", "base", "far", t=_T), GEOMETRIC),
    "nuslerp": Case(
        _merge("nuslerp", ("base", {"weight": 0.7}), ("far", {"weight": 0.2}), base=""), GEOMETRIC
    ),
    "nuslerp of deltas": Case(_merge("nuslerp", *_TWO), GEOMETRIC),
    "nuslerp, columns": Case(_merge("nuslerp", *_TWO, nuslerp_flatten=False), GEOMETRIC),
    "nuslerp, rows": Case(
        _merge("nuslerp", *_TWO, nuslerp_flatten=False, nuslerp_row_wise=True), GEOMETRIC
    ),
    "multislerp": Case(_merge("multislerp", *_three(**_W), base=""), GEOMETRIC),
    "multislerp of deltas": Case(_merge("multislerp", *_three(**_W)), GEOMETRIC),
    "karcher": Case(_merge("karcher", "base", "far", "tuned-0", base=""), GEOMETRIC),
    "model_stock": Case(_merge("model_stock", "tuned-0", "tuned-1", "tuned-2"), GEOMETRIC),
    "model_stock, filter_wise": Case(
        _merge("model_stock", "tuned-0", "tuned-1", "tuned-2", filter_wise=True), GEOMETRIC
    ),
    "nearswap": Case(_merge("nearswap", "tuned-0", t=1e-4)),
    "arcee_fusion": Case(
        _merge("arcee_fusion", "far"),
        GEOMETRIC,
        share=1e-3,
        why="its threshold is on a small divergence, a cancelling sum in float32",
    ),
    "ram": Case(_merge("ram", "tuned-0", "tuned-1", "tuned-2", epsilon=1e-4)),
    "ramplus_tl": Case(_merge("ramplus_tl", "tuned-0", "tuned-1", "tuned-2", epsilon=1e-4)),
    "passthrough, scale": Case(
        _merge(
            "passthrough",
            ("tuned-0", {"scale": [{"filter": "o_proj", "value": 0.5}, {"value": 1}]}),
            base="",
        )
    ),
    "passthrough, slices": Case(_slices(("base", 0, 2), ("tuned-0", 1, 3))),
    "ties of bfloat16": Case(
        _merge(
            "ties",
            *[(f"{n}-bf16", p) for n, p in _three(**_W, density=[0.4] * 3)],
            base="base-bf16",
        ),
        trim={f"{name}-bf16": (0.4, 0.0) for name in _TRIMMED},
    ),
    "linear, out_dtype": Case(
        {**_merge("linear", *_three(**_W), base=""), "out_dtype": "bfloat16"},
        ulps=2.0**16,  # a half-way case may round to either neighbour
    ),
    "linear, tokenizer base": Case(
        {
            **_merge("linear", *_three(**_W)[:2], ("longer", {"weight": 0.3}), base=""),
            "tokenizer_source": "base",
            "base_model": "tuned-0",
        },
    ),
    "ties, tokenizer union": Case(
        {
            **_merge("ties", ("tuned-0", {"weight": 0.5}), ("longer", {"weight": 0.3})),
            "tokenizer_source": "union",
        },
    ),
    "dare_linear": Case(_merge("dare_linear", *_three(**_W, density=[0.3] * 3)), random=True),
    "dare_linear, one model": Case(
        _merge("dare_linear", ("tuned-0", {"weight": 1.0, "density": 0.3})), random=True
    ),
    "dare_ties": Case(_merge("dare_ties", *_three(**_W, density=[0.5] * 3)), random=True),
    "dare_ties, normalize": Case(
        _merge("dare_ties", *_three(**_W, density=[0.5, 0.2, 0.7]), normalize=True), random=True
    ),
    "dare_linear, no rescale": Case(
        _merge("dare_linear", *_three(**_W, density=[0.3] * 3), rescale=False), random=True
    ),
    "della": Case(
        _merge("della", *_three(**_W, density=[0.5] * 3, epsilon=[0.2] * 3)), random=True
    ),
    "della_linear": Case(
        _merge("della_linear", *_three(**_W, density=[0.4] * 3, epsilon=[0.1] * 3)), random=True
    ),
    "della, no rescale": Case(
        _merge("della", *_three(**_W, density=[0.5] * 3, epsilon=[0.2] * 3), rescale=False),
        random=True,
    ),
}
