"""The active plan: the captures with a revision, without I/O.

A change is committed before it is sent to any rank. `wire` returns what `publish` received, so no
rank has seen a revision that a crash undid.
"""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Callable, Iterable
from typing import NamedTuple, cast

from stagescope_service.core.captures.agreement import ASKED, Agreement
from stagescope_service.core.captures.keep_policy import KeepPolicy, keep_policy_of
from stagescope_wire.captures import CAPTURE_FIELDS, matches
from stagescope_wire.errors import Conflict, NotFound
from stagescope_wire.keep import capture_selectors, matching_selectors
from stagescope_wire.plan import (
    Capture,
    CaptureRequest,
    CaptureSpec,
    SentPlan,
    StoredCapture,
    StoredPlan,
)


@dataclasses.dataclass(frozen=True)
class CaptureEntry:
    """A capture in the plan: the request, and the state of its agreement."""

    request: Capture
    agreement: Agreement

    @property
    def capture_id(self) -> str:
        """Its id."""
        return self.request["capture_id"]

    @classmethod
    def from_json(cls, stored: StoredCapture) -> CaptureEntry:
        """Read the result of `stored`."""
        request = {name: value for name, value in stored.items() if name != "agreement"}
        agreed = Agreement.from_json(stored.get("agreement") or {"phase": "agreed"})
        return cls(cast("Capture", request), agreed)

    def stored(self) -> StoredCapture:
        """Return its form in the catalogue and in answers."""
        return {**self.request, "agreement": self.agreement.fields()}

    def wire(self) -> CaptureRequest:
        """Return its form for ranks: before the agreement it matches no step."""
        agreed = self.agreement
        steps = self.request["steps"] if agreed.steps is None else agreed.steps
        pending = agreed.phase == ASKED
        return cast(
            "CaptureRequest",
            {
                **self.request,
                "steps": [] if pending else steps,
                "phase": agreed.phase,
                "agreement": agreed.number,
                "asked_revision": agreed.revision,
            },
        )


class Publication(NamedTuple):
    """A plan at one moment."""

    revision: int
    entries: tuple[CaptureEntry, ...]


class Plan:
    """The active captures, with a revision that grows with every change."""

    def __init__(
        self,
        captures: Iterable[StoredCapture] = (),
        *,
        revision: int = 0,
        keep_policy: KeepPolicy | None = None,
    ) -> None:
        self.entries = {item["capture_id"]: CaptureEntry.from_json(item) for item in captures}
        self._allotted = revision
        self._keep_policy = keep_policy or {}
        self._wire: list[CaptureRequest] = []
        self._published = Publication(revision, ())
        self.publish(self.publication())

    # --- changes --------------------------------------------------------------------------
    def next_revision(self) -> int:
        """Allot the revision of a change; it is visible once it is published."""
        self._allotted += 1
        return self._allotted

    def add(
        self,
        capture: CaptureSpec,
        *,
        by: str,
        now: float,
        has_passed: Callable[[CaptureEntry], bool] = lambda entry: False,
        new_id: Callable[[], str] = lambda: uuid.uuid4().hex[:12],
    ) -> CaptureEntry:
        """Add a validated capture in phase ASKED; return it with its id.

        Args:
            capture: the result of `validate_capture`.
            by: its author.
            now: Unix seconds.
            has_passed: returns whether all steps of a capture have begun, so that the same request
                now means other steps.
            new_id: returns a new id.

        Raises:
            Conflict: the same request is active already.
        """
        for known in self.entries.values():
            if has_passed(known):
                continue
            if all(known.request.get(name) == capture.get(name) for name in CAPTURE_FIELDS):
                raise Conflict(
                    f"capture {known.capture_id} already requests exactly this",
                    advice="to request it again, remove it first: "
                    f"`stagescope remove-capture {known.capture_id}`",
                )
        pending = Agreement(
            revision=self.next_revision(), asked_wall=now, again_left=capture["again"]
        )
        request: Capture = {
            **capture,
            "capture_id": new_id(),
            "source": "http",
            "by": by,
            "created": now,
        }
        entry = CaptureEntry(request, pending)
        self.entries[entry.capture_id] = entry
        return entry

    def remove(self, capture_id: str) -> CaptureEntry:
        """Withdraw a capture.

        Raises:
            NotFound: no such capture is active.
        """
        if capture_id not in self.entries:
            raise NotFound(
                f"no capture {capture_id!r:.100} is active",
                expected=f"one of {', '.join(sorted(self.entries))}" if self.entries else "",
            )
        return self.entries.pop(capture_id)

    def publication(self) -> Publication:
        """Return the present plan, to be published once it is committed."""
        return Publication(self._allotted, tuple(self.entries.values()))

    def publish(self, publication: Publication) -> None:
        """Make a committed plan visible to ranks; a plan older than the visible one is ignored."""
        if publication.revision >= self._published.revision:
            self._published = publication
            self._wire = [entry.wire() for entry in publication.entries]

    # --- what ranks and payloads see -------------------------------------------------------
    @property
    def revision(self) -> int:
        """The revision for ranks to apply."""
        return self._published.revision

    def for_run(self, run: str) -> list[CaptureRequest]:
        """Return the captures that concern `run`."""
        return [item for item in self._wire if item["run"] in (None, run)]

    def wire(self, run: str) -> SentPlan:
        """Return the plan in the form for the ranks of a run."""
        plan: SentPlan = {"revision": self.revision, "captures": self.for_run(run)}
        if (keep := keep_policy_of(self._keep_policy, run)) is not None:
            plan["keep"] = keep
        return plan

    def stored(self) -> StoredPlan:
        """Return the plan in the form for answers."""
        captures = [entry.stored() for entry in self._published.entries]
        return {"revision": self.revision, "captures": captures}

    def keeps(self, *, run: str, stage: str, role: str, rank: int, step: int | None) -> list[str]:
        """Return the plan's selectors that keep parts of this payload, without repeats.

        Selectors are sections, names of tensors, and `parameter/*` and `gradient/*` for what a rank
        recorded of its model for a capture; see `stagescope_wire.keep`.
        """
        words: dict[str, None] = {}
        for capture in self.for_run(run):
            wanted = capture_selectors(capture)
            if wanted and matches(capture, stage=stage, role=role, rank=rank, step=step):
                words.update(dict.fromkeys(wanted))
        if (keep := keep_policy_of(self._keep_policy, run)) is not None:
            own = matching_selectors(keep, stage=stage, role=role, rank=rank, step=step)
            words.update(dict.fromkeys(own))
        return list(words)
