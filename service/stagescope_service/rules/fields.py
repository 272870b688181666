"""The grammar of rules: data that is read from YAML or JSON, checked field by field.

A frozen dataclass that inherits `Declared` is its own grammar: each of its fields is annotated with
the function that reads it. Errors name the field and its allowed values.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar, Final, NamedTuple, TypeAlias, TypeVar, get_type_hints

import yaml
from yaml.composer import ComposerError

from stagescope_wire.errors import InvalidPlan
from stagescope_wire.nonfinite import Json

MAX_BYTES: Final = 256 * 1024
Reader: TypeAlias = Callable[[object, str], object]
"""(value, name of the field in errors) -> the value that was read."""
Own = TypeVar("Own", bound="Declared")


def wrong(field: str, value: object, expected: str) -> InvalidPlan:
    """Return the error of a field with an invalid value."""
    # Containers are shown by type only: a webhook inside may contain a secret.
    shown = f"a {type(value).__name__}" if isinstance(value, Mapping | list) else repr(value)
    return InvalidPlan(f"{field} is {shown:.200}", expected=expected)


class _Field(NamedTuple):
    name: str
    read: Reader
    default: object


class Declared:
    """A dataclass whose fields are `Annotated[type, reader]`, or `Annotated[type, reader, key]`
    where the document has another name for a field."""

    EXPECTED: ClassVar[str] = ""
    """The expectation that an error states; empty: the names of the fields."""
    SHOWS_DEFAULTS: ClassVar[bool] = False
    """Whether `wire` also returns fields that have their default."""

    @classmethod
    def parse(cls: type[Own], value: object, field: str) -> Own:
        """Read a document.

        Raises:
            InvalidPlan: with the field that is wrong.
        """
        known = _fields(cls)
        given = {
            key: each
            for key, each in mapping(value, field, known, cls.EXPECTED).items()
            if each is not None or known[key].default is not None
        }
        return cls(
            **{
                each.name: each.read(given.get(key), f"{field}.{key}")
                for key, each in known.items()
                if key in given or each.default is dataclasses.MISSING
            }
        )

    def wire(self, *, secrets: bool = True) -> dict[str, Json]:
        """Return the document form that `parse` reads; without `secrets` no webhook's URL."""
        return {
            key: _wire(getattr(self, each.name), secrets)
            for key, each in _fields(type(self)).items()
            if self.SHOWS_DEFAULTS or getattr(self, each.name) != each.default
        }


def _fields(cls: Any) -> dict[str, _Field]:
    """Return name in documents -> the field."""
    found: dict[str, _Field] = {}
    hints = get_type_hints(cls, include_extras=True)
    for each in dataclasses.fields(cls):
        read, *key = hints[each.name].__metadata__
        found[key[0] if key else each.name] = _Field(each.name, read, each.default)
    return found


def _wire(value: Any, secrets: bool) -> Json:
    if hasattr(value, "wire"):
        return value.wire(secrets=secrets)
    return [_wire(each, secrets) for each in value] if isinstance(value, tuple) else value


def mapping(
    value: object, field: str, known: Collection[str], expected: str = ""
) -> dict[str, Json]:
    """Read a mapping with fields of these names.

    Raises:
        InvalidPlan: not a mapping, or an unknown field.
    """
    expected = expected or ", ".join(sorted(known))
    if not isinstance(value, Mapping):
        raise wrong(field, value, expected)
    unknown = [str(name) for name in value if name not in known]
    if unknown:
        raise InvalidPlan(f"{field} has no field {', '.join(unknown)!r:.200}", expected=expected)
    return dict(value)


# --- readers ----------------------------------------------------------------------------------
def number(value: object, field: str) -> float:
    """Read a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise wrong(field, value, "a finite number")
    return float(value)


def ratio(value: object, field: str) -> float:
    """Read a number over 0."""
    found = number(value, field)
    if found <= 0.0:
        raise wrong(field, value, "a number over 0")
    return found


def count(least: int, most: int) -> Callable[[object, str], int]:
    """Return the reader of an integer in a range."""

    def read(value: object, field: str) -> int:
        if type(value) is not int or not least <= value <= most:
            raise wrong(field, value, f"an integer from {least} to {most}")
        return value

    return read


def flag(value: object, field: str) -> bool:
    """Read true or false."""
    if not isinstance(value, bool):
        raise wrong(field, value, "true or false")
    return value


def one_of(*choices: str) -> Callable[[object, str], str]:
    """Return the reader of one of some words."""

    def read(value: object, field: str) -> str:
        if not isinstance(value, str) or value not in choices:
            raise wrong(field, value, f"one of {', '.join(choices)}")
        return value

    return read


def text(most: int = 1000) -> Callable[[object, str], str]:
    """Return the reader of a non-empty text; white space becomes single spaces."""

    def read(value: object, field: str) -> str:
        if not isinstance(value, str) or not value.strip() or len(value) > most:
            raise wrong(field, value, f"a text of 1 to {most} characters")
        return " ".join(value.split())

    return read


def texts(value: object, field: str) -> tuple[str, ...]:
    """Read a non-empty list of texts."""
    if not isinstance(value, list) or not value:
        raise wrong(field, value, "a list of texts")
    return tuple(map(str, value))


# --- YAML -------------------------------------------------------------------------------------
def load_yaml(text: str) -> Json:
    """Parse YAML without aliases, tags or objects.

    Raises:
        InvalidPlan: invalid or too much YAML.
    """
    if len(text) > MAX_BYTES:
        raise InvalidPlan(f"{len(text)} characters", expected=f"at most {MAX_BYTES}")
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, RecursionError) as error:
        # Without the text around the error, which may contain a webhook's secret.
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        line = "" if mark is None else f", line {mark.line + 1}"
        raise InvalidPlan(
            f"the rules are not valid YAML: {problem or type(error).__name__}{line}",
            expected="YAML",
        ) from None


def load_own_yaml(text: str) -> Json:
    """Parse YAML of this package: in C where PyYAML has it, which does not refuse aliases.

    Raises:
        YAMLError: invalid YAML.
    """
    return yaml.load(text, _OwnLoader)


class _Loader(yaml.SafeLoader):
    """Refuses aliases: a few lines of them can expand to gigabytes."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise ComposerError(None, None, "aliases are not allowed")
        return super().compose_node(parent, index)


class _OwnLoader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Reads numbers as `_Loader` does."""


# YAML 1.1 reads 1e-3 as a string, since it has no decimal point.
for _loader in (_Loader, _OwnLoader):
    _loader.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+[eE][-+]?[0-9]+"), list("-+0123456789")
    )
