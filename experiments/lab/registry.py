"""The experiments by name, told without importing them."""

import importlib
from types import ModuleType

from sail_jax.checks import nearest

QUESTIONS = {
    "transfer_phase": "When does linear transfer or fine-tuning beat training from scratch?",
    "ridge_transfer": "Does ridge regularisation help linear transfer?",
    "transfer_factors": "How do input spectrum, training time and source data change transfer?",
    "relu_transfer": "When do frozen ReLU features beat training from scratch?",
    "divergences": "Does the distance between two data sets predict transfer?",
    "overtraining_linear": "When does more pre-training hurt, in networks that can be solved?",
    "overtraining_language": "Are language models that trained longer harder to perturb and tune?",
    "merge_digits": "Which merge keeps what the experts know, on real data?",
    "merging_scaling": "How does a merge change with steps, batch, rate, samples and tasks?",
    "cross_task_linearity": "Do models tuned from one checkpoint act as linear maps of weights?",
    "merge_prediction": "Which measurements, taken before merging, tell how it will turn out?",
    "growth_training": "Which ways of growing a trained network save training?",
    "proximal_spirals": "Where between two models should training start, on two spirals?",
    "proximal_gamma": "Does the distance between texts say where between two models to start?",
    "sail_language": "Does SAIL's start between language models save training on another text?",
    "sail_vision": "Does SAIL start a vision network well, with labels and without?",
    "sail_diffusion": "Does aligning a diffusion transformer, and starting it aligned, save steps?",
    "ledger": "Which of the papers' claims hold, and which only when corrected?",
}


def load(name: str) -> ModuleType:
    """The module of experiment `name`; `ValueError` with the nearest name if there is none."""
    if name not in QUESTIONS:
        raise ValueError(f"unknown experiment '{name}'{nearest(name, QUESTIONS)}")
    return importlib.import_module(f"experiments.{name}")
