"""Real commands in this process: a fresh one takes seconds to import."""

import os
import sys
from unittest import mock

import pytest

from sp_bench import cli


def console(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of `sp-bench ...`."""
    with mock.patch.dict(os.environ), mock.patch.object(sys, "argv", ["sp-bench", *arguments]):
        try:
            cli.main()
        except SystemExit as exit:
            code = exit.code if isinstance(exit.code, int) else int(exit.code is not None)
        else:
            code = 0
    printed = capfd.readouterr()
    return code, printed.out, printed.err


def refusal(capfd: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that a refused command ends with."""
    code, out, err = console(capfd, *arguments)
    assert (code, out) == (2, ""), err
    assert err.endswith("\n")
    line = err[:-1]
    assert line.startswith("sp-bench: ")
    assert line.isprintable()  # one line, and nothing that a terminal would obey
    assert len(line) < 4100
    return line
