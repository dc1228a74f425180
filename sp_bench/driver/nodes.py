"""The other hosts of a run, and the ranks of a trial over several of them.

On each host but the first an agent (node_agent.py) starts the ranks of that host, watches them and ends them. One
connection joins it to the driver, in lines of JSON. The connection is their life line: an agent whose driver is gone
ends its ranks, and ranks whose agent is gone count as lost.

Slurm's srun starts the agents, or torchrun, which starts the same command on every host. They find the driver by a file
in the campaign's folder, which all hosts share.
"""

import json
import os
import queue
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from sp_bench import handover
from sp_bench.config.parsing import ConfigError, shown
from sp_bench.config.trial import TrialConfig
from sp_bench.driver import devices, owner
from sp_bench.driver.ranks import Meeting, Ranks, listen, with_source
from sp_bench.driver.verdict import Exit
from sp_bench.planning.allocation import Allocation
from sp_bench.rows import store

FOLDER = "nodes"  # in the campaign's _work: how agents find their driver, and what they printed
JOIN_LIMIT_S = 180.0  # from the start of a run: importing over a slow file system included
END_LIMIT_S = devices.KILL_LIMIT_S + 10  # how long an agent may take to end the ranks of its host
POLL_S = 0.05


class LostHost(ConfigError):
    """A host of this run is gone, so no trial over several can run any more."""


def file_of(folder: Path, name: str) -> Path:
    """The file in which the agents of a run find its driver, for the campaign in `folder`."""
    return folder / store.WORK / FOLDER / f"{''.join(c if c.isalnum() or c in '.-' else '_' for c in name)}.json"


def keep_alive(connection: socket.socket) -> None:
    """Let a connection end within half a minute after its host has vanished."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, seconds in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), seconds)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000)


class Agent:
    """The driver's side of an agent."""

    def __init__(self, connection: socket.socket, hello: Mapping[str, Any], lines: Iterator[bytes]) -> None:
        self.node: int = hello["node"]
        self.machine: str = hello["machine"]
        self.environment: Mapping[str, Any] = hello["environment"]
        self._connection, self._lines = connection, lines
        self._replies: queue.Queue[Mapping[str, Any]] = queue.Queue()
        self._exits: list[Exit] = []
        self._running: set[int] = set()
        self._flags: list[str] = []
        self._lost: str | None = None  # why nothing comes from there any more
        self._change = threading.Lock()
        threading.Thread(target=self._read, name=f"node {self.node}", daemon=True).start()

    def _read(self) -> None:
        reason = "its connection ended"
        with suppress(OSError, ValueError):
            for line in self._lines:
                message = json.loads(line)
                if message["event"] == "exit":
                    self._exited(message["rank"], message["code"], message["at"])
                elif message["event"] == "failed":
                    reason = message["reason"]
                else:
                    self._replies.put(message)
        with self._change:
            self._lost = reason
        for rank in sorted(self._running):
            self._exited(rank, None, handover.now())
        self._replies.put({"event": "lost"})

    def _exited(self, rank: int, code: int | None, at: float) -> None:
        with self._change:
            if rank in self._running:
                self._running.remove(rank)
                self._exits.append(Exit(rank, code, at))

    def require(self) -> None:
        """Raises:
        LostHost: this host is gone.
        """
        if self._lost is not None:
            raise LostHost(
                f"node {self.node} of this run is lost: {shown(self._lost)}; the run stops, and what is committed "
                "stays. Go on with sp-bench resume and the same words"
            )

    def send(self, **words: Any) -> None:
        """Send an order; one to a lost host is dropped."""
        with suppress(OSError):
            self._connection.sendall(json.dumps(words).encode() + b"\n")

    def reserve(self, kinds: Sequence[str], check: Callable[[], None]) -> None:
        """Wait until no other run measures there."""
        self.send(do="reserve", kinds=list(kinds))
        while True:
            check()
            with suppress(queue.Empty):
                message = self._replies.get(timeout=0.1)
                self.require()
                if message["event"] == "reserved":
                    return

    def start(self, command: Sequence[str], config: TrialConfig, folder: Path, port: int, exits: list[Exit]) -> None:
        """Start the ranks of this host, which meet at `port` of the driver's. How each ends is appended to `exits`.

        Raises:
            LostHost: this host is gone.
        """
        first = self.node * config.ranks_per_node
        with self._change:
            if self._lost is None:
                self._exits, self._running, self._flags = exits, set(range(first, first + config.ranks_per_node)), []
        self.require()
        self.send(do="start", command=list(command), config=config.to_mapping(), folder=str(folder), port=port)

    def end_ranks(self) -> None:
        """End all ranks of this host; returns once none is left, or the host is lost.

        Raises:
            RuntimeError: a process would not die.
        """
        self.send(do="end")
        deadline = time.monotonic() + END_LIMIT_S
        while self._lost is None:
            try:
                message = self._replies.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise RuntimeError(f"node {self.node} did not end its ranks within {END_LIMIT_S:.0f} s") from None
            if message["event"] == "ended":
                self._flags = list(message["flags"])
                return

    @property
    def flags(self) -> list[str]:
        """The flags of this host for the trial whose ranks were ended last."""
        return self._flags

    def close(self) -> None:
        """Let the agent go: the run is over."""
        self.send(do="leave")
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)


class SpreadRanks:
    """The processes of one launch over several hosts, with the methods of `Ranks`."""

    def __init__(self, agents: Sequence[Agent]) -> None:
        self._own, self._agents = Ranks(), agents
        self._phase: str | None = None
        self._started = False

    @property
    def exits(self) -> list[Exit]:
        return self._own.exits

    def start(self, command: Sequence[str], config: TrialConfig, folder: Path, token: str) -> None:
        with listen(config) as listening:
            port = listening.getsockname()[1]
            self._started = True
            for agent in self._agents:
                agent.start(command, config, folder, port, self.exits)
            self._own.start_node(0, command, config, folder, token, Meeting("127.0.0.1", port, listening))

    def enter_phase(self, phase: str) -> None:
        if phase != self._phase:
            self._phase = phase
            for agent in self._agents:
                agent.send(do="phase", phase=phase)

    def terminate(self) -> None:
        self._own.terminate()
        for agent in self._agents:
            agent.send(do="terminate")

    def kill(self) -> None:
        """End all ranks on all hosts.

        Raises:
            RuntimeError: a process would not die.
        """
        self._own.kill()
        if self._started:
            for agent in self._agents:
                agent.end_ranks()

    def join(self) -> None:
        self._own.join()

    def flags(self) -> list[str]:
        return [flag for agent in self._agents for flag in agent.flags]


class Nodes:
    """The hosts of this run that have joined it; this one is node 0."""

    def __init__(self, own: Mapping[str, Any], agents: Sequence[Agent]) -> None:
        self._own, self._agents = own, sorted(agents, key=lambda agent: agent.node)

    def ranks(self, num_nodes: int) -> SpreadRanks:
        return SpreadRanks(self._agents[: num_nodes - 1])

    def environments(self, num_nodes: int) -> list[Mapping[str, Any]]:
        """The environments of the first `num_nodes` hosts."""
        return [self._own, *(agent.environment for agent in self._agents[: num_nodes - 1])]

    @contextmanager
    def reserved(
        self,
        num_nodes: int,
        own: Sequence[str],
        kinds: Sequence[str],
        check: Callable[[], None],
        say: Callable[[str], None],
    ) -> Iterator[None]:
        """While open, no other run measures on the first hosts: on the devices `own` of this one, and those of `kinds`
        of the others.

        Raises:
            LostHost: one of them is gone.
        """
        others = {agent.machine: agent for agent in reversed(self._agents[: num_nodes - 1])}
        here = owner.this_process().machine
        others.pop(here, None)  # a node of this machine, as in a container: its locks are ours
        for agent in self._agents[: num_nodes - 1]:
            agent.require()
        with ExitStack() as held:
            for machine in sorted([here, *others]):  # all runs in one order, so that no two wait for each other
                if machine == here:
                    held.enter_context(devices.reserved(own, check, say))
                else:
                    held.callback(others[machine].send, do="release")
                    others[machine].reserve(kinds, check)
            yield


@contextmanager
def joined(allocation: Allocation, folder: Path, own: Mapping[str, Any], check: Callable[[], None]) -> Iterator[Nodes]:
    """While open, all hosts of this run have an agent. `own`: the environment of this host. `check`: called while
    waiting; may raise.

    Raises:
        ConfigError: srun cannot be started, or a host does not join within JOIN_LIMIT_S.
    """
    secret = secrets.token_hex(16)
    name = allocation.name or f"{owner.this_process()}-{secret[:8]}"
    file = file_of(folder, name)
    with ExitStack() as held:
        listening = held.enter_context(socket.create_server(("", 0), backlog=allocation.num_hosts))
        _write_privately(file, {"port": listening.getsockname()[1], "secret": secret})
        held.callback(file.unlink, missing_ok=True)
        started = held.enter_context(_agents_by_srun(allocation, file)) if allocation.by == "slurm" else None
        agents: dict[int, Agent] = {}
        held.callback(lambda: [agent.close() for agent in agents.values()])
        listening.settimeout(0.1)
        deadline = time.monotonic() + JOIN_LIMIT_S
        while len(agents) < allocation.num_hosts - 1:
            check()
            if started is not None and started.poll() is not None:
                raise ConfigError(
                    _not_joined(allocation, agents, f"srun ended with exit code {started.returncode}", file)
                )
            if time.monotonic() > deadline:
                raise ConfigError(_not_joined(allocation, agents, f"waited for {JOIN_LIMIT_S:.0f} s", file))
            with suppress(TimeoutError):
                connection, _ = listening.accept()
                if (agent := _welcome(connection, secret)) and 0 < agent.node < allocation.num_hosts:
                    held.callback(connection.close)
                    agents[agent.node] = agent
        yield Nodes(own, list(agents.values()))


def _not_joined(allocation: Allocation, agents: Mapping[int, Agent], why: str, file: Path) -> str:
    missing = [str(node) for node in range(1, allocation.num_hosts) if node not in agents]
    how = (
        f"what the agents printed is in {file.with_suffix('.txt')}"
        if allocation.by == "slurm"
        else "start the same torchrun command on every host, with a results_root that all of them share"
    )
    last = file.with_suffix(".txt").read_text(errors="replace").strip() if file.with_suffix(".txt").exists() else ""
    words = f": {shown(last.splitlines()[-1], 300)}" if last else ""
    return f"node {', '.join(missing)} of {allocation.num_hosts} did not join this run ({why}){words}; {how}"


def _write_privately(file: Path, content: Mapping[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    temporary.touch(0o600)
    temporary.write_text(json.dumps(content))
    os.replace(temporary, file)


def _welcome(connection: socket.socket, secret: str) -> Agent | None:
    """The agent behind a connection; None if it does not know the secret.

    Raises:
        ConfigError: it knows the secret, but its greeting lacks a field.
    """
    with ExitStack() as held:
        held.enter_context(connection)
        lines = held.enter_context(connection.makefile("rb"))
        connection.settimeout(10)
        try:
            hello = json.loads(lines.readline(1_000_000))
            given = str(hello["secret"]).encode()
        except (OSError, ValueError, KeyError, TypeError, RecursionError):  # silent, not JSON, or of another shape
            return None
        if not secrets.compare_digest(given, secret.encode()):
            return None
        connection.settimeout(None)
        keep_alive(connection)
        try:
            agent = Agent(connection, hello, iter(lines))
        except KeyError as error:
            raise ConfigError(
                f"the agent at {connection.getpeername()[0]} does not say its {error.args[0]}: its sp_bench is another "
                "version; install the same one on every host"
            ) from error
        held.pop_all()  # from here on they are the agent's
        return agent


@contextmanager
def _agents_by_srun(allocation: Allocation, file: Path) -> Iterator[subprocess.Popen[bytes]]:
    """An agent on each node of this job but the first."""
    number = allocation.num_hosts - 1
    command = [
        *("srun", f"--nodes={number}", f"--ntasks={number}", "--ntasks-per-node=1", "--relative=1"),
        "--overlap",  # with a step that this run may be itself
        "--cpu-bind=none",  # the ranks of a node share its processors, as those of this one
        *("--wait=0", "--kill-on-bad-exit=0"),  # one agent's end is not that of others; the driver sees it
        *("--input=none", f"--output={file.with_suffix('.txt')}", "--open-mode=append"),
        *(sys.executable, "-P", "-m", "sp_bench.driver.node_agent", str(file.absolute())),
    ]
    try:
        process = subprocess.Popen(
            command, env=with_source(os.environ), stdin=subprocess.DEVNULL, start_new_session=True
        )
    except OSError as error:
        raise ConfigError(f"srun cannot be started: {error.strerror}; trials over several nodes need it") from None
    try:
        yield process
    finally:
        try:
            process.wait(END_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
