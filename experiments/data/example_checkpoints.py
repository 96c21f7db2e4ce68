"""Checkpoints and recipes to try merging with, made offline in seconds.

A network learns to read the bundled handwritten digits. Three copies of it are fine-tuned: on
digits rotated in one direction, on digits rotated in the other, and on only the larger digits. The
four are written as safetensors folders, with a recipe for every merging method in mergekit's
grammar:

    DIR/base/  DIR/expert-0/  DIR/expert-1/  DIR/expert-2/  DIR/recipes/METHOD.yaml

The folder also has held-out digits of each task, and a function that scores a network on them, for
`sail-jax search`:

    DIR/held_out/TASK.npz  DIR/digits.py
"""

import contextlib
import functools
import io
import itertools
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.data import image_tasks
from experiments.data.registry import ImagePool
from sail_jax import disk
from sail_jax.cli.progress import show

RECORD = "examples.json"
TASKS = ("rotate -20", "rotate 20", "classes 5-9")
HELD_OUT = ("upright", *TASKS)
MODELS = ("base", *(f"expert-{i}" for i in range(len(TASKS))))
INPUTS, WIDTHS, CLASSES = 64, (128, 128), 10
_LAYERS = (*(f"layers.{i}" for i in range(len(WIDTHS))), "out")
Tensors = Mapping[str, np.ndarray]


def make(folder: Path, *, seed: int = 0, force: bool = False) -> dict[str, dict[str, float]]:
    """Trains the models, writes them with their recipes, and scores them.

    Args:
      folder: The folder. It is created if it is missing.
      seed: The seed of the training, and of the choice of held-out digits.
      force: Whether the folder may already contain files. Earlier examples in it are then replaced,
        and other files are kept.

    Returns:
      For each model, the held-out accuracy on each of `HELD_OUT`, from 0 to 1.

    Raises:
      RefusedError: If `folder` is a file, or is not empty and `force` is false. It is raised before
        any work.
      StoreError: If a file cannot be written.
    """
    with filled(folder, force) as part:
        models = dict(zip(MODELS, train(seed), strict=True))
        for name, tensors in models.items():
            save(part / name, tensors)
        with disk.explained("write to", folder):
            (part / "recipes").mkdir()
            for method, text in recipes(folder.resolve()).items():
                (part / "recipes" / f"{method}.yaml").write_text(text)
            _save_held_out(part, seed)
            # The record is removed first and written last, because in between the folder contains a
            # mixture of old and new files.
            (folder / RECORD).unlink(missing_ok=True)
    record = {"format": disk.FORMAT, "seed": seed, "tasks": list(TASKS)}
    disk.write_record(folder / RECORD, record)
    return {name: evaluate(folder / name, seed=seed) for name in MODELS}


@contextlib.contextmanager
def filled(folder: Path, force: bool) -> Iterator[Path]:
    """Creates a folder of examples, as a context manager: its files appear when all are written.

    Args:
      folder: The folder. It is created if it is missing.
      force: Whether it may already contain files. New files replace those with the same names.

    Yields:
      A temporary folder to write into.

    Raises:
      RefusedError: If `folder` is a file, or is not empty and `force` is false.
      StoreError: If a file cannot be written.
    """
    _admit(folder, force)
    part = folder / f".examples.{os.getpid()}.part"
    try:
        with disk.explained("write to", folder):
            folder.mkdir(parents=True, exist_ok=True)
            part.mkdir()
        yield part
        with disk.explained("write to", folder):
            for made in sorted(part.iterdir()):
                shutil.rmtree(folder / made.name, ignore_errors=True)
                os.replace(made, folder / made.name)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def make_llamas(folder: Path, *, seed: int = 0, force: bool = False) -> None:
    """Writes three small Llamas, a base and two models close to it, and a file for `upcycle`.

    Their weights are random: they show how tensors change, but do not model text. The prompts in
    the file are lists of tokens, because there is no tokenizer.

    Args:
      folder: The folder. It is created if it is missing.
      seed: The seed of the weights.
      force: Whether the folder may already contain files.

    Raises:
      RefusedError: If `folder` is a file, or is not empty and `force` is false.
      StoreError: If a file cannot be written.
    """
    from sail_jax.checkpoint.output.writer import save_checkpoint

    _admit(folder, force)
    width, hidden, vocab = 32, 48, 64
    block = dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), (width, width))
    shapes = {f"self_attn.{name}": shape for name, shape in block.items()}
    shapes |= {f"mlp.{name}_proj": (hidden, width) for name in ("gate", "up")}
    shapes |= {"mlp.down_proj": (width, hidden)}
    shapes |= {"input_layernorm": (width,), "post_attention_layernorm": (width,)}
    shapes = {f"model.layers.{i}.{name}": shape for i in range(2) for name, shape in shapes.items()}
    shapes |= dict.fromkeys(("model.embed_tokens", "lm_head"), (vocab, width))
    shapes["model.norm"] = (width,)
    rng = np.random.default_rng(seed)
    base = {
        f"{name}.weight": np.ones(shape, np.float32)
        if len(shape) == 1
        else rng.standard_normal(shape, np.float32) / np.float32(width**0.5)
        for name, shape in shapes.items()
    }
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": vocab}
    config |= {"hidden_size": width, "intermediate_size": hidden, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 4, "torch_dtype": "float32"}
    for name in ("base", "expert-0", "expert-1"):
        far = np.float32(0 if name == "base" else 0.02)
        tensors = {k: x + far * rng.standard_normal(x.shape, np.float32) for k, x in base.items()}
        text = json.dumps(config, indent=2).encode() + b"\n"
        save_checkpoint(folder / name, tensors, extras={"config.json": text})
    place = folder.resolve()
    (folder / "mixture.yaml").write_text(
        f"base_model: {place / 'base'}\n"
        "gate_mode: hidden\n"
        "experts:\n"
        f"- source_model: {place / 'expert-0'}\n"
        "  positive_prompts: [[1, 17, 4, 9], [1, 23]]\n"
        f"- source_model: {place / 'expert-1'}\n"
        "  positive_prompts: [[1, 40, 41, 42]]\n"
        "  negative_prompts: [[1, 17]]\n"
    )


def _admit(folder: Path, force: bool) -> None:
    """Rejects a file, and a folder that is not empty unless `force` is given."""
    if folder.exists() and not folder.is_dir():
        raise disk.RefusedError(f"{folder} is not a directory; choose another")
    if folder.is_dir() and any(folder.iterdir()) and not force:
        raise disk.RefusedError(f"{folder} is not empty; choose another, or replace with --force")


@functools.lru_cache(maxsize=1)
def _tasks(seed: int) -> tuple[image_tasks.Task, image_tasks.Task]:
    """Returns the digits to learn from, and the held-out digits, for each task of `HELD_OUT`.

    The leaves are `(task, example, ...)`.
    """
    pool = ImagePool().pool(seed)
    split = image_tasks.split(seed, 1, examples=len(pool.labels), train=1300, validation=0)
    tasks = [image_tasks.of(pool, name) for name in HELD_OUT]
    parts = (image_tasks.pick(tasks, index) for index in (split.train, split.test))
    learn, exam = (image_tasks.Task(*(leaf[0] for leaf in part)) for part in parts)
    return learn, exam


def train(seed: int = 0) -> list[dict[str, np.ndarray]]:
    """Trains the base on upright digits, then fine-tunes an expert for each of `TASKS`.

    Training is written in NumPy: importing JAX, tracing and compiling take longer than these 800
    steps of a small network.

    Args:
      seed: The seed of the initial weights, the batches and the split of the digits.

    Returns:
      The tensors of each model of `MODELS`, by name, in float32.
    """
    learn, _ = _tasks(seed)
    rng = np.random.default_rng(seed)
    widths = (INPUTS, *WIDTHS, CLASSES)
    start = {}
    for layer, (inputs, outputs) in zip(_LAYERS, itertools.pairwise(widths), strict=True):
        kernel = rng.standard_normal((inputs, outputs), np.float32) / np.float32(inputs**0.5)
        start |= {f"{layer}.kernel": kernel, f"{layer}.bias": np.zeros(outputs, np.float32)}
    base, *experts = (image_tasks.Task(*leaves) for leaves in zip(*learn, strict=True))
    models = [_descend(start, base, rng)]
    return models + [_descend(models[0], task, rng) for task in experts]


def _descend(
    start: Tensors, task: image_tasks.Task, rng: np.random.Generator, steps: int = 200
) -> dict[str, np.ndarray]:
    """Trains by gradient descent with momentum, on batches of 128 examples.

    The loss is the mean cross-entropy of the examples of a batch that belong to the task.
    """
    params = {name: value.copy() for name, value in start.items()}
    memory = {name: np.zeros_like(value) for name, value in start.items()}
    for batch in rng.integers(0, len(task.labels), (steps, 128)):
        member, labels = task.member[batch].astype(np.float32), task.labels[batch]
        inputs: list[Any] = [task.images[batch]]
        for layer in _LAYERS[:-1]:
            inputs.append(np.maximum(_dense(params, layer, inputs[-1]), 0))
        logits = _dense(params, _LAYERS[-1], inputs[-1])
        shares = np.exp(logits - logits.max(1, keepdims=True))
        shares /= shares.sum(1, keepdims=True)
        shares[np.arange(len(batch)), labels] -= 1
        # The gradient with respect to each layer's output, from the last layer back.
        slope = shares * (member / member.sum())[:, None]
        for layer, x in zip(reversed(_LAYERS), reversed(inputs), strict=True):
            gradient = {f"{layer}.kernel": x.T @ slope, f"{layer}.bias": slope.sum(0)}
            slope = (slope @ params[f"{layer}.kernel"].T) * (x > 0)
            for name, change in gradient.items():
                memory[name] = np.float32(0.9) * memory[name] + change
                params[name] -= np.float32(0.05) * memory[name]
    return params


def _dense(params: Tensors, layer: str, x: Any) -> np.ndarray:
    """Applies a linear layer."""
    return x @ params[f"{layer}.kernel"] + params[f"{layer}.bias"]


def evaluate(checkpoint: str | Path, *, seed: int = 0) -> dict[str, float]:
    """Scores a model on digits that no example was trained on: upright ones, and each of `TASKS`.

    Args:
      checkpoint: One of the examples, a merge of them, or a grown one. Its hidden layers may have
        any width and number.
      seed: The seed of the examples, which determines the held-out digits.

    Returns:
      The accuracy on each of `HELD_OUT`, from 0 to 1.

    Raises:
      StoreError: If it cannot be read, or is not such a model.
    """
    from sail_jax.checkpoint.formats.open import load_checkpoint

    tensors = load_checkpoint(checkpoint)
    depth = len([name for name in tensors if re.fullmatch(r"layers\.\d+\.bias", name)])
    layers = [*(f"layers.{i}" for i in range(depth)), "out"]
    widths = [INPUTS, *(tensors.get(f"{x}.bias", np.empty(0)).size for x in layers[:-1]), CLASSES]
    expected: dict[str, tuple[int, ...]] = {}
    for layer, shape in zip(layers, itertools.pairwise(widths), strict=True):
        expected |= {f"{layer}.kernel": shape, f"{layer}.bias": shape[1:]}
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    for name in sorted(shapes.keys() | expected.keys()):
        if shapes.get(name) != expected.get(name):
            raise disk.StoreError(
                f"{checkpoint} is not a model of the examples: {name} is "
                f"{shapes.get(name, 'missing')}, expected {expected.get(name, 'no such tensor')}"
            )
    _, exam = _tasks(seed)
    params = {name: tensor.astype(np.float32) for name, tensor in tensors.items()}
    x = exam.images.astype(np.float32)
    for layer in layers:
        x = _dense(params, layer, x)
        x = x if layer == "out" else np.maximum(x, 0)
    right = (x.argmax(-1) == exam.labels) & exam.member
    grades = right.sum(-1) / exam.member.sum(-1)
    return dict(zip(HELD_OUT, grades.tolist(), strict=True))


SCORE = '''"""Scores networks that read digits, for `sail-jax search --score ex.digits:accuracy`."""

import jax
import jax.numpy as jnp


def accuracy(params, batch):
    """1 for each digit that is read right, 0 for each other one."""
    x = batch["inputs"]
    depth = sum(name.startswith("layers.") for name in params) // 2
    for k in range(depth):
        x = jax.nn.relu(x @ params[f"layers.{k}.kernel"] + params[f"layers.{k}.bias"])
    logits = x @ params["out.kernel"] + params["out.bias"]
    return (logits.argmax(-1) == batch["labels"]).astype(jnp.float32)
'''


def _save_held_out(folder: Path, seed: int) -> None:
    """Writes the held-out digits of each task, and the function that scores networks on them."""
    _, exam = _tasks(seed)
    (folder / "held_out").mkdir()
    for k, task in enumerate(HELD_OUT):
        chosen, file = exam.member[k], io.BytesIO()
        images = exam.images[k] if exam.images.ndim == 3 else exam.images
        np.savez(
            file,
            inputs=images[chosen].astype(np.float32),
            labels=np.broadcast_to(exam.labels, exam.member.shape)[k][chosen].astype(np.int32),
        )
        (folder / "held_out" / f"{task.replace(' ', '_')}.npz").write_bytes(file.getvalue())
    (folder / "digits.py").write_text(SCORE)


def save(folder: Path, tensors: Tensors) -> None:
    """Writes a model as a checkpoint folder, with model.safetensors and config.json.

    Args:
      folder: The folder.
      tensors: The tensors by name, as `train` returns them.

    Raises:
      StoreError: If it cannot be written.
    """
    from sail_jax.checkpoint.output.writer import save_checkpoint

    depth = sum(name.endswith(".kernel") for name in tensors) - 1
    config = {
        "model_type": "mlp",
        "architectures": ["MLP"],
        "inputs": len(tensors["layers.0.kernel"]),
        "widths": [tensors[f"layers.{i}.bias"].size for i in range(depth)],
        "torch_dtype": "float32",
    }
    text = json.dumps(config, indent=2).encode() + b"\n"
    save_checkpoint(folder, tensors, extras={"config.json": text})


def print_grades(grades: Mapping[str, Mapping[str, float]]) -> None:
    """Prints held-out accuracies: a row for each model, a column for each task, and the mean.

    Args:
      grades: For each model, its accuracies by task: all of `HELD_OUT`, in that order.
    """
    width = max(len("held-out accuracy"), *map(len, grades))
    columns = [*HELD_OUT, "mean"]
    show("  ".join([f"{'held-out accuracy':{width}}", *(f"{name:>10}" for name in columns)]))
    for name, accuracies in grades.items():
        values = [*accuracies.values(), float(np.mean(list(accuracies.values())))]
        show("  ".join([f"{name:{width}}", *(f"{value:10.3f}" for value in values)]))


def _sources(folder: Path, names: Sequence[str], per_model: str) -> str:
    """Makes the part of a recipe that lists the models, with the parameters of each."""
    lines = ["models:"]
    for name in names:
        lines.append(f"  - model: {json.dumps(str(folder / name))}")
        if per_model:
            lines.append(f"    parameters: {{{per_model}}}")
    return "\n".join(lines)


# By method: its description, its models, whether the recipe has a base, the parameters of each
# model, and the parameters of the whole merge.
_EXPERTS = MODELS[1:]
_RECIPES: dict[str, tuple[str, Sequence[str], bool, str, str]] = {
    "linear": ("Weighted mean of the parameters.", _EXPERTS, False, "weight: 1", ""),
    "task_arithmetic": (
        "The base plus what each expert learned (Ilharco et al. 2023).",
        *(_EXPERTS, True, "weight: 0.4", ""),
    ),
    "ties": (
        "Trim, elect a sign, average those who agree (Yadav et al. 2023).",
        *(_EXPERTS, True, "weight: 1, density: 0.3", "scale: 1.0"),
    ),
    "dare_linear": (
        "Drop entries of the deltas at random and rescale the rest (Yu et al. 2024).",
        *(_EXPERTS, True, "weight: 0.4, density: 0.5", ""),
    ),
    "dare_ties": (
        "Drop at random, elect a sign (Yu et al. 2024).",
        *(_EXPERTS, True, "weight: 0.4, density: 0.5", ""),
    ),
    "della": (
        "Drop small entries more often, elect a sign, average (Deep et al. 2024).",
        *(_EXPERTS, True, "weight: 1, density: 0.5, epsilon: 0.2", ""),
    ),
    "della_linear": (
        "Drop small entries more often, add (Deep et al. 2024).",
        *(_EXPERTS, True, "weight: 0.4, density: 0.5, epsilon: 0.2", ""),
    ),
    "breadcrumbs": (
        "Without the largest and the smallest entries (Davari and Belilovsky 2024).",
        *(_EXPERTS, True, "weight: 0.4, density: 0.9, gamma: 0.01", ""),
    ),
    "breadcrumbs_ties": (
        "Breadcrumbs with an elected sign.",
        *(_EXPERTS, True, "weight: 0.4, density: 0.9, gamma: 0.01", ""),
    ),
    "sce": (
        "Select where the experts vary, weigh by energy, erase minorities (Wan et al. 2024).",
        *(_EXPERTS, True, "", "select_topk: 0.5"),
    ),
    "model_stock": ("By the angle between the experts (Jang et al. 2024).", _EXPERTS, True, "", ""),
    "slerp": (
        "Along the arc between two models; per kind of tensor, along the depth.",
        ("expert-0", "expert-1"),
        True,
        "",
        "\n  t:\n    - {filter: bias, value: 0.5}\n    - value: [0.3, 0.7]",
    ),
    "nuslerp": (
        "Along the arc between what two experts learned.",
        *(_EXPERTS[:2], True, "weight: 0.5", ""),
    ),
    "multislerp": ("Mean direction of several models.", _EXPERTS, False, "weight: 1", ""),
    "karcher": ("Mean of several directions on the sphere.", _EXPERTS, False, "", ""),
    "nearswap": ("Towards an expert where it is near.", _EXPERTS[:1], True, "", "t: 0.01"),
    "arcee_fusion": ("Only the important changes of an expert.", _EXPERTS[:1], True, "", ""),
    "ram": (
        "Where several experts moved, their mean; where one did, its change.",
        *(_EXPERTS, True, "", ""),
    ),
    "ramplus_tl": ("As ram, with unshared changes amplified.", _EXPERTS, True, "", ""),
    "passthrough": ("One model, multiplied by a number.", _EXPERTS[:1], False, "scale: 1.0", ""),
}


def recipes(folder: Path) -> dict[str, str]:
    """Writes a recipe for each merging method, in mergekit's grammar.

    Args:
      folder: The folder of the examples, which the recipes refer to. It does not have to exist.

    Returns:
      The texts of the recipes, in YAML, by method.
    """
    texts = {}
    for method, (about, names, based, per_model, shared) in _RECIPES.items():
        base = f"base_model: {json.dumps(str(folder / 'base'))}\n" if based else ""
        # mergekit's slerp uses one of its two models as its base.
        if method == "slerp":
            base = f"base_model: {json.dumps(str(folder / names[0]))}\n"
        parameters = ""
        if shared:
            parameters = "parameters:" + (shared if "\n" in shared else f"\n  {shared}") + "\n"
        texts[method] = (
            f"# {about}\nmerge_method: {method}\n{base}{_sources(folder, names, per_model)}\n"
            f"{parameters}dtype: float32\n"
        )
    return texts
