"""What /metrics tells: names, help, and that the documentation and the Grafana board know them.
The load script against a served tiny engine."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from g4ir.engine.scheduler import Scheduler
from tests.serve.running import NAME, Running, eventually
from tests.spies import spy

ROOT = Path(__file__).parents[2]
CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 400, "ignore_eos": True}


def families(r: Running) -> dict[str, Any]:
    with r.client() as client:
        text = client.get("/metrics").text
    return {f.name: f for f in text_string_to_metric_families(text)}


def values(r: Running, name: str) -> dict[tuple[str, ...], float]:
    return {(*s.labels.values(),): s.value for s in families(r)[name].samples}


def test_every_metric_has_help_and_a_row_in_the_documentation(served: Running) -> None:
    """And none is of when a series began."""
    page = (ROOT / "docs" / "operations.md").read_text()
    rows = dict(
        re.findall(r"^\| `(\w+)` \| (?:gauge|counter|histogram) \| .* \| (.*) \|$", page, re.M)
    )
    names = dict[str, str]()
    for name, family in families(served).items():
        end = {"counter": "_total"}.get(family.type, "")
        assert len(family.documentation.split()) > 1
        assert not [s for s in family.samples if s.name.endswith("_created")]
        if name.startswith("g4ir_"):
            names[name.removeprefix("g4ir_") + end] = family.documentation
    assert names == rows


@pytest.mark.skipif(not shutil.which("promtool"), reason="needs promtool")
def test_promtool_accepts_the_metrics(served: Running) -> None:
    with served.client() as client:
        text = client.get("/metrics").text
    check = ["promtool", "check", "metrics"]
    done = subprocess.run(check, input=text, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_board_asks_for_metrics_that_exist(served: Running) -> None:
    board = json.loads((ROOT / "docker" / "grafana.json").read_text())
    asked = {t["expr"] for p in board["panels"] for t in p["targets"]}
    named = {n for expr in asked for n in re.findall(r"(?:g4ir|process)_\w+", expr)}
    known = {f"{n}{end}" for n in families(served) for end in ("", "_total", "_bucket")}
    assert len(named) > 15 and named <= known


def test_the_kv_cache_and_responses(served: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream's tokens are in use while it runs; responses count by path and status."""
    spy(monkeypatch, Scheduler, "step", lambda *_: time.sleep(0.005))
    with served.client() as client:
        before = values(served, "g4ir_http_responses")
        client.post("/no/such/path")
        with client.stream("POST", CHAT, json=BODY | {"stream": True}) as stream:
            lines = stream.iter_lines()
            next(lines)
            eventually(lambda: values(served, "g4ir_kv_cache_tokens")[()] > 15)
            ratio = values(served, "g4ir_kv_cache_usage_ratio")[()]
            assert 0 < ratio <= 1
        eventually(lambda: values(served, "g4ir_kv_cache_tokens")[()] == 0)
        for key in (("other", "404"), (CHAT, "200")):
            now = lambda key=key: values(served, "g4ir_http_responses")[key]  # noqa: E731
            eventually(lambda key=key, now=now: now() == before.get(key, 0) + 1)
    (model,) = families(served)["g4ir_model_info"].samples
    assert (model.labels["name"], model.labels["max_batch"]) == (NAME, "4")


def load(*words: str) -> str:
    command = [sys.executable, str(ROOT / "bench" / "load.py"), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout


def test_every_request_is_answered_and_counted(served: Running) -> None:
    lengths = ("--input", "4-40", "--output", "3-6")
    text = load(served.url, "--requests", "9", "--rate", "0", *lengths)
    assert re.match(r"9 requests in [\d.]+ s \(9 x 200\)\n", text)
    found = re.search(r"([\d.]+) rows decoded at a time \((\d+) steps\)", text)
    assert found and 1 < float(found[1]) <= 4 and int(found[2]) >= 6
    for line in ("first text", "between texts", "whole answer"):
        assert re.search(rf"{line} +\d+ +\d+ +\d+", text), text
