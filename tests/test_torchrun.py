"""Engines of several ranks, in as many processes on this machine: as one rank computes, and what
becomes of the others where one dies."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from http import HTTPStatus
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file

import g4ir
from g4ir.artefact.directory import open_artefact
from g4ir.builder.load import open_runtime
from g4ir.chat import Vocabulary
from g4ir.cli import main
from g4ir.errors import EngineError, InputError, MissingError
from g4ir.model.draft import shipped_drafter
from g4ir.parallel.group import RankLaunch, RankProcess, join, launched
from g4ir.plan.plan import PLANNED, make_plan
from g4ir.spec.record import Spec, load_spec
from g4ir.ui.progress import no_progress
from g4ir.weights.pack import StoredParams, rank_files
from tests.cases import TABLES
from tests.cli_tools import refused
from tests.configs import short
from tests.engines import add_file, random_checkpoint
from tests.oracle import relative
from tests.rank_driver import BEGUN, PROMPTS, answers, logits
from tests.serve.running import chat_tokenizer

ROOT = Path(__file__).parents[1]
LIMITS: dict[str, Any] = {"max_seq": 64, "prefill_chunk": 8, "max_batch": 2}
#: groups that two ranks need not share, of tiny models too
RECIPE = TABLES["torchrun"]["recipe"]
#: seconds in which all processes have ended
ENDED_S = 60.0


def built(out: Path, name: str, ranks: int, backend: str, **more: Any) -> Path:
    """An engine of random weights, written into its folder."""
    checkpoint = kept_checkpoint(out.parent, load_spec(name))
    if "drafter" in more:
        more["drafter"] = kept_checkpoint(out.parent, shipped_drafter(load_spec(name)))
    options = {"backend": backend, "checkpoint": checkpoint, "media": "none", **LIMITS, **more}
    g4ir.build(name if "random_weights" in more else None, out, tp=ranks, **options).close()
    return out


def kept_checkpoint(folder: Path, spec: Spec) -> Path:
    path = folder / f"{spec.name}-checkpoint"
    return path if path.exists() else random_checkpoint(path, spec)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def surroundings(**more: str) -> dict[str, str]:
    """The environment of a process that talks on this machine alone."""
    return {"GLOO_SOCKET_IFNAME": "lo", **os.environ, "PYTHONPATH": str(ROOT), **more}


@dataclass
class Started:
    """Processes by rank, each with the files that it writes to."""

    processes: list[subprocess.Popen[str]]

    def begun(self) -> None:
        """Wait until the first rank has something under way."""
        out = self.processes[0].stdout
        assert out and out.readline().strip() == BEGUN, self.said(0)

    def ended(self, within_s: float = ENDED_S) -> list[int]:
        """Exit codes, once all have ended."""
        until = time.monotonic() + within_s
        return [p.wait(max(0.1, until - time.monotonic())) for p in self.processes]

    def said(self, rank: int) -> str:
        err = self.processes[rank].stderr
        assert err
        return err.read()


@contextmanager
def started(
    ranks: int,
    *words: str | Path,
    places: Sequence[Path] = (),
    module: str = "tests.rank_driver",
    **more: str,
) -> Iterator[Started]:
    """The driver in so many processes, as torchrun would start them: but none is ended with
    another, and each has an exit code to look at. `places`: the folder of each."""
    command, pipe, made = [sys.executable, "-m", module, *map(str, words)], subprocess.PIPE, []
    more |= {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for rank in range(ranks):
        env = surroundings(**more, RANK=str(rank), LOCAL_RANK=str(rank))
        cwd = places[rank] if places else ROOT
        made.append(
            subprocess.Popen(command, cwd=cwd, env=env, stdout=pipe, stderr=pipe, text=True)
        )
    try:
        yield Started(made)
    finally:
        for p in made:
            p.kill()
            p.communicate()


def check_against_one(
    folder: Path,
    name: str,
    ranks: int,
    backend: str,
    ep: bool = False,
    task: str = "all",
    **options: Any,
) -> None:
    """Ranks choose what one does, whatever chooses; their logits differ by rounding alone."""
    one = built(folder / "one", name, 1, "reference", **options)
    several = built(folder / "several", name, ranks, backend, ep=ep, **options)
    with started(ranks, several, task, folder / "said.json") as all_of_them:
        assert all_of_them.ended(600) == [0] * ranks, all_of_them.said(0) + all_of_them.said(1)
    got = json.loads((folder / "said.json").read_text())
    with g4ir.load_engine(one) as engine, torch.no_grad():
        want, rows = answers(engine), logits(engine)
        want["again"] = engine.generate([2, 33], 4)
    asked = {k: v for k, v in options.items() if k in ("drafter", "latent_kv")}
    room = options.get("max_seq", LIMITS["max_seq"])
    planned = make_plan(load_spec(name), replace(PLANNED, tp=ranks, **asked), ctx=room)
    assert got.pop("cache") == planned.rows[0].planned < want.pop("cache")
    assert got == want
    for i, row in load_file(folder / "said.safetensors").items():
        assert float(relative(row, rows[i]).max()) < 1e-4


#: experts whole on a rank or cut, codes or floats, form of the latent cache, with a drafter
RANKS = [(*row,) for row in TABLES["torchrun"]["ranks"]]


@pytest.mark.parametrize("ep, quant, form, drafts", short(RANKS[0], of=RANKS))
def test_two_ranks(
    tmp_path: Path, full: bool, ep: bool, quant: bool, form: str, drafts: bool
) -> None:
    """Groups of 8 are whole on every rank, which then makes the codes that one would make."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE)
    options = {"quant": recipe if quant else None, "latent_kv": form}
    options |= {"drafter": "default"} if drafts else {}
    task = "all" if full else "quick"
    check_against_one(tmp_path, "tiny-moe", 2, "torch", ep, task=task, **options)


@pytest.mark.full
def test_ranks_see_pictures(tmp_path: Path) -> None:
    """Towers are whole on every rank, and used on the first."""
    made = {"checkpoint": None, "random_weights": 0}
    check_against_one(tmp_path, "tiny-media", 2, "torch", media="all", max_seq=256, **made)


@pytest.mark.full
@pytest.mark.parametrize("name, ranks, backend", TABLES["torchrun"]["more"])
def test_more_ranks_are_as_one(tmp_path: Path, name: str, ranks: int, backend: str) -> None:
    check_against_one(tmp_path, name, ranks, backend)


# --- the engine -----------------------------------------------------------------------------------


def test_bytes_of_a_rank_are_those_of_the_plan(tmp_path: Path) -> None:
    """What all ranks hold alike lies in the folder once."""
    path = built(tmp_path / "engine", "tiny-moe", 2, "reference", drafter="default")
    found = open_artefact(path, check_weights=True)
    tables = {v.name for v in found.packing.program.graphs["embed"].params}
    files, parts = sorted(path.glob("*.safetensors")), ("00000", "rank0of2-00000", "rank1of2-00000")
    assert [f.name for f in files] == [f"weights-{part}.safetensors" for part in parts]
    options = replace(PLANNED, drafter="default", tp=2)
    planned = make_plan(load_spec("tiny-moe"), options, ctx=64).weights[0]
    assert found.config.ranks == 2
    sizes = [
        sum(params.tensor(name).nbytes for name in found.packing.program.params().keys() - tables)
        for params in (StoredParams.open(rank_files(files, rank)) for rank in range(2))
    ]
    assert sizes == [planned.device] * 2
    heads = [load_file(f)["head.w"] for f in files[1:]]
    whole = load_file(files[0])["embed.table"]
    assert torch.equal(torch.cat(heads), whole)


def test_one_process_can_only_look_at_it(tmp_path: Path) -> None:
    options = {"backend": "reference", "random_weights": 0, **LIMITS}
    engine = g4ir.build("tiny-dense", tmp_path / "engine", tp=2, **options)
    assert engine.ranks == 2 and "tiny-dense" in repr(engine)
    said = (
        "was built for 2 ranks, and 1 is running; start it by torchrun --nproc-per-node 2 "
        "-m g4ir ..., or build it again with --tp 1"
    )
    for asks in (engine.session, lambda: engine.generate([2], 2), lambda: engine.param("final.w")):
        with pytest.raises(InputError, match=re.escape(said)):
            asks()
    with pytest.raises(EngineError, match=re.escape(said)):
        g4ir.load_engine(engine.path)
    assert said in refused("run", engine.path, "--tokens", "2")
    assert main(["show", str(engine.path)]) == 0


@pytest.mark.full
def test_ranks_serve_rows_together(tmp_path: Path) -> None:
    """Requests that come together are rows of the same steps; SIGTERM to all ends the first, once
    it has answered, and then the others."""
    options, tokenizer = {"backend": "reference", "random_weights": 0, **LIMITS}, chat_tokenizer()
    with g4ir.build("tiny-moe", tmp_path / "one", **options) as engine:
        want = [Vocabulary(tokenizer).decode(engine.generate(p, 12, stop_ids=())) for p in PROMPTS]
    two = g4ir.build("tiny-moe", tmp_path / "two", tp=2, **options).path
    add_file(two, "tokenizer.json", tokenizer.to_str())
    port = free_port()
    with started(2, "serve", two, "--port", str(port), module="g4ir") as ranks:
        ask = partial(answer, f"http://127.0.0.1:{port}", ranks)
        with ThreadPoolExecutor() as pool:
            assert [*pool.map(ask, PROMPTS)] == want
        for p in ranks.processes:
            p.send_signal(signal.SIGTERM)
        assert ranks.ended() == [0, 0], ranks.said(0)


def answer(url: str, ranks: Started, prompt: list[int]) -> str:
    """The text that a server answers with, once it is up."""
    body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    until = time.monotonic() + ENDED_S
    while time.monotonic() < until and ranks.processes[0].poll() is None:
        try:
            made = httpx.post(f"{url}/v1/completions", json=body, timeout=ENDED_S)
            if made.status_code != HTTPStatus.SERVICE_UNAVAILABLE:  # it has loaded its engine
                return str(made.json()["choices"][0]["text"])
        except httpx.ConnectError:
            pass
        time.sleep(0.1)
    raise AssertionError(ranks.said(0))


# --- a rank that dies -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine_of_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("two") / "engine", "tiny-dense", 2, "reference")


def check_that_all_end(engine: Path, out: Path, killed: int, how: int) -> str:
    """End a rank in the middle of an answer; returns what the other says."""
    with started(2, engine, "decode", out) as ranks:
        ranks.begun()
        ranks.processes[killed].send_signal(how)
        other = 1 - killed
        if how == signal.SIGSTOP:
            assert ranks.processes[other].wait(ENDED_S) == 4
            ranks.processes[killed].kill()
        codes = ranks.ended()
        assert codes[killed] == -signal.SIGKILL and codes[other] == 4, ranks.said(other)
        return ranks.said(other)


@pytest.mark.parametrize("killed", [1, pytest.param(0, marks=pytest.mark.full)])
def test_a_killed_rank_ends_the_others(engine_of_two: Path, tmp_path: Path, killed: int) -> None:
    said = check_that_all_end(engine_of_two, tmp_path / "out", killed, signal.SIGKILL)
    assert f"error: rank {1 - killed}: rank {killed} (process " in said and " ended; " in said


@pytest.mark.full
def test_a_rank_that_hangs_is_given_up(engine_of_two: Path, tmp_path: Path) -> None:
    said = check_that_all_end(engine_of_two, tmp_path / "out", 1, signal.SIGSTOP)
    assert "error: rank 0: no answer within 20 s (--set rank_timeout) from rank 1 (process" in said


@pytest.mark.full
def test_a_rank_without_memory(engine_of_two: Path, tmp_path: Path) -> None:
    """It says so, and the others name it."""
    with started(2, engine_of_two, "memory", tmp_path / "out") as ranks:
        assert ranks.ended() == [4, 3]
        assert "error: not enough memory; build for fewer rows" in ranks.said(1)
        assert "error: rank 0: rank 1 (process " in ranks.said(0)


# --- ranks that do not go together ----------------------------------------------------------------


def codes_and_words(*words: str | Path, **more: Any) -> tuple[list[int], str]:
    """Exit codes of two ranks, and what both say."""
    with started(2, *words, **more) as ranks:
        return ranks.ended(), ranks.said(0) + ranks.said(1)


@pytest.mark.full
def test_ranks_of_different_engines(engine_of_two: Path, tmp_path: Path) -> None:
    """Each machine has its own folder, of the same name."""
    words, folder = ("engine", "decode", tmp_path / "out"), tmp_path / "here"
    places = [folder / str(rank) for rank in range(2)]
    shutil.copytree(engine_of_two, places[0] / "engine")
    places[1].mkdir()
    codes, said = codes_and_words(*words, places=places)
    assert codes == [2, 0] and "error: rank 1: engine: no such file or directory" in said
    options = {"backend": "reference", "random_weights": 1, **LIMITS}
    g4ir.build("tiny-dense", places[1] / "engine", tp=2, **options)
    codes, said = codes_and_words(*words, places=places)
    assert codes == [2, 0] and "error: engine: rank 1 has another engine there, of digest" in said


def test_a_rank_without_a_gpu(engine_of_two: Path) -> None:
    found = open_artefact(engine_of_two)
    config = replace(found.config, device="cuda")
    on_cuda = replace(found, manifest=replace(found.manifest, config=config))
    alone = SimpleNamespace(rank=1, on_gpus=False)
    with pytest.raises(MissingError, match="rank 1 has no GPU of its own, or its torch no NCCL"):
        open_runtime(on_cuda, no_progress, alone, cuda_graph=True, trust=True)  # type: ignore[arg-type]


# --- what starts them -----------------------------------------------------------------------------


def set_launch(patch: pytest.MonkeyPatch, rank: str, ranks: str) -> None:
    for name, value in {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": "0"}.items():
        patch.setenv(name, value)


def test_what_torchrun_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for said in (("0", "1"), ("", ""), ("a", "2")):
        set_launch(monkeypatch, *said)
        assert launched() is None
    with pytest.raises(InputError, match="this process is alone; start several"), join():
        pass
    set_launch(monkeypatch, "0", "2")
    assert launched() == RankLaunch(0, 2, 0)
    with (
        pytest.raises(InputError, match="--set rank_timeout=0: expected seconds"),
        join(timeout_s=0),
    ):
        pass
    monkeypatch.setattr(torch.distributed, "is_gloo_available", lambda: False)
    with pytest.raises(MissingError, match="this torch lacks gloo, which ranks"), join():
        pass


def test_a_verb_of_one_process_is_not_run_by_several(monkeypatch: pytest.MonkeyPatch) -> None:
    set_launch(monkeypatch, "1", "2")
    monkeypatch.setattr("g4ir.ui.console.leave", lambda code: None)  # it ends the process
    assert "this verb runs in one: call g4ir without" in refused("plan", "--variant", "e2b")


def test_an_end_is_known_of_processes_here_alone() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    here = socket.gethostname()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert RankProcess(1, here, child.pid).ended  # nobody has asked for its code yet
    child.wait()
    assert RankProcess(1, here, child.pid).ended
    assert not RankProcess(1, here, os.getpid()).ended
    assert not RankProcess(1, "elsewhere", child.pid).ended


@pytest.mark.full
def test_the_example_of_the_guide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What torchrun prints there is what it prints."""
    text = (ROOT / "docs" / "parallel.md").read_text()
    found = re.search(r"^\$ torchrun (.*)\n(.*)$", text, re.M)
    assert found
    monkeypatch.chdir(tmp_path)
    options = {"backend": "reference", "random_weights": 0}
    g4ir.build("tiny-moe", "engine-of-two", tp=2, **options)
    command = [sys.executable, "-m", "torch.distributed.run", "--master-port", str(free_port())]
    how: dict[str, Any] = {"capture_output": True, "text": True, "timeout": ENDED_S}
    done = subprocess.run([*command, *found[1].split()], env=surroundings(), **how)
    assert done.stdout == f"{found[2]}\n", done.stderr
