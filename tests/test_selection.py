"""Which tests `make test` leaves out, and which `make check` runs."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests import selection
from tests.cases import TABLES
from tests.selection import LeaveOut, Repository, Table, fitting, matches, near, read_table

ROOT = Path(__file__).parents[1]
CASES = TABLES["selection"]


@pytest.fixture(autouse=True)
def at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """CI runs these tests too, and there everything counts as changed."""
    monkeypatch.delenv("CI", raising=False)


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    """On main, with three commits: a.py, b.py, c.py."""
    root = tmp_path / "repository"
    root.mkdir()
    git(root, "init", "-q", "-b", "main")
    for name in ("a.py", "b.py", "c.py"):
        commit(root, name)
    return Repository(root)


def git(root: Path, *args: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    done = subprocess.run(
        ["git", "-C", str(root), *identity, *args], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def commit(root: Path, name: str) -> str:
    (root / name).write_text(name)
    git(root, "add", name)
    git(root, "commit", "-q", "-m", name)
    return git(root, "rev-parse", "HEAD")


def clone(repository: Repository, *options: str) -> Repository:
    root = repository.root.with_name("clone")
    git(repository.root, "clone", "-q", *options, repository.root.as_uri(), str(root))
    return Repository(root)


def since(repository: Repository, wanted: str = "auto") -> set[str] | None:
    changed = repository.changed(repository.base(wanted))
    return None if changed is None else {*changed}


# --- what has changed ---------------------------------------------------------------------------


def test_a_branch_is_compared_with_its_merge_base(repository: Repository) -> None:
    """Committed, staged, edited, deleted and new files of the branch; none of main's."""
    root = repository.root
    git(root, "checkout", "-q", "-b", "branch")
    commit(root, "committed.py")
    git(root, "checkout", "-q", "main")
    commit(root, "landed.py")
    git(root, "checkout", "-q", "branch")
    (root / "staged.py").write_text("")
    git(root, "add", "staged.py")
    (root / "a.py").write_text("edited")
    (root / "b.py").unlink()
    (root / ".gitignore").write_text("*.log\n")
    (root / "ignored.log").write_text("")
    assert since(repository) == {"committed.py", "staged.py", "a.py", "b.py", ".gitignore"}


def test_main_is_compared_with_where_it_was_before_its_last_landing(repository: Repository) -> None:
    root = repository.root
    git(root, "checkout", "-q", "-b", "branch")
    for name in ("d.py", "e.py"):
        commit(root, name)
    git(root, "checkout", "-q", "main")
    git(root, "merge", "-q", "--ff-only", "branch")
    git(root, "branch", "-q", "-D", "branch")
    assert since(repository) == {"d.py", "e.py"}


def test_in_a_fresh_clone_everything_counts_as_changed(repository: Repository) -> None:
    """Its last landing is not known, nor where it began: tags and parents do not say."""
    ours = clone(repository)
    assert since(ours) is None
    git(ours.root, "tag", "v1", "HEAD~2")
    assert since(ours) is None
    commit(repository.root, "landed.py")
    git(ours.root, "pull", "-q")
    assert since(ours) == {"landed.py"}


def test_in_ci(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    git(repository.root, "checkout", "-q", "-b", "branch")
    head = commit(repository.root, "d.py")
    assert since(repository) == {"d.py"}
    monkeypatch.setenv("CI", "true")
    assert since(repository) is None
    assert since(repository, head) == set()


def test_commits_not_pushed_are_compared_with_the_remote(repository: Repository) -> None:
    ours = clone(repository)
    for name in ("d.py", "e.py"):
        commit(ours.root, name)
    assert since(ours) == {"d.py", "e.py"}
    assert since(ours, "HEAD~3") == {"c.py", "d.py", "e.py"}


def test_without_a_base(repository: Repository, tmp_path: Path) -> None:
    assert since(clone(repository, "--depth", "1")) is None
    assert since(Repository(tmp_path)) is None  # no repository
    inside = repository.root / "unpacked"
    inside.mkdir()
    assert since(Repository(inside)) is None  # another project's repository
    assert since(repository, "no-such-commit") is None


# --- conditional tests --------------------------------------------------------------------------


@pytest.mark.parametrize(("changed", "run"), CASES["conditional"])
def test_conditional_tests_that_run(changed: list[str] | None, run: list[str] | str) -> None:
    table = read_table()
    run = [*table.conditional] if run == "all" else run
    assert {*table.unchanged(changed)} == {*table.conditional} - {*run}


def test_what_tests_import_is_among_their_paths() -> None:
    """GPU kernels and networks aside, whose own paths alone are tried again."""
    table = read_table()
    paths = (p for top in ("tests", "g4ir", *selection.MAPPED) for p in (ROOT / top).rglob("*.py"))
    every = [path.relative_to(ROOT).as_posix() for path in paths]
    files = {selection.module_name(file): file for file in every}
    del files["g4ir"]
    for name in table.conditional.keys() - {"GPU kernels", "TensorRT"}:
        tests, paths = table.conditional[name]["tests"], table.conditional[name]["paths"]
        modules = {m for f in every if matches(f, tests) for m in selection.imports(ROOT, f)}
        known = (*paths, *tests, *table.everything)
        missing = [files[m] for m in modules & files.keys() if not matches(files[m], known)]
        assert not missing, name


def test_every_pattern_of_the_table_matches_a_file() -> None:
    """A file that was renamed takes its tests with it."""
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    files = listed or [p.relative_to(ROOT).as_posix() for p in ROOT.rglob("*")]
    table = read_table()
    groups = [p for g in table.conditional.values() for p in (*g["tests"], *g["paths"])]
    tests = [t for many in table.data.values() for t in many]
    patterns = [*groups, *table.everything, *table.data, *tests]
    assert not [p for p in patterns if not any(matches(file, [p]) for file in files)]


def test_conditional_tests_are_not_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Repository, "changed", lambda self, base: frozenset({"README.md"}))
    plugin = LeaveOut("auto")
    assert plugin.pytest_ignore_collect(ROOT / "tests/trt/test_lowerings.py")
    assert plugin.pytest_ignore_collect(ROOT / "tests/test_interpreted.py")
    assert plugin.pytest_ignore_collect(ROOT / "tests/test_spec.py") is None
    assert plugin.pytest_ignore_collect(ROOT / "tests/trt") is None
    monkeypatch.setattr(Repository, "changed", lambda self, base: None)
    assert LeaveOut("auto").pytest_ignore_collect(ROOT / "tests/trt/test_lowerings.py") is None
    with pytest.raises(SystemExit, match="--changed-since nowhere: git knows no such commit"):
        LeaveOut("nowhere")


# --- tests near a change ------------------------------------------------------------------------


def test_tests_near_a_change(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    for name, text in CASES["imports"].items():
        (tmp_path / "tests" / name).write_text(text)
    table = Table({}, (), {"specs/*.yaml": ["tests/test_other.py"]})
    for path, stems in CASES["near"].items():
        assert near(tmp_path, {path}, table) == {f"tests/test_{s}.py" for s in stems.split()}


def test_as_many_as_the_budget_holds() -> None:
    files, seconds = {"slow", "quick", "near", "new"}, {"slow": 50, "quick": 2, "near": 30}
    assert fitting(files, seconds, 100) == ["new", "quick", "near", "slow"]
    assert fitting(files, seconds, 60) == ["new", "quick", "near"]


def test_make_check(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    changed = frozenset({"passes/fuse_qkv.py", "specs/tiny-moe.yaml"})
    monkeypatch.setattr(Repository, "base", lambda self, revision: "0123456789")
    monkeypatch.setattr(Repository, "changed", lambda self, base: changed)
    assert selection.main([]) == 0
    out, err = capsys.readouterr()
    assert {"tests/test_passes.py", "tests/test_spec.py"} <= {*out.split()}
    assert all((ROOT / file).exists() for file in out.split())
    assert err.startswith("2 files changed since 01234567")
    monkeypatch.setattr(Repository, "changed", lambda self, base: None)
    assert selection.main([]) == 1
    assert "run make test" in capsys.readouterr().err
