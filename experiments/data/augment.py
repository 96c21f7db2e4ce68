"""Random changes of images that leave what they show: one pure, keyed function of a batch."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Num, PRNGKeyArray

GREY = (0.299, 0.587, 0.114)  # luma of red, green and blue (ITU-R BT.601)


@dataclasses.dataclass(frozen=True)
class Augment:
    """How images, with pixels in [0, 1], are changed; by default not at all."""

    area: float = 1.0
    """Least share of the image that a crop of random size keeps, made as large again."""
    shift: int = 0
    """Pixels of zeros put around the image before it is cropped, at random, to its size."""
    flip: float = 0.0
    """Probability of a left-right reflection."""
    brightness: float = 0.0
    """Greatest change of brightness: pixels times 1 - b to 1 + b."""
    contrast: float = 0.0
    """Greatest change of the deviation of pixels from their mean."""
    saturation: float = 0.0
    """Greatest change of the deviation of colours from grey."""
    grey: float = 0.0
    """Probability that colours are left out."""
    solarise: float = 0.0
    """Probability that pixels above 1/2 are inverted."""
    noise: float = 0.0
    """Standard deviation of Gaussian noise of pixels."""
    cutout: int = 0
    """Side in pixels of a square of zeros, centred anywhere (DeVries and Taylor 2017)."""

    def __post_init__(self) -> None:
        for field in ("flip", "brightness", "contrast", "saturation", "grey", "solarise"):
            if not 0 <= getattr(self, field) <= 1:
                raise ValueError(f"{field} must be in [0, 1]; got {getattr(self, field)}")
        if not 0 < self.area <= 1:
            raise ValueError(f"area must be in (0, 1]; got {self.area}")
        for field in ("shift", "noise", "cutout"):
            if not getattr(self, field) >= 0:
                raise ValueError(f"{field} must be at least 0; got {getattr(self, field)}")


def pixels(images: Num[Array, "*any"]) -> Float[Array, "*any"]:
    """Images in [0, 1], stored so or as bytes."""
    return images / jnp.float32(255) if images.dtype == jnp.uint8 else images


def augment(
    images: Num[Array, "n height width channel"], key: PRNGKeyArray, how: Augment
) -> Float[Array, "n height width channel"]:
    """Each image changed on its own, in the order of the fields of `how`; pixels stay in [0, 1].

    >>> images = jnp.zeros((2, 8, 8, 1)).at[:, 4, 4].set(1.0)
    >>> moved = jax.jit(augment, static_argnums=2)(images, jax.random.key(0), Augment(shift=2))
    >>> moved.shape, moved.sum(axis=(1, 2, 3)).tolist()
    ((2, 8, 8, 1), [1.0, 1.0])
    """
    changes = [change for field, change in _CHANGES if getattr(how, field) != _NONE[field]]

    def changed(image: Array, key: PRNGKeyArray) -> Array:
        for i, change in enumerate(changes):
            image = change(image, jax.random.fold_in(key, i), how)
        return jnp.clip(image, 0, 1)

    return jax.vmap(changed)(pixels(images), jax.random.split(key, len(images)))


def _area(image: Array, key: PRNGKeyArray, how: Augment) -> Array:
    """A box of a share of the area and sides of a ratio of 3:4 to 4:3 (Szegedy et al. 2015)."""
    first, second, third = jax.random.split(key, 3)
    share = jax.random.uniform(first, minval=how.area, maxval=1.0)
    ratio = jnp.exp(jax.random.uniform(second, minval=-1.0, maxval=1.0) * jnp.log(4 / 3))
    side = jnp.minimum(jnp.sqrt(share * jnp.stack([ratio, 1 / ratio])), 1.0)
    size = jnp.array(image.shape[:2], jnp.float32)
    corner = jax.random.uniform(third, (2,)) * (1 - side) * size
    return jax.image.scale_and_translate(
        image, image.shape, (0, 1), 1 / side, -corner / side, "linear"
    )


def _shift(image: Array, key: PRNGKeyArray, how: Augment) -> Array:
    n = how.shift
    corner = jax.random.randint(key, (2,), 0, 2 * n + 1)
    padded = jnp.pad(image, ((n, n), (n, n), (0, 0)))
    return jax.lax.dynamic_slice(padded, (corner[0], corner[1], 0), image.shape)


def _flip(image: Array, key: PRNGKeyArray, how: Augment) -> Array:
    return jnp.where(jax.random.bernoulli(key, how.flip), image[:, ::-1], image)


def _factor(key: PRNGKeyArray, most: float) -> Array:
    return jax.random.uniform(key, minval=1 - most, maxval=1 + most)


def _brightness(image: Array, key: PRNGKeyArray, how: Augment) -> Array:
    return jnp.clip(image * _factor(key, how.brightness), 0, 1)


def _contrast(image: Array, key: PRNGKeyArray, how: Augment) -> Array:
    mean = _luma(image).mean()
    return jnp.clip(mean + (image - mean) * _factor(key, how.contrast), 0, 1)


def _saturation(image: Array, key: PRNGKeyArray, how: Augment) -> Array:
    grey = _luma(image)
    return jnp.clip(grey + (image - grey) * _factor(key, how.saturation), 0, 1)


def _grey(image: Array, key: PRNGKeyArray, how: Augment) -> Array:
    plain = jnp.broadcast_to(_luma(image), image.shape)
    return jnp.where(jax.random.bernoulli(key, how.grey), plain, image)


def _luma(image: Array) -> Float[Array, "height width 1"]:
    weights = jnp.array(GREY) if image.shape[-1] == 3 else jnp.full(image.shape[-1], 1.0)
    return (image * (weights / weights.sum())).sum(-1, keepdims=True)


def _solarise(image: Array, key: PRNGKeyArray, how: Augment) -> Array:
    inverted = jnp.where(image > 0.5, 1 - image, image)
    return jnp.where(jax.random.bernoulli(key, how.solarise), inverted, image)


def _noise(image: Array, key: PRNGKeyArray, how: Augment) -> Array:
    return image + how.noise * jax.random.normal(key, image.shape, image.dtype)


def _cutout(image: Array, key: PRNGKeyArray, how: Augment) -> Array:
    height, width, _ = image.shape
    first, second = jax.random.split(key)
    inside = [
        abs(2 * (jnp.arange(n) - jax.random.randint(k, (), 0, n)) + 1 - how.cutout % 2) < how.cutout
        for n, k in ((height, first), (width, second))
    ]
    return jnp.where(inside[0][:, None, None] & inside[1][None, :, None], 0, image)


_Change = Callable[[Array, PRNGKeyArray, Augment], Array]
_CHANGES: tuple[tuple[str, _Change], ...] = (
    ("area", _area),
    ("shift", _shift),
    ("flip", _flip),
    ("brightness", _brightness),
    ("contrast", _contrast),
    ("saturation", _saturation),
    ("grey", _grey),
    ("solarise", _solarise),
    ("noise", _noise),
    ("cutout", _cutout),
)
_NONE = {field.name: field.default for field in dataclasses.fields(Augment)}
