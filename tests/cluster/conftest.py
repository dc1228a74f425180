"""A real Slurm of two nodes on this machine, from Debian's slurm-wlm and munge, in a temporary folder."""

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "sinfo", "scancel", "scontrol")
NODES = ("n1", "n2")
START_LIMIT_S = 30

CONFIGURATION = """\
ClusterName=sp_bench
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
SlurmdTimeout=10
KillWait=10
SlurmdParameters=config_overrides
MailProg=/bin/true
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 RealMemory=1000
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 RealMemory=1000
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=INFINITE OverSubscribe=EXCLUSIVE
"""


@dataclass
class Slurm:
    """A running cluster; SLURM_CONF in `variables` leads its programs to it."""

    folder: Path
    variables: dict[str, str]
    daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, name: str, *command: str) -> None:
        with (self.folder / f"{name}.out").open("ab") as output:
            self.daemons[name] = subprocess.Popen(
                command, stdout=output, stderr=output, env=self.variables, cwd=self.folder
            )

    def start_node(self, name: str) -> None:
        self.start(name, which("slurmd"), "-D", "-N", name)

    def end(self, name: str, how: signal.Signals = signal.SIGTERM) -> None:
        daemon = self.daemons.pop(name)
        daemon.send_signal(how)
        try:
            daemon.wait(10)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()

    def say(self, *command: str) -> str:
        """What one of Slurm's programs prints."""
        done = subprocess.run(command, env=self.variables, capture_output=True, text=True)
        assert done.returncode == 0, (command, done.stderr)
        return done.stdout

    def wait_for(self, wanted: str, *command: str, limit_s: float = START_LIMIT_S) -> None:
        """Ask one of Slurm's programs until it prints just that."""
        deadline, said = time.monotonic() + limit_s, None
        while time.monotonic() < deadline:
            done = subprocess.run(command, env=self.variables, capture_output=True, text=True)
            said = done.stdout.strip() if done.returncode == 0 else done.stderr
            if said == wanted:
                return
            time.sleep(0.2)
        logs = "".join(path.read_text(errors="replace")[-2000:] for path in sorted(self.folder.glob("*.log")))
        pytest.fail(f"{' '.join(command)} says {said!r} after {limit_s} s, not {wanted!r}\n{logs}")


def which(program: str) -> str:
    """Daemons lie in sbin, which a user's PATH may lack."""
    found = shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if not found:
        pytest.skip(f"{program} is not installed: apt-get install slurm-wlm munge")
    return found


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """A cluster with two idle nodes of two processors, each for one job at a time."""
    for program in PROGRAMS:
        which(program)
    if os.geteuid() != 0:
        pytest.skip("slurmd starts jobs as root only, and these tests do not run as root")
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "state").mkdir()
    for node in NODES:
        (folder / "spool" / node).mkdir(parents=True)
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o600)
    (folder / "slurm.conf").write_text(
        CONFIGURATION.format(host=socket.gethostname(), folder=folder, ports=free_ports(3))
    )
    cluster = Slurm(folder, {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")})
    try:
        try:
            files = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "log", "pid", "seed")]
            cluster.start(
                "munged", which("munged"), "--foreground", "--force", f"--socket={folder}/munge.socket", *files
            )
            deadline = time.monotonic() + START_LIMIT_S
            while not (folder / "munge.socket").exists():
                assert time.monotonic() < deadline, (folder / "munged.out").read_text()
                time.sleep(0.1)
            cluster.start("slurmctld", which("slurmctld"), "-D")
            for node in NODES:
                cluster.start_node(node)
            cluster.wait_for("2 idle", "sinfo", "--noheader", "--format=%D %t")
        except (AssertionError, OSError, pytest.fail.Exception) as error:  # say no more than that there is no cluster
            pytest.skip(f"Slurm's daemons do not start on this machine: {str(error).splitlines()[0]}")
        yield cluster
    finally:
        for name in reversed(list(cluster.daemons)):
            cluster.end(name)


def free_ports(number: int) -> list[int]:
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(number)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@pytest.fixture(autouse=True)
def empty_queue(slurm: Slurm) -> Iterator[None]:
    """No job of one test is in the way of the next."""
    yield
    slurm.say("scancel", "--me")
    slurm.wait_for("", "squeue", "--noheader", limit_s=60)
