"""Converts rows of the catalogue to rows of answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, TypeVar, cast

from stagescope_service.store.catalogue import Catalogue
from stagescope_service.store.queries.overview import (
    DescribedAttempt,
    ListedAttempt,
    ListedRun,
    ListedStep,
    RunRow,
)
from stagescope_service.store.tables import (
    DumpRow,
    ProcessColumns,
    ScalarRow,
    StageRow,
    StepState,
    UnfinishedRank,
)
from stagescope_service.views.encoding import JsonObject
from stagescope_service.views.models import runs as models
from stagescope_service.views.models import steps as step_models
from stagescope_service.views.models.common import BegunAgain, Missing
from stagescope_service.views.models.common import DumpRow as AnsweredDump
from stagescope_service.views.models.runs import Superseded
from stagescope_service.views.reading.completeness import StepProgress, began, ended
from stagescope_wire.errors import NotFound
from stagescope_wire.links import links_from_json, with_links
from stagescope_wire.nonfinite import Json
from stagescope_wire.schema import LAYOUT_COLUMNS, Part

M = TypeVar("M", bound=Mapping[str, object])
R = TypeVar("R", bound=Mapping[str, object])


def run_row(row: ListedRun) -> RunRow:
    """Return a run, with its newest attempt."""
    return as_row(RunRow, row)


def attempt_row(row: DescribedAttempt, superseded: list[Superseded]) -> models.AttemptRow:
    """Return an attempt with its fingerprint."""
    state = "ended" if row["ended_wall"] is not None else "live" if row["live"] else "silent"
    return as_row(
        models.AttemptRow, row,
        attempt=row["number"], state=state, begun=row["opened_wall"], ended=row["ended_wall"],
        attempt_key=row["key"], superseded=superseded,
    )  # fmt: skip


def superseded_steps(
    attempts: Sequence[ListedAttempt], last_steps: Mapping[int, int]
) -> dict[int, list[Superseded]]:
    """Return the steps that later attempts repeat, by the number of the attempt.

    An attempt that began no step repeats none. Where several repeat a step, the newest counts.

    Args:
        attempts: of one run.
        last_steps: number of an attempt -> the last step that it began and another discards.
    """
    resumed = sorted(
        (
            (row["number"], row["resumed_from_step"])
            for row in attempts
            if row["resumed_from_step"] is not None and row["first_step"] is not None
        ),
        reverse=True,
    )
    return {
        row["number"]: _repeats(row, last_steps.get(row["number"]), resumed) for row in attempts
    }


def _repeats(
    row: ListedAttempt, last: int | None, resumed: Sequence[tuple[int, int]]
) -> list[Superseded]:
    """Return what repeats the steps of one attempt; `resumed` begins with the newest attempt."""
    if row["first_step"] is None or last is None:
        return []
    found: list[Superseded] = []
    for number, step in resumed:
        if number <= row["number"]:
            break
        first = max(step + 1, row["first_step"])
        if first <= last:
            found.append({"from_step": first, "by": number})
            last = first - 1  # from here on a newer attempt counts
    return found[::-1]


def step_row(
    row: ListedStep,
    superseded_by: int | None,
    progress: StepProgress | None,
    gap: str | None,
    begun_again: Sequence[BegunAgain],
) -> models.StepRow:
    """Return a step of a list.

    Args:
        row: the step.
        superseded_by: number of the attempt that repeats it.
        progress: of an open step.
        gap: what its numbers lack.
        begun_again: ranks that began it again within its attempt.
    """
    closed = row["closed_wall"] is not None
    missing: Sequence[UnfinishedRank | Missing]
    if closed or progress is None:
        complete = (row["completeness"] or "unknown") if closed else "open"
        missing = row["missing"] or []
    else:
        complete, missing = progress.complete, progress.missing
    return as_row(
        models.StepRow, row,
        complete=complete, missing=missing, superseded_by=superseded_by, gap=gap,
        measured=row["has_summary"], begun_again=begun_again, pinned=bool(row["pinned"]),
    )  # fmt: skip


def stage_row(row: StageRow, now: float) -> step_models.StageRow:
    """Return one part of a stage on one rank; `seconds` is monotonic, None while it is open."""
    begin, end = began(row), ended(row)
    seconds = None
    if row["begin_mono"] is not None and row["end_mono"] is not None:
        # Raw calls are timed when they arrive, and the end may arrive before the begin.
        seconds = max(row["end_mono"] - row["begin_mono"], 0.0)
    is_open = (row["status"] or "open") == "open"
    return as_row(
        step_models.StageRow, row,
        part=str(Part.of_columns(row)), status=row["status"] or "open", seconds=seconds,
        begin_wall=begin, end_wall=end, superseded=bool(row["superseded"]),
        open_seconds=max(now - begin, 0.0) if is_open and begin is not None else None,
    )  # fmt: skip


def absent_row(missing: Missing, now: float) -> JsonObject:
    """Return the row of a rank that has not begun a stage, for a list of `stage_row`."""
    since = missing["since"]
    return {
        "stage": missing["stage"],
        "role": missing["role"],
        "rank": missing["rank"],
        "part": None,
        "status": "not begun",
        "seconds": None,
        "begin_wall": None,
        "end_wall": None,
        "waited_since": since,
        "waited_seconds": None if since is None else max(now - since, 0.0),
    }


def scalar_row(row: ScalarRow) -> step_models.ScalarRow:
    """Return one named number of one rank."""
    return as_row(step_models.ScalarRow, row, part=str(Part.of_columns(row)))


def dump_row(row: DumpRow) -> AnsweredDump:
    """Return one dump of one rank."""
    return as_row(AnsweredDump, row, part=str(Part.of_columns(row)))


def as_row(kind: type[R], row: Mapping[str, object], **own: object) -> R:
    """Return a row of an answer: its fields of `own`, the others from a row of the catalogue."""
    fields = {
        name: own[name] if name in own else row[name]
        for name in kind.__annotations__
        if name in own or name in row
    }
    return cast("R", fields)


def chosen_columns(row: Mapping[str, object], names: Iterable[str]) -> JsonObject:
    """Return the columns of these names."""
    return {name: row[name] for name in names}


def with_attempt_numbers(
    rows: Iterable[Mapping[str, Json]], numbers: Mapping[int, int]
) -> list[JsonObject]:
    """Return rows with the attempt's number in place of its key in the catalogue.

    Args:
        rows: with a column `attempt_id`.
        numbers: attempt_id -> number.
    """
    return [
        {
            **{name: value for name, value in row.items() if name != "attempt_id"},
            "attempt": numbers.get(row["attempt_id"]),
        }
        for row in rows
    ]


def finding_rows(
    rows: Iterable[Mapping[str, Json]], numbers: Mapping[int, int]
) -> list[JsonObject]:
    """Return rows of findings with the attempt's number and, in `see`, links to that attempt.

    `advice` ends with the paths of the links.

    Args:
        rows: of one run.
        numbers: attempt_id -> number, of all attempts of the run. The newest is the default of
            every path, and is not named.
    """
    newest = max(numbers.values(), default=None)
    found = with_attempt_numbers(rows, numbers)
    for row in found:
        number = row["attempt"]
        links = links_from_json(row["see"])
        if number != newest:
            links = tuple(link.within(None, number) for link in links)
        if row["advice"] is not None or links:
            row["advice"] = with_links(row["advice"] or "", links)
        row["see"] = [link.to_json() for link in links]
    return found


def layout_of(process: ProcessColumns | None) -> JsonObject:
    """Return where a rank ran; unknown columns are left out."""
    names = ("data_rank", "world_size", "node_id", "pid", *LAYOUT_COLUMNS)
    known = {} if process is None else chosen_columns(process, names)
    return {name: value for name, value in known.items() if value is not None}


def matching(rows: Sequence[M], owner: str, **filters: Json) -> list[M]:
    """Return the rows whose columns equal the filters that are not None.

    Args:
        rows: to filter.
        owner: what the rows belong to, for the error message.
        filters: column -> its value.

    Raises:
        NotFound: no row has the value of a filter; names the values that exist.
    """
    for name, value in filters.items():
        if value is None:
            continue
        found: Iterable[Json] = {row[name] for row in rows if row[name] is not None}
        values = sorted(found)
        if rows and value not in values:
            shown = ", ".join(map(str, values[:20])) + (", ..." if len(values) > 20 else "")
            raise NotFound(
                f"{owner} has no {name} {value!r:.100}",
                expected=f"one of {shown}" if values else "",
            )
        rows = [row for row in rows if row[name] == value]
    return list(rows)


class Lineage:
    """The attempts of a run: their numbers, and which of them repeats a step."""

    def __init__(self, attempts: Sequence[ListedAttempt]) -> None:
        self.numbers = {row["attempt_id"]: row["number"] for row in attempts}
        self._resumed = [
            (row["number"], row["resumed_from_step"])
            for row in attempts
            if row["resumed_from_step"] is not None
        ]

    def superseded_by(self, row: StepState) -> int | None:
        """Return the number of the newest attempt that repeats a step, or None.

        An attempt that resumed before the step discards its result, even before it has reached the
        step again.
        """
        if row["superseded_by"] is not None:
            return row["superseded_by"]
        return self.repeated_by(row["attempt_id"], row["step"])

    def repeated_by(self, attempt_id: int, step: int) -> int | None:
        """Return the number of the newest attempt that resumed before a step of an earlier one."""
        if not self._resumed:
            return None
        number = self.numbers[attempt_id]
        later = [each for each, resumed in self._resumed if each > number and resumed < step]
        return max(later, default=None)


_NAMED_GAPS: Final = 5


def unreported_steps(catalogue: Catalogue, attempts: Sequence[ListedAttempt]) -> str | None:
    """Return which steps between two attempts of a run were never reported, as a sentence.

    If a run reports every tenth step, a distance of ten between two attempts is no gap. None: there
    are no such steps.

    Args:
        catalogue: of the attempts.
        attempts: of one run.
    """
    texts: list[str] = []
    before: ListedAttempt | None = None
    for row in sorted(attempts, key=lambda row: row["number"]):
        first, closed = row["first_step"], row["last_closed_step"]
        if first is None:
            continue
        if before is not None and first > (before["last_closed_step"] or 0) + 1:
            newest = [each["step"] for each in catalogue.steps(before["attempt_id"], limit=2)]
            usual = newest[0] - newest[1] if len(newest) > 1 else 1
            if newest and first - newest[0] > usual:
                texts.append(
                    f"{_range(newest[0] + 1, first - 1)} never reported: attempt {row['number']} "
                    f"begins with {first}, after {newest[0]} of attempt {before['number']}"
                )
        if before is None or (closed or first) >= (before["last_closed_step"] or 0):
            before = row
    if len(texts) > _NAMED_GAPS:
        texts = [f"{len(texts) - _NAMED_GAPS} more gaps earlier", *texts[-_NAMED_GAPS:]]
    return "; ".join(texts) or None


def _range(first: int, last: int) -> str:
    return f"step {first} was" if first == last else f"steps {first} to {last} were"
