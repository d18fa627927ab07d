"""Grammar-guided decoding, which the tests do not use."""

from pydantic import BaseModel


class StructuralTag(BaseModel):
    """A type that SGLang names in annotations."""


def get_model_structural_tag(*arguments: object, **options: object) -> object:
    """Not here."""
    raise NotImplementedError
