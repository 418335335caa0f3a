"""How bad input is refused: where the flags are."""

from pipeline.arguments import positive_integer, refuse

__all__ = ["positive_integer", "refuse"]
