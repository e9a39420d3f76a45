"""Text to tokens and back, by the checkpoint's own tokenizer."""

from __future__ import annotations

from collections.abc import Sequence

from g4ir.chat.prompt import Vocabulary, text_ids
from g4ir.engine.engine import Engine
from g4ir.errors import InputError
from g4ir.weights.tensorfile import parse_json


class Codec:
    """The checkpoint's tokenizer, for raw prompts (without a chat template). `few`: few short texts
    will be encoded, for which the engine's tokenizer index suffices."""

    def __init__(self, engine: Engine, few: bool = False) -> None:
        tokenizer = engine.text_tokenizer() if few else engine.tokenizer()
        self.vocabulary = Vocabulary(tokenizer, engine.spec.chat)
        self.tokenizer = self.vocabulary.tokenizer
        path, template = (engine.path / n for n in ("tokenizer_config.json", "chat_template.jinja"))
        config = parse_json(path, path.read_bytes()) if path.is_file() else {}
        self.room, self.bos = engine.limits.max_seq, engine.spec.tokens.bos
        #: whether the checkpoint has a chat template
        self.instructed = template.is_file() or bool(config.get("chat_template"))

    def encode(self, text: str, name: str, bos: bool = True) -> list[int]:
        """Return the token ids of a raw prompt, in which special tokens are parsed, with exactly
        one BOS (if the model has one) at the start, whatever the tokenizer's files say, since all
        models of the family were trained with it. `bos` False: none is added. InputError, which
        begins with `name`, for a text that is not valid UTF-8 or certainly exceeds the engine's
        context."""
        self.vocabulary.check_length(len(text), self.room, name)
        try:
            text.encode()
        except UnicodeEncodeError as e:
            raise InputError(f"{name}: not UTF-8 at character {e.start}") from None
        ids = text_ids(self.tokenizer, [text], bos, name)[0]
        if self.bos is None or not bos:
            return ids
        if ids[:1] != [self.bos]:
            return [self.bos, *ids]
        return ids[1:] if ids[:2] == [self.bos] * 2 else ids

    def has_turns(self, ids: Sequence[int]) -> bool:
        """Whether there are control tokens after the first token, as from a chat template."""
        return not self.vocabulary.strings.keys().isdisjoint(ids[1:])

    def plain(self, text: str) -> list[int]:
        """Return the token ids of a part of a prompt. No BOS or EOS is added; special tokens that
        the text spells are parsed (unlike in `Vocabulary.plain`)."""
        return text_ids(self.tokenizer, [text], False, "a part of the prompt")[0]

    def spell(self, token: int) -> str:
        """Return the string of a special token, which encodes to this token alone; InputError if
        there is none."""
        text: str | None = self.tokenizer.id_to_token(token)
        if not text or self.plain(text) != [token]:
            raise InputError(
                f"the engine's tokenizer.json has no special token {token}, which "
                f"text with media needs: give token ids"
            )
        return text
