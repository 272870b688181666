"""When a pair of arms differs: its noise, its history, its first versions, its sequences."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagescope_service.core.canary.measures import Measure, measure
from stagescope_service.core.canary.verdicts import (
    AGREES,
    DIFFERS,
    ENGINES,
    EQUAL,
    EXACT,
    FIRST,
    FIRST_VERSIONS,
    HISTORY,
    NOT_COMPARED,
    REMEMBERED,
    ROUNDING,
    Judgement,
    Past,
    Reference,
    judge,
    judge_unequal,
    rounding_of,
)
from stagescope_wire.canary import Arm

SEQUENCES, TOKENS = 8, 40
Noise = Callable[[random.Random], float]


def dense(chance: random.Random) -> float:
    """Bfloat16, as measured between vLLM and transformers: mean 0.008, max 0.032."""
    return chance.gauss(0, 0.01)


def sparse(chance: random.Random) -> float:
    """A mixture of experts: two of a hundred tokens go to another expert."""
    return chance.gauss(0, 0.01) + (chance.gauss(0, 0.24) if chance.random() < 0.02 else 0.0)


def heavy(chance: random.Random) -> float:
    """Noise whose largest values have no bound: a token may be far off by chance."""
    return chance.gauss(0, 0.02) / math.sqrt(max(chance.gammavariate(1.1, 0.9), 1e-6))


def exact(chance: random.Random) -> float:
    return 0.0


def of(differences: Sequence[Sequence[float]]) -> Measure:
    """The measure of two arms whose log-probs differ by these numbers."""
    rows = tuple(tuple(range(len(row) + 1)) for row in differences)
    zero = tuple(tuple(-2.0 for _ in row) for row in differences)
    other = tuple(tuple(-2.0 + d for d in row) for row in differences)
    # The tokens differ between the rows: rows are paired by them.
    rows = tuple((1000 + at, *row[1:]) for at, row in enumerate(rows))
    return measure(Arm(rows, other), Arm(rows, zero))


def drawn(noise: Noise, chance: random.Random, scale: float = 1.0) -> Measure:
    return of([[scale * noise(chance) for _ in range(TOKENS)] for _ in range(SEQUENCES)])


class Run:
    """Versions that are judged one after the other, as the service does."""

    def __init__(self, rounding: str = "bfloat16") -> None:
        self.rounding = rounding
        self.past: list[Past] = []
        self.first: list[Past] = []
        self.versions = 0

    def judge(self, found: Measure, noise: float | None = None) -> Judgement:
        against = Reference(own=self.past, first=self.first, noise=noise, rounding=self.rounding)
        judged = judge(found, against)
        if judged.verdict == AGREES and found.mean is not None:
            means = tuple(each["mean"] for each in found.sequences)
            past = Past(found.mean, found.error, means, bool(found.not_finite))
            self.past = [*self.past, past][-REMEMBERED:]
            self.first += [past] if self.versions < FIRST_VERSIONS else []
        self.versions += 1
        return judged


@pytest.mark.parametrize("noise", [dense, sparse, heavy, exact])
def test_a_thousand_healthy_versions_never_differ(noise: Noise) -> None:
    for seed in range(5):
        chance, run = random.Random(seed), Run()
        for _ in range(200):
            # Between versions, the noise of one run varies by a third.
            found = drawn(noise, chance, chance.uniform(0.85, 1.15))
            assert run.judge(found).verdict == AGREES


@pytest.mark.parametrize(("noise", "after"), [(dense, 1), (dense, 3), (dense, 20), (sparse, 20)])
def test_a_jump_differs_after_any_number_of_versions(noise: Noise, after: int) -> None:
    chance, run = random.Random(1), Run()
    for _ in range(after):
        run.judge(drawn(noise, chance))
    judged = run.judge(drawn(noise, chance, 5.0))
    assert (judged.verdict, judged.bound_of, judged.versions) == (DIFFERS, HISTORY, after)
    assert run.judge(drawn(noise, chance)).verdict == AGREES


def test_many_versions_narrow_the_bound() -> None:
    chance, run = random.Random(2), Run()
    for _ in range(20):
        run.judge(drawn(dense, chance))
    assert run.judge(drawn(dense, chance, 1.1)).verdict == AGREES
    assert run.judge(drawn(dense, chance, 1.8)).verdict == DIFFERS


@pytest.mark.parametrize(("d", "verdict"), [(1e-7, AGREES), (1e-4, DIFFERS)])
def test_after_exact_zeros_any_jump_differs_but_the_last_bits(d: float, verdict: str) -> None:
    run = Run()
    for _ in range(3):
        run.judge(of([[0.0] * TOKENS] * SEQUENCES))
    assert run.judge(of([[d] * TOKENS] * SEQUENCES)).verdict == verdict


@pytest.mark.parametrize(
    ("dtype", "mean", "verdict"),
    [
        ("bfloat16", 0.03, AGREES), ("bfloat16", 0.3, DIFFERS),
        ("float32", 1e-6, AGREES), ("float32", 0.03, DIFFERS),
        ("float16", 0.003, AGREES), ("float16", 0.1, DIFFERS),
        ("fp8_e4m3", 0.1, AGREES), ("fp8_e4m3", 0.8, DIFFERS),
    ],
)  # fmt: skip
def test_the_first_version_is_judged_by_the_rounding_of_its_dtype(
    dtype: str, mean: float, verdict: str
) -> None:
    run = Run(rounding_of(dtype))
    judged = run.judge(of([[mean] * TOKENS] * SEQUENCES))
    assert (judged.verdict, judged.bound_of, judged.usual) == (verdict, ROUNDING, None)


def test_the_coarser_dtype_of_both_sides_counts() -> None:
    assert rounding_of("torch.float32", "bfloat16") == "bfloat16"
    assert rounding_of("float32", None) == "float32"
    assert rounding_of(None, "auto") == "bfloat16"
    assert rounding_of("bf16", "w8a8_int8") == "8 bits"


def test_slow_growth_ends_above_the_first_versions() -> None:
    chance, run = random.Random(4), Run()
    verdicts = [run.judge(drawn(dense, chance, 1.02**version)) for version in range(120)]
    first = next(at for at, each in enumerate(verdicts) if each.verdict == DIFFERS)
    assert verdicts[first].bound_of == FIRST
    assert 1.02**first == pytest.approx(4.0, rel=0.2)


def test_one_sequence_of_eight_that_differs_alone_is_named() -> None:
    chance, run = random.Random(5), Run()
    for _ in range(5):
        run.judge(drawn(sparse, chance))
    rows = [[sparse(chance) for _ in range(TOKENS)] for _ in range(SEQUENCES)]
    rows[6] = [0.12] * TOKENS
    judged = run.judge(of(rows))
    assert (judged.verdict, judged.sequences) == (DIFFERS, (6,))


def test_another_engine_instance_is_the_reference_of_a_first_version() -> None:
    found = of([[0.05] * TOKENS] * SEQUENCES)
    assert judge(found, Reference(beside=[0.03])).verdict == AGREES
    judged = judge(found, Reference(beside=[0.008, 0.009]))
    assert (judged.verdict, judged.bound_of) == (DIFFERS, ENGINES)


def test_what_the_engine_does_twice_is_never_a_difference() -> None:
    run = Run()
    for _ in range(3):
        run.judge(of([[0.001] * TOKENS] * SEQUENCES))
    found = of([[0.02] * TOKENS] * SEQUENCES)
    assert run.judge(found, noise=0.001).verdict == DIFFERS
    assert run.judge(found, noise=0.02).verdict == AGREES


def test_new_gaps_differ_and_known_ones_do_not() -> None:
    gap = of([[0.0, math.nan] * 20] * SEQUENCES)
    run = Run()
    assert run.judge(gap).verdict == AGREES
    assert run.judge(gap).verdict == AGREES
    other = Run()
    other.judge(of([[0.0] * TOKENS]))
    judged = other.judge(gap)
    assert (judged.verdict, judged.is_not_finite) == (DIFFERS, True)
    nothing = Run().judge(of([[math.nan] * TOKENS]))
    assert (nothing.verdict, nothing.is_not_finite) == (DIFFERS, True)
    assert Run().judge(of([])).verdict == NOT_COMPARED


means = st.lists(st.floats(0, 1), min_size=1, max_size=40)
rows = st.lists(st.lists(st.floats(0, 1), min_size=1, max_size=6), min_size=1, max_size=4)


@given(means, rows, st.floats(1, 100), st.randoms(use_true_random=False))
def test_a_larger_difference_is_never_less_wrong_and_the_order_of_history_never_counts(
    history: list[float], differences: list[list[float]], factor: float, chance: random.Random
) -> None:
    own = [Past(mean, mean / 10, (mean,), has_gaps=False) for mean in history]
    found = judge(of(differences), Reference(own=own))
    larger = judge(of([[factor * d for d in row] for row in differences]), Reference(own=own))
    assert set(found.sequences) <= set(larger.sequences)
    assert larger.verdict == DIFFERS or found.verdict == AGREES
    shuffled = [*own]
    chance.shuffle(shuffled)
    assert judge(of(differences), Reference(own=shuffled)) == found


PAST = Past(0.05, 0.01, (0.05,), has_gaps=False)


@pytest.mark.parametrize(
    ("d", "expected", "own", "verdict"),
    [
        (0.05, None, [], AGREES),
        (0.0, None, [], NOT_COMPARED),  # it may not have learned anything yet
        (0.0, -0.01, [], NOT_COMPARED),
        (0.0, 0.2, [], EQUAL),
        (EXACT / 10, 0.2, [], EQUAL),
        (0.0, None, [PAST], EQUAL),
        (math.nan, 0.2, [PAST], NOT_COMPARED),
    ],
)
def test_an_adapter_that_should_change_something_and_does_not(
    d: float, expected: float | None, own: list[Past], verdict: str
) -> None:
    assert judge_unequal(of([[d] * TOKENS]), expected, Reference(own=own)).verdict == verdict
