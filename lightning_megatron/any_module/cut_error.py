"""The error of a network that cannot be cut as it was asked to be."""


class CutError(RuntimeError):
    """A network computes other numbers, or none, on the parts that ranks have of it."""
