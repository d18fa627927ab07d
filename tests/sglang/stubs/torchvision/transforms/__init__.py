"""Transforms of images."""

from enum import Enum


class InterpolationMode(Enum):
    """A type that transformers names."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


class Compose:
    """A type that SGLang names."""


class Normalize:
    """A type that SGLang names."""


class Resize:
    """A type that SGLang names."""


class ToTensor:
    """A type that SGLang names."""


class Lambda:
    """A type that SGLang names."""
