"""Index a folder of Markdown with an encoder, ask it a question, answer with a chat model.

python examples/search.py docs "Which flag quantises the KV cache?" \\
    --encoder google/embeddinggemma-300m --chat gemma3-1b
"""

import argparse
import re
from pathlib import Path

import g4ir

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path)
parser.add_argument("question")
parser.add_argument("--encoder", default="google/embeddinggemma-300m")
parser.add_argument("--chat", default="gemma3-1b")
parser.add_argument("--best", type=int, default=3)
args = parser.parse_args()

sections = [
    (file, part.strip())
    for file in sorted(args.folder.rglob("*.md"))
    for part in re.split(r"^#+ ", file.read_text(), flags=re.MULTILINE)
    if part.strip()
]
with g4ir.load(args.encoder) as engine:
    index = engine.embed([text for _, text in sections], task="document", truncate=True).numpy()
    scores = index @ engine.embed(args.question, task="query").numpy()[0]
best = scores.argsort()[::-1][: args.best]
for i in best:
    print(f"{scores[i]:.3f}  {sections[i][0]}: {sections[i][1].splitlines()[0]}")
context = "\n\n".join(sections[i][1][:2000] for i in best)
with g4ir.load(args.chat) as engine:
    prompt = f"Answer from these notes alone.\n\n{context}\n\nQuestion: {args.question}"
    reply = engine.generate(prompt, max_new_tokens=256, chat=True)
    print(engine.tokenizer().decode(reply))
