"""The columns of each kind of table, so that a table without rows has the same columns.

An answer without rows names no columns, and frames of two steps concatenate only if names, order
and types are equal. `python -m tests.tools.columns` makes `columns.json` of the OpenAPI document.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

Kinds = Mapping[str, str]
"""Column -> int, float, bool, text, ints, texts or nested; `int?` and `bool?` may be missing."""

_FILE: Final = json.loads(Path(__file__).with_name("columns.json").read_text(encoding="utf-8"))

RECORDS: Final[Mapping[str, Kinds]] = _FILE["records"]
"""Nested column whose values are lists of records -> the fields of a record."""

COLUMNS: Final[Mapping[str, Kinds]] = _FILE["tables"]
"""Table -> its columns."""
