"""What clients do with a served engine: each case is a program, `python cases.py NAME URL`, in the
clients' environment (packages.txt). It fails where the client does, or sees anything else.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent

MODEL, KEY = "tiny", "any"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
HI: Any = [{"role": "user", "content": "Hi"}]
RED = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4"
RED += "z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC"


def _anthropic(url: str) -> Any:
    import anthropic

    return anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0)


def anthropic_text(url: str) -> None:
    got = _anthropic(url).messages.create(model=MODEL, max_tokens=30, messages=HI)
    assert [b.text for b in got.content] == ["hello"] and got.stop_reason == "end_turn"
    counted = _anthropic(url).messages.count_tokens(model=MODEL, messages=HI)
    assert counted.input_tokens == got.usage.input_tokens + got.usage.cache_read_input_tokens


def anthropic_stream(url: str) -> None:
    given: Any = {"model": MODEL, "max_tokens": 60, "messages": HI}
    with _anthropic(url).messages.stream(**given, thinking={"type": "adaptive"}) as stream:
        text = "".join(stream.text_stream)
        last = stream.get_final_message()
    assert text == "hello" and [b.type for b in last.content] == ["thinking", "text"]
    assert last.content[0].thinking == "hmm"


def anthropic_tools(url: str) -> None:
    """A tool loop, streamed: a call, its answer, a text."""
    client, messages = _anthropic(url), [*HI]
    tools = [{"name": "f", "description": "d", "input_schema": SCHEMA}]
    given: Any = {"model": MODEL, "max_tokens": 60, "tools": tools}
    with client.messages.stream(**given, messages=messages) as stream:
        first = stream.get_final_message()
    (use,) = [b for b in first.content if b.type == "tool_use"]
    assert use.input == {"a": 3} and first.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "12"}
    messages += [
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result]},
    ]
    assert client.messages.create(**given, messages=messages).content[0].text == "hello"


def anthropic_picture(url: str) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": RED}
    content = [{"type": "image", "source": source}, {"type": "text", "text": "Hi"}]
    messages: Any = [{"role": "user", "content": content}]
    got = _anthropic(url).messages.create(model=MODEL, max_tokens=30, messages=messages)
    assert got.content[0].text == "hello" and got.usage.input_tokens > 60


def anthropic_error(url: str) -> None:
    import anthropic

    try:
        _anthropic(url).messages.create(model="other", max_tokens=9, messages=HI)
    except anthropic.NotFoundError as e:
        assert "there is no 'other' here" in e.message
    else:
        raise AssertionError("not refused")


def openai_responses(url: str) -> None:
    """A tool loop of items, a schema read into a class, a picture, an error."""
    import openai
    from pydantic import BaseModel

    client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
    tools: Any = [{"type": "function", "name": "f", "parameters": SCHEMA, "strict": False}]
    items: Any = [*HI]
    with client.responses.stream(model=MODEL, input=items, tools=tools) as stream:
        first = stream.until_done().get_final_response()
    (call,) = [i for i in first.output if i.type == "function_call"]
    assert json.loads(call.arguments) == {"a": 3}
    items += [
        *first.output,
        {"type": "function_call_output", "call_id": call.call_id, "output": "12"},
    ]
    assert client.responses.create(model=MODEL, input=items, tools=tools).output_text == "hello"

    class Number(BaseModel):
        a: int

    got = client.responses.parse(model=MODEL, input="Hi", text_format=Number)
    assert got.output_parsed == Number(a=3)
    part = {"type": "input_image", "image_url": f"data:image/png;base64,{RED}", "detail": "auto"}
    picture: Any = [{"role": "user", "content": [part]}]
    assert client.responses.create(model=MODEL, input=picture).output_text == "hello"
    try:
        client.responses.create(model=MODEL, input="Hi", previous_response_id="r")
    except openai.BadRequestError as e:
        assert e.param == "previous_response_id"
    else:
        raise AssertionError("not refused")


def openai_agents(url: str) -> None:
    """An agent by its default, the Responses API: a tool loop, then a stream."""
    import agents
    import openai

    agents.set_tracing_disabled(True)
    calls = list[int]()

    @agents.function_tool
    def f(a: int) -> str:
        """Return the weather."""
        calls.append(a)
        return "12"

    async def run() -> None:
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
        agents.set_default_openai_client(client, use_for_tracing=False)
        agent = agents.Agent(name="x", instructions="Be brief", model=MODEL, tools=[f])
        assert (await agents.Runner.run(agent, "Hi")).final_output == "hello" and calls == [3]
        streamed = agents.Runner.run_streamed(agents.Agent(name="y", model=MODEL), "Hi")
        kinds = {event.type async for event in streamed.stream_events()}
        assert streamed.final_output == "hello" and "raw_response_event" in kinds

    asyncio.run(run())


def pydantic_ai_responses(url: str) -> None:
    from pydantic import BaseModel
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.models.openai import OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    class Number(BaseModel):
        a: int

    provider = OpenAIProvider(base_url=f"{url}/v1", api_key=KEY)
    model = OpenAIResponsesModel(MODEL, provider=provider)
    agent, calls = Agent(model), list[int]()

    @agent.tool_plain
    def f(a: int) -> str:
        """Return the weather."""
        calls.append(a)
        return "12"

    assert agent.run_sync("Hi").output == "hello" and calls == [3]
    assert Agent(model, output_type=NativeOutput(Number)).run_sync("Hi").output == Number(a=3)


def litellm_both(url: str) -> None:
    import litellm

    litellm.suppress_debug_info = True
    given: Any = {"model": f"openai/{MODEL}", "api_base": f"{url}/v1", "api_key": KEY}
    assert litellm.responses(**given, input="Hi").output[0].content[0].text == "hello"
    events = [e.type for e in litellm.responses(**given, input="Hi", stream=True)]
    assert str(events[-1]).lower().endswith("completed")
    given = {"model": f"anthropic/{MODEL}", "api_base": url, "api_key": KEY, "max_tokens": 30}
    assert litellm.completion(**given, messages=HI).choices[0].message.content == "hello"


def langchain_both(url: str) -> None:
    from langchain_anthropic import ChatAnthropic
    from langchain_openai import ChatOpenAI

    given: Any = {"model": MODEL, "base_url": f"{url}/v1", "api_key": KEY, "max_retries": 0}
    chat = ChatOpenAI(**given, use_responses_api=True)
    called = chat.bind_tools([{"title": "f", "description": "d", **SCHEMA}]).invoke("Hi")
    assert called.tool_calls[0]["args"] == {"a": 3}
    assert "".join(str(c.text) for c in chat.stream("Hi")) == "hello"
    claude = ChatAnthropic(model=MODEL, base_url=url, api_key=KEY, max_tokens=30, max_retries=0)
    assert claude.invoke("Hi").text == "hello"


TEXTS = ["ab w7", "w9", "a b ab w3 w3"]


def _embedded(url: str, texts: list[str] = TEXTS, **settings: Any) -> list[list[float]]:
    """The embeddings by OpenAI's own client."""
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
    got = client.embeddings.create(model=MODEL, input=texts, **settings)
    return [d.embedding for d in got.data]


def _same(a: list[list[float]], b: list[list[float]]) -> bool:
    pairs = [pair for rows in zip(a, b, strict=True) for pair in zip(*rows, strict=True)]
    return all(abs(x - y) < 1e-6 for x, y in pairs)


def langchain_embeddings(url: str) -> None:
    from langchain_openai import OpenAIEmbeddings

    given: Any = {"model": MODEL, "base_url": f"{url}/v1", "api_key": KEY, "max_retries": 0}
    client = OpenAIEmbeddings(**given, check_embedding_ctx_length=False)
    assert _same(client.embed_documents(TEXTS), _embedded(url))
    assert _same([asyncio.run(client.aembed_query(TEXTS[0]))], _embedded(url, TEXTS[:1]))
    small = OpenAIEmbeddings(**given, check_embedding_ctx_length=False, dimensions=16)
    assert _same(small.embed_documents(TEXTS), _embedded(url, dimensions=16))


def llama_index_embeddings(url: str) -> None:
    from llama_index.embeddings.openai import OpenAIEmbedding

    client = OpenAIEmbedding(model_name=MODEL, api_base=f"{url}/v1", api_key=KEY, max_retries=0)
    assert _same(client.get_text_embedding_batch(TEXTS), _embedded(url))
    assert _same([asyncio.run(client.aget_query_embedding(TEXTS[0]))], _embedded(url, TEXTS[:1]))


def open_webui_embeddings(url: str) -> None:
    """The requests of its RAG, with the engines `openai` and `ollama` (retrieval/utils.py)."""
    import requests

    body, headers = {"input": TEXTS, "model": MODEL}, {"Authorization": f"Bearer {KEY}"}
    headers |= {"Content-Type": "application/json", "X-OpenWebUI-User-Id": "1"}
    got = requests.post(f"{url}/v1/embeddings", headers=headers, json=body).json()
    assert _same([d["embedding"] for d in got["data"]], _embedded(url))
    got = requests.post(f"{url}/api/embed", headers=headers, json=body | {"prefix": "q: "}).json()
    assert _same(got["embeddings"], _embedded(url))


def _node(file: str, *words: str) -> None:
    program = (HERE / file).read_bytes()
    command = ["node", "--input-type=module", "-", *words]
    subprocess.run(command, input=program, cwd=sys.prefix, check=True)


def _ai_sdk(name: str, url: str) -> None:
    _node("ai_sdk.mjs", name, url, f"data:image/png;base64,{RED}")


def instructor_both(url: str) -> None:
    """By a call and by a schema, whole and as a stream of partial objects."""
    import instructor
    import openai
    from pydantic import BaseModel

    class Number(BaseModel):
        a: int

    client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
    given: Any = {"model": MODEL, "messages": HI, "response_model": Number, "max_retries": 0}
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        held = instructor.from_openai(client, mode=mode)
        assert held.create(**given).a == 3
        assert [*held.create_partial(**given)][-1].a == 3


def _codex(url: str, *given: str, fails: bool = False) -> list[Any]:
    """Run Codex once, with what it does by default; return its events. It runs commands without a
    sandbox, which the model's words are: dictated."""
    with tempfile.TemporaryDirectory() as folder:
        settings = (HERE / "codex.toml").read_text().format(url=url)
        (Path(folder) / "config.toml").write_text(settings)
        words = [f"{sys.prefix}/node_modules/.bin/codex", "exec", "--json", "--skip-git-repo-check"]
        words += ["--dangerously-bypass-approvals-and-sandbox", "-C", folder, "Hi", *given]
        env = {**os.environ, "CODEX_HOME": folder, "HOME": folder}
        done = subprocess.run(
            words, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=100
        )
    assert (done.returncode != 0) == fails, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def _said(events: list[Any], kind: str) -> list[Any]:
    items = [e["item"] for e in events if e["type"] == "item.completed"]
    return [i for i in items if i["type"] == kind]


def codex_tools(url: str) -> None:
    """A tool loop: Codex runs a command, and the model says a text after it."""
    events = _codex(url)
    (command,) = _said(events, "command_execution")
    assert command["aggregated_output"].strip() == "12" and command["exit_code"] == 0
    assert [m["text"] for m in _said(events, "agent_message")] == ["hello"]


def codex_schema_and_picture(url: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        schema, picture = Path(folder) / "schema.json", Path(folder) / "red.png"
        schema.write_text(json.dumps({**SCHEMA, "additionalProperties": False}))
        picture.write_bytes(base64.b64decode(RED))
        events = _codex(url, "--output-schema", str(schema), "--image", str(picture))
    assert [json.loads(m["text"]) for m in _said(events, "agent_message")] == [{"a": 3}]


def codex_error(url: str) -> None:
    events = _codex(url, "-m", "other", fails=True)
    assert events[-1]["type"] == "turn.failed" and "there is no 'other'" in str(events[-1])


def ollama_python(url: str) -> None:
    """Reasoning as a stream, a tool loop, a schema, a picture, generate, models, an error."""
    import ollama

    client = ollama.Client(host=url)
    assert [m.model for m in client.list().models] == [MODEL]
    shown = client.show(MODEL)
    assert {"tools", "vision", "thinking"} <= {*(shown.capabilities or ())}
    pieces = [*client.chat(MODEL, HI, think=True, stream=True)]
    assert "".join(p.message.content or "" for p in pieces) == "hello"
    assert "".join(p.message.thinking or "" for p in pieces) == "hmm"
    last = pieces[-1]
    assert last.done and (last.eval_count or 0) > 0 and (last.total_duration or 0) > 0

    def f(a: int) -> str:
        """Do.

        Args:
            a: a number
        """
        return str(a)

    first = client.chat(MODEL, HI, tools=[f])
    (call,) = first.message.tool_calls or ()
    assert (call.function.name, call.function.arguments) == ("f", {"a": 3})
    answer = {"role": "tool", "tool_name": "f", "content": "12"}
    assert client.chat(MODEL, [*HI, first.message, answer], tools=[f]).message.content == "hello"
    got = client.chat(MODEL, HI, format=SCHEMA, options={"temperature": 0, "num_predict": 60})
    assert json.loads(got.message.content or "") == {"a": 3}
    picture = [{"role": "user", "content": "Hi", "images": [base64.b64decode(RED)]}]
    assert client.chat(MODEL, picture).message.content == "hello"
    assert client.generate(MODEL, "Hi", keep_alive="5m").response == "hello"
    try:
        client.chat("other", HI)
    except ollama.ResponseError as e:
        assert e.status_code == 404 and "there is no 'other' here" in e.error
    else:
        raise AssertionError("not refused")


def ollama_js(url: str) -> None:
    _node("ollama.mjs", url, RED)


CASES: dict[str, Callable[[str], None]] = {
    f.__name__: f
    for f in (
        *(anthropic_text, anthropic_stream, anthropic_tools, anthropic_picture, anthropic_error),
        *(openai_responses, openai_agents, pydantic_ai_responses),
        *(litellm_both, langchain_both, instructor_both),
        *(langchain_embeddings, llama_index_embeddings, open_webui_embeddings),
        *(ollama_python, ollama_js),
        *(codex_tools, codex_schema_and_picture, codex_error),
    )
}
CASES |= {f"ai_sdk_{name}": partial(_ai_sdk, name) for name in ("responses", "chat", "messages")}

if __name__ == "__main__":
    CASES[sys.argv[1]](sys.argv[2])
