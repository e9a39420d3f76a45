"""Embeddings beside sentence-transformers and llama.cpp's server, on the CPU.

    python bench/embeddings.py FOLDER [--tokenizer FILE] [--texts 200] [--rounds 3] [--threads 2]
                               [--dtypes bfloat16] [--batches 8,32] [--quant Q] [--text FILE]
                               [--program llama-server] [--save] [--name embeddings]

FOLDER: an encoder as sentence-transformers stores it (`pip install sentence-transformers`); if it
is not there, EmbeddingGemma 300M is written with random weights and --tokenizer, which a folder of
Gemma 3 has. Texts of 16 to 256 tokens, drawn from a file, are embedded in turns: by an engine of
each of --dtypes; by sentence-transformers in the same dtypes, which sorts them by length, in
batches of each of --batches; with --program by llama.cpp's server, on a GGUF file of the weights
(BF16, or Q8_0 with --quant), through requests of 32 sorted texts, four at once. A cosine of the
embeddings below 0.99 ends the run. The summary has the median seconds, also of CPU time, which
other processes disturb less.
"""

from __future__ import annotations

import json
import os
import random
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import g4ir  # before torch: it sets how threads wait

import torch  # isort: skip
from common import arguments, finish, process

from g4ir.spec.record import load_spec
from g4ir.ui.table import aligned
from g4ir.weights.random import random_weights
from g4ir.weights.write import write_checkpoint

SIZES, SIMILAR, PORT = (16, 256), 0.99, 18_734
HEAD = ["what", "seconds", "CPU seconds", "tokens/s", "g4ir is faster by", "in CPU time"]
TEXT = Path(__file__).resolve().parents[1] / "tests" / "real" / "english.txt"
Embed = Callable[[list[str]], torch.Tensor]


def folder_of(folder: Path, tokenizer: str | None) -> Path:
    """Return the folder, written with random weights if it is not there."""
    if not folder.is_dir():
        if tokenizer is None:
            raise SystemExit(f"{folder}: no such folder; give --tokenizer to write one")
        spec = load_spec("embeddinggemma-300m")
        values = json.loads(Path(tokenizer).read_text())
        ends = [{"SpecialToken": {"id": t, "type_id": 0}} for t in ("<bos>", "<eos>")]
        text = {"Sequence": {"id": "A", "type_id": 0}}
        ids = {t: {"id": t, "ids": [i], "tokens": [t]} for t, i in (("<bos>", 2), ("<eos>", 1))}
        single = [ends[0], text, ends[1]]
        values["post_processor"] = {
            "type": "TemplateProcessing",
            "single": single,
            "pair": single,
            "special_tokens": ids,
        }
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 2048}
        config |= {f"{k}_token": f"<{k}>" for k in ("bos", "eos", "pad", "unk")}
        files = {"tokenizer.json": values, "tokenizer_config.json": config}
        raw = {name: json.dumps(v).encode() for name, v in files.items()}
        weights = random_weights(spec, 0, torch.bfloat16)
        write_checkpoint(folder, spec, weights, side_files=raw)
    return folder


def texts_of(tokenizer: Any, source: str, count: int) -> list[str]:
    """Return texts of 16 to 256 tokens from random places of a file."""
    raw, rng = Path(source).read_text(), random.Random(0)
    spans = tokenizer.encode(raw, add_special_tokens=False).offsets
    out = []
    for _ in range(count):
        size = rng.randint(SIZES[0], SIZES[1]) - 2
        at = rng.randrange(len(spans) - size)
        out.append(raw[spans[at][0] : spans[at + size - 1][1]])
    return out


@contextmanager
def llama_server(program: str, file: Path, threads: int) -> Iterator[tuple[Embed, int]]:
    """A context with llama.cpp's embeddings of texts, and the id of its process."""
    flags = f"--embeddings --pooling mean -t {threads} -tb {threads} -b 2048 -ub 2048 -np 8"
    words = [program, "-m", str(file), *flags.split(), "-c", "16384", "--port", str(PORT)]
    with process(*words, stdout=-3, stderr=-3) as server:

        def post(part: list[str]) -> Any:
            body = json.dumps({"input": part}).encode()
            url = f"http://127.0.0.1:{PORT}/v1/embeddings"
            request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
            return [row["embedding"] for row in json.load(urllib.request.urlopen(request))["data"]]

        def embed(texts: list[str]) -> torch.Tensor:
            order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
            parts = [order[i : i + 32] for i in range(0, len(order), 32)]
            out = torch.empty(len(texts), len(post(texts[:1])[0]))
            with ThreadPoolExecutor(4) as pool:
                for part, rows in zip(
                    parts, pool.map(post, ([texts[i] for i in p] for p in parts))
                ):
                    out[part] = torch.tensor(rows)
            return out

        for _ in range(240):
            try:
                post(["a"])
                break
            except OSError:
                time.sleep(0.5)
        yield embed, server.pid


def sentence_transformers(folder: Path, dtype: str, batch: int) -> Embed:
    """Return the embeddings of sentence-transformers in batches of this size."""
    from sentence_transformers import SentenceTransformer

    options = {"dtype": getattr(torch, dtype)}
    model = SentenceTransformer(str(folder), device="cpu", model_kwargs=options)

    def embed(texts: list[str]) -> torch.Tensor:
        out: torch.Tensor = model.encode(texts, batch_size=batch, convert_to_tensor=True)
        return out.float()

    return embed


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(
    runs: dict[str, tuple[Embed, int]], texts: list[str], rounds: int
) -> dict[str, list[tuple[float, float]]]:
    """Return seconds and CPU seconds of each run in each round, after one on some texts."""
    few, wanted = texts[:: max(1, len(texts) // 8)], None
    for name, (embed, _) in runs.items():
        rows = torch.nn.functional.normalize(embed(few), dim=-1)
        wanted = rows if wanted is None else wanted
        if (worst := float((rows * wanted).sum(-1).min())) < SIMILAR:
            raise SystemExit(f"{name}: a cosine of {worst:.4f} to {next(iter(runs))}")
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for number in range(rounds):
        for name in [*runs][:: 1 if number % 2 else -1]:
            embed, pid = runs[name]
            start, cpu = time.perf_counter(), cpu_seconds(pid)
            embed(texts)
            taken[name].append((time.perf_counter() - start, cpu_seconds(pid) - cpu))
    return taken


def main() -> None:
    flags = {"texts": 200, "rounds": 3, "threads": 2, "dtypes": ("bfloat16",), "batches": (8, 32)}
    paths = {"tokenizer": None, "quant": None, "program": None, "text": str(TEXT), "name": None}
    args = arguments(__doc__, "folder", **flags, **paths)
    torch.set_num_threads(args.threads)
    folder, runs = folder_of(Path(args.folder), args.tokenizer), dict[str, tuple[Embed, int]]()
    with ExitStack() as stack, TemporaryDirectory() as scratch:
        for dtype in args.dtypes:
            out = Path(scratch, dtype)
            engine = g4ir.build(None, out=out, checkpoint=folder, dtype=dtype, quant=args.quant)
            stack.enter_context(engine)
            tokenizer = engine.embedder.tokenizer
            label = f"g4ir {dtype}{f', {args.quant}' if args.quant else ''}"
            runs[label] = partial(engine.embed, task="none"), os.getpid()
        for dtype in args.dtypes if not args.quant else ():
            for batch in args.batches:
                embed = sentence_transformers(folder, dtype, batch)
                runs[f"sentence-transformers {dtype}, batches of {batch}"] = embed, os.getpid()
        if args.program:
            kind = "Q8_0" if args.quant else "BF16"
            file = g4ir.export(folder, Path(scratch, "e.gguf"), format="gguf", dtype=kind)
            server = llama_server(args.program, file, args.threads)
            runs[f"llama.cpp {kind}"] = stack.enter_context(server)
        texts = texts_of(tokenizer, args.text, args.texts)
        tokens = sum(len(x) for x in engine.embedder.tokenize(texts))
        taken = measure(runs, texts, args.rounds)
    middle = {name: [median(column) for column in zip(*rows)] for name, rows in taken.items()}
    best = [min(middle[name][i] for name in runs if name.startswith("g4ir")) for i in (0, 1)]
    rows = [
        [
            name,
            *(f"{x:.1f}" for x in t),
            f"{tokens / t[0]:.0f}",
            *(f"{x / b:.2f}" for x, b in zip(t, best)),
        ]
        for name, t in middle.items()
    ]
    head = f"{args.texts} texts, {tokens} tokens, {args.threads} threads, {args.rounds} rounds"
    isa = f"; kernels held to {os.environ['G4IR_ISA']}" if "G4IR_ISA" in os.environ else ""
    finish(args, args.name or "embeddings", f"{head}{isa}\n\n{aligned([HEAD, *rows])}")


if __name__ == "__main__":
    main()
