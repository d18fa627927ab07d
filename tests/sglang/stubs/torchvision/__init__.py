"""Images, which the tests do not use."""

__version__ = "0.28.0"
