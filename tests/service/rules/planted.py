"""Trainings with planted faults, and the diagnosis of a service that followed them."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from tests.support.api import Rank, Service
from tests.support.command_line import invoke
from tests.support.stores import write

from stagescope_service.core.findings import finding
from stagescope_service.store.contract import Put

STAGE: Final = "actor_compute_log_prob"


ROWS, ROUNDS, TOKENS = 4, 3, 32


class Turn(NamedTuple):
    """A row that holds one turn: token ids."""

    prompt: list[int]
    response: list[int]
    number: int


@dataclasses.dataclass
class Batch:
    """One rank's rows of one step before they are handed over; p and q are [rows, tokens]."""

    step: int
    rank: int
    q: npt.NDArray[np.float64]
    p: npt.NDArray[np.float64]
    rounds: npt.NDArray[np.int64]
    """The round of each token, -1 between rounds."""
    random: np.random.Generator
    dtype: str = "float32"
    rollout_dtype: str = "float32"
    engine: str | Sequence[str] | None = None
    """Of all rows, or of each."""
    groups: int = 2
    """Samples of one group."""
    rewards: object = None
    versions: npt.NDArray[np.int64] | None = None
    recomputed: npt.NDArray[np.float64] | None = None
    is_weights: npt.NDArray[np.float64] | None = None
    turns: Sequence[Turn] = ()
    """Of each row; rows of one trajectory have one group."""
    has_ids: bool = True
    has_streams: bool = True
    """Whether both streams are recorded."""
    extra: dict[str, object] = dataclasses.field(default_factory=dict)
    """Further tensors, as they go over the wire."""

    def add(self, size: float, where: Any = True) -> None:
        """Add a mismatch of mean |d| `size`, that keeps E[p/q] = 1, where `where` is true."""
        d = self.random.normal(0.0, size * 1.2533, self.p.shape)
        self.p = np.where(where, self.p + d - d.var() / 2, self.p)


Change = Callable[[Batch], None]


Scalars = Callable[[int], dict[str, float]]


def train(
    live: Service,
    run: str,
    change: Change = lambda batch: None,
    *,
    steps: range = range(1, 25),
    key: str = "a1",
    start: float = 1_000.0,
    ranks: int = 4,
    scalars: Scalars | None = None,
    seconds: Callable[[int, int], float] = lambda step, rank: 1.0,
    settings: Mapping[str, object] | None = None,
    seed: int = 0,
    keep: Sequence[str] = (),
    syncs: bool = False,
) -> None:
    """Report a training of healthy numbers, changed by `change`, `scalars` and `seconds`; with
    `syncs` it reports its weight syncs, too."""
    live.engine.keep(*keep)
    processes = [
        Rank(live, run=run, rank=rank, key=key, world_size=ranks, start=start,
             settings=settings or {})
        for rank in range(ranks)
    ]  # fmt: skip
    for step in steps:
        reports = []
        for rank in processes:
            number = rank.sender.rank
            assert number is not None
            batch = make_batch(step, number, seed)
            change(batch)
            payload = wire(batch, run)
            logged = (scalars or healthy_scalars)(step)
            report = rank.draft_stage(
                STAGE, step, payload, seconds=seconds(step, number), scalars=logged,
                **({"policy_version": step} if batch.versions is not None else {}),
            )  # fmt: skip
            reports.append(report)
        live.engine.take_together(reports)
        for rank in processes if syncs else ():
            rank.stage("weight_sync", step)
    for rank in processes:
        rank.begin(STAGE, steps.stop)
    live.engine.keep()


def make_batch(step: int, rank: int, seed: int) -> Batch:
    random = np.random.default_rng([seed, step, rank])
    width = ROUNDS * TOKENS + ROUNDS - 1
    rounds = np.full((ROWS, width), -1)
    for number in range(ROUNDS):
        begin = number * (TOKENS + 1)
        rounds[:, begin : begin + TOKENS] = number
    q = -1.0 - random.exponential(1.0, (ROWS, width))
    batch = Batch(step, rank, q, q.copy(), rounds, random)
    batch.add(0.01)
    batch.p = np.minimum(batch.p, -1e-6)
    batch.rewards = random.integers(0, 2, ROWS).astype(float)
    batch.rewards[0], batch.rewards[1] = 0.0, 1.0  # no group is of one reward alone
    batch.rewards[2], batch.rewards[3] = 1.0, 0.0
    return batch


def wire(batch: Batch, run: str) -> dict[str, Any]:
    rows = len(batch.q)
    tensors: dict[str, object] = {
        "rollout_log_probs": _stream(batch.q, batch.rollout_dtype),
        "old_log_probs": _stream(batch.p, batch.dtype),
        "response_mask": ("int64", batch.q.shape, (batch.rounds >= 0).astype(np.int64), None),
        "rewards": ("float64", (rows,), np.asarray(batch.rewards, np.float64), None),
        **batch.extra,
    }
    if batch.versions is not None:
        versions = np.asarray(batch.versions, np.int64)
        tensors["versions"] = ("int64", versions.shape, versions, None)
    if batch.recomputed is not None:
        tensors["recomputed_log_probs"] = _stream(batch.recomputed)
    if batch.is_weights is not None:
        tensors["rollout_is_weights"] = _stream(batch.is_weights)
    if not batch.has_streams:
        del tensors["rollout_log_probs"], tensors["old_log_probs"]
    strings: dict[str, list[str]] = {}
    if batch.has_ids:
        strings["sample_ids"] = [f"{run}-{batch.step}-{batch.rank}-{row}" for row in range(rows)]
        strings["group_ids"] = [
            f"{batch.step}-{batch.rank}-{row // batch.groups}" for row in range(rows)
        ]
    if batch.engine is not None:
        every = [batch.engine] * rows if isinstance(batch.engine, str) else [*batch.engine]
        strings["engine_ids"] = every
    if batch.turns:
        tensors |= turn_tensors(batch)
        strings["run_ids"] = ["0"] * rows
    return {"schema": 1, "tensors": tensors, "strings": strings, "meta": {}}


def _stream(values: npt.NDArray[np.float64], dtype: str = "float32") -> tuple[object, ...]:
    single = values.astype(np.float32)
    if dtype == "bfloat16":
        bits = ((single.view(np.uint32) + 0x8000) >> 16).astype(np.uint16)
        return ("bfloat16", values.shape, bits, None)
    return ("float32", values.shape, single, None)


def turn_tensors(batch: Batch) -> dict[str, object]:
    """Prompts as rows of their own lengths; responses and turns as wide as the mask."""
    lengths = [len(turn.prompt) for turn in batch.turns]
    prompts = np.array([token for turn in batch.turns for token in turn.prompt], np.int64)
    responses = np.zeros(batch.q.shape, np.int64)
    for row, turn in enumerate(batch.turns):
        responses[row, : len(turn.response)] = turn.response
    numbers = np.array([[turn.number] for turn in batch.turns])
    turn_ids = np.where(batch.rounds >= 0, numbers, -1).astype(np.int64)
    return {
        "prompts": ("int64", prompts.shape, prompts, np.cumsum([0, *lengths]).astype(np.int64)),
        "responses": ("int64", responses.shape, responses, None),
        "turn_ids": ("int64", turn_ids.shape, turn_ids, None),
    }


def healthy_scalars(step: int) -> dict[str, float]:
    random = np.random.default_rng(step)
    return {
        "reward": 0.02 * step + random.normal(0.0, 0.02),
        "entropy": 1.0 - 0.01 * step + random.normal(0.0, 0.01),
        "grad_norm": float(np.exp(random.normal(0.0, 0.3))),
        "kl_loss": 0.01,
        "clip_fraction": 0.02,
        "response_length/clip_ratio": 0.01,
    }


def and_scalars(**changed: Callable[[int], float]) -> Scalars:
    return lambda step: {
        **healthy_scalars(step), **{name: value(step) for name, value in changed.items()}
    }  # fmt: skip


def rows_of(live: Service, run: str, **params: object) -> dict[str, dict[str, Any]]:
    answer = live.get(f"/runs/{run}/diagnosis", **params)
    return {row["rule"]: row for row in answer["rows"]}


def diagnosed(
    live: Service, run: str, change: Change = lambda batch: None, **arguments: Any
) -> dict[str, dict[str, Any]]:
    """Train, and return the rows of the diagnosis."""
    train(live, run, change, **arguments)
    return rows_of(live, run)


def report(live: Service, run: str, kind: str, text: str = "so", **fields: Any) -> None:
    """Let the service find something in step 5 of a run's newest attempt."""
    attempt_id = live.catalogue.attempts(run)[0]["attempt_id"]
    place: Any = {"run": run, "attempt_id": attempt_id, "step": 5, "wall": 1.0}
    write(live.store, finding(kind, text, **{**place, **fields}))


def put_operators(live: Service, run: str, step: int, **fields: Any) -> None:
    """Let a capture of a run's newest attempt record operators in a step."""
    attempt_id = live.catalogue.attempts(run)[0]["attempt_id"]
    key = {"incarnation": "i", "work_key": f"{run}-{step}", "capture_id": f"{run}-{step}"}
    place: Any = {"attempt_id": attempt_id, "step": step, "certain": True}
    write(live.store, Put("operators", {**key, **place, **fields}))


def shown_by(live: Service, *command: str) -> str:
    """Return what a command prints."""
    assert live.tokens is not None
    environment = {"STAGESCOPE_URL": live.server.url, "STAGESCOPE_TOKEN": live.tokens.read}
    done = invoke(*command, env=environment)
    assert done.exit_code == 0
    return done.stdout


def proved_by(live: Service, row: Mapping[str, Any]) -> str:
    """Return what the first thing to do of a symptom prints: the experiment that proves it."""
    return shown_by(live, *shlex.split(row["next"][0], comments=True)[1:])


def found_in(rows: Mapping[str, dict[str, object]]) -> set[str]:
    return {name for name, row in rows.items() if row["verdict"] == "found"}


# --- planted faults ---------------------------------------------------------------------------
def grow(batch: Batch) -> None:
    batch.add(0.004 * batch.step)


def after_first(batch: Batch) -> None:
    if batch.step > 1:
        batch.add(0.1)


def late_rounds(batch: Batch) -> None:
    batch.add(0.06, batch.rounds == 2)
    batch.add(0.02, batch.rounds == 1)


def middle_round(batch: Batch) -> None:
    batch.add(0.1, batch.rounds == 1)


def rank_two(batch: Batch) -> None:
    if batch.rank == 2 and batch.step >= 10:
        batch.add(0.1)


def since(step: int, change: Change) -> Change:
    """Return a change that begins in a step."""
    return lambda batch: change(batch) if batch.step >= step else None


def shift(batch: Batch) -> None:
    batch.p = np.roll(batch.p, 1, axis=1)


def other_rows(batch: Batch) -> None:
    batch.p = np.where(batch.rounds >= 0, batch.p[::-1], batch.p)


def cut_vocabulary(batch: Batch) -> None:
    batch.q = np.minimum(batch.q + 0.1, -1e-6)


def bfloat16(batch: Batch) -> None:
    batch.p = batch.q + batch.random.normal(0.0, 1e-4, batch.q.shape)
    batch.dtype = "bfloat16"


def first_tokens(batch: Batch) -> None:
    batch.add(0.1, np.arange(batch.p.shape[1]) % (TOKENS + 1) == 0)


def last_tokens(batch: Batch) -> None:
    """One side scores the stop token otherwise."""
    last = np.arange(batch.p.shape[1]) % (TOKENS + 1) == TOKENS - 1
    batch.p = np.where(last, batch.p - 0.6, batch.p)


def last_tokens_of_shorter_rounds(batch: Batch) -> None:
    """The same, in rounds that are the shorter the later they come."""
    for number in range(ROUNDS):
        begin = number * (TOKENS + 1)
        length = TOKENS >> number
        batch.rounds[:, begin + length : begin + TOKENS] = -1
        batch.p[:, begin + length - 1] -= 3.0


def copied(batch: Batch) -> None:
    batch.p = batch.q.copy()


def less_likely_first_tokens(batch: Batch) -> None:
    """All first tokens are off to one side, as after a prompt that is tokenised otherwise."""
    first = np.arange(batch.p.shape[1]) % (TOKENS + 1) == 0
    batch.p = np.where(first, batch.p - 0.6, batch.p)


def one_replica(batch: Batch) -> None:
    batch.engine = f"replica {batch.rank % 2}"
    if batch.rank % 2 and batch.step > 4:
        batch.add(0.1)


def rounded_logits(batch: Batch) -> None:
    """Log-probs of bfloat16's precision, handed over in float32."""
    batch.add(0.02)
    for name in ("p", "q"):
        bits = getattr(batch, name).astype(np.float32).view(np.uint32) + 0x8000
        setattr(batch, name, (bits & 0xFFFF0000).view(np.float32).astype(np.float64))


def tails(batch: Batch) -> None:
    batch.q[:, 5], batch.p[:, 5] = -9.0, -15.5


def old_versions(batch: Batch) -> None:
    batch.versions = np.where(np.arange(ROWS)[:, None] < 2, batch.step, batch.step - 2)
    batch.versions = np.broadcast_to(batch.versions, batch.q.shape).copy()
    batch.add(0.1, batch.versions < batch.step)


def warmer(batch: Batch, slope: float = 1.07) -> None:
    """An engine of another temperature in an asynchronous training: no token is fresh."""
    batch.versions = np.full(batch.q.shape, batch.step - 1)
    d = (slope - 1.0) * batch.q
    batch.p = batch.q + d - np.log(np.exp(d[batch.rounds >= 0]).mean())
    batch.add(0.002)


def sharpened(batch: Batch) -> None:
    """The same slope, since each update sharpens the policy: it adds up."""
    batch.q = batch.q * 1.07**batch.step
    warmer(batch)


def versions_ahead(batch: Batch) -> None:
    """One row of each rank is of a version that the trainer does not have yet."""
    batch.versions = np.full(batch.q.shape, batch.step)
    batch.versions[-1] += 1


def noisy_trainer(batch: Batch) -> None:
    batch.recomputed = batch.p + batch.random.normal(0.0, 0.0125, batch.p.shape)


def not_finite(batch: Batch) -> None:
    if batch.step == 12 and batch.rank == 1:
        batch.p[0, 3] = np.nan


def never_finite(batch: Batch) -> None:
    if batch.rank == 1:
        batch.p[0, 3] = np.nan


def equal_rewards(batch: Batch) -> None:
    batch.rewards = np.repeat(batch.random.integers(0, 2, ROWS // 2), 2).astype(float)


def all_wrong(batch: Batch) -> None:
    batch.rewards = np.zeros(ROWS)
    if batch.step % 5 == 0 and batch.rank == 0:
        batch.rewards[0] = 1.0


def all_right(batch: Batch) -> None:
    batch.rewards = np.ones(ROWS)
    if batch.step % 5 == 0 and batch.rank == 0:
        batch.rewards[0] = 0.0


def single(batch: Batch) -> None:
    batch.groups = 1


def play_turns(batch: Batch) -> None:
    """Two trajectories of two turns: the second prompt is all of the first turn and a tool's."""
    width = batch.q.shape[1]
    rows = []
    for _ in range(len(batch.q) // 2):
        prompt, first, second, tool = (
            batch.random.integers(5, 1000, size).tolist() for size in (20, width, width, 7)
        )
        rows += [Turn(prompt, first, 0), Turn([*prompt, *first, *tool], second, 1)]
    batch.turns = rows


RETOKENISED_AT: Final = 41
"""20 tokens of the prompt and 21 of the response are the same."""


def retokenise(batch: Batch) -> None:
    """Another split of the same text: two tokens of the first response become one."""
    play_turns(batch)
    turn = batch.turns[1]
    prompt = [*turn.prompt[:RETOKENISED_AT], 4, *turn.prompt[RETOKENISED_AT + 2 :]]
    batch.turns = [batch.turns[0], turn._replace(prompt=prompt), *batch.turns[2:]]
