"""A multilayer perceptron with ReLU units."""

from collections.abc import Sequence

import flax.linen as nn
from jaxtyping import Array, Float


class MLP(nn.Module):
    """A multilayer perceptron: hidden layers of ReLU units, then a linear layer.

    The layers are named "hidden_0", "hidden_1" and so on, and "out".

    Attributes:
      widths: The number of units of each hidden layer.
      outputs: The number of outputs.

    >>> import jax, numpy as np
    >>> model = MLP(widths=(16,), outputs=10)
    >>> made = jax.eval_shape(model.init_with_output, jax.random.key(0), np.zeros((5, 64)))
    >>> logits, params = made
    >>> logits.shape
    (5, 10)
    """

    widths: Sequence[int]
    outputs: int

    @nn.compact
    def __call__(self, x: Float[Array, "*batch inputs"]) -> Float[Array, "*batch outputs"]:
        """Computes the outputs.

        Args:
          x: The inputs.

        Returns:
          The outputs, which are not normalised.
        """
        for i, width in enumerate(self.widths):
            x = nn.relu(nn.Dense(width, name=f"hidden_{i}")(x))
        return nn.Dense(self.outputs, name="out")(x)
