"""Heads of transformers: outputs before and after growth.

transformers saves a tiny model with weights by name for each class. The outputs of the class are
compared with the forward passes in `sail_jax.architectures.forward`. They are also compared with a
model that `sail-jax grow` made twice as wide, loaded by transformers.

Run alone, `python .ci/against/heads.py` prints a line for each case. With `--record FILE` it writes
configurations, shapes and outputs to the file that `tests/helpers/known_networks.py` reads.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.numpy import load_file, save_file

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests" / "helpers"))

from cases import Case, Outcome  # noqa: E402
from small_weights import IMAGES, TOKENS, weights  # noqa: E402

from sail_jax import architectures  # noqa: E402
from sail_jax.architectures.forward.heads import is_base  # noqa: E402

EPS = float(np.finfo(np.float32).eps)
# Padding ends the second text for a decoder, stands in the middle of it for RoBERTa, and the end
# token is in both texts.
_BODY = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1}
_BODY |= {"num_attention_heads": 2}
_DECODER = _BODY | {"num_key_value_heads": 1, "head_dim": 4, "vocab_size": 17, "num_labels": 3}
_DECODER |= {"pad_token_id": 6, "max_position_embeddings": 12}
_GRANITE = _BODY | {"num_key_value_heads": 1, "vocab_size": 17, "max_position_embeddings": 12}
_GRANITE |= {"embedding_multiplier": 6.0, "attention_multiplier": 0.2}
_GRANITE |= {"residual_multiplier": 0.3, "logits_scaling": 4.0}
_ENCODER = _BODY | {"vocab_size": 17, "max_position_embeddings": 12, "num_labels": 3}
_IMAGES = _BODY | {"image_size": 8, "patch_size": 4}
_TEXT = _BODY | {"vocab_size": 17, "max_position_embeddings": 12, "projection_dim": 6}
_TEXT |= {"bos_token_id": 0, "eos_token_id": 16, "pad_token_id": 1}
_VISION = _IMAGES | {"projection_dim": 6}
_GPT2 = {"n_embd": 8, "n_head": 2, "n_layer": 1, "n_positions": 12, "vocab_size": 17}
_GPT2 |= {"pad_token_id": 6, "num_labels": 3}
_T5 = {"d_model": 8, "d_ff": 12, "num_layers": 1, "num_decoder_layers": 1, "num_heads": 2}
_T5 |= {"d_kv": 4, "vocab_size": 17, "num_labels": 3, "eos_token_id": 16}

# What each class is made with, beside what its family is made with.
_TASKS = {
    "ForSequenceClassification": {},
    "ForTokenClassification": {},
    "ForQuestionAnswering": {"num_labels": 2},
}
_CHOICE = {"ForMultipleChoice": {}}
_FAMILIES: dict[str, tuple[dict[str, Any], dict[str, dict[str, Any]]]] = {
    "GPT2": (
        _GPT2,
        {"Model": {}, "LMHeadModel": {}, "DoubleHeadsModel": {"summary_activation": "tanh"}}
        | _TASKS,
    ),
    "Llama": (_DECODER, {"Model": {}, "ForCausalLM": {}} | _TASKS),
    "Mistral": (_DECODER, {"Model": {}, "ForCausalLM": {}} | _TASKS),
    "Qwen2": (_DECODER, {"Model": {}, "ForCausalLM": {}} | _TASKS),
    "Qwen3": (_DECODER, {"Model": {}, "ForCausalLM": {}} | _TASKS),
    "Mixtral": (_DECODER | {"num_local_experts": 3}, {"ForCausalLM": {}}),
    "Qwen2Moe": (
        _DECODER
        | {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
        | {"shared_expert_intermediate_size": 10},
        {"ForCausalLM": {}},
    ),
    "Qwen3Moe": (
        _DECODER | {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 12},
        {"ForCausalLM": {"norm_topk_prob": True}},
    ),
    "Granite": (_GRANITE, {"ForCausalLM": {}}),
    "GraniteMoeShared": (
        _GRANITE | {"num_local_experts": 3, "shared_intermediate_size": 10},
        {"ForCausalLM": {}},
    ),
    "Bert": (
        _ENCODER,
        {"Model": {}, "ForPreTraining": {}, "ForMaskedLM": {}}
        | {"LMHeadModel": {"is_decoder": True}, "ForNextSentencePrediction": {}}
        | _TASKS
        | _CHOICE,
    ),
    "Roberta": (
        _ENCODER,
        {"Model": {}, "ForMaskedLM": {}, "ForCausalLM": {"is_decoder": True}} | _TASKS | _CHOICE,
    ),
    "XLMRoberta": (
        _ENCODER,
        {"Model": {}, "ForMaskedLM": {}, "ForCausalLM": {"is_decoder": True}} | _TASKS | _CHOICE,
    ),
    "T5": (
        _T5,
        {"Model": {}, "EncoderModel": {}, "ForConditionalGeneration": {}} | _TASKS,
    ),
    "ViT": (
        _IMAGES | {"encoder_stride": 4, "num_labels": 3, "pooler_output_size": 5},
        {"Model": {}, "ForMaskedImageModeling": {}, "ForImageClassification": {}},
    ),
    "CLIP": (
        {"text_config": _TEXT, "vision_config": _VISION, "projection_dim": 6, "num_labels": 3},
        {"Model": {}, "ForImageClassification": {}},
    ),
    "CLIPText": (_TEXT, {"Model": {}, "ModelWithProjection": {}}),
    "CLIPVision": (_VISION, {"Model": {}, "ModelWithProjection": {}}),
}
CLASSES = {
    family + task: settings | own
    for family, (settings, tasks) in _FAMILIES.items()
    for task, own in tasks.items()
}


def save(name: str, folder: Path) -> None:
    """Saves a small model of a class, its weights by their names in the file."""
    cls = getattr(transformers, name)
    cls(cls.config_class(**CLASSES[name])).save_pretrained(folder)
    path = folder / "model.safetensors"
    tensors = {key: weights(key, x.shape) for key, x in load_file(path).items()}
    save_file(tensors, path, {"format": "pt"})


def inputs(config: dict[str, Any]) -> Any:
    """What `sail_jax` runs a network of a configuration on."""
    kind = config["model_type"]
    if kind in ("vit", "clip_vision_model"):
        return IMAGES
    return {"clip": (TOKENS, IMAGES), "t5": (TOKENS, TOKENS[:, ::-1].copy())}.get(kind, TOKENS)


def load(folder: Path) -> tuple[torch.nn.Module, dict[str, Any]]:
    """Loads a model of the class that its configuration names, and the configuration."""
    config = json.loads((folder / "config.json").read_text())
    cls = getattr(transformers, config["architectures"][0])
    model, seen = cls.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    for kind, names in seen.items():
        if names:
            raise ValueError(
                f"transformers loads {config['architectures'][0]} with {kind}: {names}"
            )
    return model.eval(), config


def theirs(model: Any, config: dict[str, Any]) -> dict[str, np.ndarray]:
    """What transformers computes, under the names of `sail_jax`."""
    name, kind = config["architectures"][0], config["model_type"]
    tokens, images = torch.tensor(TOKENS), torch.tensor(IMAGES)
    if kind in ("vit", "clip_vision_model") or name == "CLIPForImageClassification":
        given = {"pixel_values": images}
    elif kind == "clip":
        given = {"pixel_values": images, "input_ids": tokens}
    else:
        given = {"input_ids": tokens}
    if kind == "t5" and not name.endswith(("EncoderModel", "ForTokenClassification")):
        given["decoder_input_ids"] = tokens.flip(1)
    if kind in ("roberta", "xlm-roberta"):
        given["attention_mask"] = (tokens != config["pad_token_id"]).long()
    if name.endswith("ForMultipleChoice"):
        given = {key: x[None] for key, x in given.items()}
    with torch.no_grad():
        y = dict(model(**given))
    found = {key: x.numpy() for key, x in y.items() if isinstance(x, torch.Tensor)}
    if "start_logits" in found:
        return {"logits": np.stack([found["start_logits"], found["end_logits"]], axis=-1)}
    if name.endswith("ForMultipleChoice"):
        return {"logits": found["logits"].T}
    if name.endswith("ForNextSentencePrediction"):
        return {"seq_relationship_logits": found["logits"]}
    if name.endswith("ForPreTraining"):
        found["logits"] = found.pop("prediction_logits")
    if kind == "clip":
        found.pop("logits_per_text", None)
    if name.endswith("WithProjection"):
        found.pop("last_hidden_state")
    if "logits" in found:
        found.pop("encoder_last_hidden_state", None)
    return found


def ours(folder: Path) -> dict[str, np.ndarray]:
    """What `sail_jax` computes."""
    config = json.loads((folder / "config.json").read_text())
    run = architectures.of(config).outputs
    assert run is not None
    y = run(load_file(folder / "model.safetensors"), config, inputs(config))
    return {key: np.asarray(x) for key, x in y.items()}


def moved(model: Any, config: dict[str, Any]) -> dict[str, np.ndarray]:
    """What transformers computes once every weight is moved by one part in 2^23, either way."""
    rng = np.random.default_rng(0)
    with torch.no_grad():
        for x in model.parameters():
            x *= torch.tensor(1 + EPS * (2.0 * rng.integers(0, 2, tuple(x.shape)) - 1))
    return theirs(model, config)


def compared(
    old: dict[str, np.ndarray], new: dict[str, np.ndarray], noisy: dict[str, np.ndarray]
) -> Outcome:
    """The output that differs by most of its tolerance: ten times what rounding weights does."""
    if {k: x.shape for k, x in old.items()} != {k: x.shape for k, x in new.items()}:
        shapes = [{key: x.shape for key, x in y.items()} for y in (old, new)]
        return Outcome(np.inf, 1.0, 0.0, f"outputs of transformers {shapes[0]}, here {shapes[1]}")
    rows = []
    for key, x in old.items():
        scale = float(np.abs(x).max())
        noise = float(np.abs(noisy[key] - x).max())
        tolerance = 10 * max(noise, EPS * scale)
        rows.append(Outcome(float(np.abs(new[key] - x).max()), scale, tolerance, key))
    return max(rows, key=lambda row: row.difference / row.tolerance)


def forward(name: str, folder: Path) -> Outcome:
    """Compares the forward pass of a class."""
    save(name, folder / "model")
    model, config = load(folder / "model")
    return compared(theirs(model, config), ours(folder / "model"), moved(model, config))


def grown(name: str, folder: Path) -> Outcome:
    """Compares a model with itself at twice its width, or sees that a base model is refused."""
    old, new = folder / "model", folder / "grown"
    save(name, old)
    model, config = load(old)
    command = [sys.executable, "-m", "sail_jax.cli", "grow", str(old), str(new), "--width", "2x"]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    if handed_out(name, config):
        refused = run.returncode and "returns its stream" in run.stderr
        return Outcome(0.0 if refused else np.inf, 1.0, 0.0, "refused: a base model")
    if run.returncode:
        return Outcome(np.inf, 1.0, 0.0, run.stderr.strip().splitlines()[-1])
    about = json.loads((new / "growth.json").read_text())
    if about["exact"] is not True:
        return Outcome(np.inf, 1.0, 0.0, f"growth.json: {about['exactness']}")
    return compared(theirs(model, config), theirs(*load(new)), moved(model, config))


def handed_out(name: str, config: dict[str, Any]) -> bool:
    """Whether the class hands out its stream, so that it cannot be wider and compute the same."""
    return is_base(config) and name != "CLIPModel"


def cases() -> Iterator[Case]:
    """Lists two cases for each class."""
    runs: dict[str, Callable[[str, Path], Outcome]] = {"forward": forward, "grown": grown}
    for name in CLASSES:
        for kind, run in runs.items():
            # Its table does not tell whether the width scales what stacked experts read.
            if kind == "grown" and name.startswith("GraniteMoe"):
                continue
            what = {"forward": "the forward pass here", "grown": "itself, grown to twice its width"}
            yield Case(f"heads: {name}, {kind}", f"{name}: {what[kind]}", partial(run, name))


CASES: list[Case] = list(cases())

# Entries of configurations that no forward pass reads.
_LEFT_OUT = ("drop", "initializer", "label", "version", "use_cache", "dtype", "logit_scale_init")


def record(path: Path) -> None:
    """Writes configurations, shapes and outputs of all classes to a file."""
    out = {}
    for name in CLASSES:
        with tempfile.TemporaryDirectory() as folder:
            save(name, Path(folder))
            model, config = load(Path(folder))
            shapes = {
                key: list(x.shape) for key, x in load_file(f"{folder}/model.safetensors").items()
            }
        outputs = {}
        for key, x in theirs(model, config).items():
            step = max(1, x.size // 8)
            values = [round(float(v), 7) for v in x.ravel()[::step]]
            outputs[key] = {"shape": list(x.shape), "step": step, "values": values}
        kept = {
            key: value
            for key, value in config.items()
            if value is not None and not any(part in key for part in _LEFT_OUT)
        }
        out[name] = {"config": kept, "shapes": shapes, "outputs": outputs}
    lines = []
    for name, entry in out.items():
        parts = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in entry.items()]
        lines.append(f"{json.dumps(name)}: {{" + ",\n".join(parts) + "}")
    path.write_text("{" + ",\n".join(lines) + "}\n")


def main() -> None:
    """Runs every case and prints what came, or records."""
    if sys.argv[1:2] == ["--record"]:
        record(Path(sys.argv[2]))
        return
    chosen = [case for case in CASES if not sys.argv[1:] or any(w in case.name for w in sys.argv)]
    wrong = 0
    for case in chosen:
        with tempfile.TemporaryDirectory() as folder:
            outcome = case.run(Path(folder))
        good = outcome.difference <= outcome.tolerance
        wrong += not good
        numbers = f"{outcome.difference:.2g} of {outcome.scale:.2g} ({outcome.tolerance:.2g})"
        print(f"{'as it should' if good else 'WRONG'}: {case.name}: {numbers} {outcome.note}")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
