"""Answers of other programs, such as git, nvidia-smi and sbatch, and the end of processes with their parent. `status`
imports this, so it is small."""

import ctypes
import os
import re
import signal
import subprocess
from collections.abc import Mapping, Sequence

from sp_bench.config.parsing import shown

# What a program may need to start, to find its configuration and to print plain text. Nothing else is passed on:
# GIT_DIR of a hook would name another repository.
_PASSED_ON = re.compile(
    r"PATH|LD_LIBRARY_PATH|HOME|USER|LOGNAME|TMPDIR|TZ|LANG|LC_\w+|XDG_CONFIG_HOME|XDG_RUNTIME_DIR|SSL_CERT_(FILE|DIR)"
)

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_LIBC = ctypes.CDLL(None)


class NoAnswer(Exception):
    """A program gave no usable answer; the message names the program and says why."""


def answer(
    command: Sequence[str], *, stdin: str = "", limit_s: float = 30.0, variables: Mapping[str, str] | None = None
) -> str:
    """What `command` prints, without a shell. Bytes that are not UTF-8 become U+FFFD.

    variables: its environment; None: those of this process that the allow-list names.

    Raises:
        NoAnswer: it is not installed, cannot be started, takes longer than `limit_s` seconds, or fails.
    """
    program = command[0]
    if variables is None:
        variables = {name: value for name, value in os.environ.items() if _PASSED_ON.fullmatch(name)}
    given = stdin.encode(errors="surrogateescape")  # a path may have bytes that are no text
    try:
        done = subprocess.run(command, input=given, capture_output=True, timeout=limit_s, env=variables, check=False)
    except FileNotFoundError:
        raise NoAnswer(f"there is no {program} on this machine") from None
    except subprocess.TimeoutExpired:
        raise NoAnswer(f"{program} did not answer within {limit_s:.0f} s") from None
    except OSError as error:
        raise NoAnswer(f"{program} cannot be started: {error.strerror}") from None
    if done.returncode:
        printed = " ".join(done.stderr.decode(errors="replace").split())[-500:]  # what ended it stands last
        raise NoAnswer(f"{program} failed: {shown(printed or f'exit code {done.returncode}', 500)}")
    return done.stdout.decode(errors="replace")


def end_with(parent: int) -> None:
    """From now on this process is killed when the thread that started it ends, whatever ended that (prctl(2)). parent:
    the process of that thread; if it has ended already, this one ends at once."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
