"""One engine and one server for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.serve.running import Running, chat_engine, ready


@pytest.fixture(scope="session")
def engine_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_engine(tmp_path_factory.mktemp("serve") / "engine")


@pytest.fixture(scope="session")
def served(engine_folder: Path) -> Iterator[Running]:
    with ready(engine_folder) as r:
        yield r


@pytest.fixture
def client(served: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="any", max_retries=0) as c:
        yield c
