"""Engines that somebody altered and gave right digests again: one error, or the same answers."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import g4ir
from g4ir.artefact.directory import MANIFEST, manifest_text, open_artefact, rebuild
from g4ir.builder.load import load_engine
from g4ir.cli import main
from g4ir.engine.engine import Engine
from g4ir.errors import EngineError, G4Error
from tests.cases import TABLES
from tests.configs import spec_called
from tests.engines import random_checkpoint, resigned, stored_manifest
from tests.mutations import mutate

PROMPT = [2, 5, 7, 11, 400, 3, 9, 8, 7, 6, 5]


@pytest.fixture(scope="module")
def engine(engines: Any) -> Engine:
    return engines("reference", "tiny-ple")


@pytest.fixture(scope="module")
def answer(engine: Engine) -> list[int]:
    tokens: list[int] = engine.generate(PROMPT, 4, stop_ids=())
    return tokens


@pytest.fixture
def altered(engine: Engine, tmp_path: Path) -> Path:
    return Path(shutil.copytree(engine.path, tmp_path / "engine"))


def refused(path: Path, *parts: str) -> None:
    """One error of ours, which names the engine and what is said of it."""
    with pytest.raises(EngineError) as caught:
        load_engine(path, trust=True)
    message = str(caught.value)
    assert (str(path) in message and "build" in message) or "remove" in message
    assert all(part in message for part in parts), message


@pytest.mark.parametrize("name", ["../x", "/etc/passwd"])
def test_files_elsewhere(altered: Path, name: str) -> None:
    resigned(altered, lambda m: m["files"].update({name: {"sha256": "0" * 64, "bytes": 1}}))
    refused(altered, name)


def test_a_rank_without_weights(tmp_path: Path) -> None:
    options = {"checkpoint": random_checkpoint(tmp_path / "c", "tiny-moe"), "tp": 2}
    out = g4ir.build(None, tmp_path / "two", backend="reference", **options).path

    def keep_rank_1(manifest: dict[str, Any]) -> None:
        for name in [n for n in manifest["files"] if "weights" in n and "rank1of2" not in n]:
            del manifest["files"][name]
            (out / name).unlink()

    resigned(out, keep_rank_1)
    refused(out, "no weight file of rank 0 is named")


def test_names_of_files_are_quoted(altered: Path) -> None:
    """A name is a stranger's, and a terminal obeys some of them."""
    (altered / "a\x1b]0;owned\x07").write_text("")
    with pytest.raises(EngineError, match="owned") as e:
        load_engine(altered)
    assert "\x1b" not in str(e.value)


def test_keys_in_another_order(altered: Path) -> None:
    resigned(altered, lambda m: m.update(notes=m.pop("notes")))
    refused(altered, "not as g4ir writes it")


def test_a_manifest_that_is_no_ordinary_file(altered: Path, tmp_path: Path) -> None:
    file = altered / MANIFEST
    text = file.read_bytes()
    file.unlink()
    os.mkfifo(file)
    refused(altered, "no engine directory")
    file.unlink()
    file.write_bytes(b" " * (17 << 20) + text)
    refused(altered, "larger than")


# --- whatever is altered ----------------------------------------------------------------------

NAMES = st.sampled_from(("zz", "a2", "../y"))


@settings(max_examples=max(250, settings.default.max_examples if settings.default else 0))
@given(data=st.data())
def test_any_alteration(engine: Engine, answer: list[int], data: st.DataObject) -> None:
    values = stored_manifest(engine.path)
    del values["digest"]
    values = mutate(data, values, st.sampled_from(TABLES["values of manifests"]), NAMES)
    file = engine.path / MANIFEST
    before = file.read_bytes()
    file.write_text(manifest_text(values))
    try:
        assert load_engine(engine.path).generate(PROMPT, 4, stop_ids=()) == answer
    except G4Error as e:
        assert "\n" not in str(e)
    finally:
        file.write_bytes(before)


def test_paths_that_cannot_be_read(altered: Path, tmp_path: Path) -> None:
    """Whatever the system says of a path, or the parser of what lies there, is one error."""
    for path in (Path("a\0b"), tmp_path / ("x" * 5000)):
        with pytest.raises(EngineError):
            load_engine(path)
    deep: Any = []
    values = stored_manifest(altered)
    del values["digest"]
    for depth in range(sys.getrecursionlimit()):
        deep = [deep]
        if depth % 200 == 199:
            with suppress(RecursionError):  # where the writer itself cannot go as deep
                (altered / MANIFEST).write_text(manifest_text({**values, "notes": deep}))
            with pytest.raises(EngineError):
                load_engine(altered)


def test_the_command_that_builds_it_again_does(tmp_path: Path) -> None:
    """With all its options: the same manifest, digest and all."""
    spec, out = tmp_path / "media.yaml", tmp_path / "engine"
    spec.write_text(spec_called("tiny-media").to_yaml())
    text = {"max_seq": 256, "prefill_chunk": 192, "dtype": "bfloat16", "all_logits": True}
    media = {"image_budgets": (140, 70), "audio_seconds": (1.0, 3.0), "media": ("image", "audio")}
    given = {**text, **media, "random_weights": 3, "skip": ("fuse_gate_up", "fuse_norm_residual")}
    first = g4ir.build(spec, out, backend="reference", **given)
    found = open_artefact(out)
    words = shlex.split(rebuild(out, found.manifest).partition("build it again: ")[2])
    assert main([*words[1:-1], str(tmp_path / "again")]) == 0
    again = load_engine(tmp_path / "again")
    assert again.manifest == first.manifest
