"""Command lines for mergekit-yaml.

sail-jax merge reads every spelling of every option that mergekit-yaml lists. One command line gives
both programs files of equal size. The unit is bytes, although mergekit's help mentions parameters.
"""

from pathlib import Path

import torch
from cases import EPS, Case, Outcome, sail_jax
from safetensors.torch import load_file

from sail_jax.cli.commands import merge
from sail_jax.cli.options import Parser, UsageError

LIMIT = 20_000
VALUES = {"SIZE": "1B", "INTEGER": "1", "TEXT": "cpu"}


def known(folder: Path) -> Outcome:
    """Reads every option in every spelling."""
    from mergekit.scripts.run_yaml import main as mergekit_yaml

    (folder / "recipe").write_text("")
    unknown, refused, count = [], [], 0
    for param in mergekit_yaml.params:
        if param.param_type_name == "argument":
            continue
        value = [] if param.is_flag or param.count else [VALUES[param.type.name.upper()]]
        for flag in (*param.opts, *param.secondary_opts):
            count += 1
            parser = Parser("merge")
            merge.add_arguments(parser)
            try:
                parser.read([str(folder / "recipe"), "out", flag, *value])
            except UsageError as error:
                (unknown if "unknown option" in str(error) else refused).append(flag)
    return Outcome(len(unknown), count, 0, f"refused: {', '.join(refused)}; unknown: {unknown}")


def tensors(output: Path) -> tuple[dict[str, torch.Tensor], int]:
    """The tensors of an output, and how many files it has, none of which is too large."""
    files = [load_file(path) for path in output.glob("*.safetensors")]
    for file in files:
        assert sum(x.nbytes for x in file.values()) <= LIMIT or len(file) == 1
    return {name: x for file in files for name, x in file.items()}, len(files)


def sharded(folder: Path) -> Outcome:
    """Merges into files of a limited size by one command line."""
    from mergekit.scripts.run_yaml import main as mergekit_yaml
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=64,
    )  # fmt: skip
    torch.manual_seed(0)
    for name in "AB":
        LlamaForCausalLM(config).save_pretrained(folder / name)
    recipe = folder / "recipe.yaml"
    models = ", ".join(f"{{model: {folder / n}, parameters: {{weight: 1}}}}" for n in "AB")
    recipe.write_text(f"merge_method: linear\ndtype: float32\nmodels: [{models}]\n")
    line = "--out-shard-size 20k --lazy-unpickle --allow-crimes --random-seed 3 --clone-tensors"
    line = [*line.split(), "--no-copy-tokenizer", "--no-write-model-card", "--quiet"]
    mergekit_yaml.main([str(recipe), str(folder / "theirs"), *line], standalone_mode=False)
    sail_jax("merge", recipe, folder / "ours", *line)
    (ours, some), (theirs, others) = (tensors(folder / name) for name in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    assert min(some, others) > 2
    scale = max(float(x.abs().max()) for x in theirs.values())
    apart = max(float((ours[name] - x).abs().max()) for name, x in theirs.items())
    return Outcome(apart, scale, 2 * EPS * scale, f"files: {some} and {others}")


CASES = [
    Case("options", "whether each spelling is known; how many there are", known),
    Case("--out-shard-size 20k", "weights of one command line, in files of 20,000 bytes", sharded),
]
