"""`sail-jax inspect A B [C ...]`: predicts how well some checkpoints merge."""

import itertools
from argparse import Namespace
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from sail_jax.cli import saving
from sail_jax.cli.kernels import remember_kernels
from sail_jax.cli.options import run_options
from sail_jax.cli.progress import say, show

if TYPE_CHECKING:
    from sail_jax.checkpoint.operations.trying import Trial
    from sail_jax.probe.tasks import Conflict

FIGURE, SCHEMA = "conflict.png", "sail-jax inspect pairs 1"
FEW = 40  # rows of a table of layers without --full


def run_pairs(args: Namespace) -> None:
    """Runs the command for two checkpoints or more.

    Args:
      args: The arguments of `sail-jax inspect`.

    Raises:
      ValueError: If an option is for one checkpoint only, or the checkpoints or the examples are
        incompatible.
    """
    from sail_jax.checkpoint import compare_checkpoints
    from sail_jax.checkpoint.operations import trying
    from sail_jax.checkpoint.operations.linearity import SCALES, measure_linearity
    from sail_jax.checkpoint.sources.grown import read_target
    from sail_jax.cli import compare_linearity

    saving.admit(args.json, SCHEMA)
    for option in ("spec", "draft"):
        if getattr(args, option):
            raise ValueError(f"--{option} takes one checkpoint, got {len(args.checkpoint)}")
    if args.linearity and args.data is None:
        raise ValueError("--linearity runs the models on examples: add --data FILE")
    if args.scales and not (args.linearity and args.base):
        raise ValueError("--scales applies to task vectors: add --base, --data and --linearity")
    config = None if args.config is None else read_target(args.config)
    examples = None if args.data is None else trying.read_examples(args.data)
    run = run_options(args)
    comparison = compare_checkpoints(
        args.checkpoint,
        args.base,
        allow_pickle=run.allow_pickle,
        offline=run.offline,
        select=run.select,
    )
    record = described(comparison)
    if examples is not None:
        remember_kernels()
        say(f"  the models and their average, on {len(examples.inputs)} examples")
        trial = trying.try_average(args.checkpoint, examples, config, run=run)
        about = {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in _items(trial)}
        record["data"] = {"file": str(args.data), "examples": len(examples.inputs), **about}
    if args.linearity and examples is not None:
        say("  features of merged weights and merged features, layer by layer")
        found = measure_linearity(
            args.checkpoint, examples, args.base, config, scales=args.scales or SCALES,
            every_layer=args.full, run=run,
        )  # fmt: skip
        record["linearity"] = compare_linearity.described(found)
    from sail_jax.cli import merge_odds

    record["verdict"] = merge_odds.verdict(record)
    show(render(record, full=args.full))
    saving.write(args.json, SCHEMA, record)
    if args.out is not None:
        from sail_jax.cli import compare_figure

        figures = {FIGURE: compare_figure.draw(record["groups"], len(comparison.models))}
        if args.linearity:
            figures[compare_linearity.FIGURE] = compare_linearity.draw(record["linearity"])
        saving.draw(args.out, figures)


def _items(trial: "Trial") -> Iterator[tuple[str, Any]]:
    """Yields the name and value of each known field of a trial."""
    return ((k, v) for k, v in trial._asdict().items() if v is not None)


def described(found: Any) -> dict[str, Any]:
    """Describes a comparison as JSON data: in total, by pair, by layer, and by layer and module.

    Args:
      found: A `Comparison` of checkpoints.

    Returns:
      The record, as --json writes it. Cosines outside `pairs` are means over the pairs of models.
      Task vectors and sign conflicts are included if there is a base.
    """
    from sail_jax.checkpoint.operations import comparing

    vectors = found.weights if found.tasks is None else found.tasks
    by_place: dict[tuple[str, str], list[int]] = {}
    for i, name in enumerate(found.tensors):
        by_place.setdefault(_place(name), []).append(i)

    def row(indices: list[int]) -> dict[str, Any]:
        pooled = comparing.pooled(vectors, found.sizes, indices)
        about = _said(pooled, found.tasks is not None)
        return {"parameters": int(found.sizes[indices].sum())} | about

    groups = [
        {"layer": layer, "module": module} | row(indices)
        for (layer, module), indices in by_place.items()
    ]
    layers: dict[str, list[int]] = {}
    for (layer, _), indices in by_place.items():
        layers.setdefault(layer, []).extend(indices)
    rows = [{"layer": layer} | row(indices) for layer, indices in layers.items()]
    k, total = len(found.models), found.weights.total
    record: dict[str, Any] = {
        "models": list(found.models),
        "base": found.base,
        "parameters": int(found.sizes.sum()),
        "norms": [float(x) for x in total.norms],
        "pairs": [
            {
                "models": [i, j],
                "weight cosine": float(total.cosines[i, j]),
                "equal": bool(found.equal[i, j]),
            }
            for i, j in itertools.combinations(range(k), 2)
        ],
        "weights": _said(total, False),
        "layers": rows,
        "groups": groups,
        "differences": list(found.differences),
        "contradictions": list(found.contradictions),
    }
    if found.tasks is not None:
        tasks = found.tasks.total
        norms = found.relative_norms
        base = float(np.sum(found.base_norms**2))
        record["tasks"] = _said(tasks, True) | {
            "relative norms": [float(x) for x in norms],
            "heterogeneity": float(tasks.heterogeneity) / max(base, 1e-300),
            # k independent fair signs all agree with probability 2 * 2^-k
            "unrelated sign conflict": 1 - 2.0 ** (1 - k),
        }
        for pair in record["pairs"]:
            pair["task cosine"] = float(tasks.cosines[tuple(pair["models"])])
    return record


def _said(conflict: "Conflict", tasks: bool) -> dict[str, float]:
    """Summarises a `Conflict`: the mean cosine over pairs and, with a base, sign conflicts."""
    upper = np.triu_indices(len(conflict.norms), 1)
    about = {"cosine": float(np.mean(conflict.cosines[upper]))}
    return about | ({"sign conflict": float(conflict.sign_conflict)} if tasks else {})


def _place(name: str) -> tuple[str, str]:
    """Returns the layer of a tensor ("" outside the layers) and its module."""
    from sail_jax.checkpoint.contents.layers import position

    place = position(name)
    layer, rest = ("", name) if place is None else (str(place.index), place.rest)
    module = rest.strip("./")
    for last in ("weight", "bias", "kernel", "scale", "embedding"):
        module = module.removesuffix(f".{last}").removesuffix(f"/{last}")
    return layer, module or rest


def render(record: Mapping[str, Any], full: bool = False) -> str:
    """Formats a record as text: models, pairs, layers, data, and the verdict.

    Args:
      record: The output of `described` with "verdict" and, after a trial, "data" and "linearity".
      full: Whether to show every layer and difference.

    Returns:
      Several lines.
    """
    from sail_jax.basis.spaces import table

    k, tasks = len(record["models"]), record.get("tasks")
    letters = [chr(ord("A") + i) if k <= 26 else f"M{i}" for i in range(k)]
    rows = [("", "model", "norm", *(["change / base"] if tasks else []))]
    for i, path in enumerate(record["models"]):
        change = [f"{tasks['relative norms'][i]:.2%}"] if tasks else []
        rows.append((letters[i], path, f"{record['norms'][i]:.5g}", *change))
    lines = [f"{k} models of {record['parameters']:,} parameters"]
    lines += [f"base: {record['base']}"] if tasks else []
    lines += ["", table(rows)]
    rows = [("pair", "cosine of weights", *(["cosine of changes"] if tasks else []))]
    for pair in record["pairs"]:
        which = "-".join(letters[i] for i in pair["models"])
        change = [f"{pair['task cosine']:+.3f}"] if tasks else []
        rows.append((which, f"{pair['weight cosine']:+.4f}", *change))
    lines += ["", table(rows)]
    if tasks:
        lines.append(
            f"\nsign conflict {tasks['sign conflict']:.3f} (unrelated: "
            f"{tasks['unrelated sign conflict']:.3f}); cosine of changes {tasks['cosine']:+.3f} "
            f"(unrelated: 0); heterogeneity {tasks['heterogeneity']:.3g} of the base's square"
        )
    else:
        lines += ["", "without --base there are no task vectors, sign conflicts or heterogeneity"]
    shown = record["layers"] if full else record["layers"][:FEW]
    rows = [("layer", "parameters", "cosine", *(["sign conflict"] if tasks else []))]
    for row in shown:
        change = [f"{row['sign conflict']:.3f}"] if tasks else []
        name = row["layer"] or "(outside)"
        rows.append((name, f"{row['parameters']:,}", f"{row['cosine']:+.3f}", *change))
    lines += ["", table(rows)]
    if len(shown) < len(record["layers"]):
        lines.append(f"and {len(record['layers']) - len(shown)} more: --full")
    if "data" in record:
        lines += ["", *_data(record["data"], letters)]
    if "linearity" in record:
        from sail_jax.cli import compare_linearity

        lines += ["", *compare_linearity.render(record["linearity"], letters, full)]
    lines += ["", *(f"differs: {line}" for line in record["differences"])][
        : 1 + (len(record["differences"]) if full else 12)
    ]
    lines += [f"contradicts: {line}" for line in record["contradictions"]]
    said = record["differences"] or record["contradictions"]
    return "\n".join([*lines, *([""] if said else []), *record["verdict"]])


def _data(data: Mapping[str, Any], letters: list[str]) -> list[str]:
    """Formats the result of a trial on examples."""
    lines = [f"{data['file']}, {data['examples']} examples:"]
    if "losses" in data:
        losses = ", ".join(f"{n} {x:.4f}" for n, x in zip(letters, data["losses"], strict=True))
        lines += [
            f"  loss: {losses}; average {data['average']:.4f}, ensemble {data['ensemble']:.4f}",
            f"  barrier between them {data['barrier']:.4f} nats",
        ]
    else:
        lines.append("  no labels, so no losses")
    lines.append(
        f"  the average's outputs compared with the models' mean: cosine {data['cosine']:.4f}, "
        f"coefficient {data['coefficient']:.4f}, gap {data['gap']:.2%}"
    )
    return lines
