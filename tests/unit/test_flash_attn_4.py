"""The kernel flash_attn_4 keeps what its library compiles, in a folder that nobody else can write to."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from sp_bench.kernels import flash_attn_4
from sp_bench.kernels.flash_attn_4 import FOLDER, KEEP, own_folder


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_the_folder_is_made_for_its_user_alone_and_found_again(temporary: Path) -> None:
    folder = own_folder("compiled")
    assert folder.parent == temporary
    assert folder.stat().st_mode & 0o777 == 0o700
    assert own_folder("compiled") == folder


def test_a_folder_that_others_can_write_to_a_link_and_a_file_are_refused(temporary: Path) -> None:
    own_folder("open").chmod(0o777)
    elsewhere = temporary / "elsewhere"
    elsewhere.mkdir()
    (temporary / f"sp_bench-{os.getuid()}-link").symlink_to(elsewhere)
    for name in ("open", "link"):
        with pytest.raises(OSError, match=rf"sp_bench-\d+-{name} must be a folder that only you can write to"):
            own_folder(name)
    (temporary / f"sp_bench-{os.getuid()}-file").touch()
    with pytest.raises(FileExistsError):
        own_folder("file")


@pytest.fixture
def read(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], dict[str, str]]:
    """Imports a stand-in for flash_attn.cute as the kernel does. Returns what the stand-in read from the environment at
    its import, where the real package reads it too."""
    package = temporary / "site" / "flash_attn" / "cute"
    package.mkdir(parents=True)
    for folder in (package.parent, package):
        (folder / "__init__.py").touch()
    (package / "interface.py").write_text(
        f"import os\nREAD = {{k: os.environ[k] for k in {[KEEP, FOLDER]} if k in os.environ}}\n"
    )
    monkeypatch.syspath_prepend(package.parents[1])
    for name in ("flash_attn", "flash_attn.cute", "flash_attn.cute.interface"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))  # so that monkeypatch restores sys.modules afterwards
        del sys.modules[name]
    for name in (KEEP, FOLDER):
        monkeypatch.setenv(name, "so that monkeypatch restores it afterwards")
        monkeypatch.delenv(name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    return lambda: flash_attn_4._library.__wrapped__().READ


def test_flash_attention_4_is_told_to_keep_what_it_compiles_before_it_is_imported(
    temporary: Path, read: Callable[[], dict[str, str]]
) -> None:
    assert read() == {KEEP: "1", FOLDER: str(temporary / f"sp_bench-{os.getuid()}-flash_attn_4-sm90")}
    assert not {KEEP, FOLDER} & set(os.environ)  # rows name variables, and later trials of a group have this process


@pytest.mark.parametrize(("name", "value"), [(KEEP, "0"), (FOLDER, "/elsewhere")])
def test_what_a_user_set_in_the_environment_stands(
    read: Callable[[], dict[str, str]], monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    assert read() == {name: value}


def test_a_folder_that_cannot_be_used_is_named_in_the_log_and_the_trial_goes_on(
    temporary: Path, read: Callable[[], dict[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    (temporary / f"sp_bench-{os.getuid()}-flash_attn_4-sm90").touch()
    assert read() == {}
    assert "flash_attn_4 does not keep its compiled kernels for the next launch: " in capsys.readouterr().out


def test_the_stand_in_is_gone_afterwards() -> None:
    assert not any(getattr(module, "READ", None) for name, module in sys.modules.items() if "flash_attn" in name)
