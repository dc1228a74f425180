"""The failure that ends a trial as `incorrect`."""


class Incorrect(Exception):
    """An output, a gradient, a loss, the number of bytes or the launched kernel is wrong."""
