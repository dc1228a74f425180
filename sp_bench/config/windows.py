"""Sliding windows over one causal sequence: token i sees the `window` tokens up to itself, i - window + 1 to i. Pure.

A kernel that computes a part of the scores gets a `Window` of that part instead. It is FlashAttention's `window_size`:
the last query and the last key lie side by side, and each query sees `left` keys before its place and `right` behind.
"""

from typing import NamedTuple


class Window(NamedTuple):
    """Query i of Sq sees keys i + Sk - Sq - left to i + Sk - Sq + right of Sk."""

    left: int
    right: int


def whole(window: int) -> Window:
    """The window of a whole sequence, where Sq == Sk."""
    return Window(window - 1, 0)


def visible_pairs(queries: int, keys: int, window: Window) -> int:
    """Visible (query, key) pairs of one head in a part of `queries` x `keys` scores."""
    place = keys - queries
    up_to_right = _sum_clamped(place + window.right + 1, queries, keys)
    return up_to_right - _sum_clamped(place - window.left, queries, keys)


def _sum_clamped(first: int, number: int, top: int) -> int:
    """The sum of `number` consecutive integers from `first` on, each raised to 0 and lowered to `top`."""
    start, stop = (min(max(each, 0), top) for each in (first, first + number))
    return (stop - start) * (start + stop - 1) // 2 + top * min(max(first + number - top, 0), number)
