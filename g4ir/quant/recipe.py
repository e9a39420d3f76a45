"""Quantisation configs: YAML files that map weights to formats.

    rules:
    - tensors: [embed.table, head.w]     # names of the graph's params; * stands for anything
      form: int8
    - tensors: [L*.attn.w*, L*.mlp.w_*]
      form: int4
      group: 64                          # values that share a scale; 0: the row
      scale: f16                         # dtype of the scales; `engine`: the engine's dtype
      otherwise: int8                    # if the groups, or the format's blocks, do not fit the row
    - tensors: [layers]                  # every matrix of the layers that no other rule names
      form: int8                         # `others`: every matrix outside of layers; `projections`:
                                         # these but for the token table of an encoder

A tensor without a rule is not quantised, and a router never is: rounded logits would choose other
experts. The built-in configs are such files in this folder. For a checkpoint that is already
quantised, a config describes its weights, and the build quantises nothing, unless with --set
requantize=on.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import yaml

from g4ir.errors import InputError
from g4ir.ir.names import layer_of
from g4ir.ops import OPS
from g4ir.ops.codecs import FORMATS
from g4ir.ops.types import Type
from g4ir.spec.reader import Index, Length, OneOf, Shaped, build, fail, read_tree

SUFFIXES = (".yaml", ".yml")
NONE = "none"
#: name of the config of a checkpoint that is already quantised; no file has it
FROM_CHECKPOINT = "checkpoint"
#: name of a config that --bits chose (builder/bits.py), and of its file in an engine
MEASURED, QUANT_FILE = "measured", "quant.yaml"
#: the token table, which is also the LM head of most decoders
TABLE = "embed.table"
#: max names per rule: more than a model has weights
MAX_NAMES = 10_000


@dataclass(frozen=True)
class Scheme:
    """Quantisation of a weight: format (ops/codecs.py), values that share a scale (0: the row), and
    dtype of the scales (None: the engine's)."""

    form: str
    group: int
    scale: str | None

    def attrs(self, dtype: str) -> Mapping[str, str | int]:
        """Return the attributes of the op `quantize` in an engine of this dtype."""
        return {"form": self.form, "group": self.group, "scale": self.scale or dtype}

    def nbytes(self, t: Type, dtype: str) -> int:
        """Return the bytes of a weight's codes and scales in an engine of this dtype."""
        outputs = OPS["quantize"].infer_types((t,), self.attrs(dtype))
        return sum(part.nbytes() for part in outputs)

    def fits(self, t: Type) -> bool:
        """Whether groups and the format's blocks divide the rows of a weight, and the format has
        groups of this size."""
        return not (int(t.shape[-1]) % self.row_multiple or self.group % FORMATS[self.form].share)

    @property
    def row_multiple(self) -> int:
        """Rows can be quantised if their length is a multiple of this number of values."""
        return math.lcm(self.group or 1, FORMATS[self.form].block_values)


#: default scheme of each format; int4 has bf16 scales as in QAT checkpoints; int3 and int2 are for
#: weights trained in 3 and 2 bits; int6, uint5, uint4, int3k and uint2 are GGUF's Q6_K, Q5_K, Q4_K,
#: Q3_K and Q2_K; int5, iq4, min4 and min5 its Q5_0, IQ4_NL, Q4_1 and Q5_1
SCHEMES = {
    "int8": Scheme("int8", 0, None),
    "int4": Scheme("int4", 32, "bf16"),
    "fp8": Scheme("fp8", 0, None),
    **{form: Scheme(form, 256, "f16") for form in ("int6", "uint5", "uint4", "int3k", "uint2")},
    "fp4": Scheme("fp4", 0, "f32"),
    **{form: Scheme(form, 32, "f16") for form in ("int5", "iq4", "min4", "min5", "int3", "int2")},
    **{form: Scheme(form, 0, "bf16") for form in ("nl4", "nl3", "nl2")},
}
_Pattern = Annotated[str, Shaped(r"[A-Za-z0-9_.*?]{1,100}", "L*.mlp.w_*")]
_FormatName = Annotated[str, OneOf(tuple(SCHEMES))]
#: `scale` of a rule for scales in the engine's dtype
ENGINE = "engine"
_Scale = Annotated[str, OneOf(("bf16", "f16", "f32", ENGINE))]


@dataclass(frozen=True)
class Rule:
    """Weights by name and their format; optionally, group size and dtype of scales other than the
    format's defaults (SCHEMES), and the format for rows that this one does not fit."""

    tensors: Annotated[tuple[_Pattern, ...], Length(1, MAX_NAMES)]
    form: _FormatName
    otherwise: _FormatName | None = None
    group: Index | None = None
    scale: _Scale | None = None

    def matches(self, name: str) -> bool:
        """Whether the rule names a weight, literally or by a pattern (* and ?)."""
        patterns = (p for p in self.tensors if "*" in p or "?" in p)
        return name in self.tensors or any(fnmatchcase(name, p) for p in patterns)

    @property
    def first(self) -> Scheme:
        """The preferred scheme, for rows that it fits."""
        default = SCHEMES[self.form]
        group = default.group if self.group is None else self.group
        scale = self.scale or default.scale
        return Scheme(self.form, group, None if scale == ENGINE else scale)

    def scheme(self, name: str, t: Type) -> Scheme:
        """Return the scheme of a weight: the preferred one, or that of `otherwise` if the first
        does not fit its rows; InputError if neither fits."""
        first, share = self.first, FORMATS[self.form].share
        for scheme in (first, *([SCHEMES[self.otherwise]] if self.otherwise else [])):
            if scheme.fits(t):
                return scheme
        form = f"{self.form} in groups of {first.group}" if first.group else self.form
        needs = f"rows of a multiple of {first.row_multiple}, found {t.shape[-1]}"
        if first.group % share:
            needs = f"groups of a multiple of {share}"
        fix = "leave it out of the rule, or give `otherwise: int8`"
        raise InputError(f"{name}: {form} needs {needs}; {fix}")


@dataclass(frozen=True)
class QuantConfig:
    """Quantisation config: rules from weights to formats; `name`: a built-in name, the user's file,
    FROM_CHECKPOINT or MEASURED."""

    rules: Annotated[tuple[Rule, ...], Length(1, 64)]
    name: str = ""

    @property
    def from_checkpoint(self) -> bool:
        """Whether the config describes an already quantised checkpoint."""
        return self.name == FROM_CHECKPOINT

    def to_yaml(self) -> str:
        """Return the config, which --bits chose, as YAML text."""
        given = [{k: v for k, v in asdict(r).items() if v is not None} for r in self.rules]
        rules = {"rules": [{**r, "tensors": [*r["tensors"]]} for r in given]}
        text = yaml.safe_dump(rules, sort_keys=False, width=100, default_flow_style=None)
        return f"# Formats that g4ir build --bits chose.\n{text}"

    def schemes(self, weights: Mapping[str, Type], is_encoder: bool = False) -> dict[str, Scheme]:
        """Return weight -> scheme. InputError for a rule without weights, a weight with two rules,
        and rows that a rule's formats do not fit."""
        schemes: dict[str, Scheme] = {}
        unnamed = {n for n in weights if not any(r.matches(n) for r in self.rules)}
        groups = {n: _groups(n, is_encoder) for n in unnamed}
        for rule in self.rules:
            members = {n for n in unnamed if groups[n] & set(rule.tensors)}
            names = [n for n in weights if rule.matches(n) or n in members]
            if not names:
                named = {n for n in weights if _groups(n, is_encoder) & set(rule.tensors)}
                no = "only weights that other rules name" if named else "no weight"
                raise InputError(self._says(rule, f"names {no}; {_weight_kinds(weights)}"))
            if twice := sorted(schemes.keys() & set(names)):
                problem = f"names {twice[0]}, and so does another rule; keep one"
                raise InputError(self._says(rule, problem))
            schemes |= {n: rule.scheme(n, weights[n]) for n in names}
        return schemes

    def _says(self, rule: Rule, problem: str) -> str:
        return f"quantisation config {self.name}: [{', '.join(rule.tensors)}] {problem}"


def _groups(name: str, is_encoder: bool) -> set[str]:
    if layer_of(name) is not None:
        return {"layers"}
    return {"others"} if is_encoder and name == TABLE else {"others", "projections"}


def _weight_kinds(weights: Iterable[str]) -> str:
    kinds = dict.fromkeys(re.sub(r"^L\d+", "L*", n) for n in weights)
    return f"weights are {', '.join(kinds)}"


def choose_config(
    requested: QuantConfig | None, stored: QuantConfig | None, source: object
) -> QuantConfig | None:
    """Return the requested config or the `stored` one of a quantised checkpoint or engine; None
    without either, InputError, which names the `source`, with both."""
    if stored and requested:
        why = f"{source} is quantised already"
        fix = "leave --quant out, or give the checkpoint that it was made from"
        raise InputError(f"--quant {requested.name}: {why}; {fix}")
    return stored or requested


@cache
def built_in_names() -> tuple[str, ...]:
    """Return the names of the configs in this package."""
    paths = (Path(f.name) for f in files(__package__).iterdir())
    return tuple(sorted(p.stem for p in paths if p.suffix == ".yaml"))


def find_quant_config(name_or_path: str | Path | None) -> QuantConfig | None:
    """Read a built-in config or a file; None for `none` or None. InputError for an unknown name,
    SpecError, with line and key, for an invalid file."""
    if name_or_path is None or str(name_or_path) == NONE:
        return None
    name = str(name_or_path)
    built_in = name in built_in_names()
    if not built_in and not name.endswith(SUFFIXES):
        names = ", ".join((NONE, *built_in_names()))
        raise InputError(f"--quant {name}: expected {names}, or a .yaml or .yml file")
    tree = read_tree(Path(__file__).with_name(f"{name}.yaml") if built_in else Path(name))
    if "name" in tree.entries:
        raise fail(tree.keys["name"], "name", "is taken from the file's name; leave it out")
    return QuantConfig(build(QuantConfig, tree).rules, Path(name).name)
