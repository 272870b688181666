"""Findings about the tokens of a step: which do not count, and ids that name several samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from stagescope_service.engine.findings import finding
from stagescope_service.engine.instructions import Delete, Put
from stagescope_service.statistics import Whole
from stagescope_service.statistics.whole import OTHER_STREAMS, PARTIAL

_LISTED: Final = 50
"""Ids that a finding lists."""
_HOLDERS: Final = 20
"""Ranks that a finding lists for an id."""


def findings(whole: Whole, place: Mapping[str, Any]) -> list[Put | Delete]:
    """Return the findings about a step's tokens; those that no longer hold are taken back.

    Args:
        whole: the step's statistics.
        place: run, attempt_id, step, stage and wall.
    """
    found = {
        "sample_ids_contradict": _contradictions(whole),
        "tokens_missing": _missing(whole),
        "tokens_of_other_streams": _other_streams(whole),
        "tokens_unaccounted": _unaccounted(whole),
    }
    rows: list[Put | Delete] = []
    for kind, said in found.items():
        put = finding(kind, **place, severity="error", **(said or {"message": ""}))
        taken_back = Delete("findings", {"finding_id": put.row["finding_id"]})
        rows.append(taken_back if said is None else put)
    return rows


def _contradictions(whole: Whole) -> dict[str, Any] | None:
    found = whole.contradictions
    if not found:
        return None
    holders = sorted({holder for item in found for holder in item.holders})
    ranks = ", ".join(f"{role} {rank}" for role, rank in holders[:_HOLDERS])
    more = ", ..." if len(holders) > _HOLDERS else ""
    ids = ", ".join(repr(item.sample)[:60] for item in found[:5])
    return {
        "message": f"{len(found)} sample_ids name different samples ({ids}"
        f"{', ...' if len(found) > 5 else ''}; on {ranks}{more}): each counts as a sample of its "
        "own, none is left out",
        "evidence": {
            "ids": len(found),
            "samples": {
                item.sample: [f"{role} {rank}" for role, rank in item.holders[:_HOLDERS]]
                for item in found[:_LISTED]
            },
        },
        "advice": "make sample_ids unique in a step, the same on every rank that holds the sample "
        "(group id and sample index, not a row number; the id of a prompt alone belongs in "
        "group_ids); ranks that hold the same rows give the "
        "same data_rank",
    }


def _missing(whole: Whole) -> dict[str, Any] | None:
    missing = whole.tokens_left_out.get(PARTIAL, 0)
    if not missing:
        return None
    return {
        "message": f"{missing} tokens are missing from the step's whole: {len(whole.restate)} "
        "parts that hold them overlap others in part and are no longer in the ring",
        "evidence": {"tokens": missing, "parts": [item.key for item in whole.restate]},
        "advice": "raise STAGESCOPE_RING_BYTES",
    }


def _other_streams(whole: Whole) -> dict[str, Any] | None:
    tokens = whole.tokens_left_out.get(OTHER_STREAMS, 0)
    if not tokens:
        return None
    pair = " and ".join(whole.summary.pair)
    parts = [key for key, why in whole.left_out.items() if why == OTHER_STREAMS]
    return {
        "message": f"{tokens} tokens do not count: {len(parts)} parts of {whole.stage} hold other "
        f"streams than the others ({pair})",
        "evidence": {"tokens": tokens, "parts": parts[:_LISTED]},
        "advice": "record the same tensors on every rank of a stage",
    }


def _unaccounted(whole: Whole) -> dict[str, Any] | None:
    lost = whole.unaccounted
    if not lost:
        return None
    return {
        "message": f"{abs(lost)} tokens {'are missing' if lost > 0 else 'count too often'}: "
        f"{whole.sent} were sent, {whole.total.masked} count, "
        f"{sum(whole.tokens_left_out.values())} are left out with a reason",
        "evidence": {
            "sent": whole.sent,
            "counted": whole.total.masked,
            "left_out": dict(whole.tokens_left_out),
        },
        "advice": "do not trust this step's numbers; this is a fault of the service: please report "
        "it with the step's exported batch",
    }
