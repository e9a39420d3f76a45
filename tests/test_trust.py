"""Native code of others, run by decision alone; folders of the user, believed if theirs alone."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import threading
import zipfile
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

import g4ir
from g4ir.artefact import trust
from g4ir.artefact.directory import open_artefact
from g4ir.backends.cpu import pyops
from g4ir.backends.inductor import program_cache
from g4ir.builder.load import load_engine, open_runtime
from g4ir.check.logits import verify_engine
from g4ir.cli import main
from g4ir.errors import EngineError, G4Error, MissingError, TrustError, WeightsError
from g4ir.ui import paths
from g4ir.ui.progress import no_progress
from tests.cli_tools import ok, refused
from tests.engines import resigned

SMALL: dict[str, Any] = {"random_weights": 0, "backend": "reference", "max_seq": 32}
EVIL = """#include <stdio.h>
__attribute__((constructor)) void f(void) {{ fclose(fopen("{}", "w")); }}"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user who has decided nothing."""
    folder = tmp_path / "home"
    monkeypatch.setenv("XDG_STATE_HOME", str(folder / "state"))
    return folder


@pytest.fixture(scope="module")
def built(engines: Any) -> Path:
    """Before the user of these tests is another one, whose kernels are not compiled yet."""
    pyops.load_kernels()
    settings = {"programs": "inductor"}
    return engines.build("torch", "tiny-ple", "compiled", settings=settings).path


@pytest.fixture
def copied(built: Path, tmp_path: Path) -> Path:
    """A compiled engine of somebody else."""
    return Path(shutil.copytree(built, tmp_path / "engine"))


def plant(program: Path, mark: Path) -> None:
    """Put a library into a compiled program that writes `mark` as soon as it is loaded."""
    source, planted = mark.with_suffix(".c"), mark.with_suffix(".so")
    source.write_text(EVIL.format(mark))
    subprocess.run(["gcc", "-shared", "-fPIC", str(source), "-o", str(planted)], check=True)
    with zipfile.ZipFile(program) as old:
        files, comment = {name: old.read(name) for name in old.namelist()}, old.comment
    with zipfile.ZipFile(program, "w") as new:
        for name, data in files.items():
            new.writestr(name, planted.read_bytes() if name.endswith(".so") else data)
        new.comment = comment


def test_a_planted_library_is_not_run(copied: Path, tmp_path: Path) -> None:
    mark = tmp_path / "pwned"
    plant(next((copied / "programs").glob("*.pt2")), mark)
    resigned(copied, lambda m: None)
    with pytest.raises(TrustError, match=r"native code.*g4ir inspect.*--trust.*g4ir trust"):
        load_engine(copied)
    assert main(["run", str(copied), "--tokens", "2,5"]) == 2
    assert main(["verify", str(copied)]) == 2
    assert main(["bench", str(copied), "--input-len", "4"]) == 2
    assert main(["inspect", str(copied)]) == 0
    assert main(["show", str(copied), "--phase", "decode"]) == 0
    assert not mark.exists()
    with pytest.raises(G4Error):  # it has no program
        load_engine(copied, trust=True)
    assert mark.exists()


def test_decisions(copied: Path) -> None:
    assert "is not run without --trust" in ok("inspect", copied)
    decision = Path(json.loads(ok("trust", copied, "--json"))["decision"])
    assert "is run: trusted" in (said := ok("inspect", copied)) and "seed" not in said
    assert verify_engine(load_engine(copied)).ok
    moved = copied.rename(copied.parent / "elsewhere")  # the bytes count, not the place
    assert load_engine(moved)
    decision.unlink()
    with pytest.raises(TrustError):
        load_engine(moved)
    main(["trust", str(moved)])
    resigned(moved, lambda m: m["versions"].update(python="3.99"))
    with pytest.raises(TrustError):  # which ends with a change
        load_engine(moved)


def test_what_was_built_here_needs_no_question(tmp_path: Path) -> None:
    engine = g4ir.build("tiny-dense", tmp_path / "e", **SMALL)
    digest = engine.manifest["digest"]
    decision = trust.find_decision(digest)
    assert decision and decision.why == trust.BUILT and decision.path == str(tmp_path / "e")
    found = trust.provenance(open_artefact(engine.path))
    assert found["built_by"].startswith("this user, here, ") and found["native_code"] == "none"
    assert found["weights"] == "made from seed 0"


@pytest.mark.parametrize("name", ["tiny-ple", "tiny-media"])
def test_without_native_code(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs and weights are data, towers too; its kernels are this machine's own."""
    made = g4ir.build(name, tmp_path / "e", **SMALL | {"backend": "torch", "max_seq": 256})
    found = open_artefact(made.path)
    assert not (found.path / "programs").exists()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert not trust.find_decision(found.manifest.digest)
    assert trust.provenance(found)["native_code"] == "none"
    assert load_engine(found.path).generate([2, 5, 7], 2)


def test_a_decision_that_cannot_be_kept_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    paths.private(paths.state_root()).chmod(0o775)
    assert g4ir.build("tiny-dense", tmp_path / "d", **SMALL).path.is_dir()
    assert "chmod go-w" in caplog.text
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    g4ir.build("tiny-dense", tmp_path / "e", **SMALL)
    assert "native code of this engine will need --trust" in caplog.text


# --- the user's folders -----------------------------------------------------------------------


def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "g4ir" / "programs"
    before = os.umask(0o002)  # with which a folder made as usual could be written by a group
    paths.private(folder)
    os.umask(before)
    assert {stat.S_IMODE(p.stat().st_mode) for p in (folder, folder.parent)} == {0o700}
    for place, mode in ((folder, 0o770), (folder, 0o707), (folder.parent, 0o777)):
        place.chmod(mode)
        with pytest.raises(TrustError, match=f"`chmod go-w {place}`"):
            paths.check_private(folder)
        place.chmod(0o700)
    paths.check_private(folder)
    tmp_path.chmod(0o777)  # in which the folder itself could be exchanged
    with pytest.raises(TrustError, match=f"`chmod go-w {tmp_path}`"):
        paths.check_private(folder)
    tmp_path.chmod(0o1777)  # but not where only the owner of an entry may
    paths.check_private(folder)


def test_folder_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "g4ir"
    folder.mkdir()
    monkeypatch.setattr(paths.os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(TrustError, match="belongs to another user"):
        paths.check_private(folder)


def test_planted_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    out, name = tmp_path / "out", "0" * 24 + ".pt2"
    out.mkdir()
    assert not program_cache.from_cache(name, out)
    (out / name).write_bytes(b"program")
    program_cache.keep_program(out / name)
    (out / name).unlink()
    assert program_cache.from_cache(name, out) and (out / name).read_bytes() == b"program"
    kept = program_cache.cache_dir() / name
    kept.write_bytes(b"another program")
    digest = kept.with_suffix(".sha256")
    digest.write_text(program_cache.sha256(kept))  # beside it, where one was believed before
    assert not program_cache.from_cache(name, out)
    kept.parent.chmod(0o777)
    with pytest.raises(TrustError, match="chmod go-w"):
        program_cache.from_cache(name, out)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "cache"))
    assert paths.state_root() != paths.cache_root()


def test_compiler_files_are_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/tmp/guessed")
    paths.keep_inductor_private("/tmp/guessed")
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "g4ir" / "inductor")
    assert stat.S_IMODE((tmp_path / "g4ir" / "inductor").stat().st_mode) == 0o700
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/of/the/user")
    paths.keep_inductor_private("/tmp/guessed")
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/of/the/user"
    (tmp_path / "file").write_text("")  # where no cache can be, a temporary one
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    paths.keep_inductor_private("/tmp/guessed")
    assert stat.S_IMODE(os.stat(os.environ["TORCHINDUCTOR_CACHE_DIR"]).st_mode) == 0o700


# --- compiled programs ------------------------------------------------------------------------


def _programs(path: Path) -> list[Path]:
    return sorted((path / "programs").glob("*.pt2"))


def _junk(path: Path) -> None:
    for file in _programs(path):  # of its segment, as it says, and no program
        file.write_bytes(b"junk" + file.read_bytes()[-69:])


def _other_name(m: dict[str, Any]) -> None:
    m["compiled"]["prefill"][0] = "../../evil.pt2"


PROGRAMS: dict[str, tuple[Any, Any, str]] = {
    "garbage": (lambda p: _programs(p)[0].write_bytes(b"x" * 999), None, "is not the program"),
    "elsewhere": (None, _other_name, "no program '../../evil.pt2'"),
    "no programs": (_junk, None, r"\.pt2 cannot be loaded"),
    "fewer": (None, lambda m: m["compiled"]["prefill"].pop(), "are not those of its segments"),
    "more": (None, lambda m: m["compiled"]["prefill"].append("0" * 24 + ".pt2"), "its segments"),
    "one row": (None, lambda m: m["limits"].update(max_batch=1), "is not the program of"),
}


@pytest.mark.parametrize("case", PROGRAMS)
def test_programs_are_those_of_their_segments(copied: Path, case: str) -> None:
    change, resign, message = PROGRAMS[case]
    if change:
        change(copied)
    resigned(copied, resign or (lambda m: None))
    with pytest.raises(EngineError, match=message):
        load_engine(copied, trust=True)


def test_unpacked_programs(copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(paths.tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    with load_engine(copied, trust=True) as engine:
        assert engine.generate([2, 5, 7], 2)
    assert not (tmp_path / "cache").exists() and not [*(tmp_path / "tmp").iterdir()]
    assert os.environ["TMPDIR"] == str(tmp_path / "tmp")


def test_no_room_to_unpack(copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths.tempfile, "tempdir", str(tmp_path / "missing"))
    said = refused("run", copied, "--tokens", "2,5", "--trust", code=3)
    assert "no folder to unpack" in said and "missing" in said and "TMPDIR" in said


def test_unpacking_takes_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """TMPDIR is one for all threads."""
    monkeypatch.delenv("TMPDIR", raising=False)
    seen: list[str] = []

    def unpack() -> None:
        with paths.unpacking() as mine, mine:
            seen.append(os.environ["TMPDIR"])
            assert seen[-1] == mine.name and stat.S_IMODE(Path(mine.name).stat().st_mode) == 0o700

    with paths.unpacking() as first, first:
        other = threading.Thread(target=unpack)
        other.start()
        other.join(0.2)
        assert other.is_alive() and os.environ["TMPDIR"] == first.name
    other.join()
    assert len(seen) == 1 and "TMPDIR" not in os.environ


def test_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(paths.Path, "home", Mock(side_effect=RuntimeError))
    with pytest.raises(MissingError, match="set XDG_CACHE_HOME"):
        paths.cache_root()


def test_weights_that_change_after_they_were_looked_at(copied: Path) -> None:
    """A norm's weight of another size would be read out of bounds."""
    found = open_artefact(copied, check_weights=True)
    assert found.stored
    for header in found.stored.headers:
        raw = header.path.read_bytes()
        header.path.unlink()
        header.path.write_bytes(raw)
    with pytest.raises(WeightsError, match="changed since it was opened; fix: open it again"):
        open_runtime(found, no_progress, cuda_graph=True, trust=True).source.tensor("final_norm.w")


@pytest.mark.parametrize("text", ["[", "null", "[1, 2]"])
def test_damaged_decisions(copied: Path, text: str) -> None:
    Path(json.loads(ok("trust", copied, "--json"))["decision"]).write_text(text)
    with pytest.raises(TrustError):
        load_engine(copied)
