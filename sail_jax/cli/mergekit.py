"""Maps the options of `mergekit-yaml` to `sail-jax merge`, or explains why they are ignored.

A command line from a mergekit tutorial runs unchanged. The table `OPTIONS` contains a row for each
option: the argument that it sets, or the note that is printed.
"""

import argparse
import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from sail_jax.cli.options import Parser, natural, reader, seed
from sail_jax.cli.progress import fitted, say

if TYPE_CHECKING:
    from sail_jax.checkpoint.recipe.recipes import Recipe


class Answer(NamedTuple):
    """The effect of an option.

    Attributes:
      sets: The argument that it sets, and its value; `...` stands for the value on the command
        line.
      note: The line to print; "" for none.
      refused: The reason for refusing it; "" if it is accepted.
    """

    sets: tuple[str, Any] | None = None
    note: str = ""
    refused: str = ""


class Option(NamedTuple):
    """An option of `mergekit-yaml`.

    Attributes:
      flags: Its names.
      help: Its effect here.
      given: The effect of the option.
      without: The effect of its counterpart `--no-...`; None if there is none.
      type: The reader of its value; None for flags.
      metavar: The name of the value in the help.
    """

    flags: tuple[str, ...]
    help: str
    given: Answer
    without: Answer | None = None
    type: Callable[[str], Any] | None = None
    metavar: str | None = None


def _parameters(text: str) -> int:
    """Parses a whole number with k, m or b as its unit; 0 returns a limit that no file reaches.

    According to mergekit's help the unit is parameters, but its writer counts bytes, as this
    function does.

    >>> _parameters("1B"), _parameters("500m"), _parameters("20000")
    (1000000000, 500000000, 20000)
    """
    match = re.fullmatch(r"([0-9]{1,15})([kmb]?)", text.lower())
    if match is None:
        raise ValueError
    return int(match[1]) * {"": 1, "k": 10**3, "m": 10**6, "b": 10**9}[match[2]] or sys.maxsize


parameters = reader(
    _parameters, bool, "a whole number such as 1B or 500M (--shard-size takes 1.5GB)"
)


_DONE = Answer()
_PLACE = "tensors are read into main memory piece by piece, within --max-memory"
_WRITES = "each of --threads writes its tensors while others are read"


def _pair(name: str, help: str, given: Answer = _DONE, without: Answer = _DONE) -> Option:
    """Makes the names of a flag and its counterpart `--no-...`."""
    return Option((f"--{name}",), help, given, without)


def _switch(name: str, help: str) -> Option:
    """Makes a pair of flags that sets the argument with its name."""
    argument = name.replace("-", "_")
    return _pair(name, help, Answer((argument, True)), Answer((argument, False)))


def _value(
    flags: str, argument: str, help: str, type: Callable[[str], Any] = str, metavar: str = "N"
) -> Option:
    """Makes an option that sets an argument to its value."""
    return Option(tuple(flags.split()), help, Answer((argument, ...)), None, type, metavar)


def _idle(
    flag: str, why: str, type: Callable[[str], Any] | None = None, metavar: str | None = None
) -> Option:
    """Makes an option without effect here, with the reason."""
    note = Answer(note=f"has no effect: {why}")
    # A flag with two dashes has a counterpart, which requests the default behaviour.
    without = _DONE if type is None and flag.startswith("--") else None
    return Option((flag,), f"no effect: {why}", note, without, type, metavar)


OPTIONS = (
    _switch(
        "allow-crimes",
        "merge networks of other architectures, and outputs that contradict their config.json",
    ),
    _pair(
        "unsafe-truncate-embeddings",
        "refused: the recipe's tokenizer matches rows by their tokens",
        Answer(
            refused="rows cannot be cut off by number; 'tokenizer: {source: base}' or "
            "'{source: union}' in the recipe matches them by their tokens"
        ),
    ),
    _idle("--trust-remote-code", "code in a checkpoint is never run"),
    _value(
        "--transformers-cache",
        "hub_cache",
        "the folder of models from the Hub, like the variable HF_HUB_CACHE",
        metavar="DIR",
    ),
    _idle(
        "--lora-merge-cache",
        "adapters are merged while tensors are read, and not stored",
        str,
        "DIR",
    ),
    _idle(
        "--lora-merge-dtype",
        "adapters are merged in float32 or better, without rounding in between",
        str,
        "NAME",
    ),
    _value(
        "--random-seed",
        "random_seed",
        "the seed of random methods, instead of the recipe's seed",
        seed,
    ),
    _idle("-v", "--plan prints what happens to every tensor"),
    _switch("quiet", "show progress (the default)"),
    _pair(
        "cuda",
        "compute on the first CUDA device; by default on JAX's default device",
        Answer(("device", "cuda")),
    ),
    _value(
        "--device",
        "device",
        "the device that computes: cpu, cuda, cuda:1, tpu, or auto for JAX's default device",
        metavar="NAME",
    ),
    _idle("--low-cpu-memory", _PLACE),
    _pair(
        "lazy-unpickle",
        "always on; --allow-pickle reads PyTorch's files and never runs code in them",
        without=Answer(note="has no effect: pickles are parsed tensor by tensor, and never run"),
    ),
    _idle("--read-to-gpu", _PLACE),
    _idle("--multi-gpu", "one device computes; the --threads workers read and write"),
    _value("--num-threads -j", "threads", "the same as --threads", natural),
    Option(
        ("--gpu-rich",),
        "the same as --cuda",
        Answer(("device", "cuda"), note=f"works as --cuda here, because {_PLACE}"),
    ),
    _idle("--async-write", _WRITES),
    _idle("--write-threads", _WRITES, natural, "N"),
    _value(
        "--out-shard-size",
        "shard_bytes",
        "--shard-size in mergekit's notation: 1B is 1GB, and 0 is unlimited",
        parameters,
        "SIZE",
    ),
    _switch(
        "copy-tokenizer",
        "copy the tokenizer's files (the default); files from the recipe's tokenizer are written "
        "regardless",
    ),
    _pair("clone-tensors", "always on: a tensor that is used twice is written twice"),
    _switch("write-model-card", "write README.md and recipe.yaml (the default)"),
    _pair(
        "safe-serialization",
        "always on: pickles are never written",
        without=Answer(refused="pickles are never written; leave it out, or choose a --format"),
    ),
)
"""The options of `mergekit-yaml` 0.1.5, in the order of its help."""


class _Given(argparse.Action):
    """Applies a row of the table, which argparse keeps as the action's `const`."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        flag = str(option_string)
        option: Option = self.const
        without = option.without is not None and flag.startswith("--no-")
        answer = option.without if without else option.given
        assert answer is not None
        if answer.refused:
            parser.error(f"{flag}: {answer.refused}")
        if answer.sets is not None:
            name, value = answer.sets
            setattr(namespace, name, values if value is ... else value)
        if answer.note:
            namespace.answers = {**namespace.answers, flag: answer.note}


def add_options(parser: Parser) -> None:
    """Adds the options of `mergekit-yaml` to a command's options.

    Args:
      parser: The parser of the command, whose existing flags are kept.
    """
    parser.set_defaults(
        answers={}, allow_crimes=False, random_seed=None, device=None, hub_cache=None,
        copy_tokenizer=True, write_model_card=True,
    )  # fmt: skip
    group = parser.add_argument_group("options of mergekit-yaml")
    for i, option in enumerate(OPTIONS):
        pair = [] if option.without is None else [f"--no-{option.flags[0][2:]}"]
        flags = [f for f in (*option.flags, *pair) if f not in parser._option_string_actions]
        group.add_argument(
            *flags, action=_Given, dest=f"mergekit_{i}", const=option, help=option.help,
            nargs=None if option.type else 0, type=option.type or str, metavar=option.metavar,
            default=argparse.SUPPRESS,
        )  # fmt: skip


def answering(
    run: Callable[[argparse.Namespace], None],
) -> Callable[[argparse.Namespace], None]:
    """Makes a command print one line for each option without effect.

    Args:
      run: Runs the command.

    Returns:
      A function that prints these lines, sets the folder of the Hub, and runs the command.
    """

    def answered(args: argparse.Namespace) -> None:
        for flag, note in args.answers.items():
            say(fitted(f"note: {flag} {note}"))
        if args.hub_cache is None:
            run(args)
            return
        before = os.environ.get("HF_HUB_CACHE")
        # huggingface_hub reads the variable when it is first imported, which happens later.
        os.environ["HF_HUB_CACHE"] = args.hub_cache
        try:
            run(args)
        finally:
            os.environ.pop("HF_HUB_CACHE")
            if before is not None:
                os.environ["HF_HUB_CACHE"] = before

    return answered


def seeded(recipe: "Recipe", seed: int | None) -> "Recipe":
    """Replaces the seed of a recipe by the seed on the command line.

    Args:
      recipe: The recipe.
      seed: The seed; None leaves the recipe unchanged.

    Returns:
      The recipe with that seed. A comment at the top of its text states the seed.
    """
    if seed is None or seed == recipe.seed:
        return recipe
    if "seed" in recipe.node.value:
        say(f"note: --random-seed {seed} replaces seed {recipe.seed} of the recipe")
    text = f"# merged with --random-seed {seed}\n{recipe.text}"
    return recipe.model_copy(update={"seed": seed, "text": text})


@contextlib.contextmanager
def on_device(name: str | None) -> Iterator[None]:
    """Makes JAX compute on a device during the block.

    Args:
      name: A platform with an optional number, such as cpu or cuda:1; None or auto for the default.

    Yields:
      Nothing.

    Raises:
      ValueError: If JAX does not have this device.
    """
    if name in (None, "auto"):
        yield
        return
    import jax

    match = re.fullmatch(r"([a-z]+)(?::([0-9]{1,4}))?", name)
    try:
        if match is None:
            raise ValueError(name)
        device = jax.local_devices(backend=match[1])[int(match[2] or 0)]
    # JAX raises a RuntimeError for an unknown platform.
    except (RuntimeError, IndexError, ValueError) as error:
        there = ", ".join(f"{device.platform}:{device.id}" for device in jax.local_devices())
        raise ValueError(
            f"no device {name}: JAX has {there} here; install JAX for the other device, and add "
            "it to JAX_PLATFORMS if that variable is set"
        ) from error
    before = jax.config.values["jax_default_device"]
    try:
        jax.config.update("jax_default_device", device)
        yield
    finally:
        jax.config.update("jax_default_device", before)
