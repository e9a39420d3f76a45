"""Places media in prompts.

    text, note = mark("What is <image>?", ["image"], media.kinds, tokens, spell)
    text = expand_text(text, softs, tokens, spell)     # softs: encoded media; () to check a prompt
    ids = tokenizer.encode(text).ids
    check_placeholders(ids, ["image"], tokens, media.kinds)
    (ids,) = expand_placeholders([ids], softs, tokens, encode, media.kinds)

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
Spell = Callable[[int], str]  # a special token's id -> its string
_MARKER = re.compile(rf"(\\?)<({IMAGE}|{VIDEO}|{AUDIO})>")


def marks(kind: str, tokens: Tokens) -> tuple[int | None, int | None]:
    """Return the ids before and after the placeholders of an image, a frame or an audio clip; None
    for one that the tokenizer lacks."""
    return (tokens.boa, tokens.eoa) if kind == AUDIO else (tokens.boi, tokens.eoi)


def expansion(soft: Soft, tokens: Tokens) -> Iterator[int | str]:
    """Yield the expansion of a medium's single placeholder: token ids, and before each frame of a
    video its time as text, if there are times."""
    begin, end = marks(soft.kind, tokens)
    holder = placeholders(tokens)[soft.kind]
    for i, piece in enumerate(soft.pieces):
        if soft.times:
            yield f"{' ' if i else ''}{soft.times[i]} "
        ids = (begin, *[holder] * len(piece), end)
        yield from (t for t in ids if t is not None)


# --- ids --------------------------------------------------------------------------------------


def check_placeholders(
    ids: Sequence[int], media_kinds: Sequence[str], tokens: Tokens, kinds: Collection[str] = KINDS
) -> None:
    """Raise InputError for fewer placeholders of a kind than media, or placeholders without media.
    `media_kinds`: the kind of each medium."""
    for kind, holder in placeholders(tokens, kinds).items():
        count, media = ids.count(holder), media_kinds.count(kind)
        if count < media or (count and not media):
            raise count_error(kind, holder, count, media)


def expand_placeholders(
    rows: Sequence[Sequence[int]],
    softs: Sequence[Soft],
    tokens: Tokens,
    encode: Encode | None = None,
    kinds: Collection[str] = KINDS,
) -> list[list[int]]:
    """Expand the placeholders of prompts to one per soft token; `softs` are in the order of the
    prompts' placeholders.

    Placeholders of a kind stay as they are if there are as many as soft tokens, and are expanded in
    order if as many as media; else InputError names the kind and the numbers. Marks around a
    placeholder are not doubled. `encode` None leaves out the times of frames; `kinds`: those that
    the engine takes.
    """
    soft, pending = counts(softs), dict[int, Iterator[Soft]]()  # one placeholder per medium
    holders: Mapping[str, int | None] = {**dict.fromkeys(soft), **placeholders(tokens, kinds)}
    for kind, holder in holders.items():
        count = sum(t == holder for row in rows for t in row)
        media, soft_count = [s for s in softs if s.kind == kind], soft.get(kind, 0)
        if count != soft_count and (holder is None or count != len(media)):
            raise count_error(kind, holder, count, len(media), soft_count)
        if count != soft_count and holder is not None:
            pending[holder] = iter(media)
    return [_placed(row, pending, tokens, encode) if pending else [*row] for row in rows]


def _placed(
    ids: Sequence[int], pending: Mapping[int, Iterator[Soft]], tokens: Tokens, encode: Encode | None
) -> list[int]:
    out: list[int] = []
    indices = iter(range(len(ids)))
    for i in indices:
        if ids[i] not in pending:
            out.append(ids[i])
            continue
        soft = next(pending[ids[i]])
        begin, end = marks(soft.kind, tokens)
        if begin is not None and out[-1:] == [begin]:
            out.pop()
        if end is not None and [*ids[i + 1 : i + 2]] == [end]:
            next(indices)
        for part in expansion(soft, tokens):
            if isinstance(part, int):
                out.append(part)
            elif encode:
                out += encode(part)
    return out


def lacks_frame_times(
    before: Sequence[Sequence[int]], after: Sequence[Sequence[int]], tokens: Tokens
) -> bool:
    """Whether `expand_placeholders` without `encode` expanded a video from `before` to `after`
    (token ids), so that its frames have no times in the prompt."""
    video = (sum(t == tokens.video for row in rows for t in row) for rows in (before, after))
    return len({*video}) > 1


NO_TIMES = "no tokenizer: the frames of videos come without their times"


# --- text -------------------------------------------------------------------------------------


def mark(
    text: str,
    media_kinds: Sequence[str],
    supported: Collection[str],
    tokens: Tokens,
    spell: Spell,
    bos: str | None = None,
) -> tuple[str, str | None]:
    """Return the text with the tokenizer's own placeholders for `<image>`, `<video>` and `<audio>`,
    and a note for the user, or None.

    `media_kinds`: kinds of the media in order; `supported`: kinds that the engine takes. As many
    markers of a kind are replaced as it has media without a placeholder in the text; further ones
    stay text, which the note says; a marker after a backslash loses the backslash and stays text.
    The placeholders of kinds that have none in the text are put before it (after a spelled-out
    `bos`). InputError if a kind has markers, but fewer than media without a placeholder.
    """
    holders = placeholders(tokens, supported)
    quotas = {
        k: _markers(k, text, media_kinds.count(k), partial(spell, holder))
        for k, holder in holders.items()
    }
    remaining, notes = dict(quotas), list[str]()

    def swapped(match: re.Match[str]) -> str:
        escaped, kind = match.groups()
        if kind not in holders:
            return match[0]
        if escaped:
            return match[0][1:]
        remaining[kind] -= 1
        return spell(holders[kind]) if remaining[kind] >= 0 else match[0]

    text = _MARKER.sub(swapped, text)
    for kind, n in remaining.items():
        if n < 0:
            extra = f"{-n} of {quotas[kind] - n} <{kind}> in the prompt are text"
            notes.append(f"{extra}: {media_kinds.count(kind)} --{kind} given")
    strings = {k: spell(holders[k]) for k in media_kinds if k in holders}
    first = [k for k in media_kinds if k in strings and strings[k] not in text]
    if first:
        at = len(bos) if bos and text.startswith(bos) else 0
        text = text[:at] + "".join(strings[k] for k in first) + text[at:]
        names = " and ".join(f"<{k}>" for k in dict.fromkeys(first))
        notes.append(f"the prompt has no {names}: these media are put before the text")
    return text, "; ".join(notes) or None


def _markers(kind: str, text: str, media: int, holder: Callable[[], str]) -> int:
    count = sum(m[2] == kind and not m[1] for m in _MARKER.finditer(text))
    quota = media - text.count(holder()) if count and media else media
    if count and count < quota:
        raise InputError(
            f"{count} <{kind}> for {media} media: write one for each medium, or none; \\<{kind}> "
            f"stands for the characters themselves"
        )
    return max(0, min(count, quota))


def expand_text(text: str, softs: Sequence[Soft], tokens: Tokens, spell: Spell) -> str:
    """Expand the placeholders of each kind that has as many of them as media; `expand_placeholders`
    checks the other kinds."""
    patterns, pending, spell = [], {}, cache(spell)
    for kind in dict.fromkeys(s.kind for s in softs):
        media = [s for s in softs if s.kind == kind]
        holder = spell(placeholders(tokens)[kind])
        if text.count(holder) == len(media):
            ends = ("" if m is None else f"(?:{re.escape(spell(m))})?" for m in marks(kind, tokens))
            patterns.append(f"(?P<{kind}>{re.escape(holder).join(ends)})")
            pending[kind] = iter(media)

    def expanded(match: re.Match[str]) -> str:
        parts = expansion(next(pending[match.lastgroup or ""]), tokens)
        return "".join(p if isinstance(p, str) else spell(p) for p in parts)

    return re.sub("|".join(patterns), expanded, text) if patterns else text
