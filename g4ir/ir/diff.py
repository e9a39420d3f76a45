"""Differences of two graphs: of the stages of a pipeline, or of two variants.

Names are stable, so lines are matched by what a node makes from what; where only types and
attributes differ, one line shows both. Lines are grouped by layer, and layers that differ in the
same way are listed once.
"""

from __future__ import annotations

import difflib
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .graph import Graph
from .text import print_graph

#: of the text model, or of a tower
_LAYER = re.compile(r"%(?:vision\.|audio\.)?L(\d+)\.")
_NUMBER = re.compile(r"\bL(\d+)\b")
_TOKEN = re.compile(r"[A-Za-z0-9_.%+-]+|.")


@dataclass(frozen=True)
class Change:
    """A line that only one graph has, or that both have with other types or attributes."""

    layer: int | None
    before: str | None
    after: str | None

    def text(self) -> str:
        """Return lines: `-` and `+` for one graph's, `~` for both's, with `old->new` inside."""
        if self.before is None or self.after is None:
            return f"- {self.before}" if self.after is None else f"+ {self.after}"
        return f"~ {_merged(self.before, self.after)}"


def diff_graphs(a: Graph, b: Graph) -> list[Change]:
    """Return what changes from `a` to `b`: first outside the layers, then layer by layer."""
    one, two = _by_layer(a), _by_layer(b)
    layers = sorted(one.keys() | two.keys(), key=lambda n: -1 if n is None else n)
    return [c for n in layers for c in _changes(n, one.get(n, []), two.get(n, []))]


def diff_text(changes: Iterable[Change]) -> str:
    """Return changes under a heading per layer, which names all layers with the same changes."""
    groups = defaultdict[int | None, list[str]](list)
    for c in changes:
        groups[c.layer].append(c.text())
    alike = defaultdict[tuple[str, ...], list[int | None]](list)
    for layer, lines in groups.items():
        alike[tuple(_relative(line, layer) for line in lines)].append(layer)
    parts = ([f"@@ {_heading(layers)} @@", *groups[layers[0]]] for layers in alike.values())
    return "".join(f"{line}\n" for lines in parts for line in lines)


def _by_layer(g: Graph) -> dict[int | None, list[str]]:
    groups = defaultdict[int | None, list[str]](list)
    for line in print_graph(g).splitlines()[1:-1]:
        groups[_layer(line)].append(line.strip())
    return groups


def _layer(line: str) -> int | None:
    """Return the layer of the first value of a line; none where it makes values of many."""
    found = {int(n) for n in _LAYER.findall(line.split(" = ")[0])}
    return min(found) if 0 < len(found) < 3 else None


def _key(line: str) -> str:
    """Return a line without its types and attributes."""
    return re.split(r"(?: \{.*\})?: ", line)[0]


def _changes(layer: int | None, a: Sequence[str], b: Sequence[str]) -> list[Change]:
    out: list[Change] = []
    matcher = difflib.SequenceMatcher(None, [*map(_key, a)], [*map(_key, b)], autojunk=False)
    for tag, i, j, k, m in matcher.get_opcodes():
        if tag == "equal":
            pairs = zip(a[i:j], b[k:m], strict=True)
            out += [Change(layer, x, y) for x, y in pairs if x != y]
        else:
            # A line that only moved, in an order that means nothing, is no change.
            out += [Change(layer, x, None) for x in a[i:j] if x not in b]
            out += [Change(layer, None, y) for y in b[k:m] if y not in a]
    return out


def _merged(before: str, after: str) -> str:
    """`f32[8,B]`, `f32[C,B]` -> `f32[8->C,B]`"""
    one, two = _TOKEN.findall(before), _TOKEN.findall(after)
    if len(one) == len(two):
        return "".join(x if x == y else f"{x}->{y}" for x, y in zip(one, two, strict=True))
    out = ""
    for tag, i, j, k, m in difflib.SequenceMatcher(None, one, two, autojunk=False).get_opcodes():
        old, new = "".join(one[i:j]), "".join(two[k:m])
        out += old if tag == "equal" else f"{old}->{new}"
    return out


def _relative(line: str, layer: int | None) -> str:
    """Name this layer and its neighbours by distance; others, such as donors, stay."""

    def name(m: re.Match[str]) -> str:
        distance = int(m[1]) - (layer or 0)
        return f"L{distance:+d}" if abs(distance) < 2 else m[0]

    return line if layer is None else _NUMBER.sub(name, line)


def _heading(layers: Sequence[int | None]) -> str:
    """`[0, 2, 3, 4]` -> `L0, L2 to L4`"""
    runs: list[str] = []
    for n in layers:
        if n is None:
            return "outside the layers"
        if n - 1 not in layers:
            runs.append(f"L{n}")
        elif n + 1 not in layers:
            runs[-1] += f" to L{n}"
    return ", ".join(runs)
