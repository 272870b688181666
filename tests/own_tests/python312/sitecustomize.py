"""Of every process of a trainer's tests: what Python 3.12 has in `typing`, for earlier ones.

pydantic takes no `typing.TypedDict` before Python 3.12, and there is no `typing.override`.
"""

from __future__ import annotations

import sys
import typing

import typing_extensions

if sys.version_info < (3, 12):
    typing.TypedDict = typing_extensions.TypedDict
    typing.override = typing_extensions.override  # type: ignore[attr-defined]
