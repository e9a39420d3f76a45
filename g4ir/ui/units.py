"""Parses and prints sizes and token counts in human-readable form."""

from __future__ import annotations

import math
import re

from g4ir.errors import InputError

KIB = 1 << 10
_COUNT = re.compile(r"([0-9](?:_?[0-9]){0,14})([kKmM]?)")
_FACTORS = {"": 1, "k": KIB, "m": KIB * KIB}


def parse_count(text: str, name: str) -> int:
    """`4096`, `4_096`, `4K` (4096), `1M` -> int; InputError, with `name`, for 0 and other texts."""
    match = _COUNT.fullmatch(text.strip())
    value = int(match[1]) * _FACTORS[match[2].lower()] if match else 0
    if value < 1:
        expected = "expected a whole number above 0, such as 4096 or 32K"
        raise InputError(f"{name} {text[:40]!r}: {expected}")
    return value


def parse_counts(text: str, name: str) -> list[int]:
    """`4K,32K` -> [4096, 32768]"""
    return [parse_count(word, name) for word in text.split(",")]


def count_text(n: int) -> str:
    """4096 -> 4K, 5000 -> 5000, 262144 -> 256K: exact"""
    for size, letter in ((KIB * KIB, "M"), (KIB, "K")):
        if n and n % size == 0:
            return f"{n // size}{letter}"
    return str(n)


def rounded_count(n: int) -> str:
    """Return n as text, from 10K on rounded down to a multiple of 1K: 93440 -> 91K; `-` for 0."""
    return f"{n // KIB}K" if n >= 10 * KIB else str(n) if n else "-"


def size_text(n: int) -> str:
    """Bytes in KiB, MiB or GiB, with three digits or more: 20.8 GiB, 512 MiB, 2048 GiB"""
    sizes = {"GiB": KIB**3, "MiB": KIB**2}
    unit = next((unit for unit, size in sizes.items() if n >= size / 2), "KiB")
    value = n / sizes.get(unit, KIB)
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {unit}"


#: prefixes of decimal units
PREFIXES = {"P": 1e15, "T": 1e12, "G": 1e9, "M": 1e6, "k": 1e3, "": 1.0, "m": 1e-3, "u": 1e-6}
SMALLEST_UNIT = (1e-9, "n")


def scale(value: float) -> tuple[float, str]:
    """Return (size, prefix) of the decimal unit in which a value has up to three digits before the
    point: 62e9 -> (1e9, "G")."""
    return next(
        ((size, p) for p, size in PREFIXES.items() if value >= 0.9995 * size), SMALLEST_UNIT
    )


def si(value: float, unit: str) -> str:
    """Three digits and a decimal prefix: 62.3 GB, 14.5 ms; without a prefix a whole number: 13 s;
    0 has no unit."""
    if not value:
        return "0"
    size, prefix = scale(value)
    scaled = value / size
    digits = 0 if size == 1 else min(max(2 - math.floor(math.log10(scaled) + 1e-4), 0), 2)
    return f"{scaled:.{digits}f} {prefix}{unit}"
