"""Figures as answers: plotly's JSON with the run, the step and what the figure leaves out."""

from __future__ import annotations

import base64
import html
import typing
from typing import Any, Final

import numpy as np
import orjson
import plotly.graph_objects as go

from stagescope_service.views.encoding import JsonObject


class Shown(typing.Protocol):
    """The common fields of all figures' data."""

    @property
    def run(self) -> str:
        """The run's name."""
        ...

    @property
    def attempt(self) -> int | None:
        """The attempt's number; None: the current attempts."""
        ...

    @property
    def step(self) -> int | None:
        """The trainer's step; None: several."""
        ...

    @property
    def note(self) -> str | None:
        """Why the figure is empty, or what it leaves out."""
        ...


_OPTIONS: Final = orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY


def drawn(name: str, figure: go.Figure, found: Shown) -> bytes:
    """Return the figure `name` as JSON in which every number that is not finite is null."""
    title, drawing = as_json(figure)
    body = {
        "run": found.run, "attempt": found.attempt, "step": found.step, "name": name,
        "title": title, "note": found.note, "figure": drawing,
    }  # fmt: skip
    return orjson.dumps(body, option=_OPTIONS)


def as_json(figure: go.Figure) -> tuple[str, JsonObject]:
    """Return the title of a figure as plain text, and its data and layout without it."""
    drawing: dict[str, Any] = figure.to_plotly_json()
    layout = dict(drawing["layout"])
    title = html.unescape(layout.pop("title")["text"])
    layout.pop("template", None)  # an empty one; a page or notebook may have its own
    return title, {"data": [_plain(trace) for trace in drawing["data"]], "layout": _plain(layout)}


def _plain(value: Any) -> object:
    """Return a value of plotly's JSON with its arrays as such, not in base64."""
    if isinstance(value, dict):
        if value.keys() >= {"dtype", "bdata"}:
            array = np.frombuffer(base64.b64decode(value["bdata"]), value["dtype"])
            shape = value.get("shape")
            return array.reshape([int(n) for n in shape.split(",")]) if shape else array
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):  # before plotly 6 numbers are arrays, too
        return value if value.dtype.kind in "iuf" else value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
