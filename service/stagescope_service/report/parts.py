"""The parts of a report as values, and what its sections are made from."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Final, Literal, TypeVar, cast

import orjson
import plotly.graph_objects as go
from pydantic import Field

from stagescope_service.fields import Described, Run, Wall, described_by
from stagescope_service.figures.drawing import Shown, drawn
from stagescope_service.redaction import Redactor
from stagescope_service.views.encoding import JsonObject, decode, encode
from stagescope_service.views.models.figures import Figure
from stagescope_service.views.reading.dependencies import AttemptQuery, Dependencies
from stagescope_service.views.reading.target import Target
from stagescope_wire.errors import NotFound
from stagescope_wire.names import safe_name
from stagescope_wire.render import ranges_text

T = TypeVar("T")

MAX_ROWS: Final = 20
"""Rows of a table; the API has the others."""
LONGEST: Final = 2000
"""Most characters of a text of the catalogue."""
NEWEST_STEPS: Final = 1000
"""Newest steps that are searched for gaps."""


@dataclasses.dataclass(frozen=True)
class ReportItem(Described):
    """Something with details: a symptom, a finding."""

    title: str
    """Its title, as a sentence."""
    lines: Sequence[str] = ()
    """Its details: `+` is evidence for it, `-` against it, `->` what to do."""

    @property
    def facts(self) -> Sequence[str]:
        """The lines with facts."""
        return [text for text in self.lines if not text.startswith("-> ")]

    @property
    def commands(self) -> Sequence[str]:
        """The next actions, from the lines that begin with an arrow."""
        return [text[3:] for text in self.lines if text.startswith("-> ")]


@dataclasses.dataclass(frozen=True)
class ReportTable(Described):
    """Rows as the API answers them, some of their columns."""

    columns: Sequence[str]
    """The columns, in their order."""
    rows: Sequence[JsonObject]
    """The first rows: column -> value. A number that is not finite is "nan", "inf" or "-inf"."""
    more: int = 0
    """How many rows are not listed."""
    title: str = ""
    """Its title; empty: the section's title."""


@dataclasses.dataclass(frozen=True)
class ReportSection(Described):
    """A part of a report."""

    name: Annotated[str, Field(examples=["doctor"])] = ""
    """Its identifier."""
    title: str = ""
    """Its title, plain text."""
    texts: Sequence[str] = ()
    """Its statements, as sentences."""
    items: Sequence[ReportItem] = ()
    """Its items with details."""
    table: ReportTable | None = None
    """Rows; null: there are none."""
    figures: Sequence[Annotated[JsonObject, described_by(Figure)]] = ()
    """The answers of `/figures/{name}`."""
    gaps: Sequence[str] = ()
    """The missing data, and why each is missing."""


@dataclasses.dataclass(frozen=True)
class ReportVerdict(Described):
    """A question, and its answer."""

    name: Annotated[str, Field(examples=["streams"])]
    """The subject of the question."""
    verdict: str
    """The answer, in a word or two."""
    text: str
    """The answer, as a sentence."""
    bad: bool | None
    """Whether something is wrong; null: this is not a matter of right and wrong, or unknown."""


@dataclasses.dataclass(frozen=True)
class Report(Described):
    """A report on a run, or on a step of it."""

    title: str
    """The report's title, plain text."""
    run: Run
    attempt: Annotated[int | None, Field(ge=1)]
    """The attempt's number in its run, from 1; null: the current attempts."""
    step: int | None
    """The trainer's step; null: the whole run."""
    made_wall: Wall
    version: str
    """Version of the service that made it."""
    verdicts: Sequence[ReportVerdict]
    """The answers in short."""
    sections: Sequence[ReportSection]
    """The parts, in their order."""
    schema: Literal[1] = 1
    """Version of this format."""


def file_name(report: Report, ending: str) -> str:
    """Return a name for the file of a report, like the names of a step's other files."""
    attempt = "" if report.attempt is None else f"-{report.attempt}"
    step = "" if report.step is None else f"-step{report.step}"
    return f"{safe_name(report.run)}{attempt}{step}.{ending}"


def redacted(value: T, redactor: Redactor) -> T:
    """Return a report, or a part of one, without secrets in its texts: it is made to be sent."""
    found: object = value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {
            field.name: redacted(getattr(value, field.name), redactor)
            for field in dataclasses.fields(value)
        }
        found = dataclasses.replace(value, **fields)
    elif isinstance(value, list | tuple):
        found = [redacted(each, redactor) for each in value]
    elif isinstance(value, str | Mapping):
        found = redactor.value(value)
    return cast("T", found)


# --- what sections are made from ---------------------------------------------------------------
@dataclasses.dataclass
class ReportScope:
    """The subject of a report, and what its sections find out on their way."""

    deps: Dependencies
    target: Target
    attempt: int | None
    measured: Target | None
    """The step whose numbers are shown: the requested one, or the newest with numbers."""
    verdicts: list[ReportVerdict] = dataclasses.field(default_factory=list)

    @classmethod
    def find(
        cls, deps: Dependencies, run: str, attempt: int | None, step: int | None
    ) -> ReportScope:
        """Return the scope of a run, or of a step.

        Raises:
            NotFound: there is no such run, attempt or step.
        """
        if step is not None:
            target = deps.finder.step(run, attempt, step)
            return cls(deps, target, attempt, target)
        target = deps.finder.attempt(run, attempt)
        return cls(deps, target, attempt, deps.finder.measured(target.run, attempt))

    @property
    def run(self) -> str:
        """The run's name."""
        return self.target.run

    @property
    def query(self) -> AttemptQuery:
        """The query for the requested attempt of the run, or for all of them."""
        return AttemptQuery(self.run, self.attempt)

    @property
    def step(self) -> int | None:
        """The requested step."""
        return None if self.target.step is None else self.target.step_number

    @property
    def measured_step(self) -> Target:
        """The step whose numbers are shown.

        Raises:
            NotFound: no step has numbers.
        """
        if self.measured is None:
            raise NotFound(f"no step of run {self.run} has numbers")
        return self.measured

    def say(self, name: str, verdict: str, text: str, *, bad: bool | None) -> None:
        """Add a verdict; see `ReportVerdict`."""
        self.verdicts.append(ReportVerdict(name, verdict, shortened(text), bad))


def body_of(answer: object) -> Any:
    """Return an answer as JSON has it: texts in place of numbers that are not finite."""
    return decode(encode(answer))


ShownT = TypeVar("ShownT", bound=Shown)


def figure_of(name: str, draw: Callable[[ShownT], go.Figure], found: ShownT) -> JsonObject:
    """Return a figure as `/figures/{name}` answers it."""
    body: JsonObject = orjson.loads(drawn(name, draw(found), found))
    return body


def short(value: float) -> str:
    """Return a number with the digits that every table and sentence of a report gives it."""
    return f"{value:.4g}"


def shortened(text: str) -> str:
    """Return a text of at most `LONGEST` characters and an ellipsis."""
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def table_of(answer: JsonObject, columns: str, total: int | None = None) -> ReportTable | None:
    """Return the rows of an answer as a table of some columns; None where it has none."""
    rows = answer["rows"]
    names = columns.split()
    if not rows:
        return None
    shown = [{name: row.get(name) for name in names} for row in rows[:MAX_ROWS]]
    return ReportTable(names, shown, max((len(rows) if total is None else total) - len(shown), 0))


def missing_text(missing: Sequence[Mapping[str, Any]]) -> str:
    """Return the missing ranks, by stage and status."""
    groups: dict[tuple[str, str, str], list[int]] = {}
    for each in missing:
        key = (str(each["role"]), str(each["stage"]), str(each["status"]))
        groups.setdefault(key, []).append(each["rank"])
    return "; ".join(
        f"{role} {ranges_text('rank', sorted(ranks))} in {stage}: {status}"
        for (role, stage, status), ranks in groups.items()
    )
