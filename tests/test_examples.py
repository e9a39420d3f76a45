"""Each script of examples/ runs, and does what it says."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

import g4ir
from tests.cli_tools import text_checkpoint
from tests.serve.running import chat_engine, ready
from tests.test_embeddings import folder_of

EXAMPLES = {p.stem: p for p in (Path(__file__).parents[1] / "examples").glob("*.py")}
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("own_home")]


@pytest.fixture
def example(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """`example(name, *words)`: what a script prints."""

    def run(name: str, *words: str | Path) -> str:
        monkeypatch.setattr(sys, "argv", [name, *map(str, words)])
        run.globals = runpy.run_path(str(EXAMPLES[name]), run_name="__main__")  # type: ignore[attr-defined]
        return capsys.readouterr().out

    return run


def test_all_are_run() -> None:
    source = Path(__file__).read_text()
    assert len(EXAMPLES) <= 9 and all(f'"{name}"' in source for name in EXAMPLES)


def test_generate(tmp_path: Path, example: Any) -> None:
    model = text_checkpoint(tmp_path / "my-tiny")
    words = ("ab", "w3 w7", "--max-new-tokens", "4")
    lines = example("generate", model, *words, "--backend", "reference")
    assert [line.split(": ")[0] for line in lines.splitlines()] == ["'ab'", "'w3 w7'"]
    engine = chat_engine(tmp_path / "engine")
    assert example("generate", engine, "--chat", *words).count("\n") == 2


def test_client(tmp_path: Path, example: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with ready(chat_engine(tmp_path / "engine")) as server:
        server.dictate(monkeypatch, "blue", "<turn|>")
        out = example("client", f"{server.url}/v1", "Why?", "And at night?")
    assert out == "blue\nblue\n"


def test_lora(tmp_path: Path, example: Any) -> None:
    """Twenty steps lower the loss; an engine with the adapter has the logits of the module."""
    losses = re.findall(r"loss (\S+)", example("lora", "tiny-moe", tmp_path / "lora"))
    assert len(losses) == 20 and float(losses[-1]) < 0.9 * float(losses[0])
    limits: dict[str, Any] = {"max_seq": 64, "dtype": "float32", "all_logits": True, "max_batch": 2}
    g4ir.build("tiny-moe", tmp_path / "e", random_weights=0, **limits).close()
    ids, module = example.globals["ids"], example.globals["module"]
    with g4ir.load_engine(tmp_path / "e", adapters={"mine": tmp_path / "lora"}) as engine:
        logits = engine.session(2, adapter="mine").prefill(ids, all_logits=True)
    want = module(ids).logits.detach()
    assert (logits - want).abs().max() < 1e-3 * want.std()


def test_new_variant(tmp_path: Path, example: Any) -> None:
    out = example("new_variant", tmp_path / "mine")
    assert "text.moe.num_experts: 8 -> 6" in out and out.rstrip().endswith("ok")


def test_compare(tmp_path: Path, example: Any) -> None:
    text = tmp_path / "text"
    text.write_text("ab w3 w7 a b w9 " * 3)
    model = text_checkpoint(tmp_path / "my-tiny")
    out = example("compare", model, text, "--backend", "reference")
    first, second = (float(x) for x in re.findall(r"nll (\S+)", out))
    assert first != second and abs(first - second) < 0.1


@pytest.mark.parametrize("name", ["logit_lens", "attention_maps"])
def test_values(name: str, tmp_path: Path, example: Any) -> None:
    model, plot = text_checkpoint(tmp_path / "my-tiny"), tmp_path / "plot.png"
    out = example(name, model, "ab w3 w7", "--backend", "reference", "--plot", plot)
    assert [line.split()[0].split(".")[0] for line in out.splitlines()] == [
        f"L{i}" for i in range(8)
    ]
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_search(tmp_path: Path, example: Any) -> None:
    """Sections of both files are ranked, and the chat model answers."""
    (tmp_path / "notes").mkdir()
    for name, text in (("a", "ab w3\n\n## w7\nw3 w7"), ("b", "w9 w11")):
        (tmp_path / "notes" / f"{name}.md").write_text(f"# {text}\n")
    options = {"checkpoint": folder_of(tmp_path / "c"), "backend": "reference"}
    g4ir.build(None, out=tmp_path / "e", **options).close()
    models = "--encoder", tmp_path / "e", "--chat", chat_engine(tmp_path / "engine")
    lines = example("search", tmp_path / "notes", "w3 w7", *models).splitlines()
    best, reply = lines[:3], "".join(lines[3:])
    assert {line.split(": ")[1] for line in best} == {"ab w3", "w7", "w9 w11"} and reply
    scores = [float(line.split()[0]) for line in best]
    assert scores == sorted(scores, reverse=True) and scores[0] > scores[-1]


@pytest.mark.full
def test_torch_tensorrt(example: Any) -> None:
    out = example("torch_tensorrt", "tiny-dense")
    assert all(float(x) < 1e-4 for x in re.findall(r"difference\D* (\S+)", out))
    assert "exported" in out
