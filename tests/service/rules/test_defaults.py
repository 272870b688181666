"""The rules that are in force from the start, on many healthy steps and on planted faults."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt
import pytest
from tests.service.rules.test_series import facts_of
from tests.support.batches import batch_of

from stagescope_service.rules.document import Rules, defaults
from stagescope_service.rules.series import Publisher
from stagescope_service.rules.watch import RuleWatch, RunStep
from stagescope_service.statistics import PartRecord, assemble, summarise

Array = npt.NDArray[np.float64]
STEPS: Final = 1000
ROUNDS: Final = ((64, 25), (60, 10), (20, 10), (3, 6), (1, 3))
"""Samples that have a round, and its tokens: the last ones are of one to 18 tokens."""
FAULT: Final = 900


def healthy(rng: np.random.Generator) -> tuple[list[Array], list[Array]]:
    """Return d and q of the rounds of a step, [samples, tokens] each.

    |d| has a heavy tail, and grows with -q and with the round; the number of samples that reach
    the later rounds varies.
    """
    d, q = [], []
    for number, (samples, tokens) in enumerate(ROUNDS):
        shape = (max(1, int(rng.poisson(samples))), tokens)
        q.append(-0.3 * rng.exponential(1.0, shape) * (number + 1))
        d.append(0.02 * q[-1] * rng.standard_t(3, shape))
    return d, q


def fired(rules: Rules, change: Callable[[int, list[Array]], None]) -> list[tuple[str, int]]:
    """Return (rule, step) of the firings over `STEPS` steps."""
    rng = np.random.default_rng(1)
    watch = RuleWatch(rules.rules)
    for step in range(STEPS):
        d, q = healthy(rng)
        change(step, d)
        width = sum(tokens + 1 for _, tokens in ROUNDS)
        streams = np.zeros((2, max(len(each) for each in d), width))
        mask = np.zeros(streams.shape[1:], np.int64)
        begin = 0
        for of_d, of_q in zip(d, q, strict=True):
            place = (slice(0, len(of_d)), slice(begin, begin + of_d.shape[1]))
            streams[0][place], streams[1][place], mask[place] = of_q + of_d, of_q, 1
            begin += of_d.shape[1] + 1
        rounds = np.cumsum([0, *(tokens + 1 for _, tokens in ROUNDS[:-1])])
        ids = np.searchsorted(rounds, np.arange(width), side="right") - 1
        batch = batch_of(streams[0], streams[1], mask, round_ids=np.where(mask == 1, ids, -1))
        summary = assemble([PartRecord("i:1", summarise(batch), "s", "actor", 0)])
        publisher = Publisher(facts_of(summary))
        watch.evaluate(
            RunStep(1, step), {rule.name: publisher.values(rule) for rule in rules.rules}
        )
    return [(rule.name, at.step) for rule in rules.rules for at in watch.fired(rule.name)]


def worst_round() -> Rules:
    """Return the default rule alone."""
    (document,) = (
        rule.wire(secrets=True) for rule in defaults().rules if rule.name == "worst_round"
    )
    return Rules.parse({"rules": [document]})


def test_of_1000_healthy_steps_none_fires() -> None:
    """Against the bound and the median alone rounds of few tokens fire in 95 of them."""
    assert fired(worst_round(), lambda step, d: None) == []
    (rule,) = worst_round().wire()["rules"]
    loose = {**rule, "when": {">": 0.05, "median_ratio": 3}, "cooldown": 0}
    assert len(fired(Rules.parse({"rules": [loose]}), lambda step, d: None)) > 50


@pytest.mark.parametrize(("number", "size"), [(0, 0.08), (1, 0.12), (2, 0.2)])
def test_a_round_that_differs_is_found_at_once(number: int, size: float) -> None:
    def change(step: int, d: list[Array]) -> None:
        if step >= FAULT:
            rng = np.random.default_rng(step)
            d[number] += rng.normal(0.0, 1.2533 * size, d[number].shape)

    steps = [step for _, step in fired(worst_round(), change)]
    assert steps[0] == FAULT
    assert len(steps) == (STEPS - FAULT) // 10
