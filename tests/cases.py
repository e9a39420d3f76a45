"""Rows and texts of tests that are data: YAML files of this folder."""

from pathlib import Path
from typing import Any

import yaml

#: the one in C, where PyYAML has it, takes a tenth of the time
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_table(name: str) -> Any:
    """What a file of this folder, or of one below it, holds."""
    text = (Path(__file__).parent / name).read_text()
    lone = r"\ud" in text.lower()  # half a surrogate pair, which the loader in C refuses
    return yaml.load(text, yaml.SafeLoader if lone else LOADER)


def covers(found: Any, wanted: Any) -> bool:
    """Whether a value has what is wanted of it: some members of an object, each item of a list."""
    if isinstance(wanted, dict):
        return all(name in found and covers(found[name], value) for name, value in wanted.items())
    if isinstance(wanted, list):
        return len(found) == len(wanted) and all(map(covers, found, wanted))
    return bool(found == wanted)


#: tables of several test modules
TABLES: dict[str, Any] = read_table("cases.yaml")
