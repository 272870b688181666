"""Directories that msprobe wrote by itself, with statistics alone, taken in as a run."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.support.api import Service, service
from tests.support.command_line import invoke
from tests.support.dumps import capture
from tests.support.small_decoder import small_decoder

import stagescope
from stagescope_service.commands.importing import import_dump
from stagescope_service.dumps.discover import open_dump

FILES = ("dump.json", "stack.json", "construct.json")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 3 and 5 of two ranks, as msprobe's default task writes them; rank 1 has a NaN in 5."""
    made, root = tmp_path_factory.mktemp("made"), tmp_path_factory.mktemp("msprobe")
    broken = small_decoder()
    with torch.no_grad():
        broken.get_parameter("blocks.1.down.weight")[3, 5] = float("nan")
    plain, nan = capture(made / "plain", small_decoder()), capture(made / "nan", broken)
    for step in (3, 5):
        for rank in range(2):
            source = nan if (step, rank) == (5, 1) else plain
            target = root / f"step{step}" / f"rank{rank}"
            target.mkdir(parents=True)
            for name in FILES:
                shutil.copy(source / name, target / name)
    return root


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with service(tmp_path_factory.mktemp("home")) as found:
        yield found


@pytest.fixture(scope="module")
def session(running: Service) -> Iterator[stagescope.Session]:
    assert running.tokens is not None
    with stagescope.attach(running.server.url, token=running.tokens.operate) as found:
        yield found


def test_statistics_of_operators_become_a_run(session: stagescope.Session, directory: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in sorted(directory.rglob("*"))}
    report = import_dump(session, open_dump(directory), "dumped")
    assert (report["operators"], report["problems"], report["refused"]) == (4, [], [])
    step = session.step(5, run="dumped")
    table = step.operators(rank=0)
    assert len(table) > 10
    assert {each["rank"] for each in step.operators(limit=1).about["tables"]} == {0, 1}
    earliest = step.non_finite().about["earliest"]
    assert (earliest["rank"], earliest["operator"]) == (1, "linear")
    assert earliest["parent"] == "Module.blocks.1.down.Linear.forward.0"
    apart = session.divergence(
        {"run": "dumped", "step": 5, "rank": 0}, {"run": "dumped", "step": 5, "rank": 1}
    )
    assert apart["first"] is not None
    same = session.divergence(
        {"run": "dumped", "step": 3, "rank": 0}, {"run": "dumped", "step": 5, "rank": 0}
    )
    assert same["first"] is None
    # Nothing is written beside what was handed over.
    assert {path: path.stat().st_mtime_ns for path in sorted(directory.rglob("*"))} == before


def test_the_command_line_reports_the_import(
    running: Service, directory: Path, tmp_path: Path
) -> None:
    assert running.tokens is not None
    process = tmp_path / "step0" / "proc4711"
    shutil.copytree(directory / "step3" / "rank0", process)
    env = {"STAGESCOPE_URL": running.server.url, "STAGESCOPE_TOKEN": running.tokens.operate}
    result = invoke("import", str(tmp_path), "--run", "alone", env=env)
    assert result.exit_code == 0, result.output
    assert "the operators of 1 dump of 1 process" in " ".join(result.stdout.split())
    assert len(running.get("/steps/0/operators", run="alone", limit=1)["tables"]) == 1


def test_a_dump_that_cannot_be_read_is_named(
    session: stagescope.Session, directory: Path, tmp_path: Path
) -> None:
    for rank in range(2):
        shutil.copytree(directory / "step3" / "rank0", tmp_path / "step1" / f"rank{rank}")
    (tmp_path / "step1" / "rank1" / "dump.json").write_text("no dump")
    report = import_dump(session, open_dump(tmp_path), "damaged")
    assert report["operators"] == 1
    (refused,) = report["refused"]
    assert "rank1" in refused["reason"]
