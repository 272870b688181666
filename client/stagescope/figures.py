"""The figures of a session: metrics over the steps, the list of figures, and a live cell."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from stagescope.connection import Connection
from stagescope.plotting import figure_of, graph_objects
from stagescope.table import Table
from stagescope_wire.errors import InvalidInput, MissingExtra, StagescopeError
from stagescope_wire.nonfinite import JsonObject

if TYPE_CHECKING:
    import plotly.graph_objects

_ORDER: Final = ("name", "description", "parameters", "path")
_OVERVIEW: Final = "overview"


class FigureRequests(Connection):
    """Figures over the steps of a run; those of one step are methods of `Step`."""

    def figures(self) -> Table:
        """Return the figures that the service draws, with their parameters.

        Usage:
            >>> session.figures()["name"]        # of which session.figure(name, ...) draws one
        """
        answer = self.get("/figures")
        return Table.from_rows(answer["rows"], order=_ORDER, title="figures")

    def plot(
        self, *metrics: str, run: str | None = None, attempt: int | None = None,
        from_step: int | None = None, to_step: int | None = None, superseded: bool = True,
        smooth: float | None = None,
    ) -> plotly.graph_objects.Figure:  # fmt: skip
        """Return a figure of metrics over the steps, a panel each, and what happened when.

        Usage:
            >>> session.plot("rollout_corr/k3_kl")
            >>> session.plot("rollout_corr/k3_kl", "reward", from_step=2)

        Args:
            metrics: published metrics or names of scalars; none: those of the mismatch.
            run, attempt: only these; the default of `attempt` is each step's current one.
            from_step, to_step: the first and the last step.
            superseded: also steps that a later attempt did again, faded.
            smooth: also an exponential moving average over so many steps, from 1.

        Raises:
            MissingExtra: plotly is not installed.
            NotFound: no metric or scalar has this name; the message suggests similar names.
        """
        return self.figure(
            _OVERVIEW,
            **_overview_query(metrics, run, attempt, from_step, to_step, superseded),
            smooth=smooth,
        )

    def watch(self, *metrics: str, run: str | None = None, seconds: float = 5.0) -> Watch:
        """Return a live cell: the figure of `plot`, which follows the run while it is shown.

        Usage:
            >>> live = session.watch("rollout_corr/k3_kl")   # as a cell's last line it is shown
            >>> live.stop()

        Args:
            metrics: as of `plot`.
            run: the run; the default is the one whose training stage began last, at each moment.
            seconds: between two requests.

        Raises:
            MissingExtra: plotly or anywidget is not installed.
        """
        if not seconds > 0.0:
            raise InvalidInput(f"seconds is {seconds}", expected="a positive number")
        query = _overview_query(metrics, run, None, None, None, superseded=True)
        return Watch(lambda: self.get(f"/figures/{_OVERVIEW}", **query), seconds)


def _overview_query(
    metrics: tuple[str, ...], run: str | None, attempt: int | None, from_step: int | None,
    to_step: int | None, superseded: bool,
) -> dict[str, Any]:  # fmt: skip
    return {
        "metric": metrics or None, "run": run, "attempt": attempt, "from": from_step,
        "to": to_step, "superseded": None if superseded else False,
    }  # fmt: skip


class Watch:
    """A figure in a notebook that is redrawn where the service's answer changed.

    It ends with `stop`, with the kernel, or after the session was closed.

    Attributes:
        widget: a `plotly.graph_objects.FigureWidget`.
        error: why the last request failed; None if it was answered.
    """

    def __init__(self, request: Callable[[], JsonObject], seconds: float) -> None:
        self._request, self._seconds = request, seconds
        self._stopped = threading.Event()
        self._answer = request()
        self.error: str | None = None
        figure = figure_of(self._answer)
        try:
            self.widget = graph_objects().FigureWidget(figure)
        except ImportError as error:
            raise MissingExtra(
                "a live figure needs anywidget, which is not installed",
                advice="pip install anywidget; session.plot(...) needs none",
            ) from error
        self._thread = threading.Thread(target=self._follow, name="stagescope-watch", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        """Whether it still follows the run."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """Stop following; the figure stays as it is."""
        self._stopped.set()
        self._thread.join()

    def update(self) -> bool:
        """Request the figure now; return whether it changed."""
        answer = self._request()
        if answer == self._answer:
            return False
        self._answer = answer
        _redraw(self.widget, figure_of(answer))
        return True

    def _follow(self) -> None:
        while not self._stopped.wait(self._seconds):
            try:
                self.update()
                self.error = None
            except StagescopeError as error:  # noqa: PERF203 - a service may come back
                self.error = str(error)
            except RuntimeError:  # the session was closed
                return

    def __repr__(self) -> str:
        state = f"every {self._seconds:g} s" if self.running else "stopped"
        failed = f", the last request failed: {self.error}" if self.error else ""
        return f"<stagescope.Watch {state}{failed}>"

    def _repr_mimebundle_(self, **options: object) -> object:
        return self.widget._repr_mimebundle_(**options)


def _redraw(widget: Any, figure: Any) -> None:
    same = [(trace.type, trace.name) for trace in widget.data] == [
        (trace.type, trace.name) for trace in figure.data
    ]
    with widget.batch_update():
        if same:
            for old, new in zip(widget.data, figure.data, strict=True):
                old.update(new.to_plotly_json(), overwrite=True)
        else:
            widget.data = ()
            widget.add_traces(list(figure.data))
        widget.layout.update(figure.layout.to_plotly_json(), overwrite=True)
