"""The tokens of a step's kept rows as the loss sees them: both streams, masks, weights, passes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from stagescope_service.statistics import loss_fate
from stagescope_service.statistics.cell import Bool, Float64, Int64
from stagescope_service.statistics.loss_fate import Int8, LossTokens
from stagescope_service.statistics.settings import StatisticsSettings
from stagescope_service.store.catalogue import Catalogue
from stagescope_service.store.tables import ArtifactRow
from stagescope_wire.batch import Batch, BatchPart, widened
from stagescope_wire.errors import NotFound, StagescopeError
from stagescope_wire.nonfinite import JsonObject

N = TypeVar("N", np.int8, np.float64)

_MAX_ADVICE: Final = 1000
_UPDATE: Final = "actor_update"
_LOSS_STAGES: Final = (_UPDATE, "compute_advantage")
"""Stages that record the update's mask, the decisive one first."""
_P_STREAMS: Final = ("old_log_probs", "log_probs")
_TENSORS: Final[Mapping[str, str]] = {
    "in_loss": "effective_valid", "weight": "rollout_is_weights", "advantage": "advantages",
    "clipped": "clipped",
}  # fmt: skip
"""Field of `LossTokens` -> the tensor that records it, in any stage."""


@dataclasses.dataclass(frozen=True)
class Update:
    """The update of a step, as far as the ranks reported it.

    Attributes:
        statuses: of its parts, `open` of those that have not ended; empty: none was reported.
    """

    statuses: frozenset[str]

    def reason(self, loss: LossTokens) -> str | None:
        """Return why it is not known that the step's tokens were trained on; None: it is.

        A trainer may report no such stage, but which tokens its loss clipped: then it has made an
        update. Advantages and weights exist before the update, so they prove nothing.
        """
        if self.statuses:
            other = sorted(self.statuses - {"ok"})
            return f"{_UPDATE} of this step is {' and '.join(other)} on a rank" if other else None
        return None if loss.clipped is not None else f"no {_UPDATE} of this step was reported"


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
    def from_batch(
        cls, batch: Batch, masks: Bool | None, passes: Sequence[Int8], update: Update
    ) -> StepTokens:
        """Read the rows of a batch.

        Args:
            batch: the rows.
            masks: bool [rows, tokens], under the mask of the update; None: not recorded.
            passes: `clipped` of each pass of the update.
            update: of the step.

        Raises:
            NotFound: both streams and the mask are not kept.
        """
        p_name = next((name for name in _P_STREAMS if name in batch), None)
        if p_name is None or "rollout_log_probs" not in batch or "response_mask" not in batch:
            raise NotFound(
                f"what is kept of step {batch.step} and could be joined has no two streams: "
                f"{', '.join(batch.tensors) or 'no tensor'}",
                expected="rollout_log_probs, old_log_probs (or log_probs) and response_mask",
                advice="; ".join(gap.message for gap in batch.gaps)[:_MAX_ADVICE],
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
            notes.append(
                f"a token counts as clipped where every one of {len(passes)} passes clips it"
            )
        loss = LossTokens(mask, in_loss, weight, advantage, clipped, finite=np.isfinite(d))
        if update.reason(loss) is not None:
            loss = dataclasses.replace(loss, updated=False)
        return cls(batch, p_name, p, q, d, raw, loss, notes)

    def extent(self, row: int) -> slice:
        """Return the known positions of a row, from the ragged row or else from the mask."""
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
        return of_model(self.loss.mask[0, shown], values)


def fields_in(
    files: Sequence[ArtifactRow], names: Collection[str], settings: Iterable[JsonObject]
) -> set[str]:
    """Return the fields of `LossTokens` that a step may have: the others are not recorded.

    Args:
        files: its payload files.
        names: of the tensors in them.
        settings: of the processes that wrote them.
    """
    found = {field for field, name in _TENSORS.items() if name in names}
    if any(row["stage"] in _LOSS_STAGES for row in files):
        found.add("in_loss")
    if any(each.get("rollout_is") is not None for each in settings):
        found.add("weight")
    return found


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
    return _wide(values, width)


def _wide(values: Float64, width: int) -> Float64:
    """Return [rows, tokens] with `width` tokens: cut, or NaN beyond its own."""
    found = np.full((len(values), width), np.nan)
    cut = values[:, :width]
    found[:, : cut.shape[1]] = cut
    return found


def _parts_with(batch: Batch, name: str, stages: Sequence[str]) -> list[BatchPart]:
    return [part for part in batch.parts if part.stage in stages and name in part.names]


def update_of(catalogue: Catalogue, attempt_id: int, step: int) -> Update:
    """Return what is known of the update of a step."""
    return Update(frozenset(catalogue.stage_statuses(attempt_id, step, _UPDATE)))


def loss_masks(batch: Batch, rows: Int64) -> Bool | None:
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


def _passes(batch: Batch, name: str, rows: Int64, empty: N) -> dict[int, npt.NDArray[N]]:
    """Return epoch -> a tensor [rows, tokens] of some rows as that pass of the update recorded it.

    `empty` stands where it recorded nothing, and gives the dtype.
    """
    if name not in batch.tensors:
        return {}
    place = np.full(batch.rows, -1, np.int64)
    place[rows] = np.arange(len(rows))
    passes: dict[int, npt.NDArray[N]] = {}
    for part in _parts_with(batch, name, [_UPDATE]):
        own = part.own.get(name)
        at = place[part.rows]
        chosen = at >= 0
        values = widened(batch.tensor(name))[part.rows[chosen]] if own is None else widened(own)
        if values.ndim != 2 or (own is not None and len(values) != len(part.rows)):
            continue
        values = values if own is None else values[chosen]
        shape = (len(rows), batch[name].shape[1])
        found = passes.setdefault(part.part.epoch, np.full(shape, empty, empty.dtype))
        width = min(values.shape[1], found.shape[1])
        found[at[chosen], :width] = values[:, :width]
    return dict(sorted(passes.items()))


def clipped_passes(batch: Batch, rows: Int64) -> dict[int, Int8]:
    """Return epoch -> `clipped` of some rows, [rows, tokens], in that pass of the update."""
    return _passes(batch, "clipped", rows, np.int8(0))


def update_ratios(
    batch: Batch, rows: Int64, one: StepTokens, epochs: Sequence[int]
) -> list[Float64] | None:
    """Return the ratio that the policy loss clips in each pass of the update, [rows, tokens] each.

    None: it is not recorded, or not for the passes of `epochs`, which record what they clip.
    """
    width = one.loss.mask.shape[1]
    found = {
        number: _wide(values, width)
        for number, values in _passes(batch, "prob_ratio", rows, np.float64(math.nan)).items()
    }
    if not found and one.p_name == "old_log_probs":
        current = _passes(batch, "log_probs", rows, np.float64(math.nan))
        with np.errstate(invalid="ignore", over="ignore"):
            found = {
                number: np.exp(_wide(values, width) - one.p) for number, values in current.items()
            }
    if not found or (epochs and list(found) != list(epochs)):
        return None
    return list(found.values())


def _clipped_always(passes: Sequence[Int8], shape: tuple[int, ...]) -> Int8:
    """Return the side on which a token is clipped in every pass, else 0; int8 of `shape`."""
    found = np.zeros(shape, np.int8)
    width = min(shape[1], *(each.shape[1] for each in passes))
    stacked = np.stack([each[:, :width] for each in passes])
    always = (stacked != 0).all(axis=0)
    found[:, :width] = np.where(always, stacked[0], 0)
    return found


def rounds_of(round_ids: Int64 | None, mask: Bool) -> list[int | None]:
    """Return each model token's round: given, else the number of its run in the mask."""
    if round_ids is None:
        starts = mask & ~np.concatenate([[False], mask[:-1]])
        round_ids = starts.cumsum() - 1
    pairs = zip(round_ids.tolist(), mask.tolist(), strict=True)
    return [number if is_model else None for number, is_model in pairs]


def shown_of(values: Float64 | None, shown: slice) -> Float64 | None:
    """Return the shown values of the only row; None: there are none."""
    return None if values is None else values[0, shown]


def of_model(mask: Bool, values: Float64) -> list[float | None]:
    """Return the values of the model's tokens; null where a token is not the model's."""
    pairs = zip(mask.tolist(), values.tolist(), strict=True)
    return [value if is_model else None for is_model, value in pairs]
