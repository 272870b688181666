"""`Stacks`: what the threads of processes did, as text to read."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from stagescope import render
from stagescope.answers import Record
from stagescope.frames import Table

STUCK_ORDER: Final = (
    "rank", "status", "stage", "seconds", "usual_seconds", "ranks_begun", "ranks", "ranks_ended",
    "role", "process", "host", "pid", "step", "limit_seconds",
)  # fmt: skip
_WHERE: Final = ("process", "host", "pid", "role")


class Stuck(Table):
    """Who holds the others up, a row a rank; as text, each rank's process stands below."""

    __slots__ = ()

    def lines(self, *, width: int = 80, rows: int | None = None) -> list[str]:
        """Return the table and, below it, of each rank its process, host and pid; none is cut."""
        here = {name for name in _WHERE if name in self.names}
        shown = [name for name in self.names if name not in here]
        if width >= render.WIDE_ENOUGH or not len(self) or len(here) < len(_WHERE):
            return super().lines(width=width, rows=rows)
        lines = self.select(*shown).lines(width=width, rows=rows)
        for row in self[:rows]:
            who = f"{row['role']} rank {row['rank']}: "
            lines += render.wrapped(who, _process(row), width)
        return lines


def _process(row: Mapping[str, Any]) -> str:
    """Return `process silent, pid 4711 on gpu-3`; what is unknown is named so."""
    pid = "unknown" if row["pid"] is None else row["pid"]
    return f"process {row['process'] or 'unknown'}, pid {pid} on {row['host'] or 'unknown host'}"


class Stacks(Record):
    """The Python stacks of processes; `rows` holds one mapping a process.

    Usage:
        >>> print(session.stacks(ranks=[1]))             # the training thread of rank 1
        >>> session.stacks(ranks=[1]).rows[0]["threads"] # every thread
        >>> print(step.stacks().all_threads())
    """

    __slots__ = ("_every",)

    def __init__(self, answer: Mapping[str, Any], *, title: str, every: bool = False) -> None:
        super().__init__(answer, title=title)
        self._every = every

    @property
    def rows(self) -> Sequence[Mapping[str, Any]]:
        """The processes: role, rank, stage, state, source, threads, ..."""
        rows: Sequence[Mapping[str, Any]] = self["rows"]
        return rows

    @property
    def not_answered(self) -> Sequence[Mapping[str, Any]]:
        """Who did not answer: role, rank, reason."""
        said: Sequence[Mapping[str, Any]] = self.get("not_answered") or []
        return said

    def of_ranks(self, ranks: Collection[int]) -> Stacks:
        """Return those of these ranks alone."""
        rows = [row for row in self.rows if row["rank"] in ranks]
        return Stacks({**self, "rows": rows}, title=self.heading, every=self._every)

    def all_threads(self) -> Stacks:
        """Return the same, shown with every thread, not the training threads alone."""
        return Stacks(self, title=self.heading, every=True)

    def lines(self, *, width: int = 80) -> list[str]:
        """Return a heading a process, and below it the stacks; frames are never cut."""
        lines: list[str] = ["outermost frame first, as in a traceback"] if self.rows else []
        for row in self.rows:
            lines += [render.clip(_who(row), width), *self._of(row), ""]
        for row in self.not_answered:
            who = f"{row['role'] or ''} rank {row['rank']}".strip()
            lines.append(render.printable(f"{who}: {row['reason']}"))
        return lines or ["no stacks were taken"]

    def _of(self, row: Mapping[str, Any]) -> list[str]:
        threads = row.get("threads") or []
        training = [thread for thread in threads if thread.get("is_training")]
        # Where nobody knows which one trains, all of them may.
        shown = threads if self._every or not training else training
        lines = []
        for thread in shown:
            name = thread.get("name") or f"thread {thread.get('ident')}"
            mark = " (training)" if thread.get("is_training") else ""
            lines.append(render.printable(f"  {name}{mark}"))
            stack = str(thread.get("stack") or "(no Python frame)")
            lines += [f"  {render.printable(line)}" for line in stack.splitlines()]
        if len(shown) < len(threads):
            lines.append(f"  and {len(threads) - len(shown)} other threads")
        return lines


def _who(row: Mapping[str, Any]) -> str:
    place = "" if row.get("step") is None else f" in step {row['step']}"
    stage = f", {row['stage']}" if row.get("stage") else ""
    said = "" if row.get("state") == "answered" else f": {row.get('state')}"
    source = " (its watchdog)" if row.get("source") == "watchdog" else ""
    return render.printable(f"{row.get('role')} rank {row.get('rank')}{place}{stage}{source}{said}")
