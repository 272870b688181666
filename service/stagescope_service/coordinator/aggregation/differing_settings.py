"""The finding that ranks of a step have different settings for the statistics."""

from __future__ import annotations

from collections.abc import Sequence

from stagescope_service.core.findings import FindingLocation, finding
from stagescope_service.core.instructions import Delete, Put
from stagescope_service.statistics import PartRecord, StatisticsSettings, StepSummary
from stagescope_wire.render import ranks_text


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
