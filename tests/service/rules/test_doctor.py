"""The rulebook against planted faults, and against healthy runs."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.api import Rank, Service, service
from tests.support.batches import batch_of
from tests.support.command_line import invoke
from tests.support.sampler import Scores, as_is, draw, temperature, top_p
from tests.support.stores import write

import stagescope
from stagescope_service.core.findings import finding
from stagescope_service.ingest.reader import PayloadReader
from stagescope_service.rules import evidence
from stagescope_service.rules import facts as facts_module
from stagescope_service.rules.doctor import (
    FAMILIES,
    Diagnosis,
    SymptomRule,
    diagnose,
    read_symptom,
    rulebook,
)
from stagescope_service.rules.history import RunHistory, StepInForce
from stagescope_service.rules.parts import fitted_line
from stagescope_service.rules.symptoms.turns import retokenised
from stagescope_service.statistics import Comparability, examine, summarise
from stagescope_service.statistics.cell import Cell
from stagescope_service.store.ring import Ring
from stagescope_service.views import diagnosis as api_diagnosis
from stagescope_wire.batch import Batch as StepBatch
from stagescope_wire.batch import Tensor
from stagescope_wire.errors import InvalidPlan

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
    engine: str | None = None
    groups: int = 2
    """Samples of one group."""
    rewards: object = None
    versions: npt.NDArray[np.int64] | None = None
    recomputed: npt.NDArray[np.float64] | None = None
    is_weights: npt.NDArray[np.float64] | None = None
    turns: Sequence[Turn] = ()
    """Of each row; rows of one trajectory have one group."""

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


def wire(batch: Batch, run: str) -> dict[str, object]:
    q, p = batch.q.astype(np.float32), batch.p.astype(np.float32)
    tensors: dict[str, object] = {
        "rollout_log_probs": ("float32", q.shape, q, None),
        "response_mask": ("int64", q.shape, (batch.rounds >= 0).astype(np.int64), None),
        "rewards": ("float64", (ROWS,), np.asarray(batch.rewards, np.float64), None),
    }
    if batch.dtype == "bfloat16":
        bits = ((p.view(np.uint32) + 0x8000) >> 16).astype(np.uint16)
        tensors["old_log_probs"] = ("bfloat16", p.shape, bits, None)
    else:
        tensors["old_log_probs"] = ("float32", p.shape, p, None)
    if batch.versions is not None:
        versions = np.asarray(batch.versions, np.int64)
        tensors["versions"] = ("int64", versions.shape, versions, None)
    if batch.recomputed is not None:
        again = batch.recomputed.astype(np.float32)
        tensors["recomputed_log_probs"] = ("float32", again.shape, again, None)
    if batch.is_weights is not None:
        weights = batch.is_weights.astype(np.float32)
        tensors["rollout_is_weights"] = ("float32", weights.shape, weights, None)
    samples = [f"{run}-{batch.step}-{batch.rank}-{row}" for row in range(ROWS)]
    groups = [f"{batch.step}-{batch.rank}-{row // batch.groups}" for row in range(ROWS)]
    strings = {"sample_ids": samples, "group_ids": groups}
    strings |= {} if batch.engine is None else {"engine_ids": [batch.engine] * ROWS}
    if batch.turns:
        tensors |= turn_tensors(batch)
        strings["run_ids"] = ["0"] * ROWS
    return {"schema": 1, "tensors": tensors, "strings": strings, "meta": {}}


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


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with service(tmp_path_factory.mktemp("doctor") / "home", page_size=200) as running:
        data = running.settings.data_path
        ring = Ring(data / "ring" / "here", 64 << 20, reserve_bytes=0)
        running.engine.read_with(PayloadReader(data, "here", ring))
        yield running


def rows_of(live: Service, run: str, **params: object) -> dict[str, dict[str, Any]]:
    answer = live.get(f"/runs/{run}/diagnosis", **params)
    return {row["rule"]: row for row in answer["rows"]}


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
    for _ in range(ROWS // 2):
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


PLANTED: Final[dict[str, tuple[dict[str, Any], set[str]]]] = {
    "mismatch_grows": ({"change": grow, "syncs": True}, {"mismatch_jump_at_first_sync"}),
    "mismatch_jump": ({"change": since(15, lambda batch: batch.add(0.05))}, set()),
    "mismatch_jump_at_first_sync": ({"change": after_first, "syncs": True}, set()),
    "mismatch_rises_with_rounds": ({"change": late_rounds}, set()),
    "rank_apart": ({"change": rank_two}, set()),
    "streams_shifted": ({"change": shift}, {"streams_unrelated", "sampling_differs"}),
    "streams_unrelated": ({"change": other_rows}, {"sampling_differs"}),
    "sampling_differs": ({"change": cut_vocabulary}, {"streams_unrelated"}),
    "rounded_stream": ({"change": bfloat16}, set()),
    "first_token": ({"change": first_tokens}, set()),
    "last_token": ({"change": last_tokens}, set()),
    "streams_copied": ({"change": copied}, set()),
    "engine_apart": ({"change": one_replica}, set()),
    "lattice": ({"change": rounded_logits}, {"rounded_stream"}),
    "hidden_tails": ({"change": tails}, {"streams_unrelated"}),
    "staleness": ({"change": old_versions}, set()),
    "versions_impossible": ({"change": versions_ahead}, set()),
    "retokenised": ({"change": retokenise, "keep": ["trajectories"]}, set()),
    "within_noise_floor": ({"change": noisy_trainer}, set()),
    "groups_equal": ({"change": equal_rewards}, {"groups_all_wrong", "groups_all_right"}),
    "groups_all_wrong": ({"change": all_wrong}, {"groups_equal"}),
    "groups_all_right": ({"change": all_right}, {"groups_equal"}),
    "groups_of_one": ({"change": single}, set()),
    "non_finite_log_probs": ({"change": not_finite}, {"streams_unrelated"}),
    "reward_flat": (
        {"scalars": and_scalars(reward=lambda step: 0.5 + 0.02 * (-1) ** step)}, set(),
    ),
    "entropy_collapse": ({"scalars": and_scalars(entropy=lambda step: 0.8**step)}, set()),
    "kl_to_reference": ({"scalars": and_scalars(kl_loss=lambda step: 0.1 * step)}, set()),
    "clip_fraction": ({"scalars": and_scalars(clip_fraction=lambda step: 0.4)}, set()),
    "gradient_spikes": (
        {"scalars": and_scalars(grad_norm=lambda step: 80.0 if step == 17 else 1.0)}, set(),
    ),
    "non_finite_scalars": (
        {"scalars": and_scalars(loss=lambda step: float("nan") if step == 9 else 1.0)}, set(),
    ),
    "responses_truncated": (
        {"scalars": and_scalars(**{"response_length/clip_ratio": lambda step: 0.4})}, set(),
    ),
    "straggler": ({"seconds": lambda step, rank: 2.5 if rank == 3 else 1.0}, set()),
}  # fmt: skip
"""SymptomRule -> how its symptom is planted, and what else the same fault may be called."""


@pytest.mark.parametrize("rule", PLANTED)
def test_a_planted_fault_is_found(rule: str, live: Service) -> None:
    arguments, also = PLANTED[rule]
    train(live, f"sick-{rule}", **arguments)
    rows = rows_of(live, f"sick-{rule}")
    row = rows[rule]
    assert row["verdict"] == "found", row
    # A fault since some step may make the mismatch of all ranks jump there.
    assert found_in(rows) <= {rule, "mismatch_jump", "trigger_fired", *also}, {
        name: rows[name]["for"] for name in found_in(rows)
    }
    assert "trigger_fired" not in found_in(rows) or rows["trigger_fired"]["explained_by"]
    assert row["for"]
    assert row["next"]
    assert not [line for line in row["next"] if "{" in line]
    if rule == "entropy_collapse":  # the run's own name of it
        assert f"stagescope series entropy --run sick-{rule}" in row["next"]
    assert 0.0 < row["sure"] <= 1.0


def test_a_temperature_without_fresh_tokens_is_told_by_many_steps(live: Service) -> None:
    """One step does not tell it from an update; updates add up, and a temperature does not."""
    train(live, "warmer", warmer)
    row = rows_of(live, "warmer")["sampling_differs"]
    assert (row["verdict"], row["since_step"]) == ("found", 1)
    assert "Had 23 updates done that, the policy would be " in row["for"][0]
    for run, change, steps in (("sharpened", sharpened, 25), ("warmer-short", warmer, 8)):
        train(live, run, change, steps=range(1, steps))
        assert live.get("/steps/5/metrics", run=run)["comparable"] == "unknown"
        row = rows_of(live, run)["sampling_differs"]
        assert row["verdict"] == "not measured"
        assert "temperature not decided: old grows by 1.0" in row["against"][0]


def test_where_and_since_when_are_said(live: Service) -> None:
    train(live, "where-rank", rank_two)
    row = rows_of(live, "where-rank")["rank_apart"]
    assert row["where"] == "actor rank 2"
    assert row["since_step"] == 10  # also where the newest steps alone are looked at
    train(live, "where-nan", scalars=and_scalars(loss=lambda s: float("nan") if s == 9 else 1.0))
    assert rows_of(live, "where-nan")["non_finite_scalars"]["since_step"] == 9


def test_of_two_ranks_the_one_with_the_higher_mismatch_is_named(live: Service) -> None:
    def second(batch: Batch) -> None:
        if batch.rank == 1 and batch.step >= 10:
            batch.add(0.1)

    train(live, "two-ranks", second, ranks=2)
    row = rows_of(live, "two-ranks")["rank_apart"]
    assert (row["verdict"], row["where"], row["since_step"]) == ("found", "actor rank 1", 10)
    assert row["for"][0].endswith(" at the other")
    train(live, "two-healthy-ranks", ranks=2)
    assert rows_of(live, "two-healthy-ranks")["rank_apart"]["verdict"] == "not found"


@pytest.mark.parametrize(
    ("reward", "found", "other"),
    [(0.0, "groups_all_wrong", "groups_all_right"), (1.0, "groups_all_right", "groups_all_wrong")],
)
def test_a_window_of_one_reward_is_judged_by_earlier_rewards(
    reward: float, found: str, other: str, live: Service
) -> None:
    def of_one_reward(batch: Batch) -> None:
        batch.rewards = np.full(ROWS, reward)

    train(live, f"since-5-{found}", since(5, of_one_reward))
    rows = rows_of(live, f"since-5-{found}")
    assert rows[found]["verdict"] == "found"
    assert rows[found]["since_step"] == 5
    assert rows[other]["verdict"] == "not found"
    train(live, f"always-{found}", of_one_reward)
    rows = rows_of(live, f"always-{found}")
    assert rows["groups_equal"]["verdict"] == "found"
    for name in (found, other):
        assert rows[name]["verdict"] == "not measured"
        assert f"every reward is {reward:g}" in rows[name]["against"][0]


def test_a_finding_of_long_ago_is_not_said_to_last(live: Service) -> None:
    def once(batch: Batch) -> None:
        if batch.step == 9:
            batch.p[0, 3] = np.nan

    train(live, "nan-at-9", once)
    row = rows_of(live, "nan-at-9")["non_finite_log_probs"]
    assert (row["verdict"], row["since_step"]) == ("found", 9)
    assert row["last_step"] == 9
    assert row["against"] == ["last seen in step 9: 15 steps closed since"]


def test_first_tokens_off_to_one_side_are_no_other_distribution(live: Service) -> None:
    train(live, "first-down", since(8, less_likely_first_tokens))
    rows = rows_of(live, "first-down")
    assert found_in(rows) - {"mismatch_jump"} == {"first_token"}
    assert rows["first_token"]["since_step"] == 8
    assert "first tokens of rounds are 0.599 nat" in rows["sampling_differs"]["against"][0]
    answer = live.get("/steps/24/metrics", run="first-down")
    assert [each["code"] for each in answer["comparability"]] == ["first_token", "versions"]


SINCE_12: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "rank": ("rank_apart", {"change": since(12, lambda batch: rank_two(batch))}),
    "slow": ("straggler", {"seconds": lambda step, rank: 2.5 if rank == 3 and step > 11 else 1.0}),
    "bfloat16": ("rounded_stream", {"change": since(12, bfloat16)}),
    "shift": ("streams_shifted", {"change": since(12, shift)}),
    "rounds": ("mismatch_rises_with_rounds", {"change": since(12, late_rounds)}),
    "first": ("first_token", {"change": since(12, first_tokens)}),
    "all": ("mismatch_jump", {"change": since(12, lambda batch: batch.add(0.1))}),
}
"""Name -> the rule that finds what begins in step 12, and how it is planted."""


@pytest.mark.parametrize("name", SINCE_12)
def test_since_when_is_the_first_step_that_shows_it(name: str, live: Service) -> None:
    """However many steps have gone since: most rules look at the newest ones alone."""
    rule, arguments = SINCE_12[name]
    train(live, f"since-{name}", steps=range(1, 61), ranks=4, **arguments)
    for last in (24, 60):
        row = rows_of(live, f"since-{name}", step=last)[rule]
        assert (row["verdict"], row["since_step"]) == ("found", 12), last
    assert rows_of(live, f"since-{name}", step=11)[rule]["verdict"] != "found"


@pytest.mark.parametrize(("at", "steps"), [(20, 40), (38, 40), (5, 12)])
def test_a_jump_inside_an_attempt_is_no_growth(at: int, steps: int, live: Service) -> None:
    run = f"jump-{at}-{steps}"
    train(live, run, since(at, lambda batch: batch.add(0.05)), steps=range(1, steps + 1))
    rows = rows_of(live, run)
    assert rows["mismatch_jump"]["since_step"] == at
    assert rows["mismatch_grows"]["verdict"] == "not found"
    assert found_in(rows) == {"mismatch_jump"}
    do = rows["mismatch_jump"]["next"]
    assert f"stagescope ranks {at} --run {run}" in do
    # Nobody recorded weights: what to record, instead of a command that finds none.
    assert "record_weights" in do[0]
    assert not any("stagescope weights" in each for each in do)


def test_a_jump_soon_after_a_restart_is_of_the_step_in_which_it_comes(live: Service) -> None:
    train(live, "third-step", steps=range(1, 18))
    worse = since(20, lambda batch: batch.add(0.05))
    train(live, "third-step", worse, steps=range(18, 40), key="a2", start=9_000.0)
    rows = rows_of(live, "third-step")
    assert found_in(rows) == {"mismatch_jump"}
    assert (rows["mismatch_jump"]["since_step"], rows["mismatch_jump"]["where"]) == (
        20, "attempt 2",
    )  # fmt: skip


@pytest.mark.parametrize("heals", [False, True])
def test_a_jump_inside_an_earlier_attempt_is_found_as_long_as_it_lasts(
    heals: bool, live: Service
) -> None:
    """In steps that the later attempt resumed from, which are in force."""
    run = f"jump-before-{heals}"
    worse = since(12, lambda batch: batch.add(0.05))
    train(live, run, worse, steps=range(1, 25))
    after = (lambda batch: None) if heals else worse
    train(live, run, after, steps=range(23, 45), key="a2", start=9_000.0)
    row = rows_of(live, run)["mismatch_jump"]
    if heals:
        assert row["verdict"] == "not found"
        return
    assert (row["verdict"], row["since_step"], row["where"]) == ("found", 12, "attempt 1")
    assert "in the 11 steps before step 12" in row["for"][0]


def test_what_comes_after_the_step_is_not_looked_at(live: Service) -> None:
    train(
        live, "nan-from-5", steps=range(1, 13),
        scalars=and_scalars(loss=lambda step: float("nan") if step >= 5 else 1.0),
    )  # fmt: skip
    assert "non_finite_scalars" in found_in(rows_of(live, "nan-from-5", step=5))
    assert not found_in(rows_of(live, "nan-from-5", step=4))


def test_ranks_that_are_missing_lately_are_found_in_a_long_run(live: Service) -> None:
    train(live, "late-partial", steps=range(1, 41), ranks=2)
    rank = Rank(live, run="late-partial", rank=0, key="b1", world_size=2, start=50_000.0)
    for step in range(41, 45):
        rank.stage(STAGE, step)
    rank.begin(STAGE, 45)
    row = rows_of(live, "late-partial")["ranks_missing"]
    assert (row["verdict"], row["since_step"]) == ("found", 41), row


def test_retokenisation_is_looked_for_where_each_turn_is_a_row(live: Service) -> None:
    train(live, "turns-well", play_turns, keep=["trajectories"])
    well = rows_of(live, "turns-well")
    assert not found_in(well)
    # 4 ranks of 2 trajectories with one follow-up prompt each, in the newest 3 steps.
    assert well["retokenised"]["against"] == [
        "0 of 24 prompts of later turns, in 3 steps, do not begin with the turn before"
    ]
    train(live, "turns-sick", retokenise, keep=["trajectories"], steps=range(1, 4))
    sick = rows_of(live, "turns-sick")["retokenised"]
    assert sick["sure"] == 0.5  # one of two trajectories
    assert sick["where"] == f"turn 1, position {RETOKENISED_AT}"
    assert sick["since_step"] == 1
    assert f"at position {RETOKENISED_AT} (step 1, group 1-0-0, run 0): token 4" in sick["for"][1]
    # Without prompts, or in rows that hold whole trajectories, it is not measured.
    train(live, "turns-lost", play_turns, steps=range(1, 4))
    lost = rows_of(live, "turns-lost")["retokenised"]
    assert (lost["verdict"], lost["against"]) == (
        "not measured", ["no prompts and responses are kept of the newest steps"],
    )  # fmt: skip
    assert lost["record"].startswith("where each turn is a row: record prompts")

    def whole(batch: Batch) -> None:
        play_turns(batch)
        batch.turns = [turn._replace(number=0) for turn in batch.turns]

    train(live, "turns-whole", whole, steps=range(1, 4), keep=["trajectories"])
    assert rows_of(live, "turns-whole")["retokenised"]["verdict"] == "not measured"


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_of_prompts_is_no_retokenisation(side: str) -> None:
    first, answer, tool = [7, 7, 3, 9, 9], [4, 5, 6], [8, 2]
    rows = [first, [*first, *answer, *tool]]
    width = max(map(len, rows)) + 2
    prompts = np.zeros((2, width), np.int64)
    for at, row in enumerate(rows):
        prompts[at, width - len(row) if side == "left" else 0 :][: len(row)] = row
    responses = np.array([[*answer, 0], [1, 1, 1, 1]], np.int64)
    mask = np.array([[1, 1, 1, 0], [1, 1, 1, 1]], np.int64)
    turn_ids = np.where(mask == 1, [[0], [1]], -1)

    def verdict(prompts: npt.NDArray[np.generic]) -> str:
        return of_turns(prompts=prompts, responses=responses, response_mask=mask, turn_ids=turn_ids)

    assert verdict(prompts) == "not found"
    other = prompts.copy()
    other[1, 2 if side == "right" else 4] = 1
    assert verdict(other) == "found"


def test_retokenisation_is_found_in_rows_of_all_tokens() -> None:
    """Rows hold prompt and response in one tensor, as slime's and AReaL's do."""
    first, answer, tool = [7, 3, 9], [4, 5, 6], [8, 2]
    rows = [[*first, *answer, 0, 0, 0, 0], [*first, *answer, *tool, 1, 1]]
    mask = np.zeros((2, 10), np.int64)
    mask[0, 3:6] = mask[1, 8:] = 1
    turn_ids = np.where(mask == 1, [[0], [1]], -1)

    def verdict(tokens: npt.NDArray[np.generic]) -> str:
        return of_turns(tokens=tokens, loss_mask=mask, turn_ids=turn_ids)

    tokens = np.array(rows)
    assert verdict(tokens) == "not found"
    for at in (0, 5):  # in the prompt, and in what the turn before wrote
        other = tokens.copy()
        other[1, at] = 11
        assert verdict(other) == "found"
    other = tokens.copy()
    other[1, 6] = 11  # what the environment adds is of no earlier turn
    assert verdict(other) == "not found"


def of_turns(**tensors: npt.NDArray[np.generic]) -> str:
    """Return the verdict on two turns of one trajectory, a row each."""
    batch = StepBatch(
        2,
        {name: Tensor("int64", values) for name, values in tensors.items()},
        {"group_ids": ("g", "g"), "run_ids": ("0", "0")},
    )
    return retokenised(cast(RunHistory, Turns(batch))).verdict


class Turns:
    """A history of one step, whose batch is given: prompts that no `Rank` sends."""

    def __init__(self, batch: StepBatch) -> None:
        self.steps = [StepInForce(1, 1, 1, "comparable", ())]
        self.kept = self
        self._batch = batch

    def batch(self, step: StepInForce, names: Sequence[str]) -> StepBatch | None:
        return self._batch if {*names} <= {*self._batch.tensors} else None


def test_a_jump_at_a_restart_names_the_attempt(live: Service) -> None:
    train(live, "restarted", steps=range(1, 13))

    def worse(batch: Batch) -> None:
        batch.add(0.05)

    train(live, "restarted", worse, steps=range(11, 23), key="a2", start=9_000.0)
    rows = rows_of(live, "restarted")
    row = rows["mismatch_jump_at_restart"]
    assert row["verdict"] == "found"
    assert (row["since_step"], row["where"]) == (11, "attempt 2")
    assert row["next"][0] == "stagescope diff restarted@1 restarted@2"
    # Of the first attempt alone there is nothing to say.
    of_first = rows_of(live, "restarted", attempt=1)["mismatch_jump_at_restart"]
    assert of_first["verdict"] == "not measured"
    before = rows_of(live, "restarted", step=10)
    assert "mismatch_jump_at_restart" not in found_in(before)


def test_a_jump_in_the_first_step_of_an_attempt_is_not_called_absent(live: Service) -> None:
    train(live, "first-step", steps=range(1, 13))
    train(live, "first-step", steps=range(13, 14), key="a2", start=9_000.0)
    row = rows_of(live, "first-step")["mismatch_jump_at_restart"]
    assert row["verdict"] == "not measured"
    assert "too few steps" in row["against"][0]


def test_scalars_of_two_roles_are_not_averaged(live: Service) -> None:
    name = "two-roles"
    train(live, name, scalars=and_scalars(grad_norm=lambda step: 40.0 if step == 17 else 1.0))
    critic = Rank(live, run=name, role="critic", rank=0, key="a1", world_size=1, start=1_000.0)
    for step in range(1, 25):
        critic.stage("critic_update", step, scalars={"grad_norm": 0.01})
    row = rows_of(live, name)["gradient_spikes"]
    assert row["verdict"] == "found"
    assert row["for"] == ["grad_norm of actor is up to 40, 40.0 times its median before (step 17)"]


def test_a_number_is_asked_for_and_drawn_by_the_run_s_own_name(live: Service) -> None:
    def scalars(step: int) -> dict[str, float]:
        flat = 0.5 + 0.02 * (-1) ** step
        return {"critic/score/mean": flat, "actor/entropy": 0.8**step, "grad_norm": 1.0}

    train(live, "own-names", scalars=scalars)
    critic = Rank(live, run="own-names", role="critic", rank=0, key="a1", world_size=1, start=1e3)
    for step in range(1, 25):
        critic.stage("critic_update", step, scalars={"actor/entropy": 0.01})
    rows = rows_of(live, "own-names")
    figure = rows["reward_flat"]["figure"]
    assert figure == "/figures/overview?run=own-names&metric=critic/score/mean"
    assert "critic/score/mean" in str(live.get(figure))
    series = "stagescope series actor/entropy --run own-names"
    assert series in rows["entropy_collapse"]["next"]  # not of one role's label


def test_streams_that_are_equal_are_within_the_noise_floor(live: Service) -> None:
    def equal(batch: Batch) -> None:
        batch.p = batch.q.copy()
        noisy_trainer(batch)

    train(live, "equal", equal)
    row = rows_of(live, "equal")["within_noise_floor"]
    assert (row["verdict"], row["sure"]) == ("found", 1.0)


def test_missing_ranks_losses_and_hangs_are_found(live: Service) -> None:
    train(live, "partial")
    rank = Rank(live, run="partial", rank=0, key="b1", world_size=2, start=20_000.0)
    for step in range(30, 40):
        rank.stage(STAGE, step)
    rank.begin(STAGE, 40)
    rows = rows_of(live, "partial", attempt=2)
    assert rows["ranks_missing"]["verdict"] == "found"
    rank.say("dropped", stage=STAGE, step=39, what="payload", count=3, reason="no room")
    lost = rows_of(live, "partial", attempt=2)["payloads_lost"]
    assert lost["verdict"] == "found"
    died = Rank(live, run="died", world_size=1)
    died.stage(STAGE, 1)
    died.begin(STAGE, 2)
    live.engine.fall_silent(died)
    rows = rows_of(live, "died")
    # What it handed over has arrived: it is its stage that has no end.
    assert rows["payloads_lost"]["verdict"] == "not found"
    failed = rows["processes_failed"]
    assert (failed["verdict"], failed["since_step"], failed["where"]) == ("found", 2, "actor 0")
    assert failed["for"] == [
        f"{STAGE} of step 2: its process stopped reporting inside the stage (1 rank)"
    ]
    failing = Rank(live, run="failing", world_size=1)
    failing.begin(STAGE, 1)
    failing.end(STAGE, 1, status="failed", error_type="ValueError", error_message="no")
    failed = rows_of(live, "failing")["processes_failed"]
    assert failed["verdict"] == "found"
    assert "ValueError" in failed["for"][0]
    assert len(failed["for"]) == 1  # no attempt follows


@pytest.mark.parametrize("first_step", [1, 3])
def test_a_checkpoint_is_named_only_where_there_is_one(live: Service, first_step: int) -> None:
    run = f"again-{first_step}"
    crashed = Rank(live, run=run, world_size=1, key="a")
    for step in (1, 2):
        crashed.stage(STAGE, step)
    crashed.say("finish", error_type="ValueError", error_message="no")
    later = Rank(live, run=run, world_size=1, key="b", start=20_000.0)
    later.stage(STAGE, first_step)
    failed = rows_of(live, run)["processes_failed"]
    named = "attempt 2 began from the checkpoint of step 2"
    assert (named in failed["for"]) == (first_step == 3)
    assert "checkpoint" not in f"{failed['meaning']} {failed['against']}"


def test_an_interruption_is_no_crash(live: Service) -> None:
    stopped = Rank(live, run="stopped", world_size=1)
    stopped.stage(STAGE, 1)
    stopped.begin(STAGE, 2)
    stopped.begin("another_stage", 2)
    said = {"error_type": "KeyboardInterrupt", "error_message": "", "interrupted": True}
    stopped.end(STAGE, 2, status="failed", **said)
    stopped.say("finish", **said)
    [attempt] = live.catalogue.attempts("stopped")
    assert attempt["end_reason"] == "it was interrupted"
    assert rows_of(live, "stopped")["processes_failed"]["verdict"] == "not found"


def test_only_what_still_holds_up_the_newest_attempt_is_a_hang(live: Service) -> None:
    train(live, "hung", steps=range(1, 6))
    attempt_id = live.catalogue.attempts("hung")[0]["attempt_id"]
    text = "rank 1 of actor has not ended step 5"
    put = finding(
        "stage_stuck",
        text,
        run="hung",
        attempt_id=attempt_id,
        step=5,
        role="actor",
        rank=1,
        wall=1.0,
    )
    write(live.store, put)
    row = rows_of(live, "hung")["hangs"]
    assert (row["verdict"], row["since_step"], row["where"]) == ("found", 5, "actor 1")
    train(live, "hung", steps=range(6, 11), key="a2", start=9_000.0)
    row = rows_of(live, "hung")["hangs"]
    assert row["verdict"] == "not found"
    assert row["against"] == [
        f"1 rank held up others earlier, the last: {text}",
        f"attempt 1 ended with it, since step 5: {text}",
    ]
    assert rows_of(live, "hung", step=5)["hangs"]["verdict"] == "found"


def test_what_a_later_attempt_superseded_is_not_found_but_named(live: Service) -> None:
    sick = since(4, never_finite)
    nan = and_scalars(loss=lambda step: float("nan") if step >= 4 else 1.0)
    train(live, "healed", sick, steps=range(1, 7), scalars=nan)
    now = rows_of(live, "healed")
    names = ("non_finite_log_probs", "non_finite_scalars")
    assert [now[name]["verdict"] for name in names] == ["found", "found"]
    train(live, "healed", steps=range(1, 4), key="a2", start=9_000.0)
    answer = live.get("/runs/healed/diagnosis")
    rows = {row["rule"]: row for row in answer["rows"]}
    for name in names:
        assert rows[name]["verdict"] == "not found", name
        assert rows[name]["against"][-1].startswith("attempt 1 ended with it, since step 4: "), name
        assert rows[name]["title"] + " (since step 4)" in answer["text"], name
    assert "Attempt 1 ended with: " in answer["text"]
    assert "stagescope doctor healed --attempt 1" in answer["text"]
    first = rows_of(live, "healed", attempt=1)
    assert [first[name]["verdict"] for name in names] == ["found", "found"]
    assert "Attempt 1" not in live.get("/runs/healed/diagnosis", attempt=2)["text"]


def test_a_mismatch_that_an_earlier_attempt_ended_with_is_named(live: Service) -> None:
    """The question after a restart: was it there before?"""
    worse = since(20, lambda batch: batch.add(0.05))
    train(live, "was-sick", worse, steps=range(1, 30), ranks=4)
    train(live, "was-sick", steps=range(16, 19), ranks=4, key="a2", start=9_000.0)
    train(live, "was-sick", steps=range(17, 19), ranks=4, key="a3", start=19_000.0)
    answer = live.get("/runs/was-sick/diagnosis")
    rows = {row["rule"]: row for row in answer["rows"]}
    assert found_in(rows) == set()
    assert rows["mismatch_jump"]["against"][-1].startswith(
        "attempt 1 ended with it, since step 20: logprob_abs_diff/mean is "
    )
    assert answer["text"].endswith(
        f". Attempt 1 ended with: {rows['mismatch_jump']['title']} (since step 20) "
        "(stagescope doctor was-sick --attempt 1)"
    )
    # What every attempt shows is no matter of before.
    train(live, "still-sick", worse, steps=range(1, 30), ranks=4)
    train(live, "still-sick", worse, steps=range(26, 30), ranks=4, key="a2", start=9_000.0)
    answer = live.get("/runs/still-sick/diagnosis")
    assert found_in({row["rule"]: row for row in answer["rows"]}) == {"mismatch_jump"}
    assert "ended with" not in json.dumps(answer)
    answer = live.get("/runs/was-sick/diagnosis", step=18)
    assert "ended with" not in json.dumps(answer)  # attempt 1 went on
    # What is found again, in steps that were done again, says that it was there before.
    train(live, "sick-again", worse, steps=range(1, 30), ranks=4)
    later = since(18, lambda batch: batch.add(0.05))
    train(live, "sick-again", later, steps=range(13, 30), ranks=4, key="a2", start=9_000.0)
    row = rows_of(live, "sick-again")["mismatch_jump"]
    assert (row["verdict"], row["since_step"]) == ("found", 18)
    assert row["for"][-1].startswith("attempt 1 ended with it, since step 20: ")


def test_an_attempt_of_one_step_does_not_hide_where_a_jump_was(live: Service) -> None:
    worse = since(6, lambda batch: batch.add(0.05))
    train(live, "one-step", steps=range(1, 6))
    train(live, "one-step", worse, steps=range(6, 7), key="a2", start=9_000.0)
    train(live, "one-step", worse, steps=range(7, 12), key="a3", start=19_000.0)
    train(live, "two-steps", steps=range(1, 6))
    train(live, "two-steps", worse, steps=range(6, 8), key="a2", start=9_000.0)
    train(live, "two-steps", worse, steps=range(8, 14), key="a3", start=19_000.0)
    row = rows_of(live, "two-steps")["mismatch_jump_at_restart"]
    assert (row["verdict"], row["since_step"], row["where"]) == ("found", 6, "attempt 2")
    row = rows_of(live, "one-step")["mismatch_jump_at_restart"]
    assert (row["verdict"], row["since_step"], row["where"]) == ("found", 6, "attempt 2")
    assert row["next"][0] == "stagescope diff one-step@1 one-step@2"


def test_another_rank_stands_apart_since_another_step(live: Service) -> None:
    def change(batch: Batch) -> None:
        sick = 1 if 8 <= batch.step < 12 else 0 if batch.step >= 12 else None
        if batch.rank == sick:
            batch.add(0.1)

    train(live, "two-sick", change)
    row = rows_of(live, "two-sick")["rank_apart"]
    assert (row["verdict"], row["where"], row["since_step"]) == ("found", "actor rank 0", 12)


def test_a_low_first_step_alone_is_no_jump_inside_an_attempt(live: Service) -> None:
    worse = since(2, lambda batch: batch.add(0.05))
    train(live, "low-first", worse, steps=range(1, 16), syncs=True)
    rows = rows_of(live, "low-first")
    assert rows["mismatch_jump"]["verdict"] == "not found"
    assert rows["mismatch_jump_at_first_sync"]["verdict"] == "found"
    # Where no sync is reported, nothing says that one lies between: it is a jump.
    train(live, "low-no-sync", worse, steps=range(1, 16))
    rows = rows_of(live, "low-no-sync")
    assert rows["mismatch_jump"]["since_step"] == 2
    of_sync = rows["mismatch_jump_at_first_sync"]
    assert (of_sync["verdict"], of_sync["against"]) == (
        "not measured", ["attempt 1 reported no weight sync"],
    )  # fmt: skip
    assert "weight_sync" in of_sync["record"]


def test_what_the_later_attempt_resumed_from_is_found_with_its_attempt(live: Service) -> None:
    train(live, "resumed", since(4, never_finite), steps=range(1, 7))
    train(live, "resumed", steps=range(6, 9), key="a2", start=9_000.0)
    row = rows_of(live, "resumed")["non_finite_log_probs"]
    assert (row["verdict"], row["since_step"]) == ("found", 4)
    assert row["for"][0].startswith("attempt 1: ")


@pytest.mark.parametrize(
    ("kind", "rule"),
    [
        ("sample_ids_contradict", "ids_contradict"),
        ("superseded_work", "work_superseded"),
        ("rounds_fragmented", "pieces_unplaced"),
        ("tokens_unaccounted", "tokens_unaccounted"),
        ("replicas_differ", "copies_differ"),
        ("nonfinite_values", "non_finite_values"),
    ],
)
def test_a_finding_is_evidence_of_what_it_says_alone(kind: str, rule: str, live: Service) -> None:
    train(live, kind, steps=range(1, 6))
    put = finding(
        kind,
        "said so",
        run=kind,
        attempt_id=live.catalogue.attempts(kind)[0]["attempt_id"],
        step=5,
        wall=1.0,
    )
    write(live.store, put)
    rows = rows_of(live, kind)
    assert found_in(rows) == {rule}
    assert rows[rule]["for"] == ["said so"]


def test_a_killed_rank_that_did_its_step_again_does_not_contradict_its_ids(live: Service) -> None:
    for rank in range(2):  # one of two: were all new, it would be a new attempt
        Rank(live, run="again", rank=rank, world_size=2).stage(STAGE, 1)
    Rank(live, run="again", world_size=2, incarnation="second", start=2_000.0).stage(STAGE, 1)
    rows = rows_of(live, "again")
    assert "superseded_work" in {row["kind"] for row in live.get("/findings?run=again")["rows"]}
    assert rows["ids_contradict"]["verdict"] == "not found"
    assert rows["work_superseded"]["verdict"] == "found"


def test_steps_that_nobody_reported_are_found(live: Service) -> None:
    train(live, "gap", steps=range(1, 6))
    train(live, "gap", steps=range(21, 26), key="a2", start=9_000.0)
    row = rows_of(live, "gap")["steps_unreported"]
    assert (row["verdict"], row["since_step"]) == ("found", 6)
    assert row["for"] == ["no steps 6 to 20: attempt 2 begins with 21, after 5 of attempt 1"]
    train(live, "every-ten", steps=range(10, 200, 10))
    assert rows_of(live, "every-ten")["steps_unreported"]["verdict"] == "not found"


# --- false alarms -----------------------------------------------------------------------------
@pytest.mark.parametrize("seed", range(4))
def test_a_healthy_run_has_no_symptom(seed: int, live: Service) -> None:
    train(live, f"well-{seed}", steps=range(1, 51), seed=seed)
    rows = rows_of(live, f"well-{seed}")
    assert not found_in(rows), {name: rows[name]["for"] for name in found_in(rows)}
    assert live.get(f"/runs/well-{seed}/diagnosis")["unexplained"] == {}
    unknown = {name for name, row in rows.items() if row["verdict"] == "not measured"}
    assert unknown == {
        "mismatch_jump_at_restart", "mismatch_jump_at_first_sync", "staleness",
        "within_noise_floor", "verl_settings", "engine_apart", "retokenised", "current_differs",
        "turn_stops", "versions_impossible",
    }  # fmt: skip
    assert all(rows[name]["against"] for name in unknown)
    assert rows["staleness"]["record"].startswith("record versions")


def test_rounds_of_less_sure_tokens_are_no_symptom(live: Service) -> None:
    def unsure(batch: Batch) -> None:
        """The same relative noise on tokens of 4 and 16 times the surprise."""
        scale = 4.0 ** np.maximum(batch.rounds, 0)
        batch.q = 0.1 * scale * batch.q
        batch.p = batch.q * (1.0 + batch.random.normal(0.0, 0.02, batch.q.shape))

    train(live, "less-sure", unsure, steps=range(1, 13))
    row = rows_of(live, "less-sure")["mismatch_rises_with_rounds"]
    assert row["verdict"] == "not found"
    assert "rises with the round in 0 of 10 steps" in row["against"][0]
    assert "in 10 more, as their tokens grow less sure" in row["against"][0]


def test_every_rule_has_a_planted_fault_or_a_finding_behind_it() -> None:
    elsewhere = {
        "mismatch_jump_at_restart", "ranks_missing", "payloads_lost", "processes_failed",
        "steps_unreported", "hangs", "verl_settings", "current_differs", "turn_stops",
        "stream_changed",
    }  # fmt: skip
    of_findings = {rule.name for rule in rulebook() if rule.evidence.function == "finding"}
    assert {rule.name for rule in rulebook()} == {*PLANTED, *elsewhere, *of_findings}


# --- the rulebook -----------------------------------------------------------------------------
def test_the_rulebook_is_complete() -> None:
    rules = rulebook()
    assert len({rule.title for rule in rules}) == len(rules) > 30
    for rule in rules:
        assert rule.family in FAMILIES
        assert not rule.title.endswith(".")
        assert rule.meaning.endswith(".")


def test_the_page_of_the_doctor_lists_every_symptom() -> None:
    page = (Path(__file__).parents[3] / "docs" / "doctor.md").read_text("utf-8")
    rows = [line.split(" | ")[0] for line in page.splitlines() if "`) | " in line]
    assert rows == [f"| {rule.title} (`{rule.name}`)" for rule in rulebook()]
    assert f" of {len(rows)} symptoms found" in page


def test_what_to_do_next_are_commands_that_exist() -> None:
    values = {"run": "r", "step": 5, "attempt": 2, "before": 1, "previous": 4, "scalar": "entropy"}
    commands = [
        line.partition(" #")[0].format(**values)
        for rule in rulebook()
        for line in rule.next
        if line.startswith("stagescope ")
    ]
    assert len(commands) > 40
    for command in commands:
        # An unknown command, argument or option is refused before the help is printed.
        done = invoke(*shlex.split(command)[1:], "--help")
        assert done.exit_code == 0, (command, done.stderr)
        name = command.split()[1]
        assert ("--attempt" in done.stdout) == (name in api_diagnosis.OF_AN_ATTEMPT), name


def test_what_to_do_next_is_of_the_attempt_that_is_asked_for(live: Service) -> None:
    train(live, "two-attempts", rank_two)
    train(live, "two-attempts", steps=range(20, 25), key="a2", start=9_000.0)
    row = rows_of(live, "two-attempts", attempt=1)["rank_apart"]
    assert row["verdict"] == "found"
    assert f"stagescope ranks {row['since_step']} --run two-attempts --attempt 1" in row["next"]
    assert row["figure"].endswith("&attempt=1")
    assert live.get(row["figure"])
    for each in rows_of(live, "two-attempts", attempt=1).values():
        assert not [line for line in each["next"] if "{" in line]


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({"title": ""}, "title is ''"),
        ({"extra": 1}, "has no field 'extra'"),
        ({"family": "weather"}, "family is 'weather'"),
        ({"evidence": {"function": "guess"}}, "evidence is 'guess'"),
        ({"evidence": {"function": "above", "metric": "x"}}, "evidence: .*'bound'"),
        ({"evidence": {"function": "lost", "bound": 1}}, "evidence: .*'bound'"),
    ],
)
def test_a_wrong_rule_is_refused_with_its_name(change: Mapping[str, object], wrong: str) -> None:
    rule = {
        "title": "t", "family": "service", "evidence": {"function": "lost"}, "meaning": "m.",
        "next": ["n"], "sources": ["s"],
    }  # fmt: skip
    assert read_symptom("mine", json.dumps(rule)).evidence.function == "lost"
    with pytest.raises(InvalidPlan, match=f"rule mine.*{wrong}"):
        read_symptom("mine", json.dumps({**rule, **change}))


def test_a_run_without_closed_steps_is_not_measured(live: Service) -> None:
    Rank(live, run="young").begin(STAGE, 1)
    answer = live.get("/runs/young/diagnosis")
    assert answer["steps"] == 0
    assert answer["mismatch"] == []
    assert not found_in({row["rule"]: row for row in answer["rows"]})


def test_the_mismatch_is_taken_apart(live: Service) -> None:
    def both(batch: Batch) -> None:
        old_versions(batch)
        noisy_trainer(batch)

    train(live, "apart", both)
    parts = {each["name"]: each for each in live.get("/runs/apart/diagnosis")["mismatch"]}
    # Half of the tokens have a mean |d| of about 0.1, the other half of 0.01.
    assert 0.8 < parts["stale tokens"]["share"] < 0.95
    assert 0.1 < parts["noise floor"]["share"] < 0.4
    rest = parts["unexplained"]["share"]
    stale, noise = parts["stale tokens"]["share"], parts["noise floor"]["share"]
    line = parts["temperature or truncation"]["share"]
    assert 0.0 <= line < 0.02  # of fresh tokens, whose d is noise
    # The floor is held against the fresh half alone.
    floor = min(1.0, noise / (2 * (1 - stale)))
    assert rest == pytest.approx((1 - stale) * max(0.0, (1 - line) ** 0.5 - floor), abs=1e-9)
    assert "what is left without the stale tokens" in parts["unexplained"]["text"]


def parts_of(live: Service, run: str, change: Change) -> dict[str, dict[str, Any]]:
    train(live, run, change, steps=range(1, 3))
    return {each["name"]: each for each in live.get(f"/runs/{run}/diagnosis")["mismatch"]}


def sampled(engine: Scores, trainer: Scores = as_is) -> Change:
    """Tokens that a softmax sampled at the engine's and scored at the trainer's settings."""

    def change(batch: Batch) -> None:
        drawn = draw(batch.random, *batch.q.shape, model="unsure", sampled=engine, trained=trainer)
        batch.q, batch.p = (
            np.where(batch.rounds >= 0, values, 0.0) for values in (drawn.q, drawn.p)
        )

    return change


def kept_pairs(live: Service, run: str, step: int) -> tuple[Any, Any, Any]:
    """p, q and the weights of a step's model tokens, from the file of its batch."""
    assert live.tokens is not None
    with stagescope.attach(live.server.url, token=live.tokens.read) as session:
        batch = session.step(step, run=run).batch()
    on = batch["response_mask"] != 0
    weights = batch["rollout_is_weights"][on] if "rollout_is_weights" in batch else None
    return (
        batch["old_log_probs"][on].astype(float),
        batch["rollout_log_probs"][on].astype(float),
        weights,
    )


@pytest.mark.parametrize(
    ("change", "least", "most"),
    [
        # By numpy's polyfit, 20 seeds of as many tokens lie in 0.416-0.452, 0.911-0.922, 0-0.0013.
        (sampled(temperature(0.7)), 0.38, 0.49),
        (sampled(top_p(0.9)), 0.89, 0.95),
        (sampled(as_is), 0.0, 0.01),
        (cut_vocabulary, 0.95, 1.0),
    ],
    ids=["temperature 0.7", "top-p 0.9", "healthy", "shifted by 0.1 nats"],
)
def test_temperature_and_truncation_explain_a_share(
    change: Change, least: float, most: float, live: Service, request: pytest.FixtureRequest
) -> None:
    run = f"line-{request.node.callspec.id.replace(' ', '-')}"
    part = parts_of(live, run, change)["temperature or truncation"]
    p, q, _ = kept_pairs(live, run, 2)
    squares = float(((p - q) ** 2).sum())
    lines = [
        float(((y - np.polyval(np.polyfit(x, y, 1), x)) ** 2).sum()) for x, y in ((q, p), (p, q))
    ]
    plain = 1.0 - max(lines) / squares
    # What two parameters fit by chance is taken off: 2 of the tokens that d is spread over.
    spread = float(np.abs(p - q).sum()) ** 2 / squares
    assert part["share"] == pytest.approx(
        max(0.0, 1 - (1 - plain) * spread / (spread - 2)), abs=1e-6
    )
    assert least <= part["share"] <= most
    assert part["text"].startswith("share of the sum of squares of d over 1536 fresh tokens")
    assert part["counted"]


@pytest.mark.parametrize("side", ["p", "q", "both"])
@pytest.mark.parametrize("size", [0.01, 0.1, 0.5])
def test_no_line_explains_independent_noise(side: str, size: float) -> None:
    random = np.random.default_rng(7)
    true = -6.0 - random.exponential(1.0, (16, 256))
    noise = random.normal(0.0, size, (2, *true.shape))
    p, q = true + noise[0] * (side != "q"), true + noise[1] * (side != "p")
    found = fitted_line(*examined(p, q))
    # Noise of variance s on both sides flattens both lines: s / 2(v + s), where true has v = 1.
    flattened = size**2 / (2.0 * (1.0 + size**2)) if side == "both" else 0.0
    assert found.share is not None
    assert 0.0 <= found.share <= flattened + 0.01


def examined(p: npt.NDArray[np.float64], q: npt.NDArray[np.float64]) -> tuple[Cell, Comparability]:
    mask = np.ones(p.shape, np.int64)
    summary = summarise(batch_of(p.astype(np.float32), q.astype(np.float32), mask))
    return summary.fresh, examine(summary)


def test_no_line_is_drawn_through_few_tokens_or_other_tokens(live: Service) -> None:
    random = np.random.default_rng(3)
    q = -1.0 - random.exponential(1.0, (8, 8))
    assert fitted_line(*examined(q * 0.7, q)) == (None, "64 fresh tokens, 128 are needed")
    q = -1.0 - random.exponential(1.0, (16, 64))
    few = q.copy()
    few[0, :5] -= 3.0
    found = fitted_line(*examined(few, q))
    assert (found.share, found.text[:41]) == (None, "5 tokens hold most of d's sum of squares,")
    part = parts_of(live, "line-unrelated", other_rows)["temperature or truncation"]
    assert part["share"] is None
    assert part["text"].startswith("the streams are not of the same tokens (unrelated)")


def test_rejected_tokens_have_their_share_of_the_mismatch(live: Service) -> None:
    def rejecting(batch: Batch) -> None:
        batch.add(0.1, np.arange(batch.p.shape[1]) % 10 == 0)
        ratio = np.exp(batch.p - batch.q)
        batch.is_weights = np.where((ratio > 0.9) & (ratio < 1.1), ratio, 0.0)

    part = parts_of(live, "rejecting", rejecting)["rejected tokens"]
    p, q, weights = kept_pairs(live, "rejecting", 2)
    expected = np.abs(p - q)[weights == 0].sum() / np.abs(p - q).sum()
    assert 0.2 < expected < 0.9
    assert part["share"] == pytest.approx(expected, rel=1e-6)
    assert not part["counted"]
    assert "over the 1536 tokens" in part["text"]
    assert "at least, for it is not recorded whether the trainer rejected them" in part["text"]
    # Without weights and without the mask of the update nothing is known.
    unknown = parts_of(live, "not-rejecting", lambda batch: None)["rejected tokens"]
    assert unknown["share"] is None
    assert "record rollout_is_weights" in unknown["text"]
    assert "record response_mask as the update uses it" in unknown["text"]


def test_a_diagnosis_of_unchanged_steps_is_computed_once(
    live: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed = []

    def counted(history: RunHistory) -> list[Diagnosis]:
        computed.append(history.run)
        return diagnose(history)

    monkeypatch.setattr(api_diagnosis, "diagnose", counted)
    monkeypatch.setattr("stagescope_service.views.diagnosis._MAX_AGE", 1e9)
    train(live, "unchanged", steps=range(1, 4))
    first = rows_of(live, "unchanged")
    assert rows_of(live, "unchanged") == first
    live.get("/runs/unchanged/diagnosis", limit=3)
    assert computed == ["unchanged"]
    live.get("/runs/unchanged/diagnosis", step=2)
    assert len(computed) == 2
    train(live, "unchanged", rank_two, steps=range(4, 14))
    assert rows_of(live, "unchanged") != first
    assert len(computed) == 3


def test_a_diagnosis_examines_the_streams_of_a_step_once(
    live: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it looks for the step since which a fault is there."""
    examined_steps = []

    def counted(summary: Any, ranks: Any = ()) -> Comparability:
        examined_steps.append(summary)
        return examine(summary, ranks)

    monkeypatch.setattr(facts_module, "examine", counted)
    train(live, "once", cut_vocabulary, steps=range(1, 4))
    assert "sampling_differs" in found_in(rows_of(live, "once"))
    assert len(examined_steps) <= 3


def test_notebook_and_terminal_show_the_same(live: Service) -> None:
    assert live.tokens is not None
    train(live, "shown", rank_two)
    with stagescope.attach(live.server.url, token=live.tokens.read) as session:
        table = session.doctor("shown")
    assert [row["rule"] for row in table.found] == ["rank_apart", "mismatch_jump"]
    assert table.found[1]["explained_by"] == ["rank_apart"]
    assert "One rank's mismatch stands apart" in repr(table)
    assert "-> stagescope ranks" in repr(table)
    assert "<details open>" in table._repr_html_()
    environment = {"STAGESCOPE_URL": live.server.url, "STAGESCOPE_TOKEN": live.tokens.read}
    shown = invoke("doctor", "shown", env=environment)
    assert shown.exit_code == 0
    assert "actor rank 2" in " ".join(shown.stdout.split())
    lines = shown.stdout.splitlines()
    assert all(len(line) <= 80 for line in lines if not line.startswith("  -> stagescope "))
    capture = next(line for line in lines if "capture --stages" in line)
    assert "--level L0 --run" in capture  # a command is pasted as a whole
    full = invoke("doctor", "shown", "--all", env=environment)
    unknown = [row for row in table if row["verdict"] == "not measured"]
    assert len(unknown) > 5
    for row in unknown:
        assert f"  {row['rule']}: " in full.stdout
        assert f"  {row['rule']}: " not in shown.stdout
    assert f"\n{len(unknown)} not measured (doctor --all says why)\n" in shown.stdout
    (of_stages,) = (line for line in shown.stdout.splitlines() if line.startswith("  record vers"))
    assert of_stages.endswith(": 2 rules")
    assert repr(table.all()) == full.stdout.rstrip("\n")


def test_what_lacks_steps_alone_names_nothing_to_record(live: Service) -> None:
    train(live, "short", steps=range(1, 7))
    rows = rows_of(live, "short")
    assert rows["reward_flat"]["against"] == ["reward has 6 finite steps, 20 are needed"]
    assert rows["reward_flat"]["record"] is None
    assert rows["staleness"]["record"] is not None


# --- statistics of the evidence ---------------------------------------------------------------
@given(st.lists(st.integers(-5, 5), min_size=2, max_size=40))
def test_rank_correlations_are_those_of_their_definitions(values: list[int]) -> None:
    numbers = np.array(values, np.float64)
    count = len(values)
    pairs = [
        (later > earlier) - (later < earlier)
        for index, earlier in enumerate(values)
        for later in values[index + 1 :]
    ]
    assert evidence.kendall(numbers) == pytest.approx(sum(pairs) / (count * (count - 1) / 2))
    ranks = [
        sum(other < value for other in values) + (sum(other == value for other in values) + 1) / 2
        for value in values
    ]
    if len(set(values)) > 1:
        expected = np.corrcoef(ranks, np.arange(count))[0, 1]
        assert evidence.spearman(numbers) == pytest.approx(expected, abs=1e-12)


def test_a_damaged_rule_hides_no_other(live: Service, tmp_path: Path) -> None:
    train(live, "still", steps=range(1, 5))
    history = RunHistory(live.catalogue, "still")
    broken = SymptomRule.parse(
        {"name": "broken", "title": "t", "family": "service", "meaning": "m.", "next": ["n"],
         "evidence": {"function": "finding", "kinds": ["x"]}},
        "rule broken",
    )  # fmt: skip
    found = diagnose(history, [broken, *rulebook()[:3]])
    assert len(found) == 4
