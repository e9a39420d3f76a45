"""What every session owes to transformers, whichever backend runs it.

A `Subject` opens sessions on an oracle's weights; the laws compare what it returns with the
reference's logits. `built` makes one of an engine, the way of a user: a Hugging Face directory in,
logits out.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from g4ir.engine.engine import Engine
from g4ir.passes import PASSES
from g4ir.spec.record import Spec
from tests.configs import spec_called
from tests.oracle import Oracle, find_oracle, random_tokens, relative
from tests.runner import build_engine, open_session, with_chunk

MAX_SEQ, CHUNK = 128, 64
ROWS = 5  # of an engine for several sequences
#: chunk sizes by window and prompt length
CHUNKS: dict[str, Callable[[int, int], int]] = {
    "1": lambda w, n: 1,
    "W-1": lambda w, n: w - 1,
    "W": lambda w, n: w,
    "W+1": lambda w, n: w + 1,
    "2W": lambda w, n: 2 * w,
    "prime": lambda w, n: 11,
    "all": lambda w, n: n,
}


# --- subjects ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Subject:
    """What opens sessions of at most `batch` sequences: `open(rows, chunk)`."""

    oracle: Oracle
    batch: int
    open: Callable[[int, int], Any]

    @property
    def tokens(self) -> torch.Tensor:
        """Those of the oracle's texts that fit."""
        return self.oracle.tokens[: self.batch]

    @property
    def logits(self) -> torch.Tensor:
        return self.oracle.logits[: self.batch]

    def session(self, chunk: str | int) -> Any:
        """Return a session for `tokens`."""
        return self.open(len(self.tokens), self.size(chunk))

    def size(self, chunk: str | int) -> int:
        if isinstance(chunk, int):
            return chunk
        return CHUNKS[chunk](self.oracle.window, self.oracle.prompt)


def interpreted(oracle: Oracle, batch: int = 2, all_logits: bool = True, **options: Any) -> Subject:
    """The graphs after the passes, run by the interpreter."""
    return Subject(
        oracle, batch, lambda rows, chunk: open_session(oracle, rows, chunk, all_logits, **options)
    )


@dataclass(frozen=True)
class Case:
    """An engine. Equal limits let engines share compiled programs."""

    name: str
    rows: int = ROWS
    all_logits: bool = True
    skip: tuple[str, ...] = ()
    latent_kv: str = "off"
    chunk: int = CHUNK

    def __str__(self) -> str:
        passes = ["no-pass"] if self.skip == PASSES else [f"no-{p}" for p in self.skip]
        parts = [self.name, f"{self.rows}-rows", "all" if self.all_logits else "last", *passes]
        return "-".join(parts)

    @property
    def spec(self) -> Spec:
        return spec_called(self.name)


@dataclass(frozen=True)
class Built(Subject):
    """An engine as a subject."""

    engine: Engine


def built(
    case: Case, factory: Any, backend: str, oracle: Oracle | None = None, **options: Any
) -> Iterator[Built]:
    """Build the engine for the tests of one parameter, then remove it."""
    oracle, folder = oracle or find_oracle(case.spec), factory.mktemp("engine")
    limits = {"max_batch": case.rows, "max_seq": MAX_SEQ, "prefill_chunk": case.chunk}
    forms = {"all_logits": case.all_logits, "skip": case.skip, "latent_kv": case.latent_kv}
    engine = build_engine(oracle, folder, backend=backend, **limits, **forms, **options)

    def open_engine(rows: int, chunk: int) -> Any:
        return with_chunk(engine, min(chunk, case.chunk)).session(rows)

    yield Built(oracle, case.rows, open_engine, engine)
    engine.close()
    shutil.rmtree(folder)


# --- laws ---------------------------------------------------------------------------------------


def agrees(got: torch.Tensor, want: torch.Tensor, oracle: Oracle) -> None:
    """Every row of logits within the tolerance."""
    error = relative(got, want).max().item()
    assert error <= oracle.budget, f"{error:.2e} of rms, budget {oracle.budget:.2e}"


def prefill_then_decode(session: Any, tokens: torch.Tensor, prompt: int) -> torch.Tensor:
    """Return logits at every position: `prompt` tokens prefilled, the rest decoded."""
    outs = [session.prefill(tokens[:, :prompt], all_logits=True)]
    outs += [session.decode(column)[:, None] for column in tokens[:, prompt:].unbind(1)]
    return torch.cat(outs, 1)


def last_tokens(s: Subject, chunk: str | int, steps: int | None = None) -> None:
    """The last position of a prompt, then `steps` decode steps, else the whole text."""
    session, n = s.session(chunk), s.oracle.prompt
    end = s.tokens.shape[1] if steps is None else n + steps
    got = [session.prefill(s.tokens[:, :n])]
    got += [session.decode(column) for column in s.tokens[:, n:end].unbind(1)]
    agrees(torch.stack(got, 1), s.logits[:, n - 1 : end], s.oracle)


def ragged_rows(s: Subject) -> None:
    """Sequences that end in different chunks, an empty one, a second turn, then decoding."""
    oracle, w, rows = s.oracle, s.oracle.window, s.batch
    tokens = random_tokens(oracle.spec, rows, 5 * w, seed=9)
    session = s.open(rows, w + 1)
    first = cut(tokens, [3 * w + 1, 0, w + 3, 1, 2 * w + 2][:rows])
    second = cut(tokens.flip(1), [3, 2 * w, 0, 1, w + 4][:rows])
    held = [row[:0] for row in first]
    for turn in (first, second):
        got = session.prefill(*padded(turn))
        held = [torch.cat(pair) for pair in zip(held, turn, strict=True)]
        live = [i for i, row in enumerate(turn) if len(row)]
        agrees(got[live], by_row(oracle, [held[i] for i in live]), oracle)
        assert session.length.tolist() == [len(row) for row in held]
    step = tokens[:, -1]
    want = by_row(oracle, [torch.cat((row, t[None])) for row, t in zip(held, step, strict=True)])
    agrees(session.decode(step), want, oracle)


def by_row(oracle: Oracle, rows: list[torch.Tensor]) -> torch.Tensor:
    """Return the reference's last logits of each sequence, run alone."""
    return torch.stack([oracle.run(row[None])[0, -1] for row in rows])


def padded(rows: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return right-padded tokens and lengths; the padding is a token of its own."""
    lengths = torch.tensor([len(row) for row in rows])
    out = torch.full((len(rows), int(lengths.max())), 7)
    for i, row in enumerate(rows):
        out[i, : len(row)] = row
    return out, lengths


def cut(tokens: torch.Tensor, lengths: list[int]) -> list[torch.Tensor]:
    return [row[:n] for row, n in zip(tokens, lengths, strict=True)]
