"""Lists the commands by name, as texts, so that to start one imports no other."""

from typing import NamedTuple

__all__ = ["COMMANDS", "LORA", "Command"]


class Command(NamedTuple):
    """A command of `sail-jax`.

    Attributes:
      about: What it does, in one line.
      package: The package of its module, which has the command's name and a `main(parser, argv)`.
      resumes: Whether `--resume` continues it after an interrupt.
    """

    about: str
    package: str = "experiments.commands"
    resumes: bool = False


COMMANDS = {
    "merge": Command("Merge checkpoints by a recipe, tensor by tensor.", "sail_jax.cli", True),
    "grow": Command("Grow a checkpoint in width and depth.", "sail_jax.cli", True),
    "align": Command("Permute or rotate a checkpoint to match another.", "sail_jax.cli", True),
    "convert": Command(
        "Trees of MaxText and Tunix to Hugging Face's tensors, and back.", "sail_jax.cli", True
    ),
    "average": Command("Average the checkpoints of a training run.", "sail_jax.cli", True),
    "lora": Command("Extract, merge and apply adapters of low rank.", "sail_jax.cli", True),
    "search": Command("Search for a merge on held-out examples; with evidence.", resumes=True),
    "inspect": Command("Spaces, sizes and parameters of a checkpoint.", "sail_jax.cli"),
    "examples": Command("Small real checkpoints and recipes, to try merging on."),
    "quickstart": Command("Four real results in a minute or two, and a page.", resumes=True),
    "explore": Command("A page with sliders: when does transfer help, or pre-training hurt?"),
    "verify": Command("Check the papers' claims: closed form beside simulation."),
    "run": Command("Run one experiment; every field of its config is an option.", resumes=True),
    "plot": Command("Redraw a finished run from its stored result."),
    "report": Command("One page of all finished runs, beside the papers' figures."),
    "data": Command("The data sets that experiments know, and what is found of one."),
    "list": Command("The experiments and what each one asks."),
    "bench": Command("Run one benchmark."),
}

LORA = {
    "extract": "Extract an adapter from a tuned model and its base.",
    "merge": "Merge adapters of one base into one, exactly or to a rank.",
    "apply": "Add an adapter to its base, and write the model.",
}
"""The commands of `sail-jax lora`, with what each does."""
