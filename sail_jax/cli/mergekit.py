"""The options of `mergekit-yaml`: the effect of each in `sail-jax merge`, or why it has none.

A command line from a tutorial runs as it is. The table `OPTIONS` has a row for each option: the
argument that it sets, or the line that answers it.
"""

import argparse
import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from sail_jax.cli.options import Parser, natural, reader, seed
from sail_jax.cli.progress import fitted, say

if TYPE_CHECKING:
    from sail_jax.checkpoint.recipe.recipes import Recipe


class Answer(NamedTuple):
    """The effect of an option.

    Attributes:
      sets: The argument that it sets, and its value; `...` for the value that was given.
      note: The line that is printed; "" for none.
      refused: Why it is refused; "" if it is not.
    """

    sets: tuple[str, Any] | None = None
    note: str = ""
    refused: str = ""


class Option(NamedTuple):
    """An option of `mergekit-yaml`.

    Attributes:
      flags: Its spellings.
      help: Its effect here.
      given: The effect of the option.
      without: The effect of its counterpart `--no-...`; None without one.
      type: Reads its value; None without a value.
      metavar: The name of the value in the help.
    """

    flags: tuple[str, ...]
    help: str
    given: Answer
    without: Answer | None = None
    type: Callable[[str], Any] | None = None
    metavar: str | None = None


def _parameters(text: str) -> int:
    """A whole number, with k, m or b for its thousands; for 0 what no file reaches.

    mergekit's help calls them parameters, but its writer counts bytes, and so they are read here.

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
_PLACE = "tensors are read into main memory piece by piece, and --max-memory bounds it"
_WRITES = "each of --threads writes its tensors while others are read"


def _pair(name: str, help: str, given: Answer = _DONE, without: Answer = _DONE) -> Option:
    """A flag, and its counterpart `--no-...`."""
    return Option((f"--{name}",), help, given, without)


def _switch(name: str, help: str) -> Option:
    """A pair of flags that sets the argument of its name."""
    argument = name.replace("-", "_")
    return _pair(name, help, Answer((argument, True)), Answer((argument, False)))


def _value(
    flags: str, argument: str, help: str, type: Callable[[str], Any] = str, metavar: str = "N"
) -> Option:
    """An option that sets an argument to its value."""
    return Option(tuple(flags.split()), help, Answer((argument, ...)), None, type, metavar)


def _idle(
    flag: str, why: str, type: Callable[[str], Any] | None = None, metavar: str | None = None
) -> Option:
    """An option without effect here, and why."""
    note = Answer(note=f"has no effect: {why}")
    # A flag of two dashes has a counterpart, which asks for what is so in any case.
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
            refused="rows are not cut off by number; 'tokenizer: {source: base}' or "
            "'{source: union}' in the recipe matches them by their tokens"
        ),
    ),
    _idle("--trust-remote-code", "code that comes with a checkpoint is never run"),
    _value(
        "--transformers-cache",
        "hub_cache",
        "the folder of models from the Hub, as the variable HF_HUB_CACHE",
        metavar="DIR",
    ),
    _idle(
        "--lora-merge-cache",
        "adapters are added while tensors are read, and nothing is stored",
        str,
        "DIR",
    ),
    _idle(
        "--lora-merge-dtype",
        "adapters are added in float32 or better, and nothing is rounded in between",
        str,
        "NAME",
    ),
    _value(
        "--random-seed",
        "random_seed",
        "the seed of methods that draw, in place of the recipe's seed",
        seed,
    ),
    _idle("-v", "--plan prints what is done to every tensor"),
    _switch("quiet", "show progress, as by default"),
    _pair(
        "cuda",
        "compute on the first CUDA device; without it on JAX's default device",
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
        "always so; --allow-pickle reads PyTorch's files, and runs nothing in them",
        without=Answer(note="has no effect: pickles are parsed tensor by tensor, and never run"),
    ),
    _idle("--read-to-gpu", _PLACE),
    _idle("--multi-gpu", "one device computes, and --threads workers read and write"),
    _value("--num-threads -j", "threads", "the same as --threads", natural),
    Option(
        ("--gpu-rich",),
        "the same as --cuda",
        Answer(("device", "cuda"), note=f"is --cuda here, as {_PLACE}"),
    ),
    _idle("--async-write", _WRITES),
    _idle("--write-threads", _WRITES, natural, "N"),
    _value(
        "--out-shard-size",
        "shard_bytes",
        "--shard-size in mergekit's notation: 1B is 1GB, and 0 is no limit",
        parameters,
        "SIZE",
    ),
    _switch(
        "copy-tokenizer",
        "copy the tokenizer's files, as by default; what the recipe's tokenizer makes is written "
        "regardless",
    ),
    _pair("clone-tensors", "always so: a tensor that is used twice is written twice"),
    _switch("write-model-card", "write README.md and recipe.yaml, as by default"),
    _pair(
        "safe-serialization",
        "always so: no pickle is ever written",
        without=Answer(refused="no pickle is ever written; leave it out, or choose a --format"),
    ),
)
"""The options of `mergekit-yaml` 0.1.5, in the order of its help."""


class _Given(argparse.Action):
    """Does what the table says of an option."""

    def __init__(self, option_strings: Sequence[str], dest: str, option: Option) -> None:
        nargs = None if option.type else 0
        super().__init__(
            option_strings, dest, nargs=nargs, type=option.type, metavar=option.metavar,
            help=option.help, default=argparse.SUPPRESS,
        )  # fmt: skip
        self.option = option

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        flag = str(option_string)
        without = self.option.without is not None and flag.startswith("--no-")
        answer = self.option.without if without else self.option.given
        assert answer is not None
        if answer.refused:
            parser.error(f"{flag}: {answer.refused}")
        if answer.sets is not None:
            name, value = answer.sets
            setattr(namespace, name, values if value is ... else value)
        if answer.note:
            namespace.answers = {**namespace.answers, flag: answer.note}


def add_options(parser: Parser) -> None:
    """Adds the options of `mergekit-yaml` to those that a command has already.

    Args:
      parser: The parser of the command. Flags that it knows already stay.
    """
    parser.set_defaults(
        answers={}, allow_crimes=False, random_seed=None, device=None, hub_cache=None,
        copy_tokenizer=True, write_model_card=True,
    )  # fmt: skip
    group = parser.add_argument_group("options of mergekit-yaml")
    for i, option in enumerate(OPTIONS):
        pair = [] if option.without is None else [f"--no-{option.flags[0][2:]}"]
        flags = [f for f in (*option.flags, *pair) if f not in parser._option_string_actions]
        group.add_argument(*flags, action=_Given, dest=f"mergekit_{i}", option=option)


def answering(
    run: Callable[[argparse.Namespace], None],
) -> Callable[[argparse.Namespace], None]:
    """Makes a command print one line for each option without effect.

    Args:
      run: Runs the command.

    Returns:
      The function that prints and then runs it, with the folder of the Hub that was given.
    """

    def answered(args: argparse.Namespace) -> None:
        for flag, note in args.answers.items():
            say(fitted(f"note: {flag} {note}"))
        if args.hub_cache is None:
            run(args)
            return
        before = os.environ.get("HF_HUB_CACHE")
        # huggingface_hub reads it when it is imported, which is when it is first needed.
        os.environ["HF_HUB_CACHE"] = args.hub_cache
        try:
            run(args)
        finally:
            os.environ.pop("HF_HUB_CACHE")
            if before is not None:
                os.environ["HF_HUB_CACHE"] = before

    return answered


def seeded(recipe: "Recipe", seed: int | None) -> "Recipe":
    """Puts the seed of the command line in the place of a recipe's.

    Args:
      recipe: The recipe.
      seed: The seed; None to leave the recipe as it is.

    Returns:
      The recipe with that seed. A comment at the top of its text has the seed.
    """
    if seed is None or seed == recipe.seed:
        return recipe
    if "seed" in recipe.node.value:
        say(f"note: --random-seed {seed} is used in place of seed {recipe.seed} in the recipe")
    text = f"# merged with --random-seed {seed}\n{recipe.text}"
    return recipe.model_copy(update={"seed": seed, "text": text})


@contextlib.contextmanager
def on_device(name: str | None) -> Iterator[None]:
    """Makes JAX compute on a device while the block lasts.

    Args:
      name: A platform and perhaps a number, such as cpu or cuda:1; None or auto for JAX's default.

    Yields:
      Nothing.

    Raises:
      ValueError: If JAX has no such device.
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
    # JAX raises a RuntimeError for a platform that it lacks.
    except (RuntimeError, IndexError, ValueError) as error:
        there = ", ".join(f"{device.platform}:{device.id}" for device in jax.local_devices())
        raise ValueError(
            f"no device {name}: JAX has {there} here; install JAX for another, and let "
            "JAX_PLATFORMS name it if it is set"
        ) from error
    before = jax.config.values["jax_default_device"]
    try:
        jax.config.update("jax_default_device", device)
        yield
    finally:
        jax.config.update("jax_default_device", before)
