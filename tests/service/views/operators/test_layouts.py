"""Two dumps of other parallel layouts: four gloo ranks (tp 2, dp 2) against one, by msprobe."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.tensor
from tests.support.api import Rank, Service, service
from tests.support.command_line import invoke
from tests.support.dumps import dumped
from tests.support.page import visiting
from tests.support.parallel_decoder import DTENSORS, FAULTS, FAULTY_RANK

import stagescope
from stagescope.operators import Divergence
from stagescope_service.commands.importing import import_dump
from stagescope_service.dumps.discover import open_dump
from stagescope_wire.errors import InvalidInput

if TYPE_CHECKING:
    from playwright.sync_api import Browser

TP, DP = 2, 2
# msprobe knows the public DTensor alone, which torch has since 2.5.
HAS_DTENSORS = hasattr(torch.distributed.tensor, "DTensor")
SCENARIOS = [*FAULTS, *([DTENSORS] if HAS_DTENSORS else [])]
STEPS = {name: step for step, name in enumerate(SCENARIOS, 1)}
FAULTY = {"side": "a", "rank": FAULTY_RANK, "coordinates": {"dp": 1, "tp": 1}}


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("layouts")
    command = [sys.executable, "-m", "tests.support.parallel_decoder"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}

    def start(rank: int, tp: int, dp: int, out: str, scenarios: list[str]) -> subprocess.Popen[Any]:
        return subprocess.Popen(
            [*command, str(rank), str(tp), str(dp), str(root / "store"), str(root / out),
             *scenarios],
            stdout=subprocess.DEVNULL, env=environment,
        )  # fmt: skip

    processes = [start(rank, TP, DP, "four", SCENARIOS) for rank in range(TP * DP)]
    processes.append(
        start(0, 1, 1, "one", [name for name in SCENARIOS if name in ("healthy", DTENSORS)])
    )
    try:
        assert [process.wait(240) for process in processes] == [0] * 5
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return root


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, dumps: Path) -> Iterator[Service]:
    """Run `four` reports its layout, run `silent` reports none, run `one` has one rank."""
    with service(tmp_path_factory.mktemp("home")) as found:
        one = Rank(found, run="one", world_size=1)
        for name, step in STEPS.items():
            folder = DTENSORS if name == DTENSORS else "healthy"
            dumped(found, one, dumps / "one" / folder / "rank0", step, part="one")
        for run in ("four", "silent"):
            for rank in range(TP * DP):
                layout = {"dp_rank": rank // TP, "dp_size": DP, "tp_rank": rank % TP, "tp_size": TP}
                reported = layout if run == "four" else {}
                reporting = Rank(found, run=run, rank=rank, world_size=TP * DP, layout=reported)
                for name, step in STEPS.items():
                    dumped(found, reporting, dumps / "four" / name / f"rank{rank}", step, part=run)
        yield found


@pytest.fixture(scope="module")
def session(running: Service) -> Iterator[stagescope.Session]:
    with running.session("read") as found:
        yield found


def against_one(session: stagescope.Session, name: str, **fields: Any) -> Divergence:
    side = {"run": "four", "step": STEPS[name], "ranks": "all", **fields}
    return session.divergence(side, {"run": "one"})


def test_healthy_layouts_are_the_same(session: stagescope.Session) -> None:
    found = against_one(session, "healthy")
    assert found.same, found["first"]
    assert found["layouts"] == ["dp 2, tp 2", None]
    assert found["a"]["ranks"] == [0, 1, 2, 3]
    assert (found["compared"] > 250, found["only_b_count"]) == (True, 0)
    assert all("Distributed" in row["name"] or "Tensor" in row["name"] for row in found["only_a"])
    # Column-parallel, row-parallel, its partial sums, heads, the loss and the gradients.
    ways = found["joined"]
    assert {
        "dimension 0 over dp, dimension 2 over tp",
        "dimension 0 over dp, sum over tp",
        "dimension 0 over dp, dimension 1 over tp",
        "the same over dp, dimension 0 over tp",
        "the same over dp, dimension 1 over tp",
        "mean over dp, the same over tp",
        "sum over dp, dimension 0 over tp, divided by 2",
    } <= {*ways}
    assert found["gradient_scales"] == [2.0, 1.0]
    assert (found["factor"], found["unequal_parameters"]) == (8.0, [])
    # The ids that a rank looks up in its part of the vocabulary are its own.
    assert {row["name"] for row in found["unjoined"]} == {"Functional.embedding.0.forward"}


@pytest.mark.skipif(not HAS_DTENSORS, reason="this torch has no public DTensor")
def test_tensor_parallelism_of_torch_itself_is_the_same(session: stagescope.Session) -> None:
    found = against_one(session, DTENSORS)
    assert found.same, found["first"]
    assert (found["not_joined"], found["compared"] > 30) == (0, True)
    assert "dimension 0 over dp, sum over tp" in found["joined"]


@pytest.mark.parametrize(
    ("name", "operator", "evidence"),
    [
        ("weight", "Functional.linear.6.forward", "replicas"),
        ("kernel", "Module.blocks.0.up.ColumnLinear.forward.0", "values"),
        ("partial", "Functional.linear.7.forward", "replicas"),
    ],
)
def test_a_fault_in_one_shard_is_named(
    session: stagescope.Session, name: str, operator: str, evidence: str
) -> None:
    found = against_one(session, name)
    first = found["first"]
    assert first["a"]["name"] == operator
    (shard,) = first["shards"]
    assert {field: shard[field] for field in FAULTY} == FAULTY
    assert shard["evidence"] == evidence
    unequal = {row["name"] for row in found["unequal_parameters"]}
    assert (operator in unequal) == (evidence == "replicas")


def test_the_sides_may_change_places(session: stagescope.Session) -> None:
    step = STEPS["kernel"]
    found = session.divergence(
        {"run": "one", "step": step, "rank": 0}, {"run": "four", "ranks": "all"}
    )
    (shard,) = found["first"]["shards"]
    assert (shard["side"], shard["rank"]) == ("b", FAULTY_RANK)


def test_the_command_names_operator_and_shard(running: Service) -> None:
    side = f"run=silent,step={STEPS['kernel']},ranks=all,layout=dp2tp2"
    result = invoke("divergence", side, "run=one", env=running.environment())
    told = " ".join(result.stdout.split())
    assert "a: run silent, attempt 1, step 3, actor_update actor, 4 ranks (dp 2, tp 2)" in told
    assert "Module.blocks.0.up.ColumnLinear.forward.0" in told
    assert "in rank 3 of a (dp 1, tp 1), which holds the elements that differ (relative" in told
    assert "put together: dimension 0 over dp, dimension 2 over tp" in told
    assert "not put together, and not compared:" in told


def test_a_layout_that_is_not_known_is_asked_for(session: stagescope.Session) -> None:
    with pytest.raises(InvalidInput, match="reported no layout"):
        against_one(session, "healthy", run="silent")
    with pytest.raises(InvalidInput, match="is of 8 ranks, and 4 are compared"):
        against_one(session, "healthy", layout="dp4tp2")


def test_without_a_rank_of_the_layout_nothing_is_put_together(session: stagescope.Session) -> None:
    with pytest.raises(InvalidInput, match="no dump of tp 1"):
        session.divergence({"run": "four", "step": 1, "ranks": "0"}, {"run": "one"})


def test_directories_of_statistics_compare_too(running: Service, dumps: Path) -> None:
    """An import copies msprobe's statistics alone; they name the replica that differs."""
    with running.session("operate") as session:
        for name, run in (("four/weight", "imported"), ("one/healthy", "imported-one")):
            assert import_dump(session, open_dump(dumps / name), run)["problems"] == []
        found = session.divergence(
            {"run": "imported", "step": 1, "ranks": "all", "layout": "dp2tp2"},
            {"run": "imported-one"},
        )
    assert found["first"]["a"]["name"] == "Functional.linear.6.forward"
    assert [shard["rank"] for shard in found["first"]["shards"]] == [FAULTY_RANK]


def test_the_page_compares_with_another_run(browser: Browser, running: Service) -> None:
    with visiting(browser, running) as visit:
        visit.page.wait_for_selector("#login")
        visit.log_in(running.tokens.read)
        visit.go(f"#/runs/four/steps/{STEPS['kernel']}/operators")
        visit.settle()
        visit.page.fill("#against", "one")
        visit.page.click("button:text-is('Compare')")
        visit.wait_until("document.body.innerText.includes('in rank 3 of a (dp 1, tp 1)')")
        assert "four@1:3 actor 4 ranks" in visit.page.inner_text("main")
