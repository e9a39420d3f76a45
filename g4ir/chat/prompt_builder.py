"""From what users say to ids, by the template and the tokenizer of a checkpoint alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from g4ir.errors import InputError

from .messages import kind_of
from .prompt import Vocabulary
from .template import Template, make_prompt


def check_chats(vocabulary: Vocabulary, folder: Path) -> None:
    """Raise InputError where the tokenizer of a folder has no turns of a chat."""
    if not vocabulary.chats:
        raise InputError(
            f"{folder}: its tokenizer has no turns of a chat: this model was not made for chats"
        )


@dataclass(frozen=True)
class PromptBuilder:
    """A template, and the tokenizer of what it writes."""

    template: Template
    vocabulary: Vocabulary

    @staticmethod
    def open(folder: Path, tokenizer: Any, form: str) -> PromptBuilder:
        """Read the template of a folder, or take the built-in one of this form. InputError where
        the tokenizer has no turns of a chat."""
        vocabulary = Vocabulary(tokenizer)
        check_chats(vocabulary, folder)
        return PromptBuilder(Template.open(folder, form), vocabulary)

    @property
    def ends(self) -> frozenset[int]:
        """Ids behind which the model's turn is over."""
        return self.vocabulary.ends

    def prompts(self, given: Any, kinds: Sequence[str] = ()) -> list[Any]:
        """Return the ids of a prompt, or of each of several; one is a text or a list of messages.
        A single text is of a message that has media of `kinds`, sounds behind it."""
        if isinstance(given, str):
            parts = [{"type": kind} for kind in kinds]
            sounds = [p for p in parts if p["type"] == "audio"]
            seen = [p for p in parts if p not in sounds]
            content = [*seen, {"type": "text", "text": given}, *sounds] if parts else given
            return self._ids([{"role": "user", "content": content}])
        if not isinstance(given, list | tuple) or not given:
            what = "an empty list" if isinstance(given, list | tuple) else kind_of(given)
            raise InputError(f"prompt: expected a text or messages, found {what}")
        if isinstance(given[0], dict):
            return self._ids(given)
        return [self.prompts(one) if isinstance(one, str) else self._ids(one) for one in given]

    def _ids(self, messages: Any) -> list[int]:
        return self.vocabulary.encode(make_prompt(messages, None, self.template))
