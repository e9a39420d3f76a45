"""Transcripts of audio, by OpenAI's own client: whole, as a text, as a stream; what is refused."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import openai
import pytest
import soundfile

from g4ir.serve import prompts
from tests.serve.running import NAME, Running, chat_engine, ready
from tests.serve.test_media import CASES, sound
from tests.spies import spy

END = "<turn|>"
CLIP = ("clip.wav", sound(), "audio/wav")


def transcribe(client: openai.OpenAI, **given: Any) -> Any:
    return client.audio.transcriptions.create(**{"model": NAME, "file": CLIP, **given})


@pytest.mark.parametrize("kind", ["json", "text", "stream"])
def test_transcripts(
    served: Running, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    served.dictate(monkeypatch, " Good day.", END)
    if kind == "stream":
        events = [*transcribe(client, stream=True, language="en", prompt="Ada", temperature=0.5)]
        assert "".join(e.delta for e in events[:-1]) == " Good day." and len(events) > 2
        done = events[-1]
        assert done.type == "transcript.text.done" and done.text == "Good day."
        assert {e.type for e in events[:-1]} == {"transcript.text.delta"}
    elif kind == "text":
        assert transcribe(client, response_format="text", language="", prompt="") == "Good day.\n"
        return
    else:
        raw, rate = soundfile.read(io.BytesIO(sound()))
        soundfile.write(file := io.BytesIO(), raw, rate, format="FLAC")
        done = transcribe(client, file=("clip.flac", file.getvalue()))
        assert done.text == "Good day."
    counts = done.usage
    assert counts.input_token_details.audio_tokens == 13  # of half a second
    assert counts.total_tokens == counts.input_tokens + counts.output_tokens


def test_hints_are_part_of_the_prompt(
    served: Running, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    sampling = {"temperature": 0.25, "seed": 7, "top_p": 0.5, "max_completion_tokens": 9}

    def request(*given: Any, fields: Any, **parts: Any) -> None:
        seen.append(str(fields["messages"][0]["content"][0]["text"]))
        assert {name: fields[name] for name in sampling} == sampling

    spy(monkeypatch, prompts, "ServedRequest", request)
    served.dictate(monkeypatch, "ok", END)
    transcribe(client, language="de", prompt="Ada Lovelace", extra_body={**sampling, "new": "x"})
    assert "language is de." in seen[0] and "Ada Lovelace" in seen[0]


@pytest.mark.parametrize("case", CASES["transcriptions"], ids=lambda case: case["name"])
def test_refused(client: openai.OpenAI, case: dict[str, Any]) -> None:
    files = {"EMPTY": b"", "JUNK": b"RIFF junk", "LONG": sound(60)}
    given = case["given"]
    if "file" in given:
        given = {"file": ("a.wav", files[given["file"]])}
    with pytest.raises(openai.BadRequestError) as e:
        transcribe(client, **given)
    assert e.value.param == case["param"] and case["says"] in e.value.message
    assert "messages" not in e.value.message


@pytest.mark.parametrize("case", CASES["forms"], ids=lambda case: case["says"])
def test_forms_that_are_none(served: Running, case: dict[str, Any]) -> None:
    path, headers = "/v1/audio/transcriptions", {"Content-Type": case["type"]}
    body = "".join(text * times for text, times in case["body"]).encode()
    with served.client() as http:
        answer = http.post(path, content=body, headers=headers)
        assert answer.status_code == case.get("status", 400)
        assert case["says"] in answer.json()["error"]["message"]


def test_forms_of_other_sites(served: Running) -> None:
    """A browser sends them without asking first."""
    with served.client() as http:
        for origin, status in (("http://evil.example", 403), ("null", 403), (served.url, 400)):
            headers = {"Origin": origin}
            answer = http.post("/v1/audio/transcriptions", files={"other": b"x"}, headers=headers)
            assert answer.status_code == status, origin


def test_an_engine_that_does_not_hear(tmp_path: Path) -> None:
    with (
        ready(chat_engine(tmp_path / "engine", media=["image"])) as r,
        openai.OpenAI(base_url=f"{r.url}/v1", api_key="any", max_retries=0) as client,
        pytest.raises(openai.BadRequestError, match="no audio") as e,
    ):
        transcribe(client)
    assert e.value.param == "file"
