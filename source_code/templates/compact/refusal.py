"""How bad input is refused."""

from pipeline.arguments import positive_integer, refuse
