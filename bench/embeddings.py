"""Embeddings beside sentence-transformers and llama.cpp's server, on the CPU.

    python bench/embeddings.py FOLDER [--tokenizer FILE] [--texts 1000] [--minutes 6] [--threads 2]
                               [--dtypes bfloat16,float32] [--text FILE]
                               [--isas native,avx2] [--programs llama-server,FILE] [--save]
                               [--name embeddings]

FOLDER: an encoder as sentence-transformers stores it (`pip install sentence-transformers`); if it
is not there, EmbeddingGemma 300M is written with random weights and --tokenizer, which a folder of
Gemma 3 has. Texts of 16 to 256 tokens, drawn from a file, are embedded: by an engine of each of
--dtypes; by sentence-transformers in the same dtypes, sorted, in batches of 8; and by
llama.cpp's server, on a GGUF file of the weights in BF16, through requests of 32 texts, four at
once. With the dtype `int8` an engine has weights and inputs of products in int8, and the file Q8_0,
which llama.cpp computes in the same way. A table for each of --isas (values of G4IR_ISA, which
restricts torch too), with the llama.cpp server at the same place of --programs, if any.

The texts are sorted by length and divided into slices of all lengths, in whole batches, so that
none pads more than over all texts; the programs take turns. After the first slice only the best
dtype of each program goes on, until --minutes are over or all texts are done. A cosine of
the embeddings below 0.99 ends the run. Ratios are to the best engine's rate, by wall time and by
CPU time, which other processes disturb less.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

import g4ir  # before torch: it sets how threads wait

import torch  # isort: skip
from common import arguments, finish, process, seconds

from g4ir.spec.record import load_spec
from g4ir.ui.table import aligned
from g4ir.weights.random import random_weights
from g4ir.weights.write import write_checkpoint

SIZES, SIMILAR, PORT = (16, 256), 0.99, 18_734
BATCH, SLICES = 8, 16
INT8: dict[str, Any] = {"dtype": "bfloat16", "quant": "int8", "quant_activations": "int8"}
HEAD = ["what", "texts", "seconds", "CPU s", "tokens/s", "g4ir is faster by", "in CPU time"]
TEXT = Path(__file__).resolve().parents[1] / "tests" / "real" / "english.txt"
Embed = Callable[[list[str]], torch.Tensor]
Sample = tuple[int, float, float]
START = time.monotonic()


def folder_of(folder: Path, tokenizer: str | None) -> Path:
    """Return the encoder's folder; if it is missing, it is written with random weights."""
    if not folder.is_dir():
        if tokenizer is None:
            raise SystemExit(f"{folder}: no such folder; give --tokenizer to write one")
        spec = load_spec("embeddinggemma-300m")
        words, ends = Tokenizer.from_file(tokenizer), [("<bos>", 2), ("<eos>", 1)]
        words.post_processor = TemplateProcessing(single="<bos> $A <eos>", special_tokens=ends)
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 2048}
        config |= {f"{k}_token": f"<{k}>" for k in ("bos", "eos", "pad", "unk")}
        files = {"tokenizer.json": words.to_str(), "tokenizer_config.json": json.dumps(config)}
        raw = {name: text.encode() for name, text in files.items()}
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
    """Context with a function that embeds texts by llama.cpp, and the id of its process."""
    flags = f"--embeddings --pooling mean -t {threads} -tb {threads} -b 2048 -ub 2048 -np 8"
    words = [program, "-m", str(file), *flags.split(), "-c", "16384", "--port", str(PORT)]
    with process(*words, stdout=-3, stderr=-3) as server:

        def post(part: list[str]) -> Any:
            body = json.dumps({"input": part}).encode()
            url = f"http://127.0.0.1:{PORT}/v1/embeddings"
            request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
            return [row["embedding"] for row in json.load(urllib.request.urlopen(request))["data"]]

        def embed(texts: list[str]) -> torch.Tensor:
            parts = [texts[i : i + 32] for i in range(0, len(texts), 32)]
            with ThreadPoolExecutor(4) as pool:
                return torch.tensor([row for rows in pool.map(post, parts) for row in rows])

        for _ in range(240):
            with suppress(OSError):
                post(["a"])
                break
            time.sleep(0.5)
        yield embed, server.pid


def sentence_transformers(folder: Path, dtype: str) -> Embed:
    """Return a function that embeds texts by sentence-transformers, in a dtype: f32 [n, size]."""
    from sentence_transformers import SentenceTransformer

    how: Any = {"device": "cpu", "model_kwargs": {"dtype": getattr(torch, dtype)}}
    encode = SentenceTransformer(str(folder), **how).encode
    return lambda texts: encode(texts, batch_size=BATCH, convert_to_tensor=True).float()


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(
    runs: dict[str, tuple[Embed, int]], texts: list[str], limit: float
) -> dict[str, list[Sample]]:
    """Return samples of each run: number of texts, seconds and CPU seconds of each slice."""
    wanted, taken = None, {name: list[Sample]() for name in runs}
    end = time.monotonic() + limit
    for name, (embed, _) in runs.items():  # also warms up
        rows = torch.nn.functional.normalize(embed(texts[:: max(1, len(texts) // 8)]), dim=-1)
        wanted = rows if wanted is None else wanted
        if (worst := float((rows * wanted).sum(-1).min())) < SIMILAR:
            raise SystemExit(f"{name}: cosine {worst:.4f} to the embeddings of {next(iter(runs))}")
    texts = sorted(texts, key=len)
    batches = [texts[i : i + BATCH] for i in range(0, len(texts), BATCH)]
    for turn in range(SLICES):
        start, part = time.monotonic(), [t for b in batches[turn::SLICES] for t in b]
        for name in [*runs][:: 1 if turn % 2 else -1] if part else ():
            embed, pid = runs[name]
            cpu, spent = cpu_seconds(pid), seconds(partial(embed, part))
            taken[name].append((len(part), spent, cpu_seconds(pid) - cpu))
        ranked = sorted(runs, key=lambda name: -taken[name][0][2])
        runs = {n: runs[n] for n in {name.split()[0]: name for name in ranked}.values()}
        if 2 * time.monotonic() - start > end:
            break
    return taken


def table(taken: dict[str, list[Sample]], tokens: float) -> str:
    """Return a table with a row per run; tokens: average number per text."""
    sums = {name: [sum(column) for column in zip(*samples)] for name, samples in taken.items()}
    costs = {name: [x / n for x in times] for name, (n, *times) in sums.items()}
    ours = min((c for name, c in costs.items() if name.startswith("g4ir")), key=lambda c: c[1])
    rows = [
        [name, str(int(sums[name][0])), *(f"{x:.1f}" for x in sums[name][1:])]
        + [f"{tokens / cost[0]:.0f}", *(f"{x / best:.2f}" for x, best in zip(cost, ours))]
        for name, cost in costs.items()
    ]
    return aligned([HEAD, *rows])


def compared(args: Any) -> str:
    """Return the table of this process's instruction set."""
    torch.set_num_threads(args.threads)
    folder, runs = folder_of(Path(args.folder), args.tokenizer), dict[str, tuple[Embed, int]]()
    with ExitStack() as stack, TemporaryDirectory() as scratch:
        for dtype in args.dtypes:
            options = INT8 if dtype == "int8" else {"dtype": dtype}
            engine = g4ir.build(None, out=Path(scratch, dtype), checkpoint=folder, **options)
            stack.enter_context(engine)
            runs[f"g4ir {dtype}"] = partial(engine.embed, task="none"), os.getpid()
        for d in (d for d in args.dtypes if d != "int8"):
            runs[f"sentence-transformers {d}"] = sentence_transformers(folder, d), os.getpid()
        if args.programs[0]:
            kind = "Q8_0" if "int8" in args.dtypes else "BF16"
            file = g4ir.export(folder, Path(scratch, "e.gguf"), format="gguf", dtype=kind)
            server = llama_server(args.programs[0], file, args.threads)
            runs[f"llama.cpp {kind}"] = stack.enter_context(server)
        texts = texts_of(engine.embedder.tokenizer, args.text, args.texts)
        tokens = sum(map(len, engine.embedder.tokenize(texts))) / len(texts)
        taken = measure(runs, texts, 60 * args.minutes - (time.monotonic() - START))
    isa, load = os.environ.get("G4IR_ISA") or "native", os.getloadavg()[0]
    head = f"{isa}: texts of {tokens:.0f} tokens, {args.threads} threads, load {load:.1f}"
    return f"{head}\n\n{table(taken, tokens)}"


def main() -> None:
    flags: Any = {"texts": 1000, "minutes": 6.0, "threads": 2, "isas": ("native", "avx2")}
    flags |= {"dtypes": ("bfloat16", "float32"), "programs": ("",), "tokenizer": None}
    args = arguments(__doc__, "folder", **flags, text=str(TEXT), name="embeddings")
    if [*args.isas] == [os.environ.get("G4IR_ISA") or "native"]:
        print(compared(args))
        return
    tables = []
    for isa, program in zip_longest(args.isas, args.programs[: len(args.isas)], fillvalue=""):
        words = [w for w in sys.argv if w != "--save"] + ["--isas", isa, "--programs", program]
        words += ["--minutes", str(args.minutes / len(args.isas))]
        env = os.environ | {"G4IR_ISA": isa.replace("native", "")}
        child = subprocess.run([sys.executable, *words], env=env, stdout=subprocess.PIPE, text=True)
        tables.append(child.stdout if child.returncode == 0 else f"{isa}: failed\n")
    finish(args, args.name, "\n".join(tables))


if __name__ == "__main__":
    main()
