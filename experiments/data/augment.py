"""Random augmentation of images, as a pure function of a batch, a key and a description.

`Augment` describes the changes and their strength; `augment` makes them. Each change is a private
function of one image, a key and the description.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Num, PRNGKeyArray

# Luma of red, green and blue, by the recommendation ITU-R BT.601.
GREY = (0.299, 0.587, 0.114)


@dataclasses.dataclass(frozen=True)
class Augment:
    """The random changes that `augment` makes to images with pixels in [0, 1].

    The default of every field means no change. Changes are made in the order of the fields. A field
    outside its range raises ValueError.

    Attributes:
      area: The smallest fraction of the image's area that a crop of random size may have, in (0,
        1]. Its aspect ratio is drawn from 3:4 to 4:3, and its sides are clipped to the image's. The
        crop is then resized to the size of the image.
      shift: The number of zero pixels added around the image, before a crop of the image's own size
        is taken at a random position; >= 0.
      flip: The probability of a reflection of left and right, in [0, 1].
      brightness: The largest change b of brightness, in [0, 1]: pixels are multiplied by one number
        from 1 - b to 1 + b.
      contrast: The largest change c of contrast, in [0, 1]: the differences of pixels from the
        image's mean grey value are multiplied by one number from 1 - c to 1 + c.
      saturation: The largest change s of saturation, in [0, 1]: the differences of colours from the
        pixel's grey value are multiplied by one number from 1 - s to 1 + s.
      grey: The probability that every colour is replaced by its grey value, in [0, 1].
      solarise: The probability that every pixel above 1/2 is inverted, in [0, 1].
      noise: The standard deviation of Gaussian noise added to every pixel; >= 0.
      cutout: The side in pixels of a square that is set to 0; >= 0. Its centre is any pixel of the
        image, so a part of it may be outside.

    References:
      Szegedy et al., Going deeper with convolutions, 2015, for crops of random area and ratio.
      DeVries and Taylor, Improved regularization of convolutional neural networks with cutout,
      2017.
    """

    area: float = 1.0
    shift: int = 0
    flip: float = 0.0
    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0
    grey: float = 0.0
    solarise: float = 0.0
    noise: float = 0.0
    cutout: int = 0

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
    """Converts images to floating point with pixels in [0, 1].

    Args:
      images: Images of any shape. Images of dtype uint8 are divided by 255. Other images must
        already be in [0, 1].

    Returns:
      The images as float32 if they were uint8, otherwise unchanged.
    """
    return images / jnp.float32(255) if images.dtype == jnp.uint8 else images


def augment(
    images: Num[Array, "n height width channel"], key: PRNGKeyArray, how: Augment
) -> Float[Array, "n height width channel"]:
    """Changes each image of a batch at random, independently of the others.

    The changes are made in the order of the fields of `how`. Pixels are then clipped to [0, 1]. The
    function is pure; under `jit`, `how` must be static.

    Args:
      images: Images `(n, height, width, channel)`, in [0, 1] or of dtype uint8 (0 to 255).
      key: The key of all random numbers.
      how: The changes and their strength.

    Returns:
      The changed images, with the same shape and pixels in [0, 1].

    >>> images = jnp.zeros((2, 8, 8, 1)).at[:, 4, 4].set(1.0)
    >>> moved = jax.jit(augment, static_argnums=2)(images, jax.random.key(0), Augment(shift=2))
    >>> moved.shape, moved.sum(axis=(1, 2, 3)).tolist()
    ((2, 8, 8, 1), [1.0, 1.0])
    """
    # Selected before tracing, so that an unused change costs neither compilation nor time.
    changes = [change for field, change in _CHANGES if getattr(how, field) != _NONE[field]]

    def changed(image: Array, key: PRNGKeyArray) -> Array:
        for i, change in enumerate(changes):
            image = change(image, jax.random.fold_in(key, i), how)
        return jnp.clip(image, 0, 1)

    return jax.vmap(changed)(pixels(images), jax.random.split(key, len(images)))


def _area(image: Array, key: PRNGKeyArray, how: Augment) -> Array:
    """Resizes a random crop to the size of the image (Szegedy et al. 2015)."""
    first, second, third = jax.random.split(key, 3)
    share = jax.random.uniform(first, minval=how.area, maxval=1.0)
    # Uniform in the logarithm between 3/4 and 4/3: wide and tall crops are equally likely.
    ratio = jnp.exp(jax.random.uniform(second, minval=-1.0, maxval=1.0) * jnp.log(4 / 3))
    side = jnp.minimum(jnp.sqrt(share * jnp.stack([ratio, 1 / ratio])), 1.0)
    size = jnp.array(image.shape[:2], jnp.float32)
    # Any position at which the crop is within the image.
    corner = jax.random.uniform(third, (2,)) * (1 - side) * size
    # Scaling by 1 / side makes the crop as large as the image. It also moves the crop's corner.
    return jax.image.scale_and_translate(
        image, image.shape, (0, 1), 1 / side, -corner / side, "linear"
    )


def _shift(image: Array, key: PRNGKeyArray, how: Augment) -> Array:
    """Crops the image, padded with zeros, to its own size at a random position."""
    n = how.shift
    corner = jax.random.randint(key, (2,), 0, 2 * n + 1)
    padded = jnp.pad(image, ((n, n), (n, n), (0, 0)))
    return jax.lax.dynamic_slice(padded, (corner[0], corner[1], 0), image.shape)


def _flip(image: Array, key: PRNGKeyArray, how: Augment) -> Array:
    return jnp.where(jax.random.bernoulli(key, how.flip), image[:, ::-1], image)


def _factor(key: PRNGKeyArray, most: float) -> Array:
    """Draws a factor from 1 - most to 1 + most."""
    return jax.random.uniform(key, minval=1 - most, maxval=1 + most)


def _brightness(image: Array, key: PRNGKeyArray, how: Augment) -> Array:
    return jnp.clip(image * _factor(key, how.brightness), 0, 1)


def _contrast(image: Array, key: PRNGKeyArray, how: Augment) -> Array:
    """Multiplies differences from the image's mean grey value by a random factor."""
    mean = _luma(image).mean()
    return jnp.clip(mean + (image - mean) * _factor(key, how.contrast), 0, 1)


def _saturation(image: Array, key: PRNGKeyArray, how: Augment) -> Array:
    """Multiplies differences from each pixel's grey value by a random factor."""
    grey = _luma(image)
    return jnp.clip(grey + (image - grey) * _factor(key, how.saturation), 0, 1)


def _grey(image: Array, key: PRNGKeyArray, how: Augment) -> Array:
    plain = jnp.broadcast_to(_luma(image), image.shape)
    return jnp.where(jax.random.bernoulli(key, how.grey), plain, image)


def _luma(image: Array) -> Float[Array, "height width 1"]:
    """Returns the grey value of each pixel: the luma of colours, else the mean of channels."""
    weights = jnp.array(GREY) if image.shape[-1] == 3 else jnp.full(image.shape[-1], 1.0)
    return (image * (weights / weights.sum())).sum(-1, keepdims=True)


def _solarise(image: Array, key: PRNGKeyArray, how: Augment) -> Array:
    """Inverts the pixels above 1/2, or none, at random."""
    inverted = jnp.where(image > 0.5, 1 - image, image)
    return jnp.where(jax.random.bernoulli(key, how.solarise), inverted, image)


def _noise(image: Array, key: PRNGKeyArray, how: Augment) -> Array:
    return image + how.noise * jax.random.normal(key, image.shape, image.dtype)


def _cutout(image: Array, key: PRNGKeyArray, how: Augment) -> Array:
    """Sets a square of `how.cutout` pixels a side to 0, centred on a random pixel."""
    height, width, _ = image.shape
    first, second = jax.random.split(key)
    # Distances in half pixels: a side may be odd (centred on a pixel) or even (between two).
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
