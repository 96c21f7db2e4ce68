"""Scores of forecasts and of rules, setting by setting, from the dataset of `choice_prediction`."""

from typing import NamedTuple

import numpy as np
import xarray as xr
from jaxtyping import Float, Int

EDGES = np.array([0.0, 0.05, 0.2, 0.4, 0.6, 0.8, 1.0])
"""Edges of the bins of probabilities, for the calibration."""

PerSetting = Float[np.ndarray, " setting"]


class Case(NamedTuple):
    """One theory's forecasts, with the outcomes.

    Attributes:
      choices: The names of the choices.
      loss: The test losses.
      chance: The forecast probabilities.
      always: The choice of the rule that does not look at the setting.
      family: The family of each setting.
    """

    choices: list[str]
    loss: Float[np.ndarray, "setting seed choice"]
    chance: Float[np.ndarray, "setting seed choice"]
    always: str
    family: Int[np.ndarray, " setting"]

    @property
    def winner(self) -> Int[np.ndarray, " setting"]:
        """The choice with the least mean test loss over repetitions."""
        return self.loss.mean(1).argmin(-1)

    def picks(self) -> dict[str, Int[np.ndarray, "setting seed"]]:
        """Lists what theory and both rules choose in each repetition.

        The majority rule chooses the most frequent winner of the family's other settings.
        """
        shape = self.loss.shape[:2]
        majority = self._others().argmax(-1)
        return {
            "theory": self.chance.argmax(-1),
            "majority": np.broadcast_to(majority[:, None], shape),
            "always": np.full(shape, self.choices.index(self.always)),
        }

    def hits(self) -> dict[str, PerSetting]:
        """Computes how often each choice is the winner, over repetitions."""
        return {k: (x == self.winner[:, None]).mean(1) for k, x in self.picks().items()}

    def regrets(self) -> dict[str, PerSetting]:
        """Computes the mean test loss of each choice minus the winner's."""
        mean = self.loss.mean(1)
        taken = {k: np.take_along_axis(mean, x, 1).mean(1) for k, x in self.picks().items()}
        return {k: x - mean.min(1) for k, x in taken.items()}

    def briers(self) -> dict[str, PerSetting]:
        """Computes Brier scores, sum_k (p_k - [k wins])^2, of theory and of frequencies.

        The frequencies are those of the winners of the family's other settings.
        """
        won = self._won()
        others = self._others()
        others = others / np.maximum(others.sum(1, keepdims=True), 1)
        return {
            "theory": ((self.chance - won[:, None]) ** 2).sum(-1).mean(1),
            "frequencies": ((others - won) ** 2).sum(-1),
        }

    def calibration(self, weight: PerSetting) -> tuple[np.ndarray, np.ndarray]:
        """Computes the mean probability in each bin, and how often these choices won.

        - `weight`: how often each setting counts.
        """
        chance, won = self.chance, np.broadcast_to(self._won()[:, None], self.chance.shape)
        within = np.clip(np.digitize(chance, EDGES) - 1, 0, len(EDGES) - 2)
        weights = np.broadcast_to(weight[:, None, None], chance.shape)
        total, predicted, observed = (
            np.bincount(within.ravel(), (weights * x).ravel(), len(EDGES) - 1)
            for x in (1.0, chance, won)
        )
        with np.errstate(invalid="ignore"):
            return predicted / total, observed / total

    def _won(self) -> Float[np.ndarray, "setting choice"]:
        return np.eye(len(self.choices))[self.winner]

    def _others(self) -> Float[np.ndarray, "setting choice"]:
        won, same = self._won(), self.family[:, None] == self.family
        return same @ won - won


def cases(dataset: xr.Dataset) -> dict[str, Case]:
    """Lists the theories with their forecasts: two of transfer, and "spread" of merges."""
    choices, options = (list(dataset[k].values.astype(str)) for k in ("choice", "option"))
    found = {
        str(name): Case(
            choices,
            dataset.loss.values,
            dataset.chance.sel(theory=name).values,
            "fine-tuning",
            dataset.family.values,
        )
        for name in dataset.theory.values
    }
    merges = dataset.merged_loss.values, dataset.merged_chance.values
    return {**found, "spread": Case(options, *merges, "average", dataset.merged_family.values)}


def weights(count: int, draws: int, seed: int) -> Float[np.ndarray, "draw setting"]:
    """Draws bootstrap samples of settings, as how often each setting counts."""
    rng = np.random.default_rng(seed)
    return rng.multinomial(count, np.full(count, 1 / count), draws).astype(float)


def interval(values: PerSetting, draws: int, seed: int) -> tuple[float, float, float]:
    """Computes the mean over settings, and its 95 % bootstrap interval."""
    means = weights(len(values), draws, seed) @ values / len(values)
    low, high = np.percentile(means, [2.5, 97.5])
    return float(values.mean()), float(low), float(high)
