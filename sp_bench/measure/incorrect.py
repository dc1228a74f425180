"""The failures of a proof: what is wrong ends as `incorrect`, and what nothing can be proven of as `unsupported`."""


class Incorrect(Exception):
    """An output, a gradient, a loss, the number of bytes or the launched kernel is wrong."""


class CannotTell(Exception):
    """The trial's settings leave nothing to compare: an update below the weights' resolution, or losses that diverge.
    The message says what would do."""
