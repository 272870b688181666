"""Wrong weights of which the difference grows slowly, on what a real vLLM scored and on numbers.

`canary_on_vllm.npz` has log-probs of fixed tokens in thousandths of a nat, version by token, of a
trainer and an engine in bfloat16. One tensor of `one_old_tensor` stays old from version index 4 on.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.support.scales import opened
from tests.support.stores import evidence_of
from tests.support.trainings import Rank

from stagescope_service.core.canary.records import JUMP

Scored = NDArray[np.float64]
"""Log-probs, version by token."""

SICK: Final = 12
"""The first version with a fault."""
VERSIONS: Final = 30
TOKENS: Final = 400
UPDATE: Final = 0.1
ROUNDING: Final = 0.02


def recorded(name: str) -> tuple[Scored, Scored]:
    with np.load(Path(__file__).with_name("canary_on_vllm.npz")) as stored:
        return stored[f"{name}.trainer"] / 1000.0, stored[f"{name}.engine"] / 1000.0


def moving(chance: np.random.Generator, size: float = UPDATE) -> Scored:
    """Return log-probs without rounding that move by `size` nat with each version."""
    first = -chance.exponential(4.0, TOKENS)
    return first + np.cumsum(chance.normal(0.0, size, (VERSIONS, TOKENS)), axis=0)


def rounded(chance: np.random.Generator, exact: Scored, size: float | Scored = ROUNDING) -> Scored:
    return exact + chance.normal(0.0, 1.0, exact.shape) * size


def found(trainer: Scored, *engines: Scored) -> list[tuple[int, str, str, int | None, str]]:
    """Return (version, engine, cause, the version that is served, headline) of each finding."""
    said = Rank(0, key="job", started=1000.0)
    said.hello(world_size=1)

    def say(version: int, side: str, source: str, scores: Scored) -> Any:
        row = scores[version].tolist()
        arm = {"rows": [list(range(len(row) + 1))], "log_probs": [row]}
        return said.say("canary", **{
            "policy_version": version, "step": version, "side": side, "source": source,
            "arms": {"fixed": arm}, "settings": {"dtype": "bfloat16"},
        })  # fmt: skip

    with opened() as scales:
        scales.give(*said.said)
        for version in range(len(trainer)):
            scales.give(
                say(version, "trainer", "", trainer),
                *(say(version, "engine", f"vllm-{at}", each) for at, each in enumerate(engines)),
            )
        evidence = [evidence_of(row) for row in scales.catalogue.findings() if row["kind"] == JUMP]
    return sorted(
        (each["version"], each["engine"], each["cause"], each["served_version"], each["headline"])
        for each in evidence
    )


def versions_of(findings: Sequence[tuple[Any, ...]]) -> list[int]:
    return [each[0] for each in findings]


def test_one_tensor_that_stays_old_is_found_from_its_second_version_on() -> None:
    findings = found(*recorded("one_old_tensor"))
    assert versions_of(findings) == [5, 6, 7, 8]
    assert {each[2] for each in findings} == {"engine_weights"}
    # 0.044, 0.078, 0.066, 0.074, 0.08 nat: it came at once, and does not grow.
    assert findings[-1][4] == "Engine vllm-0 does not have the trainer's weights"


@pytest.mark.parametrize("grows", [False, True])
def test_only_a_difference_that_grows_is_said_to_grow(grows: bool) -> None:
    chance = np.random.default_rng(3)
    exact = moving(chance)
    wrong = exact.copy()
    for at in range(SICK, VERSIONS):
        wrong[at] += (at - SICK + 1 if grows else 1) * chance.normal(0.0, 0.1, exact.shape[1])
    findings = found(rounded(chance, exact), rounded(chance, wrong))
    assert versions_of(findings) == list(range(SICK, VERSIONS))
    assert findings[-1][4].endswith(", and is further off with each version") is grows


@pytest.mark.parametrize("name", ["healthy_moe", "healthy_dense"])
def test_healthy_engines_are_no_finding(name: str) -> None:
    assert found(*recorded(name)) == []


@pytest.mark.parametrize("update", [0.0, 0.003, UPDATE])
def test_noise_that_grows_slowly_is_no_finding(update: float) -> None:
    chance = np.random.default_rng(1)
    exact = moving(chance, update)
    size = np.linspace(1.0, 3.0, VERSIONS)[:, None] * ROUNDING
    trainer, engine = rounded(chance, exact, size), rounded(chance, exact, size)
    assert found(trainer, engine) == []


def test_a_part_that_stays_old_does_not_become_usual() -> None:
    chance = np.random.default_rng(2)
    part, rest = moving(chance, 0.2 * UPDATE), moving(chance)
    old = part.copy()
    old[SICK:] = old[SICK - 1]
    right, wrong = rounded(chance, rest + part), rounded(chance, rest + old)
    findings = found(rounded(chance, rest + part), right, wrong)
    assert {each[1:3] for each in findings} == {("vllm-1", "engine_weights")}
    first = versions_of(findings)[0]
    assert SICK <= first < SICK + 10
    assert versions_of(findings) == [*range(first, VERSIONS)]


@pytest.mark.parametrize("update", [UPDATE, 0.3])
def test_an_engine_that_is_always_one_version_behind(update: float) -> None:
    chance = np.random.default_rng(3)
    exact = moving(chance, update)
    behind = np.concatenate([exact[:1], exact[:-1]])
    findings = found(rounded(chance, exact), rounded(chance, behind))
    assert {(each[0], each[3]) for each in findings} >= {
        (version, version - 1) for version in range(3, VERSIONS)
    }


def test_an_adapter_that_is_not_updated_any_more_is_found_before_the_difference_is_large() -> None:
    chance = np.random.default_rng(4)
    exact = moving(chance, 0.01)
    engine = rounded(chance, exact)
    engine[SICK:] = engine[SICK - 1]  # the same bits
    findings = found(rounded(chance, exact), engine)
    first = versions_of(findings)[0]
    assert SICK <= first < SICK + 8
    assert {(each[2], each[3]) for each in findings} == {("old_weights", SICK - 1)}
    assert versions_of(findings) == [*range(first, VERSIONS)]
