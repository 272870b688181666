"""Answers about the canary: verdicts by version, engine and pair of arms, and by sequence."""

from __future__ import annotations

from typing import Any

from stagescope_service.fields import Row
from stagescope_service.store.tables.canary import CanaryEngine, CanaryPair, CanarySequence
from stagescope_service.views.models.common import AttemptHeading, Page


class CanaryVersion(CanaryEngine):
    """An engine instance in one version, with the verdict on each pair of its arms."""

    verdict: str
    """The worst of its pairs: `differs` (also if a check fails), `equal` (an adapter that changes
    nothing), `agrees` or `not compared`."""
    reasons: list[str]
    """The messages of its findings, one for each of `causes`."""
    pairs: list[CanaryPair]
    """The pairs that were compared."""


class CanaryVersions(AttemptHeading, Page[CanaryVersion]):
    """The versions of an attempt that a canary scored, newest first."""


class CanaryCheck(Row):
    """A fact that needs no log-probs, such as the tokenizers of both sides."""

    name: str
    """Its name, such as `tokenizer` or `temperature`."""
    ok: bool | None
    """Whether it holds; null: undecided."""
    text: str
    """What was compared."""


class CanarySide(Row):
    """What one side reported last of a version."""

    side: str
    """`trainer` or `engine`."""
    source: str
    """Name of the engine instance; empty for the trainer."""
    seconds: float | None
    """Seconds that the scoring took; null: unknown."""
    tokens: int
    """Number of tokens that it scored, over all arms."""
    checks: list[CanaryCheck]
    """Facts that it checked."""
    settings: dict[str, Any]
    """The settings of the scoring: temperature, dtype, model, ..."""


class CanaryScore(CanarySequence):
    """One sequence of a pair of arms of an engine instance."""

    source: str
    """Name of the engine instance."""
    pair: str
    """The two arms."""
    sequence: int
    """Number of the sequence, from 0."""
    verdict: str
    """The verdict on the pair: `differs`, `equal`, `agrees` or `not compared`."""
    is_odd: bool
    """Whether the sequence alone is above its bound."""


class CanaryOfVersion(AttemptHeading, Page[CanaryScore]):
    """The sequences of a version, the worst first."""

    version: int
    """The policy version."""
    engines: list[CanaryVersion]
    """The verdicts, by engine instance."""
    recorded: list[CanarySide]
    """What each side reported last; empty: the records of old versions are removed."""
