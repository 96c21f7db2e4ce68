"""The config of `transfer_phase`, and its presets."""

from math import log, sqrt
from typing import Annotated, ClassVar, Literal

import numpy as np
from annotated_types import Ge, Gt, Le

from experiments.lab.config import (
    Different,
    Natural,
    NotNegative,
    Positive,
    Seed,
    config,
    varied,
)


@config
class Networks:
    """The networks of `train`, at sizes for two cores; preset `networks` has the paper's sizes."""

    d: Annotated[int, Ge(8)] = 40
    """Width of all layers and of the inputs (the paper: 500)."""
    cells: tuple[Annotated[int, Ge(2)], Annotated[int, Ge(2)]] = (6, 6)
    """Numbers of loads and of angles, spaced as `loads` and `thetas` are. The paper does not print
    its grid."""
    draws: Annotated[int, Ge(2)] = 20
    """Data sets for each load (the paper: 20). Each has its own initial weights. Pretraining and
    training from scratch use different ones."""
    layers: Natural = 2
    """Number of layers (the paper: 2)."""
    alpha: Positive = 1e-5
    """Standard deviation of the initial weights, which are normal (the paper: 1e-5)."""
    rate: Positive = 0.01
    """Learning rate of full-batch gradient descent (the paper: 0.001)."""
    steps: Natural = 10_000
    """Maximum number of steps of pretraining, and of the later training (the paper: 100000)."""
    loss: NotNegative = 1e-6
    """Training stops when its loss, |y - X beta|^2 / (2n), is at most this (the paper: 1e-6)."""
    orthogonal: bool = False
    """Also train networks on the same data from orthogonal layers of the same norms. The paper's
    theorems assume eq. (22) for the initial weights. Orthogonal layers satisfy it; the normal
    weights of its experiments (App. D.1) do not. Needs two layers or more, and twice the time."""

    def growth_time(self) -> float:
        """Computes the shortest time in which layers grow from their initial size to size 1.

        Layers start with norm a_0 = 2 alpha sqrt(d). They grow at most by da/dt = a^(L-1), so the
        time is

            -log a_0 for L = 2, else (1 - a_0^(2-L)) / (2 - L).
        """
        a, power = min(2 * self.alpha * sqrt(self.d), 1.0), 2 - self.layers
        return -log(a) if power == 0 else (1 - a**power) / power


@config
class Config:
    """Target data sets of n = load d samples in d dimensions, from a source at angle theta.

    A ValueError is raised if a load gives fewer than 3 samples or, with noise, a number of samples
    within 1 of d; and with trained networks, if the number of layers is invalid for the modes or
    depths, the learning rate may be unstable, or there are too few steps for the weights to grow.
    """

    FORMER: ClassVar = {
        "gammas": "loads", "gamma_max": "load_max", "modes": {"fine_tune": "fine_tuning"},
    }  # fmt: skip

    d: Annotated[int, Ge(4)] = 500
    """Input dimension."""
    draws: Annotated[int, Ge(2)] = 20
    """Independent target data sets for each point."""
    limits: Positive | None = None
    """Value of T at the strongest colours of the maps; by default chosen from the data."""
    loads: Annotated[int, Ge(2)] = 40
    """Number of loads n/d, the midpoints of as many equal parts of (0, load_max)."""
    load_max: Positive = 2.0
    """Largest load."""
    thetas: Annotated[int, Ge(5)] = 41
    """Number of angles from 0 to the largest."""
    theta_max: Annotated[float, Gt(0), Le(1)] = 0.5
    """Largest angle, in units of pi."""
    sigmas: Different[NotNegative] = (0.0, 0.2)
    """Standard deviations of the label noise."""
    depths: Different[Annotated[float, Ge(1)]] = (1, 2, 4)
    """Numbers of layers of the fine-tuned network; inf is allowed."""
    modes: Different[Literal["linear", "fine_tuning"]] = ("linear", "fine_tuning")
    """Kinds of transfer to show: 'linear', 'fine_tuning', or both."""
    seed: Seed = 0
    """Seed of the simulated data sets."""
    train: bool = False
    """Also train networks on other data sets, and compare closed form, estimator and network on
    them."""
    networks: Networks = Networks()

    def __post_init__(self) -> None:
        self._check_counts(self.counts(), self.d, "d", "loads")
        if self.train:
            self._check_networks()

    def _check_counts(self, n: np.ndarray, d: int, d_name: str, loads_name: str) -> None:
        """Checks that the mean risks are finite at every load."""
        if n[0] <= 2:
            raise ValueError(
                f"the smallest load gives n = {n[0]} samples; linear transfer has a finite mean "
                f"from n = 3 on: raise {d_name} or load_max, or lower {loads_name}"
            )
        if max(self.sigmas) > 0 and (near := n[np.abs(n - d) <= 1]).size:
            raise ValueError(
                f"n = {near[0]} is within 1 of {d_name} = {d}, where the mean risk is infinite for "
                f"sigma > 0: change {loads_name} or load_max"
            )

    def _check_networks(self) -> None:
        """Checks that networks can be trained to the end at every load and compared with theory."""
        nets, n = self.networks, self.trained_counts()
        self._check_counts(n, nets.d, "networks.d", "networks.cells")
        if "linear" in self.modes and nets.layers == 1:
            raise ValueError(
                "networks.layers must be at least 2 for linear transfer, which keeps all but the "
                "last; got 1"
            )
        if nets.orthogonal and nets.layers == 1:
            raise ValueError("networks.layers must be at least 2 for networks.orthogonal; got 1")
        if "fine_tuning" in self.modes and nets.layers not in self.depths:
            depths = ", ".join(f"{depth:g}" for depth in self.depths)
            raise ValueError(f"networks.layers must be one of depths = {depths}; got {nets.layers}")
        # Descent is stable below 2 / (L x the largest eigenvalue of X^T X / n), which fluctuates.
        stable = 1 / (nets.layers * (1 + sqrt(nets.d / n[0])) ** 2)
        if nets.rate > stable:
            raise ValueError(
                f"networks.rate must be at most 1 / (L (1 + sqrt(d/n))^2) = {stable:.3g} to be "
                f"stable at n = {n[0]}; got {nets.rate:g}"
            )
        if nets.rate * nets.steps < (least := nets.growth_time()):
            raise ValueError(
                f"networks.steps must be at least {least / nets.rate:.3g} for {nets.layers} layers "
                f"of alpha = {nets.alpha:g} to leave 0 at rate = {nets.rate:g}; got {nets.steps}"
            )

    def angles(self, count: int | None = None) -> np.ndarray:
        """Computes the angles of the grid.

        Args:
          count: The number of angles; by default `thetas`.

        Returns:
          Angles from 0 to the largest in equal steps, in radians, `(count,)`.
        """
        return np.linspace(0, np.pi * self.theta_max, count or self.thetas)

    def counts(self) -> np.ndarray:
        """Computes the number of samples n at each load of the grid.

        Returns:
          The numbers, int `(loads,)`.
        """
        return self._counts(self.loads, self.d)

    def trained_counts(self) -> np.ndarray:
        """Computes the number of samples n at each load with trained networks.

        Returns:
          The numbers, int `(networks.cells[0],)`.
        """
        return self._counts(self.networks.cells[0], self.networks.d)

    def _counts(self, loads: int, d: int) -> np.ndarray:
        midpoints = (np.arange(loads) + 0.5) / loads * self.load_max
        return np.round(midpoints * d).astype(int)


DEFAULT = Config()
TINY = varied(DEFAULT, d=24, draws=4, loads=8, thetas=9, depths=(1, 2))
PRESETS: dict[str, Config] = {
    "default": DEFAULT,
    "figure_1": varied(DEFAULT, sigmas=(0.2,), modes=("linear",)),
    "figure_3": varied(DEFAULT, sigmas=(0.2,), modes=("fine_tuning",), depths=(2,)),
    # Figure 7 is Figure 6 next to its simulation, which this study always shows
    "figure_6_7": varied(DEFAULT, sigmas=(0.0,), modes=("linear",)),
    "depth": varied(
        DEFAULT,
        load_max=1.2,
        sigmas=(0.5,),
        depths=(1, 2, 3, 4, np.inf),
        modes=("fine_tuning",),
    ),
    "noise": varied(DEFAULT, sigmas=(0.0, 0.2, 0.5, 1.0), depths=(2,)),
    # Trained as in the paper: hours of processor time.
    "networks": varied(
        DEFAULT,
        train=True,
        networks={"d": 500, "cells": (20, 17), "rate": 1e-3, "steps": 100_000},
    ),
    # App. D.1's initial weights, which violate the theorems' assumption, next to some that satisfy
    # it
    "initialisation": varied(
        DEFAULT,
        d=200,
        draws=10,
        loads=20,
        thetas=25,
        depths=(2,),
        train=True,
        networks={"cells": (4, 4), "orthogonal": True},
    ),
    # A coarser diagram in a smaller dimension.
    "quick": varied(DEFAULT, d=200, draws=10, loads=20, thetas=25),
    # Seconds, for tests.
    "tiny": TINY,
    "tiny_networks": varied(
        TINY,
        depths=(2,),
        train=True,
        networks={
            "d": 16,
            "cells": (4, 3),
            "draws": 3,
            "alpha": 1e-3,
            "rate": 0.02,
            "steps": 1000,
            "orthogonal": True,
        },
    ),
}
