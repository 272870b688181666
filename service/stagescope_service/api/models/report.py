"""The answer of the report."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from stagescope_service.api.encoding import JsonObject
from stagescope_service.api.models.common import Model
from stagescope_service.api.models.figures import Figure
from stagescope_service.fields import Run, Wall


class ReportItem(Model):
    """Something with details: a symptom, a finding."""

    title: str
    """What it is, as a sentence."""
    lines: list[str]
    """Its details: `+` for it, `-` against it, `->` what to do."""


class ReportTable(Model):
    """Rows as the API answers them, some of their columns."""

    columns: list[str]
    """The columns, in their order."""
    rows: list[JsonObject]
    """The first rows: column -> value. A number that is not finite is "nan", "inf" or "-inf"."""
    more: int
    """How many rows are not listed."""
    title: str
    """Its title; empty: that of the section."""


class ReportSection(Model):
    """A part of a report."""

    name: Annotated[str, Field(examples=["doctor"])]
    """Its identifier."""
    title: str
    """Its title, plain text."""
    texts: list[str]
    """What it says, as sentences."""
    items: list[ReportItem]
    """With details."""
    table: Annotated[ReportTable | None, Field(description="Rows; null: there are none.")]
    figures: list[Figure]
    """As `/figures/{name}` answers them."""
    gaps: list[str]
    """What is missing, and why."""


class ReportVerdict(Model):
    """A question, and its answer."""

    name: Annotated[str, Field(examples=["streams"])]
    """What was looked at."""
    verdict: str
    """The answer, in a word or two."""
    text: str
    """The answer, as a sentence."""
    bad: bool | None
    """Whether something is wrong; null: that is no matter of right and wrong, or unknown."""


class Report(Model):
    """What is known of a run, or of a step of it."""

    schema_: Annotated[Literal[1], Field(alias="schema", description="Version of this format.")]
    title: str
    """What it is of, plain text."""
    run: Run
    attempt: Annotated[int | None, Field(ge=1)]
    """The attempt's number in its run, from 1; null: the attempts in force."""
    step: int | None
    """The trainer's step; null: the whole run."""
    made_wall: Wall
    version: str
    """Version of the service that made it."""
    verdicts: list[ReportVerdict]
    """The answers in short."""
    sections: list[ReportSection]
    """The parts, in their order."""
