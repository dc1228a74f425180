"""`submit` with stand-ins for Slurm's programs: which jobs it asks for, and what they run."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import hydra
import pytest
import yaml

from sp_bench import hardware
from sp_bench.cluster import packs
from sp_bench.planning import identity, overrides, plan, sweep
from sp_bench.rows import store

from .console import console, refusal

ROOT = Path(__file__).parents[2]
SMALL = ("workload.correctness_seq_len=48", "workload.warmup_steps=1", "workload.timed_steps=2", "kernel=math")
WORDS = ("method=single,ring", "sp_size=1", "seq_len=96", *SMALL)
ON_GPUS = ("method=ulysses,ring", "sp_size=2", "seq_len=32768", "hardware=h200", "fabric=nvlink", "kernel=cudnn")

SBATCH = """#!/bin/sh
n=$(ls jobs | wc -l)
if [ -e full ] && [ "$n" -ge "$(cat full)" ]; then echo 'sbatch: error: Job violates limit' >&2; exit 1; fi
cat > "jobs/$((n + 1))"
echo $((n + 1))
"""
SQUEUE = "#!/bin/sh\ntouch asked; cat queue\n"


@pytest.fixture
def cluster(tmp_path, monkeypatch) -> Path:
    """A working folder whose `jobs` has a script for each job that was submitted; `queue` is what squeue says."""
    monkeypatch.chdir(tmp_path)
    for folder in ("jobs", "bin"):
        (tmp_path / folder).mkdir()
    for name, text in (("sbatch", SBATCH), ("squeue", SQUEUE)):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "queue").touch()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    return tmp_path


def submit(capfd, *words: str) -> str:
    code, out, err = console(capfd, "submit", *words, "--cluster", "slurm")
    assert (code, err) == (0, "")
    return out


def scripts(folder: Path) -> list[str]:
    return [path.read_text() for path in sorted((folder / "jobs").iterdir(), key=lambda path: int(path.name))]


def run_job(folder: Path, number: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", str(folder / "jobs" / str(number))], capture_output=True, text=True)


def submissions(folder: Path) -> list[dict]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("results/*/_work/submissions/*.json"))]


def test_a_dry_run_prints_the_scripts_that_would_be_submitted_and_leaves_nothing(cluster, capfd):
    printed = submit(capfd, *ON_GPUS, "dtype=bfloat16", "replicates=2", "--dry-run")
    heading, *texts = printed.split("\n\n")
    assert heading.splitlines() == [
        "4 trials: 0 done, 0 in earlier jobs, 4 in 2 new jobs",
        "less than 0.1 GPU-hours, at most 5.5 GPU-hours",
    ]
    assert [re.findall("--gres=(.*)", text) for text in texts] == [["gpu:2"]] * 2
    assert not (cluster / "results").exists()
    assert scripts(cluster) == []
    assert not (cluster / "asked").exists()


def test_each_job_runs_the_trials_of_its_pack_and_no_others(cluster, capfd, monkeypatch):
    words = ("method=single", *WORDS[1:], "replicates=2")
    printed = submit(capfd, *words)
    assert "2 trials: 0 done, 0 in earlier jobs, 2 in 2 new jobs" in printed
    assert re.search(r"^job 1: 1 trial of replicate 0 on one node, ", printed, re.MULTILINE)
    (said,) = submissions(cluster)
    assert [pack["job_id"] for pack in said["packs"]] == [1, 2]
    done = run_job(cluster, 2)
    assert done.returncode == 0, done.stderr
    rows = list(store.committed(cluster / "results" / "default"))
    assert [(row.trial_id, row.status) for row in rows] == [(said["packs"][1]["trials"][0], "ok")]

    (cluster / "queue").write_text("1|PENDING|0:00|(Priority)\n")
    assert "2 trials: 1 done, 1 in earlier jobs, 0 in 0 new jobs" in submit(capfd, *words)
    assert len(scripts(cluster)) == 2

    (cluster / "queue").write_text("")  # the job has ended, and left nothing
    assert "2 trials: 1 done, 0 in earlier jobs, 1 in 1 new job" in submit(capfd, *words)
    assert run_job(cluster, 3).returncode == 0
    assert "2 trials: 2 done, 0 in earlier jobs, 0 in 0 new jobs" in submit(capfd, *words)
    assert len(list(store.committed(cluster / "results" / "default"))) == 2
    with monkeypatch.context() as elsewhere:  # a machine that submits may have another processor than the nodes
        elsewhere.setattr(hardware, "cpu_model", lambda: "another processor")
        assert "2 trials: 2 done, 0 in earlier jobs, 0 in 0 new jobs" in submit(capfd, *words)
    plans = list((cluster / "results" / "default" / "_plans").iterdir())
    assert len(plans) == 1, "each job plans all trials, so that reports know what is missing"


@pytest.mark.parametrize(
    ("attempt", "status", "new"), [(0, "error", 1), (2, "error", 0), (0, "oom", 0), (1, "timeout", 1)]
)
def test_what_is_retried_is_what_resume_retries(cluster, capfd, attempt, status, new):

    configs, _ = sweep.configs(overrides.read_arguments(["method=single", "sp_size=1", "seq_len=96", *SMALL]))
    (trial,) = plan.plan(configs, 1, 0, None)
    folder = cluster / "results" / "default"
    folder.mkdir(parents=True)
    (folder / store.RowName(trial.trial_id, identity.env_id(configs[0]), attempt, status).file_name).touch()
    printed = submit(capfd, "method=single", "sp_size=1", "seq_len=96", *SMALL)
    assert f"1 trial: {1 - new} done" in printed
    assert len(scripts(cluster)) == new


def test_a_refusal_of_slurm_names_the_jobs_it_has_and_the_rest_can_be_submitted(cluster, capfd):
    (cluster / "full").write_text("1")
    code, _, err = console(capfd, "submit", *WORDS, "replicates=3", "--cluster", "slurm")
    assert code == 2
    assert "1 of 3 jobs submitted (1): sbatch failed: sbatch: error: Job violates limit" in err
    (cluster / "full").unlink()
    (cluster / "queue").write_text("1|RUNNING|0:10|n1\n")
    assert "6 trials: 0 done, 2 in earlier jobs, 4 in 2 new jobs" in submit(capfd, *WORDS, "replicates=3")


def test_without_slurm_one_line_says_so_and_nothing_is_left(tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    code, _, err = console(capfd, "submit", *WORDS, "--cluster", "slurm")
    assert code == 2
    assert "0 of 1 job submitted (none): there is no sbatch on this machine" in err
    assert not list(tmp_path.glob("results/*/_work/submissions/*"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("sp_size=1",), None),
        (("sp_siz=1",), "sp_siz is not a field; did you mean sp_size?"),
        (("--cfg", "job"), "--cfg job shows one configuration"),
        (("hardware=device",), "or name those of the machine that runs it"),
        (("results_root=a b",), "use a results_root of letters"),
        (("deadlines.measure=90000",), "more than time_limit_minutes=1440. Give smaller deadlines"),
        (("--fail-on", "bad"), "bad is no status"),
    ],
)
def test_what_cannot_be_submitted_is_one_line(cluster, capfd, words, message):
    code, _, err = console(capfd, "submit", *words, "--cluster", "slurm", "--dry-run")
    assert code == (2 if message else 0)
    assert message is None or message in err
    assert len(err.splitlines()) <= 1


@pytest.mark.parametrize(
    ("file", "number"), [("none.json", "0"), ("damaged.json", "0"), ("one.json", "1"), ("one.json", "-1")]
)
def test_a_pack_that_is_not_there_is_named(tmp_path, capfd, monkeypatch, file, number):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "damaged.json").write_text("{")
    (tmp_path / "one.json").write_text(json.dumps({"packs": [{"job_id": 1, "trials": ["0" * 12]}]}))
    message = refusal(capfd, "resume", *WORDS, "--pack", file, number)
    assert f"--pack {file} {number}: the file has {int(file == 'one.json')} packs" in message


def test_a_pack_of_other_words_is_refused(tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one.json").write_text(json.dumps({"packs": [{"job_id": 1, "trials": ["0" * 12]}]}))
    code, _, err = console(capfd, "resume", *WORDS, "--pack", "one.json", "0")
    assert code == 2
    assert "1 of the 1 trials of the pack are not in this plan of 2, such as 000000000000; give the words of" in err
    assert not (tmp_path / "results").exists()


def test_the_job_runs_this_python_from_this_folder(cluster, capfd):
    submit(capfd, *WORDS)
    (text,) = scripts(cluster)
    assert f"\ncd {cluster} || exit 1\nexec env PYTHONPATH={ROOT} {sys.executable} -P -m sp_bench resume " in text


def test_a_job_runs_although_a_file_beside_conf_is_called_as_a_module_of_python(cluster, capfd):
    (cluster / "statistics.py").write_text("def summarize(x): return x\n")
    submit(capfd, "method=single", *WORDS[1:])
    done = run_job(cluster, 1)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list(store.committed(cluster / "results" / "default"))) == 1


def test_a_job_is_the_one_that_was_printed_whatever_the_shell_has(cluster, capfd, monkeypatch):
    (cluster / "bin" / "sbatch").write_text("#!/bin/sh\nenv > env\n" + SBATCH.partition("\n")[2])
    for name in ("SBATCH_TIMELIMIT", "SLURM_JOB_ID", "SLURM_MEM_PER_CPU", "SLURM_CONF", "NCCL_DEBUG"):
        monkeypatch.setenv(name, "1")
    submit(capfd, "method=single", *WORDS[1:])
    names = {line.partition("=")[0] for line in (cluster / "env").read_text().splitlines()}
    assert {"SLURM_CONF", "NCCL_DEBUG", "PATH"} <= names
    assert not {"SBATCH_TIMELIMIT", "SLURM_JOB_ID", "SLURM_MEM_PER_CPU"} & names


def test_a_job_id_is_read_beside_bytes_that_are_no_text(cluster, capfd):
    (cluster / "bin" / "sbatch").write_text("#!/bin/sh\ncat > /dev/null; printf '12;caf\\351\\n'\n")
    assert "job 12: " in submit(capfd, "method=single", *WORDS[1:])


def test_status_shows_the_jobs_that_wait_and_run(cluster, capfd):
    submit(capfd, *WORDS, "replicates=3")
    (cluster / "queue").write_text("1|RUNNING|1:02|n1\n2|PENDING|0:00|(Resources)\n99|RUNNING|0:01|n2\n")
    code, printed, _ = console(capfd, "status", "results/default")
    assert code == 0
    assert "  job 1: running on n1 for 1:02, 2 trials\n  job 2: pending (Resources), 2 trials\n" in printed
    assert "job 3" not in printed, "it has ended"
    assert "99" not in printed, "it is another campaign's"
    (told,) = json.loads(console(capfd, "status", "results/default", "--json")[1])
    assert told["jobs"][0] == {"job_id": 1, "state": "RUNNING", "used": "1:02", "where": "n1", "trials": 2}
    assert (len(told["jobs"]), told["queue_problem"]) == (2, None)


def test_status_says_why_it_does_not_know_the_jobs(cluster, capfd, monkeypatch):
    submit(capfd, *WORDS)
    monkeypatch.setenv("PATH", str(cluster / "jobs"))
    _, printed, _ = console(capfd, "status", "results/default")
    assert "whether its submitted jobs wait or run is not known: there is no squeue on this machine" in printed
    (told,) = json.loads(console(capfd, "status", "results/default", "--json")[1])
    assert told["jobs"] == []
    assert "no squeue" in told["queue_problem"]


def test_status_asks_no_queue_about_a_campaign_that_was_never_submitted(cluster, capfd):
    (cluster / "results" / "default").mkdir(parents=True)
    assert console(capfd, "status", "results/default")[0] == 0
    assert not (cluster / "asked").exists()


def test_no_second_submission_while_the_queue_does_not_answer(cluster, capfd):
    submit(capfd, *WORDS)
    (cluster / "bin" / "squeue").write_text("#!/bin/sh\necho 'slurm_load_jobs error: Unable to contact' >&2; exit 1\n")
    code, _, err = console(capfd, "submit", *WORDS, "--cluster", "slurm")
    assert code == 2
    assert "earlier jobs of this campaign may still wait or run, but squeue failed: slurm_load_jobs error" in err
    assert len(scripts(cluster)) == 1
    dry = submit(capfd, *WORDS, "--dry-run")
    assert dry.startswith("warning: what earlier jobs have is not left out here, since squeue failed")


def test_wait_returns_when_the_jobs_have_left_the_queue_and_says_what_has_no_row(cluster, capfd):
    code, printed, err = console(capfd, "submit", *WORDS, "--cluster", "slurm", "--wait")
    assert (code, "job 1: " in printed) == (1, True)
    assert printed.endswith("2 trials: 0 ok, 0 unsupported, 0 oom, 0 failed; rows: results/default\n")
    assert err == "sp-bench: 2 of 2 trials have no row\n"


def test_a_plan_for_a_cluster_has_the_packs_and_gpu_hours_of_its_submission(cluster, capfd):
    words = (*ON_GPUS, "dtype=bfloat16", "replicates=2", "num_nodes=1,2")
    printed = submit(capfd, *words, "--dry-run")
    code, out, err = console(capfd, "plan", *words, "--cluster", "slurm")
    assert (code, err) == (0, "")
    packs, hours, counts = out.splitlines()[-3:]
    assert printed.splitlines()[1] in hours
    assert hours.startswith("4 packs, less than 0.1 GPU-hours, at most ")
    assert packs.startswith("pack 3: 2 trials of replicate 1 on 1 GPU of each of 2 nodes, ")
    assert counts == "8 trials: 8 to run; nothing was launched"
    code, out, _ = console(capfd, "plan", *words, "--cluster", "slurm", "--json")
    told = json.loads(out)
    assert [(pack["num_nodes"], pack["gpus_per_node"]) for pack in told["packs"]] == [(1, 2), (2, 1)] * 2
    _, out, _ = console(capfd, "plan", "sp_size=2", "--cluster", "slurm")  # on CPUs
    assert out.splitlines()[-2] == "1 pack, no GPU-hours"
    assert f"at most {told['gpu_hours']:.1f} GPU-hours" in hours
    assert not (cluster / "results").exists()
    assert not (cluster / "asked").exists()


MANY = ("method=ulysses,ring", "sp_size=8,16", "num_nodes=1,2", *ON_GPUS[3:], "dtype=bfloat16", "model=llama3_8b")


def test_a_plan_with_packs_composes_once_and_looks_at_each_cell_and_each_trial_once(cluster, capfd, monkeypatch):
    """So thousands of trials are planned in seconds, which tests/benchmarks times."""
    reads = []
    for num_lengths in (1, 6):
        once, a_cell, a_trial = {}, {}, {}
        with monkeypatch.context() as counted:
            for calls, module, name in (
                (once, hydra, "compose"),
                (once, yaml, "load"),
                (a_cell, plan, "cell_id"),
                (a_cell, plan, "unsupported_reason"),
                (a_trial, packs, "at_most_s"),
                (a_trial, packs, "_apart_from_method"),
            ):
                calls[name] = Mock(side_effect=getattr(module, name))
                counted.setattr(module, name, calls[name])
            lengths = f"seq_len=range(32768,{(num_lengths + 1) * 32768},32768)"
            code, out, err = console(capfd, "plan", *MANY, lengths, "replicates=3", "--cluster", "slurm")
        assert (code, err) == (0, "")
        cells = 2 * 2 * 2 * num_lengths
        assert re.search(rf"\d+ packs, about [\d,.]+ GPU-hours, at most [\d,.]+ GPU-hours\n{3 * cells} trials: ", out)
        assert once["compose"].call_count == 1
        reads.append(once["load"].call_count)
        assert {name: each.call_count for name, each in a_cell.items()} == dict.fromkeys(a_cell, cells)
        assert {name: each.call_count for name, each in a_trial.items()} == dict.fromkeys(a_trial, 3 * cells)
    assert reads[0] >= reads[1], "more files were read for more lengths"


IN_CONTAINER = "name: image\ncontainer: [apptainer, exec, --nv, torch.sif]\nsp_bench: [sp-bench]\n"
OVER_NODES = ("method=ulysses,ring", "sp_size=8", "seq_len=32768", "hardware=h200", "fabric=network", "num_nodes=2")
OVER_NODES += ("kernel=flash_attn_4", "dtype=bfloat16", "model.head_dim=64")
NEEDS_A_PACKAGE = tuple(word for word in OVER_NODES if word not in ("fabric=network", "num_nodes=2"))
NEEDS_A_PACKAGE += ("fabric=nvlink",)


def in_container(folder: Path, capfd, verb: str, *words: str) -> tuple[str, ...]:
    (folder / "conf" / "cluster").mkdir(parents=True, exist_ok=True)
    (folder / "conf" / "cluster" / "image.yaml").write_text(IN_CONTAINER)
    code, out, err = console(capfd, verb, *words, "--cluster", "image")
    assert (code, err) == (0, "")
    return tuple(out.splitlines())


def test_packages_of_a_container_are_assumed_and_the_assumption_is_printed(cluster, capfd):
    heading, assumed, hours, *_ = in_container(cluster, capfd, "submit", *NEEDS_A_PACKAGE, "--dry-run")
    assert heading == "2 trials: 0 done, 0 in earlier jobs, 2 in 1 new job"
    assert assumed.startswith(
        "assumed: the nodes of image have what 2 trials cannot find on this machine (kernel flash"
    )
    assert re.search(r"at most 1\d\.\d GPU-hours", hours)
    pack, *_, counts = in_container(cluster, capfd, "plan", *NEEDS_A_PACKAGE)[-4:]
    assert pack.startswith("pack 0: 2 trials of replicate 0 on 8 GPUs of one node, ")
    assert counts == "2 trials: 2 to run; nothing was launched"


def test_a_trial_that_the_container_could_not_run_is_not_submitted_again(cluster, capfd):
    configs, _ = sweep.configs(overrides.read_arguments(list(NEEDS_A_PACKAGE)))
    trial, _ = plan.plan(configs, 1, 0, 8)
    (cluster / "results" / "default").mkdir(parents=True)
    row = store.RowName(trial.trial_id, identity.env_id(trial.config), 0, "unsupported")
    (cluster / "results" / "default" / row.file_name).touch()
    heading, *_ = in_container(cluster, capfd, "submit", *NEEDS_A_PACKAGE, "--dry-run")
    assert heading == "2 trials: 1 done, 0 in earlier jobs, 1 in 1 new job"


def test_a_container_over_nodes_warns_that_it_needs_srun(cluster, capfd):
    lines = in_container(cluster, capfd, "submit", *OVER_NODES, "--dry-run")
    assert any(line.startswith("warning: num_nodes=2 with `container`: the run calls srun") for line in lines)


def test_trials_that_no_node_can_run_take_no_job_and_no_hours(cluster, capfd):
    words = ("method=ring", "sp_size=16", *ON_GPUS[2:], "dtype=bfloat16")
    heading, reason = submit(capfd, *words).splitlines()
    assert heading == "1 trial: 0 done, 0 in earlier jobs, 0 in 0 new jobs"
    assert reason.startswith("1 trial in no job, since no node can run them: 16 ranks (sp_size=16 x ")
    assert scripts(cluster) == []


@pytest.mark.parametrize("words", [("sweep=smoke", "--cluster", "slurm"), ("results/night", "--cluster=slurm")])
def test_resume_on_a_cluster_names_the_verb(cluster, capfd, words):
    assert "is a flag of submit, which resumes too" in refusal(capfd, "resume", *words)
