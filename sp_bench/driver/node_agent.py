"""The agent of one host: starts, watches and ends the ranks of this host, by orders of the driver on another.

`python -m sp_bench.driver.node_agent FILE`, where srun starts it; under torchrun `sp-bench run` becomes it. Once the
connection to the driver ends, whatever the reason, the ranks of this host end too.
"""

import json
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

from sp_bench import hardware
from sp_bench.config.parsing import parse
from sp_bench.config.trial import TrialConfig
from sp_bench.driver import devices, owner
from sp_bench.driver.neighbours import Neighbours
from sp_bench.driver.nodes import JOIN_LIMIT_S, POLL_S, keep_alive
from sp_bench.driver.ranks import Meeting, Ranks


class DriverGone(Exception):
    """The connection ended before the driver let go."""


def serve(file: Path, node: int, address: str) -> int:
    """Serve the driver that `file` leads to, which is at `address`, until it lets go. Returns the exit code: 0, or 1 if
    there is no driver or it was lost."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # the driver gets them too, records what ran, and ends this
    connection = _connect(file, node, address)
    if connection is None:
        print(f"sp-bench: no driver within {JOIN_LIMIT_S:.0f} s: {file} leads to none at {address}", file=sys.stderr)
        return 1
    with closing(connection):
        agent = _Agent(connection, node, address)
        try:
            agent.serve()
        except DriverGone:
            print("sp-bench: the driver is gone; the ranks of this host are ended", file=sys.stderr)
            return 1
        except Exception as error:
            with suppress(OSError):
                agent.send(event="failed", reason=f"{type(error).__name__}: {error}")
            raise
        finally:
            agent.end()
    return 0


def _connect(file: Path, node: int, address: str) -> socket.socket | None:
    """A connection over which the driver has been greeted; the file may be older than the driver, or still missing."""
    deadline = time.monotonic() + JOIN_LIMIT_S
    while time.monotonic() < deadline:
        with suppress(OSError, ValueError):
            found = json.loads(file.read_text())
            connection = socket.create_connection((address, found["port"]), timeout=10)
            connection.settimeout(None)
            keep_alive(connection)
            hello = {
                "secret": found["secret"],
                "node": node,
                "machine": owner.this_process().machine,
                "environment": hardware.environment("cuda", os.environ),
            }
            connection.sendall(json.dumps(hello).encode() + b"\n")
            return connection
        time.sleep(POLL_S * 10)
    return None


class _Agent:
    def __init__(self, connection: socket.socket, node: int, address: str) -> None:
        self._connection, self._node, self._address = connection, node, address
        self._orders: queue.Queue[Mapping[str, Any]] = queue.Queue()
        self._driver_is_gone = threading.Event()
        self._ranks: Ranks | None = None
        self._num_reported = 0  # exits that the driver knows
        self._neighbours: Neighbours | None = None
        self._reserved = ExitStack()
        threading.Thread(target=self._read, name="driver", daemon=True).start()

    def _read(self) -> None:
        with suppress(OSError, ValueError), self._connection.makefile("rb") as lines:
            for line in lines:
                self._orders.put(json.loads(line))
        self._driver_is_gone.set()

    def send(self, **words: Any) -> None:
        self._connection.sendall(json.dumps(words).encode() + b"\n")

    def serve(self) -> None:
        """Raises:
        DriverGone: the connection ended before the driver let go.
        """
        while True:
            with suppress(queue.Empty):
                order = self._orders.get(timeout=POLL_S)
                if order["do"] == "leave":
                    return
                self._obey(order)
            self._tell_exits()
            if self._orders.empty():
                self._require_driver()

    def _require_driver(self) -> None:
        if self._driver_is_gone.is_set() and self._orders.empty():
            raise DriverGone

    def _obey(self, order: Mapping[str, Any]) -> None:
        match order["do"]:
            case "reserve":
                self._reserve(order["kinds"])
            case "release":
                self._reserved.close()
            case "start":
                self._start(order)
            case "phase" if self._neighbours is not None:
                self._neighbours.on_phase(order["phase"])
            case "terminate" if self._ranks is not None:
                self._ranks.terminate()
            case "end":
                flags = self._neighbours.flags() if self._neighbours else []
                self._end_ranks()
                self._tell_exits()
                self._ranks = self._neighbours = None
                self.send(event="ended", flags=flags)

    def _reserve(self, kinds: list[str]) -> None:
        found = hardware.gpus() if "cuda" in kinds else None
        own = [*("cpu",) * ("cpu" in kinds), *(gpu.uuid for gpu in (found.devices if found else ()))]
        self._reserved.enter_context(devices.reserved(own, self._require_driver, lambda words: None))
        self.send(event="reserved")

    def _start(self, order: Mapping[str, Any]) -> None:
        devices.end_orphans()
        config = parse(TrialConfig, order["config"])
        self._ranks, self._num_reported, self._neighbours = Ranks(), 0, Neighbours(config)
        meeting = Meeting(self._address, order["port"], None)
        folder = Path(order["folder"])
        self._ranks.start_node(self._node, order["command"], config, folder, devices.new_token(), meeting)

    def _tell_exits(self) -> None:
        if self._ranks is not None:
            for each in self._ranks.exits[self._num_reported :]:
                self.send(event="exit", rank=each.rank, code=each.code, at=each.at)
                self._num_reported += 1

    def _end_ranks(self) -> None:
        if self._ranks is not None:
            self._ranks.kill()
            self._ranks.join()

    def end(self) -> None:
        """End all ranks, without a report to the driver."""
        self._end_ranks()
        self._reserved.close()


def main(file: Path) -> int:
    """The entry point for srun, on each node of the job but the first."""
    return serve(file, 1 + int(os.environ["SLURM_PROCID"]), os.environ["SLURM_LAUNCH_NODE_IPADDR"])


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
