"""Every verb of the command line on tiny engines, by the reference backend.

What it says on stderr, its exit codes, and signals.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import io
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from tokenizers import processors

from g4ir import Engine, build_graph, load_engine, load_spec, parse_graph
from g4ir.backends import BACKENDS, find_backend
from g4ir.backends.inductor.toolchain import cpp_compiler
from g4ir.backends.sampling import SamplingParams
from g4ir.backends.trt.target import LIBRARIES
from g4ir.chat.prompt import Vocabulary
from g4ir.cli import VERBS, verb_parser
from g4ir.cli.build import GROUPS
from g4ir.engine.scheduler import Scheduler
from g4ir.engine.tokenizer_index import INDEX
from g4ir.errors import MissingError
from g4ir.generate.offline import RAW, OfflineEngine
from g4ir.ops import OPS
from g4ir.passes import PASSES, run_passes
from g4ir.plan.gpus import GPUS, SIZE_RULE
from g4ir.plan.options import BuildOptions
from g4ir.ui import console
from g4ir.ui.paths import cache_root, private, state_root
from tests.cases import TABLES, covers, read_table
from tests.cli_tools import BUILD, PROMPT, built, g4ir, ok, refused, text_checkpoint, tokenizer
from tests.engines import stored_manifest


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tiny-ple with random weights, no tokenizer."""
    folder = tmp_path_factory.mktemp("engines")
    return built(folder / "ple", "--variant", "tiny-ple", "--random-weights", "0")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_checkpoint(tmp_path_factory.mktemp("checkpoints") / "my-tiny")


@pytest.fixture(scope="module")
def text_engine(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a checkpoint alone, with its tokenizer and generation settings."""
    return built(tmp_path_factory.mktemp("engines") / "text", "--checkpoint", checkpoint)


@pytest.fixture(scope="module")
def loaded(engine: Path) -> Engine:
    return load_engine(engine)


@pytest.fixture(scope="module")
def text_loaded(text_engine: Path) -> Engine:
    return load_engine(text_engine)


# --- transcripts ------------------------------------------------------------------------------

TRANSCRIPTS = read_table("transcripts.yaml")


@pytest.mark.parametrize("name", TRANSCRIPTS)
def test_transcript(
    name: str, engine: Path, checkpoint: Path, text_engine: Path, tmp_path: Path
) -> None:
    """Commands and what they say, in transcripts.yaml."""
    words = {"engine": engine, "text": text_engine, "checkpoint": checkpoint, "here": tmp_path}
    words |= {"gpus": ", ".join(GPUS)}

    def filled(text: str) -> str:
        for word, value in words.items():
            text = text.replace(f"{{{word}}}", str(value))
        return text

    for step in TRANSCRIPTS[name]:
        for file, text in step.get("files", {}).items():
            (tmp_path / file).write_text(text)
        done = g4ir(*shlex.split(filled(step["run"])))
        assert done.code == step.get("code", 0), done
        if "saves" in step:
            (tmp_path / step["saves"]).write_text(done.out)
        if "out" in step:
            assert done.out == filled(step["out"])
        if "json" in step:
            assert covers(json.loads(done.out), step["json"]), done.out
        for file, wanted in step.get("wrote", {}).items():
            written = Path(filled(file)).read_text()
            assert written == done.out if wanted is True else covers(json.loads(written), wanted)
        if "left" in step:
            assert sorted(p.name for p in tmp_path.iterdir()) == step["left"]
        if "same" in step:
            assert done.out == g4ir(*shlex.split(filled(step["same"]))).out
        for stream in ("has", "err"):
            said = done.out if stream == "has" else done.err
            missing = [x for x in map(filled, step.get(stream, ())) if x not in said]
            assert not missing, said
        assert not [x for x in step.get("not", ()) if x in done.out + done.err]


@pytest.mark.parametrize("verb", ["", *VERBS])
def test_help(verb: str) -> None:
    text = ok(*verb.split(), "--help")
    assert text.startswith(f"usage: {' '.join(['g4ir', *verb.split()])} ")
    assert len(text.splitlines()) <= 60
    words = {"build": [*PASSES], "plan": [*GPUS, SIZE_RULE]}
    words |= {v: [*GPUS] for v in ("cost", "kernels")}
    assert not [w for w in words.get(verb, ()) if w not in " ".join(text.split())]


# --- help -------------------------------------------------------------------------------------


def test_build_groups_every_option() -> None:
    """Help of --set names every setting of every backend."""
    assert sorted(" ".join(GROUPS.values()).split()) == sorted(f.name for f in fields(BuildOptions))
    help = {f.name: f.metadata["help"] for f in fields(BuildOptions)}["settings"]
    for name in BACKENDS:
        assert all(s in help for s in find_backend(name).settings)


def test_every_argument_has_help() -> None:
    count = 0
    for verb in map(verb_parser, VERBS):
        assert not [a.dest for a in verb._actions if not a.help or len(a.help) < 8], verb.prog
        flags = (a for a in verb._actions if a.option_strings and a.dest != "help")
        count += sum(a.help != argparse.SUPPRESS for a in flags)
    assert 200 < count <= 331 and len(VERBS) <= 21
    assert ok().startswith("usage: g4ir VERB ")


# --- specs and show ---------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["prefill", "decode", "embed"])
def test_show_prints_what_reads_back(phase: str) -> None:
    spec = load_spec("tiny-moe")
    plain = build_graph(spec, phase)
    words = ("show", "--variant", "tiny-moe", "--phase", phase)
    assert parse_graph(ok(*words, "--after", "none")) == plain
    assert parse_graph(ok(*words)) == run_passes(plain)
    some = run_passes(plain, skip=["fuse_qkv"], until="fuse_gate_up")
    assert parse_graph(ok(*words, "--after", "fuse_gate_up", "--skip", "fuse_qkv")) == some


# --- build ------------------------------------------------------------------------------------


def test_build_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("build", "--variant", "tiny-dense", "--backend", "reference", "--random-weights", "7")
    outcome = g4ir(*words)
    assert (outcome.code, outcome.out, outcome.err) == (0, "engines/tiny-dense-reference\n", "")
    manifest = stored_manifest(Path("engines/tiny-dense-reference"))
    assert manifest["limits"] == {"max_batch": 1, "max_seq": 1024, "prefill_chunk": 1024}
    assert (manifest["dtype"], manifest["device"]) == ("f32", "cpu")
    assert manifest["weights"] == {"kind": "random", "seed": 7}
    assert [p.name for p in Path("engines").iterdir()] == ["tiny-dense-reference"]


def test_dump_ir(tmp_path: Path) -> None:
    folder, words = tmp_path / "ir", ("--variant", "tiny-ple", "--random-weights", "0")
    ok(*BUILD, *words, "--dump-ir", folder, "--dry-run")
    phases = ("decode", "embed", "prefill")
    expected = {f"{i:02}-{p}.{x}.g4ir" for i, p in enumerate(PASSES, 1) for x in phases}
    assert {p.name for p in folder.iterdir()} == expected
    shown = ok("show", "--variant", "tiny-ple", "--after", "plan_cache")
    (graph,) = folder.glob("*-plan_cache.decode.g4ir")
    assert graph.read_text() == shown
    for wrong in (("--max-seq", "many"), ("--set", "x"), ("--memory", "h1"), ("--dtype", "f8")):
        refused(*BUILD, *words, "--dump-ir", tmp_path / "none", *wrong)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(("words", "said"), TABLES["cli"]["lacks"])
def test_all_that_a_build_lacks_is_said_at_once(
    words: str, said: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A download of 50 GB comes after what no download mends."""
    find = importlib.util.find_spec
    lacks = ("onnx", "onnxruntime")
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: None if n in lacks else find(n))
    for library in LIBRARIES.values():
        monkeypatch.setitem(sys.modules, library.module, None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    words = f"build --variant 26b-a4b --backend {words} --out {tmp_path}/e"
    outcome = g4ir(*words.split())
    assert outcome.code == 3
    assert f"{len(said)} requirements are not met here:\n  1. " in outcome.err
    places = [outcome.err.index(text) for text in said]
    assert places == sorted(places)
    # What is wrong with the command itself needs nothing.
    assert g4ir(*words.split(), "--random-weights", "-1").code == 2


# --- run --------------------------------------------------------------------------------------


def test_run_prints_what_the_engine_generates(
    engine: Path, loaded: Engine, text_engine: Path, text_loaded: Engine
) -> None:
    """Ids of ids, the text of a prompt, and both as JSON."""
    ids = loaded.generate([2, 5, 7], 12)
    words = ("run", engine, "--tokens", "2,5,7", "--max-new-tokens", "12")
    assert ok(*words) == " ".join(map(str, ids)) + "\n"
    assert json.loads(ok(*words, "--json")) == {"tokens": ids, "finish_reason": "length"}
    ids = text_loaded.generate([2, *tokenizer().encode(PROMPT).ids], 12)
    words = ("run", text_engine, "--max-new-tokens", "12", "--temperature", "0", "-p", PROMPT)
    assert ok(*words) == CODEC.decode(ids) + "\n"
    assert covers(json.loads(ok(*words, "--json")), {"tokens": ids, "text": CODEC.decode(ids)})


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("adds", [False, True], ids=["plain", "adds"])
def test_a_raw_prompt_begins_with_one_bos(
    adds: bool, chat: bool, text_engine: Path, tmp_path: Path
) -> None:
    """Whatever the tokenizer's files say. It is noted if the checkpoint has a chat template."""
    folder = shutil.copytree(text_engine, tmp_path / "e")
    made, ids = tokenizer(), tuple(tokenizer().encode("ab w3").ids)
    if adds:
        special = [("<bos>", 2)]
        made.post_processor = processors.TemplateProcessing("<bos> $A", special_tokens=special)
    made.save(str(folder / "tokenizer.json"))
    (folder / INDEX).unlink()
    if chat:
        (folder / "chat_template.jinja").write_text("x")
    offline = OfflineEngine(dataclasses.replace(load_engine(text_engine), path=folder))
    for prompt in ("ab w3", "<bos>ab w3"):
        request = offline.request({"prompt": prompt}, "x")
        assert request.tokens == (2, *ids) and request.notes == (RAW,) * chat
        bare = offline.request({"prompt": prompt, "bos": False}, "x")
        assert bare.tokens == (2, *ids)[prompt == "ab w3" :]
    assert not offline.request({"tokens": [2, 5]}, "x").notes


def test_a_drawn_seed_is_told(text_engine: Path) -> None:
    words = ("run", text_engine, "--prompt", PROMPT, "--max-new-tokens", "8")
    first = g4ir(*words)
    (seed,) = re.findall(r"; drawn with --seed (\d+)$", first.err.strip())
    again = g4ir(*words, "--seed", seed)
    assert again.out == first.out and "drawn" not in again.err
    assert "drawn" not in g4ir(*words, "--temperature", "0").err
    assert json.loads(g4ir(*words, "--json").err)["seed"] >= 0


def test_an_interrupted_answer_ends_its_line(
    engine: Path, loaded: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, closed = Scheduler.run, Mock()

    def three(*words: Any) -> Iterator[Any]:
        yield from itertools.islice(run(*words), 3)
        raise KeyboardInterrupt

    monkeypatch.setattr(Scheduler, "run", three)
    monkeypatch.setattr(Engine, "close", closed)
    outcome = g4ir("run", engine, "--tokens", "2,5,7")
    monkeypatch.undo()
    assert outcome.code == 130 and closed.called
    assert outcome.out == " ".join(map(str, loaded.generate([2, 5, 7], 3))) + "\n"
    assert outcome.err.endswith("g4ir: interrupted\n")


LOGGED = {"event", "id", "prompt_tokens", "cached_tokens", "new_tokens", "finish_reason"}
LOGGED |= {"time_to_first_token_s", "tokens_per_second", "total_s", "queued_s"}


def test_run_json_lines(text_engine: Path, text_loaded: Engine, tmp_path: Path) -> None:
    lines = [
        {"id": "first", "prompt": PROMPT, "temperature": 0, "max_new_tokens": 5},
        {"tokens": [2, 5, 7], "seed": 3, "max_new_tokens": 1, "stop": None},
        {"id": 0, "prompt": f"{PROMPT} w9 w9", "temperature": 0.0, "max_new_tokens": 4},
    ]
    file = tmp_path / "in.jsonl"
    file.write_text("\n\n".join(map(json.dumps, lines)) + "\n")
    outcome = g4ir("run", text_engine, "--input-jsonl", file)
    answers = [json.loads(x) for x in outcome.out.splitlines()]
    logs = [json.loads(x) for x in outcome.err.splitlines()]
    assert [a["id"] for a in answers] == [x["id"] for x in logs] == ["first", 3, 0]
    ids = [2, *tokenizer().encode(PROMPT).ids]
    assert answers[0]["tokens"] == text_loaded.generate(ids, 5)
    assert answers[0]["text"] == CODEC.decode(answers[0]["tokens"])
    for log in logs:
        assert log.keys() | {"queued_s"} == LOGGED | ({"seed"} & log.keys())
        assert log["total_s"] >= log["time_to_first_token_s"] > 0
    assert logs[0]["prompt_tokens"] == len(ids)
    assert [x["new_tokens"] for x in logs] == [5, 1, 4]
    assert [x.get("seed") for x in logs] == [None, 3, None]
    assert logs[1]["tokens_per_second"] is None
    assert "w3" not in outcome.err and 'prompt"' not in outcome.err


# --- settings ---------------------------------------------------------------------------------


def test_precedence(loaded: Engine, text_loaded: Engine) -> None:
    file = {"temperature": 0.9, "top_k": 64, "top_p": 0.95}
    for values, flags, want in TABLES["cli"]["precedence"]:
        request = OfflineEngine(text_loaded, flags).request({"tokens": [2], **values}, "x")
        drawn = {} if "seed" in want else {"seed": None}
        got = replace(request.sampling, stop=frozenset(), ignore_eos=False, **drawn)
        assert got == SamplingParams(**{**file, **want})
    stops = [({}, {}, {1, 107}), ({"stop": [9]}, {}, {1, 107, 9})]
    for flags, values, ids in [*stops, ({"stop": [9]}, {"stop": [8]}, {1, 107, 8})]:
        asked = OfflineEngine(text_loaded, flags).request({"tokens": [2], **values}, "x")
        assert asked.sampling.stop == ids
    assert OfflineEngine(loaded).request({"tokens": [2]}, "x").sampling.stop == {1}  # the spec's


# --- text -------------------------------------------------------------------------------------


CODEC = Vocabulary(tokenizer())


def test_a_failed_check_is_exit_1(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = SimpleNamespace(ok=False, text=lambda: "FAILED", to_dict=lambda: {"nll": float("nan")})
    monkeypatch.setattr("g4ir.check.logits.verify_engine", lambda *a, **k: report)
    outcome = g4ir("verify", engine)
    assert (outcome.code, outcome.out) == (1, "FAILED\n")
    assert g4ir("verify", engine, "--json").out == '{"nll": null}\n'


# --- what does not fit ------------------------------------------------------------------------


def test_a_build_that_does_not_fit_is_refused_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("g4ir.builder.build.device_memory", lambda device: 600 << 20)
    asked = Mock(side_effect=AssertionError)
    monkeypatch.setattr("g4ir.weights.random.random_tensor", asked)
    words = ("--variant", "e2b", "--random-weights", "0", "--out", tmp_path / "e")
    message = refused(*BUILD, *words)
    assert "short;" in message and "needs" in message and not list(tmp_path.iterdir())


# --- show --ops ---------------------------------------------------------------------------------


def test_show_ops_knows_every_op() -> None:
    table = ok("show", "--ops").partition("\nkind: ")[0].splitlines()[1:]
    printed = {x.split()[0]: x for x in table}
    found = {o["op"]: o for o in json.loads(ok("show", "--ops", "--json"))}
    assert printed.keys() == found.keys() == OPS.keys()
    for name, o in found.items():
        assert printed[name].endswith(o["meaning"]) and o["meaning"] and o["reason"]
        assert o["kind"] in printed[name] and o["fused"] == (OPS[name].expand is not None)
    for words, said in TABLES["cli"]["show ops"]:
        assert refused("show", "--ops", *words.split()).rstrip().endswith(f"leave out {said}")


def test_run_json_lines_from_stdin(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = b'\xef\xbb\xbf{"tokens": [2, 5]}\r\n'
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw)))
    out = ok("run", engine, "--input-jsonl", "-", "--max-new-tokens", "2")
    assert json.loads(out)["id"] == 1
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    assert ok("run", engine, "--input-jsonl", "-") == ""


def test_a_tokenizer_that_would_cut(checkpoint: Path, tmp_path: Path) -> None:
    """A prompt is whole; other lines (tests/refused/command.yaml) fail alone."""
    folder = Path(shutil.copytree(checkpoint, tmp_path / "c"))
    cut = json.loads((folder / "tokenizer.json").read_text())
    cut["truncation"] = {"max_length": 2, "stride": 2, "strategy": "LongestFirst"}
    cut["truncation"]["direction"] = "Right"
    (folder / "tokenizer.json").write_text(json.dumps(cut))
    engine = built(tmp_path / "e", "--checkpoint", folder)
    assert ok("run", engine, "--prompt", PROMPT, "--max-new-tokens", "1")


ERRORS = [
    (KeyboardInterrupt(), 130, "g4ir: interrupted\n"),
    (MemoryError(), 3, "g4ir: error: not enough memory; build with a smaller --max-batch"),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 3, "g4ir: error: not enough"),
    (PermissionError(13, "Permission denied", "x"), 2, "g4ir: error: x: Permission denied\n"),
    (ValueError("odd\nmore"), 70, "g4ir: internal error: ValueError: odd; run again with --trace"),
]


@pytest.mark.parametrize(("error", "code", "words"), ERRORS)
def test_what_is_said_of_an_error(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, words: str
) -> None:
    monkeypatch.setattr("g4ir.cli.specs.load_spec", Mock(side_effect=error))
    outcome = g4ir("specs", "show", "e2b")
    assert outcome.code == code and outcome.err.startswith(words)
    assert outcome.err.count("\n") == 1
    assert "Traceback" in g4ir("--trace", "specs", "show", "e2b").err


@pytest.mark.parametrize("terminal", [False, True])
def test_progress(
    terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line for each message that takes long; at a terminal one that is rewritten, and that other
    lines replace."""
    monkeypatch.setattr(console, "QUIET_S", 0.0)
    monkeypatch.setattr(console, "PERIOD_S", 0.01)
    monkeypatch.setattr(console, "_on_terminal", lambda: terminal)
    with console.Progress() as progress:
        for message in ("one", "two"):
            progress(message)
            time.sleep(0.2)
        if terminal:
            console.say("note: three")
    text = capsys.readouterr().err
    if terminal:
        assert text.startswith("\r\x1b[Kg4ir: one (0 s)\r\x1b[K")
        assert "\r\x1b[Kg4ir: note: three\n" in text and text.count("\n") == 1
    else:
        assert text == "g4ir: one (0 s)\ng4ir: two (0 s)\n"


def shell(command: str) -> subprocess.CompletedProcess[str]:
    """A shell line in which $G4IR is the tool; pipefail, so that its exit code counts."""
    line = f"set -o pipefail; {command}".replace("$G4IR", f"{sys.executable} -m g4ir.cli")
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True)


def test_a_reader_that_goes_away_is_no_error() -> None:
    words = [sys.executable, "-m", "g4ir.cli", "show", "--variant", "tiny-ple"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as command:
        assert command.stdout and command.stderr
        command.stdout.close()
        assert (command.wait(), command.stderr.read()) == (141, b"")


def test_a_full_or_closed_stdout() -> None:
    for setting in ("", "PYTHONUNBUFFERED=1"):
        done = shell(f"export {setting}; $G4IR specs > /dev/full")
        assert done.returncode == 2
        assert done.stderr == "g4ir: error: No space left on device\n"
    done = shell("$G4IR specs >&-")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_closed_stderr() -> None:
    """What is opened later must not become descriptor 0 to 2: libuv aborts when it closes one."""
    code = (
        "import os, sys; from g4ir.ui.console import tolerant_output, say; tolerant_output(); "
        "say('unheard'); print(os.open(os.devnull, os.O_RDONLY) > 2, sys.stderr is not None)"
    )
    for closed in ("2>&-", "<&- 2>&-"):
        done = shell(f'"{sys.executable}" -c "{code}" {closed}')
        assert (done.returncode, done.stdout) == (0, "True True\n")
    assert shell("$G4IR specs no-such-verb 2>&-").returncode == 2


@pytest.mark.parametrize(
    ("variable", "folder"), [("XDG_CACHE_HOME", cache_root), ("XDG_STATE_HOME", state_root)]
)
def test_a_folder_of_the_user_that_cannot_be_made(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variable: str, folder: Callable[[], Path]
) -> None:
    """The error names the variable to set."""
    (tmp_path / "file").touch()
    for path in ("/proc/none", str(tmp_path / "file")):
        monkeypatch.setenv(variable, path)
        with pytest.raises(OSError, match=f"; set {variable} to a folder that you may write to"):
            private(folder() / "engines")


def test_python_without_docstrings() -> None:
    assert shell("export PYTHONOPTIMIZE=2; $G4IR plan tiny-moe").returncode == 0


def test_a_mac_is_refused_before_a_compiler_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(MissingError, match="compiled on Linux alone: use Docker"):
        cpp_compiler()


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(MissingError, match=r"there is no no-such-compiler: install it .*set CXX"):
        cpp_compiler()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_ends_a_build_that_leaves_nothing(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(*_: object) -> None:
        assert [*tmp_path.iterdir()]
        os.kill(os.getpid(), number)
        time.sleep(10)

    monkeypatch.setattr("g4ir.backends.reference.ReferenceBackend.compile", ended)
    words = ("--variant", "tiny-dense", "--random-weights", "0", "--out", tmp_path / "e")
    outcome = g4ir(*BUILD, *words)
    assert outcome.code == 128 + number and not [*tmp_path.iterdir()]
    said = "interrupted" if number == signal.SIGINT else f"ended by {number.name}"
    assert outcome.err == f"g4ir: {said}\n"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
