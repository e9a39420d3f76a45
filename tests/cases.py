"""Rows and texts of tests that are data: YAML files of this folder."""

from pathlib import Path
from typing import Any

import yaml


def read_table(name: str) -> Any:
    """What a file of this folder, or of one below it, holds."""
    return yaml.safe_load((Path(__file__).parent / name).read_text())


#: tables of several test modules
TABLES: dict[str, Any] = read_table("cases.yaml")
