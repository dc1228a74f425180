"""Files of conf/cluster: what is refused, and in which words."""

import dataclasses

import pytest
import yaml

from sp_bench.cluster import file as cluster
from sp_bench.cluster.file import ClusterConfig
from sp_bench.config.parsing import ConfigError
from sp_bench.planning import overrides


@pytest.fixture
def read(tmp_path, monkeypatch):
    """`read(text)`: the cluster that a user's own file `mine` of that text describes."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf" / "cluster").mkdir(parents=True)

    def read_text(text: str) -> ClusterConfig:
        (tmp_path / "conf" / "cluster" / "mine.yaml").write_text(text)
        overrides.use_config_dirs([])
        return cluster.read("mine")

    yield read_text
    monkeypatch.undo()
    overrides.use_config_dirs([])


def test_the_documented_file_names_every_key_with_its_default_and_a_comment():
    path = overrides.conf_folder() / "cluster" / "slurm.yaml"
    content = yaml.safe_load(path.read_text())
    defaults = dataclasses.asdict(ClusterConfig("slurm"))
    assert {key: tuple(value) if isinstance(value, list) else value for key, value in content.items()} == defaults
    lines = {line.partition(":")[0]: line for line in path.read_text().splitlines() if line[:1].isalpha()}
    assert all(" # " in lines[key] for key in defaults)
    assert cluster.read("slurm") == ClusterConfig("slurm")


def test_a_file_of_ones_own_sets_what_it_names(read):
    setup = ("module load cuda", "export X=${Y%%.*}")  # bash, not Hydra
    found = read(f"name: mine\npartition: a,b\nconstraint: '[rack1|rack2]'\nsetup: {list(setup)}\nmemory: '0'\n")
    assert found == ClusterConfig("mine", partition="a,b", constraint="[rack1|rack2]", setup=setup, memory="0")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: mine\npartitoin: a\n", "partitoin is not a field; did you mean partition? fields: name, account, "),
        ("partition: a\n", "name: None is not the file's own: write name: mine"),
        ("name: other\n", "name: other is not the file's own: write name: mine"),
        ("name: mine\nsetup: [1]\n", "setup=[1] must be a list of texts"),
        ("- a\n", "must map keys to values"),
        ("name: [\n", "is not YAML"),
        ("name: !!python/name:os.system\n", "is not YAML"),
        ("name: mine\naccount: 'a b'\n", "account: 'a b' cannot stand in a batch script"),
        ("name: mine\naccount: -x\n", "account: '-x' cannot stand in a batch script"),
        ('name: mine\nqos: "a\\n#SBATCH --uid=0"\n', "qos: "),
        ("name: mine\nconstraint: a#b\n", "constraint: 'a#b' cannot stand"),
        ("name: mine\ngres: gpu:8\n", "write {gpus} there"),
        ("name: mine\nmemory: 200\n", "memory=200 must be text; in a file quote it"),
        ("name: mine\nexclusive: 1\n", "exclusive=1 must be true or false"),
        ("name: mine\ntime_limit_minutes: 0\n", "time_limit_minutes: 0 is less than 1"),
        ("name: mine\ngpus_per_node: -1\n", "gpus_per_node: -1 is less than 0"),
        ("name: mine\nsetup: module load cuda\n", "setup='module load cuda' must be a list of texts"),
        ('name: mine\nsetup: ["a\\nb"]\n', "must be one line of printable text"),
        ("name: mine\nexclude: n1 n2\n", "exclude: 'n1 n2' cannot stand"),
        ("name: mine\nsbatch: [-x]\n", "sbatch: '-x' is not --option or --option=value"),
        ('name: mine\nsbatch: ["--comment=a b"]\n', "sbatch: '--comment=a b' is not --option"),
        ('name: mine\nsbatch: ["--comment=a\\n#SBATCH --uid=0"]\n', "sbatch: "),
        ("name: mine\nsbatch: [--time=9]\n", "sbatch: --time would change what sp-bench sets itself"),
        ("name: mine\nsbatch: [--arr=1-3]\n", "sbatch: --arr would change what sp-bench sets itself (--array)"),
        ("name: mine\ncontainer: [--nv, image]\n", "container: --nv begins with a dash"),
    ],
)
def test_what_no_batch_script_can_hold_is_one_line_with_the_way_out(read, text, message):
    with pytest.raises(ConfigError) as refused:
        read(text)
    assert message in str(refused.value)
    assert str(refused.value).isprintable()
    assert "mine.yaml" in str(refused.value)


@pytest.mark.parametrize("name", ["slrm", "../slurm", ""])
def test_an_unknown_cluster_is_answered_with_those_there_are(name):
    with pytest.raises(ConfigError, match=r"files of conf/cluster: slurm; yours go into \./conf/cluster"):
        cluster.read(name)
