"""Runs trials on this machine, one after another: two at once would disturb each other's times."""

from collections.abc import Sequence
from contextlib import closing

from sp_bench.driver import attempt, devices, orphans
from sp_bench.driver.attempt import Attempt, Driver
from sp_bench.driver.claims import Claim
from sp_bench.driver.plan import process_key


def launch(left: Sequence[Attempt], driver: Driver) -> list[Attempt]:
    """Run the first of the attempts that no other driver has, with those that may share its processes; those that got a
    row. Empty: others have them all.

    Whatever becomes of one, the next call goes on, in fresh processes if its own are gone.
    """
    progress, done = driver.progress, []
    with devices.reserved(driver.devices, driver.signals.check, progress.note):
        held = _claim(left, driver)
        if not held:
            return []
        orphans.end()
        progress.start(held[0][0].planned)
        try:
            with closing(attempt.launch(held, driver)) as ends:
                # ends first: it must hear that there are no more, to end what is left of the processes
                for ended, (current, _), (following, _) in zip(ends, held, [*held[1:], held[-1]], strict=False):
                    if ended is None:
                        progress.refuse(current.planned)
                    else:
                        progress.finish(current.planned, *ended)
                        done.append(current)
                    if following is not current:
                        progress.start(following.planned)  # in the same processes, if they are left
        finally:
            for _, claim in held:
                driver.claims.release(claim)
    return done


def _claim(left: Sequence[Attempt], driver: Driver) -> list[tuple[Attempt, Claim]]:
    """The first attempt to be had, and those that follow it and may run in its processes: not those of another
    replicate, which is a launch of its own."""
    held: list[tuple[Attempt, Claim]] = []
    for current in left:
        first = held[0][0].planned if held else current.planned
        keys = [(process_key(each.config), each.replicate) for each in (first, current.planned)]
        if held and (not keys[0][0] or keys[0] != keys[1]):
            break
        if claim := driver.claim(current):
            held.append((current, claim))
    return held
