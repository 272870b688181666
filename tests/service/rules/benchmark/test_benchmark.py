"""How good the doctor is, as far as a test may take; the command prints every fault."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Final

import pytest
from tests.service.rules.benchmark.faults import FAULTS, HELD_OUT
from tests.service.rules.benchmark.healthy import HEALTHY
from tests.service.rules.benchmark.measure import Figures, alarms_of, judge, measure, table
from tests.service.rules.benchmark.play import Bench

from stagescope_service.rules.doctor import rulebook

SAMPLE: Final = (
    "rank 1 late from 6", "engine at 0.7", "rank 1 of 2 lacks its adapter", "no steps 12 to 14",
)  # fmt: skip


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path / "home")


@pytest.mark.timeout(900)
def test_the_figures_are_those_of_the_documentation() -> None:
    results, alarms = measure(FAULTS, HEALTHY)
    figures = Figures.of(results)
    assert not alarms
    assert figures.first >= 0.9 * figures.faults
    assert figures.among_three >= 0.98 * figures.faults
    page = (Path(__file__).parents[4] / "docs" / "doctor-benchmark.md").read_text("utf-8")
    shown = table(results, HELD_OUT, alarms)
    assert shown in page, f"docs/doctor-benchmark.md should have:\n{shown}"


@pytest.mark.parametrize("name", SAMPLE)
def test_the_first_cause_is_right(name: str, bench: Bench) -> None:
    fault = next(each for each in FAULTS if each.name == name)
    result = judge(bench, fault, "run")
    assert result.is_first, result.named
    bench.close()


def test_a_healthy_run_has_no_cause(bench: Bench) -> None:
    healthy = next(each for each in HEALTHY if each.name == "uneven ranks")
    assert not alarms_of(bench, healthy, "run")
    bench.close()


def test_faults_are_of_many_kinds_and_name_rules() -> None:
    kinds = Counter(each.kind for each in FAULTS)
    assert len(kinds) >= 30
    assert len(FAULTS) >= 60
    assert min(kinds.values()) >= 2, kinds.most_common()[-3:]
    assert len({each.name for each in (*FAULTS, *HEALTHY)}) == len(FAULTS) + len(HEALTHY)
    rules = {rule.name for rule in rulebook()}
    assert {name for each in FAULTS for name in each.causes | each.second | each.true} <= rules
    assert all(each.why for each in FAULTS)
