"""From canary events to verdicts in the catalogue: late, twice, in any order, after a restart."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator, Mapping, Sequence

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tests.support.scales import Scales, check_any_order, check_restart, opened
from tests.support.stores import evidence_of
from tests.support.trainings import Delivery, Rank

from stagescope_service.coordinator.canary import FAILED, KEPT_VERSIONS, CanaryJudge
from stagescope_service.core.canary.records import JUMP
from stagescope_service.core.instructions import JudgeCanary
from stagescope_service.store.contract import Write
from stagescope_service.store.tables import CanaryVerdictRow
from stagescope_wire.errors import InvalidEvent

ROWS = [[100 * sequence + at for at in range(24)] for sequence in range(3)]
TRAINER, DECODE, CACHE = "trainer vs engine", "decode vs prefill", "cached vs uncached"
Scored = Sequence[Sequence[float]]

usual = settings(max_examples=10, phases=[Phase.explicit, Phase.reuse, Phase.generate])


@pytest.fixture
def scales() -> Iterator[Scales]:
    with opened() as made:
        yield made


@functools.cache
def model(version: int) -> Scored:
    """The log-probs of a version's weights: each update moves them by about 0.1 nat."""
    chance = random.Random(1)
    first = [[-chance.expovariate(0.5) for _ in range(20)] for _ in ROWS]
    for each in range(version):
        step = random.Random(1000 + each)
        first = [[at + step.gauss(0, 0.1) for at in row] for row in first]
    return first


def noisy(scores: Scored, seed: object, noise: float = 0.01) -> Scored:
    chance = random.Random(repr(seed))
    return [[at + chance.gauss(0, noise) for at in row] for row in scores]


def arm(scores: Scored) -> Mapping[str, object]:
    return {"rows": ROWS, "log_probs": scores}


def trainer(key: str = "job-1") -> Rank:
    made = Rank(0, key=key, started=1000.0)
    made.hello(world_size=1)
    return made


def rollout(rank: int = 0, key: str = "job-1") -> Rank:
    made = Rank(rank, "rollout", key=key, started=1100.0 + rank)
    made.hello(world_size=1)
    return made


def trained(
    rank: Rank,
    version: int,
    scores: Scored | None = None,
    step: int | None = None,
    fields: Mapping[str, object] = {},
) -> Delivery:
    arms = {"fixed": arm(model(version) if scores is None else scores)}
    return rank.say("canary", **{
        "policy_version": version, "step": version + 1 if step is None else step,
        "side": "trainer", "source": "", "arms": arms, "settings": {"dtype": "bfloat16"}, **fields,
    })  # fmt: skip


def served(
    rank: Rank, version: int, scores: Scored | None = None, *, source: str = "vllm-0",
    arms: Mapping[str, Scored] = {}, fields: Mapping[str, object] = {},
) -> Delivery:  # fmt: skip
    fixed = noisy(model(version), (source, version)) if scores is None else scores
    every = {name: arm(each) for name, each in {"fixed": fixed, "again": fixed, **arms}.items()}
    return rank.say("canary", **{
        "policy_version": version, "step": None, "side": "engine", "source": source,
        "arms": every, "settings": {"dtype": "bfloat16"}, "seconds": 0.2, **fields,
    })  # fmt: skip


def pairs(scales: Scales, version: int, source: str = "vllm-0") -> dict[str, CanaryVerdictRow]:
    rows = scales.catalogue.canary_verdicts(1, [version])
    return {row["pair"]: row for row in rows if row["source"] == source}


def causes(scales: Scales) -> list[tuple[object, object, object]]:
    found = [evidence_of(row) for row in scales.catalogue.findings() if row["kind"] == JUMP]
    return sorted((each["version"], each["engine"], each["cause"]) for each in found)


def healthy(actor: Rank, engine: Rank, versions: int) -> list[Delivery]:
    return [
        each
        for version in range(versions)
        for each in (trained(actor, version), served(engine, version))
    ]


def test_healthy_versions_agree_and_are_no_finding(scales: Scales) -> None:
    actor, engine = trainer(), rollout()
    scales.give(*actor.said, *engine.said, *healthy(actor, engine, 6))
    found = pairs(scales, 5)[TRAINER]
    assert (found["verdict"], found["tokens"], found["step"]) == ("agrees", 60, 6)
    assert found["mean"] == pytest.approx(0.008, rel=0.5)
    assert (found["bound_of"], found["compared_with"]) == ("earlier versions", 5)
    assert pairs(scales, 5)[DECODE]["verdict"] == "not compared"
    assert scales.findings() == {}


def test_weights_of_an_earlier_version_are_found_within_one_sync(scales: Scales) -> None:
    actor, engine = trainer(), rollout()
    scales.give(*actor.said, *engine.said, *healthy(actor, engine, 6))
    scales.give(trained(actor, 6), served(engine, 6, noisy(model(3), "stale")))
    [found] = scales.catalogue.findings()
    evidence = evidence_of(found)
    assert (evidence["cause"], evidence["served_version"]) == ("old_weights", 3)
    assert (found["step"], found["stage"], found["role"]) == (7, "weight_sync", None)
    assert "the log-probs of version 3" in found["message"]
    scales.give(trained(actor, 7), served(engine, 7, noisy(model(0), "base")))
    assert causes(scales) == [(6, "vllm-0", "old_weights"), (7, "vllm-0", "base_weights")]
    # Neither is what the next one is compared with.
    scales.give(trained(actor, 8), served(engine, 8))
    assert pairs(scales, 8)[TRAINER]["verdict"] == "agrees"
    assert len(causes(scales)) == 2


def test_wrong_weights_that_stay_have_one_cause_in_every_version(scales: Scales) -> None:
    actor, engine = trainer(), rollout()
    scales.give(*actor.said, *engine.said, *healthy(actor, engine, 36))
    base, unknown = noisy(model(0), ("vllm-0", 0)), noisy(model(99), "never a version")
    for version in (36, 37):
        scales.give(trained(actor, version), served(engine, version, base))
    for version in (38, 39):
        scales.give(trained(actor, version), served(engine, version, unknown))
    assert [cause for _, _, cause in causes(scales)] == [
        "base_weights", "base_weights", "engine_weights", "engine_weights",
    ]  # fmt: skip


def test_a_sync_that_changed_nothing_is_seen_before_the_difference_is_large(
    scales: Scales,
) -> None:
    actor, engine = trainer(), rollout()
    scales.give(*actor.said, *engine.said)
    small = [noisy(model(0), each, 0.02) for each in range(2)]
    scales.give(trained(actor, 0, small[0]), served(engine, 0, model(0)))
    scales.give(trained(actor, 1, small[1]), served(engine, 1, model(0)))
    scales.give(trained(actor, 2, noisy(model(0), 3, 0.09)), served(engine, 2, model(0)))
    assert causes(scales)[-1] == (2, "vllm-0", "base_weights")


def test_where_the_trainer_stands_still_a_small_change_of_the_engine_is_seen(
    scales: Scales,
) -> None:
    """As one expert of many, scaled by 1.05, in bfloat16: far below twice the rounding."""
    actor, engine = trainer(), rollout()
    scales.give(*actor.said, *engine.said)
    same = noisy(model(0), "rounded")
    for version in range(2):
        scales.give(trained(actor, version, model(0)), served(engine, version, same))
    near = noisy(same, "batches", 0.002)
    scales.give(trained(actor, 2, model(0)), served(engine, 2, near))
    assert pairs(scales, 2)["engine vs before"]["verdict"] == "agrees"
    assert scales.findings() == {}
    scales.give(trained(actor, 3, model(0)), served(engine, 3, noisy(same, "expert")))
    assert causes(scales) == [(3, "vllm-0", "engine_weights")]
    found = pairs(scales, 3)
    assert (found[TRAINER]["verdict"], found["engine vs before"]["verdict"]) == (
        "agrees", "differs",
    )  # fmt: skip
    scales.give(trained(actor, 4), served(engine, 4))  # the trainer moves on
    assert "engine vs before" not in pairs(scales, 4)


def test_a_small_difference_that_stays_is_seen_though_the_trainer_moves_on(
    scales: Scales,
) -> None:
    """As one expert of many, scaled by 1.05, in bfloat16: no larger than twice the rounding."""
    actor, engine = trainer(), rollout()
    scales.give(*actor.said, *engine.said)
    for version in range(5):
        right = noisy(model(version), version, 0.018 if version % 2 else 0.01)
        scales.give(trained(actor, version), served(engine, version, right))
    for version in (5, 6, 7):
        # Each version has noise of its own; the difference of the weights stays.
        wrong = noisy(model(version), version, 0.008)
        shift = random.Random(7)
        wrong = [[at + shift.gauss(0, 0.014) for at in row] for row in wrong]
        scales.give(trained(actor, version), served(engine, version, wrong))
    assert causes(scales) == [(each, "vllm-0", "engine_weights") for each in (6, 7)]
    found = pairs(scales, 6)
    assert found[TRAINER]["verdict"] == "agrees"
    assert (found["difference vs before"]["slope"] or 0.0) > 0.4
    scales.give(trained(actor, 8), served(engine, 8))
    assert pairs(scales, 8)["difference vs before"]["verdict"] == "agrees"


def test_one_engine_of_three_is_named_without_a_trainer(scales: Scales) -> None:
    actor, engines = trainer(), [rollout(rank) for rank in range(3)]
    scales.give(*actor.said, *(each for rank in engines for each in rank.said))
    for rank, engine in enumerate(engines):
        scores = noisy(model(9 if rank == 1 else 2), rank)
        scales.give(served(engine, 2, scores, source=f"vllm-{rank}"))
    assert causes(scales) == [(2, "vllm-1", "engine_weights")]
    assert pairs(scales, 2, "vllm-1")["engine vs engines"]["verdict"] == "differs"
    assert pairs(scales, 2, "vllm-1")[TRAINER]["verdict"] == "not compared"


def test_the_pattern_of_the_pairs_names_the_cause(scales: Scales) -> None:
    actor, engine = trainer(), rollout()
    decoded = noisy(model(0), "decoded")
    equal = {"decoded": decoded, "decoded_scored": decoded, "cached": decoded, "uncached": decoded}
    scales.give(*actor.said, *engine.said)
    for version in range(3):
        scales.give(trained(actor, version), served(engine, version, arms=equal))
    hot = [[at / 0.7 for at in row] for row in decoded]
    scales.give(trained(actor, 3), served(engine, 3, arms={**equal, "decoded": hot}))
    other = noisy(decoded, "top_k", 0.3)
    scales.give(trained(actor, 4), served(engine, 4, arms={**equal, "decoded": other}))
    scales.give(trained(actor, 5), served(engine, 5, arms={**equal, "cached": other}))
    noise = {"again": noisy(model(6), "race", 0.5)}
    scales.give(trained(actor, 6), served(engine, 6, arms={**equal, **noise}))
    checks = [["tokenizer", False, "BOS 1 against 2"], ["temperature", None, ""]]
    scales.give(trained(actor, 7), served(engine, 7, fields={"checks": checks}))
    gap = [[float("nan")] * 20] * 3
    scales.give(trained(actor, 8), served(engine, 8, gap))
    assert causes(scales) == [
        (3, "vllm-0", "sampling_temperature"), (4, "vllm-0", "decode_differs"),
        (5, "vllm-0", "prefix_cache_stale"), (6, "vllm-0", "engine_unstable"),
        (7, "vllm-0", "tokenizers_differ"), (8, "vllm-0", "not_finite"),
    ]  # fmt: skip
    [hot_one] = [
        evidence_of(row) for row in scales.catalogue.findings()
        if evidence_of(row)["version"] == 3
    ]  # fmt: skip
    assert hot_one["temperature"] == pytest.approx(0.7, rel=0.01)
    assert pairs(scales, 7)[TRAINER]["causes"] == ["tokenizers_differ"]
    assert pairs(scales, 7)[TRAINER]["verdict"] == "agrees"
    assert pairs(scales, 8)[TRAINER]["mean"] is None
    assert pairs(scales, 8)[TRAINER]["not_finite"] == 60


@pytest.mark.parametrize(
    ("name", "cause"),
    [("temperature", "sampling_temperature"), ("truncation", "sampling_truncated")],
)
def test_what_a_check_says_of_the_sampler_explains_decoded_log_probs(
    scales: Scales, name: str, cause: str
) -> None:
    actor, engine = trainer(), rollout()
    decoded = noisy(model(0), "decoded")
    arms = {"decoded": noisy(decoded, "cut", 0.3), "decoded_scored": decoded}
    short = "samples with top_p 0.9, which was not requested"
    checks = [[name, False, "requested no cut, the engine's is as with top_p 0.9", short]]
    scales.give(*actor.said, *engine.said, trained(actor, 0))
    scales.give(served(engine, 0, arms=arms, fields={"checks": checks}))
    assert causes(scales) == [(0, "vllm-0", cause)]
    [found] = scales.catalogue.findings()
    assert evidence_of(found)["headline"] == f"Engine vllm-0 {short}"
    assert pairs(scales, 0)[DECODE]["cause"] == cause


def test_an_adapter_that_changes_nothing_explains_the_trainers_difference(scales: Scales) -> None:
    actor, engine = trainer(), rollout()
    scales.give(*actor.said, *engine.said)
    base = model(0)
    scales.give(trained(actor, 0, noisy(base, "t")), served(engine, 0, base, arms={"base": base}))
    assert causes(scales) == []  # it has not learned anything yet
    for version in (1, 2):
        scales.give(trained(actor, version), served(engine, version, arms={"base": base}))
    assert causes(scales) == []
    scales.give(trained(actor, 3), served(engine, 3, base, arms={"base": base}))
    assert causes(scales) == [(3, "vllm-0", "adapter_not_applied")]
    assert pairs(scales, 3)["adapter vs base"]["verdict"] == "equal"
    assert pairs(scales, 3)[TRAINER]["cause"] == "adapter_not_applied"


def test_the_trainer_may_say_what_its_adapter_does(scales: Scales) -> None:
    actor, engine = trainer(), rollout()
    scales.give(*actor.said, *engine.said)
    base, zero = model(0), {"adapter_is_zero": True}
    near = noisy(base, "t", 0.001)
    scales.give(
        trained(actor, 0, near, fields={"settings": zero}),
        served(engine, 0, base, arms={"base": base}),
        trained(actor, 1, near, fields={"settings": {"adapter_is_zero": False}}),
        served(engine, 1, base, arms={"base": base}),
    )  # fmt: skip
    assert causes(scales) == [(1, "vllm-0", "adapter_not_applied")]


def test_a_late_record_withdraws_the_finding(scales: Scales) -> None:
    actor, engine = trainer(), rollout()
    scales.give(*actor.said, *engine.said, *healthy(actor, engine, 4))
    scales.give(trained(actor, 4), served(engine, 4, noisy(model(2), "stale")))
    assert causes(scales) == [(4, "vllm-0", "old_weights")]
    scales.give(served(engine, 4))  # scored once more after the sync had ended
    assert scales.findings() == {}
    assert pairs(scales, 4)[TRAINER]["verdict"] == "agrees"
    assert pairs(scales, 4)[TRAINER]["records"] == 3


def test_an_engine_that_could_not_be_asked_is_a_warning_until_it_answers(scales: Scales) -> None:
    actor, engine = trainer(), rollout()
    scales.give(*actor.said, *engine.said, trained(actor, 0))
    scales.give(served(engine, 0, fields={"problem": "no answer in 30 s", "arms": {}}))
    [found] = scales.catalogue.findings()
    assert (found["kind"], found["severity"]) == (FAILED, "warning")
    assert "no answer in 30 s" in found["message"]
    scales.give(served(engine, 0), trained(actor, 0, fields={"problem": "out of memory"}))
    assert "the trainer did not score all" in scales.findings()[FAILED]
    scales.give(trained(actor, 0))
    assert scales.findings() == {}


def test_the_attempt_before_a_restart_is_history(scales: Scales) -> None:
    actor, engine = trainer(), rollout()
    scales.give(*actor.said, *engine.said, *healthy(actor, engine, 5))
    actor, engine = trainer("job-2"), rollout(key="job-2")
    scales.give(*actor.said, *engine.said, trained(actor, 4), served(engine, 4))
    [row] = [row for row in scales.catalogue.canary_verdicts(2, [4]) if row["pair"] == TRAINER]
    assert (row["verdict"], row["compared_with"]) == ("agrees", 5)


@pytest.mark.parametrize(
    "fields",
    [
        {"policy_version": None}, {"side": "rollout"}, {"arms": None}, {"source": 5},
        {"arms": {"fixed": {"rows": [[1]], "log_probs": [[-1.0, -2.0]]}}},
        {"arms": {"fixed": {"rows": [[float("nan")]], "log_probs": [[-1.0]]}}},
        {"arms": {"fixed": {"rows": [[1]], "log_probs": [[10**400]]}}},
        {"arms": {"fixed": {"rows": [[10**5000]], "log_probs": [[-1.0]]}}},
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_refused_alone(scales: Scales, fields: Mapping[str, object]) -> None:
    actor = trainer()
    with pytest.raises(InvalidEvent):
        scales.give(trained(actor, 0, fields=fields))
    assert scales.catalogue.runs() == []
    scales.give(trained(actor, 0))
    assert pairs(scales, 0, "")[TRAINER]["verdict"] == "not compared"


def test_records_of_old_versions_are_removed_and_their_verdicts_stay(scales: Scales) -> None:
    actor, engine = trainer(), rollout()
    scales.give(*actor.said, *engine.said)
    for version in range(KEPT_VERSIONS + 3):
        scales.give(served(engine, version, model(0)))
    kept = [each.version for each in scales.catalogue.scored_versions("r")]
    assert kept == [0, *range(3, KEPT_VERSIONS + 3)]
    assert pairs(scales, 1)["engine twice"]["verdict"] == "agrees"


def said_by(chance: random.Random) -> list[Delivery]:
    """Five versions of a trainer and two engines, something wrong here and there."""
    actor, engines = trainer(), [rollout(rank) for rank in range(2)]
    said = [each for rank in (actor, *engines) for each in rank.said]
    for version in range(5):
        said.append(trained(actor, version))
        for rank, engine in enumerate(engines):
            source = f"vllm-{rank}"
            scores = noisy(model(version), (rank, version))
            if chance.random() < 0.3:
                scores = noisy(model(chance.randrange(5)), chance.random())
            problem = "no answer" if chance.random() < 0.2 else ""
            said.append(served(engine, version, scores, source=source, fields={"problem": problem}))
            if chance.random() < 0.2:
                said.append(served(engine, version, source=source))
    return said


@usual
@given(st.randoms(use_true_random=False))
def test_the_verdicts_are_the_same_for_any_order_and_repetition(chance: random.Random) -> None:
    check_any_order(said_by(chance), 3, chance)


@usual
@given(st.randoms(use_true_random=False), st.integers(0, 20))
def test_a_coordinator_that_died_before_it_judged_is_caught_up_with(
    chance: random.Random, where: int
) -> None:
    check_restart(
        said_by(chance),
        where,
        lambda catalogue, write: CanaryJudge(catalogue, write).catch_up(),
        lambda catalogue: all(each.judged for each in catalogue.scored_versions("r")),
    )


def test_a_canary_that_cannot_be_judged_is_said(scales: Scales) -> None:
    actor = trainer()
    scales.give(*actor.said, trained(actor, 0), compare=False)

    async def write(rows: Sequence[Write]) -> None:
        scales.write(rows)

    judge = CanaryJudge(scales.catalogue, write)
    message, fields = judge.failed(JudgeCanary("r"), "a broken record", 3)
    assert message == "the canary of r could not be judged (3 tries): a broken record"
    assert fields["run"] == "r"
