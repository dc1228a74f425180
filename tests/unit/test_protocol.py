"""The claim and write protocol under random kills: drivers as threads of which one runs at a time, handing over before
each call to the file system, so that every interleaving can happen and a seed repeats it."""

import contextlib
import io
import os
import random
import threading
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sp_bench.driver import claims
from sp_bench.driver.claims import Claims, LostClaim
from sp_bench.driver.owner import Owner
from sp_bench.rows import store

SCENARIOS = 1000
CALLS = ("mkdir", "rename", "replace", "listdir", "utime", "open", "fsync", "stat", "unlink", "rmdir")
KEYS = [f"{digit * 12}-01234567-0" for digit in "ab"]


class Killed(BaseException):
    """The driver is dead: none of its calls has an effect from here on."""


class Driver:
    def __init__(self, pid: int, kill_at: int | None) -> None:
        self.pid, self.kill_at = pid, kill_at
        self.num_calls, self.dead, self.turn = 0, False, threading.Semaphore(0)


class World:
    """Some drivers of one campaign, and what may never happen to it."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.random = folder, random.Random(seed)
        self.drivers: list[Driver] = []
        self.running: list[Driver] = []
        self.given_up: set[int] = set()  # alive, but the others believe them dead
        self.holders: dict[str, set[int]] = {key: set() for key in KEYS}
        self.num_commits = dict.fromkeys(KEYS, 0)
        self.num_refused = 0
        self.failures: list[BaseException] = []
        self.local = threading.local()

    def call(self, name: str) -> None:
        """One driver is about to call the file system: another may go first, or it dies."""
        driver = getattr(self.local, "driver", None)
        if driver is None:
            return
        if not driver.dead:
            driver.num_calls += 1
            following = self.random.choice(self.running)
            if following is not driver:
                following.turn.release()
                driver.turn.acquire()
            if driver.num_calls == driver.kill_at:
                driver.dead = True
                self.check_rows()
        if driver.dead:
            raise Killed

    def run(self, drivers: list[Driver]) -> None:
        self.drivers += drivers
        self.running = list(drivers)
        threads = [threading.Thread(target=self._drive, args=(driver,)) for driver in drivers]
        for thread in threads:
            thread.start()
        self.random.choice(drivers).turn.release()
        for thread in threads:
            thread.join()
        for failure in self.failures:
            raise failure

    def _drive(self, driver: Driver) -> None:
        driver.turn.acquire()
        self.local.driver = driver
        try:
            self.fill(driver)
        except Killed as end:
            if not driver.dead:
                self.failures.append(end)
        except Exception as failure:
            self.failures.append(failure)
        for holding in self.holders.values():
            holding.discard(driver.pid)
        self.running.remove(driver)
        if self.running:
            self.random.choice(self.running).turn.release()

    def fill(self, driver: Driver) -> None:
        """What a run does, less the trials."""
        with Claims(self.folder / store.WORK / claims.FOLDER) as mine:
            for _ in range(3):
                for key in KEYS:
                    claim = mine.take(key, lambda key=key: store.is_committed(self.folder, *identity(key)))
                    if claim:
                        self.hold(driver, key)
                        self.commit(mine, claim, key)
                        self.holders[key].discard(driver.pid)
                        mine.release(claim)

    def hold(self, driver: Driver, key: str) -> None:
        self.holders[key].add(driver.pid)
        believed = [pid for pid in self.holders[key] if pid not in self.given_up]
        assert len(believed) <= 1, f"{believed} hold {key}"
        assert driver.pid in self.given_up or not self.rows(key), f"{key} is claimed though committed"

    def commit(self, mine: Claims, claim: claims.Claim, key: str) -> None:
        trial_id, env_id, attempt = identity(key)
        row = {"status": "ok", "trial_id": trial_id, "env_id": env_id, "attempt": attempt}
        try:
            mine.commit(claim, row, self.folder)
        except LostClaim:
            self.num_refused += 1
            assert mine._owner.pid in self.given_up

    def rows(self, key: str) -> list[Path]:
        return [self.folder / name for name in REAL["listdir"](self.folder) if name.startswith(key)]

    def check_rows(self) -> None:
        """At any time: nothing but whole rows, each once."""
        for name in REAL["listdir"](self.folder):
            if name != store.WORK:
                assert (self.folder / name).read_bytes() == BYTES[name.rpartition("-")[0]], f"{name} is torn"
        assert max(self.num_commits.values()) <= 1, self.num_commits


def identity(key: str) -> tuple[str, str, int]:
    trial_id, env_id, attempt = key.split("-")
    return trial_id, env_id, int(attempt)


def row_bytes(key: str) -> bytes:
    trial_id, env_id, attempt = identity(key)
    row = {"status": "ok", "trial_id": trial_id, "env_id": env_id, "attempt": attempt}
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist([row | {"schema_version": 1}], schema=store.SCHEMA), file)
    return file.getvalue()


REAL = {name: getattr(os, name) for name in CALLS}
BYTES = {key: row_bytes(key) for key in KEYS}


def enter(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every call of the protocol pass through the world."""

    def passing(name):
        def call(*arguments, **options):
            world.call(name)
            if name == "fsync":  # slow, and nothing that this model could tell from the lack of it
                return None
            done = REAL[name](*arguments, **options)
            if name == "replace":
                world.num_commits[Path(arguments[1]).name.rpartition("-")[0]] += 1
            return done

        return call

    def opened(path, mode):
        world.call("open")
        return open(path, mode)

    class WriteInTwoParts(contextlib.AbstractContextManager):
        """Stands in for pyarrow's writer, whose file is slow to make."""

        def __init__(self, file, schema, **options):
            self.file = file

        def write_table(self, row):
            content = BYTES[f"{row['trial_id']}-{row['env_id']}-{row['attempt']}"]
            self.file.write(content[:100])
            self.file.flush()
            world.call("write")
            self.file.write(content[100:])

        def add_key_value_metadata(self, metadata):
            pass

        def __exit__(self, *failure):
            pass

    def ended(owner):
        return owner.pid in world.given_up or any(d.dead for d in world.drivers if d.pid == owner.pid)

    for name in CALLS:
        monkeypatch.setattr(os, name, passing(name))
    monkeypatch.setattr(store, "open", opened, raising=False)
    monkeypatch.setattr(store.pq, "ParquetWriter", WriteInTwoParts)
    monkeypatch.setattr(store, "_table", lambda row: row)
    monkeypatch.setattr(Owner, "has_ended", ended)
    monkeypatch.setattr(
        claims.owner, "this_process", lambda: Owner("host", "0" * 8, world.local.driver.pid, world.local.driver.pid)
    )


@pytest.mark.parametrize("given_up", [False, True])
def test_1000_random_kills_lose_double_and_tear_nothing_and_leave_no_claim(
    tmp_path, given_up, monkeypatch, record_property
):
    kills = refused = 0
    for seed in range(SCENARIOS // 2):
        folder = tmp_path / str(seed)
        (folder / store.WORK).mkdir(parents=True)
        world = World(folder, seed)
        drivers = [Driver(pid, world.random.randint(1, 60)) for pid in range(1, world.random.randint(3, 4))]
        if given_up:
            world.given_up.add(drivers[0].pid)
            drivers[0].kill_at = None
        with monkeypatch.context() as patched:
            enter(world, patched)
            try:
                world.run(drivers)
                world.run([Driver(99, None)])
                world.check_rows()
            except BaseException as failure:
                failure.add_note(f"seed {seed}")
                raise
        kills += sum(driver.dead for driver in drivers)
        refused += world.num_refused
        assert world.num_commits == dict.fromkeys(KEYS, 1), seed
        assert sorted(row.trial_id for row in store.committed(folder)) == [key[:12] for key in KEYS], seed
        assert os.listdir(folder / store.WORK / claims.FOLDER) == [], seed
        assert len(os.listdir(folder)) == len(KEYS) + 1, seed
    record_property("tried", kills)
    assert kills >= SCENARIOS // 4
    assert (refused > 0) == given_up
