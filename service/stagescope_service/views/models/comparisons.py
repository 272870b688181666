"""Answers that compare attempts, runs or dumps.

`POST /comparisons` returns what `stagescope compare --json` writes. Both have one schema:
`compare/report/comparison.schema.json`. Here it becomes a part of the API's document.
"""

from __future__ import annotations

import functools
import json
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from stagescope_service.compare.report import SCHEMA_FILE
from stagescope_service.fields import Attempt, Run, Step
from stagescope_service.views.models.common import Model, Page
from stagescope_wire.nonfinite import Json

COMPARISON: Final = "Comparison"
COMPARISON_RESPONSE: Final[dict[int | str, dict[str, Json]]] = {
    200: {
        "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{COMPARISON}"}}}
    }
}


class AttemptSide(Model):
    """One side of a comparison of attempts."""

    run: Run
    attempt: Attempt
    begun: float | None
    """Unix seconds: when the first of its processes started."""
    resumed_from_step: Step | None
    """The trainer's step after which it continued; null: it continued none, or that is not
    known."""


class Difference(Model):
    """One thing that is not the same in two attempts."""

    area: Literal[
        "git", "code", "config", "layout", "packages", "drivers", "python", "environment", "place"
    ]
    """The part of the fingerprint (`code`: hashes of the script and of loaded modules), `layout`
    (parallel coordinates of ranks) or `place` (their nodes and devices)."""
    name: Annotated[str, Field(examples=["torch"])]
    """Name of the difference: dotted names of the area, from `role/rank` on for ranks."""
    a: Annotated[object, Field(description="Its value on side `a`; null: that side has none.")]
    b: Annotated[object, Field(description="Its value on side `b`; null: that side has none.")]
    weight: Literal["numbers", "place", "start", "unknown"]
    """Its possible effect: other numbers, another machine, only another start; `unknown`: one side
    does not report it."""


class Diff(Model, Page[Difference]):
    """The differences between two attempts; those that decide numbers come first."""

    a: AttemptSide
    """The first attempt."""
    b: AttemptSide
    """The second attempt."""
    counts: dict[str, int]
    """Weight -> number of differences."""
    unknown: list[Literal["a", "b"]]
    """Sides without a fingerprint."""
    note: str | None
    """Text about parts that could not be compared, where differences stay unseen; null: none."""


@functools.cache
def comparison_schemas() -> dict[str, Json]:
    """Return the published schema of a comparison as components of the API's document."""
    document = json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))
    names = {name: f"{COMPARISON}{name.title().replace('_', '')}" for name in document["$defs"]}
    found = {names[name]: schema for name, schema in document.pop("$defs").items()}
    document.pop("$schema")
    # The file tells readers of reports that fields may come; an answer has these and no others.
    found[COMPARISON] = document
    return {name: _as_component(schema, names) for name, schema in found.items()}


def _as_component(schema: object, names: dict[str, str]) -> Any:
    if isinstance(schema, list):
        return [_as_component(item, names) for item in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: _as_component(value, names) for key, value in schema.items()}
    if isinstance(found.get("$ref"), str):
        found["$ref"] = f"#/components/schemas/{names[found['$ref'].removeprefix('#/$defs/')]}"
    if isinstance(found.get("properties"), dict) and "type" in found:
        found.setdefault("additionalProperties", False)
    return found
