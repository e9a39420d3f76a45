"""`g4ir embed`: embeddings of texts, images, audio and video."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

from g4ir.errors import InputError
from g4ir.ui import console
from g4ir.ui.files import write_file

from .common import MediaFlags, OnEngine, Programs, output
from .verb import flag, json_flag

#: suffixes of --out, which select the format
NPY, JSONL = ".npy", ".jsonl"
#: example of an --input line with media
EXAMPLE = '{"content": ["a red car", {"type": "image", "image": "car.png"}]}'
#: number of an embedding's values that are printed
PREVIEW = 4
#: maximum characters of a text that are printed
WIDTH = 40


class Embed(OnEngine):
    """Print or write embeddings of texts, images, audio and video."""

    text: list[str] = flag("text to embed", (), "TEXT")
    input: str | None = flag(
        'a text per line of FILE.txt, {"text"} or {"content"} of FILE.jsonl; - for stdin',
        None,
        "FILE",
    )
    media: MediaFlags
    task: str | None = flag("task that selects a prompt: query, document, .. or none", None, "NAME")
    dims: int | None = flag("size of the embeddings (Matryoshka)", None, "N")
    truncate: bool = flag("cut texts beyond the context (default: refuse)", False)
    out: str | None = flag(
        "write the embeddings: float32 [texts, size], or JSON lines", None, "FILE.npy|.jsonl"
    )
    json: bool = json_flag()
    load: Programs

    def __post_init__(self) -> None:
        if self.out is not None and not self.out.endswith((NPY, JSONL)):
            raise InputError(f"--out {self.out}: expected a name that ends in {NPY} or {JSONL}")
        if self.out is not None and not Path(self.out).absolute().parent.is_dir():
            raise InputError(f"--out {self.out}: its directory does not exist")
        if self.out is not None and self.json:
            raise InputError("give --out or --json, not both")
        if (self.input is None) == (not self.text and not self.media.files):
            raise InputError("give either --input, or some of --text, --image, --video and --audio")
        self.media.check(self.input and "--input", EXAMPLE)

    def __call__(self) -> int:
        settings = {k: v for k, v in self.media.settings().items() if v is not None}
        files = [{"type": kind, kind: path, **settings} for kind, path in self.media.files]
        texts: list[Any] = [*self.text, *files] if self.input is None else read_texts(self.input)
        with self.opened(self.load, encoder=True, media=self.media.files) as (engine, progress):
            parts = engine.embedder.embed(
                texts,
                self.task,
                self.dims,
                self.truncate,
                lambda done: progress(f"{done}/{len(texts)} texts"),
            )
            if self.out is not None:
                size, start = self.dims or engine.spec.embedding_size, time.perf_counter()
                _write(Path(self.out), parts, (len(texts), size))
                seconds = time.perf_counter() - start
                rate = f"{len(texts) / seconds:.1f} texts/s"
                console.say(f"{self.out}: {len(texts)} texts in {seconds:.1f} s, {rate}")
                return 0
            rows = [row for part in parts for row in part.tolist()]
            progress.stop()
            facts = {"model": engine.spec.name, "dims": len(rows[0]), "embeddings": rows}
            return output(self.json, facts, "" if self.json else "".join(_lines(texts, rows)))


def read_texts(source: str) -> list[Any]:
    """Return the texts of a file, or of stdin for `-`: strings, or lists of parts for lines with
    `content`. InputError names the line that has no text."""
    name = "stdin" if source == "-" else source
    try:
        raw = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
        text = raw.decode("utf-8-sig")
    except OSError as e:
        raise InputError(f"--input {source}: {e.strerror}") from None
    except UnicodeDecodeError as e:
        raise InputError(f"{name}: not UTF-8 at byte {e.start}") from None
    as_json = source.endswith(JSONL) or (source == "-" and raw.lstrip()[:1] == b"{")
    # Not splitlines: a text may contain carriage returns, form feeds and U+2028.
    lines = text.replace("\r\n", "\n").split("\n")
    if not lines[-1]:
        lines.pop()
    rows = enumerate(lines, 1)
    texts = [_text(f"{name}: line {i}", x, as_json) for i, x in rows if x.strip() or not as_json]
    if not texts:
        raise InputError(f"{name} has no texts")
    return texts


def _text(where: str, line: str, as_json: bool) -> Any:
    text: Any = line
    if as_json:
        try:
            values = json.loads(line)
        except ValueError as e:
            raise InputError(f"{where}: not JSON: {str(e)[:100]}") from None
        values = values if isinstance(values, dict) else {}
        text, parts = values.get("text"), values.get("content")
        if isinstance(text, str) == isinstance(parts, list):
            expected = f'an object with "text", or with "content", such as {EXAMPLE}'
            raise InputError(f"{where}: expected {expected}; found {line[:60]!r}")
        text = parts if text is None else text
    if not (text.strip() if isinstance(text, str) else text):
        raise InputError(f"{where} is empty; leave it out")
    return text


def _write(path: Path, parts: Iterator[Any], shape: tuple[int, int]) -> None:
    """Write the embeddings `parts`, all of them of `shape` [texts, size], as they are computed. The
    file appears only once it is complete."""
    import numpy as np

    if path.suffix == NPY:
        head = BytesIO()
        header = {"descr": "<f4", "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(head, header)
        write_file(path, [head.getvalue()], (part.numpy().tobytes() for part in parts))
        return
    rows = (row for part in parts for row in part.tolist())
    lines = (json.dumps({"index": i, "embedding": row}) for i, row in enumerate(rows))
    write_file(path, (f"{line}\n".encode() for line in lines))


def _lines(texts: list[Any], rows: list[list[float]]) -> Iterator[str]:
    """Yield a line per text: the start of its embedding, and from the second text on its similarity
    to the first."""
    for i, (text, row) in enumerate(zip(texts, rows, strict=True)):
        start = " ".join(f"{x:+.4f}" for x in row[:PREVIEW])
        text = text[text["type"]] if isinstance(text, dict) else str(text)
        short = text if len(text) <= WIDTH else f"{text[: WIDTH - 3]}..."
        like = f"  similarity {sum(a * b for a, b in zip(row, rows[0])):+.4f}" if i else ""
        yield f"{short!r}: {len(row)} values, {start} ...{like}\n"
