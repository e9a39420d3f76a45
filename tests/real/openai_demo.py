"""Serve an engine and talk to it with OpenAI's client, as `make demo-real` does.

    python tests/real/openai_demo.py ENGINE

It continues texts, greedily, and answers a question in the form of a text: a base model was not
trained on turns of a chat.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import openai

PROMPTS = ("Once upon a time, there was a little", "def fibonacci(n):")
QUESTION = "What is the capital of Italy?"
AS_TEXT = (
    f"Question: What is the capital of France?\nAnswer: Paris.\n\nQuestion: {QUESTION}\nAnswer:"
)
LISTENING = "listening at "


def write(client: openai.OpenAI, model: str, prompt: str, tokens: int, **more: str) -> None:
    """Print the greedy continuation of a prompt as it is streamed."""
    print(f"\n> {prompt}", end="", flush=True)
    given: dict[str, Any] = {"model": model, "prompt": prompt, "max_tokens": tokens, **more}
    for event in client.completions.create(**given, temperature=0, stream=True):
        print(event.choices[0].text if event.choices else "", end="", flush=True)


def main(engine: str) -> None:
    """Serve an engine, continue prompts, and ask a question in the form of a text."""
    words = [sys.executable, "-m", "g4ir", "serve", engine, "--port", "0"]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        try:
            lines = iter(server.stderr.readline, "")
            url = next(x.split(LISTENING)[1].strip() for x in lines if LISTENING in x)
            # Retries wait until the engine is loaded.
            with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=10) as client:
                model = client.models.list().data[0].id
                print(f"{model}, served to OpenAI's client")
                for prompt in PROMPTS:
                    write(client, model, prompt, 48)
                write(client, model, AS_TEXT, 16, stop="\n")
        finally:
            server.terminate()
            server.stderr.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
