"""`git_sha` names the measured code, whether it runs from a checkout, an archive or a plain copy."""

import shutil
import subprocess

import pytest

from sp_bench.rows import git

PACKAGE = git.PACKAGE


def run_git(folder, *words):
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    done = subprocess.run(["git", "-C", str(folder), *identity, *words], check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A repository with a small package and nothing committed; `git.state` is about it."""
    root = tmp_path / "checkout"
    package = root / "sp_bench"
    (package / "sub").mkdir(parents=True)
    (package / "sub.py").write_text("1")  # git sorts it before the folder sub, by the slash behind that
    (package / "sub" / "b.py").write_text("2")
    for name in (".gitattributes", ".git_archival.txt"):
        (root / name).write_bytes((PACKAGE.parent / name).read_bytes())
    run_git(root, "init", "-q")
    monkeypatch.setattr(git, "PACKAGE", package)
    return root


def commit(checkout):
    run_git(checkout, "add", ".")
    run_git(checkout, "commit", "-q", "-m", "one")
    return run_git(checkout, "rev-parse", "HEAD"), run_git(checkout, "rev-parse", "HEAD:sp_bench")


def test_a_checkout_names_its_commit_and_changed_code_its_tree_as_well(checkout):
    sha, tree = commit(checkout)
    assert git.state() == (sha, False)
    (checkout / "results").mkdir()
    (checkout / "results" / "row").write_text("1")
    assert git.state() == (sha, False), "no code has changed"
    (checkout / "sp_bench" / "sub.py").write_text("3")
    named, dirty = git.state()
    later, later_tree = commit(checkout)
    assert (named, dirty) == (f"{sha}+tree:{later_tree}", True)
    assert git.commits_of_trees([named, f"tree:{tree}", sha]) == {named: later, f"tree:{tree}": sha}


def test_without_a_commit_the_tree_names_the_code(checkout):
    named, dirty = git.state()
    assert (named, dirty) == (f"tree:{commit(checkout)[1]}", None)


def test_an_unpacked_archive_names_its_commit_and_a_plain_copy_its_tree(checkout, tmp_path, monkeypatch):
    sha, tree = commit(checkout)
    unpacked = tmp_path / "unpacked"
    unpacked.mkdir()
    run_git(checkout, "archive", "-o", str(tmp_path / "a.tar"), "HEAD")
    subprocess.run(["tar", "-xf", tmp_path / "a.tar", "-C", unpacked], check=True)
    monkeypatch.setattr(git, "PACKAGE", unpacked / "sp_bench")
    assert git.state() == (sha, None), "whether it was edited since is not known"
    (unpacked / ".git_archival.txt").write_text("node: $Format:%H$\n")
    assert git.state() == (f"tree:{tree}", None)


def test_a_copy_has_the_tree_of_its_commit_whatever_lies_between_its_files(checkout, tmp_path, monkeypatch):
    _, tree = commit(checkout)
    copy = tmp_path / "site-packages" / "sp_bench"
    shutil.copytree(checkout / "sp_bench", copy)
    monkeypatch.setattr(git, "PACKAGE", copy)
    (copy / "sub.py").chmod(0o755)
    for name in ("__pycache__/sub.pyc", "conf/config.yaml", ".swp", "empty/__pycache__/x.pyc"):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_text("1")
    assert git.state() == (f"tree:{tree}", None)
    assert git.commits_of_trees([f"tree:{tree}"]) == {}, "there is no history"


def test_the_packages_own_tree_is_that_of_git(tmp_path):
    run_git(tmp_path, "init", "-q")
    shutil.copytree(PACKAGE, tmp_path / "sp_bench", ignore=shutil.ignore_patterns("__pycache__"))
    assert git.code_tree(PACKAGE) == commit(tmp_path)[1]
    listed = run_git(tmp_path, "ls-tree", "-r", "HEAD")
    assert {line.split()[0] for line in listed.splitlines()} == {"100644"}, "code_tree takes no file for executable"


@pytest.mark.parametrize(
    ("git_sha", "shown"),
    [("a" * 40, "a" * 7), (f"{'a' * 40}+tree:{'b' * 40}", "a" * 7), (f"tree:{'b' * 40}", f"tree:{'b' * 7}")],
)
def test_a_shortened_name_still_says_what_it_is(git_sha, shown):
    assert git.short(git_sha) == shown
