"""Compiled code is kept where nobody else may write to."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from sp_bench.kernels import flash_attn_4
from sp_bench.kernels.compiled_code import own_folder
from sp_bench.kernels.flash_attn_4 import FOLDER, KEEP


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_the_folder_is_made_for_its_user_alone_and_found_again(temporary: Path) -> None:
    folder = own_folder("compiled")
    assert folder.parent == temporary
    assert folder.stat().st_mode & 0o777 == 0o700
    assert own_folder("compiled") == folder


def test_a_place_that_others_can_write_to_or_that_is_no_folder_is_refused(temporary: Path) -> None:
    own_folder("open").chmod(0o777)
    elsewhere = temporary / "elsewhere"
    elsewhere.mkdir()
    (temporary / f"sp_bench-{os.getuid()}-link").symlink_to(elsewhere)
    for name in ("open", "link"):
        with pytest.raises(OSError, match=rf"sp_bench-\d+-{name} is not a folder that you alone can write to"):
            own_folder(name)
    (temporary / f"sp_bench-{os.getuid()}-file").touch()
    with pytest.raises(FileExistsError):
        own_folder("file")


@pytest.fixture
def read(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], dict[str, str]]:
    """Imports a flash_attn.cute that says what it was told, as the kernel does; like the package's, at its import."""
    package = temporary / "site" / "flash_attn" / "cute"
    package.mkdir(parents=True)
    for folder in (package.parent, package):
        (folder / "__init__.py").touch()
    (package / "interface.py").write_text(
        f"import os\nREAD = {{k: os.environ[k] for k in {[KEEP, FOLDER]} if k in os.environ}}\n"
    )
    monkeypatch.syspath_prepend(package.parents[1])
    for name in ("flash_attn", "flash_attn.cute", "flash_attn.cute.interface"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))  # what is put back afterwards, or taken away
        del sys.modules[name]
    for name in (KEEP, FOLDER):
        monkeypatch.setenv(name, "put back afterwards")
        monkeypatch.delenv(name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    return lambda: flash_attn_4._library.__wrapped__().READ


def test_flash_attention_4_is_told_to_keep_what_it_compiles_before_it_is_imported(
    temporary: Path, read: Callable[[], dict[str, str]]
) -> None:
    assert read() == {KEEP: "1", FOLDER: str(temporary / f"sp_bench-{os.getuid()}-flash_attn_4-sm90")}


@pytest.mark.parametrize(("name", "value"), [(KEEP, "0"), (FOLDER, "/elsewhere")])
def test_what_a_user_told_it_stands(
    read: Callable[[], dict[str, str]], monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    assert read() == {name: value}


def test_a_folder_that_cannot_be_used_ends_no_trial_and_is_named(
    temporary: Path, read: Callable[[], dict[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    (temporary / f"sp_bench-{os.getuid()}-flash_attn_4-sm90").touch()
    assert read() == {}
    assert "what flash_attn_4 compiles is not kept for the next launch: " in capsys.readouterr().out


def test_the_stand_in_is_gone_afterwards() -> None:
    assert not any(getattr(module, "READ", None) for name, module in sys.modules.items() if "flash_attn" in name)
