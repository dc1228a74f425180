"""Processes of trials whose driver was killed: nobody watches them, and they would disturb what is measured next."""

import psutil

from sp_bench.driver import launcher, owner


def end() -> None:
    """End the trials on this machine whose driver has ended.

    Raises:
        RuntimeError: a process would not die.
    """
    for token in _tokens():
        driver = owner.parse(token)
        if driver and driver.has_ended():
            launcher.kill_all(token)


def _tokens() -> set[str]:
    """What marks the trials that run here."""
    found = set()
    for process in psutil.process_iter():
        try:
            found.add(process.environ().get(launcher.TOKEN, ""))
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue  # ended meanwhile, or another user's
    return found
