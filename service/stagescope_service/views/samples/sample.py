"""The tokens of one sample: both streams, and what the loss did to each."""

from __future__ import annotations

import contextlib
from typing import Final

import numpy as np

from stagescope_service.core.instructions import PayloadKey
from stagescope_service.dumps.joining.join import Selection
from stagescope_service.statistics.loss_fate import NAMES, Fate, Int8
from stagescope_service.store.parts import part_key
from stagescope_service.views.encoding import JsonObject
from stagescope_service.views.reading.completeness import ALL_ROWS
from stagescope_service.views.reading.dependencies import Dependencies
from stagescope_service.views.reading.target import Target
from stagescope_service.views.reading.tokenizers import Tokenizers
from stagescope_service.views.samples.batches import batch_of
from stagescope_service.views.samples.listing import gap_texts, unrecorded_fields
from stagescope_service.views.samples.tokens import (
    StepTokens,
    clipped_passes,
    loss_masks,
    of_model,
    rounds_of,
    shown_of,
    update_of,
    update_ratios,
)
from stagescope_service.views.steps.numbers import comparability_fields
from stagescope_wire.batch import Batch
from stagescope_wire.batch.converters import unpadded_prompts
from stagescope_wire.errors import NotFound
from stagescope_wire.links import Link

ENVIRONMENT: Final = "environment or padding"


def tokens_of(deps: Dependencies, target: Target, sample_uid: str) -> JsonObject:
    """Return the columns of a sample.

    Raises:
        NotFound: the step's tensors are gone, or no such sample is among them, or the id names
            several samples, which `/samples` lists by their owner.
    """
    if (named := _one_of_several(deps, target, sample_uid)) is not None:
        return named
    batch = batch_of(deps, target, Selection(None, None), sample=sample_uid)
    ids = batch.sample_ids or ()
    if sample_uid not in ids:  # of a file that could not be read
        gaps = "; ".join(gap.message for gap in batch.gaps)
        raise NotFound(f"sample {sample_uid!r:.200} cannot be read: {gaps:.1000}")
    return _columns(deps, target, batch, ids.index(sample_uid))


def _one_of_several(deps: Dependencies, target: Target, sample_uid: str) -> JsonObject | None:
    """Return the columns of a sample whose id names others, too; None if the id is unique.

    It reads the sample's own payload alone: under the same id other payloads may hold another
    sample.
    """
    try:
        measured = deps.step_summaries.measure(target.attempt_id, target.step_row)
    except NotFound:  # the tensors are kept of a step without numbers
        return None
    contradicted = {each.sample for each in measured.summary.contradictions}
    summary = measured.summary.summary
    names = summary.sequences.samples
    if sample_uid in contradicted and sample_uid not in names:
        meant = [name for name in dict.fromkeys(names) if name.startswith(f"{sample_uid} [")]
        raise NotFound(
            f"{sample_uid!r:.200} names {len(meant)} samples of step {target.step_number}",
            expected=f"one of {', '.join(map(repr, meant[:8]))}",
        )
    if sample_uid not in names or not any(sample_uid.startswith(f"{c} [") for c in contradicted):
        return None
    at = names.index(sample_uid)
    source = summary.sources[int(summary.sequences.source[at])]
    payload = next(
        PayloadKey(row["incarnation"], row["seq"])
        for row in deps.catalogue.payloads(target.attempt_id, target.step_number, limit=ALL_ROWS)
        if part_key(row["incarnation"], row["seq"]) == source
    )
    batch = batch_of(deps, target, Selection(None, None), payload=payload)
    (part, *_) = batch.parts
    row = int(part.rows[int(summary.sequences.row[at])])
    note = "read from its own payload alone: its id names several samples"
    return {**_columns(deps, target, batch, row, note), "sample_uid": sample_uid}


def tokens_of_row(
    deps: Dependencies, target: Target, role: str | None, rank: int | None, row: int
) -> JsonObject:
    """Return the columns of a row of a rank's payload.

    Raises:
        NotFound: nothing that is kept has this row.
    """
    batch = batch_of(deps, target, Selection(None, None))
    for part in batch.parts:
        is_chosen = role in (None, part.role) and rank in (None, part.rank)
        if is_chosen and "rollout_log_probs" in part.names and row < len(part.rows):
            return _columns(deps, target, batch, int(part.rows[row]))
    asked = "" if role is None else f" of role {role}"
    asked += "" if rank is None else f" of rank {rank}"
    raise NotFound(
        f"no payload that is kept of step {target.step_number} has row {row}{asked}",
        expected="a row of one of its samples",
        see=(Link.to_step("samples", target.step_number),),
    )


def _columns(deps: Dependencies, target: Target, batch: Batch, row: int, *notes: str) -> JsonObject:
    rows = np.array([row], np.int64)
    passes = clipped_passes(batch, rows)
    update = update_of(deps.catalogue, target.attempt_id, target.step_number)
    one = StepTokens.from_batch(
        batch.take(rows), loss_masks(batch, rows), list(passes.values()), update
    )
    unrecorded = unrecorded_fields(one.loss, update)
    shown = one.extent(row=0)
    fates = one.loss.fates()[0, shown]
    d = one.d[0, shown]
    ids = one.column("responses", shown)
    mask = one.loss.mask[0, shown]
    tokenizer = Tokenizers.from_settings(deps.settings, batch.meta)
    prompts = unpadded_prompts(batch)
    prompt = None if prompts is None else prompts[row]
    clipped = None if one.loss.clipped is None else _sides(one.loss.clipped[0, shown])
    ratios = update_ratios(batch, rows, one, list(passes))
    comparability = None
    with contextlib.suppress(NotFound):  # the tensors are kept of a step without numbers
        measured = deps.step_summaries.measure(target.attempt_id, target.step_row)
        comparability = measured.comparability
    return {
        **comparability_fields(comparability),
        "sample_uid": (batch.sample_ids or [None])[row] if batch.sample_ids else None,
        "group_id": next(iter(batch.strings.get("group_ids", ())[row : row + 1]), None) or None,
        "prompt_ids": prompt,
        "prompt_text": None if prompt is None else tokenizer.text(prompt),
        "positions": one.positions(shown),
        "mask": mask.astype(np.int64),
        "token_ids": ids,
        "texts": None if ids is None else tokenizer.texts(ids),
        "texts_reason": None if ids is not None and tokenizer.reason is None
        else tokenizer.reason or "token ids were not recorded: record responses",
        "round": rounds_of(one.column("round_ids", shown), mask),
        "turn": one.column("turn_ids", shown),
        "p": one.stream("p", shown),
        "q": one.stream("q", shown),
        "p_stream": one.p_name,
        "d": of_model(mask, d),
        "advantage": shown_of(one.loss.advantage, shown),
        "weight_raw": of_model(mask, one.raw_weight[0, shown]),
        "weight": None if one.loss.weight is None else of_model(mask, one.loss.weight[0, shown]),
        "clipped": clipped,
        "clipped_passes": None if clipped is None
        else [_sides(each[0, shown]) for each in passes.values()],
        "update_ratios": None if ratios is None
        else [of_model(mask, each[0, shown]) for each in ratios],
        "rejected": None if one.loss.in_loss is None
        else (mask & ~one.loss.in_loss[0, shown]).tolist(),
        "masked_why": [None if is_model else ENVIRONMENT for is_model in mask.tolist()],
        "fate": [NAMES[Fate(code)] for code in fates.tolist()],
        "loss_note": "; ".join(f"not recorded: {each['record']}" for each in unrecorded) or None,
        "unrecorded": unrecorded,
        "notes": [*notes, *one.notes, *gap_texts(batch)],
    }  # fmt: skip


def _sides(clipped: Int8) -> list[str | None]:
    return ["low" if side < 0 else "high" if side > 0 else None for side in clipped.tolist()]
