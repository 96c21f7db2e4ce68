"""The trainings of `sail_diffusion`: classifiers, the alignment phase, and SiTs.

`run` calls a `Laboratory` for each stage; the losses of SiTs are in `networks`.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, PRNGKeyArray, PyTree

from experiments.data.image_folders import Pictures
from experiments.data.latents import Latents
from experiments.models import presets
from experiments.models.vit import ViT
from experiments.studies.sail_diffusion import data, quality
from experiments.studies.sail_diffusion.config import Config
from experiments.studies.sail_diffusion.functions import Traced, decoded
from experiments.studies.sail_diffusion.networks import WAYS, Networks, Projector, Way, encoded
from experiments.studies.sail_diffusion.sampling import sample
from experiments.training import Optimizer, Schedule, Training, sharding
from experiments.training.chunks import in_chunks
from experiments.training.fit import Fit, curve
from experiments.training.loop import Trained
from experiments.training.step import Loss, State

TERMS = ("velocity", "repa", "align")


def classification(net: nn.Module) -> Loss:
    """Creates the loss of a classifier: the mean cross-entropy in nats.

    It returns a loss of type `experiments.training.step.Loss`. Its batches contain `x` and
    `labels`.
    """

    def loss(params: PyTree, mutable: PyTree, batch: PyTree, key: PRNGKeyArray) -> Any:
        x = batch["x"]
        if mutable:
            logits, mutable = net.apply(
                {"params": params, **mutable}, x, True, mutable=["batch_stats"]
            )
        else:
            logits = net.apply({"params": params}, x)
        logits = logits.astype(jnp.float32)  # type: ignore[union-attr]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
        return losses.mean(), {}, mutable

    return loss


def unoptimised(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles a function, on a CPU without XLA's optimisations.

    Use it for functions that are called a few times. Compiling the initialisation of weights then
    takes a tenth of the time. On other devices it is `jax.jit`.
    """
    cpu = jax.default_backend() == "cpu"
    return jax.jit(fn, compiler_options={"xla_backend_optimization_level": 0} if cpu else None)


@partial(jax.jit, static_argnums=0)
def _encoded(net: nn.Module, variables: PyTree, x: Array) -> tuple[Array, Array]:
    """Compiles `encoded`."""
    return encoded(net, variables, x)


CLASSIFIERS = ("measure", "encoder")
HELD = 1 << 31  # bytes of features up to which those of an encoder are computed only once


class Repetition(NamedTuple):
    """The common data of all trainings of SiTs in one repetition.

    Attributes:
      seed: Its number. Initial weights, minibatches and noise are the same for all trainings.
      images: The data, with the encoder's features if these are stored.
      split: The split into training and held-out images.
      encoder: The encoder's variables; not used if the features come from a file.
      measure: The measuring classifier's variables; not used if a function measures.
      real: The statistics of the images to compare samples with.
    """

    seed: int
    images: Latents
    split: data.Split
    encoder: PyTree
    measure: PyTree
    real: quality.Reference


class Laboratory:
    """The networks of one run and their trainings, with compiled steps for all seeds.

    Args:
      config: The config.
      images: The data, as `run.loaded` returns them. If they contain features, or the config has a
        function for them, no encoder is trained.
    """

    def __init__(self, config: Config, images: Latents) -> None:
        self.config, self.images = config, images
        sizes = presets.config(config.model)
        self.classes = sizes["classes"]
        self.shape = sizes["side"], sizes["side"], sizes["channels"]
        measure = presets.config(config.classifiers.measure, outputs=self.classes)
        self.measure = presets.build(measure)
        same = {name: sizes[name] for name in ("patch", "width", "heads", "head_dim", "hidden")}
        encoder = ViT(outputs=self.classes, layers=config.classifiers.encoder_layers, **same)
        traced, depth = Traced(config.functions), same["width"]
        if "features" in traced.names:
            depth = traced.shape("features", (1, *self.shape)).shape[2]
        elif images.features is not None:
            depth = images.features.shape[2]
        own = images.features is None and "features" not in traced.names
        self.encoder = encoder if own else None
        self.networks = Networks(
            presets.build(sizes),
            Projector(config.alignment.projector, depth),
            self.encoder,
            config.alignment.layer,
            config.class_drop,
            config.alignment.summed,
            traced,
            images.scale,
            images.bias,
            config.changes.augment,
            bool(config.noised),
        )
        self._shown = jax.jit(self.networks.seen)
        patches = (sizes["side"] // sizes["patch"]) ** 2
        # if images change, their features change as well
        small = 4 * len(images.labels) * patches * depth <= HELD
        self.keeps = own and small and config.changes.augment is None
        self.layout = sharding.layout(config.shard)
        self._fits: dict[str, Fit] = {}
        self._init = {
            "measure": unoptimised(self.measure.init),
            "encoder": unoptimised(encoder.init),
            "sit": unoptimised(partial(self.networks.init, shape=self.shape)),
        }

    def _fit(self, kind: str, loss: Loss, training: Training) -> Fit:
        """Binds the compiled step of this kind of network, which is made once."""
        if kind not in self._fits:
            save_every = self.config.budget.save_every
            self._fits[kind] = Fit(loss, training, self.layout, self.config, save_every)
        return self._fits[kind]

    def classifier(
        self, kind: str, index: np.ndarray, seed: int, folder: Path | None
    ) -> dict[str, Any]:
        """Trains the measuring classifier or an encoder.

        - `index`: the examples to train on, of shape (n,).
        - `folder`: folder for checkpoints. None stores none.

        It returns `variables`: the trained parameters and any running statistics, as NumPy arrays.
        """
        c = self.config
        net: Any = self.measure if kind == "measure" else self.encoder
        steps = c.classifiers.measure_steps if kind == "measure" else c.classifiers.encoder_steps
        # 1000 separates these keys from those of `_keys`.
        key = jax.random.fold_in(jax.random.key(c.seed), 1000 + seed)
        key = jax.random.fold_in(key, CLASSIFIERS.index(kind))
        variables = self._init[kind](key, jnp.zeros((1, *self.shape)))
        mutable = {name: tree for name, tree in variables.items() if name != "params"} or None
        schedule = Schedule(c.classifiers.rate, steps)
        fit = self._fit(kind, classification(net), Training(Optimizer(schedule, "adam")))
        start = fit.start(variables["params"], key, mutable)
        # minibatches of SiTs are drawn with 1 and 2 as the last number
        draws = (c.seed, seed, 3 + CLASSIFIERS.index(kind))
        changes = kind == "encoder" and self.networks.changes is not None
        # The training folds its step numbers, which are smaller than this one, into the same key.
        changed = jax.random.fold_in(key, steps)

        def batch(t: int) -> data.Batch:
            drawn = data.draw(index, draws, t, c.budget.batch)
            at = jax.random.fold_in(changed, t) if changes else None
            return {"x": self._x(drawn, at), "labels": self.images.labels[drawn]}

        trained = fit.run(start, batch, steps, folder)
        variables = {"params": trained.state.params, **(trained.state.mutable or {})}
        return {"variables": sharding.gathered(variables)}

    def encoding(self, variables: PyTree, held_out: np.ndarray) -> tuple[Latents, np.ndarray]:
        """Evaluates a trained encoder, on all images if their features are kept.

        Features are not kept if images are changed at random, or if they are too many.

        - `held_out`: indices of the images that the encoder was not trained on, of shape (n,).

        It returns the data, with the encoder's features if they are kept, and for each held-out
        image whether it is classified correctly.
        """
        look = partial(_encoded, self.encoder, variables)
        if not self.keeps:
            answers = self._over(held_out, lambda index: look(self._x(index))[0])
            return self.images, np.argmax(answers, -1) == self.images.labels[held_out]
        everything = np.arange(len(self.images.labels))
        answers, features = self._over(everything, lambda index: look(self._x(index)))
        right = np.argmax(answers, -1) == self.images.labels
        return self.images._replace(features=features), right[held_out]

    def see(self, measure: PyTree, index: np.ndarray) -> quality.Seen:
        """Evaluates the measuring classifier or function on real images.

        - `measure`: the measuring classifier's variables; not used if a function measures.
        - `index`: indices of the images, of shape (n,).
        """
        if self.config.functions.measure is None:
            return self._over(index, lambda batch: self._look(measure, self._x(batch)))
        measured = partial(quality.measured, self.config.functions)
        return self._over(index, lambda at: measured(self.pictures(at)))

    def _look(self, measure: PyTree, x: Array | np.ndarray) -> quality.Seen:
        """Evaluates the measuring classifier or function on samples, in the scale of the SiT."""
        if self.config.functions.measure is None:
            return quality.look(self.measure, measure, x)
        return quality.measured(self.config.functions, self._decoded(x))

    def _decoded(self, x: Array | np.ndarray) -> np.ndarray:
        """Converts the SiT's scale to images, or to latents without a decoder."""
        x = np.asarray(sharding.gathered(jnp.asarray(x)))
        return decoded(self.config.functions, (x - self.images.bias) / self.images.scale)

    def pictures(self, index: np.ndarray) -> np.ndarray:
        """Reads or decodes real images for a function that measures them.

        - `index`: indices of the images, of shape (n,).

        It returns the images with pixels from 0 to 1, or latents without a decoder, (n, ...).
        """
        if isinstance(self.images.latents, Pictures):
            return self.images.latents[index] / np.float32(255)
        return self._decoded(data.batch(self.images._replace(features=None), index)["x"])

    def shown(self, index: np.ndarray) -> np.ndarray:
        """Converts real images to the form of the samples that a run keeps."""
        decodes = self.config.functions.decode is not None
        return self.pictures(index) if decodes else self._x(index)

    def _x(self, index: np.ndarray, key: Array | None = None) -> np.ndarray:
        """Returns the SiT's input, (n, side, side, channel); with a key changed at random.

        Features are not read from a file.
        """
        x = data.batch(self.images._replace(features=None), index)["x"]
        if key is None and not isinstance(self.images.latents, Pictures):
            return x
        return np.asarray(self._shown(x, self.networks.given.arrays, key))

    def _over(self, index: np.ndarray, fn: Callable[[np.ndarray], PyTree]) -> Any:
        """Applies `fn` to `sample_batch` indices at a time and joins the results."""
        return in_chunks(fn, index, self.config.sample_batch)

    def _keys(self, seed: int) -> jax.Array:
        """Creates four keys of a repetition.

        They are for initial weights, the alignment phase, the training, and samples.
        """
        return jax.random.split(jax.random.fold_in(jax.random.key(self.config.seed), seed), 4)

    def _learn(
        self,
        of: Repetition,
        weights: PyTree,
        kind: int,
        steps: int,
        folder: Path | None,
        aligned: PyTree | None = None,
        **looks: Any,
    ) -> Trained:
        """Trains a SiT on random minibatches of the training examples.

        - `weights`: the weights of the loss terms.
        - `kind`: 1 for the alignment phase, 2 for the later training. Each has its own key and
          minibatches.
        - `aligned`: initial weights that replace the usual ones; None for none.
        """
        c, keys = self.config, self._keys(of.seed)
        params = self._init["sit"](keys[0])
        params = {**params, **jax.tree.map(jnp.asarray, aligned or {})}
        mutable = {"weights": weights}
        if self.encoder is not None:
            mutable["encoder"] = of.encoder
        if arrays := self.networks.given.arrays:
            mutable["given"] = [jnp.asarray(x) for x in arrays]
        # The alignment phase has the same schedule: its rate depends on the step in the same way.
        training = Training(c.optimizer.over(c.budget.steps), compute=c.precision, ema=c.ema)
        fit = self._fit("sit", self.networks.loss, training)

        def batch(t: int) -> data.Batch:
            drawn = data.draw(of.split.learn, (c.seed, of.seed, kind), t, c.budget.batch)
            return data.batch(of.images, drawn)

        start = fit.start(params, keys[kind], mutable)
        return fit.run(start, batch, steps, folder, log_every=c.log_every, **looks)

    def align(self, of: Repetition, clean: bool, folder: Path | None) -> dict[str, Any]:
        """Trains a SiT on the alignment loss alone (eq. 14), from its usual initial weights.

        - `folder`: folder for checkpoints. None stores none.

        It returns `params`: the weights of the SiT (`sit`) and of its projector (`align`); and
        `loss`: the alignment loss at the logged steps.
        """
        weights = self.networks.weights(Way(align=True, clean=clean), 0, 1, velocity=0)
        trained = self._learn(of, weights, 1, self.config.alignment.steps, folder)
        params = {name: trained.state.params[name] for name in ("sit", "align")}
        loss = curve(trained, "align", self.config.log_every)
        return {"params": sharding.gathered(params), "loss": loss}

    def generate(
        self, name: str, of: Repetition, aligned: PyTree | None, folder: Path | None
    ) -> dict[str, Any]:
        """Trains a SiT in one way, and measures its samples during training.

        - `aligned`: the initial `params` from `align`, or None for the usual initial weights.
        - `folder`: folder for checkpoints. None stores none.

        It returns the measures of `quality.MEASURES`, one value per evaluation; the loss terms of
        `TERMS` at the logged steps; `samples` of the trained network, class by class; and
        `weights`, its averaged weights.
        """
        c, way = self.config, WAYS[name]
        noise = self._keys(of.seed)[3]
        weights = self.networks.weights(way, c.alignment.repa_weight, c.alignment.weight)

        def samples(state: State, labels: np.ndarray, key: Array) -> Array:
            net, params = self.networks.sit, state.ema["sit"]
            return sample(net, params, self.layout.place(labels), key, self.shape, c.sampler)

        def evaluate(state: State) -> dict[str, float]:
            def look(index: np.ndarray) -> quality.Seen:
                # Each batch of samples has its own noise, which is the same at every evaluation.
                key = jax.random.fold_in(noise, index[0])
                return self._look(of.measure, samples(state, index % self.classes, key))

            seen = self._over(np.arange(c.samples, dtype=np.int32), look)
            return quality.scores(seen, of.real)

        looks = {"evaluate": evaluate, "evaluate_every": c.every}
        trained = self._learn(of, weights, 2, c.budget.steps, folder, aligned, **looks)
        labels = np.arange(c.sample_batch, dtype=np.int32) % self.classes
        state = trained.state
        shown = sharding.gathered(samples(state, labels, noise))
        if c.functions.decode is not None:
            shown = self._decoded(shown)
        return {
            **{m: curve(trained, m) for m in quality.MEASURES},
            **{term: curve(trained, term, c.log_every) for term in TERMS},
            "samples": shown,
            "weights": sharding.gathered(state.ema["sit"]),
        }
