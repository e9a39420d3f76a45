"""Random changes of trees of dicts and lists, for tests of what reads such trees."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import strategies as st

#: a value taken away, put in, changed, moved by a little (which often stays legal), copied from
#: elsewhere, or exchanged with another of its parent
HOW = ("drop", "add", "change", "nudge", "nudge", "copy", "swap")


def junk(*words: str) -> st.SearchStrategy[Any]:
    """Trees of any values, with these words among their texts and keys."""
    text = st.one_of(st.text(max_size=12), st.sampled_from(words))
    large = st.sampled_from([512, 1024, 262144, 2**31, 2**63, -(2**70), 10**40])
    return st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(-3, 600), large, st.floats(), text),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=3),
        max_leaves=6,
    )


def places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of all nodes below the root."""
    out = []
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        out.append((*path, key))
        out += places(value, (*path, key)) if isinstance(value, dict | list) else []
    return out


def at(tree: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def mutate(
    data: st.DataObject, tree: Any, values: st.SearchStrategy[Any], names: st.SearchStrategy[str]
) -> Any:
    """A copy with one to three changes; new values and new keys are drawn from these."""
    tree = copy.deepcopy(tree)
    for _ in range(data.draw(st.integers(1, 3))):
        if not (where := places(tree)):
            break
        *path, key = data.draw(st.sampled_from(where))
        _change(data, tree, at(tree, tuple(path)), key, (where, values, names))
    return tree


def _change(data: st.DataObject, tree: Any, parent: Any, key: Any, given: Any) -> None:
    where, values, names = given
    how, old = data.draw(st.sampled_from(HOW)), parent[key]
    if how == "drop":
        del parent[key]
    elif how == "add" and isinstance(parent, dict):
        parent[data.draw(names)] = data.draw(values)
    elif how == "add":
        parent.append(data.draw(values))
    elif how == "nudge" and isinstance(old, int | float):
        parent[key] = old + data.draw(st.sampled_from((-2, -1, 1, 2, 64)))
    elif how == "nudge" and isinstance(old, str):
        parent[key] = data.draw(st.sampled_from((old + "x", old[:-1], old.upper(), old[::-1])))
    elif how == "copy":
        parent[key] = copy.deepcopy(at(tree, data.draw(st.sampled_from(where))))
    elif how == "swap":
        other = data.draw(
            st.sampled_from([*parent] if isinstance(parent, dict) else range(len(parent)))
        )
        parent[key], parent[other] = parent[other], old
    else:
        parent[key] = copy.deepcopy(data.draw(values))
