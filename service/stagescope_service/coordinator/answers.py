"""The coordinator's replies to ranks."""

from __future__ import annotations

from typing import TypedDict

from typing_extensions import NotRequired

from stagescope.wire.plan import SentPlan


class BatchAnswer(TypedDict):
    """Reply to a batch of events; the probe reads it."""

    coordinator: str
    """Names this incarnation of the coordinator."""
    wall: float
    received: int
    refused: dict[int, str]
    """Seq -> why that event was refused."""
    refused_in_part: NotRequired[dict[int, str]]
    """Seq -> what part of that event was refused."""
    receipts: dict[int, str]
    """Seq -> state of payloads whose end is on disk."""
    revision: int
    """Of the plan."""
    plan: NotRequired[SentPlan]
    """The plan, where the sender said a revision and it is another."""
    attempt_key: NotRequired[str]
    """Of the sender's attempt, if the sender has no key: its ranks dump into one directory."""
    pause: NotRequired[float]
    """Seconds to wait before the next batch."""
    relay: NotRequired[bool]
    """Present where ranks are to call through the relay of their node."""


class PollAnswer(TypedDict):
    """Reply to a poll; the probe reads it."""

    coordinator: str
    wall: float
    revision: int
    plan: SentPlan | None
    """The plan, where its revision is another than the poll's."""
    receipts: dict[int, str]
    requests: list[dict[str, str]]
    """For stacks, or to leave."""
    poll_seconds: float
    attempt_key: NotRequired[str]
    """As in `BatchAnswer`."""
    relay: NotRequired[bool]


class NotReadyAnswer(TypedDict):
    """Reply that tells the caller to retry."""

    coordinator: str
    not_ready: str
    """Why."""
    pause: NotRequired[float]


class ErrorAnswer(TypedDict):
    """Reply to a relayed call that failed: its rank gets it as an error."""

    error: str
