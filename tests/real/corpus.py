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
from typing import Any

import yaml

COUNT, LONGEST = 20_000, 600
SYSTEM = Path("/usr/share")
PARTS: dict[str, list[Any]] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())


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
    except (OSError, ValueError, IndexError):  # IndexError: a catalog without a rule of plurals
        return ""


def _words(rng: random.Random) -> str:
    first, last = rng.choice(PARTS["letters"])
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
    ("white space", _of((" ", *PARTS["spaces"]), 9), 1000),
    ("markup", _of(PARTS["markup"]), 1000),
    ("emoji", _of(PARTS["emoji"], 3), 500),
    ("numbers", _of(PARTS["numbers"]), 500),
    ("one letter", lambda rng: rng.choice("ae =-\n\té日") * rng.randint(1, 5000), 300),
    ("U+2581", _of(("\u2581", " ", "a", "\n"), 3), 100),
    ("<image_soft_token>", _of(("<image_soft_token>", " ", "a", "\n"), 3), 100),
)
