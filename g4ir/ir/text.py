"""Prints a graph, and reads it back. `parse_graph(print_graph(g)) == g`, exactly.

graph decode {
  input %embeds: f32[B,1,64]
  param %L0.attn.wq: f32[128,64]
  state %L0.k: f32[8,B,2,32]
  %L0.in = rms_norm(%embeds, %L0.in_norm) {eps=1e-06}: f32[B,1,64]
  output %logits
  next %L0.k = %L0.k.next
}
"""

from __future__ import annotations

import re

from g4ir.errors import ParseError
from g4ir.ops.base import parse_attrs
from g4ir.ops.types import parse_type

from .graph import Attr, Graph, Node, Value
from .verify import verify

_NAME = r"%([A-Za-z0-9_./]+)"
_SOURCE = re.compile(rf"(input|param|state) {_NAME}: (\S+)")
_NODE = re.compile(r"(%.+?) = ([a-z_0-9]+)\(([^()]*)\)(?: \{(.*)\})?: (.+)")
_NEXT = re.compile(rf"next {_NAME} = {_NAME}")
_OUTPUT = re.compile(rf"output {_NAME}")


def print_graph(g: Graph) -> str:
    """Return the text of a graph; `parse_graph` reads it back."""
    return str(g)


class _Reader:
    def __init__(self, text: str) -> None:
        self.lines = text.split("\n")
        self.at = 0
        self.values: dict[str, Value] = {}

    def fail(self, message: str) -> ParseError:
        return ParseError(f"line {self.at}: {message}")

    def line(self) -> str:
        """Return the next line that is not empty, without its comment."""
        while self.at < len(self.lines):
            text = self.lines[self.at].split("#")[0].strip()
            self.at += 1
            if text:
                return text
        raise self.fail("the text ends before the closing }")

    def define(self, name: str, type_text: str) -> Value:
        try:
            value = Value(name, parse_type(type_text))
        except ValueError as e:
            raise self.fail(str(e)) from e
        if self.values.setdefault(name, value) is not value:
            raise self.fail(f"%{name} is defined twice")
        return value

    def use(self, name: str) -> Value:
        if name not in self.values:
            raise self.fail(f"%{name} is not defined before its use")
        return self.values[name]

    def names(self, text: str) -> list[str]:
        parts = [p.strip() for p in text.split(",")] if text.strip() else []
        for p in parts:
            if not re.fullmatch(_NAME, p):
                raise self.fail(f"expected a value such as %x, found {p!r}")
        return [p[1:] for p in parts]

    def attrs(self, text: str) -> dict[str, Attr]:
        try:
            return dict(parse_attrs(text))
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as e:
            raise self.fail(f"expected attributes such as eps=1e-06, found {text!r}: {e}") from e

    def node(self, match: re.Match[str]) -> Node:
        outs, op, ins, attrs, types = match.groups()
        inputs = tuple(self.use(n) for n in self.names(ins))
        names, type_texts = self.names(outs), types.split(", ")
        if len(names) != len(type_texts):
            raise self.fail(f"{len(names)} results but {len(type_texts)} types")
        outputs = tuple(self.define(n, t) for n, t in zip(names, type_texts, strict=True))
        return Node(op, inputs, outputs, self.attrs(attrs) if attrs else {})


def parse_graph(text: str) -> Graph:
    """Read a printed graph and verify it. ParseError names the line; VerifyError as in `verify`."""
    r = _Reader(text)
    head = re.fullmatch(r"graph ([A-Za-z0-9_.]+) \{", r.line())
    if not head:
        raise r.fail("expected `graph NAME {`")
    sources: dict[str, list[Value]] = {"input": [], "param": [], "state": []}
    nodes: list[Node] = []
    outputs: list[Value] = []
    nexts: dict[str, Value] = {}
    while (line := r.line()) != "}":
        if match := _SOURCE.fullmatch(line):
            sources[match[1]].append(r.define(match[2], match[3]))
        elif match := _NODE.fullmatch(line):
            nodes.append(r.node(match))
        elif match := _OUTPUT.fullmatch(line):
            outputs.append(r.use(match[1]))
        elif match := _NEXT.fullmatch(line):
            if match[1] in nexts:
                raise r.fail(f"next of %{match[1]} is given twice")
            nexts[match[1]] = r.use(match[2])
        else:
            kinds = "input, param, state, a node, output, next or }"
            raise r.fail(f"expected {kinds}, found {line!r}")
    inputs, params, state = (tuple(values) for values in sources.values())
    g = Graph(head[1], inputs, params, state, tuple(nodes), tuple(outputs), nexts)
    verify(g)
    return g
