import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sp_bench.driver import claims, owner
from sp_bench.driver.claims import Claims, LostClaim
from sp_bench.driver.owner import Owner
from sp_bench.rows import store

KEY = "0123456789ab-01234567-0"
ROW = {"status": "ok", "trial_id": "0123456789ab", "env_id": "01234567", "attempt": 0, "median_step_ms": 1.5}
FILL = Path(__file__).parent / "fill.py"


def never() -> bool:
    return False


@pytest.fixture
def folder(tmp_path):
    return tmp_path / store.WORK / claims.FOLDER


@pytest.fixture
def another(monkeypatch):
    """Makes what follows look like another process of this machine, alive or ended, or like one of another machine."""
    here = owner.this_process()

    def become(*, pid=1, machine=here.machine, ended=False):
        other = Owner("elsewhere", machine, pid, 1)
        monkeypatch.setattr(owner, "this_process", lambda: other)
        real = Owner.has_ended
        monkeypatch.setattr(Owner, "has_ended", lambda self: ended if self == other else real(self))

    return become


def grow_old(claim):
    """As if its heart had not beaten for longer than claims live."""
    past = claim.path.stat().st_mtime - claims.STALE_S - 1
    os.utime(claim.path, (past, past))


def test_a_claim_is_had_by_one_and_free_again_when_it_is_released(folder, another):
    with Claims(folder) as first:
        another()
        with Claims(folder) as second:
            claim = first.take(KEY, never)
            assert claim is not None
            assert second.take(KEY, never) is None
            assert second.holders() == [f"process {os.getpid()} on {claim.owner.host}"]
            first.release(claim)
            assert second.take(KEY, never) is not None
    assert os.listdir(folder) == []


def test_what_is_committed_is_not_claimed(folder):
    with Claims(folder) as mine:
        assert mine.take(KEY, lambda: True) is None
        assert os.listdir(folder) == []


def test_the_folder_is_listed_twice_for_all_claims_of_a_warm_group(folder, another, monkeypatch):
    """Listed for each claim, 2,000 of them took 24 s, while the device was held."""
    keys = [f"{number:012x}-01234567-0" for number in range(50)]
    with Claims(folder) as theirs:
        assert [claim.key for claim in theirs.take_all(keys[:10], lambda key: key == keys[3])] == keys[:3] + keys[4:10]
        another()
        with Claims(folder) as mine:
            listings, listed = [], os.listdir
            monkeypatch.setattr(os, "listdir", lambda place: listings.append(place) or listed(place))
            assert [claim.key for claim in mine.take_all(keys, lambda _: False)] == [keys[3], *keys[10:]]
            assert listings == [folder] * 2


def test_the_claim_of_a_process_that_ended_is_taken_over_at_once(folder):
    code = f"from pathlib import Path; from sp_bench.driver.claims import Claims; import os\n\
with Claims(Path({str(folder)!r})) as mine:\n    mine.take({KEY!r}, lambda: False); os._exit(0)"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert len(os.listdir(folder)) == 1
    with Claims(folder) as mine:
        assert mine.take(KEY, never) is not None
        assert len(os.listdir(folder)) == 1


def test_a_claim_of_another_machine_is_taken_over_when_its_heart_has_stopped_and_not_before(folder, another):
    here = owner.this_process()
    another(machine="0" * 8)
    with Claims(folder) as theirs:
        claim = theirs.take(KEY, never)
        assert claim is not None
        with Claims(folder) as mine:
            mine._owner = here
            assert mine.take(KEY, never) is None
            grow_old(claim)
            assert mine.take(KEY, never) is not None


def test_the_heart_beats_while_a_claim_is_held(folder, monkeypatch):
    monkeypatch.setattr(claims, "HEARTBEAT_S", 0.02)
    with Claims(folder) as mine:
        claim = mine.take(KEY, never)
        assert claim is not None
        grow_old(claim)
        mine._closed.wait(1)
        assert not mine._is_dead(claim)


def test_a_late_writer_is_refused_and_the_row_of_who_took_over_counts(tmp_path, folder, another):
    with Claims(folder) as late:
        claim = late.take(KEY, never)
        assert claim is not None
        grow_old(claim)
        another()
        with Claims(folder) as second:
            taken = second.take(KEY, never)
            assert taken is not None
            with pytest.raises(LostClaim, match=KEY):
                late.commit(claim, ROW, tmp_path)
            assert list(store.committed(tmp_path)) == []
            second.commit(taken, ROW | {"median_step_ms": 2.5}, tmp_path)
            second.release(taken)
        with pytest.raises(LostClaim, match=KEY):
            late.commit(claim, ROW | {"status": "oom", "reason": "2 GiB"}, tmp_path)
        late.release(claim)
    assert store.read(tmp_path, ("median_step_ms",))[0].to_pylist() == [{"median_step_ms": 2.5}]
    assert os.listdir(folder) == []


def test_a_folder_that_is_gone_is_no_lost_claim(tmp_path, folder):
    with Claims(folder) as mine:
        claim = mine.take(KEY, never)
        assert claim is not None
        claim.path.rmdir()
        folder.rmdir()
        with pytest.raises(FileNotFoundError):
            mine.commit(claim, ROW, tmp_path)
        with pytest.raises(FileNotFoundError):
            mine.take(KEY, never)


def test_a_full_disk_leaves_neither_row_nor_temporary_file(tmp_path, folder, monkeypatch):
    def full(*arguments, **options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with Claims(folder) as mine:
        claim = mine.take(KEY, never)
        assert claim is not None
        monkeypatch.setattr(store.os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            mine.commit(claim, ROW, tmp_path)
        assert list(claim.path.iterdir()) == []
    assert list(store.committed(tmp_path)) == []


def test_other_things_in_the_folder_are_left_alone(folder):
    folder.mkdir(parents=True)
    (folder / "notes.txt").write_text("mine")
    with Claims(folder) as mine:
        assert mine.take(KEY, never) is not None
    assert os.listdir(folder) == ["notes.txt"]


def test_32_processes_that_fill_one_campaign_leave_the_exact_union_each_row_once(tmp_path):
    done = subprocess.run([sys.executable, str(FILL), str(tmp_path), "32", "40"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert sorted(told) == [f"{number:012x}" for number in range(40)]  # by exactly one of them each
    assert sorted(row.trial_id for row in store.committed(tmp_path)) == sorted(told)
    table, problems = store.read(tmp_path, ("trial_id", "attempt"))
    assert problems == []
    assert table["trial_id"].to_pylist() == sorted(told)
    assert os.listdir(tmp_path / store.WORK / claims.FOLDER) == []
    assert len(os.listdir(tmp_path)) == 41


def test_this_process_has_not_ended_and_one_that_was_started_at_another_time_has():
    here = owner.this_process()
    assert not here.has_ended()
    assert Owner(here.host, here.machine, here.pid, here.started + 1).has_ended()
    assert not Owner(here.host, "0" * 8, here.pid, here.started + 1).has_ended()


def test_a_process_that_nobody_has_waited_for_has_ended():
    process = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    here = owner.this_process()
    assert Owner(here.host, here.machine, process.pid, owner._stat(process.pid)[1]).has_ended()
    process.wait()
    assert Owner(here.host, here.machine, process.pid, 1).has_ended()


@given(
    host=st.from_regex(r"\A[A-Za-z0-9-]{1,64}\Z"),
    machine=st.from_regex(r"\A[0-9a-f]{8}\Z"),
    pid=st.integers(1, 2**22),
    started=st.integers(0, 2**63),
)
def test_an_owner_reads_back_from_its_text(host, machine, pid, started):
    text = str(Owner(host, machine, pid, started))
    assert owner.parse(f"{text}.0123abcd") == Owner(host, machine, pid, started)
    assert "/" not in text


@pytest.mark.parametrize("text", ["", "a.b", "host.01234567.1", "../x.01234567.1.1", "host.01234567.-1.1"])
def test_other_text_names_no_owner(text):
    assert owner.parse(text) is None
