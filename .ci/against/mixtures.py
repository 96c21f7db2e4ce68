"""Mixtures of experts.

mergekit-moe and sail-jax upcycle read the same file on small random networks. transformers loads
both outputs and compares them tensor by tensor. Unchanged tensors must be equal. Routers from
prompts have length 1, and may differ in sixteen roundings of it. mergekit-moe runs the base in
bfloat16 for `hidden`, and this comparison makes it run in float32. For `hidden_avg` mergekit-moe
also counts padding, so only prompts of one length are compared. Random routers have different
draws, so only their mean squares are compared. Qwen2-MoE has a shared expert. The first rows have
copies of one network, and compare the logits of the mixture and the network, both in transformers.
mergekit-moe does not make mixtures of Granite. Its rows are therefore only such copies, with four
multipliers other than 1.
"""

import importlib.util
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from cases import EPS, Case, Outcome, loaded, logits, rounding, sail_jax
from tokenizers import Tokenizer, models, pre_tokenizers

SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "vocab_size": 40,
    "initializer_range": 0.2,
}  # fmt: skip
KINDS = {"Mixtral of Llama": "Llama", "Mixtral of Mistral": "Mistral"}
KINDS |= {"Qwen2-MoE": "Qwen2", "Qwen3-MoE": "Qwen3"}
# Those that are no default of their network, by what they are called.
OTHERS = {
    "Qwen2-MoE of Llama": ("Llama", "qwen2_moe"),
    "GraniteMoE": ("Granite", "granitemoe"),
    "GraniteMoE, shared": ("Granite", "granitemoeshared"),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "Mistral": {"sliding_window": None},
    "Granite": {
        "embedding_multiplier": 6.0, "attention_multiplier": 0.2, "residual_multiplier": 0.3,
        "logits_scaling": 4.0,
    },
}  # fmt: skip
FILE = """\
base_model: {folder}/0
gate_mode: {mode}
dtype: float32
experts_per_token: 2
experts:
- source_model: {folder}/1
  positive_prompts: ["t1 t2 t3 t4 t5", "t6 t7"]
- source_model: {folder}/2
  positive_prompts: ["t8 t9"]
  negative_prompts: ["t1 t2", "t3"]
- source_model: {folder}/0
  positive_prompts: ["t10"]
  residual_scale: 0.5
"""
SHARED = """\
shared_experts:
- source_model: {folder}/1
  positive_prompts: ["t11 t12", "t13"]
  negative_prompts: ["t2"]
  residual_scale: 0.1
"""


def written(kind: str, folder: Path) -> None:
    """Saves three small networks of a kind, the first with a tokenizer."""
    model = getattr(transformers, f"{kind}ForCausalLM")
    for k in range(3):
        torch.manual_seed(k)
        config = model.config_class(**SIZES, **SETTINGS.get(kind, {}))
        model(config).save_pretrained(folder / str(k))
    core = Tokenizer(models.WordLevel({f"t{i}": i for i in range(40)}, unk_token="t0"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token="t0", bos_token="t39", eos_token="t38"
    )
    fast.save_pretrained(folder / "0")


def theirs(recipe: Path, out: Path) -> None:
    """Runs mergekit-moe in this process, networks in float32.

    For Qwen2 transformers takes its own kind of tokenizer, which splits the words of this one.
    """
    from mergekit.moe import router
    from mergekit.scripts import moe

    class Float32(transformers.AutoModelForCausalLM):
        @classmethod
        def from_pretrained(cls, *args: Any, **options: Any) -> Any:
            return super().from_pretrained(*args, **options | {"torch_dtype": torch.float32})

    kept, router.AutoModelForCausalLM = router.AutoModelForCausalLM, Float32
    # Its own name of the package: importing parts of transformers may replace the module.
    own = moe.transformers
    auto, own.AutoTokenizer = own.AutoTokenizer, transformers.PreTrainedTokenizerFast
    try:
        arguments = [str(recipe), str(out), "--quiet", "--device", "cpu"]
        moe.main.main(arguments, standalone_mode=False)
    finally:
        router.AutoModelForCausalLM, own.AutoTokenizer = kept, auto


def compared(kind: str, mode: str, folder: Path) -> Outcome:
    """Makes a mixture with both programs, and compares all tensors."""
    written(KINDS[kind], folder)
    recipe = folder / "moe.yaml"
    text = FILE + (SHARED if kind == "Qwen2-MoE" else "")
    text = text.format(folder=folder, mode=mode)
    if mode == "hidden_avg":
        text = text.replace(', "t6 t7"', "").replace(', "t3"', "")
    recipe.write_text(text)
    theirs(recipe, folder / "theirs")
    sail_jax("upcycle", recipe, folder / "ours", "--quiet")
    ours, want = loaded(folder / "ours").state_dict(), loaded(folder / "theirs").state_dict()
    if ours.keys() != want.keys():
        return Outcome(1.0, 1.0, 0.0, f"tensors: {sorted(ours.keys() ^ want.keys())[:3]}")
    routers = [name for name in want if name.endswith(("mlp.gate.weight", "expert_gate.weight"))]
    for name, x in want.items():
        if name not in routers and not torch.equal(x, ours[name]):
            return Outcome(1.0, 1.0, 0.0, f"{name} differs")
    drawn = mode in ("random", "uniform_random")
    rows = [torch.cat([x[name] for name in routers]) for x in (ours, want)]
    if drawn:
        size = rows[0].numel()
        a, b = (float((x**2).mean()) for x in rows)
        # Five standard errors of a difference of mean squares: of normal numbers its variance is
        # 2 b^2 / size for each side, of uniform ones less.
        return Outcome(abs(a - b), b, 5 * b * (4 / size) ** 0.5, "routers: mean squares")
    difference = float((rows[0] - rows[1]).abs().max())
    return Outcome(difference, 1.0, 16 * EPS, f"{len(want)} tensors")


def copied(kind: str, folder: Path) -> Outcome:
    """Compares the logits of a network and of a mixture of its copies."""
    network, named = OTHERS.get(kind) or (KINDS[kind], "")
    written(network, folder)
    options = ["--architecture", named] if named else []
    sail_jax("upcycle", folder / "0", folder / "out", "--router", "random", "--quiet", *options)
    dense, mixture = loaded(folder / "0"), loaded(folder / "out")
    got, want = logits(mixture), logits(dense)
    difference, scale = float((got - want).abs().max()), float(want.abs().max())
    return Outcome(difference, scale, rounding(dense, 2), f"8 experts, {type(mixture).__name__}")


MODES = {
    "Mixtral of Llama": ("cheap_embed", "hidden", "hidden_avg", "random", "uniform_random"),
    "Mixtral of Mistral": ("cheap_embed",),
    "Qwen2-MoE": ("cheap_embed", "hidden", "random"),
    "Qwen3-MoE": ("cheap_embed", "hidden"),
}
CASES = [
    Case(f"{kind}, copies", "a network, and its copies as experts", partial(copied, kind))
    for kind in (*KINDS, *OTHERS)
]
if importlib.util.find_spec("mergekit") is not None:
    CASES += [
        Case(f"{kind}, {mode}", "a mixture of three networks", partial(compared, kind, mode))
        for kind, modes in MODES.items()
        for mode in modes
    ]
