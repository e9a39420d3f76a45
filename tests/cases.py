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


#: tables of several test modules
TABLES: dict[str, Any] = read_table("cases.yaml")
