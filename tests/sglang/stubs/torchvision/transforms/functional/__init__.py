"""Functions on images."""

from torchvision.transforms import InterpolationMode as InterpolationMode


def to_tensor(*arguments: object, **options: object) -> object:
    """Not here."""
    raise NotImplementedError


def pil_to_tensor(*arguments: object, **options: object) -> object:
    """Not here."""
    raise NotImplementedError
