"""Files of docker/ for compose, systemd and Kubernetes: their commands are ours, their probes are
paths of the server, and nothing is killed while it drains."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from configparser import RawConfigParser
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from g4ir import cli
from g4ir.cli.serve import Serve
from tests.serve.running import LOADING, chat_engine, eventually

ROOT = Path(__file__).parents[1]
DOCKER = ROOT / "docker"


@dataclass
class Deployment:
    """A command, its variables and its config file; what asks how it is, and what kills it."""

    words: Sequence[str]
    config: str
    kill_s: float
    variables: dict[str, str] = field(default_factory=dict)
    probes: set[str] = field(default_factory=set)

    def here(self, tmp_path: Path, patch: pytest.MonkeyPatch) -> list[str]:
        """Return the words after g4ir, with files of this machine in place of the deployment's."""
        (tmp_path / "serve.yaml").write_text(self.config)
        (tmp_path / "keys").write_text("a-key\n")
        for name, value in self.variables.items():
            patch.setenv(name, value)
        _, *words = self.words
        return [re.sub(r"^(/|\$\{).*/", f"{tmp_path}/", word) for word in words]


def in_seconds(text: str) -> float:
    number, unit = re.fullmatch(r"(\d+)(s|m)?", text).groups()  # type: ignore[union-attr]
    return float(number) * {"m": 60, "s": 1, None: 1}[unit]


def of_compose(name: str) -> Deployment:
    service = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"][name]
    assert (DOCKER / ".." / service["build"]["dockerfile"]).is_file()
    assert service["volumes"][0] == "data:/data"
    variables = service["environment"]
    probes = {*re.findall(r"8000(/\w+)", service["healthcheck"]["test"][-1])}
    config, kill_s = (DOCKER / "serve.yaml").read_text(), in_seconds(service["stop_grace_period"])
    return Deployment(service["command"], config, kill_s, variables, probes)


def of_systemd() -> Deployment:
    unit = RawConfigParser(strict=False, delimiters="=")
    unit.optionxform = str  # type: ignore[method-assign, assignment]
    unit.read_string((DOCKER / "g4ir.service").read_text())
    service = unit["Service"]
    assert service["KillMode"] == "mixed" and "HUP" in service["ExecReload"]
    words, config = shlex.split(service["ExecStart"]), (DOCKER / "serve.yaml").read_text()
    return Deployment(words, config, in_seconds(service["TimeoutStopSec"]))


def of_kubernetes() -> Deployment:
    parts = {d["kind"]: d for d in yaml.safe_load_all((DOCKER / "kubernetes.yaml").read_text())}
    pod = parts["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["enableServiceLinks"] is False and pod["securityContext"]["runAsNonRoot"]
    assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]}
    assert parts["Service"]["spec"]["ports"][0]["targetPort"] == container["ports"][0]["name"]
    config = parts["ConfigMap"]["data"]["serve.yaml"]
    assert yaml.safe_load(config) == yaml.safe_load((DOCKER / "serve.yaml").read_text())
    probes = {
        container[f"{n}Probe"]["httpGet"]["path"] for n in ("liveness", "readiness", "startup")
    }
    assert container["livenessProbe"]["httpGet"]["path"] == "/livez"
    assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"
    kill_s = float(pod["terminationGracePeriodSeconds"])
    return Deployment(container["command"], config, kill_s, probes=probes)


ALL: dict[str, Callable[[], Deployment]] = {
    "compose": lambda: of_compose("cpu"),
    "compose cuda": lambda: of_compose("cuda"),
    "systemd": of_systemd,
    "kubernetes": of_kubernetes,
}


@pytest.mark.parametrize("name", ALL)
def test_a_deployment_is_a_server(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    d = ALL[name]()
    parser, values = cli.parse(d.here(tmp_path, monkeypatch))
    verb = parser.flags.make(values)
    assert isinstance(verb, Serve) and Path(d.words[0]).name == "g4ir"
    server, address = verb.make_server()
    assert (address.host, address.port) == ("0.0.0.0", 8000) and [*server.gate.keys] == [b"a-key"]
    assert address.drain_s + 10 <= d.kill_s
    assert d.probes <= {*server.handlers()} and verb.log_format == "json"
    assert verb.first_use.options.max_batch == int(d.variables.get("G4IR_MAX_BATCH", 8))


@pytest.fixture
def unit(tmp_path: Path) -> Iterator[Path]:
    """The unit, with a command that exists."""
    path = tmp_path / "g4ir.service"
    text = (DOCKER / "g4ir.service").read_text()
    path.write_text(text.replace("/opt/g4ir/bin/g4ir", sys.executable))
    yield path


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="needs systemd-analyze")
def test_the_unit_is_one(unit: Path) -> None:
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_container_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command of compose.yaml with a small model, asked by its health check, and stopped."""
    d = of_compose("cpu")
    words = d.here(tmp_path, monkeypatch)
    engine = chat_engine(tmp_path / "engine", 64, spec="tiny-dense", image_budgets=None)
    monkeypatch.delenv("G4IR_MAX_BATCH")
    config: dict[str, Any] = yaml.safe_load(d.config)
    for key in ("backend", "max-batch", "max-seq", "download"):  # those of a build
        del config[key]
    config |= {"model": [f"e2b={engine}"], "port": 0, "host": "127.0.0.1"}
    (tmp_path / "serve.yaml").write_text(yaml.safe_dump(config))
    process = subprocess.Popen(
        [sys.executable, "-m", "g4ir.cli", *words], stderr=subprocess.PIPE, text=True
    )
    assert process.stderr
    try:
        port = re.search(r"listening at http://127.0.0.1:(\d+)", process.stderr.readline())
        assert port
        test = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]["cpu"]
        program = test["healthcheck"]["test"][-1].replace("8000", port[1])

        ready = re.search(r"http://[^']+", program)
        assert ready
        eventually(lambda: httpx.get(ready[0]).is_success, LOADING)
        assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
        headers = {"Authorization": "Bearer a-key"}
        listed = httpx.get(f"http://127.0.0.1:{port[1]}/v1/models", headers=headers).json()
        assert [m["id"] for m in listed["data"]] == ["e2b"]
        process.terminate()
        assert process.wait(60) == 0
    finally:
        process.kill()
