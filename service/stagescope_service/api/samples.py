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

from stagescope.batch import Batch, BatchPart, widened
from stagescope.wire.errors import NotFound, StagescopeError
from stagescope.wire.links import Link
from stagescope_service.api.batches import batch_of
from stagescope_service.api.completeness import ALL_ROWS
from stagescope_service.api.dependencies import Dependencies, Deps, Rank, Role, StepTarget
from stagescope_service.api.encoding import JsonObject
from stagescope_service.api.kept import payload_artifacts
from stagescope_service.api.models import samples as models
from stagescope_service.api.numbers import comparability_fields
from stagescope_service.api.requests import Answer, PageOf
from stagescope_service.api.rows import matching
from stagescope_service.api.target import Target
from stagescope_service.api.tokenizers import Tokenizers
from stagescope_service.core.instructions import PayloadKey
from stagescope_service.dumps.joining.join import Selection
from stagescope_service.statistics import loss_fate
from stagescope_service.statistics.cell import Bool, Float64, Int64
from stagescope_service.statistics.kernel import ROW
from stagescope_service.statistics.loss_fate import NAMES, Fate, Int8, LossTokens
from stagescope_service.statistics.settings import StatisticsSettings
from stagescope_service.statistics.summary import Sequences
from stagescope_service.store.parts import incarnation_of, part_key

router = APIRouter(prefix="/steps/{step}", tags=["steps"])

SortBy = Literal["max_abs", "mean_abs", "tokens", "sample_uid"]

_LOSS_STAGES: Final = ("actor_update", "compute_advantage")
"""Stages whose mask is that of the update, the decisive one first."""
_NAMES: Final = (
    "response_mask", "responses", "positions", "round_ids", "turn_ids", "rollout_log_probs",
    "old_log_probs", "log_probs", "advantages", "rollout_is_weights", "clipped", "effective_valid",
)  # fmt: skip
_P_STREAMS: Final = ("old_log_probs", "log_probs")
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

    Rows are of the samples that the step's numbers count. `kept` says whether tensors of the step
    are still there, so that `/samples/{sample_uid}` can show a sample's tokens, else `reason` why
    not; a row without `sample_uid` is shown by `/row`.
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
@router.get("/samples/{sample_uid:path}", response_model=models.Sample)
async def sample(
    deps: Deps,
    target: StepTarget,
    sample_uid: Annotated[str, Path(max_length=500, description="The sample's id.")],
) -> Answer:
    """Return the tokens of a sample: both streams, and what the loss did to each.

    Columns are aligned and hold one value for each position from the first to the last that is
    known, environment tokens included. `masked_why` and `fate` say why a token has no gradient, as
    far as that is recorded; `unrecorded` names what is not, and how to record it.
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

    The row is that of the rank's first part in the stage that has both streams.
    """
    found = await deps.computations.run(_tokens_of_row, deps, target, role, rank, row)
    return Answer({**target.heading(), **found})


def _tokens_of(deps: Dependencies, target: Target, sample_uid: str) -> JsonObject:
    """Return the columns of a sample.

    Raises:
        NotFound: the step's tensors are gone, or no such sample is among them, or the id names
            several: then they are told apart by their owner, as in `/samples`.
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
    """Return the columns of a sample whose id names others, too; None where it names this alone.

    They are read from the sample's own payload alone: what other payloads hold of the id may be of
    another sample.
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
    passes = [each[rows] for each in _passes(batch)]
    one = StepTokens.from_batch(batch.take(rows), _loss_masks(batch, rows), passes)
    shown = one.extent(row=0)
    fates = one.loss.fates()[0, shown]
    d = one.d[0, shown]
    ids = one.column("responses", shown)
    mask = one.loss.mask[0, shown]
    tokenizer = Tokenizers.from_settings(deps.settings, batch.meta)
    clipped = None if one.loss.clipped is None else one.loss.clipped[0, shown]
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
        "round": _rounds(one.column("round_ids", shown), mask),
        "turn": one.column("turn_ids", shown),
        "p": one.stream("p", shown),
        "q": one.stream("q", shown),
        "p_stream": one.p_name,
        "d": d,
        "advantage": _optional(one.loss.advantage, shown),
        "weight_raw": _where(mask, one.raw_weight[0, shown]),
        "weight": None if one.loss.weight is None else _where(mask, one.loss.weight[0, shown]),
        "clipped": None if clipped is None
        else ["low" if side < 0 else "high" if side > 0 else None for side in clipped.tolist()],
        "rejected": None if one.loss.in_loss is None
        else (mask & ~one.loss.in_loss[0, shown]).tolist(),
        "masked_why": [None if is_model else ENVIRONMENT for is_model in mask.tolist()],
        "fate": [NAMES[Fate(code)] for code in fates.tolist()],
        "loss_note": "; ".join(f"not recorded: {RECORD[name]}" for name in one.loss.unrecorded())
        or None,
        "unrecorded": _unrecorded(one.loss),
        "notes": [*notes, *one.notes, *(f"{gap.kind}: {gap.message}" for gap in batch.gaps)],
    }  # fmt: skip


# --- what the loss did to a step's tokens ---------------------------------------------------
@router.get("/loss", response_model=models.Loss)
async def loss(deps: Deps, target: StepTarget, page: PageOf) -> Answer:
    """Say how much of the step's mismatch sits in tokens that no gradient sees, and why.

    Rows are fates of the model's tokens, the trained ones first; each token has the first that
    applies of `rejected`, `zero weight`, `zero advantage`, `clipped low`, `clipped high`,
    `trained`. What is not recorded excludes nothing: `unrecorded` names it. Computed from what the
    ring and the kept files hold of the step: `tokens` of `tokens_counted`.
    """
    found, rows = await deps.computations.run(loss_of, deps, target)
    return Answer({**target.heading(), **found, **page.cut(rows)})


def loss_of(deps: Dependencies, target: Target) -> tuple[JsonObject, list[JsonObject]]:
    """Return the fields of the answer, and its rows."""
    measured = deps.step_summaries.measure(target.attempt_id, target.step_row)
    batch = batch_of(deps, target, Selection(None, None))
    step = StepTokens.from_batch(batch, _loss_masks(batch, np.arange(batch.rows)), _passes(batch))
    found = loss_fate.sums(step.loss.fates(), step.d)
    tokens, mismatch = sum(each.tokens for each in found), sum(each.abs_diff_sum for each in found)
    rows: list[JsonObject] = [
        {
            "fate": NAMES[each.fate],
            "gradient": each.fate is Fate.TRAINED,
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
        "unrecorded": _unrecorded(step.loss),
        "note": _loss_note(rows, step.loss.unrecorded()),
        "notes": [*step.notes, *(f"{gap.kind}: {gap.message}" for gap in batch.gaps)],
    }
    return fields, rows


def _loss_note(rows: Sequence[Mapping[str, object]], unrecorded: Sequence[str]) -> str:
    if not rows:
        return "no model token is kept of this step"
    hidden = [row for row in rows if not row["gradient"]]
    tokens = sum(float(str(row["share_of_tokens"])) for row in hidden)
    mismatch = sum(float(str(row["share_of_mismatch"])) for row in hidden)
    at_least = "at least " if unrecorded else ""
    if not hidden:
        text = (
            "no token is known to have no gradient" if unrecorded else "each token has a gradient"
        )
    elif math.isnan(mismatch):
        text = f"{at_least}{tokens:.1%} of the tokens have no gradient; both streams are equal"
    else:
        text = (
            f"{at_least}{mismatch:.1%} of the mismatch (sum of |p - q|) sits in tokens that no "
            f"gradient sees (rejected, of weight or advantage 0, or clipped), {at_least}"
            f"{tokens:.1%} of all"
        )
    if not unrecorded:
        return text
    return f"{text}; not recorded: {', '.join(RECORD[name].split(':')[0] for name in unrecorded)}"


# --- reading a batch ------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class StepTokens:
    """Rows of a batch as the loss sees them, [rows, tokens] each.

    Attributes:
        batch: the rows.
        p_name: the tensor of p.
        p, q: log-probs, float64; NaN where they are missing.
        d: p - q in nats.
        raw_weight: the importance weights before they are cut.
        loss: what is known of the loss.
        notes: how something was derived.
    """

    batch: Batch
    p_name: str
    p: Float64
    q: Float64
    d: Float64
    raw_weight: Float64
    loss: LossTokens
    notes: Sequence[str]

    @classmethod
    def from_batch(cls, batch: Batch, masks: Bool | None, passes: Sequence[Int8]) -> StepTokens:
        """Read the rows of a batch.

        Args:
            batch: the rows.
            masks: bool [rows, tokens], under the mask of the update; None: not recorded.
            passes: `clipped` of each pass of the update.

        Raises:
            NotFound: both streams and the mask are not kept.
        """
        p_name = next((name for name in _P_STREAMS if name in batch), None)
        if p_name is None or "rollout_log_probs" not in batch or "response_mask" not in batch:
            raise NotFound(
                f"what is kept of step {batch.step} has no two streams: "
                f"{', '.join(batch.tensors) or 'nothing'}",
                expected="rollout_log_probs, old_log_probs (or log_probs) and response_mask",
            )
        mask = batch["response_mask"] != 0
        width = mask.shape[1]
        p, q = (_floats(batch, name, width) for name in (p_name, "rollout_log_probs"))
        notes: list[str] = []
        with np.errstate(invalid="ignore"):
            d = p - q
        settings = _settings(batch, notes)
        raw = loss_fate.raw_weights(np.where(mask, d, 0.0), mask, settings)
        weight = None
        if "rollout_is_weights" in batch:
            weight = _floats(batch, "rollout_is_weights", width)
        elif settings.rollout_is is not None and not settings.rollout_is_batch_normalize:
            weight = settings.apply(raw)
            notes.append("weights are computed from the run's settings, as verl does")
        advantage = _floats(batch, "advantages", width) if "advantages" in batch else None
        in_loss = masks
        if "effective_valid" in batch:
            valid = _floats(batch, "effective_valid", width) != 0
            in_loss = valid if in_loss is None else in_loss & valid
        clipped = _clipped_always(passes, mask.shape) if passes else None
        if len(passes) > 1:
            notes.append(f"clipped: in each of {len(passes)} passes")
        loss = LossTokens(mask, in_loss, weight, advantage, clipped)
        return cls(batch, p_name, p, q, d, raw, loss, notes)

    def extent(self, row: int) -> slice:
        """Return the positions of a row that are known: of the ragged row, else of the mask."""
        on = np.flatnonzero(self.loss.mask[row])
        end = int(on[-1]) + 1 if len(on) else 0
        length = self.batch.lengths.get("response_mask")
        if length is not None:
            return slice(0, int(length[row]))
        begin = int(on[0]) if len(on) and self.batch.side("response_mask") == "left" else 0
        return slice(begin, end)

    def column(self, name: str, shown: slice) -> Int64 | None:
        """Return integers of the only row; None: not recorded as wide as the mask."""
        width = self.loss.mask.shape[1]
        if name not in self.batch or self.batch[name].shape[1:] != (width,):
            return None
        return self.batch[name][0, shown].astype(np.int64)

    def positions(self, shown: slice) -> Int64:
        """Return each token's position in its sample."""
        found = self.column("positions", shown)
        return np.arange(shown.start, shown.stop, dtype=np.int64) if found is None else found

    def stream(self, name: Literal["p", "q"], shown: slice) -> list[float | None]:
        """Return log-probs of the only row; null where the token is not the model's."""
        values = (self.p if name == "p" else self.q)[0, shown]
        return _where(self.loss.mask[0, shown], values)


def _settings(batch: Batch, notes: list[str]) -> StatisticsSettings:
    try:
        return StatisticsSettings.of_run(batch.meta.get("settings") or {})
    except StagescopeError as error:
        notes.append(f"the run's settings of weights are not used: {error}")
        return StatisticsSettings()


def _floats(batch: Batch, name: str, width: int) -> Float64:
    """Return a tensor as float64 [rows, width]; NaN where it has no value."""
    values = widened(batch.tensor(name)).astype(np.float64)
    if values.ndim == 1:
        values = np.broadcast_to(values[:, None], (len(values), width))
    found = np.full((len(values), width), np.nan)
    cut = values[:, :width]
    found[:, : cut.shape[1]] = cut
    return found


def _parts_with(batch: Batch, name: str, stages: Sequence[str]) -> list[BatchPart]:
    return [part for part in batch.parts if part.stage in stages and name in part.names]


def _loss_masks(batch: Batch, rows: Int64) -> Bool | None:
    """Return bool [rows, tokens]: under the mask of the update; None where no stage recorded it."""
    if "response_mask" not in batch:
        return None
    masks = batch["response_mask"][rows] != 0
    place = {int(row): at for at, row in enumerate(rows)}
    known = np.zeros(len(rows), bool)
    for stage in reversed(_LOSS_STAGES):
        for part in _parts_with(batch, "response_mask", [stage]):
            own = part.own.get("response_mask")
            for index, row in enumerate(part.rows.tolist()):
                if row not in place:
                    continue
                known[place[row]] = True
                if own is not None and own.values.ndim == 2:
                    width = min(own.values.shape[1], masks.shape[1])
                    masks[place[row], :width] = own.values[index, :width] != 0
    return masks if known.all() and len(rows) else None


def _passes(batch: Batch) -> list[Int8]:
    """Return `clipped` int8 [rows, tokens] of each pass of the update, the recorded ones."""
    if "clipped" not in batch:
        return []
    passes: dict[int, Int8] = {}
    for part in _parts_with(batch, "clipped", ["actor_update"]):
        own = part.own.get("clipped")
        number = part.part.epoch
        values = batch["clipped"][part.rows] if own is None else own.values
        if values.ndim == 2:
            found = passes.setdefault(number, np.zeros(batch["clipped"].shape, np.int8))
            found[part.rows, : values.shape[1]] = values
    return list(passes.values())


def _clipped_always(passes: Sequence[Int8], shape: tuple[int, ...]) -> Int8:
    """Return the side on which a token is clipped in every pass, else 0; int8 of `shape`."""
    found = np.zeros(shape, np.int8)
    width = min(shape[1], *(each.shape[1] for each in passes))
    stacked = np.stack([each[:, :width] for each in passes])
    always = (stacked != 0).all(axis=0)
    found[:, :width] = np.where(always, stacked[0], 0)
    return found


def _rounds(round_ids: Int64 | None, mask: Bool) -> list[int | None]:
    """Return each model token's round: given, else the number of its run in the mask."""
    if round_ids is None:
        starts = mask & ~np.concatenate([[False], mask[:-1]])
        round_ids = starts.cumsum() - 1
    pairs = zip(round_ids.tolist(), mask.tolist(), strict=True)
    return [number if is_model else None for number, is_model in pairs]


def _optional(values: Float64 | None, shown: slice) -> Float64 | None:
    return None if values is None else values[0, shown]


def _where(mask: Bool, values: Float64) -> list[float | None]:
    pairs = zip(mask.tolist(), values.tolist(), strict=True)
    return [value if is_model else None for is_model, value in pairs]


def _unrecorded(loss: LossTokens) -> list[JsonObject]:
    return [{"name": name, "record": RECORD[name]} for name in loss.unrecorded()]
