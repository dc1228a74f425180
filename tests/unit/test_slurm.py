"""The batch script, and what Slurm's programs may answer."""

import shlex
from pathlib import Path

import pytest

from sp_bench.cluster import batch_script, slurm
from sp_bench.cluster.file import ClusterConfig
from sp_bench.cluster.packs import Pack
from sp_bench.config.parsing import ConfigError

LOG = Path("/data/results/c/_work/jobs/%j.txt")


def script(cluster: ClusterConfig, *words: str, num_gpus: int = 4, log: Path = LOG, folder: str = "/data") -> str:
    pack = Pack(1, num_gpus, 0, (), 600.0, 15)
    return batch_script.script(pack, cluster, "sp_bench-c", log, Path(folder), ["sp-bench", "resume", *words])


def directives(text: str) -> list[str]:
    return [line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH ")]


def test_a_script_asks_for_what_the_cluster_and_the_pack_say():
    cluster = ClusterConfig(
        "mine",
        account="lab",
        partition="gpu",
        qos="high",
        constraint="h200&ib",
        gres="gpu:h200:{gpus}",
        cpus_per_task=32,
        memory="0",
        exclude="n7",
        sbatch=("--mail-type=END", "--no-kill"),
        exclusive=True,
        setup=("module load cuda/12.8",),
        container=("apptainer", "exec", "--nv", "my image.sif"),
    )
    text = script(cluster, "sp_size=4")
    assert directives(text) == [
        *("job-name=sp_bench-c", "account=lab", "partition=gpu", "qos=high", "constraint=h200&ib"),
        *("exclude=n7", "gres=gpu:h200:4", "mem=0", "nodes=1", "ntasks=1", "cpus-per-task=32", "time=15"),
        *("signal=B:TERM@120",),
        *(f"output={LOG}", "open-mode=append", "exclusive", "mail-type=END", "no-kill", "requeue"),
    ]
    assert text.splitlines()[0] == "#!/bin/bash"
    assert text.splitlines()[-3:] == [
        "cd /data || exit 1",
        "module load cuda/12.8",
        "exec apptainer exec --nv 'my image.sif' sp-bench resume sp_size=4",
    ]


def test_a_cluster_that_says_nothing_leaves_it_to_slurm():
    asked = [line.partition("=")[0] for line in directives(script(ClusterConfig("mine"), num_gpus=0))]
    assert asked == ["job-name", "nodes", "ntasks", "time", "signal", "output", "open-mode", "requeue"]


@pytest.mark.parametrize("word", ["campaign=$(touch x)", "a'b", "x;reboot", "two\nlines", "#SBATCH --uid=0", "*"])
def test_words_reach_the_run_as_they_were_given(word):
    text = script(ClusterConfig("mine"), word, folder="/data/my runs")
    run = text[text.index("\nexec ") :]
    assert shlex.split(run) == ["exec", "sp-bench", "resume", word]
    assert "\ncd '/data/my runs' || exit 1\n" in text


@pytest.mark.parametrize("folder", ["/my data", "/a%u", "/a'b", '/a"b', "/a\nb", "/a\\b", "/a#b"])
def test_a_log_that_sbatch_would_take_for_another_is_refused(folder):
    with pytest.raises(ConfigError, match="use a results_root of letters, digits"):
        script(ClusterConfig("mine"), log=Path(folder) / "%j.txt")


@pytest.fixture
def program(tmp_path, monkeypatch):
    """`program("squeue", script)`: all that is on PATH."""
    monkeypatch.setenv("PATH", str(tmp_path))

    def write(name: str, lines: str) -> None:
        (tmp_path / name).write_text(f"#!/bin/sh\n{lines}\n")
        (tmp_path / name).chmod(0o755)

    return write


def test_the_queue_is_read_whatever_its_reasons_hold(program):
    program("squeue", "echo '  12|PENDING|0:00|(Resources)'; echo '13|RUNNING|1:02|n1'; echo '14_3|PENDING|0:00|(a|b)'")
    found = slurm.queue()
    assert {job: (each.state, each.where) for job, each in found.items()} == {
        12: ("PENDING", "(Resources)"),
        13: ("RUNNING", "n1"),
    }


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        (None, "there is no sbatch on this machine"),
        ("echo 'invalid account' >&2; exit 1", "sbatch failed: invalid account"),
        ("echo", "sbatch printed '' instead of a job id"),
        ("echo 'Submitted batch job 7'", "instead of a job id"),
    ],
)
def test_an_answer_that_is_none_says_why(program, lines, why):
    if lines:
        program("sbatch", lines)
    with pytest.raises(slurm.NoAnswer, match=why):
        slurm.submit("#!/bin/bash\n")


@pytest.mark.parametrize("said", ["31", "31;cluster2"])
def test_the_job_id_is_what_sbatch_says(program, said):
    program("sbatch", f"echo '{said}'")
    assert slurm.submit("#!/bin/bash\n") == 31
