"""The driver and an agent of another host, over a real connection: locks there, ranks there, and who ends them."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

import psutil
import pytest

from sp_bench.config.parsing import ConfigError
from sp_bench.driver import devices, launch, node_agent, nodes, owner, record_check
from sp_bench.driver.nodes import Agent, LostHost, Nodes, SpreadRanks
from sp_bench.rows.row import Outcome


class Pair(NamedTuple):
    driver: Agent
    agent: node_agent._Agent
    connection: socket.socket  # the driver's end


@pytest.fixture
def pair() -> Iterator[Pair]:
    here, there = socket.socketpair()
    agent = node_agent._Agent(there, 1, "127.0.0.1")

    def serve() -> None:
        with suppress(node_agent.DriverGone, OSError):
            agent.serve()
        agent.end()
        there.close()

    thread = threading.Thread(target=serve)
    thread.start()
    lines = here.makefile("rb")
    hello = {"node": 1, "machine": "ffffffff", "environment": {"hostname": "b"}}
    driver = Agent(here, hello, iter(lines))
    yield Pair(driver, agent, here)
    driver.close()
    thread.join(20)
    lines.close()
    here.close()
    assert not thread.is_alive()


def is_free(device: str) -> bool:
    def stop() -> None:
        raise TimeoutError

    with suppress(TimeoutError), devices.reserved([device], stop, lambda words: None):
        return True
    return False


def test_while_a_trial_over_two_hosts_runs_no_other_run_measures_on_either(pair):
    hosts = Nodes({}, [pair.driver])
    assert owner.this_process().machine != "ffffffff"
    with hosts.reserved(2, ["a GPU"], ["cpu"], lambda: None, lambda words: None):
        assert not is_free("cpu")  # by the agent
        assert not is_free("a GPU")  # by the driver
    deadline = time.monotonic() + 60
    while not is_free("cpu"):
        assert time.monotonic() < deadline
    assert is_free("a GPU")


def test_a_run_that_is_interrupted_while_it_waits_for_a_device_there_stops_waiting(pair):
    class Enough(Exception):
        pass

    def enough() -> None:
        raise Enough

    with devices.reserved(["cpu"], lambda: None, lambda words: None):  # of another run there
        hosts = Nodes({}, [pair.driver])
        with pytest.raises(Enough), hosts.reserved(2, [], ["cpu"], enough, lambda words: None):
            pass
        pair.connection.shutdown(socket.SHUT_RDWR)  # the run is over


def started(pair, make_config, folder, script="exec sleep 600") -> SpreadRanks:
    """Two ranks here and two there."""
    ranks = SpreadRanks([pair.driver])
    config = make_config(method="ring", sp_size=4, num_nodes=2)
    ranks.start(["sh", "-c", script], config, folder, devices.new_token())
    return ranks


def sleepers() -> list[psutil.Process]:
    """Of the children of this process, which other tests may have left some: those that `started` has started."""
    found = []
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile
            if process.cmdline() == ["sleep", "600"]:
                found.append(process)
    return found


def children(number: int) -> list[psutil.Process]:
    deadline = time.monotonic() + 60
    while len(found := sleepers()) < number:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


def test_each_host_starts_its_ranks_and_says_how_they_ended(pair, make_config, tmp_path):
    script = 'echo "$RANK $LOCAL_RANK $LOCAL_WORLD_SIZE $WORLD_SIZE"; exit $RANK'
    ranks = started(pair, make_config, tmp_path, script)
    deadline = time.monotonic() + 60
    while len(ranks.exits) < 4:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    ranks.kill()
    ranks.join()
    assert sorted((each.rank, each.code) for each in ranks.exits) == [(rank, rank) for rank in range(4)]
    said = [(tmp_path / f"rank{rank}.log").read_text() for rank in range(4)]
    assert said == ["0 0 2 4\n", "1 1 2 4\n", "2 0 2 4\n", "3 1 2 4\n"]


def test_ending_the_ranks_ends_those_of_the_other_host_before_it_returns(pair, make_config, tmp_path):
    ranks = started(pair, make_config, tmp_path)
    found = children(4)
    ranks.kill()
    assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in found)
    ranks.join()
    assert len(ranks.exits) == 4


def test_ranks_whose_driver_is_gone_are_ended_and_ranks_whose_agent_is_gone_are_lost(pair, make_config, tmp_path):
    ranks = started(pair, make_config, tmp_path)
    children(4)
    pair.connection.shutdown(socket.SHUT_RDWR)
    deadline = time.monotonic() + 60
    while len(ranks.exits) < 2 or len(sleepers()) > 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert [(each.rank, each.code) for each in ranks.exits] == [(2, None), (3, None)]
    assert str(ranks.exits[0]) == "the host of rank 2 was lost"
    with pytest.raises(LostHost, match="node 1 of this run is lost"):
        started(pair, make_config, tmp_path)
    ranks.kill()  # waits for nobody
    ranks.join()


def test_only_who_has_the_secret_of_the_run_is_taken_for_an_agent():
    strangers = (
        b'{"secret": "other", "node": 1}',
        b'{"secret": "\xc3\xa9"}',
        b"GET / HTTP/1.1",
        b"{}",
        b"[" * 10_000,
        b"7",
        b"",
    )
    for hello in strangers:
        here, there = socket.socketpair()
        there.sendall(hello + b"\n")
        there.close()
        assert nodes._welcome(here, "secret") is None


def test_an_agent_that_leaves_out_what_it_is_is_an_error_and_no_stranger():
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        socket.create_connection(listening.getsockname()) as there,
    ):
        here, _ = listening.accept()
        there.sendall(b'{"secret": "secret", "machine": "ffffffff"}\n')
        with pytest.raises(ConfigError, match="does not say its node"):
            nodes._welcome(here, "secret")


@pytest.mark.parametrize(
    ("changed", "flags"),
    [
        ({"hostname": "b", "device_uuids": ["2"]}, []),
        ({"cpu": "another"}, ["unequal_nodes"]),
        ({"packages": {"torch": "3"}}, ["unequal_nodes"]),
    ],
)
def test_hosts_that_differ_in_what_times_depend_on_are_flagged(changed, flags):
    first = {"hostname": "a", "device_uuids": ["1"], "cpu": "one", "packages": {"torch": "2"}, "env": {}}
    outcome = launch.with_nodes(Outcome("ok", "done"), [first, first | changed])
    assert outcome.measured.get("flags", []) == flags
    assert [each["hostname"] for each in outcome.measured["node_environments"]] == ["a", changed.get("hostname", "a")]
    assert "node_environments" not in record_check.OF_RANKS
