"""Forward passes, pure functions `(params, config, inputs) -> logits` of a flat dictionary of
tensors by their Hugging Face names, for certificates; in the precision of the tensors."""

from sail_jax.architectures.forward.text import bert, gpt2, llama, roberta, t5
from sail_jax.architectures.forward.vision import clip, mlp, vit

__all__ = ["bert", "clip", "gpt2", "llama", "mlp", "roberta", "t5", "vit"]
