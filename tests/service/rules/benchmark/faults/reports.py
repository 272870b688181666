"""Faults that ranks and the service report: who is missing, slow, stuck, or lost."""

from __future__ import annotations

from typing import Final

import numpy as np
from tests.service.rules.benchmark.faults.engines import by, sampled
from tests.service.rules.benchmark.faults.streams import delayed, fault, when
from tests.service.rules.benchmark.faults.trainings import TWO, both, with_scalar
from tests.service.rules.benchmark.play import Training
from tests.service.rules.benchmark.scene import Restart, Scene
from tests.service.rules.planted import STAGE, Batch
from tests.support.sampler import temperature


def _lose(training: Training, step: int) -> None:
    if step in (18, 21):
        rank = training.processes[-1]
        report = rank.draft(
            "dropped", stage=STAGE, step=step, what="payload", count=2, reason="no room"
        )
        training.bench.engine.take_together([report])


def _lose_many(training: Training, step: int) -> None:
    for rank in training.processes[1:4] if step == 30 else ():
        report = rank.draft(
            "dropped", stage=STAGE, step=step, what="payload", count=1, reason="no room"
        )
        training.bench.engine.take_together([report])


def _stuck(training: Training, step: int) -> None:
    if step == 20:
        training.bench.report(
            training.run, "stage_stuck", f"actor 3 has been in {STAGE} for 900 s", step=21,
            stage=STAGE, role="actor", rank=3,
        )  # fmt: skip


def _silent(training: Training, step: int) -> None:
    if step == 30:
        training.bench.report(
            training.run, "process_silent", "actor 0 has not reported for 600 s", step=31,
            role="actor", rank=0,
        )  # fmt: skip


def _operator(training: Training, step: int) -> None:
    if step == 20:
        training.bench.report(
            training.run, "non_finite_operator", "layers.11.mlp.down_proj has 4 NaN on actor 1, "
            "and its inputs are finite", step=step, stage="actor_update", role="actor", rank=1,
        )  # fmt: skip


def _copies(training: Training, step: int) -> None:
    if step in (12, 16, 20, 24, 28):
        training.bench.report(
            training.run, "replicas_differ", "actor 1 and actor 0 hold the same rows with other "
            "log-probs", step=step, stage=STAGE, role="actor", rank=1,
        )  # fmt: skip


def _unrecorded(batch: Batch) -> None:
    """A branch skips the recording of the log-probs."""
    batch.has_streams = False


_BASE: Final = Scene()
_STOPPED: Final = "the ranks end their stages as before, without log-probs"

REPORTS: Final = (
    fault("straggler", "rank 3 takes 2.5 times as long", "straggler", "one rank is slow",
           _BASE.but(seed=121), where="rank 3",
           seconds=lambda step, rank, usual: usual * (2.5 if rank == 3 else 1.0)),
    fault("straggler", "rank 6 of 8 from 20", "straggler", "one rank is slow",
           _BASE.but(ranks=8, seed=122), where="rank 6",
           seconds=lambda step, rank, usual: usual * (1.8 if rank == 6 and step > 19 else 1.0)),
    fault("ranks missing", "rank 3 from 15", "ranks_missing", "one rank reports nothing any more",
           _BASE.but(seed=123), where="3", absent=lambda step, rank: rank == 3 and step >= 15),
    fault("ranks missing", "rank 5 of 8 in every second step", "ranks_missing",
           "one rank's steps do not arrive", _BASE.but(ranks=8, seed=124), where="5",
           absent=lambda step, rank: rank == 5 and step % 2 == 0),
    fault("lost data", "payloads dropped twice", "payloads_lost", "the probe had no room",
           _BASE.but(steps=24, seed=125), event=_lose),
    fault("lost data", "payloads of three ranks dropped in 30", "payloads_lost",
           "the probe had no room", _BASE.but(ranks=8, seed=133), event=_lose_many),
    fault("steps missing", "no steps 12 to 14", "steps_unreported", "step numbers have a gap",
           _BASE.but(seed=126), skipped=frozenset({12, 13, 14})),
    fault("steps missing", "no step 29", "steps_unreported", "step numbers have a gap",
           _BASE.but(ranks=2, seed=127), skipped=frozenset({29})),
    fault("hang", "rank 3 stuck in a stage", "hangs", "one rank holds up the others",
           _BASE.but(steps=20, seed=128), where="3", event=_stuck),
    fault("hang", "rank 0 silent", "hangs", "one rank holds up the others",
           _BASE.but(steps=30, ranks=2, seed=129), where="0", event=_silent),
    fault("not finite operator", "an operator on rank 1, and then the loss", "non_finite_operator",
           "the operator's inputs are finite, and its result is not", _BASE.but(steps=24, seed=130),
           where="1", event=_operator,
           scalars=both(
               with_scalar("pg_loss", lambda step, v: np.nan if step >= 20 else v),
               with_scalar("grad_norm", lambda step, v: np.nan if step >= 20 else v),
           )),
    fault("not finite operator", "an operator, found alone", "non_finite_operator",
           "the operator's inputs are finite, and its result is not",
           _BASE.but(steps=22, ranks=2, seed=131), where="1", event=_operator),
    fault("copies differ", "replicas differ on rank 1", "copies_differ",
           "the same rows have other numbers", _BASE.but(seed=132), where="1", event=_copies),
    fault("copies differ", "rows differ on one of two ranks", "copies_differ",
           "the same rows have other numbers", _BASE.but(ranks=2, steps=28, seed=134), where="1",
           event=_copies),
    fault("log-probs stop", "rank 2 records none from 8", "streams_stopped", _STOPPED,
           _BASE.but(steps=24, seed=140), where="actor rank 2", change=when(_unrecorded, 8, [2])),
    fault("log-probs stop", "ranks 4 and 6 of 8 record none from 29", "streams_stopped", _STOPPED,
           _BASE.but(ranks=8, has_ids=False, seed=141), where="actor ranks 4, 6",
           change=when(_unrecorded, 29, [4, 6])),
    fault("log-probs stop", "rank 0 of 2 records none since a restart", "streams_stopped",
           _STOPPED, _BASE.but(ranks=2, restarts=(Restart(12, 13),), seed=142),
           where="actor rank 0", change=when(_unrecorded, 18, [0])),
)  # fmt: skip

LATER: Final = (
    fault("log-probs stop", "no rank records any from 20", "streams_stopped", _STOPPED,
           _BASE.but(steps=26, seed=143), where="actor ranks 0-3", change=when(_unrecorded, 20)),
    fault("two faults", "engine at 0.7 from the begin, and late on rank 0", "streams_shifted", TWO,
           _BASE.but(seed=118), where="0", second=frozenset({"sampling_differs"}),
           change=when(delayed(1), 12, [0]), sample=sampled(by(temperature(0.7)))),
)  # fmt: skip
"""Faults that came after every third one was held out."""
