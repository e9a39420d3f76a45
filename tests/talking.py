"""Conversations whose answers are dictated. As a program: the command line with such answers, at
the terminal that it is given.

    python -m tests.talking '{"answers": [["<|channel>", "thought\\nhm", ...]]}' chat ENGINE ...
"""

from __future__ import annotations

import fcntl
import json
import sys
import termios
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from g4ir.backends.sampling import LogitsMask
from g4ir.chat import Vocabulary
from g4ir.chat.special_tokens import CALL, CALL_END, CHANNEL, CHANNEL_END, TURN, TURNS
from g4ir.cli import main
from g4ir.generate.conversation import ChatSession
from tests.cases import TABLES

#: one call, and a thought with content behind it
CALLING = [CALL, "call:weather{city:", '<|"|>', "oslo", '<|"|>', "}", CALL_END, "<|tool_response>"]
THINKING = [CHANNEL, "thought\nhm", CHANNEL_END, "hi €"]
TOOLS = TABLES["talking"]["tools"]


@dataclass
class Dictated:
    """Allows the tokens of an answer, one by one, unless another rule forces one."""

    tokens: Sequence[int]
    size: int
    pause_s: float
    rule: LogitsMask | None

    def mask(self, generated: Sequence[int]) -> Any:
        time.sleep(self.pause_s)
        if self.rule and (forced := self.rule.mask(generated)) is not None:
            return forced
        if len(generated) >= len(self.tokens):
            return None
        out = torch.zeros(self.size, dtype=torch.bool)
        out[self.tokens[len(generated)]] = True
        return out


def ids(vocabulary: Vocabulary, texts: Sequence[str]) -> list[int]:
    """The tokens of texts, of which some are control tokens, and the end of the turn."""
    out: list[int] = []
    for text in (*texts, TURNS[vocabulary.turn or TURN]):
        control = vocabulary.controls.get(text)
        out += vocabulary.plain(text) if control is None else [control]
    return out


def dictate(
    setattr: Callable[[Any, str, Any], None], answers: Sequence[Sequence[str]], pause_s: float = 0.0
) -> None:
    """Let the model say these answers, one after the other, whatever it is asked, and then what it
    likes."""
    made, left = ChatSession._sampling, iter(answers)

    def dictated(self: ChatSession, settings: Any, prompt: Any = None) -> Any:
        found = made(self, settings, prompt)
        texts = next(left, None) if prompt else None
        if texts is None:
            return found
        size = self.engine.spec.text.vocab_size
        rule = Dictated(ids(self.vocabulary, texts), size, pause_s, found.allowed)
        return replace(found, allowed=rule)

    setattr(ChatSession, "_sampling", dictated)


if __name__ == "__main__":
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # whose Ctrl-C is ours
    dictate(setattr, **json.loads(sys.argv[1]))
    sys.exit(main(sys.argv[2:]))
