"""What all comparisons with other programs share: their form, running sail-jax, and tolerances."""

import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

# The folder of packages for images: transformers would use them wherever they are installed.
IMAGES = Path(sys.prefix) / "images"
EPS = torch.finfo(torch.float32).eps


class Outcome(NamedTuple):
    """What a comparison found.

    Attributes:
      difference: The largest difference between the two outputs.
      scale: The largest entry of the outputs.
      tolerance: The largest difference that rounding explains.
      note: What else was seen, for the table; "" for nothing.
    """

    difference: float
    scale: float
    tolerance: float
    note: str


class Case(NamedTuple):
    """A comparison.

    Attributes:
      name: Its name within its subject.
      what: What is compared, in one sentence.
      run: Runs it in an empty folder. It raises an exception if there is nothing to compare.
    """

    name: str
    what: str
    run: Callable[[Path], Outcome]


def sail_jax(*arguments: str | Path) -> str:
    """Runs sail-jax, the command in the environment variable SAIL_JAX if it is set.

    Args:
      *arguments: The arguments of the command line.

    Returns:
      What it printed.

    Raises:
      RuntimeError: If it failed; the message is what it printed.
    """
    command = [*shlex.split(os.environ.get("SAIL_JAX", "sail-jax")), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr.strip() or f"exit code {done.returncode}")
    return done.stdout + done.stderr


def loaded(folder: Path) -> Any:
    """Loads a model by the class that its config names, and checks that all its weights were there.

    Args:
      folder: The folder of the model.

    Returns:
      The model, ready to be run.

    Raises:
      RuntimeError: If a weight was missing, unknown, or of another shape.
    """
    kind = getattr(transformers, transformers.AutoConfig.from_pretrained(folder).architectures[0])
    model, about = kind.from_pretrained(folder, output_loading_info=True, dtype=torch.float32)
    for how in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if about[how]:
            raise RuntimeError(f"{folder.name}: {how} {sorted(map(str, about[how]))[:3]}")
    return model.eval()


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    """Runs a model on fixed inputs: all its tokens, or random images.

    Args:
      model: The model.

    Returns:
      Its logits.
    """
    config = model.config
    if hasattr(config, "image_size"):
        shape = (2, config.num_channels, config.image_size, config.image_size)
        pixels = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        return model(pixel_values=pixels).logits
    rows = model.get_input_embeddings().weight.shape[0]
    ids = torch.randperm(rows, generator=torch.Generator().manual_seed(0))
    return model(input_ids=ids[None]).logits


@torch.no_grad()
def rounding(model: Any, roundings: int) -> float:
    """Measures how far rounding of weights moves a model's logits.

    Every entry of every weight is moved by up to one rounding error of the weight's largest entry,
    at random. Where two programs agree about weights but for some such errors, their logits differ
    by at most that many times as much.

    Args:
      model: The model; it is changed.
      roundings: How many rounding errors apart the weights may be.

    Returns:
      The tolerance for logits.
    """
    before = logits(model)
    random = torch.Generator().manual_seed(1)
    for weight in model.parameters():
        moved = 2 * torch.rand(weight.shape, generator=random) - 1
        weight += EPS * weight.abs().max() * moved
    return roundings * float((logits(model) - before).abs().max())
