"""The progress of a capture: acknowledgements, the result of each step, and the dumps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from stagescope.answers import Record
from stagescope.table import Table
from stagescope_wire.captures import needs_ranks
from stagescope_wire.nonfinite import JsonObject
from stagescope_wire.render import counted, grouped

ENDED: Final = frozenset(
    {"complete", "partial", "empty", "given up", "too late", "refused", "withdrawn"}
)
"""States after which nothing more is collected."""

_REQUEST_FIELDS: Final = ("run", "stages", "ranks", "steps")
_RANKS: Final = ("role", "rank", "acknowledged", "there", "joined_later", "host", "pid")
_STEPS: Final = ("attempt", "step", "state", "collected", "waiting", "gaps")
_DUMPS: Final = ("attempt", "step", "stage", "role", "rank", "part", "state", "bytes", "seconds")
_MAX_NAMED: Final = 8
"""Ranks or estimates that are listed one by one."""


class RequestedCapture(Record):
    """The answer of `POST /captures`: the request with its id and the state of the agreement."""

    __slots__ = ()

    def __init__(self, answer: JsonObject) -> None:
        super().__init__(answer, title=f"capture {answer.get('capture_id')}")

    @property
    def warnings(self) -> list[str]:
        """What may be misspelt, such as a stage that no rank has run."""
        return list(self.get("warnings") or ())

    @property
    def remarks(self) -> list[str]:
        """The notes that are no warnings."""
        warnings = self.get("warnings") or ()
        return [note for note in self.get("notes") or () if note not in warnings]

    def lines(self, *, width: int = 80) -> list[str]:
        """Return the request, the step on which it starts, its estimates and notes."""
        agreement = self.get("agreement") or {}
        lines = [
            f"{name}: {_value(self[name])}"
            for name in _REQUEST_FIELDS
            if self.get(name) is not None
        ]
        lines.append(f"state: {agreement.get('phase', 'asked')}")
        if agreement.get("reason"):
            lines.append(f"reason: {agreement['reason']}")
        if agreement.get("start") is not None:
            lines.append(f"starts at step {agreement['start']}")
        if agreement.get("without"):
            lines.append(f"without {_names(agreement['without'])}")
        lines += map(_estimate_line, (agreement.get("estimates") or ())[:_MAX_NAMED])
        lines += [f"warning: {text}" for text in self.warnings]
        lines += [f"note: {text}" for text in self.remarks]
        return [*lines, f"see: stagescope progress {self.get('capture_id')} --wait"]


class CaptureProgress(Record):
    """The answer of `/captures/{capture_id}`, also as the tables `ranks`, `steps` and `dumps`."""

    __slots__ = ()

    def __init__(self, answer: JsonObject) -> None:
        super().__init__(answer, title=f"capture {answer['capture_id']}, {answer['state']}")

    @property
    def ended(self) -> bool:
        """Whether nothing more is collected."""
        return self["state"] in ENDED

    @property
    def is_abandoned(self) -> bool:
        """Whether no requested rank is alive any more: the capture waits for the next attempt.

        If no rank has reported yet, it waits for the run, or for the ranks.
        """
        ranks = self["ranks"]
        return bool(ranks) and not self.ended and not any(row["there"] for row in ranks)

    @property
    def is_unknown(self) -> bool:
        """Whether no requested rank has ever reported: its run, role or number may not exist."""
        return not self["ranks"]

    @property
    def is_unread(self) -> bool:
        """Whether the service still reads operators of its dumps."""
        return bool(self.get("unread_dumps"))  # an older service does not say it

    def ranks(self) -> Table:
        """Return the requested ranks, and which of them have acknowledged."""
        return self._table("ranks", _RANKS)

    def steps(self) -> Table:
        """Return the state of each step, such as complete, partial or waited for."""
        return self._table("steps", _STEPS)

    def dumps(self) -> Table:
        """Return every dump, with its path."""
        return self._table("dumps", _DUMPS)

    def lines(self, *, width: int = 80) -> list[str]:
        """Return the progress as text, one fact per line."""
        agreement = self["agreement"]
        kept = () if needs_ranks(self["order"]) else self["order"]["keep"]
        lines = [
            f"the service keeps {', '.join(kept)} and asks no rank"
            if kept
            else _acknowledgements(self["ranks"], self["state"])
        ]
        run = self.get("run")
        if run is not None and self.get("attempt") is None and not self.ended:
            lines = [f"no run {run} has reported yet: the capture waits for it"]
        if unmatched := self.get("unmatched_ranks"):
            lines.append(f"rank {_numbers(unmatched)} is not connected: nothing is collected of it")
        if self.is_abandoned:
            lines.append("waiting: no requested rank is connected")
        if self["reason"]:
            lines.append(f"reason: {self['reason']}")
        if agreement["start"] is not None:
            trip = agreement["round_trip"]
            latency = "" if trip is None else f" (agreed in {trip:.2f} s)"
            listed = agreement.get("steps")
            begins = not isinstance(listed, list) or agreement["start"] in listed
            text = "starts at" if begins else "active from"
            lines.append(f"{text} step {agreement['start']}{latency}")
        if agreement["without"]:
            lines.append(f"without {_names(agreement['without'])}")
        if agreement["missed_steps"]:
            lines.append(f"started before the agreement: steps {agreement['missed_steps']}")
        lines += map(_estimate_line, agreement["estimates"][:_MAX_NAMED])
        several = len({step.get("attempt") for step in self["steps"]}) > 1
        lines += [_step_line(step, run, kept, of_attempt=several) for step in self["steps"]]
        lines += _replaced_filters(self["dumps"])
        lines += _error_lines(self["dumps"])
        lines += [dump["path"] for dump in self["dumps"] if dump["path"]]
        if self.is_unread:
            dumps = counted(self["unread_dumps"], "dump")
            lines.append(f"the service still reads the operators of {dumps}")
        return lines

    def _table(self, name: str, order: Sequence[str]) -> Table:
        title = f"{name} of capture {self['capture_id']}"
        return Table.from_rows(self[name], order=order, title=title, about={})


def _value(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {item}" for name, item in value.items() if item is not None)
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _acknowledgements(ranks: Sequence[JsonObject], state: str) -> str:
    if not ranks:
        return "no requested rank has reported yet"
    late = [rank for rank in ranks if not rank["acknowledged"]]
    done = {"asked": "acknowledged the request", "withdrawn": "released it"}
    text = f"{len(ranks) - len(late)} of {counted(len(ranks), 'rank')} "
    text += "has " if len(ranks) == 1 else "have "
    text += done.get(state, "acknowledged the agreed step")
    if not late:
        return text
    return f"{text}; {'not' if state in ENDED else 'waiting for'} {_names(late)}"


def _names(ranks: Sequence[JsonObject]) -> str:
    return _listed([f"{rank['role']} {rank['rank']}" for rank in ranks])


def _numbers(ranks: Sequence[int]) -> str:
    return _listed([*map(str, ranks)])


def _listed(names: Sequence[str]) -> str:
    rest = len(names) - _MAX_NAMED
    return ", ".join(names[:_MAX_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def _estimate_line(estimate: JsonObject) -> str:
    location = f"{estimate['role']} {estimate['rank']}, {estimate['stage']}"
    basis = estimate.get("basis")
    if estimate.get("error") or basis in (None, "unknown"):
        return f"estimate of {location}: {estimate.get('error') or 'not known'}"
    if estimate.get("assumed"):
        tokens = counted(estimate["tokens"], "token")
        basis = f"{basis}, {tokens} assumed: no tensor was recorded there yet"
    size, seconds = estimate["bytes"] / 1e6, estimate["seconds"]
    time = f"{seconds:.1f} s" if seconds >= 0.05 else "less than 0.1 s"
    return f"estimate of {location}: {size:.1f} MB, {time} a step ({basis})"


def _replaced_filters(dumps: Sequence[JsonObject]) -> list[str]:
    """Return which ranks and steps of msprobe's config the request replaced, each text once."""
    texts = dict.fromkeys(text for dump in dumps for text in dump.get("overrides") or ())
    return [text for text in texts if str(text).startswith(("rank:", "step:"))]


def _step_line(step: JsonObject, run: str | None, kept: Sequence[str], *, of_attempt: bool) -> str:
    """Return the line of a step.

    Args:
        step: the step.
        run: of the capture.
        kept: data that the service keeps if it asks no rank.
        of_attempt: whether to name the attempt.
    """
    number, collected = step["step"], step["collected"]
    label = f"step {number} of attempt {step['attempt']}" if of_attempt else f"step {number}"
    if step["state"] == "empty":
        if gap := step.get("gap"):
            return f"{label}: nothing of it is left: {gap}"
        why = f"no requested rank recorded {_listed(kept)} in" if kept else "no rank did"
        return f"{label}: nothing to {'keep' if kept else 'collect'}, {why} these stages"
    text = f"{label}: {step['state']}"
    if collected or not kept:
        ranks = counted(collected, "rank")
        text += f", tensors of {ranks} kept" if kept else f", {ranks} collected"
    if step["waiting"]:
        text += f"; waiting for {_names(step['waiting'])}"
    gaps = [f"{gap['role']} {gap['rank']} {gap['state']}" for gap in step["gaps"][:_MAX_NAMED]]
    text += f"; {', '.join(gaps)}" if gaps else ""
    if unrecorded := step.get("unrecorded"):
        text += f"; no rank recorded {_listed(unrecorded)}"
    if kept and collected and run is not None and step["state"] != "waiting":
        attempt = "" if step["attempt"] is None else f" --attempt {step['attempt']}"
        text += f" (stagescope kept {number} --run {run}{attempt})"
    return text


def _error_lines(dumps: Sequence[JsonObject]) -> list[str]:
    """Return why dumps failed, once for each reason."""
    by_reason = grouped(
        ((dump["stage"], dump["role"], dump["error"]), dump["rank"])
        for dump in dumps
        if dump.get("error")
    )
    return [
        f"{stage} of {role} {_numbers([*dict.fromkeys(ranks)])}: {error}"
        for (stage, role, error), ranks in [*by_reason.items()][:_MAX_NAMED]
    ]
