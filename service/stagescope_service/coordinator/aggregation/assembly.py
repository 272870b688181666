"""Assembles the summary of a closed step, and its findings."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from stagescope_service.coordinator.aggregation.disagreements import (
    differing_copies,
    differing_settings,
)
from stagescope_service.core.catalogue_rows import row_id
from stagescope_service.core.completeness import corrected, statuses_of_rows
from stagescope_service.core.findings import (
    NOT_AGGREGATED,
    FindingLocation,
    FindingText,
    finding,
)
from stagescope_service.core.instructions import Delete, PayloadKey, Put
from stagescope_service.statistics import PartRecord, Recompute, StepSummary, assemble, examine
from stagescope_service.statistics.checks import Check
from stagescope_service.statistics.codec import summary_from_bytes
from stagescope_service.statistics.comparability import WHAT_TO_CHECK, causes_of_ranks
from stagescope_service.statistics.exact import NOT_KEPT, first_difference, unequal_tokens
from stagescope_service.statistics.step_metrics import step_metrics
from stagescope_service.statistics.step_summary import OTHER_STREAMS, TO_RECOMPUTE, noise_floor
from stagescope_service.store.catalogue import Catalogue
from stagescope_service.store.parts import pair_name, part_key, part_records
from stagescope_wire.errors import InvalidInput
from stagescope_wire.links import Link
from stagescope_wire.nonfinite import Json
from stagescope_wire.render import ranks_text

_LISTED: Final = 50
"""Ids listed in a finding."""
_LISTED_GROUPS: Final = 5
"""Groups of ranks named in a message."""
_HOLDERS: Final = 20
"""Ranks listed for an id in a finding."""


def findings(step_summary: StepSummary, location: FindingLocation) -> list[Put | Delete]:
    """Return the findings about a step's tokens, and deletions of those that no longer hold.

    Args:
        step_summary: the step's statistics.
        location: the step and stage.
    """
    found = {
        "sample_ids_contradict": _contradictions(step_summary),
        "tokens_missing": _missing(step_summary),
        "tokens_of_other_streams": _other_streams(step_summary),
        "tokens_unaccounted": _unaccounted(step_summary),
        "rounds_fragmented": _fragmented(step_summary),
        "rows_counted_twice": _same_rows(step_summary),
    }
    rows: list[Put | Delete] = []
    for kind, reported in found.items():
        text: FindingText = {"message": "", "severity": "error", **(reported or {"message": ""})}
        put = finding(kind, **location, **text)
        taken_back = Delete("findings", {"finding_id": put.row["finding_id"]})
        rows.append(taken_back if reported is None else put)
    return rows


def _contradictions(step_summary: StepSummary) -> FindingText | None:
    found = step_summary.contradictions
    if not found:
        return None
    holders = sorted({holder for item in found for holder in item.holders})
    ranks = ", ".join(f"{role} {rank}" for role, rank in holders[:_HOLDERS])
    more = ", ..." if len(holders) > _HOLDERS else ""
    ids = ", ".join(repr(item.sample)[:60] for item in found[:5])
    return {
        "message": f"{len(found)} sample_ids name different samples ({ids}"
        f"{', ...' if len(found) > 5 else ''}; on {ranks}{more}). Each counts as a separate "
        "sample, and none is left out. If they are copies of one sample, its tokens count more "
        "than once",
        "evidence": {
            "ids": len(found),
            "samples": {
                item.sample: [f"{role} {rank}" for role, rank in item.holders[:_HOLDERS]]
                for item in found[:_LISTED]
            },
        },
        "advice": "make sample_ids unique in a step, and the same on every rank that holds the "
        "sample. Use group id and sample index, not a row number. The id of a prompt alone belongs "
        "in group_ids. Give ranks that hold the same rows the same data_rank. Record responses: "
        "the token ids show copies with other log-probs",
    }


def _missing(step_summary: StepSummary) -> FindingText | None:
    missing = step_summary.tokens_left_out.get(TO_RECOMPUTE, 0)
    if not missing:
        return None
    parts = [item.key for item in step_summary.to_recompute]
    return {
        "message": f"{missing} tokens are missing from the step summary: the {len(parts)} parts "
        "that hold them partly overlap other parts, and the ring no longer has them",
        "evidence": {"tokens": missing, "parts": parts},
        "advice": "raise STAGESCOPE_RING_BYTES",
    }


def _other_streams(step_summary: StepSummary) -> FindingText | None:
    tokens = step_summary.tokens_left_out.get(OTHER_STREAMS, 0)
    if not tokens:
        return None
    pair = " and ".join(step_summary.summary.pair)
    parts = [key for key, why in step_summary.left_out.items() if why == OTHER_STREAMS]
    return {
        "message": f"{tokens} tokens do not count: {len(parts)} parts of {step_summary.stage} hold "
        f"other streams than the others ({pair})",
        "evidence": {"tokens": tokens, "parts": parts[:_LISTED]},
        "advice": "record the same tensors on every rank of a stage",
    }


def _unaccounted(step_summary: StepSummary) -> FindingText | None:
    lost = step_summary.unaccounted
    if not lost:
        return None
    return {
        "message": f"{abs(lost)} tokens {'are missing' if lost > 0 else 'count too often'}: "
        f"{step_summary.sent} were sent, {step_summary.total.masked} count, "
        f"{sum(step_summary.tokens_left_out.values())} are left out with a reason",
        "evidence": {
            "sent": step_summary.sent,
            "counted": step_summary.total.masked,
            "left_out": dict(step_summary.tokens_left_out),
        },
        "advice": "do not trust this step's numbers. This is a fault of the service. Report it "
        "with the step's exported batch",
    }


def _fragmented(step_summary: StepSummary) -> FindingText | None:
    if not step_summary.fragmented:
        return None
    return {
        "message": f"{step_summary.fragmented} pieces of samples have neither round_ids nor a "
        "round_offset. Rounds and values of sequences are counted within each piece",
        "severity": "warning",
        "evidence": {"pieces": step_summary.fragmented},
        "advice": "if several ranks or calls hold parts of one sample (context parallelism), "
        "record round_ids, or token_offset and round_offset. Numbers of tokens are already right",
    }


def _same_rows(step_summary: StepSummary) -> FindingText | None:
    groups = step_summary.same_rows
    if not groups:
        return None
    tokens = {(row.role, row.rank): row.cell.tokens for row in step_summary.ranks}
    again = sum(tokens.get(place, 0) for group in groups for place in group[1:])
    texts = [ranks_text(group) for group in groups]
    listed = "; ".join(texts[:_LISTED_GROUPS]) + ("; ..." if len(texts) > _LISTED_GROUPS else "")
    return {
        "message": f"{listed}: these ranks hold the same rows, bit for bit, and each rank counts. "
        f"{again} of {step_summary.total.tokens} tokens count again",
        "severity": "warning",
        "evidence": {
            "tokens": again,
            "groups": [[list(place) for place in group] for group in groups[:_LISTED]],
        },
        "advice": "if these ranks hold the same rows (tensor or pipeline parallelism, replicas), "
        "give them the same data_rank in init, or record sample_ids. Then each token counts once. "
        "If the rows are different samples, sample_ids show that",
    }


TOO_LATE: Final = (
    "it came when the statistics of its step's parts were no longer kept (STAGESCOPE_KEEP_STEPS)"
)
_ALL = 1_000_000
_NAMED_RANKS = 100


class PartSource(NamedTuple):
    """The payload that a part was read from, and its rank."""

    key: PayloadKey
    role: str
    rank: int


@dataclasses.dataclass
class StepParts:
    """The parts of a step summary; parts that overlap partly are recomputed first."""

    attempt_id: int
    step: int
    parts: list[PartRecord]
    sources: dict[str, PartSource]
    """Part key -> the payload of the part."""
    mark: int | None
    """The step's `parts_mark` before the parts were read."""
    wall: float
    """The time of that read, Unix seconds."""
    step_summary: StepSummary | None = None
    unavailable: set[str] = dataclasses.field(default_factory=set)
    """Keys of parts that could not be recomputed: the ring no longer holds them."""
    unmatched: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Reason -> tokens of payloads without the rollout's stream, which are in no part."""
    expects_bitwise: bool = False
    """Whether a process of the run has `expect: bitwise` in its settings."""

    @property
    def to_recompute(self) -> Sequence[Recompute]:
        """The parts to recompute, if they may still be in a ring."""
        items = () if self.step_summary is None else self.step_summary.to_recompute
        return [item for item in items if item.key not in self.unavailable]

    @property
    def ranks_to_recompute(self) -> Sequence[Recompute]:
        """The parts to recompute for the numbers of their own rank."""
        return () if self.step_summary is None else self.step_summary.ranks_to_recompute

    def assemble(self) -> None:
        """Assemble the summary from the present parts."""
        try:
            self.step_summary = assemble(self.parts, unavailable=self.unavailable)
        except InvalidInput:
            self.step_summary = None  # no payload has both streams: there are no findings

    def replace(self, item: Recompute, summary: bytes | None, *, for_rank: bool = False) -> None:
        """Replace a part's summary by a recomputed one; None: it could not be recomputed."""
        if summary is None:
            if not for_rank:
                self.unavailable.add(item.key)
            return
        taken = summary_from_bytes(summary)
        for at, part in enumerate(self.parts):
            if part.key != item.key or part.summary.pair != taken.pair:
                continue
            if for_rank:
                self.parts[at] = dataclasses.replace(part, ranked=taken)
            else:
                handed = part.handed or part.summary
                self.parts[at] = dataclasses.replace(
                    part, summary=taken, handed=handed, skipped=item.skips
                )


def begin(catalogue: Catalogue, attempt_id: int, step: int) -> StepParts:
    """Read and assemble a step's parts."""
    # Read before the parts, which then hold at least as much.
    wall, mark = time.time(), catalogue.parts_mark(attempt_id, step)
    rows = catalogue.summaries(attempt_id, step)
    replaced = catalogue.replaced(attempt_id, step)
    processes = catalogue.processes(attempt_id)
    parts = part_records(rows, processes, replaced) if rows else []
    sources = {
        part_key(row["incarnation"], row["seq"]): PartSource(
            PayloadKey(row["incarnation"], row["seq"]), row["role"], row["rank"]
        )
        for row in rows
    }
    settings = catalogue.settings_with(attempt_id, "expect")
    bitwise = any(each["expect"] == "bitwise" for each in settings)
    step_parts = StepParts(attempt_id, step, parts, sources, mark, wall, expects_bitwise=bitwise)
    step_parts.assemble()
    return step_parts


def nodes_of(catalogue: Catalogue, step_parts: StepParts) -> dict[str, str | None]:
    """Return, by part key, the nodes whose rings hold the payloads of the summary's stage."""
    stage = None if step_parts.step_summary is None else step_parts.step_summary.stage
    rows = catalogue.payloads(step_parts.attempt_id, step_parts.step, stage=stage, limit=_ALL)
    return {part_key(row["incarnation"], row["seq"]): row["node_id"] for row in rows}


def rows_of(step_parts: StepParts, run: str) -> list[Put | Delete]:
    """Return the rows of an aggregated step: its summary and findings."""
    key = {"attempt_id": step_parts.attempt_id, "step": step_parts.step}
    step_summary = (
        None
        if step_parts.step_summary is None
        else step_parts.step_summary.besides(step_parts.unmatched)
    )
    aggregated = {**key, "summary_wall": step_parts.wall, "summary_mark": step_parts.mark}
    if step_summary is None:
        return [Put("steps", {**aggregated, "step_summary": None})]
    location: FindingLocation = {
        "run": run,
        "attempt_id": step_parts.attempt_id,
        "step": step_parts.step,
        "stage": step_summary.stage,
        "wall": time.time(),
    }
    found = examine(step_summary.summary, step_summary.ranks)
    suspects = [check.name for check in found.suspects]
    columns = step_metrics(
        step_summary,
        verdict=found.verdict,
        suspects=suspects,
        summary_wall=step_parts.wall,
        noise=noise_floor(step_parts.parts, step_summary.stage),
    )
    puts: list[Put | Delete] = [
        Put("steps", {**aggregated, "step_summary": step_summary.to_bytes()}),
        Put("step_metrics", {**key, **columns}),
    ]
    puts += _suspects(found.suspects, step_summary, location)
    if step_parts.expects_bitwise:
        puts += _not_exact(step_summary, step_parts.sources, location)
    if step_summary.differing:
        puts.append(differing_copies(step_summary, step_parts.parts, location))
    puts.append(differing_settings(step_summary, step_parts.parts, location))
    return puts + findings(step_summary, location)


def _suspects(
    suspects: Sequence[Check], step_summary: StepSummary, location: FindingLocation
) -> list[Put]:
    """Return the finding that the streams cannot be compared, with its likeliest cause.

    The cause does not explain a rank that does not show it: such a rank has its own cause.
    """
    if not suspects:
        return []
    # Several versions are a fact beside any cause, and explain differences by themselves.
    named = [check for check in suspects if check.name == "versions" or check is suspects[0]]
    of_ranks = causes_of_ranks(step_summary.summary, step_summary.ranks, suspects[0].name)
    places = {check.name: check.ranks for check in named if check.ranks}
    places |= {cause.check.name: cause.places for cause in of_ranks}
    named += [cause.check for cause in of_ranks]
    return [
        finding(
            f"streams_{check.name}",
            check.text,
            **location,
            evidence={
                "status": check.status,
                "pair": pair_name(step_summary.summary.pair),
                "also": [other.name for other in suspects if other.name != check.name],
                **({"ranks": places[check.name][:_NAMED_RANKS]} if check.name in places else {}),
            },
            advice=f"check {WHAT_TO_CHECK[check.name]}; until then the mismatch of this step is "
            "not the engine's numerics",
        )
        for check in named
    ]


def _not_exact(
    step_summary: StepSummary, sources: Mapping[str, PartSource], location: FindingLocation
) -> list[Put]:
    """Return the first difference of the streams in a run that expects bitwise equality."""
    unequal = unequal_tokens(step_summary.total)
    if not unequal:
        return []
    p, q = step_summary.summary.pair
    found = first_difference(step_summary.summary)
    text, evidence = NOT_KEPT, dict[str, Json]()
    if found is not None:
        source = sources.get(found.source)
        role, rank = (None, None) if source is None else (source.role, source.rank)
        text = f"{'first' if found.is_first else 'such as'} in {found.text((p, q), role, rank)}"
        evidence = {**found.to_json(), "role": role, "rank": rank}
    return [
        finding(
            "not_exact",
            f"{p} and {q} differ in {unequal} of {step_summary.total.masked} tokens, and the run "
            f"expects none to: {text}",
            **location,
            severity="error",
            evidence={**evidence, "unequal": unequal},
            advice="a capture of this step and of one before (stagescope capture) names the "
            "operator",
            see=(Link("exact", shows="the step since which it is so"),),
        )
    ]


def too_late(
    catalogue: Catalogue, attempt_id: int, step: int, run: str
) -> list[Put | Delete] | None:
    """Return the rows of payloads that arrived when a step's parts may have been deleted.

    The step's numbers stay without them, since it is unknown which of their tokens count already.
    They are refused, so that the step shows what its numbers lack.

    Returns:
        None if the step never had parts: then it is aggregated from these payloads.
    """
    row = catalogue.step(attempt_id, step)
    key = {"attempt_id": attempt_id, "step": step}
    if row is not None and row["rows_removed"] is not None and row["step_summary"] is None:
        # The late payload would be mistaken for the whole step.
        return [Put("steps", {**key, "summary_mark": row["parts_mark"]})]
    if row is None or row["step_summary"] is None:
        # After a failed aggregation the remaining parts would be mistaken for the whole step.
        failed = catalogue.findings(kind=NOT_AGGREGATED, attempt_id=attempt_id, step=step, limit=1)
        return [] if failed else None
    came = catalogue.payloads(attempt_id, step, state="ingested", limit=_ALL)
    step_summary = StepSummary.from_bytes(row["step_summary"])
    known = {*step_summary.counted, *step_summary.left_out}
    # A payload that settled after `wall` was read may be among the parts that were read then.
    late = [
        each
        for each in came
        if (each["settled_wall"] or 0.0) > (row["summary_wall"] or 0.0)
        and part_key(each["incarnation"], each["seq"]) not in known
    ]
    rows: list[Put | Delete] = [Put("steps", {**key, "summary_mark": row["parts_mark"]})]
    for each in late:
        payload = {"incarnation": each["incarnation"], "seq": each["seq"]}
        rows.append(Put("payloads", {**payload, "state": "refused", "reason": TOO_LATE}))
        rows.append(Delete("summaries", payload))
        identity = (each["incarnation"], each["work_key"], "payload", each["seq"])
        loss = {
            "loss_id": row_id(*identity),
            "run": run,
            **key,
            "role": each["role"],
            "rank": each["rank"],
            "stage": each["stage"],
            "bytes": each["bytes"],
            "kind": "payload",
            "reason": TOO_LATE,
            "count": 1,
            "wall": each["settled_wall"],
        }
        rows.append(Put("losses", loss))
    return rows


def verdict(catalogue: Catalogue, step_parts: StepParts) -> list[Put]:
    """Correct the stored verdict on a step by stages that arrived later."""
    row = catalogue.step(step_parts.attempt_id, step_parts.step)
    if row is None or not row["missing"]:
        return []
    stages = catalogue.stages(step_parts.attempt_id, step_parts.step, limit=_ALL)
    completeness, missing = corrected(row["completeness"], row["missing"], statuses_of_rows(stages))
    key = {"attempt_id": step_parts.attempt_id, "step": step_parts.step}
    return [Put("steps", {**key, "completeness": completeness, "missing": missing})]
