"""The command line in process, and a small checkpoint with a tokenizer to give it."""

from __future__ import annotations

import contextlib
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from g4ir.cli import main
from tests.cases import TABLES
from tests.engines import random_checkpoint

BUILD = ("build", "--backend", "reference", "--max-seq", "64", "--prefill-chunk", "16")
PROMPT = "ab w3 a€ w7"


@dataclass(frozen=True)
class Outcome:
    """What a command returned and wrote."""

    code: int
    out: str
    err: str

    @property
    def message(self) -> str:
        """The error message; fails where there is none, several, or a traceback."""
        assert "Traceback" not in self.err, self.err
        lines = [x for x in self.err.splitlines() if "error: " in x]
        assert len(lines) == 1 and lines[0].startswith("g4ir: error: "), self.err
        return self.err[self.err.index(lines[0]) :]


def g4ir(*words: str | Path) -> Outcome:
    """Run one command, as a shell would."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main([str(w) for w in words])
        except SystemExit as stop:  # --help, --version
            assert isinstance(stop.code, int)
            code = stop.code
    return Outcome(code, out.getvalue(), err.getvalue())


def refused(*words: str | Path, code: int = 2) -> str:
    """The message of a command that fails, with nothing on stdout."""
    outcome = g4ir(*words)
    assert outcome.code == code, outcome
    assert not outcome.out
    return outcome.message


def ok(*words: str | Path) -> str:
    """stdout of a command that succeeds."""
    outcome = g4ir(*words)
    assert outcome.code == 0, outcome
    return outcome.out


def built(out: Path, *words: str | Path) -> Path:
    """An engine directory by the reference backend."""
    ok(*BUILD, *words, "--out", out)
    return out


def text_checkpoint(folder: Path) -> Path:
    """One in two shards, with the unused K and V of shared layers, a tokenizer that falls back
    to bytes as Gemma's does, and generation settings."""
    random_checkpoint(folder, shards=2, dead=True)
    tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": True}))
    (folder / "generation_config.json").write_text(json.dumps(TABLES["cli"]["generation config"]))
    return folder


def tokenizer() -> Any:
    """512 tokens: special ones, every byte, and a few words."""
    words = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{i:02X}>" for i in range(256))]
    words += ["▁", "a", "b", "ab", "▁a", *(f"▁w{i}" for i in range(247))]
    return bpe(words, [("a", "b"), ("▁", "a")], ["<pad>", "<eos>", "<bos>"])


def bpe(words: list[str], merges: list[tuple[str, str]], special: list[str]) -> Any:
    """A tokenizer of these tokens that falls back to bytes, as Gemma's does."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    vocab = {word: i for i, word in enumerate(words)}
    made = Tokenizer(
        models.BPE(vocab, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    )
    made.normalizer = normalizers.Replace(" ", "▁")
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    made.add_special_tokens(special)
    return made
