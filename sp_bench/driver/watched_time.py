"""The time in which this process could watch its ranks."""

import threading
import time

BEAT_S = 0.1
LATE_S = 2.0  # a beat that is later was not delayed by the machine's load: the process was stopped


class WatchedTime:
    """Monotonic seconds without those in which this process was stopped, as on a paused machine: its ranks may have
    been stopped too. A thread beats ten times a second, so that a slow read of a shared folder, which holds the thread
    that reads, is no such time."""

    def __init__(self) -> None:
        self._stopped_s = 0.0
        self._last_beat = time.monotonic()
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat_until_ended, daemon=True)

    def __enter__(self) -> "WatchedTime":
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._thread.join()

    def now(self) -> float:
        """Called after a stop, it may come before the next beat."""
        self.beat(time.monotonic())
        with self._lock:
            return self._last_beat - self._stopped_s

    def beat(self, at: float) -> None:
        """Note that the process runs at monotonic time `at`."""
        with self._lock:
            late_s = at - self._last_beat - BEAT_S
            if late_s > LATE_S:
                self._stopped_s += late_s
            self._last_beat = max(at, self._last_beat)

    def _beat_until_ended(self) -> None:
        while not self._ended.wait(BEAT_S):
            self.beat(time.monotonic())
