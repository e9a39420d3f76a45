"""A variant as data: frozen dataclasses from YAML or from a Hugging Face config.json.

A spec has what differs between variants; the wiring of a block is in `g4ir/model/decoder.py`. Field
names follow the upstream configuration if it has a single name for the field.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import yaml

from g4ir.errors import InputError, SpecError
from g4ir.spec.huggingface import read_config
from g4ir.spec.huggingface_write import config_of
from g4ir.spec.reader import (
    Map,
    Scalar,
    Where,
    build,
    convert,
    did_you_mean,
    fail,
    hints_of,
    is_null,
    join,
    merge,
    read_tree,
    together,
)

from .parts import TOWERS, Variant, slug
from .rules import canonical, problems

SCHEMA = 1

MAX_EXTENDS = 8
SUFFIXES = (".yaml", ".yml")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Spec(Variant):
    """A variant that is read from, and written as, YAML or a Hugging Face config."""

    def __repr__(self) -> str:
        media = {"vision": self.vision, "audio": self.audio}
        parts = "".join(f", {k}" for k, v in media.items() if v is not None)
        return (
            f"<Spec {self.name}: {self.model_type}, {self.text.num_hidden_layers} layers, "
            f"hidden {self.text.hidden_size}, {self.dtype}{parts}>"
        )

    @classmethod
    def from_hf(cls, source: str | Path | dict[str, Any], name: str | None = None) -> Spec:
        """Read the spec of a Hugging Face config: a config.json, its directory, or the parsed dict.

        Raises SpecError naming the key. `name` defaults to the directory's name, for a dict to
        `from-hf`.
        """
        variant = read_config(source, name)
        return cls(**{f.name: getattr(variant, f.name) for f in fields(variant)})

    def to_hf(self) -> dict[str, Any]:
        """Return the config.json of this spec; SpecError names a field that it cannot express."""
        return config_of(self)

    def to_yaml(self) -> str:
        """Return a spec file that loads to this spec; fields at their default are left out."""
        body = {"schema": SCHEMA, **_pruned(self)}
        return yaml.safe_dump(body, sort_keys=False, width=100, default_flow_style=None)

    def digest(self) -> str:
        """Return SHA-256 of the canonical JSON of all fields."""
        text = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


def _pruned(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_pruned(v) for v in value]
    if not is_dataclass(value):
        return value
    values = ((f.name, getattr(value, f.name), f) for f in fields(value))
    return {name: _pruned(v) for name, v, f in values if v != _default(f)}


def _default(f: Any) -> Any:
    return f.default_factory() if f.default_factory is not MISSING else f.default


NOT_INHERITED = ("name", "hub")  # these identify one model and its weights


def specs_dir() -> Path:
    """Return the folder of shipped specs: package `g4ir.specs`, or `specs/` of the repository."""
    package = importlib.util.find_spec("g4ir.specs")
    if package is not None and package.submodule_search_locations:
        return Path(next(iter(package.submodule_search_locations)))
    return Path(__file__).resolve().parents[2] / "specs"


#: suffix of a draft model's spec name: `e2b` has `e2b-assistant`
DRAFTER = "-assistant"


def spec_names() -> tuple[str, ...]:
    """Return the sorted names of shipped specs, without draft models."""
    return tuple(name for name in _shipped() if not name.endswith(DRAFTER))


def drafter_names() -> tuple[str, ...]:
    """Return the sorted names of shipped draft models' specs."""
    return tuple(name for name in _shipped() if name.endswith(DRAFTER))


def _shipped() -> list[str]:
    return sorted(p.stem for p in specs_dir().glob("*.yaml"))


def load_spec(name_or_path: str | Path, alone: bool = False) -> Spec:
    """Read the spec of a shipped variant (`e2b`) or of a YAML file (`my/variant.yaml`). With
    `alone`, it may not extend another.

    Raises SpecError for an unknown name, and with file, line and key for errors in a file.
    """
    path = spec_path(name_or_path)
    tree = read_tree(path)
    if alone and "extends" in tree.entries:
        raise fail(tree.keys["extends"], "extends", "the spec of an engine must not extend another")
    return _spec_from_tree(_with_bases(tree, path, ()), path.stem)


def need_model(spec: Spec) -> Spec:
    """Return the spec; InputError if it is a draft model's."""
    if spec.drafter:
        raise InputError(
            f"{spec.name} is a drafter, which runs only with its target model: give that (`build "
            f"--drafter` with `default` or a path adds a drafter, `show --phase draft` prints it)"
        )
    return spec


def spec_path(name_or_path: str | Path) -> Path:
    """Return the file of a spec's name or path. SpecError if the name is not shipped."""
    text = str(name_or_path)
    is_path = isinstance(name_or_path, Path) or "/" in text or "\\" in text
    if is_path or text.endswith(SUFFIXES):
        return Path(text)
    names = _shipped()
    if text in names:
        return specs_dir() / f"{text}.yaml"
    near = did_you_mean(text, names)
    raise SpecError(
        f"no spec is called {text[:80]!r}{near or '; one of ' + ', '.join(spec_names())}"
        " (or give the path of a .yaml file)"
    )


def _with_bases(tree: Map, path: Path, visited: tuple[Path, ...]) -> Map:
    """Return the tree merged over its bases, without `schema` and `extends`, and without the bases'
    NOT_INHERITED."""
    _check_schema(tree)
    entries = {k: v for k, v in tree.entries.items() if k not in ("schema", "extends")}
    local = Map(entries, tree.keys, tree.where)
    if "extends" not in tree.entries:
        return local
    where = tree.keys["extends"]
    base_path = _base_path(convert(tree.entries["extends"], str, "extends"), path, where)
    visited = (*visited, path.resolve())
    if base_path.resolve() in visited:
        raise fail(where, "extends", f"{base_path.name} closes a cycle; leave one `extends` out")
    if len(visited) > MAX_EXTENDS:
        problem = f"{base_path.name} is one base too many: at most {MAX_EXTENDS} may follow"
        raise fail(where, "extends", f"{problem} one another; shorten the chain")
    base = _with_bases(read_tree(base_path), base_path, visited)
    inherited = {k: v for k, v in base.entries.items() if k not in NOT_INHERITED}
    return merge(Map(inherited, base.keys, base.where), local)


def _base_path(base: str, path: Path, where: Where) -> Path:
    if base.endswith(SUFFIXES):
        return path.parent / base
    try:
        return spec_path(base)
    except SpecError as err:
        raise fail(where, "extends", str(err)) from None


def _check_schema(tree: Map) -> None:
    if "schema" not in tree.entries:
        raise fail(tree.where, "schema", f"is missing; begin the file with `schema: {SCHEMA}`")
    if convert(tree.entries["schema"], int, "schema") != SCHEMA:
        raise fail(tree.keys["schema"], "schema", f"expected {SCHEMA}, which this version reads")


def _spec_from_tree(tree: Map, stem: str) -> Spec:
    hints = _spec_hints(tree)
    if "name" not in tree.entries:
        name = Scalar(slug(stem), False, tree.where)
        tree = Map({"name": name, **tree.entries}, tree.keys, tree.where)
    spec = canonical(build(Spec, tree, hints=hints))
    if violations := [fail(_find_line(tree, path), path, text) for path, text in problems(spec)]:
        raise together(violations)
    return spec


def _find_line(tree: Map, path: str) -> Where:
    """Return the position of the longest prefix of the key path that this file, not a base, has."""
    node: Any = tree
    where = tree.where
    for key in path.split("."):
        if not isinstance(node, Map) or key not in node.entries:
            break
        where = node.keys[key] if node.keys[key].file == tree.where.file else where
        node = node.entries[key]
    return where


def _spec_hints(tree: Map) -> dict[str, Any]:
    """Return the annotations of Spec with the towers of its model_type."""
    hints = hints_of(Spec)
    node = tree.entries.get("model_type")
    if node is None or is_null(node):
        return hints | _towers(next(iter(TOWERS)))  # `build` reports the missing key
    model_type = convert(node, hints["model_type"], "model_type")
    towers = _towers(model_type)
    for name in ("vision", "audio"):
        if name in tree.entries and name not in towers and not is_null(tree.entries[name]):
            raise fail(tree.keys[name], name, f"a {model_type} model has none; leave it out")
    return hints | towers


def _towers(model_type: str) -> dict[str, Any]:
    return {name: cls | None for name, cls in TOWERS.get(model_type, {}).items()}


def diff_specs(a: Spec, b: Spec) -> list[tuple[str, Any, Any]]:
    """Return differing fields as (key path, value in a, value in b), in field order."""
    old, new = _flat(a.to_dict()), _flat(b.to_dict())
    keys = [*old, *(k for k in new if k not in old)]
    return [(k, old.get(k), new.get(k)) for k in keys if old.get(k) != new.get(k)]


def _flat(value: dict[str, Any], path: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, item in value.items():
        out |= _flat(item, join(path, key)) if isinstance(item, dict) else {join(path, key): item}
    return out
