"""Findings that ranks of a step disagree: in copies of the same rows, and in their settings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from stagescope_service.core.findings import FindingLocation, finding
from stagescope_service.core.instructions import Delete, Put
from stagescope_service.statistics import PartRecord, StatisticsSettings, StepSummary
from stagescope_wire.render import ranks_text
from stagescope_wire.schema import PART_FIELDS, Part

_NAMED: Final = 5
"""Pairs named in a message."""
_LISTED: Final = 100


class _Pair(NamedTuple):
    """A part, and the part that counts instead of it, or would count without replicas."""

    copy: PartRecord
    counted: PartRecord

    @property
    def is_of_one_rank(self) -> bool:
        return (self.copy.role, self.copy.rank) == (self.counted.role, self.counted.rank)

    @property
    def holds_other_rows(self) -> bool:
        """Only data_rank says that these are replicas: with ids they would be a contradiction."""
        return not self.copy.has_ids and self._tokens[0] != self._tokens[1]

    @property
    def _tokens(self) -> tuple[int, int]:
        copy, counted = (each.full_summary.total.masked for each in self)
        return copy, counted

    def tokens_text(self) -> str:
        copy, counted = self._tokens
        return f"{_rank(self.copy)} has {copy} tokens and {_rank(self.counted)} has {counted}"

    def parts_text(self) -> str:
        counted, copy = _part_name(self.counted.part), _part_name(self.copy.part)
        return f"{_rank(self.counted)}: {counted} counts, not {copy}"


def differing_copies(
    step_summary: StepSummary, parts: Sequence[PartRecord], location: FindingLocation
) -> Put:
    """Return the finding that copies of the same rows differ, or are no copies at all.

    Args:
        step_summary: with at least one of `differing`.
        parts: the parts that it was assembled from.
        location: the step and stage.
    """
    by_key = {part.key: part for part in parts}
    pairs = [_Pair(by_key[copy], by_key[counted]) for copy, counted in step_summary.differing]
    if others := [pair.tokens_text() for pair in pairs if pair.holds_other_rows]:
        message = (
            f"{len(others)} ranks are left out as replicas of a rank with the same data_rank, but "
            f"they hold other rows: {_listed(others)}"
        )
        advice = (
            "no number includes their tokens. Give ranks with different rows a different data_rank "
            "in init, or record sample_ids"
        )
    elif own := [pair for pair in pairs if pair.is_of_one_rank]:
        # Replicas repeat what the rank that counts has repeated.
        of_counted = [pair for pair in own if pair.counted.key in step_summary.counted]
        again = [pair.parts_text() for pair in of_counted or own]
        named = own[0].copy.has_ids
        message = (
            f"{len(again)} parts hold samples that the same rank recorded again later in this "
            f"step, with other log-probs or another mask. The newest parts count ({_listed(again)})"
            if named
            else f"{len(again)} parts without sample_ids hold the same token ids and masks, row by "
            "row, as a part that the same rank recorded later in this step. They are the same "
            f"rows, and the newest parts count ({_listed(again)})"
        )
        if others_differ := len(pairs) - len(own):
            message += f"; {others_differ} more differ from those of another rank"
        advice = (
            "record each sample once in a step. If a later pass recomputes them on purpose, record "
            "it in a separate stage"
        )
        if not named:
            advice += ". If they are different samples with the same answers, record sample_ids"
    else:
        counts = [f"{_rank(pair.counted)} counts, not {_rank(pair.copy)}" for pair in pairs]
        who = "1 rank holds" if len(pairs) == 1 else f"{len(pairs)} ranks hold"
        message = (
            f"{who} the same rows as another rank, with other log-probs or another mask: the "
            f"tokens of one count ({_listed(counts)})"
        )
        advice = (
            "replicas of one model on one batch should agree. If these ranks are not replicas, "
            "their data_rank or their sample_ids are wrong"
        )
    return finding(
        "replicas_differ",
        message,
        **location,
        severity="error" if others else "warning",
        evidence={
            "pairs": [
                {
                    "role": pair.copy.role,
                    "rank": pair.copy.rank,
                    "part": _part_name(pair.copy.part),
                    "counted_rank": pair.counted.rank,
                    "counted_part": _part_name(pair.counted.part),
                }
                for pair in pairs[:_LISTED]
            ]
        },
        advice=advice,
    )


def _listed(texts: Sequence[str]) -> str:
    return "; ".join(texts[:_NAMED]) + ("; ..." if len(texts) > _NAMED else "")


def _rank(part: PartRecord) -> str:
    return f"{part.role} {part.rank}"


def _part_name(part: Part) -> str:
    """Return the numbers of a part that are not 0; for the first part, its occurrence."""
    numbers = {name: getattr(part, name) for name in PART_FIELDS}
    named = ", ".join(f"{name} {number}" for name, number in numbers.items() if number)
    return named or f"{PART_FIELDS[0]} 0"


def differing_settings(
    step_summary: StepSummary, parts: Sequence[PartRecord], location: FindingLocation
) -> Put | Delete:
    """Return the finding of ranks whose settings differ, or the deletion of an earlier one.

    Args:
        step_summary: the step's summary.
        parts: the parts that it was assembled from.
        location: the step and stage.
    """
    ranks: dict[StatisticsSettings, set[tuple[str, int]]] = {}
    for part in parts:
        if part.stage == step_summary.stage and part.summary.pair == step_summary.summary.pair:
            ranks.setdefault(part.summary.settings, set()).add((part.role, part.rank))
    groups = sorted(ranks.items(), key=lambda item: sorted(item[1]))
    listed = "; ".join(f"{ranks_text(sorted(own))}: {_text(each)}" for each, own in groups)
    put = finding(
        "settings_differ",
        f"ranks of this step have different settings for importance weights ({listed}). "
        "rollout_corr/rollout_is_* describe the weights without a threshold. The settings change "
        "no other number",
        **location,
        evidence={
            "settings": [
                {"ranks": [list(rank) for rank in sorted(own)], "settings": _text(each)}
                for each, own in groups
            ]
        },
        advice="give every rank the same rollout_is, rollout_is_threshold and "
        "rollout_is_batch_normalize: init(settings={...})",
    )
    if len(ranks) > 1:
        return put
    return Delete("findings", {"finding_id": put.row["finding_id"]})


def _text(settings: StatisticsSettings) -> str:
    if settings.rollout_is is None and settings.rollout_is_threshold is None:
        return "no rollout_is"
    text = f"rollout_is {settings.rollout_is}, threshold {settings.rollout_is_threshold}"
    return f"{text}, normalized" if settings.rollout_is_batch_normalize else text
