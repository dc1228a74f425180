"""A stdout whose failure does not end the run."""

import os
from typing import Any, TextIO


class Output:
    """Writes to a stream until that fails, because the reader went away (`sp-bench run | head -1`) or the disk is full.
    Then it drops all text, so that the run goes on."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.lost: OSError | None = None  # why writing stopped

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._lose(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._lose(error)

    def _lose(self, error: OSError) -> None:
        self.lost = self.lost or error
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())  # drops what is buffered and what follows
        os.close(nowhere)
