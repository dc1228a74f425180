"""Other programs: whatever they do, the answer is text or a sentence."""

import sys

import pytest

from sp_bench import programs
from sp_bench.cluster import slurm


def printed_by(code: str, **options) -> str:
    return programs.answer([sys.executable, "-c", code], **options)


def test_only_listed_variables_reach_a_program(monkeypatch):
    monkeypatch.setenv("GIT_DIR", "/elsewhere/.git")
    monkeypatch.setenv("TOKEN", "secret")
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    names = printed_by("import os; print(*os.environ)").split()
    assert {"PATH", "LC_ALL"} <= set(names)
    assert not {"GIT_DIR", "TOKEN"} & set(names)


def test_bytes_that_are_no_text_are_an_answer():
    assert printed_by(r"import sys; sys.stdout.buffer.write(b'7;caf\xe9\n')") == "7;caf�\n"


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (["no-such-program"], "there is no no-such-program on this machine"),
        ([sys.executable, "-c", "import time; time.sleep(60)"], "did not answer within 1 s"),
        (
            [sys.executable, "-c", r"import sys; sys.stderr.buffer.write(b'caf\xe9 is closed'); sys.exit(3)"],
            "is closed",
        ),
        ([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"], "exit code -9"),
        (["/"], "cannot be started"),
    ],
)
def test_a_program_without_an_answer_says_why(command, reason):
    with pytest.raises(programs.NoAnswer) as raised:
        programs.answer(command, limit_s=1)
    assert command[0] in str(raised.value)
    assert reason in str(raised.value)


def test_a_job_has_the_variables_of_the_shell_but_none_of_another_job():
    shell = {"HOME": "/h", "NCCL_SOCKET_IFNAME": "eth0", "SLURM_CONF": "/c"}
    job = {
        "SLURM_JOB_ID": "7",
        "SLURM_MEM_PER_CPU": "100",
        "SBATCH_TIMELIMIT": "1",
        "SLURMD_NODENAME": "n",
        "PMI_RANK": "0",
    }
    assert slurm.without_allocation(shell | job) == shell
