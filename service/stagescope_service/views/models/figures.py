"""Answers with figures, and the trace events of a step."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal

from pydantic import Field
from typing_extensions import NotRequired

from stagescope_service.fields import Described, Number, Row, Run
from stagescope_service.views.encoding import JsonObject
from stagescope_service.views.models.common import Model
from stagescope_service.views.models.numbers import Streams


class PlotlyFigure(Model):
    """A figure of plotly: `plotly.graph_objects.Figure(figure)`, `Plotly.newPlot(element, ...)`."""

    data: list[JsonObject]
    """Its traces. A number that is not measured or not finite is null; marks and texts beside it
    tell which, and why."""
    layout: JsonObject
    """Its layout, without the title; the background is transparent. A page sets `font.color` to the
    colour of its own text."""


class Figure(Model):
    """A figure, and what it is of."""

    run: Run
    attempt: Annotated[int | None, Field(ge=1)]
    """The attempt's number in its run, from 1; null: the current attempts."""
    step: int | None
    """The trainer's step; null: several steps."""
    name: Annotated[str, Field(examples=["rounds"])]
    """Name of the figure, as `/figures` lists it."""
    title: str
    """Title, plain text."""
    note: str | None
    """Why there is nothing to see, or what is left out and folded; null: nothing."""
    figure: Annotated[PlotlyFigure, Field(description="The figure itself.")]


class FigureParameter(Model):
    """A query parameter of a figure."""

    name: Annotated[str, Field(examples=["step"])]
    """Its name."""
    description: str
    """What it selects."""
    required: bool
    """Whether it has to be given."""
    repeatable: bool
    """Whether it may be given several times."""
    values: list[str] | None
    """The values that it may have; null: any."""


class FigureRow(Model):
    """A figure that can be requested."""

    name: Annotated[str, Field(examples=["rounds"])]
    """Its name: the last part of its path."""
    path: Annotated[str, Field(examples=["/figures/rounds"])]
    """Where it is requested."""
    description: str
    """What it shows."""
    parameters: list[FigureParameter]
    """Its query parameters."""


class Figures(Model):
    """The figures that can be requested."""

    rows: list[FigureRow]
    """In alphabetical order."""
    next: None
    """Always null: all are in the answer."""


@dataclasses.dataclass(frozen=True)
class AnatomyBin(Described):
    """The tokens of a step in one bin; means are over those with both log-probs finite."""

    label: str
    """The property that the tokens share. Places, ends and positions count tokens from 0. For
    `unknown`, their round begins or ends in another piece of the sample. A lattice is the largest
    power of two that d is a multiple of."""
    tokens: int
    """Number of tokens with both log-probs finite."""
    nonfinite: int
    """Number of tokens with a log-prob that is not finite."""
    mean_abs: Number | None
    """Mean of |p - q|, nats; null: no token counts."""
    mean: Number | None
    """Mean of p - q, nats; null: no token counts."""


class Anatomy(Streams):
    """The mismatch of a step by one property of its tokens."""

    run: Run
    attempt: Annotated[int, Field(ge=1)]
    """The attempt's number in its run, from 1."""
    step: int
    """The trainer's step."""
    by: Annotated[str, Field(examples=["place"])]
    """The property that the bins separate."""
    mean_abs: Number | None
    """Mean of |p - q| over all tokens of the step, nats; null: nothing was measured."""
    left_out: int
    """Number of tokens under the mask that are in no bin: their rows name no engine or version."""
    note: str | None
    """Why there are no bins, or why tokens are left out of them; null: neither."""
    rows: list[AnatomyBin]
    """The bins that hold a token, in the order of the property."""
    next: None
    """Always null: all are in the answer."""


class TraceEvent(Row):
    """An event of the Trace Event Format."""

    name: str
    """Name of the stage, or of the data about a track."""
    ph: Literal["X", "i", "M"]
    """`X`: from `ts` for `dur`; `i`: at `ts`; `M`: a name or an order of a process or thread."""
    ts: int
    """Microseconds since the step began, on the service's clock (a number)."""
    pid: int
    """Number of the role, from 1."""
    tid: int
    """The rank's number; plus 1 000 000 for each further track of slices that overlap."""
    cat: NotRequired[str]
    """The stage's status, `wait`, or `missing`."""
    dur: NotRequired[int]
    """Its length in microseconds (a number)."""
    s: NotRequired[str]
    """`t`: the event is of its thread."""
    cname: NotRequired[str]
    """Colour for a failure or a wait, as the viewer names it."""
    args: NotRequired[dict[str, str | int | float]]
    """Status, part, policy version (a number), error."""


class Trace(Model):
    """The stages of a step for ui.perfetto.dev and chrome://tracing."""

    traceEvents: list[TraceEvent]
    """The events."""
    displayTimeUnit: Literal["ms"]
    """The unit in which a viewer shows times."""
    otherData: dict[str, str | int | float | None]
    """`run`, `attempt` and `step` (numbers), `begin_wall` (Unix seconds at which the step began),
    `clock_error` (the largest error of a rank's clock in seconds), `note`."""
