"""Engines that somebody altered and gave right digests again: one error, or the same answers."""

from __future__ import annotations

import copy
import json
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import g4ir
from g4ir.cli import main
from g4ir.engine.artefact import MANIFEST, manifest_text, open_artefact, rebuild
from g4ir.engine.engine import Engine
from g4ir.engine.load import load_engine
from g4ir.errors import EngineError, G4Error
from tests.configs import spec_called
from tests.engines import random_checkpoint, resigned, stored_manifest

Change = Callable[[dict[str, Any]], Any]
PROMPT = [2, 5, 7, 11, 400, 3, 9, 8, 7, 6, 5]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = tmp_path_factory.mktemp("altered")
    return g4ir.build(
        None,
        folder / "engine",
        checkpoint=random_checkpoint(folder / "checkpoint", "tiny-ple"),
        backend="reference",
        max_seq=64,
        prefill_chunk=16,
    )


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


def put(key: str, value: Any) -> Change:
    """Set one key, dots between the steps to it."""
    *steps, last = key.split(".")

    def change(m: dict[str, Any]) -> None:
        for step in steps:
            m = m[step]
        m[last] = value

    return change


def drop(key: str) -> Change:
    *steps, last = key.split(".")

    def change(m: dict[str, Any]) -> None:
        for step in steps:
            m = m[step]
        del m[last]

    return change


SHA = "0" * 64
MANIFESTS: dict[str, tuple[Change, str]] = {
    "max_batch -1": (put("limits.max_batch", -1), "limits.max_batch"),
    "max_batch 0": (put("limits.max_batch", 0), "limits.max_batch"),
    "max_seq huge": (put("limits.max_seq", 10**18), "limits.max_seq"),
    "max_seq beyond the model": (put("limits.max_seq", 1 << 20), "limits"),
    "max_seq text": (put("limits.max_seq", "5"), "limits.max_seq"),
    "max_seq true": (put("limits.max_seq", True), "limits.max_seq"),
    "max_seq fraction": (put("limits.max_seq", 64.0), "limits.max_seq"),
    "limits extra": (put("limits.zzz", 1), "limits.zzz"),
    "limits less": (drop("limits.max_seq"), "limits"),
    "chunk 0": (put("limits.prefill_chunk", 0), "limits.prefill_chunk"),
    "chunk -5": (put("limits.prefill_chunk", -5), "limits.prefill_chunk"),
    "chunk above max_seq": (put("limits.prefill_chunk", 65), "limits"),
    "device cuda:99": (put("device", "cuda:99"), "device"),
    "device list": (put("device", []), "device"),
    "dtype unknown": (put("dtype", "weird"), "dtype"),
    "dtype of other graphs": (put("dtype", "bf16"), "graph.embed.g4ir"),
    "all_logits": (put("all_logits", True), "graph.prefill.g4ir"),
    "all_logits 1": (put("all_logits", 1), "all_logits"),
    "media empty": (put("media", {}), MANIFEST),
    "media unknown": (put("media.kinds", ["smell"]), "media.kinds"),
    "media of another": (put("media.kinds", ["image"]), "takes no images"),
    "media lengths": (put("media.lengths", [-5]), "media.lengths"),
    "weights empty": (put("weights", {}), "weights"),
    "weights unknown": (put("weights", {"kind": "zz"}), "weights"),
    "weights list": (put("weights", ["packed"]), "weights"),
    "weights no seed": (put("weights", {"kind": "random"}), "weights.seed"),
    "weights seed text": (put("weights", {"kind": "random", "seed": "1"}), "weights.seed"),
    "weights seed beside files": (put("weights", {"kind": "random", "seed": 1}), "weights are"),
    "weights absent": (put("weights", {"kind": "absent"}), "weights"),
    "weights linked": (put("weights", {"kind": "linked", "directory": "/etc"}), "weights.files"),
    "weights linked beside files": (
        put("weights", {"kind": "linked", "directory": "/etc", "files": {}}),
        "weights are",
    ),
    "compiled list": (put("compiled", []), "compiled"),
    "compiled of another": (put("compiled", {"prefill": []}), "compiled.prefill"),
    "versions empty": (put("versions", {}), "versions.torch"),
    "versions number": (put("versions.torch", 2), MANIFEST),
    "machine list": (put("machine", ["any"]), "machine"),
    "graphs empty": (put("graphs", []), "graphs"),
    "graphs number": (put("graphs", [1]), "line"),
    "graphs elsewhere": (put("graphs", ["../../x"]), "graph.../../x.g4ir"),
    "graphs twice": (put("graphs", ["embed", "prefill", "decode", "decode"]), "graphs"),
    "graphs less": (put("graphs", ["embed", "prefill"]), "graphs"),
    "graphs in another order": (put("graphs", ["embed", "decode", "prefill"]), "graphs"),
    "files number": (lambda m: m["files"].update({"spec.yaml": 5}), "files"),
    "file without keys": (lambda m: m["files"].update({"spec.yaml": {}}), "files.spec.yaml.sha256"),
    "file elsewhere": (lambda m: m["files"].update({"../x": {"sha256": SHA, "bytes": 1}}), "../x"),
    "file absolute": (
        lambda m: m["files"].update({"/etc/passwd": {"sha256": SHA, "bytes": 1}}),
        "/etc/passwd",
    ),
    "file missing": (lambda m: m["files"].update({"x": {"sha256": SHA, "bytes": 1}}), "x"),
    "placement unknown": (put("ple_placement", "weird"), "ple-placement"),
    "placement number": (put("ple_placement", 5), "line"),
    "placement none": (put("ple_placement", None), "ple_placement"),
    "options unknown": (put("options", {"zz": 1}), "options.zz"),
    "options auto": (put("options.latent_kv.form", "auto"), "options.latent_kv.form"),
    "settings unknown": (put("settings", {"zz": "1"}), "zz"),
    "settings list": (put("settings", []), "settings"),
    "skipped unknown": (put("skipped_passes", ["weird"]), "weird"),
    "skipped another": (put("skipped_passes", ["fuse_qkv"]), "graph.prefill.g4ir"),
    "skipped text": (put("skipped_passes", "fuse_qkv"), "skipped_passes"),
    "variant": (put("variant", "tiny-moe"), "spec_digest"),
    "spec digest": (put("spec_digest", SHA), "spec_digest"),
    "backend unknown": (put("backend", "zz"), "zz"),
    "backend with code": (put("backend", "torch"), "another machine"),
    "unknown key": (put("zzz", 1), "zzz"),
    "another order": (lambda m: m.update(notes=m.pop("notes")), "not as g4ir writes it"),
    "notes": (put("notes.ignored", {"a": 5}), MANIFEST),
    "infinity": (put("limits.max_seq", float("inf")), "limits.max_seq"),
    "deep": (put("notes.ignored", json.loads("[" * 200 + "]" * 200)), "nested"),
}


@pytest.mark.parametrize("case", MANIFESTS)
def test_altered_manifests(altered: Path, case: str) -> None:
    change, part = MANIFESTS[case]
    resigned(altered, change)
    with pytest.raises(G4Error) as caught:
        load_engine(altered, trust=True)
    assert part in str(caught.value) and "\n" not in str(caught.value), caught.value


def _rewrite(name: str, old: str, new: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        text = (path / name).read_text()
        assert old in text
        (path / name).write_text(text.replace(old, new))

    return change


def _tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def rewrite(path: Path) -> None:
        file = path / "weights-00000.safetensors"
        tensors = {k: t.clone() for k, t in load_file(file).items()}
        change(tensors)
        save_file(tensors, file)

    return rewrite


def _other_spec(path: Path) -> None:
    (path / "spec.yaml").write_text(g4ir.load_spec("tiny-moe").to_yaml())


NORM, LINEAR, TABLE = "L0.norm_in", "L0.attn.wo", "embed.table"
FILES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "an extra file": (lambda p: (p / "evil.so").write_bytes(b"x"), "evil.so"),
    "an extra folder's file": (
        lambda p: [(p / "a").mkdir(), (p / "a" / "b").write_text("x")],
        "a/b",
    ),
    "a link": (lambda p: (p / "x").symlink_to("/etc/passwd"), "x"),
    "a linked folder": (lambda p: (p / "programs").symlink_to("/etc"), "programs"),
    "a pipe": (lambda p: os.mkfifo(p / "x"), "x"),
    "a window": (_rewrite("graph.decode.g4ir", "window=8", "window=400"), "graph.decode.g4ir"),
    "a huge window": (
        _rewrite("graph.decode.g4ir", "window=8", f"window={10**30}"),
        "graph.decode.g4ir",
    ),
    "a dim": (_rewrite("graph.prefill.g4ir", "[B,S,64]", "[B,S,65]"), "graph.prefill.g4ir"),
    "a ring": (_rewrite("graph.decode.g4ir", "[8,B", "[7,B"), "graph.decode.g4ir: line"),
    "the prologue": (_rewrite("prologue.g4ir", "axis=0", "axis=1"), "prologue.g4ir"),
    "a comment": (
        _rewrite("graph.embed.g4ir", "graph embed {", "graph embed { # x"),
        "graph.embed.g4ir",
    ),
    "another spec": (_other_spec, "spec_digest"),
    "a spec that extends": (
        lambda p: (p / "spec.yaml").write_text("schema: 1\nextends: ../x\n"),
        "extends",
    ),
    "an empty spec": (lambda p: (p / "spec.yaml").write_text(""), "spec.yaml"),
    "a param renamed": (_tensors(lambda t: t.update(x=t.pop(NORM))), "'x'"),
    "a param missing": (_tensors(lambda t: t.pop(NORM)), NORM),
    "a param more": (_tensors(lambda t: t.update(x=t[NORM].clone())), "'x'"),
    "a norm of size 1": (_tensors(lambda t: t.update({NORM: t[NORM][:1]})), NORM),
    "a norm of size 0": (_tensors(lambda t: t.update({NORM: t[NORM][:0]})), NORM),
    "half a product": (_tensors(lambda t: t.update({LINEAR: t[LINEAR][:32]})), LINEAR),
    "another rank": (_tensors(lambda t: t.update({LINEAR: t[LINEAR].reshape(-1)})), LINEAR),
    "another dtype": (_tensors(lambda t: t.update({LINEAR: t[LINEAR].half()})), LINEAR),
    "whole numbers": (_tensors(lambda t: t.update({LINEAR: t[LINEAR].to(torch.int8)})), LINEAR),
    "a shorter table": (_tensors(lambda t: t.update({TABLE: t[TABLE][:3]})), TABLE),
}


@pytest.mark.parametrize("case", FILES)
def test_altered_files(altered: Path, case: str) -> None:
    change, part = FILES[case]
    change(altered)
    resigned(altered, lambda m: None)
    refused(altered, part)


def test_a_manifest_that_is_no_ordinary_file(altered: Path, tmp_path: Path) -> None:
    file = altered / MANIFEST
    text = file.read_bytes()
    file.unlink()
    os.mkfifo(file)
    refused(altered, "no engine directory")
    file.unlink()
    file.write_bytes(b" " * (17 << 20) + text)
    refused(altered, "larger than")


def test_graphs_of_another_g4ir_are_named_with_the_command(
    altered: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass that has changed since: what was built is not what would be built now."""
    from g4ir.weights import pack

    made = pack.make_packing
    monkeypatch.setattr(
        pack,
        "make_packing",
        lambda spec, all_logits, dtype, media, skip, options: made(
            spec, all_logits, dtype, media, ("fuse_gate_up",), options
        ),
    )
    refused(
        altered,
        f"g4ir build --spec {altered}/spec.yaml --backend reference --device cpu",
        "--max-seq 64",
        "--checkpoint DIR",
    )


# --- whatever is altered ----------------------------------------------------------------------

JUNK = (
    None,
    True,
    False,
    0,
    1,
    -1,
    10**18,
    10**40,
    0.5,
    float("nan"),
    float("inf"),
    "",
    "x",
    "0",
    "../x",
    "/etc/passwd",
    "torch",
    "cuda",
    "bf16",
    "off",
    "a\nb",
    "\0",
    "ü",
    [],
    [1],
    ["x"],
    {},
    {"kind": "random", "seed": 0},
    {"a": {}},
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value in JSON."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in items:
        yield (*path, key)
        if isinstance(item, dict | list):
            yield from places(item, (*path, key))


def mutate(values: dict[str, Any], data: st.DataObject) -> None:
    """One change somewhere, in place."""
    *steps, last = data.draw(st.sampled_from(list(places(values))))
    parent: Any = values
    for step in steps:
        parent = parent[step]
    old = parent[last]
    kind = data.draw(st.sampled_from(("junk", "drop", "near", "copy", "swap")))
    if kind == "drop":
        del parent[last]
    elif kind == "near" and isinstance(old, int) and not isinstance(old, bool):
        parent[last] = old + data.draw(st.sampled_from((-1, 1, 64)))
    elif kind == "near" and isinstance(old, str):
        parent[last] = data.draw(st.sampled_from((old + "x", old[:-1], old.upper(), old[::-1])))
    elif kind == "copy" and isinstance(parent, list):
        parent.append(old)
    elif kind == "copy":
        parent[data.draw(st.sampled_from(("zz", f"{last}2", "../y")))] = old
    elif kind == "swap":
        other = data.draw(
            st.sampled_from(list(parent if isinstance(parent, dict) else range(len(parent))))
        )
        parent[last], parent[other] = parent[other], old
    else:
        parent[last] = copy.deepcopy(data.draw(st.sampled_from(JUNK)))


@contextmanager
def manifest_of(path: Path, values: dict[str, Any]) -> Iterator[None]:
    file = path / MANIFEST
    before = file.read_bytes()
    file.write_text(manifest_text(values))
    try:
        yield
    finally:
        file.write_bytes(before)


@settings(max_examples=max(1000, settings.default.max_examples if settings.default else 0))
@given(data=st.data())
def test_any_alteration_is_refused_or_changes_nothing(
    engine: Engine, answer: list[int], data: st.DataObject
) -> None:
    values = copy.deepcopy(stored_manifest(engine.path))
    del values["digest"]
    for _ in range(data.draw(st.integers(1, 3))):
        mutate(values, data)
    with manifest_of(engine.path, values):
        try:
            loaded = load_engine(engine.path)
            found = loaded.generate(PROMPT, 4, stop_ids=())
        except G4Error as e:
            assert "\n" not in str(e)
            return
    assert found == answer


def test_what_is_read_of_an_engine_runs_nothing(engine: Engine) -> None:
    found = open_artefact(engine.path, check_weights=True)
    assert found.manifest.text() == (engine.path / MANIFEST).read_text()
    assert found.manifest.digest == stored_manifest(engine.path)["digest"]


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
        if depth % 200 == 199 or depth > sys.getrecursionlimit() - 10:
            with suppress(RecursionError):  # where the writer itself cannot go as deep
                (altered / MANIFEST).write_text(manifest_text({**values, "notes": deep}))
            with pytest.raises(EngineError):
                load_engine(altered)


def test_the_command_that_builds_it_again_does(tmp_path: Path) -> None:
    """With all its options: the same manifest, digest and all."""
    spec, out = tmp_path / "media.yaml", tmp_path / "engine"
    spec.write_text(spec_called("tiny-media").to_yaml())
    given = {
        "skip": ("fuse_gate_up", "fuse_norm_residual"),
        "image_budgets": (140, 70),
        "audio_seconds": (1.0, 3.0),
        "media": ("image", "audio"),
    }
    first = g4ir.build(
        spec,
        out,
        backend="reference",
        random_weights=3,
        all_logits=True,
        max_seq=256,
        prefill_chunk=192,
        dtype="bfloat16",
        **given,
    )
    found = open_artefact(out)
    words = shlex.split(rebuild(out, found.manifest, found.spec).partition("build it again: ")[2])
    assert main([*words[1:-1], str(tmp_path / "again")]) == 0
    again = load_engine(tmp_path / "again")
    assert again.manifest == first.manifest
