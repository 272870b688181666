"""The base of rows that the API returns, and the fields that many rows share.

A row is declared once, as a TypedDict with a docstring below each field. The layer that makes the
row declares it, type checkers see it, and the OpenAPI document describes it.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import sys
from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import Field, GetPydanticSchema
from typing_extensions import TypeAliasType, TypedDict, get_original_bases

from stagescope_wire.collectives.rows import BlockedCollective, CallOfRanks, RanksAt


@functools.cache
def _docstrings(module: str) -> Mapping[str, Mapping[str, str]]:
    """Return class -> field -> its docstring, for the classes of a module."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {
        node.name: {
            field.target.id: inspect.cleandoc(str(text.value.value))
            for field, text in pairwise(node.body)
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
            if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
        }
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    }


def _docstrings_of(cls: Any) -> dict[str, str]:
    """Return field -> its docstring, for a class with its bases."""
    found: dict[str, str] = {}
    for base in reversed(get_original_bases(cls)):
        origin = getattr(base, "__origin__", base)
        if getattr(origin, "__module__", "").startswith("stagescope"):
            found |= _docstrings_of(origin)
    found.update(_docstrings(cls.__module__).get(cls.__name__, {}))
    return found


def describe(schema: dict[str, Any], cls: type) -> None:
    """Describe each field of a class in its JSON schema by its docstring.

    Titles repeat the names. A default only means that a field may be absent. Both go.
    """
    docstrings = _docstrings_of(cls)
    for name, field in getattr(cls, "__pydantic_fields__", {}).items():
        docstrings[field.alias or name] = docstrings.get(name, "")
    for name, field in schema.get("properties", {}).items():
        field.pop("title", None)
        field.pop("default", None)
        if docstrings.get(name):
            field.setdefault("description", docstrings[name])
    if dataclasses.is_dataclass(cls):  # its defaults are for Python: every field is answered
        schema["required"] = [*schema["properties"]]


class Row(TypedDict):
    """An object of an answer, with no other fields than these."""


_CONFIG: Final = {"extra": "forbid", "json_schema_extra": describe}
# Not in its body: type checkers would see a key there.
setattr(Row, "__pydantic_config__", _CONFIG)  # noqa: B010


class Described:
    """A base of dataclasses that answers hold, described as a `Row` is."""

    __slots__ = ()
    __pydantic_config__ = _CONFIG


for _wire in (RanksAt, CallOfRanks, BlockedCollective):
    setattr(_wire, "__pydantic_config__", _CONFIG)  # noqa: B010

if TYPE_CHECKING:
    Number = float
else:
    Number = TypeAliasType(
        "Number",
        Annotated[
            float | Literal["nan", "inf", "-inf"],
            Field(description="A number; one that is not finite is its name, since JSON has none."),
        ],
    )
Wall = Annotated[float, Field(description="Unix seconds.", examples=[1_792_000_000.25])]
"""A time of the service's clock, unless a model says otherwise."""

Run = Annotated[str, Field(description="The run's name.", examples=["qwen3-8b-countdown"])]
Attempt = Annotated[int, Field(description="The attempt's number in its run, from 1.", ge=1)]
Step = Annotated[int, Field(description="The trainer's step.", examples=[5])]
Stage = Annotated[str, Field(description="The stage's name.", examples=["actor_update"])]
Role = Annotated[str, Field(description="The role.", examples=["actor"])]
Rank = Annotated[int, Field(description="The rank in its role, from 0.", ge=0)]
Part = Annotated[
    str,
    Field(description="occurrence.epoch.minibatch.microbatch, each from 0.", examples=["0.0.0.0"]),
]
NodeId = Annotated[str, Field(description="Ray's id of the node.")]


def described_by(cls: type) -> Any:  # as pydantic.GetPydanticSchema
    """Describe a type, such as one of the wire, by a class of rows with the same fields."""
    return GetPydanticSchema(lambda _source, handler: handler(cls))


def one_of(*values: str) -> Any:  # as pydantic.Field
    """Return the values that a text may have, for the document alone."""
    return Field(json_schema_extra={"enum": [*values]})


class RoleRank(Row):
    """A rank."""

    role: Role
    rank: Rank
