"""Runs a command that must be rejected."""

from sail_jax.cli import main as cli


def refused(capsys, *argv):
    """Returns the one-line error of a command."""
    capsys.readouterr()
    code = cli.main(list(map(str, argv)))
    captured = capsys.readouterr()
    error = [line for line in captured.err.splitlines() if line.startswith("sail-jax: error: ")]
    assert code in (1, 2), captured
    assert len(error) == 1
    return error[0]
