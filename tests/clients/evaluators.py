"""What lm-eval does with a served engine, in an environment of its own (evaluators.txt): `python
evaluators.py NAME URL FOLDER TOKENIZER [CHECKPOINT]` prints its results as JSON. Its tasks are made
here, of the texts of tests/real: which of two continuations follows some words.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

TEXTS = Path(__file__).parents[1] / "real"
#: words of a context, and of a continuation
CONTEXT, MORE = 20, 5


def documents(count: int) -> list[dict[str, Any]]:
    """Return contexts with two continuations, of which the first is the text's own."""
    drawn, out = random.Random(0), list[dict[str, Any]]()
    files = (TEXTS / f"{name}.txt" for name in ("english", "questions", "german"))
    texts = [file.read_text().split() for file in files]
    for _ in range(count):
        words, others = drawn.sample(texts, 2)
        at, other = (drawn.randrange(len(t) - CONTEXT - MORE) for t in (words, others))
        choices = [words[at + CONTEXT :][:MORE], others[other:][:MORE]]
        context = " ".join(words[at:][:CONTEXT])
        out.append({"context": context, "choices": [" ".join(c) for c in choices], "answer": 0})
    return out


def evaluate(kind: str, folder: Path, task: str, **args: Any) -> Any:
    """Return the samples of a task."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(folder), include_defaults=False)
    more = {"apply_chat_template": True} if kind == "local-chat-completions" else {}
    found = simple_evaluate(
        kind, args, tasks=[task], task_manager=manager, bootstrap_iters=0, device="cpu", **more
    )
    return found["samples"][task]


def task(folder: Path, name: str, count: int, **form: Any) -> None:
    """Write a task."""
    (folder / f"{name}.json").write_text(json.dumps(documents(count)))
    data = {"data_files": {"test": str(folder / f"{name}.json")}}
    data["cache_dir"] = str(folder / "cache")
    given: dict[str, Any] = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": data,
        "test_split": "test",
    }
    given |= {"doc_to_text": "{{context}}", **form}
    (folder / f"{name}.yaml").write_text(json.dumps(given))


def likelihoods(kind: str, folder: Path, count: int, **args: Any) -> list[list[float]]:
    """Return the log-likelihoods of all continuations, by document, for each character."""
    choice = {"doc_to_choice": "{{choices}}", "doc_to_target": "answer"}
    task(folder, "follows", count, output_type="multiple_choice", **choice)
    samples = sorted(evaluate(kind, folder, "follows", **args), key=lambda s: s["doc_id"])
    return [
        [float(r[0]) / len(c) for r, c in zip(s["filtered_resps"], s["doc"]["choices"])]
        for s in samples
    ]


def main(name: str, url: str, folder: str, tokenizer: str, checkpoint: str = "") -> None:
    place, out = Path(folder), dict[str, Any]()
    served = {"model": name, "tokenizer_backend": "huggingface", "tokenizer": tokenizer}
    scored = {**served, "base_url": f"{url}/v1/completions", "add_bos_token": True}
    count = 100 if checkpoint else 4
    out["served"] = likelihoods("local-completions", place, count, **scored)
    if checkpoint:
        out["hf"] = likelihoods("hf", place, count, pretrained=checkpoint, dtype="float32")
    form = {"output_type": "generate_until", "doc_to_target": "answer"}
    task(place, "says", 2, **form, generation_kwargs={"until": ["\n"], "max_gen_toks": 8})
    chat = {**served, "base_url": f"{url}/v1/chat/completions"}
    kind, args = ("local-completions", scored) if checkpoint else ("local-chat-completions", chat)
    out["says"] = [s["filtered_resps"][0] for s in evaluate(kind, place, "says", **args)]
    print(json.dumps(out))


if __name__ == "__main__":
    main(*sys.argv[1:])
