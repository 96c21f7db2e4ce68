"""Determines the chat template of the output, and defines the plain form of each named template."""

from collections.abc import Mapping
from pathlib import Path

from sail_jax.checkpoint.formats.extras import config_of, content
from sail_jax.checkpoint.planning.tokenizers import dump
from sail_jax.checkpoint.recipe.parts import Recipe, Ref
from sail_jax.checkpoint.recipe.yaml_tree import RecipeError
from sail_jax.disk import StoreError

_TURN = "{% for message in messages %}"
_END = "{% endfor %}"
_REPLY = "{% if add_generation_prompt %}"
_TEMPLATES = {
    "chatml": _TURN
    + "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    + _END
    + _REPLY
    + "{{ '<|im_start|>assistant\\n' }}{% endif %}",
    "llama3": "{{ bos_token }}"
    + _TURN
    + "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}"
    + "{{ message['content'] | trim + '<|eot_id|>' }}"
    + _END
    + _REPLY
    + "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}",
    "mistral": "{{ bos_token }}"
    + _TURN
    + "{% if message['role'] == 'assistant' %}{{ message['content'] + eos_token }}"
    + "{% else %}{{ '[INST] ' + message['content'] + ' [/INST]' }}{% endif %}"
    + _END,
    "alpaca": _TURN
    + "{% if message['role'] == 'system' %}{{ message['content'] + '\\n\\n' }}"
    + "{% elif message['role'] == 'user' %}"
    + "{{ '### Instruction:\\n' + message['content'] + '\\n\\n' }}"
    + "{% else %}{{ '### Response:\\n' + message['content'] + eos_token + '\\n\\n' }}{% endif %}"
    + _END
    + _REPLY
    + "{{ '### Response:\\n' }}{% endif %}",
    "exaone": _TURN
    + "{{ '[|' + message['role'] + '|]' + message['content'] }}"
    + "{{ '\\n' if message['role'] == 'user' else '[|endofturn|]\\n' }}"
    + _END
    + _REPLY
    + "{{ '[|assistant|]' }}{% endif %}",
}
"""The plain form of each conversation format: turns of text, without tools."""


def chat_template(
    recipe: Recipe,
    extras: Mapping[Ref, Mapping[str, Path | bytes]],
    donor: Mapping[str, Path | bytes],
) -> dict[str, bytes]:
    """Makes the tokenizer file with the requested chat template.

    Args:
      recipe: The recipe. Its template is a name, a text in Jinja, or "auto" for the models' most
        frequent one (in a tie, the one listed first).
      extras: The plain files of each input.
      donor: The files of the output, which determine where a template is stored.

    Returns:
      The file's bytes by its name: chat_template.jinja if the output has one, else
      tokenizer_config.json. Empty if no template is requested or found.

    Raises:
      RecipeError: If the output has neither file.
      ValueError: If a file of an input cannot be read.
    """
    template = recipe.chat_template
    if template is None:
        return {}
    if template == "auto":
        templates = [t for t in map(_template_of, extras.values()) if t is not None]
        if not templates:
            return {}
        template = max(templates, key=lambda t: (templates.count(t), -templates.index(t)))
    template = _TEMPLATES.get(template, template)
    if "chat_template.jinja" in donor:
        return {"chat_template.jinja": template.encode()}
    if "tokenizer_config.json" not in donor:
        where = recipe.at("chat_template")
        raise RecipeError(where, "a tokenizer_config.json for it is missing in the output")
    config = config_of(donor, "tokenizer_config.json")
    return {"tokenizer_config.json": dump({**config, "chat_template": template})}


def _template_of(extras: Mapping[str, Path | bytes]) -> str | None:
    """Returns the chat template of a model (of several, the default), None without one."""
    if "chat_template.jinja" in extras:
        path = extras["chat_template.jinja"]
        try:
            return content(path).decode().strip()
        except (StoreError, ValueError) as error:
            raise ValueError(f"{path}: cannot be read as text: {error}") from error
    if "tokenizer_config.json" not in extras:
        return None
    template = config_of(extras, "tokenizer_config.json").get("chat_template")
    # Tokenizers with several templates list them by name.
    if isinstance(template, list):
        named = (t for t in template if isinstance(t, dict) and t.get("name") == "default")
        template = next(named, {}).get("template")
    elif isinstance(template, dict):
        template = template.get("default")
    return template.strip() if isinstance(template, str) and template.strip() else None
