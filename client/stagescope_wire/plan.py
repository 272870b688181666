"""The types of the plan: its captures, and what a configuration keeps of payloads.

They are plain dicts, so that they are sent and stored unchanged. `captures.validate_capture` and
`keep.validate_keep` alone define their content.
"""

from __future__ import annotations

from typing import TypeAlias, TypedDict, final

from stagescope_wire.nonfinite import Json


@final
class WorstRanks(TypedDict):
    """The `worst` ranks by their mismatch, so many."""

    worst: int


@final
class NextSteps(TypedDict):
    """The `next` steps of the training, so many."""

    next: int


@final
class EverySteps(TypedDict):
    """Every n-th step from `start` on; None: from the step that the ranks agree on, without end."""

    every: int
    start: int | None
    count: int | None


CaptureRanks: TypeAlias = str | list[int] | WorstRanks
"""'all', numbers, or {'worst': k}."""
CaptureSteps: TypeAlias = str | list[int] | NextSteps | EverySteps
"""'all', numbers, {'next': k}, or {'every': n, 'start': s, 'count': c}."""


class BaselineDump(TypedDict):
    """One dump of an earlier capture."""

    stage: str
    part: str
    role: str
    ranks: list[int]
    path: str


class _BaselineStep(TypedDict):
    capture_id: str
    step: int


class Baseline(_BaselineStep, total=False):
    """The earlier capture, and the step of it, that a capture is compared with."""

    dumps: list[BaselineDump]
    """Added by the service."""


class CaptureLimits(TypedDict, total=False):
    """The limits of a capture."""

    bytes: float | None
    seconds: float | None
    reserve_bytes: int | None
    tokens: int | None


class CaptureScope(TypedDict):
    """The stages, ranks and steps that a capture includes."""

    stages: str | list[str]
    roles: list[str] | None
    ranks: CaptureRanks
    steps: CaptureSteps


class CaptureSpec(CaptureScope):
    """A capture as `validate_capture` returns it; see `CAPTURE_FIELDS`."""

    run: str | None
    config: dict[str, Json] | None
    config_path: str | None
    bench: Baseline | None
    data_dir: str | None
    keep: list[str]
    parameters: list[str]
    gradients: list[str]
    limits: CaptureLimits
    force: bool
    strict: bool
    timeout: float
    late: str
    again: int


class Capture(CaptureSpec):
    """A capture of the plan: with its id, its source and its author."""

    capture_id: str
    source: str
    by: str
    created: float
    """Unix seconds."""


class StoredCapture(Capture, total=False):
    """A capture as the catalogue and answers have it."""

    agreement: dict[str, Json]
    """The fields of the service's `Agreement`."""


class CaptureRequest(Capture, total=False):
    """A capture as ranks receive it; a local plan has none of these fields."""

    phase: str
    """`asked` or `agreed`."""
    agreement: int
    """Number of times it was asked."""
    asked_revision: int
    notes: list[str]


class KeepSpec(TypedDict):
    """A keep configuration, as `validate_keep` returns it; see `KEEP_FIELDS`."""

    every_n_steps: int | None
    steps: CaptureSteps | None
    """None with `every_n_steps`."""
    roles: list[str] | None
    ranks: CaptureRanks
    stages: str | list[str]
    parameters: list[str]
    gradients: list[str]
    what: list[str]


class _Captures(TypedDict):
    revision: int
    captures: list[CaptureRequest]


class SentPlan(_Captures, total=False):
    """The plan of a run as its ranks receive it."""

    keep: KeepSpec
    data_dir: str | None


class StoredPlan(TypedDict):
    """The plan of all runs as answers have it."""

    revision: int
    captures: list[StoredCapture]
