"""Turns the formulas of docstrings, which are plain text, into TeX.

Docstrings are read in terminals, where TeX is hard to read. So they have
`sigma^2 n / (d - n - 1)`, and the site sets it.
"""

import re
from collections.abc import Iterator, Sequence

GREEK = {
    *("alpha", "beta", "gamma", "delta", "epsilon", "eta", "theta", "kappa", "lambda", "mu", "nu"),
    *("xi", "zeta", "pi", "rho", "sigma", "tau", "phi", "chi", "psi", "omega"),
    *("Gamma", "Delta", "Theta", "Lambda", "Xi", "Pi", "Sigma", "Phi", "Psi", "Omega"),
}
FUNCTIONS = {
    *("arccos", "asinh", "argmin", "ceil", "cos", "det", "diag", "erf", "exp", "ln", "log", "max"),
    *("min", "sign", "sin", "sinh", "span", "sup", "tan", "tr"),
}
SIGNS = {
    **{"<=": r"\le", ">=": r"\ge", "->": r"\to", "<-": r"\leftarrow", "-+": r"\mp"},
    **{"+-": r"\pm", "~": r"\sim", "...": r"\ldots", "*": r"\,", "%": r"\%"},
}
WORD = re.compile(r"[A-Za-z]+\d*")
TOKEN = re.compile(r"\s+|[A-Za-z]+\d*|\d*\.?\d+|<=|>=|->|<-|-\+|\+-|\.\.\.|.")
OTHER = re.compile(r"(?:\b[a-z]{2,}\b[ ,]+){4}|[\"`#]|''|\*\*|==|\[\[|:=|\w\(\w+=")
"""What no formula has: four words in a row, and signs of programs."""
ROW = re.compile(r"[A-Za-z][\w -]*[\w)] {2,}(?![A-Za-z]+ {2,})")
"""A row of a table: words, and a gap."""
SHORT = {"as", "at", "by", "if", "in", "is", "of", "on", "or", "to"}


def tex(lines: Sequence[str]) -> list[str] | None:
    r"""Turns the lines of an indented block into TeX.

    Args:
      lines: The lines.

    Returns:
      The lines of a displayed formula, or None if some line is no formula.

    >>> tex(["n >= d + 2:  sigma^2 d / (n - d - 1)"])
    ['n \\ge d + 2:\\quad \\sigma^{2} d / (n - d - 1)']
    """
    kept = [line.strip() for line in lines if line.strip()]
    if any(OTHER.search(line) for line in kept) or not re.search(r"[=<>~/^]", "".join(kept)):
        return None
    if sum(bool(ROW.match(line)) for line in kept) > 1:
        return None
    rows = [set_line(line) for line in kept]
    if len(rows) == 1:
        return rows
    return [r"\begin{aligned}", *(f"& {row} \\\\" for row in rows), r"\end{aligned}"]


def set_line(line: str) -> str:
    r"""Turns one formula into TeX.

    >>> set_line("b(t) = beta_0 + X^+ diag(1 - e^{-t s^2/n}) y")
    'b(t) = \\beta_{0} + X^{+} \\operatorname{diag}(1 - e^{-t s^{2}/n}) y'
    """
    set_ = "".join(_parts(re.sub(r"\s{2,}", "  ", line))).strip()
    return re.sub(r"(\\text\{[a-z ]+)\}\\ \\text\{", r"\1 ", set_)  # words in a row


def _parts(line: str) -> Iterator[str]:
    at = 0
    while at < len(line):
        token = TOKEN.match(line, at)
        assert token is not None
        text, start, at = token[0], at, token.end()
        before, after = line[start - 1 : start], line[at : at + 1]
        if text in "_^" and after.strip() and before.strip():
            inner, at = _script(line, at)
            yield f"{text}{{{inner}}}"
        elif text == "sqrt" and after == "(":
            end = _closing(line, at)
            yield rf"\sqrt{{{set_line(line[at + 1 : end])}}}"
            at = end + 1
        elif WORD.fullmatch(text):
            yield _word(text)
        elif text.isspace():
            yield r"\quad " if len(text) > 1 else _space(line, start)
        elif text in "{}":
            yield f"\\{text}"
        elif text == "<" and after.isalpha():
            yield r"\langle "
        elif text == ">" and before.isalnum() and not after.isalnum():
            yield r"\rangle"
        elif text == "*" and before.isalpha() and not after.isalnum() and after.strip():
            yield "^*"
        elif text == "." and (before.isalpha() or before == ")") and after.isalpha():
            yield r"\cdot "
        else:
            yield SIGNS.get(text, text) + " " * (text in SIGNS and after.isalnum())


def _space(line: str, at: int) -> str:
    """A space, which is shown next to a word that is no sign."""
    left = re.search(r"([A-Za-z]*)[\w)\]|]?$", line[:at])
    right = re.match(r"([A-Za-z]*)[\w(\[|]?", line[at + 1 :])
    assert left is not None
    assert right is not None
    if not left[0] or not right[0]:
        return " "
    words = {w for w in (left[1], right[1]) if _word(w).startswith(r"\text")}
    return r"\ " if words else " "


def _word(text: str) -> str:
    """A name: a letter, a Greek one, a differential, a function, or a word."""
    if text in ("sum", "int"):
        return f"\\{text}"
    if text == "inf":
        return r"\infty"
    if text in GREEK:
        return f"\\{text}"
    if text in FUNCTIONS:
        return rf"\operatorname{{{text}}}"
    if text[:1] == "d" and (text[1:] in GREEK or len(text) == 2):
        return f"d{_word(text[1:])}"
    if len(text) == 2 and text.isalpha() and text not in SHORT:
        return text  # a product
    letters = text.rstrip("0123456789")
    index = f"_{text[len(letters) :]}" if len(letters) < len(text) else ""
    return (letters if len(letters) < 2 else rf"\text{{{letters}}}") + index


def _script(line: str, at: int) -> tuple[str, int]:
    """An index or a power, and where it ends."""
    if line[at] in "{(":
        end = _closing(line, at)
        return set_line(line[at + 1 : end]), end + 1
    found = re.compile(r"[+*-]?(?:[A-Za-z]+(?:,[a-z])?|\d+(?:\.\d+)?)|[+*]").match(line, at)
    if found is None:
        return "", at
    text = found[0]
    if text in ("T", "-T"):
        return text.replace("T", r"\top"), found.end()
    return text if re.fullmatch("[a-z]{2}", text) else set_line(text), found.end()


def _closing(line: str, at: int) -> int:
    """Where the bracket at a place is closed; the end of the line if it is not."""
    depth = 0
    for end in range(at, len(line)):
        depth += (line[end] in "({[") - (line[end] in ")}]")
        if depth == 0:
            return end
    return len(line)
