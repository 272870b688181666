"""Answers that are not tables: `Metrics` of one step, and `Record`, an object with named fields."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, TypeAlias

from stagescope.table import (
    Row,
    Table,
    begun_again,
    coverage_notes,
    reason_text,
    step_verdict_notes,
    token_accounting,
)
from stagescope_wire import nonfinite, render
from stagescope_wire.names import unit_of_metric, unknown_name
from stagescope_wire.nonfinite import Json, JsonObject
from stagescope_wire.render import context
from stagescope_wire.render_html import escaped, html_bars, html_block, html_table, html_text

if TYPE_CHECKING:
    import pandas
    import polars
    import pyarrow


KEY_METRICS: Final[tuple[str, ...]] = (
    "rollout_corr/k3_kl", "rollout_corr/kl", "logprob_abs_diff/mean", "logprob_abs_diff/max",
    "training/rollout_probs_diff_mean", "training/rollout_probs_diff_max",
    "training/rollout_actor_probs_pearson_corr", "per_round/max_diff_value",
    "per_round/max_round_diff", "counts/tokens",
)  # fmt: skip
"""The most important metrics; they are displayed first."""

_ROUND_MEAN: Final = re.compile(r"per_round/round_\d+_abs_diff_mean")


_Columns: TypeAlias = dict[str, tuple[str | float, ...]]


class Metrics(Mapping[str, float]):
    """The metrics of one step: a mapping of published names to floats, with their provenance.

    Usage:
        >>> metrics = session.step(5).metrics()
        >>> metrics["rollout_corr/k3_kl"]
        >>> metrics.under("per_round/")          # those with this prefix
        >>> metrics.complete, metrics.missing    # may be 'unknown'; ranks that have not arrived
        >>> metrics.comparable, metrics.cause    # read them before you trust a number
    """

    __slots__ = ("_about", "_values")

    def __init__(self, values: Mapping[str, float], about: JsonObject) -> None:
        self._values = dict(values)
        self._about = dict(about)

    @classmethod
    def from_answer(cls, answer: JsonObject) -> Metrics:
        """Return the metrics in an answer of `/steps/{step}/metrics`."""
        about = {name: value for name, value in answer.items() if name != "metrics"}
        for name in ("noise_floor", "rollout_is", "coverage"):
            about[name] = nonfinite.numbers(about.get(name))
        return cls(nonfinite.numbers(answer.get("metrics") or {}), about)

    @property
    def run(self) -> str | None:
        """Name of the run that answered."""
        return self._about.get("run")

    @property
    def attempt(self) -> int | None:
        """Number of the attempt that answered."""
        return self._about.get("attempt")

    @property
    def step(self) -> int | None:
        """The step."""
        return self._about.get("step")

    @property
    def stage(self) -> str | None:
        """The stage whose numbers these are."""
        return self._about.get("stage")

    @property
    def complete(self) -> str:
        """The completeness of the step: 'complete', 'partial', 'open', or 'unknown'."""
        return str(self._about.get("complete") or "unknown")

    @property
    def missing(self) -> list[Row]:
        """The expected ranks that have not arrived: role, rank, stage, status, since."""
        return list(self._about.get("missing") or [])

    @property
    def coverage(self) -> JsonObject:
        """Tokens sent, counted and left out with the reason; gaps by kind. {} where not known."""
        return dict(self._about.get("coverage") or {})

    @property
    def comparable(self) -> str:
        """Whether the two streams can be compared at all: a verdict such as 'comparable'."""
        return str(self._about.get("comparable") or "unknown")

    @property
    def cause(self) -> str | None:
        """The likeliest cause where streams cannot be compared, such as 'shifted'; else None."""
        return self._about.get("cause")

    @property
    def step_comparable(self) -> str:
        """The verdict on the whole step: one rank or role may hide a problem of the others."""
        return str(self._about.get("step_comparable") or self.comparable)

    @property
    def comparability(self) -> list[Row]:
        """The reasons against comparing the two streams: code, verdict, text."""
        return list(self._about.get("comparability") or [])

    @property
    def begun_again(self) -> list[Row]:
        """The ranks that began the step again: role, ranks, stages. Both passes count."""
        return list(self._about.get("begun_again") or [])

    @property
    def noise_floor(self) -> dict[str, float] | None:
        """The same statistics of the trainer against itself; None if they were not measured."""
        return self._about.get("noise_floor")

    @property
    def nonfinite(self) -> JsonObject:
        """Counts of NaN, +inf and -inf under the mask, per stream."""
        return self._about.get("nonfinite") or {}

    @property
    def about(self) -> JsonObject:
        """The fields of the answer besides the metrics."""
        return MappingProxyType(self._about)

    def __getitem__(self, name: str) -> float:
        if name not in self._values:
            raise unknown_name(name, tuple(self._values), what="metric")
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def _ipython_key_completions_(self) -> list[str]:
        return [*self._values]

    def head(self) -> Metrics:
        """Return the ten most important metrics that exist; all metrics if none of them does."""
        first = {name: self._values[name] for name in KEY_METRICS if name in self._values}
        return Metrics(first or self._values, self._about)

    def under(self, prefix: str) -> Metrics:
        """Return the metrics whose names begin with `prefix`."""
        kept = {name: value for name, value in self._values.items() if name.startswith(prefix)}
        return Metrics(kept, self._about)

    def table(self) -> Table:
        """Return the metrics as a table of name and value."""
        about = {n: v for n, v in self._about.items() if n in ("run", "attempt", "step")}
        return Table(self._columns(), title="metrics", about=about)

    def _columns(self) -> _Columns:
        return {"name": tuple(self._values), "value": tuple(self._values.values())}

    def to_dicts(self) -> list[Row]:
        """Return one dict with name and value per metric."""
        return self.table().to_dicts()

    def to_pandas(self) -> pandas.DataFrame:
        """Return a pandas DataFrame of name and value."""
        return self.table().to_pandas()

    def to_polars(self) -> polars.DataFrame:
        """Return a polars DataFrame of name and value."""
        return self.table().to_polars()

    def to_arrow(self) -> pyarrow.Table:
        """Return a pyarrow Table of name and value."""
        return self.table().to_arrow()

    @property
    def heading(self) -> str:
        """Run, attempt, step, role and stage of the numbers, on one line."""
        source = " ".join(str(self._about[n]) for n in ("role", "stage") if self._about.get(n))
        return ", ".join(p for p in ("metrics", context(self._about), source) if p)

    def notes(self) -> list[str]:
        """Return what a reader must know about the numbers, one sentence per line."""
        notes = []
        if self.complete != "complete":
            word = "waiting for" if self.complete == "open" else "missing"
            absent = f", {word} {render.format_value(self.missing)}" if self.missing else ""
            notes.append(f"complete: {self.complete}{absent}")
        if tokens := token_accounting(self._about.get("coverage") or {}):
            notes.append(tokens)
        notes += coverage_notes(self._about.get("coverage") or {})
        notes += begun_again(self._about)
        if "comparable" in self._about:
            notes.append(f"comparable: {self.comparable}")
        notes += [f"  {reason_text(item)}" for item in self.comparability]
        notes += step_verdict_notes(self._about)
        bad = _counted(self.nonfinite)
        if bad:
            notes.append(f"not finite under the mask: {bad}")
        if self._about.get("superseded_by") is not None:
            by = render.format_value(self._about["superseded_by"])
            notes.append(f"superseded by attempt {by}")
        if self._about.get("also_live"):
            live = ", ".join(str(item.get("run")) for item in self._about["also_live"])
            notes.append(f"also live: {live}")
        return [render.printable(note) for note in notes]

    def lines(self, *, width: int = 80) -> list[str]:
        """Return the metrics as lines of text of at most `width` columns, without the heading.

        The notes are wrapped, never shortened.
        """
        lines: list[str] = []
        for note in self.notes():
            text = note.lstrip()
            lines += render.wrapped(" " * (len(note) - len(text)), text, width)
        return [*lines, *self.table().lines(width=width)]

    def __repr__(self) -> str:
        first = self.head()
        rest = len(self) - len(first)
        more = [f"... {rest} more: .table(), .under(prefix)"] if rest else []
        return "\n".join([render.clip(self.heading, 80), *first.lines(), *more])

    def _repr_html_(self) -> str:
        first = self.head()
        rest = Metrics({n: v for n, v in self._values.items() if n not in first}, self._about)
        notes = "".join(f"<div>{escaped(note)}</div>" for note in self.notes())
        shown = self._picture()
        shown += html_table(first._with_units(), units={}, caption=self.heading)
        if not len(rest):
            return html_block("", f"{shown}{notes}")
        table = html_table(rest._with_units(), units={}, caption="")
        folded = f"<details><summary>{len(rest)} more metrics</summary>{table}</details>"
        return html_block("", f"{shown}{notes}{folded}")

    def _picture(self) -> str:
        """Return the mean mismatch of each round as a small picture; "" for fewer than two."""
        names = [name for name in self._values if _ROUND_MEAN.fullmatch(name)]
        names.sort(key=lambda name: int(name.split("_")[2]))
        labels = [f"round {name.split('_')[2]}" for name in names]
        values = [self._values[name] for name in names]
        return html_bars(labels, values, "mean |d| by round") if len(names) > 1 else ""

    def _with_units(self) -> _Columns:
        return {**self._columns(), "unit": tuple(map(unit_of_metric, self._values))}


class Record(Mapping[str, Json]):
    """An object with named fields, such as the service's status; a read-only mapping."""

    __slots__ = ("_fields", "_title")

    def __init__(self, fields: JsonObject, *, title: str = "") -> None:
        self._fields = dict(fields)
        self._title = title

    def __getitem__(self, name: str) -> Json:
        if name not in self._fields:
            raise unknown_name(name, tuple(self._fields), what="field")
        return self._fields[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def _ipython_key_completions_(self) -> list[str]:
        return [*self._fields]

    @property
    def heading(self) -> str:
        """The title of the object."""
        return self._title

    def lines(self, *, width: int = 80) -> list[str]:
        """Return one line per field; long values are wrapped, and paths stay in one piece."""
        fields = _flattened(self._fields).items()
        return render.aligned({n: render.format_value(v, _unit(n)) for n, v in fields}, width)

    def __repr__(self) -> str:
        return "\n".join([self._title, *self.lines()] if self._title else self.lines())

    def _repr_html_(self) -> str:
        """Return the text with all fields folded below it; a table if the text has all fields."""
        columns = self._cells()
        if type(self).lines is Record.lines:
            return html_table(columns, units={}, caption=self._title)
        text = "\n".join(map(render.printable, self.lines(width=_HTML_WIDTH)))
        table = html_table(columns, units={}, caption="")
        return html_block(
            self.heading,
            f"{html_text(text)}"
            f"<details><summary>all {len(columns['field'])} fields</summary>{table}</details>",
        )

    def _cells(self) -> _Columns:
        """Return every field and its value as text; times and sizes have their units."""
        fields = _flattened(self._fields)
        values = tuple(_with_unit(value, _unit(name)) for name, value in fields.items())
        return {"field": tuple(fields), "value": values}


_HTML_WIDTH: Final = 110


def _unit(name: str) -> str:
    return render.unit_of(name.rpartition(".")[2])


def _with_unit(value: Json, unit: str) -> Json:
    """Return a number or text with its unit; other values stay what they are."""
    if not (value is None or isinstance(value, str | int | float)):
        return value
    text = render.format_value(value, unit)
    return f"{text} s" if unit == "s" and isinstance(value, int | float) else text


class Status(Record):
    """The service's state: ready or the reason why not, what it ingests, what it stores."""

    __slots__ = ()

    def lines(self, *, width: int = 80) -> list[str]:
        """Return it as lines of at most `width` columns; `dict(status)` has every field."""
        coordinator = self.get("coordinator") or {}
        ready = "ready" if self.get("ready", True) else f"not ready: {self.get('reason')}"
        started, size = coordinator.get("started"), self.get("catalogue_bytes")
        since = started and f"since {render.format_value(started, 'unix')}"
        facts: dict[str, object] = {
            "version": self.get("version"),
            "coordinator": since and f"{since}, process {coordinator.get('pid')}",
            **{label: coordinator.get(name) for name, label in _STATUS.items()},
            "data": self.get("data_dir"),
            "catalogue": None if size is None else render.format_bytes(size),
            "keeping": (coordinator.get("keeping") or {}).get("reason"),
        }
        texts = {n: render.format_value(value) for n, value in facts.items() if value is not None}
        return [*render.wrapped("", ready, width), *render.aligned(texts, width)]


_STATUS: Final = {
    "live_processes": "live processes", "events_taken": "events taken",
    "pending_payloads": "payloads to read", "revision": "plan revision",
}  # fmt: skip


_KINDS: Final = {"nan": "NaN", "posinf": "inf", "neginf": "-inf"}


def _counted(streams: Mapping[str, Json]) -> str:
    """Return counts of tokens as text, such as "3 NaN in old"; empty if there are none."""
    return ", ".join(
        f"{count} {_KINDS.get(kind, kind)} in {stream}"
        for stream, kinds in streams.items()
        if isinstance(kinds, Mapping)
        for kind, count in kinds.items()
        if count
    )


def _flattened(fields: JsonObject, prefix: str = "") -> dict[str, Json]:
    """Return nested mappings as fields with dotted names."""
    flat: dict[str, Json] = {}
    for name, value in fields.items():
        key = render.printable(f"{prefix}{name}")
        flat.update(_flattened(value, f"{key}.") if isinstance(value, Mapping) else {key: value})
    return flat
