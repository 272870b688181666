"""Faults of what a stream holds: another token's value, another quantity, or none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from tests.service.rules.benchmark.play import Fault
from tests.service.rules.benchmark.scene import Restart, Scene
from tests.service.rules.planted import Batch

Change = Callable[[Batch], None]
Bools = npt.NDArray[np.bool_]


def when(
    change: Change, since: int = 1, ranks: Sequence[int] | None = None, until: int = 10**9
) -> Change:
    """Return a change of some steps and ranks; None: of all."""

    def changed(batch: Batch) -> None:
        if since <= batch.step <= until and (ranks is None or batch.rank in ranks):
            change(batch)

    return changed


# --- another token's value ----------------------------------------------------------------------
def delayed(by: int) -> Change:
    """Return a change after which the rollout's log-probs are so many tokens late."""

    def change(batch: Batch) -> None:
        moved = np.zeros_like(batch.q)
        if by > 0:
            moved[:, by:] = batch.q[:, :-by]
        else:
            moved[:, :by] = batch.q[:, -by:]
        batch.q = moved

    return change


def delayed_rows(batch: Batch) -> None:
    """The rows of one engine are one token late, in a batch of several engines."""
    own = np.array([each == "engine-2" for each in batch.engine or ()])
    batch.q[own, 1:] = batch.q[own, :-1].copy()


def half_delayed(batch: Batch) -> None:
    """Every second row is one token late."""
    batch.q[::2, 1:] = batch.q[::2, :-1].copy()


def mask_moved(by: int) -> Change:
    """Return a change after which the mask lies so many tokens late."""

    def change(batch: Batch) -> None:
        moved = np.full_like(batch.rounds, -1)
        if by > 0:
            moved[:, by:] = batch.rounds[:, :-by]
        else:
            moved[:, :by] = batch.rounds[:, -by:]
        batch.rounds = moved

    return change


def padding_masked(batch: Batch) -> None:
    """The mask covers the padding of each row up to one length, where both streams are 0."""
    wide = 192
    more = ((0, 0), (0, wide - batch.q.shape[1]))
    batch.p, batch.q = (np.pad(each, more) for each in (batch.p, batch.q))
    ends = [int(np.flatnonzero(own >= 0)[-1]) + 1 for own in batch.rounds]
    batch.rounds = np.pad(batch.rounds, more, constant_values=-1)
    for row, end in enumerate(ends):
        batch.p[row, end:] = batch.q[row, end:] = 0.0
        batch.rounds[row, end:] = batch.rounds[row, end - 1]
    ids = np.where(batch.q < 0.0, batch.random.integers(1, 999, batch.q.shape), 0)
    batch.extra["responses"] = ("int64", ids.shape, ids, None)


def tools_masked(batch: Batch) -> None:
    """The mask covers the tokens of tools between rounds, which the engine did not sample."""
    for own in batch.rounds:
        end = int(np.flatnonzero(own >= 0)[-1]) + 1
        own[:end] = np.maximum.accumulate(own[:end])


def last_zero(batch: Batch) -> None:
    """The engine returns no log-prob of the stop token, and 0 stands for it."""
    batch.q = np.where(edges(batch, last=True), 0.0, batch.q)


def other_rows(batch: Batch) -> None:
    """The trainer's rows come in another order."""
    batch.p = np.roll(batch.p, 1, axis=0)


def two_swapped(batch: Batch) -> None:
    """Two rows are exchanged."""
    batch.p[[0, 1]] = batch.p[[1, 0]]


# --- another quantity, or none ------------------------------------------------------------------
def as_probabilities(batch: Batch) -> None:
    """The engine hands over probabilities."""
    batch.q = np.exp(batch.q)


def negated(batch: Batch) -> None:
    """The engine hands over -log p."""
    batch.q = -batch.q


def trainer_probabilities(batch: Batch) -> None:
    """The trainer hands over probabilities."""
    batch.p = np.exp(batch.p)


def filled(value: float, every: int = 1) -> Change:
    """Return a change after which every so many tokens of the rollout have one value."""

    def change(batch: Batch) -> None:
        batch.q[:, ::every] = value

    return change


def copied(batch: Batch) -> None:
    """The trainer hands over the rollout's log-probs."""
    batch.p = batch.q.copy()


# --- edges of rounds ----------------------------------------------------------------------------
def edges(batch: Batch, last: bool = False) -> Bools:
    """Return where the first or the last tokens of rounds are."""
    beside = np.full_like(batch.rounds, -1)
    if last:
        beside[:, :-1] = batch.rounds[:, 1:]
    else:
        beside[:, 1:] = batch.rounds[:, :-1]
    found: Bools = (batch.rounds >= 0) & (beside != batch.rounds)
    return found


def first_tokens_lower(batch: Batch) -> None:
    """The trainer finds the first token of a round less likely: another template before it."""
    batch.p = np.where(edges(batch), batch.p - 0.7, batch.p)


def disturb(batch: Batch, size: float, where: Bools) -> None:
    """Add what noise of logits makes of a log-prob where it is true: less, the surer a token is."""
    scale = size * 1.2533 * (1.0 - np.exp(np.minimum(batch.p, 0.0)))
    d = scale * batch.random.standard_normal(batch.p.shape) - scale**2 / 2.0
    batch.p = np.where(where, np.minimum(batch.p + d, 0.0), batch.p)


def first_tokens_noisy(batch: Batch) -> None:
    """The prefill of a round has another precision."""
    disturb(batch, 0.2, edges(batch))


def stop_tokens_lower(batch: Batch) -> None:
    """The engine masks the stop token until a smallest length, so that it finds it likelier."""
    batch.p = np.where(edges(batch, last=True), batch.p - 1.5, batch.p)


def stop_tokens_noisy(batch: Batch) -> None:
    """The two sides score the stop token in other contexts."""
    disturb(batch, 0.4, edges(batch, last=True))


# --- precision ----------------------------------------------------------------------------------
def trainer_in_bfloat16(batch: Batch) -> None:
    """The trainer's log-probs are handed over in bfloat16."""
    batch.dtype = "bfloat16"


def rollout_in_bfloat16(batch: Batch) -> None:
    """The rollout's log-probs are handed over in bfloat16."""
    batch.rollout_dtype = "bfloat16"


def cast_to_bfloat16(batch: Batch) -> None:
    """Log-probs of both sides were in bfloat16 before they became float32."""
    for name in ("p", "q"):
        bits = getattr(batch, name).astype(np.float32).view(np.uint32) + np.uint32(0x8000)
        kept = (bits & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)
        setattr(batch, name, kept)


# --- not finite -----------------------------------------------------------------------------------
def nan_in_trainer(batch: Batch) -> None:
    """One token's logits overflow in the trainer."""
    batch.p[0, _first_model_token(batch)] = np.nan


def infinite_rollout(batch: Batch) -> None:
    """The engine returns -inf for a token that its sampling had cut."""
    batch.q[-1, _first_model_token(batch, row=-1)] = -np.inf


def _first_model_token(batch: Batch, row: int = 0) -> int:
    return int(np.flatnonzero(batch.rounds[row] >= 0)[2])


def fault(kind: str, name: str, causes: str, why: str, scene: Scene, **rest: Any) -> Fault:
    """Return a fault whose first cause must be one of the rules in `causes`."""
    return Fault(
        kind=kind, name=name, causes=frozenset(causes.split()), why=why, scene=scene, **rest
    )


_LATE: Final = "each token has another one's log-prob, and nothing else is wrong"
_MASK: Final = "the mask has a token that the engine did not sample at one end of each round"
_PAIRS: Final = "the two streams are of other responses"
_QUANTITY: Final = "a stream holds something else than log-probs"
_NONE: Final = "no value of the engine is there, and a constant stands for it"
_OVER: Final = "the mask covers tokens that the engine did not sample"
_EDGE: Final = "only tokens at one end of rounds are scored otherwise"
_DTYPE: Final = "the streams differ by what their number format cannot hold"

_BASE: Final = Scene()

STREAMS: Final = (
    fault("late on one rank", "rank 1 late from 6", "streams_shifted", _LATE,
           _BASE.but(steps=24, seed=1), where="1", change=when(delayed(1), 6, [1])),
    fault("late on one rank", "rank 5 of 8 early from 20", "streams_shifted", _LATE,
           _BASE.but(ranks=8, has_ids=False, seed=2), where="5",
           change=when(delayed(-1), 20, [5])),
    fault("late on one rank", "rank 0 of 2 two tokens late", "streams_shifted", _LATE,
           _BASE.but(ranks=2, model="sure", seed=3), where="0", change=when(delayed(2), 10, [0])),
    fault("late on one rank", "rank 1 late from 6, short responses", "streams_shifted", _LATE,
           _BASE.but(steps=24, rows=2, group=2, reward="smooth", rounds=1, usual=16, longest=40,
           seed=34), where="1",
           change=when(delayed(1), 6, [1])),
    fault("late on one rank", "rank 3 late from 10, few short rounds", "streams_shifted", _LATE,
           _BASE.but(rows=2, group=2, reward="smooth", rounds=4, usual=10, longest=80,
           model="sure", seed=35),
           where="3", change=when(delayed(1), 10, [3])),
    fault("late on one rank", "rank 2 late from 8, one row", "streams_shifted", _LATE,
           _BASE.but(rows=1, group=1, has_ids=False, rounds=1, usual=50, seed=36), where="2",
           change=when(delayed(1), 8, [2])),
    fault("late on all ranks", "all late from the begin", "streams_shifted", _LATE,
           _BASE.but(rounds=1, seed=4), change=delayed(1)),
    fault("late on all ranks", "all early from 15", "streams_shifted", _LATE,
           _BASE.but(model="sure", uneven=True, seed=5), change=when(delayed(-1), 15)),
    fault("late on all ranks", "all late since a restart", "streams_shifted", _LATE,
           _BASE.but(restarts=(Restart(15, 17),), seed=6), change=when(delayed(1), 15)),
    fault("late in part of the rows", "one engine of four late", "streams_shifted", _LATE,
           _BASE.but(engines=4, rows=8, seed=7), change=when(delayed_rows, 9)),
    fault("late in part of the rows", "every second row late", "streams_shifted", _LATE,
           _BASE.but(rows=8, group=2, reward="smooth", seed=8), change=when(half_delayed, 12)),
    fault("mask moved", "mask one token late", "streams_shifted last_token streams_lack_values",
           _MASK, _BASE.but(seed=9), change=when(mask_moved(1), 8)),
    fault("mask moved", "mask one token early on two ranks",
           "streams_shifted first_token streams_lack_values", _MASK, _BASE.but(seed=10),
           change=when(mask_moved(-1), 8, [1, 2])),
    fault("rows permuted", "rows permuted on one rank", "streams_unrelated", _PAIRS,
           _BASE.but(seed=11), where="3", change=when(other_rows, 14, [3])),
    fault("rows permuted", "rows permuted on all ranks", "streams_unrelated", _PAIRS,
           _BASE.but(ranks=8, rounds=1, seed=12), change=other_rows),
    fault("rows permuted", "two rows exchanged on each rank", "streams_unrelated", _PAIRS,
           _BASE.but(rows=8, seed=13), change=when(two_swapped, 10)),
    fault("probabilities", "probabilities for log-probs", "streams_not_log_probs", _QUANTITY,
           _BASE.but(seed=14), change=as_probabilities),
    fault("probabilities", "negated from 12 on one rank", "streams_not_log_probs", _QUANTITY,
           _BASE.but(seed=15), where="2", change=when(negated, 12, [2])),
    fault("probabilities", "the trainer's probabilities from 9", "streams_not_log_probs", _QUANTITY,
           _BASE.but(ranks=2, rows=8, seed=16), change=when(trainer_probabilities, 9)),
    fault("streams copied", "copied from the begin", "streams_copied",
           "the trainer did not score the tokens", _BASE.but(seed=17), change=copied),
    fault("streams copied", "copied from 14", "streams_copied",
           "the trainer did not score the tokens", _BASE.but(ranks=8, seed=18),
           change=when(copied, 14)),
    fault("streams copied", "copied on one rank", "streams_copied",
           "the trainer of one rank did not score the tokens", _BASE.but(seed=19), where="1",
           change=when(copied, 11, [1])),
    fault("filled in", "zeros from the begin", "streams_lack_values", _NONE, _BASE.but(seed=20),
           change=filled(0.0)),
    fault("filled in", "zeros on one rank from 9", "streams_lack_values", _NONE,
           _BASE.but(seed=21), where="0", change=when(filled(0.0), 9, [0])),
    fault("filled in", "every tenth token is -100", "streams_lack_values", _NONE,
           _BASE.but(seed=22), change=when(filled(-100.0, 10), 7)),
    fault("filled in", "every eighth token is 0", "streams_lack_values", _NONE,
           _BASE.but(ranks=2, rows=8, seed=23), change=when(filled(0.0, 8), 10)),
    fault("first token of rounds", "first tokens less likely", "first_token", _EDGE,
           _BASE.but(seed=24), change=when(first_tokens_lower, 10)),
    fault("first token of rounds", "first tokens noisy from the begin", "first_token", _EDGE,
           _BASE.but(rounds=5, usual=16, seed=25), change=first_tokens_noisy),
    fault("last token of rounds", "stop tokens less likely", "last_token", _EDGE,
           _BASE.but(rounds=4, usual=20, seed=26), change=when(stop_tokens_lower, 13)),
    fault("last token of rounds", "stop tokens noisy on all ranks", "last_token", _EDGE,
           _BASE.but(ranks=8, seed=27), change=stop_tokens_noisy),
    fault("rounded stream", "the trainer's stream in bfloat16", "rounded_stream", _DTYPE,
           _BASE.but(engine="float32", seed=28), change=trainer_in_bfloat16),
    fault("rounded stream", "the rollout's stream in bfloat16 from 12", "rounded_stream", _DTYPE,
           _BASE.but(engine="float32", model="sure", seed=29), change=when(rollout_in_bfloat16,
           12)),
    fault("rounded stream", "one rank sends bfloat16", "rounded_stream rank_apart", _DTYPE,
           _BASE.but(engine="float32", seed=30), where="2",
           change=when(trainer_in_bfloat16, 8, [2])),
    fault("rounded stream", "both cast to bfloat16 before", "lattice rounded_stream", _DTYPE,
           _BASE.but(seed=31), change=cast_to_bfloat16),
    fault("rounded stream", "short responses of a sure model, in bfloat16", "rounded_stream",
           _DTYPE,
           _BASE.but(engine="float32", model="certain", rows=2, group=2, reward="smooth",
           usual=12, rounds=1,
           seed=37),
           change=when(trainer_in_bfloat16, 9)),
    fault("not finite log-probs", "NaN on one rank from 12", "non_finite_log_probs",
           "a token's logits overflow in one rank's trainer", _BASE.but(seed=32), where="2",
           change=when(nan_in_trainer, 12, [2])),
    fault("not finite log-probs", "-inf once on one rank", "non_finite_log_probs",
           "the engine returned -inf for a token", _BASE.but(ranks=8, seed=33), where="6",
           change=when(infinite_rollout, 28, [6], 28)),
    fault("mask over padding", "padding under the mask", "mask_covers_padding", _OVER,
           _BASE.but(rounds=1, has_scalars=False, seed=143), change=padding_masked),
    fault("mask over padding", "padding under the mask on rank 1 from 9", "mask_covers_padding",
           _OVER, _BASE.but(rounds=1, seed=144), where="1", change=when(padding_masked, 9, [1])),
    fault("mask over tools", "tools under the mask", "streams_lack_values", _OVER,
           _BASE.but(seed=145), change=tools_masked),
    fault("mask over tools", "tools under the mask on rank 3 from 12", "streams_lack_values",
           _OVER, _BASE.but(model="sure", seed=146), where="3", change=when(tools_masked, 12, [3])),
    fault("last token filled in", "zeros for stop tokens", "streams_lack_values last_token", _NONE,
           _BASE.but(seed=147), change=last_zero),
    fault("last token filled in", "zeros for stop tokens from 10", "streams_lack_values last_token",
           _NONE, _BASE.but(ranks=2, rows=8, seed=148), change=when(last_zero, 10)),
)  # fmt: skip
