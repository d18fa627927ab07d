"""Functions on images."""

from torchvision.transforms import InterpolationMode as InterpolationMode
