"""One engine and one server for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from differences import DIFFERENCES
from serving import Served, chat_engine
from serving import served as context


@pytest.fixture(scope="session")
def engine_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_engine(tmp_path_factory.mktemp("vllm") / "engine")


@pytest.fixture(scope="session")
def server(engine_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with context(engine_folder, tmp_path_factory.mktemp("server")) as s:
        yield s


@pytest.fixture
def served(server: Served) -> Iterator[Served]:
    """The server; tokens that the test dictated are cleared at its end."""
    yield server
    server.say([])


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="any", max_retries=0) as c:
        yield c


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of DIFFERENCES, where vLLM differs from `g4ir serve`, as strict xfail."""
    for item in items:
        name = item.name if item.name in DIFFERENCES else item.name.partition("[")[0]
        if item.path.name == "test_client.py" and name in DIFFERENCES:
            item.add_marker(pytest.mark.xfail(reason=DIFFERENCES[name], strict=True))
