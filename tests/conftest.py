"""What several kinds of tests share."""

import gc
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import settings

from sp_bench.config.parsing import parse
from sp_bench.config.trial import TrialConfig
from sp_bench.driver import devices
from sp_bench.planning.overrides import conf_folder

settings.register_profile("untimed", deadline=None)  # another job's load would fail a test
settings.load_profile("untimed")


def _file(group: str, name: str) -> dict[str, Any]:
    return yaml.safe_load((conf_folder() / group / f"{name}.yaml").read_text())


@pytest.fixture(scope="session", autouse=True)
def own_temporary_files(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A folder for temporary files, and locks of the machine's devices, for this run of the tests alone: another run
    would wait for this one's trials."""
    folder = str(tmp_path_factory.mktemp("tmp"))
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    os.environ[devices.SCOPE] = f"tests-{os.getpid()}"


@pytest.fixture(scope="session")
def make_config() -> Callable[..., TrialConfig]:
    """A trial config from the files of conf: `make_config(method="ring", sp_size=4, method__layout="striped")`."""

    def make(**changes: Any) -> TrialConfig:
        chosen = {
            "method": "ulysses",
            "kernel": "cpu_flash",
            "model": "tiny",
            "workload": "attention",
            "engine": "fsdp2",
            "fabric": "gloo",
            "hardware": "cpu",
            "link": "none",
        }
        mapping: dict[str, Any] = {
            "batch_size": 1,
            "seq_len": 2048,
            "sp_size": 2,
            "dp_replicate_size": 1,
            "dp_shard_size": 1,
            "dtype": "float32",
            "seed": 0,
        }
        for group, default in chosen.items():
            mapping[group] = _file(group, changes.pop(group, default))
        for key, value in changes.items():
            *parents, name = key.split("__")
            (mapping[parents[0]] if parents else mapping)[name] = value
        return parse(TrialConfig, mapping)

    return make


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write tests/golden anew from what reports say now")
    parser.addoption(
        "--write-reliability", action="store_true", help="write docs/RELIABILITY.md from this run; with -m faults"
    )


def pytest_collection_finish() -> None:
    gc.freeze()  # the libraries' million objects stay: a collection need not look at them


def pytest_unconfigure() -> None:
    gc.unfreeze()  # else libraries complain at the end of what nobody frees


def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption("write_reliability"):
        return
    sys.path.insert(0, str(Path(__file__).parent / "faults"))
    from reliability import Reliability

    config.pluginmanager.register(Reliability(config.rootpath / "docs" / "RELIABILITY.md"))
