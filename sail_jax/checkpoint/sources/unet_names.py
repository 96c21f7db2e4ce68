"""Converts between the two names of modules in U-Nets of Stable Diffusion, diffusers' and the
original ones.

kohya's scripts use diffusers' names for the modules of SD 1 and 2, and the original names for those
of SDXL. A base may use either.
"""

import re
from collections.abc import Iterable, Iterator

_RESNET = {
    "conv1": "in_layers.2",
    "conv2": "out_layers.3",
    "time_emb_proj": "emb_layers.1",
    "conv_shortcut": "skip_connection",
}
_ENDS = {
    "conv_in": "input_blocks.0.0",
    "conv_out": "out.2",
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
}
_LEVELS = 8  # more than any U-Net has
_DIFFUSERS = re.compile(r"(?:(?P<before>.+)\.)?down_blocks\.0\.resnets\.(?P<n>\d+)\.conv1")
_ORIGINAL = re.compile(r"(?:(?P<before>.+)\.)?input_blocks\.(?P<n>\d+)\.0\.op")


def other_names(modules: Iterable[str]) -> dict[str, str]:
    """Finds the name of each module of a U-Net in the other program.

    Args:
      modules: The modules of a base, in either program's names.

    Returns:
      The modules by their other names; empty if the base is another network. A prefix of the names
      ("model.diffusion_model.") is omitted.

    >>> base = ["down_blocks.0.resnets.0.conv1", "down_blocks.0.resnets.1.conv1", "conv_in"]
    >>> [*other_names(base)]
    ['input_blocks.1.0.in_layers.2', 'input_blocks.2.0.in_layers.2', 'input_blocks.0.0']
    """
    modules = [*modules]
    resnets = [m for x in modules if (m := _DIFFUSERS.fullmatch(x))]
    steps = [m for x in modules if (m := _ORIGINAL.fullmatch(x))]
    if not resnets and not steps:
        return {}
    found = resnets or steps
    # The first level has its resnets at 1, 2, ..., n, and its downsampling at n + 1.
    count = len(resnets) or min(int(m["n"]) for m in steps) - 1
    own: dict[str, list[str]] = {}
    for pair in _prefixes(count):
        name, alias = pair if resnets else reversed(pair)
        own.setdefault(name, []).append(alias)
    before = f"{found[0]['before']}." if found[0]["before"] else ""
    other: dict[str, str] = {}
    for module in modules:
        name = module.removeprefix(before)
        for end in range(len(name), 0, -1):
            if (end == len(name) or name[end] == ".") and name[:end] in own:
                other |= {alias + name[end:]: module for alias in own[name[:end]]}
                break
    return other


def _prefixes(count: int) -> Iterator[tuple[str, str]]:
    """Returns the names of all blocks in both programs, with `count` resnets per level."""
    yield from _ENDS.items()
    resnets = [(f"mid_block.resnets.{j}", f"middle_block.{2 * j}") for j in (0, 1)]
    yield "mid_block.attentions.0", "middle_block.1"
    for i in range(_LEVELS):
        down, up = f"down_blocks.{i}", f"up_blocks.{i}"
        for j in range(count + 1):
            k = (count + 1) * i + j
            resnets.append((f"{up}.resnets.{j}", f"output_blocks.{k}.0"))
            yield f"{up}.attentions.{j}", f"output_blocks.{k}.1"
            if j < count:
                resnets.append((f"{down}.resnets.{j}", f"input_blocks.{k + 1}.0"))
                yield f"{down}.attentions.{j}", f"input_blocks.{k + 1}.1"
        last = (count + 1) * (i + 1)
        yield f"{down}.downsamplers.0.conv", f"input_blocks.{last}.0.op"
        # It comes after the attention, in levels with attention. The other name is free.
        yield f"{up}.upsamplers.0.conv", f"output_blocks.{last - 1}.1.conv"
        yield f"{up}.upsamplers.0.conv", f"output_blocks.{last - 1}.2.conv"
    for name, original in resnets:
        yield from ((f"{name}.{a}", f"{original}.{b}") for a, b in _RESNET.items())
