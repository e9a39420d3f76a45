"""20,000 texts on which tokenizers are compared: the machine's own files, and generated ones, which
are the same on every machine."""

from __future__ import annotations

import gzip
import random
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from gettext import GNUTranslations
from itertools import islice
from pathlib import Path

COUNT, LONGEST = 20_000, 600
SYSTEM = Path("/usr/share")
#: first and last character of letters: Latin to Georgian, Ethiopic, kana, Chinese, Hangul, ...
LETTERS = (
    *((0x41, 0x7A), (0xC0, 0x24F), (0x370, 0x3FF), (0x400, 0x52F), (0x531, 0x58A), (0x5D0, 0x5EA)),
    *((0x620, 0x669), (0x904, 0x96F), (0x985, 0x9E3), (0xA85, 0xAE3), (0xB85, 0xBEF)),
    *((0xC05, 0xC6F), (0xE01, 0xE5B), (0xE81, 0xEDD), (0xF40, 0xF87), (0x1000, 0x109F)),
    *((0x10A0, 0x10FF), (0x1200, 0x135A), (0x1780, 0x17DD), (0x1820, 0x1877), (0x3041, 0x30FF)),
    *((0x4E00, 0x9FFF), (0xAC00, 0xD7A3), (0x10330, 0x1034A), (0x20000, 0x2A6DF)),
)
SPACES = ("\n", "\t", "\r\n", "\v", "\u00a0", "\u2003", "\u3000", "\u200b", "x", ".", "é", "日")
MARKUP = (
    *(
        "<b>",
        "</b>",
        "<table>",
        "</td>",
        "<h1>",
        "<br>",
        "&amp;",
        "<unused5>",
        "<unused5",
        "[@BOS@]",
    ),
    *(
        "<start_of_turn>",
        "<end_of_turn>",
        "<start_of_turn>user\n",
        "<bos>",
        "<eos>",
        "<pad>",
        "<unk>",
    ),
    *("<start_of_image>", "<end_of_image>", "[multimodal]", "<mask>", "<0x0A>"),
    *("<|turn>", "<turn|>", "<", ">", "<<", " ", "\n", "a", "text ", "ü"),
)
EMOJI = (
    "👍",
    "👍🏽",
    "👩\u200d💻",
    "🏳️\u200d🌈",
    "🇫🇷",
    "🇩🇪",
    "❤️",
    "☺",
    "1️⃣",
    "e\u0301",
    "ﷺ",
    " ",
    "ok",
)
NUMBERS = (
    "0",
    "1",
    "12",
    "345",
    "99999",
    "-",
    "+",
    "e",
    ".",
    ",",
    " ",
    "%",
    "€",
    "²",
    "½",
    "٣",
    "४",
)


def texts() -> Iterator[tuple[str, str]]:
    """Yield (kind, text)."""
    own = _windows("files", _files(), 12_000)
    made = [pair for kind, make, count in GENERATED for pair in _generated(kind, make, count)]
    yield from islice((*made, *own), COUNT)


def _generated(
    kind: str, make: Callable[[random.Random], str], count: int
) -> Iterator[tuple[str, str]]:
    rng = random.Random(kind)
    return ((kind, make(rng)) for _ in range(count))


def _windows(kind: str, files: Sequence[Path], count: int) -> Iterator[tuple[str, str]]:
    """Yield parts of files that can be read, as often as it takes."""
    rng, left, missed = random.Random(kind), count, 0
    while left and missed < count:
        text = _read(rng.choice(files))
        at, size = rng.randrange(max(1, len(text))), rng.randrange(20, LONGEST)
        if part := text[at : at + size]:
            left -= 1
            yield kind, part
        else:
            missed += 1


def _files() -> list[Path]:
    """Sources of the standard library, then messages, locales and manuals in many languages."""
    library = Path(sysconfig.get_path("stdlib"))
    own = [p for p in library.rglob("*.py") if "site-packages" not in p.parts]
    patterns = ("locale/*/LC_MESSAGES/*.mo", "i18n/locales/*", "man/**/*.gz", "perl/**/*.p[lm]")
    return sorted(own)[:3000] + [p for each in patterns for p in sorted(SYSTEM.glob(each))[:3000]]


def _read(path: Path) -> str:
    try:
        if path.suffix == ".mo":
            with path.open("rb") as file:
                return "\n".join(str(t) for t in vars(GNUTranslations(file))["_catalog"].values())
        raw = path.read_bytes()
        return (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode()
    except (OSError, ValueError):
        return ""


def _words(rng: random.Random) -> str:
    first, last = rng.choice(LETTERS)
    sizes = [rng.randint(1, 9) for _ in range(rng.randint(1, 60))]
    return " ".join("".join(chr(rng.randint(first, last)) for _ in range(n)) for n in sizes)


def _any(rng: random.Random) -> str:
    """Assigned and unassigned characters, without halves of pairs."""
    codes = (rng.choice((rng.randrange(0xD800), rng.randrange(0xE000, 0x20000))) for _ in range(60))
    return "".join(map(chr, codes))


def _of(parts: Sequence[str], most: int = 1) -> Callable[[random.Random], str]:
    """Return a maker of texts of these parts, each up to `most` times in a row."""
    return lambda rng: "".join(rng.choice(parts) * rng.randint(1, most) for _ in range(40))


#: kind, what makes a text, count
GENERATED: tuple[tuple[str, Callable[[random.Random], str], int], ...] = (
    ("words", _words, 3000),
    ("any characters", _any, 1500),
    ("white space", _of((" ", *SPACES), 9), 1000),
    ("markup", _of(MARKUP), 1000),
    ("emoji", _of(EMOJI, 3), 500),
    ("numbers", _of(NUMBERS), 500),
    ("one letter", lambda rng: rng.choice("ae =-\n\té日") * rng.randint(1, 5000), 300),
    ("U+2581", _of(("\u2581", " ", "a", "\n"), 3), 100),
    ("<image_soft_token>", _of(("<image_soft_token>", " ", "a", "\n"), 3), 100),
)
