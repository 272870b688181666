"""The column types of the catalogue, the same in SQLite and PostgreSQL.

SQLite's tables are STRICT: the database rejects a value of a wrong type, as PostgreSQL does,
instead of converting it. STRICT supports INTEGER, REAL, TEXT and BLOB, so every type here has one
of those names on SQLite.
"""

from __future__ import annotations

import json
import math
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.engine import Dialect
from sqlalchemy.types import TypeDecorator, TypeEngine

from stagescope_wire.nonfinite import Json

Int: Final[TypeEngine[int]] = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
Real: Final[TypeEngine[float]] = sa.Double().with_variant(sa.REAL(), "sqlite")
Text: Final[TypeEngine[str]] = sa.Text()
Blob: Final[TypeEngine[bytes]] = sa.LargeBinary()

_NAMES: Final = {math.inf: "inf", -math.inf: "-inf"}
NON_FINITE_NAMES: Final = ("nan", *_NAMES.values())
"""The results of `nonfinite_name` for non-finite numbers."""


def nonfinite_name(value: float) -> str | None:
    """Return 'nan', 'inf' or '-inf', or None where `value` is finite."""
    return None if math.isfinite(value) else _NAMES.get(value, "nan")


def split_value(value: float | None) -> dict[str, Json]:
    """Return the columns `value` and `nonfinite` of a scalar."""
    if value is None:
        return {"value": None, "nonfinite": None}
    value = float(value)  # database drivers do not accept numpy scalars as floats
    name = nonfinite_name(value)
    return {"value": None if name else value, "nonfinite": name}


def dump_json(value: Json) -> str:
    """Write strict JSON: non-finite floats become the strings 'nan', 'inf', '-inf'.

    Raises:
        TypeError: a value that JSON cannot represent.
    """
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":"))
    except ValueError:  # rare; the usual value is traversed once, in C
        return json.dumps(_finite(value), allow_nan=False, separators=(",", ":"))


def _finite(value: Json) -> Json:
    if isinstance(value, float):
        return nonfinite_name(value) or value
    if isinstance(value, dict):
        return {_finite(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


class StrictJson(TypeDecorator[Any]):
    """JSON as TEXT, readable by any tool; None is NULL, which means unknown."""

    impl = sa.Text
    cache_ok = True

    def process_bind_param(self, value: Json, dialect: Dialect) -> str | None:
        """Write JSON."""
        return None if value is None else dump_json(value)

    def process_result_value(self, value: Json, dialect: Dialect) -> Json:
        """Read JSON."""
        return None if value is None else json.loads(value)


class Flag(TypeDecorator[bool]):
    """A bool; an INTEGER on SQLite, whose STRICT tables have no BOOLEAN."""

    impl = sa.Boolean
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        """Choose the database's own type."""
        return dialect.type_descriptor(sa.Integer() if dialect.name == "sqlite" else sa.Boolean())

    def process_bind_param(self, value: Any, dialect: Dialect) -> bool | None:
        """Write a bool."""
        return None if value is None else bool(value)

    def process_result_value(self, value: Any, dialect: Dialect) -> bool | None:
        """Read a bool."""
        return None if value is None else bool(value)
