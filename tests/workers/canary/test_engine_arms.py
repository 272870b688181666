"""What an engine is asked after a sync, and what its faults change in the arms."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pytest
from tests.support.engines.table_engine import VOCABULARY, TableEngine, scores, table
from tests.support.engines.tiny_llama import tiny_tokenizer

from stagescope_wire.canary import (
    AGAIN,
    ARMS,
    BASE,
    CACHED,
    DECODED,
    DECODED_SCORED,
    FIXED,
    UNCACHED,
    Arm,
    Canary,
    Check,
)
from stagescope_workers.canary.checks import Drawn, check_sampling, sharpness
from stagescope_workers.canary.engine_arms import Question, Rows, Stop, ask
from stagescope_workers.canary.sequences import TEXT, choose

QUESTION = Question(choose(VOCABULARY, max_length=512))


def asked(engine: TableEngine, question: Question = QUESTION) -> Canary:
    found = ask(engine, question, lambda: None)
    return Canary.parse(found.wire())  # the service reads it


def difference(one: Arm, other: Arm) -> float:
    """Return the mean absolute difference of two arms with the same tokens."""
    assert one.rows == other.rows
    parts = [np.abs(np.subtract(a, b)) for a, b in zip(one.log_probs, other.log_probs, strict=True)]
    return float(np.concatenate(parts).mean())


def pairs(arms: Mapping[str, Arm]) -> dict[str, float]:
    return {
        "decode": difference(arms[DECODED], arms[DECODED_SCORED]),
        "cache": difference(arms[CACHED], arms[UNCACHED]),
        "noise": difference(arms[FIXED], arms[AGAIN]),
    }


def test_a_healthy_engine_has_every_arm_and_no_difference() -> None:
    engine = TableEngine({None: table()})
    found = asked(engine)
    assert set(found.arms) == set(ARMS) - {BASE}
    assert (found.side, found.source, found.problem) == ("engine", "table", "")
    assert pairs(found.arms) == pytest.approx({"decode": 0, "cache": 0, "noise": 0}, abs=1e-12)
    fixed = found.arms[FIXED]
    assert fixed.rows == QUESTION.sequences.rows
    for row, own in zip(fixed.rows, fixed.log_probs, strict=True):
        assert own == scores(table(), row)[-len(own) :]
        assert len(own) == min(len(row) - 1, 256)
    assert [check.name for check in found.checks] == ["temperature"]
    assert found.checks[0].ok
    assert found.settings["uncached"] == "decoded"
    short, cached = 2 * (8 + 16 + 32 + 64 + 4 * 32), 2 * 4 * (272 + 32)
    single = 2 * 5 * (8 + 16 + 32 + 64 + 4)
    expected = 2 * QUESTION.sequences.tokens + cached + 2 * short + single
    assert found.settings["tokens"] == expected


def test_a_stale_prefix_cache_shows_in_the_cached_arm_alone() -> None:
    engine = TableEngine({None: table()})
    asked(engine)
    engine.models[None] = table() + 0.05 * table(1)
    found = pairs(asked(engine).arms)
    assert found["cache"] > 0.03
    assert (found["decode"], found["noise"]) == pytest.approx((0, 0), abs=1e-12)
    engine.cached.clear()  # as a right sync does
    assert pairs(asked(engine).arms)["cache"] < 1e-12


def test_if_the_cache_changes_the_decoded_tokens_these_are_scored_by_prefill() -> None:
    engine = TableEngine({None: table()})
    asked(engine)
    engine.models[None] = table(1)
    found = asked(engine)
    assert found.settings["uncached"] == "scored"
    assert pairs(found.arms)["cache"] > 1.0


def test_an_engine_without_salts_is_compared_with_prefill_and_one_without_cache_not_at_all() -> (
    None
):
    engine = TableEngine({None: table()}, cache="unsalted")
    asked(engine)
    engine.models[None] = table() + 0.05 * table(1)
    assert pairs(asked(engine).arms)["cache"] > 0.03
    found = asked(TableEngine({None: table()}, cache="none"))
    assert set(found.arms) == {FIXED, AGAIN, DECODED, DECODED_SCORED}


@pytest.mark.parametrize("serves_base", [False, True])
def test_an_adapter_is_compared_with_the_base(serves_base: bool) -> None:
    base, own = table(), table() + 0.2 * table(1)
    engine = TableEngine({None: base, "policy": base if serves_base else own, "base": base})
    found = asked(engine, QUESTION._replace(adapter="policy", base="base"))
    assert (difference(found.arms[FIXED], found.arms[BASE]) == 0.0) == serves_base


@pytest.mark.parametrize(
    ("requested", "used", "processed", "ok"),
    [
        (1.0, None, True, True),
        (1.0, 0.7, True, False),
        (1.0, 1.1, True, False),
        (1.0, 0.5, False, False),
        (1.0, 2.0, False, False),
        (0.6, None, True, True),
        (0.6, 1.0, True, False),
        (0.6, 0.7, True, False),
        (0.6, None, False, None),
        (0.6, None, None, None),
        (1.0, None, None, None),
    ],
)
def test_the_temperature_is_the_slope_of_decoded_on_prefilled_log_probs(
    requested: float, used: float | None, processed: bool | None, ok: bool | None
) -> None:
    engine = TableEngine({None: table()}, processed=processed, decodes_at=used)
    checks = asked(engine, QUESTION._replace(temperature=requested)).checks
    assert [check.name for check in checks] == ["temperature"] * (1 if requested == 1.0 else 2)
    assert checks[-1].ok is ok
    if used is not None and processed:
        text = f"requested {requested:g}, the engine's is {used:g}: "
        assert checks[-1].text.startswith(text)


def test_raw_log_probs_show_the_temperature_by_what_is_sampled() -> None:
    engine = TableEngine({None: table()}, processed=False, decodes_at=0.5)
    [check] = asked(engine).checks
    assert (check.name, check.ok) == ("temperature", False)
    assert "it explains which 276 tokens were sampled" in check.text
    found = float(check.text.partition("about ")[2].partition(":")[0])
    assert found == pytest.approx(0.5, abs=0.1)
    engine.lists = False  # nothing else shows it
    assert asked(engine).checks[0].ok is None


@pytest.mark.parametrize("processed", [True, False])
@pytest.mark.parametrize(
    ("cut", "said"),
    [(1, "greedily, as with top_k 1"), (5, "with top_k 5"), (0.6, "with top_p 0.6")],
)
def test_tokens_that_the_engine_excludes_show_by_what_is_sampled(
    cut: float, said: str, processed: bool
) -> None:
    engine = TableEngine({None: table()}, processed=processed, keeps=cut)
    [check] = asked(engine).checks
    assert (check.name, check.ok) == ("truncation", False)
    assert check.short.startswith(f"samples {said}")


def test_a_few_tokens_of_other_experts_are_no_cut() -> None:
    prompts = Rows([(0, 1)] * 20)
    rows = TableEngine({None: table()}).decode(prompts, 8, seed=1, temperature=1.0)
    drawn = [Drawn((0, 1), *each[:2], each[1]) for each in rows]
    assert check_sampling(drawn, processed=True).ok
    noise = np.random.default_rng(1)
    for size in (0.0, 0.003):
        moved = [
            each._replace(scored=[q - noise.normal(0, size) for q in each.decoded])
            for each in drawn
        ]
        moved[3] = moved[3]._replace(scored=[q - 1.5 for q in moved[3].decoded])
        assert check_sampling(moved, processed=True).name == "temperature"


def test_what_is_sampled_fits_the_log_probs_of_a_healthy_engine() -> None:
    """z is that of a standard normal number, over many models."""
    engine = TableEngine({None: table()}, processed=False)
    found = []
    for seed in range(60):
        prompts = Rows([(seed, at) for at in range(20)])
        rows = engine.decode(prompts, 8, seed=100 * seed, temperature=1.0)
        found.append(sharpness(Drawn((0,), *each[:2], each[1], each[2]) for each in rows))
    assert abs(np.mean(found)) < 0.5
    assert 0.7 < np.std(found) < 1.3


def test_a_certain_model_decides_no_temperature() -> None:
    certain = np.full((VOCABULARY, VOCABULARY), -50.0)
    certain[:, 3] = 50.0
    check = asked(TableEngine({None: certain})).checks[0]
    assert check.ok is None


@pytest.mark.parametrize(
    ("change", "ok", "text"),
    [
        (lambda own: own, True, "both sides have the same"),
        (lambda own: own[1:], False, "the engine lacks 0 in front, with which"),
        (lambda own: (7, *own[1:]), False, "the first token is 7 in the engine and 0 in the"),
        (lambda own: (0, *own), False, "the engine has 0 in front of the trainer's tokens"),
        (lambda own: own[:5], False, "5 tokens in the engine and"),
    ],
)
def test_the_tokens_of_a_text_are_those_of_the_trainer(change: object, ok: bool, text: str) -> None:
    tokenizer = tiny_tokenizer()
    engine = TableEngine({None: table()})
    engine.tokens = change(tuple(tokenizer(TEXT)["input_ids"]))  # type: ignore[operator]
    found: list[Check] = [
        each
        for each in asked(engine, QUESTION._replace(tokenizer=tokenizer)).checks
        if each.name == "tokenizer"
    ]
    assert [each.ok for each in found] == [ok]
    assert text in found[0].text


def test_what_was_scored_before_a_failure_or_the_deadline_is_kept() -> None:
    engine = TableEngine({None: table()}, cache="none")

    def fail() -> None:
        if engine.settings.setdefault("calls", 0) == 2:
            raise ConnectionResetError("it went away")
        engine.settings["calls"] += 1

    engine.before_call = fail
    found = asked(engine)
    assert found.problem == "the engine failed: ConnectionResetError('it went away')"
    assert set(found.arms) == {FIXED, AGAIN}
    late = ask(TableEngine({None: table()}), QUESTION, lambda: Stop("late", is_stale=False))
    assert (late.problem, late.arms) == ("late", {})


def test_weights_that_change_meanwhile_leave_no_arm() -> None:
    engine = TableEngine({None: table()})
    calls: list[int] = []
    engine.before_call = lambda: calls.append(1)
    found = ask(
        engine, QUESTION, lambda: Stop("the next sync began", is_stale=True) if calls else None
    )
    assert (found.arms, found.checks, len(calls)) == ({}, (), 1)


def test_a_sequence_that_the_engine_cannot_hold_is_left_out_and_named() -> None:
    found = asked(TableEngine({None: table()}, max_length=512))
    assert [len(row) for row in found.arms[FIXED].rows] == [8, 16, 32, 272, 272, 64]
    assert found.settings["left_out"] == "sequences of 512 tokens: the engine has 512"


def test_minus_infinity_and_unknown_stay_what_they_are() -> None:
    impossible = table()
    impossible[:, 5] = -math.inf
    found = asked(TableEngine({None: impossible}))
    values = [value for row in found.arms[FIXED].log_probs for value in row]
    assert -math.inf in values
    assert not any(map(math.isnan, values))
