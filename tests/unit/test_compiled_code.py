"""Compiled code is kept where nobody else may write to."""

import os
import sys
from pathlib import Path

import pytest
import torch

from sp_bench.compiled_code import own_folder
from sp_bench.kernels import flash_attn_4


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_the_folder_is_made_for_its_user_alone_and_found_again(temporary: Path) -> None:
    folder = own_folder("compiled")
    assert folder.parent == temporary
    assert folder.stat().st_mode & 0o777 == 0o700
    assert own_folder("compiled") == folder


def test_a_folder_that_others_can_write_to_or_that_is_a_link_is_refused(temporary: Path) -> None:
    own_folder("open").chmod(0o777)
    elsewhere = temporary / "elsewhere"
    elsewhere.mkdir()
    (temporary / f"sp_bench-{os.getuid()}-link").symlink_to(elsewhere)
    for name in ("open", "link"):
        with pytest.raises(OSError, match=rf"sp_bench-\d+-{name} is not a folder that you alone can write to"):
            own_folder(name)


def test_flash_attention_4_is_told_where_to_keep_what_it_compiles_before_it_is_imported(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package reads both variables at its import, and only then."""
    package = temporary / "site" / "flash_attn" / "cute"
    package.mkdir(parents=True)
    for folder in (package.parent, package):
        (folder / "__init__.py").touch()
    (package / "interface.py").write_text(
        "import os\nREAD = {k: v for k, v in os.environ.items() if k.startswith('FLASH_ATTENTION_CUTE_DSL_CACHE')}\n"
    )
    monkeypatch.syspath_prepend(package.parents[1])
    for name in [n for n in sys.modules if n.partition(".")[0] == "flash_attn"]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("ENABLED", "DIR"):
        monkeypatch.setenv(f"FLASH_ATTENTION_CUTE_DSL_CACHE_{name}", "unset")  # put back afterwards
        monkeypatch.delenv(f"FLASH_ATTENTION_CUTE_DSL_CACHE_{name}")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    read = flash_attn_4._library.__wrapped__().READ
    assert read == {
        "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1",
        "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": str(temporary / f"sp_bench-{os.getuid()}-flash_attn_4-sm90"),
    }
    for name in [n for n in sys.modules if n.partition(".")[0] == "flash_attn"]:
        monkeypatch.delitem(sys.modules, name, raising=False)
