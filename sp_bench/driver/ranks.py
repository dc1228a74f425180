"""The processes of a launch on this host: one a rank, with the variables by which they meet."""

import errno
import hashlib
import os
import site
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from sp_bench import handover, hardware, programs
from sp_bench.config.parsing import ConfigError
from sp_bench.config.trial import TrialConfig
from sp_bench.driver import devices
from sp_bench.driver.verdict import Exit

# Of the torchrun that started this run, and not of the ranks, which would look for its store.
_OF_TORCHRUN = {"GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE"}

CACHES = {"TORCHINDUCTOR_CACHE_DIR": "torch", "TRITON_CACHE_DIR": "triton"}  # their folders in the campaign's


class CannotStart(ConfigError):
    """This machine does not start the process of a rank. The message says why, and the way out."""

    def __init__(self, program: str, rank: int, error: OSError) -> None:
        way_out = {
            errno.EAGAIN: "raise the limit of processes (ulimit -u, or the cgroup's pids.max)",
            errno.ENOMEM: "free some of this machine's memory",
            errno.EMFILE: "raise the limit of open files (ulimit -n)",
        }.get(error.errno or 0, f"check that {program} can be executed")
        super().__init__(
            f"{program} cannot be started as rank {rank}: {error.strerror or error}; {way_out}, then run "
            "the same words again"
        )


class Meeting(NamedTuple):
    """The address where the ranks of a launch meet: rank 0 listens there."""

    address: str  # by which this host reaches it
    port: int
    listening: socket.socket | None  # rank 0's, on its own host


def listen(config: TrialConfig) -> socket.socket:
    """A socket for rank 0, which inherits it, so no other process can take the port before the ranks meet. Other hosts
    reach it where the trial has some."""
    return socket.create_server(("" if config.num_hosts > 1 else "127.0.0.1", 0), backlog=config.num_processes)


class Ranks:
    """The processes of one launch on this host."""

    def __init__(self) -> None:
        self.exits: list[Exit] = []  # of those that have ended, in the order in which they did
        self._processes: list[subprocess.Popen[bytes]] = []
        self._waiting: list[threading.Thread] = []
        self._token: str | None = None

    def start(self, command: Sequence[str], config: TrialConfig, folder: Path, token: str) -> None:
        """Start `command` once per rank, all of them on this machine. Each rank writes to its log in `folder` from the
        start."""
        with listen(config) as listening:
            address, port = listening.getsockname()
            self.start_node(0, command, config, folder, token, Meeting(address, port, listening))

    def start_node(
        self, node: int, command: Sequence[str], config: TrialConfig, folder: Path, token: str, meeting: Meeting
    ) -> None:
        """Start `command` once for each rank of the node, which is this machine.

        Raises:
            CannotStart: this machine does not start one of them.
            OSError: `folder` cannot be written.
        """
        self._token = token
        shared = (
            environment(config)
            | compiler_caches(handover.compiled(folder))
            | handover.clock()
            | {
                devices.TOKEN: token,
                "WORLD_SIZE": str(config.world_size),
                "LOCAL_WORLD_SIZE": str(config.ranks_per_node),
                "MASTER_ADDR": meeting.address,
                "MASTER_PORT": str(meeting.port),
            }
        )
        for local_rank in range(config.processes_per_host):
            rank = node * config.processes_per_host + local_rank
            variables = shared | _place(config, rank, local_rank)
            inherited = [meeting.listening.fileno()] if rank == 0 and meeting.listening else []
            if inherited:
                variables[handover.LISTEN_FD] = str(inherited[0])
            process = _started(command, folder, rank, variables, inherited)
            # a thread for each, so that the time of an exit tells a failure from its echo on the peers
            waiting = threading.Thread(target=self._wait, args=(rank, process), name=f"rank {rank}", daemon=True)
            waiting.start()
            self._processes.append(process)
            self._waiting.append(waiting)

    def _wait(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        exit_code = process.wait()
        self.exits.append(Exit(rank, exit_code, handover.now()))

    def enter_phase(self, phase: str) -> None:
        """Does nothing here; agents on other hosts look at their neighbours."""

    def terminate(self) -> None:
        """Ask those that still run to end."""
        for process in self._processes:
            process.terminate()  # does nothing to a process that has ended

    def kill(self) -> None:
        """End them, and all that they started.

        Raises:
            RuntimeError: a process would not die.
        """
        if self._token is not None:
            devices.kill_all(self._token)

    def join(self) -> None:
        """Wait until all have ended."""
        for thread in self._waiting:
            thread.join()

    def flags(self) -> list[str]:
        """Flags of other hosts; none, since all ranks are here."""
        return []


def _started(
    command: Sequence[str], folder: Path, rank: int, variables: Mapping[str, str], inherited: Sequence[int]
) -> subprocess.Popen[bytes]:
    """
    Raises:
        CannotStart: this machine does not start it.
        OSError: its log or its folder cannot be opened.
    """
    with open(handover.log_path(folder, rank), "ab") as log:
        try:
            return subprocess.Popen(
                command,
                cwd=folder,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C reaches the driver only
                pass_fds=inherited,
                # by one call into the C library: nothing that a thread of the driver could hold a lock of
                preexec_fn=partial(programs.end_with, os.getpid()),
            )
        except OSError as error:
            if error.filename == str(folder):  # Popen names its working folder where that is missing
                raise
            raise CannotStart(command[0], rank, error) from error


def _place(config: TrialConfig, rank: int, local_rank: int) -> dict[str, str]:
    """The variables that place a rank. LOCAL_RANK is its GPU, since every library reads it so."""
    sharing = config.hardware.ranks_per_gpu
    variables = {"RANK": str(rank), "LOCAL_RANK": str(local_rank // sharing)}
    if sharing > 1:  # NCCL refuses two ranks of one GPU on one host, so each of them names another host
        variables["NCCL_HOSTID"] = f"rank-{local_rank % sharing}"
    return variables


def environment(config: TrialConfig) -> dict[str, str]:
    """The environment variables of a rank: this process's own, the fabric's, how many threads the rank has, and how
    torch allocates the device's memory."""
    variables = with_source(os.environ) | dict(config.fabric.env)
    variables["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # the order of NVML, by which the driver reserves and names GPUs
    if config.hardware.threads_per_rank is not None:
        variables["OMP_NUM_THREADS"] = str(config.hardware.threads_per_rank)
    elif config.num_processes > 1:
        variables.setdefault("OMP_NUM_THREADS", "1")  # else each rank takes all cores; torchrun does the same
    if config.hardware.allocator is not None:
        configured = variables.pop(
            "PYTORCH_CUDA_ALLOC_CONF", None
        )  # its name before torch 2.9; torch accepts one of them
        configured = variables.get("PYTORCH_ALLOC_CONF", configured)
        variables["PYTORCH_ALLOC_CONF"] = ",".join(filter(None, [configured, f"{config.hardware.allocator}:True"]))
    return variables


def compiler_caches(folder: Path) -> dict[str, str]:
    """The variables by which torch's compiler and Triton keep what they compile below `folder`. Each has keys of its
    own, and several processes may use it at once. A variable that the user has set is kept.

    Where Python may not write bytecode beside the sources, as in many containers, its bytecode goes there too: else
    each rank compiles thousands of modules, which took Hugging Face's engines 7 s.

    Each user and CPU model has a folder of its own. Nobody else may write there, because ranks load as code what lies
    there; and torch compiles for the CPU that it runs on, which its keys do not say.
    """
    folder = folder / f"{os.getuid()}-{hashlib.sha256(hardware.cpu_model().encode()).hexdigest()[:8]}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    caches = {name: os.environ.get(name) or str(folder / library) for name, library in CACHES.items()}
    if os.environ.get("PYTHONDONTWRITEBYTECODE") and not os.environ.get("PYTHONPYCACHEPREFIX"):
        caches |= {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(folder / "python")}
    return caches


def with_source(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables for a process that imports the code that this one runs, not that of another checkout which this
    Python has installed."""
    own = {
        name: value
        for name, value in variables.items()
        if name not in _OF_TORCHRUN and not name.startswith("TORCHELASTIC_")
    }
    source = str(Path(__file__).resolve().parents[2])
    if source not in (*site.getsitepackages(), site.getusersitepackages()):  # which belong behind the standard library
        own["PYTHONPATH"] = os.pathsep.join(filter(None, [source, own.get("PYTHONPATH")]))
    return own
