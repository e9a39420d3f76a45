"""Rows and texts of tests that are data: cases.yaml."""

from pathlib import Path
from typing import Any

import yaml

TABLES: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("cases.yaml").read_text())
