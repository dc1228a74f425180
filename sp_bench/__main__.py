"""The console's entry point: `sp-bench`, or `python -m sp_bench`."""

import os

INTERRUPTED = 130  # exit code after Ctrl-C, as in shells


def main() -> None:
    """Run the command of this process. A Ctrl-C ends it with one line, from here on; while trials run, `run` listens
    itself."""
    try:
        import signal

        hears = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # a job in the background may not
        if hears:
            signal.signal(signal.SIGINT, _end)
    except KeyboardInterrupt:
        _end()
        raise
    from sp_bench import cli

    if hears:
        signal.signal(signal.SIGINT, _unwind)
    cli.main()


def _end(*_: object) -> None:
    """End where the program is: what a library that is half imported makes of an exception is a traceback."""
    _say()
    os._exit(INTERRUPTED)


def _unwind(number: int, _: object) -> None:
    """End what was begun, then the program. A second Ctrl-C does not wait for that, and neither does one where Python
    ignores exceptions, as in some callbacks: the program would go on."""
    import signal
    import sys

    ignored = sys.unraisablehook
    sys.unraisablehook = lambda of: os._exit(INTERRUPTED) if isinstance(of.exc_value, SystemExit) else ignored(of)
    signal.signal(number, signal.SIG_DFL)
    _say()
    raise SystemExit(INTERRUPTED)


def _say() -> None:
    os.write(2, b"sp-bench: interrupted\n")


if __name__ == "__main__":
    main()
