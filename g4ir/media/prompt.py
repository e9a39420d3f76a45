"""Places media in prompts.

    text, note = mark("What is <image>?", ["image"], media.kinds, tokens, spell)
    text = expand_text(text, softs, tokens, spell)      # once they are: the reference's text
    ids = tokenizer.encode(text).ids
    check_given(ids, ["image"], tokens, media.kinds)    # before the media are read
    (ids,) = place_rows([ids], softs, tokens, encode, media.kinds)

A medium is one placeholder in a prompt, which is expanded between marks of begin and end, or one
placeholder for each of its soft tokens; each frame of a video has its own marks, with its time
before them (rule 38, and `Gemma4Processor.replace_*_token` of transformers). Text is expanded
before it is tokenised: a frame's time may share a token with the text before it. Ids and markers of
kinds that an engine does not take are plain tokens and text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache, partial

from g4ir.errors import InputError
from g4ir.model.media import AUDIO, IMAGE, KINDS, VIDEO, placeholders
from g4ir.spec.parts import Tokens

from .soft import Soft, count_error, counts

Encode = Callable[[str], list[int]]  # text -> ids, without bos
Spell = Callable[[int], str]  # a special id -> its own string
_MARKER = re.compile(rf"(\\?)<({IMAGE}|{VIDEO}|{AUDIO})>")


def marks(kind: str, tokens: Tokens) -> tuple[int | None, int | None]:
    """Return the ids before and after the placeholders of an image, a frame or an audio clip."""
    return (tokens.boa, tokens.eoa) if kind == AUDIO else (tokens.boi, tokens.eoi)


def expansion(soft: Soft, tokens: Tokens) -> Iterator[int | str]:
    """Yield the expansion of a medium's single placeholder: ids, and the text before each frame."""
    begin, end = marks(soft.kind, tokens)
    holder = placeholders(tokens)[soft.kind]
    for i, piece in enumerate(soft.pieces):
        if soft.times:
            yield f"{' ' if i else ''}{soft.times[i]} "
        ids = (begin, *[holder] * len(piece), end)
        yield from (t for t in ids if t is not None)


# --- ids --------------------------------------------------------------------------------------


def check_given(
    ids: Sequence[int], given: Sequence[str], tokens: Tokens, kinds: Collection[str] = KINDS
) -> None:
    """Raise InputError for fewer placeholders of a kind than media of it, or some without any.
    `given` are the kinds of the media."""
    for kind, holder in placeholders(tokens, kinds).items():
        found, media = ids.count(holder), given.count(kind)
        if found < media or (found and not media):
            raise count_error(kind, holder, found, media)


def place_rows(
    rows: Sequence[Sequence[int]],
    softs: Sequence[Soft],
    tokens: Tokens,
    encode: Encode | None = None,
    kinds: Collection[str] = KINDS,
) -> list[list[int]]:
    """Return the ids of prompts with every placeholder of `softs`, which belong to theirs row by
    row.

    Placeholders of a kind stay as they are if there are as many as soft tokens, and are expanded in
    order if as many as media; else InputError names the kind and the numbers. Marks around a
    placeholder are not doubled. `encode` None leaves out the times of frames; `kinds`: those that
    the engine takes.
    """
    soft, left = counts(softs), dict[int, Iterator[Soft]]()  # by placeholders of whole media
    holders: Mapping[str, int | None] = {**dict.fromkeys(soft), **placeholders(tokens, kinds)}
    for kind, holder in holders.items():
        found = sum(t == holder for row in rows for t in row)
        media, count = [s for s in softs if s.kind == kind], soft.get(kind, 0)
        if found != count and (holder is None or found != len(media)):
            raise count_error(kind, holder, found, len(media), count)
        if found != count and holder is not None:
            left[holder] = iter(media)
    return [_placed(row, left, tokens, encode) for row in rows]


def _placed(
    ids: Sequence[int], left: Mapping[int, Iterator[Soft]], tokens: Tokens, encode: Encode | None
) -> list[int]:
    out: list[int] = []
    given = iter(range(len(ids)))
    for i in given:
        if ids[i] not in left:
            out.append(ids[i])
            continue
        soft = next(left[ids[i]])
        begin, end = marks(soft.kind, tokens)
        if begin is not None and out[-1:] == [begin]:
            out.pop()
        if end is not None and [*ids[i + 1 : i + 2]] == [end]:
            next(given)
        for part in expansion(soft, tokens):
            if isinstance(part, int):
                out.append(part)
            elif encode:
                out += encode(part)
    return out


def times_left_out(
    before: Sequence[Sequence[int]], after: Sequence[Sequence[int]], tokens: Tokens
) -> bool:
    """Whether `place_rows` without `encode` expanded a video, which then has no times."""
    video = (sum(t == tokens.video for row in rows for t in row) for rows in (before, after))
    return len({*video}) > 1


NO_TIMES = "no tokenizer: the frames of videos come without their times"


# --- text -------------------------------------------------------------------------------------


def mark(
    text: str,
    given: Sequence[str],
    taken: Collection[str],
    tokens: Tokens,
    spell: Spell,
    bos: str | None = None,
) -> tuple[str, str | None]:
    """Return the text with the tokenizer's own placeholders for `<image>`, `<video>` and `<audio>`,
    and a note, if there is one.

    `given`: kinds of the media in order; `taken`: those that the engine takes. As many markers of a
    kind count as it has media; further ones are text, with a note, and so is one after a backslash,
    without. Media of a kind without placeholder in the text come first (after a `bos` that is
    spelled out). InputError if there are markers, and too few.
    """
    holders = placeholders(tokens, taken)
    room = {k: _markers(k, text, given.count(k), partial(spell, h)) for k, h in holders.items()}
    left, notes = dict(room), list[str]()

    def swapped(found: re.Match[str]) -> str:
        escaped, kind = found.groups()
        if kind not in holders:
            return found[0]
        if escaped:
            return found[0][1:]
        left[kind] -= 1
        return spell(holders[kind]) if left[kind] >= 0 else found[0]

    text = _MARKER.sub(swapped, text)
    for kind, n in left.items():
        if n < 0:
            extra = f"{-n} of {room[kind] - n} <{kind}> in the prompt are text"
            notes.append(f"{extra}: {given.count(kind)} --{kind} given")
    strings = {k: spell(holders[k]) for k in given if k in holders}
    first = [k for k in given if k in strings and strings[k] not in text]
    if first:
        at = len(bos) if bos and text.startswith(bos) else 0
        text = text[:at] + "".join(strings[k] for k in first) + text[at:]
        names = " and ".join(f"<{k}>" for k in dict.fromkeys(first))
        notes.append(f"the prompt has no {names}: put before the text")
    return text, "; ".join(notes) or None


def _markers(kind: str, text: str, media: int, holder: Callable[[], str]) -> int:
    found = sum(m[2] == kind and not m[1] for m in _MARKER.finditer(text))
    room = media - text.count(holder()) if found and media else media
    if found and found < room:
        raise InputError(
            f"{found} <{kind}> for {media} media: give as many with --{kind} (in JSON lines: see "
            f"their fields), or write \\<{kind}> for the characters themselves"
        )
    return max(0, min(found, room))


def expand_text(text: str, softs: Sequence[Soft], tokens: Tokens, spell: Spell) -> str:
    """Return the text with every placeholder of a whole medium expanded, for kinds with as many
    placeholders as media; `place_rows` checks the others."""
    patterns, left, spell = [], {}, cache(spell)
    for kind in dict.fromkeys(s.kind for s in softs):
        media = [s for s in softs if s.kind == kind]
        holder = spell(placeholders(tokens)[kind])
        if text.count(holder) == len(media):
            ends = ("" if m is None else f"(?:{re.escape(spell(m))})?" for m in marks(kind, tokens))
            patterns.append(f"(?P<{kind}>{re.escape(holder).join(ends)})")
            left[kind] = iter(media)

    def expanded(found: re.Match[str]) -> str:
        parts = expansion(next(left[found.lastgroup or ""]), tokens)
        return "".join(p if isinstance(p, str) else spell(p) for p in parts)

    return re.sub("|".join(patterns), expanded, text) if patterns else text
