"""Engines that are built on first use: found again, locked, removed; verbs that take a model.
Downloads by huggingface_hub from a hub on this machine: asked for, resumed, refused.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pty
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import HfApi, constants

import g4ir
from g4ir.backends.trt.kernel_cache import SUFFIX
from g4ir.builder import library
from g4ir.builder.library import cached_engines, engines_root, find_engine, keep_below, remove
from g4ir.errors import EngineError, G4Error
from g4ir.plan.options import BuildOptions
from g4ir.spec.record import load_spec
from g4ir.ui.locks import EXCLUSIVE, SHARED
from g4ir.weights.hub import look_up
from g4ir.weights.origin import hub_snapshot
from tests.cases import TABLES
from tests.cli_tools import g4ir as command
from tests.cli_tools import ok, refused, text_checkpoint
from tests.engines import random_checkpoint
from tests.gguf_files import bare_file, with_turns
from tests.spies import spy

SMALL = BuildOptions(backend="reference", max_seq=64)
FLAGS = ("--backend", "reference", "--max-seq", "64")


@pytest.fixture(autouse=True)
def fresh(own_home: Path) -> Iterator[None]:
    """A user's folders without anything in them; what the test used is in use no more after it."""
    yield
    release()


def release() -> None:
    """End the use of engines, as the end of the process does."""
    for held in library._in_use.values():
        os.close(held)
    library._in_use.clear()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return bare_file(tmp_path / "tiny.gguf", load_spec("tiny-dense"))


def built(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Engines that are built from now on."""
    found: list[Path] = []
    spy(monkeypatch, library, "write_engine", lambda _, out, __: found.append(out))
    return found


def leftovers() -> list[str]:
    return sorted(p.name for p in engines_root().iterdir())


def test_an_engine_is_built_once(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by the file, the options and the versions."""
    builds = built(monkeypatch)
    with g4ir.load(model, backend="reference", max_seq=64) as engine:
        want = engine.generate([2, 5, 7], 4)
    with g4ir.load(str(model), backend="reference", max_seq=64) as engine:
        assert engine.generate([2, 5, 7], 4) == want and engine.path.parent == engines_root()
    first = find_engine(model, SMALL)
    assert builds == [first] and first.name.startswith("tiny-")
    assert g4ir.load(first).generate([2, 5, 7], 4) == want  # an engine directory stays what it is
    other = find_engine(model, replace(SMALL, quant="int8"))
    bare_file(model, load_spec("tiny-dense"), kind="Q8_0")
    changed = find_engine(model, SMALL)
    monkeypatch.setattr(library, "__version__", "0.0.0")
    assert len({first, other, changed, find_engine(model, SMALL)}) == len(builds) == 4


def test_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint directory, a hub id, a variant with random weights, a spec."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    repo = tmp_path / "hub" / "models--some--tiny"
    snapshot = random_checkpoint(repo / "snapshots" / "ab12", "tiny-dense")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("ab12")
    seeded, file = replace(SMALL, random_weights=0), tmp_path / "mine.yaml"
    file.write_text("schema: 1\nextends: tiny-dense\n")
    found = [
        find_engine(snapshot, SMALL),
        find_engine("some/tiny", SMALL),
        find_engine("tiny-dense", seeded),
        find_engine(load_spec("tiny-dense"), seeded),
        find_engine(file, seeded),
    ]
    names = ["ab12", "tiny", *["tiny-dense"] * 2, "mine"]
    assert [p.name.rpartition("-")[0] for p in found] == names
    assert found[2] == found[3] and found[4] == find_engine(str(file), seeded)


def test_concurrent_builds(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    builds, told, begun, go_on = built(monkeypatch), [], threading.Event(), threading.Event()

    def slow(*given: Any) -> None:
        begun.set()
        assert go_on.wait(60)

    def waiting(message: str) -> None:
        told.append(message)
        go_on.set()

    spy(monkeypatch, library, "prepare", slow)
    first = threading.Thread(target=find_engine, args=(model, SMALL))
    first.start()
    assert begun.wait(60)
    path = find_engine(model, SMALL, progress=waiting)
    first.join()
    assert builds == [path]
    assert told == [f"waiting for {path.name}, which is being built, removed or used"]


FULL = OSError(28, "No space left on device")
MAKE_ROOM = ".*No space left.*make room"


@pytest.mark.parametrize(
    "fails, says", ((KeyboardInterrupt(), None), (FULL, f"cannot write the engine: {MAKE_ROOM}"))
)
def test_a_build_that_ends_early_leaves_nothing(
    fails: BaseException, says: str | None, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = Mock(side_effect=fails)
    monkeypatch.setattr("g4ir.builder.build.directory.graph_texts", ends)
    with pytest.raises((KeyboardInterrupt, EngineError), match=says):
        find_engine(model, SMALL)
    assert leftovers() == []


def test_what_a_killed_build_left_is_removed(model: Path) -> None:
    """Of this engine and of others, unless somebody builds them; a folder that is no engine too."""
    path = find_engine(model, SMALL)
    (path / "manifest.json").unlink()
    release()
    for name in (path.name, "other-1", "going-2"):
        (engines_root() / f".{name}.building-12ab").mkdir()
    held = library._locked(engines_root() / "going-2", EXCLUSIVE, print)
    assert find_engine(model, SMALL) == path
    os.close(held)
    assert leftovers() == [".going-2.building-12ab", "going-2.json", path.name, f"{path.name}.json"]


def test_a_file_that_changes_while_it_is_read(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "write_engine", lambda *given: os.utime(model, (1, 1)))
    with pytest.raises(EngineError, match=r"tiny\.gguf: its inputs changed during the build; try"):
        find_engine(model, SMALL)
    assert leftovers() == []


def test_the_least_recently_used_are_removed_and_none_in_use(model: Path) -> None:
    paths = [find_engine(model, replace(SMALL, max_seq=n)) for n in (32, 64, 128)]
    assert [e.in_use for e in cached_engines()] == [True] * 3 and not remove(paths[0])
    assert keep_below(0) == []
    release()
    for at, path in enumerate(paths):
        os.utime(f"{path}.json", (at, at))
    find_engine(model, replace(SMALL, max_seq=32))
    one = cached_engines()[0]
    assert one.path == paths[0] and one.in_use and one.options["max_seq"] == 32
    used = command("engines", "rm", paths[1].name, paths[0].name)
    assert used.code == 2 and f"{paths[0].name}: a process uses it" in used.err
    whole = library.disk_bytes(cached_engines())  # weights that all three have count once
    assert keep_below(whole - 1) == [paths[1]]
    assert keep_below(0) == [paths[2]] and [e.path for e in cached_engines()] == [paths[0]]


def test_verbs_take_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One engine for those that need the same; scoring needs all logits. Their list, its end."""
    checkpoint, builds = text_checkpoint(tmp_path / "my-tiny"), built(monkeypatch)
    text = tmp_path / "text"
    text.write_text("ab w3 w7 a b")
    drawn = ("--prompt", "ab", "--max-new-tokens", "3", "--seed", "1")
    assert ok("run", checkpoint, *FLAGS, *drawn)
    ok("verify", checkpoint, "--tokens", "2,5,7", *FLAGS)
    table = ok("bench", checkpoint, "--output-len", "4", "--rounds", "2", "--table", *FLAGS)
    assert "| my-tiny |" in table
    assert len(builds) == 1
    ok("score", checkpoint, *FLAGS, "--text", text)
    assert len(builds) == 2
    listed = ok("engines")
    assert listed.count("in use") == 2 and listed.count(str(checkpoint)) == 2
    assert ok("engines", "path") == f"{engines_root()}\n"
    assert "a process uses it" in refused("engines", "rm", builds[0].name)
    release()
    assert command("engines", "rm", builds[0].name).out.startswith("freed ")
    for more, drafts in ((["--draft-tokens", "2"], 2), ([], 4)):
        limited = ("--set", "engines_limit=1KiB", "--draft", "ngram", *more)
        assert command("run", checkpoint, *FLAGS, "--tokens", "2,5", *limited).code == 0
        release()
        assert [e.options.get("draft_tokens") for e in cached_engines()] == [drafts]
    assert command("engines", "rm", "--all").code == 0 and leftovers() == []


def test_chat_of_a_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = bare_file(tmp_path / "tiny.gguf", load_spec("tiny-dense"), with_turns)
    for _ in range(2):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"ab\n")))
        words = ("--json", "--max-new-tokens", "4", "--temperature", "0")
        assert '"finish_reason"' in ok("chat", file, *FLAGS, *words)
    assert len(cached_engines()) == 1


@pytest.mark.parametrize("model, options, says", TABLES["library"])
def test_refused(model: str, options: dict[str, Any], says: str, tmp_path: Path) -> None:
    if "engine" in model:
        g4ir.build("tiny-dense", tmp_path / "e", backend="reference", random_weights=0).close()
    bare_file(tmp_path / "tiny.gguf", load_spec("tiny-dense"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(G4Error, match=says):
        g4ir.load(model.format(engine=tmp_path / "e", here=tmp_path), **options)


def test_words_of_options_are_no_paths(model: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """The hash of an engine is the same in every folder; that of an option's file its identity."""
    options = replace(SMALL, checkpoint=model, quant="int8", drafter="default")
    data = tmp_path / "a=b.txt"
    data.write_text("1")
    calibrated = replace(options, calibrate=data)
    first, second = (library._hash(None, o) for o in (options, calibrated))
    monkeypatch.chdir(tmp_path)
    assert library._hash(None, options) == first
    data.write_text("22")
    assert library._hash(None, calibrated) != second


def test_a_record_that_was_removed_meanwhile(model: Path, monkeypatch: Any) -> None:
    """What another process has built since is not removed by who held the record before it."""
    path = find_engine(model, SMALL)
    release()
    old = library._open_record(path)
    (engines_root() / f"{path.name}.json").unlink()
    assert find_engine(model, SMALL) == path
    monkeypatch.setattr(library, "_open_record", lambda _: old)
    assert not remove(path) and library.is_engine(path)


def test_a_deleted_directory_is_built_again(model: Path) -> None:
    path = find_engine(model, SMALL)
    shutil.rmtree(path)
    assert cached_engines() == []
    assert find_engine(model, SMALL) == path and [e.in_use for e in cached_engines()] == [True]


def test_records(model: Path, monkeypatch: Any) -> None:
    """Written before the build, and again where one is empty."""
    seen: list[Any] = []

    def wrote(_: Any, out: Path, progress: Any) -> None:
        seen.append((out.with_name(f"{out.name}.json").stat().st_size, cached_engines()))

    spy(monkeypatch, library, "write_engine", wrote)
    path = find_engine(model, SMALL)
    ((size, listed),) = seen
    assert size and listed == []
    release()
    (engines_root() / f"{path.name}.json").write_text("")
    assert cached_engines() == [] and find_engine(model, SMALL) == path
    assert [e.model for e in cached_engines()] == [str(model)] and len(seen) == 1


def test_kernels_beside_an_engine(model: Path) -> None:
    """They count as its bytes, and are removed with it."""
    path = find_engine(model, SMALL)
    release()
    (before,) = cached_engines()
    for rank in ("", ".rank0"):
        path.with_name(f"{path.name}{rank}{SUFFIX}").write_bytes(bytes(100))
    (after,) = cached_engines()
    assert after.bytes == before.bytes + 200
    assert remove(path) and leftovers() == []


def test_wrong_flags_are_refused_before_a_build(model: Path, tmp_path: Path) -> None:
    against = refused("verify", model, *FLAGS, "--tokens", "2", "--against", "bogus")
    assert "--against 'bogus': expected" in against
    assert "absent" in refused("run", model, *FLAGS, "--input-jsonl", tmp_path / "absent")
    assert not engines_root().exists()


@pytest.mark.parametrize(("words", "says"), TABLES["models of other kinds"])
def test_models_that_a_verb_cannot_run(words: Any, says: str, tmp_path: Path) -> None:
    """Refused before a build, and by the name that the user gave; so is an engine of the cache."""
    text = tmp_path / "text"
    text.write_text("ab w3 w7 a b")
    names = {"encoder": "tiny-embedding", "decoder": "tiny-dense", "text": str(text)}
    words = [word.format(**names) for word in words.split()]
    flags = ("--random-weights", "0", *FLAGS)
    if words[0] == "compare":
        flags = (*flags, "--tokens", "16")
    error = refused(*words, *flags)
    assert says in error and str(engines_root()) not in error and cached_engines() == []
    if "takes text" not in says:
        assert words[1] in error


def test_names_of_cached_engines(model: Path) -> None:
    with g4ir.load(model, backend="reference", max_seq=64) as engine:
        for call in (lambda: engine.embed("ab"), lambda: g4ir.score(engine, ["ab"])):
            with pytest.raises(G4Error, match=f"^{model}[: ]"):
                call()
        with pytest.raises(G4Error, match=f"--draft ngram: {model} verifies no drafted tokens"):
            engine.generate([2], draft="ngram")
    assert "huge_pages" in refused("run", model, *FLAGS, "--tokens", "2", "--set", "huge_pages=on")


# --- what engines have in common --------------------------------------------------------------


def weight_files(path: Path) -> list[Path]:
    return sorted(path.glob("weights-*"))


def alike(*paths: Path) -> bool:
    """Whether the weight files of engines are the same files on the disk."""
    files = [[f.stat().st_ino for f in weight_files(path)] for path in paths]
    return bool(files[0]) and all(inodes == files[0] for inodes in files)


def test_versions_in_the_hash(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the packages of its own backend are."""
    for backend, own in {"reference": {"torch"}, "onnx": {"onnx", "onnxruntime"}}.items():
        options, hashes = replace(SMALL, backend=backend), {}
        for new in ("", "torch", "triton", "onnx", "onnxruntime", "tensorrt", "tensorrt-rtx"):
            monkeypatch.setattr(library, "version_of", lambda name, new=new: str(name == new))
            hashes[new] = library._hash(None, options)
        assert {new for new in hashes if hashes[new] != hashes[""]} == own


def test_weights_of_one_file_are_one_file(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For engines that store them alike: other limits, logits of every position; not for another
    quantisation. Their bytes count once, and one engine is removed without the others."""
    variants = ({}, {"all_logits": True}, {"max_seq": 32}, {"quant": "int8"})
    paths = [find_engine(model, replace(SMALL, **more)) for more in variants]
    assert alike(*paths[:3]) and not alike(*paths)
    engines = {e.path: e for e in cached_engines()}
    stored = sum(f.stat().st_size for f in weight_files(paths[0]))
    whole = sum(e.bytes for e in engines.values())
    assert library.disk_bytes(engines.values()) == whole - 2 * stored
    listed = command("engines")
    assert f"  {model}  --backend reference --max-seq 64 --all-logits\n" in listed.out.replace(
        "--all-logits --max-seq 64", "--max-seq 64 --all-logits"
    )
    assert "shared files counted once" in listed.out
    with g4ir.load_engine(paths[0]) as engine:
        want = engine.generate([2, 5, 7], 4)
    release()
    assert remove(paths[0])
    for path in paths[1:3]:
        with g4ir.load_engine(path, check_weights=True) as engine:
            assert engine.generate([2, 5, 7], 4) == want
    size = library.disk_bytes(cached_engines())
    assert keep_below(size - 1) and alike(*[p for p in paths[1:3] if p.exists()])


def test_damaged_files_are_not_linked(model: Path) -> None:
    """Digests are compared, so that an engine whose files changed gives them to none."""
    first = find_engine(model, SMALL)
    (file,) = weight_files(first)
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    second = find_engine(model, replace(SMALL, max_seq=32))
    assert not alike(first, second)
    with g4ir.load_engine(second, check_weights=True) as engine:
        assert engine.generate([2, 5, 7], 2)
    bare_file(model, load_spec("tiny-dense"), kind="Q8_0")
    assert not alike(second, find_engine(model, replace(SMALL, max_seq=32)))


def test_without_hard_links(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", Mock(side_effect=OSError(95, "Operation not supported")))
    paths = [find_engine(model, replace(SMALL, max_seq=n)) for n in (32, 64)]
    assert not alike(*paths)
    assert len({f.read_bytes() for path in paths for f in weight_files(path)}) == 1
    for path in paths:
        g4ir.load_engine(path, check_weights=True).close()


def test_removal_between_two_locks(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the exclusive lock of a build and the shared one of its use there is none."""
    builds, removed = built(monkeypatch), list[bool]()

    def late(path: Path, how: int, progress: Any) -> None:
        if how == SHARED and builds and not removed:
            removed.append(remove(path))

    spy(monkeypatch, library, "_locked", late)
    path = find_engine(model, SMALL)
    assert removed == [True] and builds == [path, path]
    assert (path / "manifest.json").is_file() and not remove(path)
    assert [e.in_use for e in cached_engines()] == [True]


# --- a hub on this machine, as huggingface_hub asks one -------------------------------------------

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """Models by id, each a folder of files; `gated`: ids whose files need the token; `sent`: the
    files of all answers."""

    daemon_threads = True
    token = "hf_of_tests"

    def __init__(self, models: Mapping[str, Path]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.models, self.url = models, f"http://127.0.0.1:{self.server_port}"
        self.gated, self.sent = tuple[str, ...](), list[str]()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *given: object) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        words = unquote(urlsplit(self.path).path).strip("/").split("/")
        if words[:2] == ["api", "models"]:
            self._model("/".join(words[2:4]), words[5] if words[4:5] == ["revision"] else "main")
        else:
            self._file("/".join(words[:2]), "/".join(words[4:]))

    do_HEAD = do_GET

    def _model(self, name: str, revision: str) -> None:
        if name not in self.server.models:
            self._answer(404, headers={"X-Error-Code": "RepoNotFound"})
        elif revision not in ("main", "v1", COMMIT):
            self._answer(404, headers={"X-Error-Code": "RevisionNotFound"})
        else:
            files = sorted(p for p in self.server.models[name].iterdir() if p.is_file())
            listed = [{"rfilename": p.name, "size": p.stat().st_size} for p in files]
            gated = "manual" if name in self.server.gated else False
            facts = {"id": name, "modelId": name, "sha": COMMIT, "gated": gated, "siblings": listed}
            self._answer(200, json.dumps(facts).encode(), {"Content-Type": "application/json"})

    def _file(self, model: str, name: str) -> None:
        hub, asked = self.server, self.headers.get("Authorization")
        if model not in hub.models:  # what else libraries ask for
            self._answer(404)
        elif model in hub.gated and asked != f"Bearer {hub.token}":
            self._answer(403, headers={"X-Error-Code": "GatedRepo"})
        else:
            content = (hub.models[model] / name).read_bytes()
            tag = hashlib.sha256(content).hexdigest()
            hub.sent += [name] * (self.command == "GET")
            self._answer(200, content, {"ETag": f'"{tag}"', "X-Repo-Commit": COMMIT})

    def _answer(self, code: int, body: bytes = b"", headers: Mapping[str, str] = {}) -> None:
        self.send_response(code)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


# --- downloads ------------------------------------------------------------------------------------

WEIGHTS = "model-00002-of-00002.safetensors"
RUN = ("--backend", "reference", "--max-seq", "64", "--tokens", "2,5", "--max-new-tokens", "3")
RUN = (*RUN, "--temperature", "0")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_checkpoint(tmp_path_factory.mktemp("hub") / "tiny")


@pytest.fixture
def hub(checkpoint: Path, own_home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with a checkpoint and a folder of GGUF files, and a home without anything in it."""
    (own_home / "gguf").mkdir()
    for name in ("tiny-Q4_0.gguf", "tiny-Q8_0.gguf"):
        (own_home / "gguf" / name).touch()
    monkeypatch.setenv("HF_HOME", str(own_home / "HF_HOME"))
    for name in ("HF_TOKEN", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    with Hub({"some/tiny": checkpoint, "some/gguf": own_home / "gguf"}) as served:
        threading.Thread(target=served.serve_forever, daemon=True).start()
        monkeypatch.setattr(constants, "ENDPOINT", served.url)
        template = served.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setenv("HF_ENDPOINT", served.url)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(own_home / "token"))
        yield served
        served.shutdown()


def test_download(hub: Hub, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, said before; the same words as from the directory; found without the hub later."""
    want = command("run", checkpoint, *RUN).out
    done = command("run", "some/tiny", *RUN, "--download")
    assert done.code == 0 and done.out == want
    said = done.err.splitlines()[0]
    assert said.startswith("g4ir: some/tiny (main): 2.") and f"licence: {hub.url}/some/tiny" in said
    assert " MiB to download, " in said and f"free in {os.environ['HF_HOME']}/hub" in said
    files = sorted(p.name for p in checkpoint.iterdir())
    assert sorted(hub.sent) == files
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert command("run", "some/tiny", *RUN).out == want
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert command("run", "some/tiny", *RUN, "--download", "--set", "revision=v1").out == want
    assert len(hub.sent) == len(files)  # another name of the same commit
    assert hub_snapshot("some/tiny", "v1") == hub_snapshot("some/tiny", COMMIT)


def test_python(hub: Hub) -> None:
    asked: list[Any] = []
    with pytest.raises(g4ir.G4Error, match="some/tiny is not in the hub cache; its download"):
        g4ir.load("some/tiny", backend="reference", download=lambda found: asked.append(found))
    assert [d.hub_id for d in asked] == ["some/tiny"] and not hub.sent
    with g4ir.load("some/tiny", backend="reference", max_seq=64, download=True) as engine:
        assert len(engine.generate([2, 5], 3)) == 3


def test_an_interrupted_download_goes_on(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the files that are absent; until it ends the model counts as absent."""

    def interrupted(api: HfApi, model: str, name: str, **_: Any) -> None:
        if name == WEIGHTS:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        spy(patch, HfApi, "hf_hub_download", interrupted)
        with pytest.raises(KeyboardInterrupt):
            look_up("some/tiny").fetch()
    assert hub_snapshot("some/tiny") is None and hub_snapshot("some/tiny", COMMIT) is None
    before = len(hub.sent)
    assert command("run", "some/tiny", *RUN, "--download").code == 0
    assert hub.sent[before:] == [WEIGHTS]


def test_gated(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.gated = ("some/tiny",)
    told = command("run", "some/tiny", *RUN, "--download")
    assert told.code == 3 and told.message.endswith(
        f"some/tiny is gated: accept its licence at {hub.url}/some/tiny, and set HF_TOKEN, or run "
        "`hf auth login`\n"
    )
    assert "to be accepted there first" in told.err
    monkeypatch.setenv("HF_TOKEN", hub.token)
    assert command("run", "some/tiny", *RUN, "--download").code == 0


@pytest.mark.parametrize("words, code, says", TABLES["hub"]["refused"])
def test_refused_downloads(
    words: list[str], code: int, says: str, hub: Hub, checkpoint: Path
) -> None:
    names = {"url": hub.url, "here": str(checkpoint)}
    told = command("run", *(w.format(**names) for w in words), *RUN)
    assert told.code == code and says.format(**names) in told.message and not hub.sent


FULL_DISK = Mock(side_effect=OSError(28, "No space left on device"))
ROOM = "make room, or set HF_HUB_CACHE to a folder with more"
#: what is replaced by what, and what is said
NO_DOWNLOAD: dict[str, tuple[Any, str, Any, str]] = {
    "offline": (constants, "HF_HUB_OFFLINE", True, ": HF_HUB_OFFLINE forbids downloads: unset it"),
    "unreachable": (constants, "ENDPOINT", "http://127.0.0.1:9", "Connection refused); try again"),
    "full": (shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9, 8, 1), f"; {ROOM}"),
    "fills up": (HfApi, "hf_hub_download", FULL_DISK, f"/hub is full: {ROOM}"),
}


@pytest.mark.parametrize("case", [*NO_DOWNLOAD, "no library"])
def test_no_download_here(case: str, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    if case == "no library":
        monkeypatch.setitem(sys.modules, "huggingface_hub", None)
        says = "some/tiny: a download needs the package huggingface_hub: pip install hugg"
    else:
        *patch, says = NO_DOWNLOAD[case]
        monkeypatch.setattr(*patch)
    assert says in refused("run", "some/tiny", *RUN, "--download", code=3) and not hub.sent


@pytest.mark.parametrize("answer, code", (("y", 0), ("", 3)))
def test_the_question_at_a_terminal(answer: str, code: int, hub: Hub) -> None:
    ours, theirs = pty.openpty()
    os.write(ours, f"{answer}\n".encode())
    words = [sys.executable, "-m", "g4ir", "run", "some/tiny", *RUN]
    done = subprocess.run(words, stdin=theirs, stderr=theirs, stdout=subprocess.PIPE, timeout=120)
    os.close(theirs)
    told = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert done.returncode == code, told
    assert told.index("to download") < told.index("download it? [y/N]")
    assert bool(hub.sent) == bool(done.stdout) == (code == 0)
