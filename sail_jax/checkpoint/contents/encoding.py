"""Encodes text by a tokenizer.json of any kind, with the package tokenizers."""

import contextlib
import importlib
from collections.abc import Callable, Iterator

from sail_jax.checkpoint.formats.files import CheckpointError


def encoder(document: bytes, source: str) -> Callable[[str, bool], list[int]]:
    """Makes a function that encodes text by a tokenizer.json.

    No token is added to the text, and nothing is cut off or padded, whatever the file requests.

    Args:
      document: The content of the file.
      source: Its path, for messages.

    Returns:
      A function from a text to its tokens. Its second argument is whether special tokens that the
      text contains, such as "</s>", become one token each. It raises a `CheckpointError` for a text
      that the tokenizer cannot encode.

    Raises:
      CheckpointError: If the package is not installed, or the file cannot be read.
    """
    try:
        tokenizers = importlib.import_module("tokenizers")
    except ImportError as error:
        raise CheckpointError(
            f"{source}: this kind of tokenizer requires the package tokenizers:"
            " pip install 'sail-jax[tokenizers]'"
        ) from error
    with _told(f"{source} cannot be read"):
        tokenizer = tokenizers.Tokenizer.from_str(document.decode())
    tokenizer.no_truncation()
    tokenizer.no_padding()

    def encode(text: str, special: bool) -> list[int]:
        tokenizer.encode_special_tokens = not special
        with _told(f"{source}: {text[:40]!r} cannot be encoded"):
            return tokenizer.encode(text, add_special_tokens=False).ids

    return encode


@contextlib.contextmanager
def _told(what: str) -> Iterator[None]:
    """Turns any error of the package into a `CheckpointError`."""
    try:
        yield
    # The package raises bare Exception, and for some damaged files `PanicException`, which is
    # derived from BaseException.
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise CheckpointError(f"{what}: {error}") from error
