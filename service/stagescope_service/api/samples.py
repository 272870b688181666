"""Routes about single samples: a step's samples, the tokens of one, and what the loss did to them.

The list rests on the step summary, which every closed step has; tokens are read from what the ring
and the kept files still hold.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Final, Literal

import numpy as np
from fastapi import APIRouter, Path, Query
from starlette.convertors import Convertor, register_url_convertor

from stagescope_service.api.batches import batch_of
from stagescope_service.api.completeness import ALL_ROWS
from stagescope_service.api.dependencies import Dependencies, Deps, Rank, Role, StepTarget
from stagescope_service.api.encoding import JsonObject
from stagescope_service.api.kept import payload_artifacts
from stagescope_service.api.models import samples as models
from stagescope_service.api.numbers import comparability_fields
from stagescope_service.api.requests import Answer, PageOf
from stagescope_service.api.rows import matching
from stagescope_service.api.step_tokens import (
    StepTokens,
    Update,
    clipped_passes,
    loss_masks,
    of_model,
    rounds_of,
    shown_of,
    update_of,
    update_ratios,
)
from stagescope_service.api.target import Target
from stagescope_service.api.tokenizers import Tokenizers
from stagescope_service.core.instructions import PayloadKey
from stagescope_service.dumps.joining.join import Selection
from stagescope_service.statistics import loss_fate
from stagescope_service.statistics.cell import Bool
from stagescope_service.statistics.kernel import ROW
from stagescope_service.statistics.loss_fate import NAMES, Fate, Int8, LossTokens
from stagescope_service.statistics.summary import Sequences
from stagescope_service.store.parts import incarnation_of, part_key
from stagescope_wire.batch import Batch
from stagescope_wire.errors import NotFound
from stagescope_wire.links import Link
from stagescope_wire.render import counted, format_share


class _AnyText(Convertor[str]):
    """A part of a path that may be any text: with slashes, as `path`, and with line ends."""

    regex = "(?s:.*)"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("any_text", _AnyText())

router = APIRouter(prefix="/steps/{step}", tags=["steps"])

SortBy = Literal["max_abs", "mean_abs", "tokens", "sample_uid"]

_TOKENS, _ABS_SUM, _ABS_MAX, _NON_FINITE = map(
    ROW.index, ("tokens", "d_abs_sum", "d_abs_max", "non_finite")
)
RECORD: Final[Mapping[str, str]] = {
    "in_loss": "whether the trainer rejected them: record response_mask as the update uses it, in "
    "the stage compute_advantage or actor_update",
    "weight": "the weights that the loss applies: record rollout_is_weights, or give rollout_is "
    "and rollout_is_threshold in the settings of init",
    "advantage": "the advantages: record advantages",
    "clipped": "whether the loss clipped them: record clipped (-1 at the lower bound, 1 at the "
    "upper, 0 not) in actor_update",
    "update": "whether the tokens were trained on: ",
}
"""Field of `LossTokens` -> what is not known without it, and how to record it."""
ENVIRONMENT: Final = "environment or padding"
GONE: Final = "its tensors have left the ring, and were not kept"


# --- the list of samples --------------------------------------------------------------------
@router.get("/samples", response_model=models.Samples)
def samples(
    deps: Deps,
    target: StepTarget,
    page: PageOf,
    sort: Annotated[SortBy, Query(description="Descending, but `sample_uid`.")] = "max_abs",
    role: Role = None,
    rank: Rank = None,
) -> Answer:
    """List the step's samples with their mismatch, the largest |p - q| first.

    The list has the samples that the step's numbers count. If tensors of the step still exist,
    `kept` is true and `/samples/{sample_uid}` shows the tokens. Otherwise `reason` says why not.
    Use `/row` for a row without `sample_uid`.
    """
    measured = deps.step_summaries.measure(target.attempt_id, target.step_row)
    summary = measured.summary.summary
    processes = {
        row["incarnation"]: (row["role"], row["rank"])
        for row in deps.catalogue.processes(target.attempt_id)
    }
    known = {
        row["sample_uid"]: row
        for row in deps.catalogue.samples(target.attempt_id, target.step_number, limit=ALL_ROWS)
    }
    rows: list[JsonObject] = []
    for group in _fragments(summary.sequences):
        source = summary.sources[int(summary.sequences.source[group[0]])]
        owner = processes.get(incarnation_of(source), (None, None))
        rows.append(_sample_row(summary.sequences, group, owner, known))
    rows = matching(rows, f"step {target.step_number}", role=role, rank=rank)
    if sort == "sample_uid":
        rows.sort(key=lambda row: (row["sample_uid"] is None, row["sample_uid"] or ""))
    else:
        rows.sort(key=lambda row: _descending(row[sort]))
    kept = bool(payload_artifacts(deps, target, target.step_number))
    for row in rows:
        row |= {"kept": kept, "reason": None if kept else GONE}
    return Answer(
        {
            **target.heading(),
            **comparability_fields(measured.comparability),
            **page.cut(rows),
        }
    )


def _fragments(sequences: Sequences) -> list[list[int]]:
    """Return the indexes of each sample's fragments, in the order of their first one."""
    groups: dict[tuple[str, int, int], list[int]] = {}
    for index, key in enumerate(sequences.keys()):
        groups.setdefault(key, []).append(index)
    return list(groups.values())


def _sample_row(
    sequences: Sequences,
    group: Sequence[int],
    owner: tuple[str | None, int | None],
    known: Mapping[str, Mapping[str, object]],
) -> JsonObject:
    values = sequences.values[list(group)]
    tokens = int(values[:, _TOKENS].sum())
    uid = sequences.samples[group[0]] or None
    sample = known.get(uid or "", {})
    return {
        "sample_uid": uid,
        "group_id": sample.get("group_id"),
        "role": owner[0],
        "rank": owner[1],
        "row": int(sequences.row[group[0]]),
        "fragments": len(group),
        "rounds": sample.get("rounds"),
        "tokens": tokens,
        "mean_abs": float(values[:, _ABS_SUM].sum()) / tokens if tokens else math.nan,
        "max_abs": float(values[:, _ABS_MAX].max()) if tokens else math.nan,
        "nonfinite": int(values[:, _NON_FINITE].sum()),
        "reward": sample.get("reward"),
    }


def _descending(value: object) -> tuple[bool, float]:
    """Return a sort key: larger numbers first, NaN last."""
    assert isinstance(value, int | float)
    return math.isnan(value), 0.0 if math.isnan(value) else -value


# --- the tokens of one sample ---------------------------------------------------------------
@router.get("/samples/{sample_uid:any_text}", response_model=models.Sample)
async def sample(
    deps: Deps,
    target: StepTarget,
    sample_uid: Annotated[str, Path(max_length=500, description="The sample's id.")],
) -> Answer:
    """Return the tokens of a sample: both streams, and what the loss did to each.

    Columns are aligned. They hold one value for each position from the first to the last known one,
    environment tokens included. As far as it is recorded, `masked_why` and `fate` say why a token
    has no gradient. Unrecorded fields, and how to record them, are in `unrecorded`.
    """
    found = await deps.computations.run(_tokens_of, deps, target, sample_uid)
    return Answer({**target.heading(), **found})


@router.get("/row", response_model=models.Sample)
async def row(
    deps: Deps,
    target: StepTarget,
    row: Annotated[int, Query(ge=0, lt=10**9, description="The row in the rank's payload.")],
    role: Role = None,
    rank: Rank = None,
) -> Answer:
    """Return the tokens of a row that has no sample id, as `/samples/{sample_uid}` does.

    It reads the rank's first part in the stage that has both streams.
    """
    found = await deps.computations.run(_tokens_of_row, deps, target, role, rank, row)
    return Answer({**target.heading(), **found})


def _tokens_of(deps: Dependencies, target: Target, sample_uid: str) -> JsonObject:
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


def _tokens_of_row(
    deps: Dependencies, target: Target, role: str | None, rank: int | None, row: int
) -> JsonObject:
    batch = batch_of(deps, target, Selection(None, None))
    for part in batch.parts:
        is_chosen = role in (None, part.role) and rank in (None, part.rank)
        if is_chosen and "rollout_log_probs" in part.names and row < len(part.rows):
            return _columns(deps, target, batch, int(part.rows[row]))
    raise NotFound(
        f"what is kept of step {target.step_number} has no row {row} of {role or 'any role'} "
        f"{'any rank' if rank is None else rank}",
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
    unrecorded = _unrecorded(one.loss, update)
    shown = one.extent(row=0)
    fates = one.loss.fates()[0, shown]
    d = one.d[0, shown]
    ids = one.column("responses", shown)
    mask = one.loss.mask[0, shown]
    tokenizer = Tokenizers.from_settings(deps.settings, batch.meta)
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
        "notes": [*notes, *one.notes, *_gap_texts(batch)],
    }  # fmt: skip


# --- what the loss did to a step's tokens ---------------------------------------------------
@router.get("/loss", response_model=models.Loss)
async def loss(deps: Deps, target: StepTarget, page: PageOf) -> Answer:
    """Say how much of the step's mismatch sits in tokens that no gradient sees, and why.

    Rows are fates of the model's tokens, the trained ones first. Each token has the first fate that
    applies: `rejected`, `zero weight`, `zero advantage`, `clipped low`, `clipped high` or
    `trained`. The last one is `unknown` if no update of the step is known to have ended. Unrecorded
    fields exclude no token; `unrecorded` names them. The numbers come from what the ring and the
    kept files hold of the step: `tokens` of `tokens_counted`.
    """
    found = await deps.computations.run(loss_of, deps, target)
    notes = [*found.derived, *found.gaps]
    return Answer({**target.heading(), **found.fields, "notes": notes, **page.cut(found.rows)})


@dataclasses.dataclass(frozen=True)
class StepLoss:
    """The effect of the loss on a step's tokens, as `/loss` returns it."""

    fields: JsonObject
    rows: list[JsonObject]
    derived: Sequence[str]
    """How columns were derived."""
    gaps: Sequence[str]
    """Gaps and contradictions in the kept tensors."""


def loss_of(deps: Dependencies, target: Target) -> StepLoss:
    """Return what the loss did with a step's tokens, as far as they are kept."""
    measured = deps.step_summaries.measure(target.attempt_id, target.step_row)
    batch = batch_of(deps, target, Selection(None, None))
    every = np.arange(batch.rows)
    passes = list(clipped_passes(batch, every).values())
    update = update_of(deps.catalogue, target.attempt_id, target.step_number)
    step = StepTokens.from_batch(batch, loss_masks(batch, every), passes, update)
    found = loss_fate.sums(step.loss.fates(), step.d)
    tokens, mismatch = sum(each.tokens for each in found), sum(each.abs_diff_sum for each in found)
    by_passes = _by_passes(passes, step.loss.mask) if passes else None
    rows: list[JsonObject] = [
        {
            "fate": NAMES[each.fate],
            "gradient": None if each.fate is Fate.UNKNOWN else each.fate is Fate.TRAINED,
            "tokens": each.tokens,
            "share_of_tokens": each.tokens / tokens,
            "sum_abs": each.abs_diff_sum,
            "mean_abs": each.abs_diff_sum / each.finite if each.finite else math.nan,
            "share_of_mismatch": each.abs_diff_sum / mismatch if mismatch else math.nan,
        }
        for each in sorted(found, key=lambda each: -each.fate)
    ]
    fields: JsonObject = {
        **comparability_fields(measured.comparability),
        "tokens": tokens,
        "tokens_counted": measured.summary.total.masked,
        "clipped_in": by_passes,
        "unrecorded": _unrecorded(step.loss, update),
        "note": _loss_note(rows, step.loss.unrecorded(), by_passes, update.reason(step.loss)),
    }
    return StepLoss(fields, rows, step.notes, _gap_texts(batch))


def _by_passes(passes: Sequence[Int8], mask: Bool) -> list[int]:
    """Return how many model tokens 0, 1, ... of the passes clip."""
    times = np.zeros(mask.shape, np.int64)
    for each in passes:
        width = min(mask.shape[1], each.shape[1])
        times[:, :width] += each[:, :width] != 0
    return [int(count) for count in np.bincount(times[mask], minlength=len(passes) + 1)]


def _clipped_note(by_passes: Sequence[int]) -> str:
    """Say how many tokens are clipped in any pass, in every one, and in a pass on average."""
    passes, tokens = len(by_passes) - 1, sum(by_passes)
    if passes < 2 or not tokens:
        return ""
    some = sum(by_passes[1:])
    mean = sum(times * count for times, count in enumerate(by_passes)) / passes
    return (
        f"; clipped in at least one of {passes} passes: {counted(some, 'token')} "
        f"({format_share(some / tokens)}), in every pass: {by_passes[-1]} "
        f"({format_share(by_passes[-1] / tokens)}); on average a pass clips "
        f"{format_share(mean / tokens)}, which is what a logged clip fraction says"
    )


def _loss_note(
    rows: Sequence[Mapping[str, object]],
    unrecorded: Sequence[str],
    by_passes: Sequence[int] | None,
    no_update: str | None,
) -> str:
    """Say how much of the mismatch no gradient sees.

    Args:
        rows: by fate.
        unrecorded: fields of the loss.
        by_passes: model tokens that 0, 1, ... passes clip.
        no_update: why no update is known to have ended; None: one is.
    """
    if not rows:
        return "no model token is kept of this step"
    times = len(by_passes or ()) - 1
    clipped = f"clipped in every one of {times} passes" if times > 1 else "clipped"
    hidden = [row for row in rows if row["gradient"] is False]
    tokens = sum(float(str(row["share_of_tokens"])) for row in hidden)
    mismatch = sum(float(str(row["share_of_mismatch"])) for row in hidden)
    at_least = "at least " if unrecorded else ""
    if no_update and not hidden:
        text = "whether any token was trained on is not known"
    elif not hidden:
        text = (
            "no token is known to have no gradient" if unrecorded else "each token has a gradient"
        )
    elif math.isnan(mismatch):
        text = f"{at_least}{tokens:.1%} of the tokens have no gradient; both streams are equal"
    else:
        text = (
            f"{at_least}{mismatch:.1%} of the mismatch (sum of |p - q|) sits in tokens that no "
            f"gradient sees (rejected, of weight or advantage 0, or {clipped}), {at_least}"
            f"{tokens:.1%} of all"
        )
    if no_update:
        text += f"; {no_update}: the tokens may have seen no gradient at all"
    text += _clipped_note(by_passes or ())
    if not unrecorded:
        return text
    return f"{text}; not recorded: {', '.join(RECORD[name].split(':')[0] for name in unrecorded)}"


# --- parts of answers -----------------------------------------------------------------------
def _sides(clipped: Int8) -> list[str | None]:
    return ["low" if side < 0 else "high" if side > 0 else None for side in clipped.tolist()]


def _gap_texts(batch: Batch) -> list[str]:
    return [f"{gap.kind}: {gap.message}" for gap in batch.gaps]


def _unrecorded(loss: LossTokens, update: Update) -> list[JsonObject]:
    """Return what is not known of the loss, and what would record it."""
    found = {name: RECORD[name] for name in loss.unrecorded()}
    if (reason := update.reason(loss)) is not None:
        found = {"update": RECORD["update"] + reason, **found}
    return [{"name": name, "record": record} for name, record in found.items()]
