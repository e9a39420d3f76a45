"""Talk to `g4ir serve MODEL` with OpenAI's client, one streamed answer after another.

g4ir serve gemma-3-270m.gguf &
python examples/client.py http://127.0.0.1:8000/v1 "Why is the sky blue?" "And at night?"
"""

import sys

from openai import OpenAI

_, url, *questions = sys.argv
client = OpenAI(base_url=url, api_key="none", max_retries=0)
model = client.models.list().data[0].id
messages = []
for question in questions:
    messages.append({"role": "user", "content": question})
    answer = ""
    stream = client.chat.completions.create(
        model=model, messages=messages, max_tokens=32, temperature=0, stream=True
    )
    for chunk in stream:
        piece = chunk.choices[0].delta.content or "" if chunk.choices else ""
        print(piece, end="", flush=True)
        answer += piece
    print()
    messages.append({"role": "assistant", "content": answer})
