"""Answers about hangs: `Stuck`, the ranks that hold up others, and `Stacks` of their threads."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final, TypedDict

from stagescope import render
from stagescope.answers import Record
from stagescope.table import Row, Table
from stagescope.wire.nonfinite import JsonObject

STUCK_ORDER: Final = (
    "rank", "status", "step", "stage", "seconds", "ranks_begun", "ranks", "usual_seconds",
    "ranks_ended", "role", "process", "host", "pid", "limit_seconds",
)  # fmt: skip
_PROCESS_COLUMNS: Final = ("process", "host", "pid", "role")


class Thread(TypedDict):
    """One thread of a process; `stack` is text, the outermost frame first."""

    name: str | None
    ident: int
    is_training: bool
    stack: str


class ProcessStacks(TypedDict):
    """The stacks of one process."""

    role: str
    rank: int
    step: int | None
    stage: str | None
    state: str
    source: str
    threads: Sequence[Thread]
    request_id: str


class NotAnswered(TypedDict):
    """A process that did not answer."""

    role: str | None
    rank: int
    reason: str


class Stuck(Table):
    """The ranks that hold up the others; in text, each rank's process is below the table."""

    __slots__ = ()

    def lines(self, *, width: int = 80, rows: int | None = None) -> list[str]:
        """Return the table, and below it each rank's process, host and pid, never shortened."""
        shown = [name for name in self.names if name not in _PROCESS_COLUMNS]
        has_processes = len(self.names) - len(shown) == len(_PROCESS_COLUMNS)
        if width >= render.WIDE_ENOUGH or not len(self) or not has_processes:
            return super().lines(width=width, rows=rows)
        lines = self.select(*shown).lines(width=width, rows=rows)
        for row in self[:rows]:
            rank = f"{row['role']} rank {row['rank']}: "
            lines += render.wrapped(rank, _process(row), width)
        return lines


def _process(row: Row) -> str:
    """Return a text such as `process silent, pid 4711 on gpu-3`."""
    if row["process"] == "unheard":
        return "no process reports"
    pid = "unknown" if row["pid"] is None else row["pid"]
    # A lease runs out of a process that is stopped, cut off or dead: which of them is not known.
    state = {"gone": "does not answer, its lease ran out"}.get(row["process"], row["process"])
    return f"process {state or 'unknown'}, pid {pid} on {row['host'] or 'unknown host'}"


class Stacks(Record):
    """The Python stacks of processes; `rows` holds one mapping per process.

    Usage:
        >>> print(session.stacks(ranks=[1]))             # the training thread of rank 1
        >>> session.stacks(ranks=[1]).rows[0]["threads"] # every thread
        >>> print(step.stacks().all_threads())
    """

    __slots__ = ("_shows_all_threads",)

    def __init__(self, answer: JsonObject, *, title: str, shows_all_threads: bool = False) -> None:
        super().__init__(answer, title=title)
        self._shows_all_threads = shows_all_threads

    @property
    def rows(self) -> Sequence[ProcessStacks]:
        """The processes that answered."""
        rows: Sequence[ProcessStacks] = self["rows"]
        return rows

    @property
    def not_answered(self) -> Sequence[NotAnswered]:
        """The processes that did not answer, with the reasons."""
        rows: Sequence[NotAnswered] = self.get("not_answered") or []
        return rows

    def of_ranks(self, ranks: Collection[int]) -> Stacks:
        """Return the stacks of these ranks only."""
        answer = {**self, "rows": [row for row in self.rows if row["rank"] in ranks]}
        return Stacks(answer, title=self.heading, shows_all_threads=self._shows_all_threads)

    def all_threads(self) -> Stacks:
        """Return the same stacks, displayed with all threads instead of the training threads."""
        return Stacks(self, title=self.heading, shows_all_threads=True)

    def lines(self, *, width: int = 80) -> list[str]:
        """Return a heading per process, and below it the stacks; frames are never shortened."""
        lines: list[str] = ["outermost frame first, as in a traceback"] if self.rows else []
        for row in self.rows:
            lines += [render.clip(_heading(row), width), *self._threads(row), ""]
        for missing in self.not_answered:
            rank = f"{missing['role'] or ''} rank {missing['rank']}".strip()
            lines.append(render.printable(f"{rank}: {missing['reason']}"))
        return lines or ["no stacks were taken"]

    def _threads(self, row: ProcessStacks) -> list[str]:
        threads = row.get("threads") or []
        training = [thread for thread in threads if thread.get("is_training")]
        # If no thread is known to train, each of them may.
        shown = threads if self._shows_all_threads or not training else training
        lines = []
        for thread in shown:
            name = thread.get("name") or f"thread {thread.get('ident')}"
            mark = " (training)" if thread.get("is_training") else ""
            lines.append(render.printable(f"  {name}{mark}"))
            stack = str(thread.get("stack") or "(no Python frame)")
            lines += [f"  {render.printable(line)}" for line in stack.split("\n")]
        if len(shown) < len(threads):
            others = len(threads) - len(shown)
            lines.append(f"  and {others} other thread{'' if others == 1 else 's'}")
        return lines


def _heading(row: ProcessStacks) -> str:
    step = "" if row.get("step") is None else f" in step {row['step']}"
    stage = f", {row['stage']}" if row.get("stage") else ""
    source = " (its watchdog)" if row.get("source") == "watchdog" else ""
    state = "" if row.get("state") == "answered" else f": {row.get('state')}"
    return render.printable(f"{row.get('role')} rank {row.get('rank')}{step}{stage}{source}{state}")
