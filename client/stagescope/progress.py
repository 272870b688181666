"""How far a capture has come: who acknowledged it, what each step came to, and its dumps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from stagescope.answers import Record
from stagescope.frames import Table

ENDED: Final = frozenset({"complete", "partial", "given up", "too late", "refused", "withdrawn"})
"""States after which nothing more is collected."""

_ORDER: Final = ("run", "stages", "ranks", "steps")
_RANKS: Final = ("role", "rank", "acknowledged", "there", "joined_later", "host", "pid")
_STEPS: Final = ("attempt", "step", "state", "collected", "waiting", "gaps")
_DUMPS: Final = ("attempt", "step", "stage", "role", "rank", "part", "state", "bytes", "seconds")
_NAMED: Final = 8


class CaptureProgress(Record):
    """What `POST /captures` answers: the order with its id, as far as it is agreed on."""

    __slots__ = ()

    def __init__(self, said: Mapping[str, Any]) -> None:
        super().__init__(said, title=f"capture {said.get('capture_id')}")

    def lines(self, *, width: int = 80) -> list[str]:
        """Return what was ordered, where it starts, and what the asker should know."""
        agreement = self.get("agreement") or {}
        lines = [f"{name}: {_said(self[name])}" for name in _ORDER if self.get(name) is not None]
        lines.append(f"state: {agreement.get('phase', 'asked')}")
        if agreement.get("reason"):
            lines.append(f"reason: {agreement['reason']}")
        if agreement.get("start") is not None:
            lines.append(f"starts at step {agreement['start']}")
        if agreement.get("without"):
            lines.append(f"without {_names(agreement['without'])}")
        lines += map(_estimate, (agreement.get("estimates") or ())[:_NAMED])
        lines += [f"note: {note}" for note in self.get("notes") or ()]
        return [*lines, f"see: stagescope progress {self.get('capture_id')} --wait"]


class Progress(Record):
    """What `/captures/{capture_id}` says; `ranks`, `steps` and `dumps` are tables of it."""

    __slots__ = ()

    def __init__(self, said: Mapping[str, Any]) -> None:
        super().__init__(said, title=f"capture {said['capture_id']}, {said['state']}")

    @property
    def ended(self) -> bool:
        """Whether nothing more is collected."""
        return self["state"] in ENDED

    @property
    def is_abandoned(self) -> bool:
        """Whether nobody whom it asks is there: it waits for the run's next attempt."""
        return not self.ended and not any(each["there"] for each in self["ranks"])

    def ranks(self) -> Table:
        """Return whom the capture asks, and who has acknowledged it."""
        return self._table("ranks", _RANKS)

    def steps(self) -> Table:
        """Return what each step came to: complete, partial or waited for."""
        return self._table("steps", _STEPS)

    def dumps(self) -> Table:
        """Return every dump, with its path."""
        return self._table("dumps", _DUMPS)

    def lines(self, *, width: int = 80) -> list[str]:
        """Return the state in words, each on a line of its own."""
        agreement = self["agreement"]
        lines = [_asked(self["ranks"], "it" if self["state"] == "asked" else "the agreed step")]
        if unmatched := self.get("unmatched_ranks"):
            lines.append(f"no rank {_numbers(unmatched)} is there: nothing is collected of it")
        if self.is_abandoned:
            lines.append("no rank that it asks is there: it waits for them")
        if self["reason"]:
            lines.append(f"reason: {self['reason']}")
        if agreement["start"] is not None:
            trip = agreement["round_trip"]
            known = "" if trip is None else f" (acknowledged in {trip:.2f} s)"
            lines.append(f"starts at step {agreement['start']}{known}")
        if agreement["without"]:
            lines.append(f"without {_names(agreement['without'])}")
        if agreement["missed_steps"]:
            lines.append(f"begun before it was agreed on: steps {agreement['missed_steps']}")
        lines += map(_estimate, agreement["estimates"][:_NAMED])
        lines += [_step(each) for each in self["steps"]]
        lines += [each["path"] for each in self["dumps"] if each["path"]]
        return lines

    def _table(self, name: str, order: Sequence[str]) -> Table:
        title = f"{name} of capture {self['capture_id']}"
        return Table.from_rows(self[name], order=order, title=title, about={})


def _said(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {each}" for name, each in value.items() if each is not None)
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _asked(ranks: Sequence[Mapping[str, Any]], what: str) -> str:
    late = [each for each in ranks if not each["acknowledged"]]
    told = f"{len(ranks) - len(late)} of {len(ranks)} ranks have acknowledged {what}"
    return told if not late else f"{told}; not {_names(late)}"


def _names(ranks: Sequence[Mapping[str, Any]]) -> str:
    named = ", ".join(f"{each['role']} {each['rank']}" for each in ranks[:_NAMED])
    return named + (f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else "")


def _numbers(ranks: Sequence[int]) -> str:
    named = ", ".join(map(str, ranks[:_NAMED]))
    return named + (f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else "")


def _estimate(said: Mapping[str, Any]) -> str:
    place = f"{said['role']} {said['rank']}, {said['stage']}"
    if said.get("error") or said.get("basis") in (None, "unknown"):
        return f"estimate of {place}: {said.get('error') or 'not known'}"
    basis = said["basis"]
    if said.get("assumed"):
        basis += f", {said['tokens']} tokens assumed: no tensor was recorded there yet"
    size, seconds = said["bytes"] / 1e6, said["seconds"]
    return f"estimate of {place}: {size:.1f} MB, {seconds:.1f} s a step ({basis})"


def _step(each: Mapping[str, Any]) -> str:
    text = f"step {each['step']}: {each['state']}, {each['collected']} ranks collected"
    if each["waiting"]:
        text += f"; waiting for {_names(each['waiting'])}"
    gaps = [f"{gap['role']} {gap['rank']} {gap['state']}" for gap in each["gaps"][:_NAMED]]
    return text + (f"; {', '.join(gaps)}" if gaps else "")
