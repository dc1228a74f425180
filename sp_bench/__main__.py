"""The console's entry point: `sp-bench`, or `python -m sp_bench`."""

import signal


def main() -> None:
    """Run the command of this process. What it imports takes half a second, in which a Ctrl-C ends the process, as that
    of any program, and raises nothing."""
    heard_by = signal.getsignal(signal.SIGINT)
    if heard_by is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from sp_bench import cli

    signal.signal(signal.SIGINT, heard_by)
    cli.main()


if __name__ == "__main__":
    main()
