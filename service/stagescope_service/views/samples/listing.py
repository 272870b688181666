"""Routes about single samples: a step's samples, the tokens of one, and what the loss did to them.

The list rests on the step summary, which every closed step has; tokens are read from what the ring
and the kept files still hold.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Final, Literal

import numpy as np

from stagescope_service.dumps.joining.join import Selection
from stagescope_service.statistics import loss_fate
from stagescope_service.statistics.cell import Bool
from stagescope_service.statistics.loss_fate import NAMES, Fate, FateSum, Int8, LossTokens
from stagescope_service.statistics.sequence_row import ROW
from stagescope_service.statistics.summary import Sequences
from stagescope_service.store.parts import incarnation_of
from stagescope_service.store.tables import ArtifactRow
from stagescope_service.views.encoding import JsonObject
from stagescope_service.views.kept import payload_artifacts
from stagescope_service.views.pages import Page
from stagescope_service.views.reading.completeness import ALL_ROWS
from stagescope_service.views.reading.dependencies import Dependencies
from stagescope_service.views.reading.rows import matching
from stagescope_service.views.reading.target import Target
from stagescope_service.views.samples.batches import batch_of
from stagescope_service.views.samples.tokens import (
    StepTokens,
    Update,
    clipped_passes,
    loss_masks,
    update_of,
)
from stagescope_service.views.steps.numbers import comparability_fields
from stagescope_wire.batch import Batch
from stagescope_wire.render import counted, format_share

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

GONE: Final = "its tensors have left the ring, and were not kept"


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


@dataclasses.dataclass(frozen=True)
class StepLoss:
    """The effect of the loss on a step's tokens, as `/loss` returns it."""

    fields: JsonObject
    rows: list[JsonObject]
    derived: Sequence[str]
    """How columns were derived."""
    gaps: Sequence[str]
    """Gaps and contradictions in the kept tensors."""


_NO_ANSWER: Final = (Fate.UNKNOWN, Fate.NOT_FINITE)
"""Fates of which it is not known whether the tokens have a gradient."""


@dataclasses.dataclass(frozen=True)
class KeptLoss:
    """What is kept of a step for the loss.

    Attributes:
        tokens: as the loss sees them.
        fates: the sums of each fate, those that no gradient hides first.
        passes: `clipped` of each pass of the update.
        update: of the step.
    """

    tokens: StepTokens
    fates: Sequence[FateSum]
    passes: Sequence[Int8]
    update: Update

    @property
    def count(self) -> int:
        """Number of the model tokens."""
        return sum(each.tokens for each in self.fates)

    @property
    def shares(self) -> dict[Fate, float]:
        """The share of each fate in the sum of |d|, 0 to 1; NaN if that is 0."""
        sizes = {each.fate: each.abs_diff_sum for each in self.fates}
        total = sum(each.abs_diff_sum for each in sorted(self.fates, key=lambda each: each.fate))
        return {fate: size / total if total else math.nan for fate, size in sizes.items()}

    @property
    def unrecorded(self) -> list[JsonObject]:
        """The fields of the loss that are not recorded, and how to record each."""
        return unrecorded_fields(self.tokens.loss, self.update)


def kept_loss(
    deps: Dependencies, target: Target, artifacts: Sequence[ArtifactRow] | None = None
) -> KeptLoss:
    """Return the kept tokens of a step as the loss sees them.

    Args:
        deps: find and fetch the files.
        target: the step.
        artifacts: its payload files; None: they are looked up.
    """
    batch = batch_of(deps, target, Selection(None, None), artifacts=artifacts)
    every = np.arange(batch.rows)
    passes = list(clipped_passes(batch, every).values())
    update = update_of(deps.catalogue, target.attempt_id, target.step_number)
    step = StepTokens.from_batch(batch, loss_masks(batch, every), passes, update)
    found = loss_fate.sums(step.loss.fates(), step.d)
    return KeptLoss(step, sorted(found, key=lambda each: -each.fate), passes, update)


def loss_of(deps: Dependencies, target: Target) -> StepLoss:
    """Return what the loss did with a step's tokens, as far as they are kept."""
    measured = deps.step_summaries.measure(target.attempt_id, target.step_row)
    kept = kept_loss(deps, target)
    step, found, passes, update, shares = (
        kept.tokens, kept.fates, kept.passes, kept.update, kept.shares
    )  # fmt: skip
    tokens = kept.count
    by_passes = _by_passes(passes, step.loss.mask) if passes else None
    rows: list[JsonObject] = [
        {
            "fate": NAMES[each.fate],
            "gradient": None if each.fate in _NO_ANSWER else each.fate is Fate.TRAINED,
            "tokens": each.tokens,
            "share_of_tokens": each.tokens / tokens,
            "sum_abs": each.abs_diff_sum,
            "mean_abs": each.abs_diff_sum / each.finite if each.finite else math.nan,
            "share_of_mismatch": shares[each.fate],
        }
        for each in found
    ]
    fields: JsonObject = {
        **comparability_fields(measured.comparability),
        "tokens": tokens,
        "tokens_counted": measured.summary.total.masked,
        "clipped_in": by_passes,
        "unrecorded": kept.unrecorded,
        "note": _loss_note(rows, step.loss.unrecorded(), by_passes, update.reason(step.loss)),
    }
    return StepLoss(fields, rows, step.notes, gap_texts(step.batch))


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
        f"({format_share(by_passes[-1] / tokens)}). On average a pass clips "
        f"{format_share(mean / tokens)}, as a logged clip fraction says"
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
            f"{tokens:.1%} of all tokens"
        )
    if no_update:
        text += f"; {no_update}: the tokens may have seen no gradient at all"
    for row in rows:
        if row["fate"] == NAMES[Fate.NOT_FINITE]:
            bad = counted(int(str(row["tokens"])), "token has", "tokens have")
            text += f"; {bad} a log-prob that is not finite, which can make the whole loss NaN"
    text += _clipped_note(by_passes or ())
    if not unrecorded:
        return text
    return f"{text}; not recorded: {', '.join(RECORD[name].split(':')[0] for name in unrecorded)}"


def gap_texts(batch: Batch) -> list[str]:
    """Return what could not be read of a batch, a text a gap."""
    return [f"{gap.kind}: {gap.message}" for gap in batch.gaps]


def unrecorded_fields(loss: LossTokens, update: Update) -> list[JsonObject]:
    """Return what is not known of the loss, and what would record it."""
    found = {name: RECORD[name] for name in loss.unrecorded()}
    if (reason := update.reason(loss)) is not None:
        found = {"update": RECORD["update"] + reason, **found}
    return [{"name": name, "record": record} for name, record in found.items()]


def samples(
    deps: Dependencies,
    target: Target,
    page: Page,
    sort: SortBy = "max_abs",
    role: str | None = None,
    rank: int | None = None,
) -> JsonObject:
    """List the step's samples with their mismatch, the largest |p - q| first."""
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
    return {**target.heading(), **comparability_fields(measured.comparability), **page.cut(rows)}
