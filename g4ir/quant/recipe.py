"""Reads recipes: YAML files that say which weights are held in which form.

    rules:
    - tensors: [embed.table, head.w]     # names of the graph's params; * stands for anything
      form: int8
    - tensors: [L*.attn.w*, L*.mlp.w_*]
      form: int4
      group: 64                          # numbers that share a scale; 0: all of a row
      scale: f16                         # dtype of the scales; `engine`: what it computes in
      otherwise: int8                    # where the groups do not divide a row

A tensor that no rule names stays as it is. The built-in recipes are such files, beside this one.
The recipe of a checkpoint that is quantised already says what it holds: nothing is quantised.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated

from g4ir.errors import InputError
from g4ir.ops import OPS
from g4ir.ops.codecs import FORMATS
from g4ir.ops.types import Type
from g4ir.spec.reader import Index, Length, OneOf, Shaped, build, fail, parse_tree, read_tree

SUFFIXES = (".yaml", ".yml")
NONE = "none"
#: name of the recipe of a checkpoint that is quantised already; no file is called so
HELD = "checkpoint"
#: names of one rule: room for each weight of a model
MOST_NAMES = 10_000


@dataclass(frozen=True)
class Scheme:
    """How a weight is held: a form (ops/codecs.py), how many numbers share a scale (0: a row), and
    the scales' dtype (None: the engine's)."""

    form: str
    group: int
    scale: str | None

    def attrs(self, dtype: str) -> Mapping[str, str | int]:
        """Return the attributes of `quantize` in an engine of this dtype."""
        return {"form": self.form, "group": self.group, "scale": self.scale or dtype}

    def nbytes(self, t: Type, dtype: str) -> int:
        """Return the bytes of the codes and scales of a weight in an engine of this dtype."""
        made = OPS["quantize"].infer_types((t,), self.attrs(dtype))
        return sum(part.nbytes() for part in made)

    def fits(self, t: Type) -> bool:
        """Whether groups divide the rows of a weight, and codes fill bytes."""
        return int(t.shape[-1]) % self.least == 0 and self.group % FORMATS[self.form].share == 0

    @property
    def least(self) -> int:
        """Numbers that a row must be a multiple of."""
        return math.lcm(self.group or 1, FORMATS[self.form].block_values)


#: formats that a quantisation config names; weights trained for 4 bits have scales in bf16, and the
#: last four are Q6_K, Q5_K, Q4_K and Q5_0 of GGUF files
SCHEMES = {
    "int8": Scheme("int8", 0, None),
    "int4": Scheme("int4", 32, "bf16"),
    "fp8": Scheme("fp8", 0, None),
    **{form: Scheme(form, 256, "f16") for form in ("int6", "uint5", "uint4")},
    "int5": Scheme("int5", 32, "f16"),
}
_Pattern = Annotated[str, Shaped(r"[A-Za-z0-9_.*?]{1,100}", "L*.mlp.w_*")]
_Form = Annotated[str, OneOf(tuple(SCHEMES))]
#: scales in what the engine computes in
ENGINE = "engine"
_Scale = Annotated[str, OneOf(("bf16", "f16", "f32", ENGINE))]


@dataclass(frozen=True)
class Rule:
    """Weights by name, and their form, with a group and a dtype of scales other than the form's
    own; another form where groups do not divide their rows."""

    tensors: Annotated[tuple[_Pattern, ...], Length(1, MOST_NAMES)]
    form: _Form
    otherwise: _Form | None = None
    group: Index | None = None
    scale: _Scale | None = None

    def matches(self, name: str) -> bool:
        patterns = (p for p in self.tensors if "*" in p or "?" in p)
        return name in self.tensors or any(fnmatchcase(name, p) for p in patterns)

    @property
    def first(self) -> Scheme:
        """The scheme of weights whose rows it divides."""
        own = SCHEMES[self.form]
        group = own.group if self.group is None else self.group
        scale = self.scale or own.scale
        return Scheme(self.form, group, None if scale == ENGINE else scale)

    def scheme(self, name: str, t: Type) -> Scheme:
        """Return how a weight is held; InputError where groups do not divide its rows."""
        schemes = [self.first, *([SCHEMES[self.otherwise]] if self.otherwise else [])]
        for scheme in schemes:
            if scheme.fits(t):
                return scheme
        raise InputError(
            f"{name}: rows of {t.shape[-1]} do not divide into the groups of {self.first.least} of "
            f"{self.form}; leave it out, or add `otherwise: int8`"
        )


@dataclass(frozen=True)
class Recipe:
    """The rules of a build; `name` is what the user called them."""

    rules: Annotated[tuple[Rule, ...], Length(1, 64)]
    name: str = ""

    @property
    def held(self) -> bool:
        """Whether weights come quantised, so that none is quantised at build."""
        return self.name == HELD

    def schemes(self, weights: Mapping[str, Type]) -> dict[str, Scheme]:
        """Return weight -> scheme. InputError for a rule that names none of the weights, and for a
        weight that two rules name."""
        found: dict[str, Scheme] = {}
        for rule in self.rules:
            names = [n for n in weights if rule.matches(n)]
            if not names:
                raise InputError(self._says(rule, f"names no weight; {_known(weights)}"))
            if twice := sorted(found.keys() & set(names)):
                raise InputError(self._says(rule, f"names {twice[0]}, as another rule does"))
            found |= {n: rule.scheme(n, weights[n]) for n in names}
        return found

    def _says(self, rule: Rule, what: str) -> str:
        return f"recipe {self.name}: [{', '.join(rule.tensors)}] {what}"


def _known(weights: Iterable[str]) -> str:
    kinds = dict.fromkeys(
        n.replace(n.split(".")[0], "L*", 1) if n[0] == "L" else n for n in weights
    )
    return f"weights are {', '.join(kinds)}"


def one_recipe(given: Recipe | None, held: Recipe | None, place: object) -> Recipe | None:
    """Return the recipe that was given, or that of a checkpoint that is quantised already;
    InputError for both."""
    if held and given:
        why = f"{place} is quantised already"
        fix = "leave --quant out, or give the checkpoint that it was made from"
        raise InputError(f"--quant {given.name}: {why}; {fix}")
    return held or given


@cache
def built_in() -> tuple[str, ...]:
    """Return the names of the recipes that come with the program."""
    found = (Path(f.name) for f in files(__package__).iterdir())
    return tuple(sorted(p.stem for p in found if p.suffix == ".yaml"))


def find_recipe(given: str | Path | None) -> Recipe | None:
    """Return the recipe of a name or a file; None for none at all. InputError lists the names,
    SpecError names file, line and key."""
    if given is None or str(given) == NONE:
        return None
    name = str(given)
    if name in built_in():
        data = (files(__package__) / f"{name}.yaml").read_bytes()
        return Recipe(build(Recipe, parse_tree(data, f"{name}.yaml")).rules, name)
    if not name.endswith(SUFFIXES):
        names = ", ".join((NONE, *built_in()))
        raise InputError(f"--quant {name}: expected {names}, or a file that ends in .yaml")
    tree = read_tree(Path(name))
    if "name" in tree.entries:
        raise fail(tree.keys["name"], "name", "is the file's own; leave it out")
    return Recipe(build(Recipe, tree).rules, Path(name).name)
