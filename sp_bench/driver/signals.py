"""Signals that stop a run: Ctrl-C, or the scheduler that takes the machine away."""

import signal
from types import FrameType

TAKEN_AWAY = (signal.SIGTERM, signal.SIGHUP)


class Interrupted(Exception):
    """A signal asked this run to stop."""


class Signals:
    """Keeps the first signal until `check`, so that it never interrupts a write. A Ctrl-C after another signal does not
    wait: it raises KeyboardInterrupt wherever the program is.

    A signal that is ignored stays ignored (nohup, jobs in the background).
    """

    def __init__(self) -> None:
        self._first: signal.Signals | None = None
        self._before = {}

    def __enter__(self) -> "Signals":
        for number in (signal.SIGINT, *TAKEN_AWAY):
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._hear)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def taken_away(self) -> str | None:
        """The signal's name, if it was one by which schedulers take an allocation."""
        return self._first.name if self._first and self._first in TAKEN_AWAY else None

    @property
    def exit_code(self) -> int:
        """The exit code after a signal, as in shells: 130 after Ctrl-C, 143 after SIGTERM."""
        return 128 + (self._first or signal.SIGINT)

    def check(self) -> None:
        """To be called a few times a second, wherever the run may stop.

        Raises:
            Interrupted: a signal has come.
        """
        if self._first is not None:
            raise Interrupted(self._first.name)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self._first is None:
            self._first = signal.Signals(number)
        elif number == signal.SIGINT:
            raise KeyboardInterrupt
