"""The failure that ends a trial as `incorrect`."""


class Incorrect(Exception):
    """Output, a gradient, the loss, the bytes or the launched kernel is not what it must be."""
