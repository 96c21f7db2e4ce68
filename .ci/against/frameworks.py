"""Trees of MaxText and Tunix.

Each case is a small model with random weights, saved by its class in transformers. The code of
`sail-jax convert` makes a tree from it. The decoder of MaxText or Tunix computes logits from the
tree, and the class computes logits from the folder. (The decoder is written in JAX from the public
sources, in `tests/helpers/framework_trees.py`.) The tree is then converted back, and the class
loads it again. The difference is the larger of both. The last column counts the tensors that come
back bit for bit, in float32, and in bfloat16 through a tree in float32.

Run alone, `python .ci/against/frameworks.py [CASE ...]` prints a line for each case.
"""

import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
import transformers
from cases import Case, Outcome, loaded, logits, rounding

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests" / "helpers"))

import framework_trees as trees  # noqa: E402

from sail_jax.checkpoint import (  # noqa: E402
    convert_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from sail_jax.checkpoint.formats.nesting import nested  # noqa: E402

# A weight that is scaled is rounded twice, there and back. Programs that round in another order
# differ by about as much again.
_ROUNDINGS = 4


def _saved(kind: str, folder: Path) -> dict[str, Any]:
    """Saves a small model, and returns what it is made with."""
    config = trees.config(kind)
    entries = {key: value for key, value in config.items() if key != "model_type"}
    made = transformers.AutoConfig.for_model(config["model_type"], **entries)
    model = transformers.AutoModelForCausalLM.from_config(made, attn_implementation="eager")
    weights = {name: torch.tensor(x) for name, x in trees.tensors(config).items()}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise RuntimeError(f"{kind}: missing {missing}, unexpected {unexpected}")
    model.save_pretrained(folder)
    return config


def _tree(folder: Path) -> Any:
    """The leaves of a tree, in nested dictionaries."""
    arrays = load_checkpoint(folder)

    def filled(node: Any) -> Any:
        if isinstance(node, dict):
            return {key: filled(child) for key, child in node.items()}
        return arrays[node]

    return filled(nested(arrays))


def _compared(kind: str, framework: str, options: dict[str, Any], folder: Path) -> Outcome:
    """Compares logits of the class, of the tree, and of the class on the way back."""
    config = _saved(kind, folder / "hf")
    convert_checkpoint(folder / "hf", folder / "tree", framework, **options)
    convert_checkpoint(folder / "tree", folder / "back", "hugging-face")
    model = loaded(folder / "hf")
    want, back = logits(model), logits(loaded(folder / "back"))
    ids = torch.randperm(config["vocab_size"], generator=torch.Generator().manual_seed(0)).numpy()
    tree = _tree(folder / "tree")
    if framework == "tunix":
        ours = trees.tunix(tree, ids, config)
    else:
        ours = trees.maxtext(tree, ids, config, options.get("param_scan_axis", 1))
    ours = torch.tensor(np.asarray(ours)[:, : config["vocab_size"]])
    difference = max(float((x - want).abs().max()) for x in (ours, back))

    before, after = load_checkpoint(folder / "hf"), load_checkpoint(folder / "back")
    exact = sum(np.array_equal(after[name], x) for name, x in before.items())
    short = {name: x.astype(ml_dtypes.bfloat16) for name, x in before.items()}
    save_checkpoint(folder / "short", short)
    given = {"config": folder / "hf"}
    convert_checkpoint(
        folder / "short", folder / "long", framework, dtype="float32", **given, **options
    )
    convert_checkpoint(folder / "long", folder / "again", "hugging-face", dtype="bfloat16")
    again = load_checkpoint(folder / "again")
    same = sum(np.array_equal(again[name], x) for name, x in short.items())
    note = f"{exact} of {len(before)} tensors, in bfloat16 {same}"
    return Outcome(difference, float(want.abs().max()), rounding(model, _ROUNDINGS), note)


def _cases() -> Iterator[Case]:
    """The cases: all kinds in each framework, and stacked as each may be."""
    for n, kind in enumerate(trees.CONFIGS):
        layouts: dict[str, dict[str, Any]] = {"maxtext": {"param_scan_axis": n % 2}}
        layouts["maxtext, layers apart"] = {"scan_layers": False, "vocab_size": 16}
        if kind != "mistral":
            layouts["tunix"] = {}
        for name, options in layouts.items():
            yield Case(
                f"{kind}, {name}",
                "logits of the tree, and of the folder on the way back",
                partial(_compared, kind, name.partition(",")[0], options),
            )


CASES = list(_cases())


if __name__ == "__main__":
    for case in CASES:
        if not sys.argv[1:] or case.name in sys.argv[1:]:
            with tempfile.TemporaryDirectory() as place:
                print(case.name, case.run(Path(place)), flush=True)
