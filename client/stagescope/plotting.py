"""Figures of the service as figures of plotly, and tables that have one.

plotly is imported on demand (extra `notebook`); tables themselves need none.
"""

from __future__ import annotations

import html
import importlib
import textwrap
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from stagescope.table import Table
from stagescope_wire.errors import InvalidInput, MissingExtra
from stagescope_wire.nonfinite import JsonObject
from stagescope_wire.render_html import html_bars
from stagescope_wire.versions import install_command

if TYPE_CHECKING:
    import plotly.graph_objects
    from typing_extensions import Self

_WRAPPED: Final = 90
"""Characters of a line of a title or note."""
_LINE: Final = 18
"""Its height in pixels."""


def figure_of(answer: JsonObject) -> plotly.graph_objects.Figure:
    """Return a figure that `/figures/...` answered, with its title and its note below that.

    Raises:
        MissingExtra: plotly is not installed.
    """
    figure = graph_objects().Figure(answer["figure"])
    title, note = _lines(answer["title"]), _lines(answer.get("note") or "")
    room = _LINE * (len(title) + len(note) + 2)
    height = (figure.layout.height or 420) + room
    for trace in figure.data:  # what stands at the top of the figure stands below its title
        if "colorbar" in trace and trace.colorbar.yref == "container":
            trace.colorbar.y -= room / height
    figure.update_layout(
        title={
            "text": "<br>".join([*title, *(f"<sub>{line}</sub>" for line in note)]),
            "font": {"size": 15}, "x": 0, "xref": "paper", "xanchor": "left",
            "y": 1, "yref": "container", "yanchor": "top", "pad": {"t": _LINE},
        },
        margin_t=(figure.layout.margin.t or 0) + room,
        height=height,
    )  # fmt: skip
    return figure


def graph_objects() -> Any:
    """Return the module `plotly.graph_objects`.

    Raises:
        MissingExtra: plotly is not installed.
    """
    try:
        return importlib.import_module("plotly.graph_objects")
    except ImportError as error:
        raise MissingExtra(
            "a figure needs plotly, which is not installed",
            advice="pip install plotly, or all that a notebook uses: "
            f"{install_command('notebook')}",
        ) from error


def _lines(text: str) -> list[str]:
    return [html.escape(line) for line in textwrap.wrap(text, _WRAPPED)]


class BarTable(Table):
    """A table whose rows a notebook shows as bars above them, one a row.

    Usage:
        >>> samples = session.step(5).samples()
        >>> samples.where(rank=3)["max_abs"]     # a selection has no bars
    """

    __slots__ = ("_column", "_label")

    _label: str
    _column: str

    @classmethod
    def with_bars(cls, table: Table, *, label: str, column: str) -> Self:
        """Return a table with bars.

        Args:
            table: the rows.
            label: the column that names a row.
            column: the column of the bars' heights.
        """
        found = cls.from_table(table)
        found._label, found._column = label, column
        return found

    def _repr_html_(self) -> str:
        table = super()._repr_html_()
        if self._label not in self.names or self._column not in self.names or len(self) < 2:
            return table
        picture = html_bars(
            [str(name) for name in self[self._label]], self[self._column], self._column
        )
        return f"{picture}{table}"


class PlottedTable(BarTable):
    """A table that the service can draw; a notebook shows a small picture above its rows.

    Usage:
        >>> rounds = session.step(5).rounds()
        >>> figure = rounds.plot()                       # a plotly figure, from the service
        >>> figure = session.step(5).ranks().plot(metric="rollout_corr/k3_kl")
    """

    __slots__ = ("_draw", "_refusal")

    _draw: Callable[..., plotly.graph_objects.Figure]
    _refusal: str

    @classmethod
    def drawn_by(
        cls, table: Table, draw: Callable[..., plotly.graph_objects.Figure], *, label: str,
        column: str, refusal: str = "",
    ) -> Self:  # fmt: skip
        """Return a table with its figure.

        Args:
            table: the rows.
            draw: returns the figure.
            label: the column that names a row.
            column: the column of the small picture.
            refusal: why these rows have no figure; "" if they have one.
        """
        found = cls.with_bars(table, label=label, column=column)
        found._draw, found._refusal = draw, refusal
        return found

    def plot(self, **parameters: object) -> plotly.graph_objects.Figure:
        """Return the figure of the step, of all its rows.

        Args:
            parameters: those of the figure; `session.figures()` lists them.

        Raises:
            MissingExtra: plotly is not installed.
            InvalidInput: the rows are a slice; only whole steps have a figure.
        """
        if self._refusal:
            raise InvalidInput(f"there is no figure {self._refusal}", expected="all rows")
        return self._draw(**parameters)
