"""What was expected where a value has another type or lies out of bounds, in our own words.

pydantic checks the values. Its texts are for programmers, and its numbers are those of its classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pydantic_core import ErrorDetails

_EXPECTED: Final = {
    "int_type": "an integer",
    "int_parsing": "an integer",
    "int_parsing_size": "an integer of at most 18 digits",
    "int_from_float": "an integer",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "string_type": "a string",
    "string_too_short": "at least {min_length} characters",
    "string_too_long": "at most {max_length} characters",
    "string_pattern_mismatch": "a text of the form {pattern}",
    "string_unicode": "valid Unicode",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "list_type": "a list",
    "tuple_type": "a list",
    "too_short": "at least {min_length} of them",
    "too_long": "at most {max_length} of them",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "json_invalid": "valid JSON",
    "missing": "a value",
    "path_type": "a path",
    "none_required": "nothing",
    "literal_error": "{expected}",
    "enum": "{expected}",
    "greater_than_equal": "at least {ge:g}",
    "greater_than": "more than {gt:g}",
    "less_than_equal": "at most {le:g}",
    "less_than": "less than {lt:g}",
    "value_error": "{error}",
    "assertion_error": "{error}",
}
"""Error type of pydantic -> what is expected; its context fills the braces."""
_BEGIN: Final = "Input should be "


def expected_of(error: ErrorDetails) -> str:
    """Return what was expected instead of a value."""
    text = _EXPECTED.get(error["type"])
    try:
        return error["msg"].removeprefix(_BEGIN) if text is None else text.format(**_context(error))
    except (KeyError, ValueError):
        return error["msg"].removeprefix(_BEGIN)


def name_of(error: ErrorDetails, *, without: Sequence[str] = ()) -> str:
    """Return the name of the wrong value; `without` the parts of a request that hold it."""
    parts = [str(part) for part in error["loc"]]
    return ".".join(parts[1:] if parts[:1] and parts[0] in without else parts)


def is_missing(error: ErrorDetails) -> bool:
    """Return whether a value is absent that must be given."""
    return error["type"].startswith("missing")


def _context(error: ErrorDetails) -> dict[str, object]:
    return {name: _plain(value) for name, value in error.get("ctx", {}).items()}


def _plain(value: object) -> object:
    return str(value) if isinstance(value, Exception) else value
