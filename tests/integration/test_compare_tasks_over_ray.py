"""Shards compared as tasks of a Ray cluster: the same answer as in one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support.dump_files import nexrl_directory
from tests.support.memory_dumps import MemoryDump, batch, split

from stagescope_service.compare.comparison import compare
from stagescope_service.compare.report import as_json
from stagescope_service.compare.task_runner import thread_mapper
from stagescope_service.dumps.discover import open_dump
from stagescope_service.dumps.records import DumpContents, DumpEntry
from stagescope_wire import nonfinite
from stagescope_wire.errors import ComparisonFailed

pytestmark = pytest.mark.ray


def test_ray_tasks_give_what_threads_give(address: str, tmp_path: Path) -> None:
    from stagescope_service.ray_mapper import ray_tasks

    def edit(kind: str, name: str, data: dict[str, Any]) -> None:
        if kind == "forward_data" and name.endswith("rank1_micro0"):
            data["log_probs"][2, 0] += 0.5

    nexrl_directory(tmp_path / "a", ranks=3)
    nexrl_directory(tmp_path / "b", ranks=3, edit=edit)
    broken = tmp_path / "b" / "loss" / "step_000000_rank2_micro1.pt"
    broken.write_bytes(b"no file of torch's")
    told: list[tuple[int, int]] = []
    answers = [
        as_json(
            compare(
                [open_dump(tmp_path / "a"), open_dump(tmp_path / "b")],
                mapper=mapper, progress=lambda done, known: told.append((done, known)),
            )
        )
        for mapper in (ray_tasks(address), thread_mapper(2))
    ]  # fmt: skip
    assert len(told) == 2 * told[-1][1]
    for answer in answers:
        del answer["seconds"]
    assert nonfinite.dumps(answers[0]) == nonfinite.dumps(answers[1])
    first = answers[0]["pairs"][0]["first"]
    assert (first["name"], first["location"]["a"]["place"]["rank"]) == ("log_probs", 1)
    damaged = [f for f in answers[0]["pairs"][0]["findings"] if f["kind"] == "damaged"]
    assert [finding["items"] for finding in damaged] == [[str(broken)]]


@pytest.mark.parametrize("command", ["compare", "compare-dumps"])
def test_the_command_takes_the_cluster(command: str, address: str, tmp_path: Path) -> None:
    a, b = (str(nexrl_directory(tmp_path / name, ranks=1)) for name in "ab")
    named = ("--self_hosted_dir", a, "--weaver_dir", b)
    words = (a, b) if command == "compare" else named
    program = (
        "import ray; from stagescope import cli; status = cli.main(standalone_mode=False);"
        "assert ray.is_initialized(); raise SystemExit(status)"
    )
    told = subprocess.run(
        [sys.executable, "-c", program, command, *words, "--ray"],
        env={**os.environ, "RAY_ADDRESS": address, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert told.returncode == 0, told.stderr
    assert told.stdout.startswith("\u2713 SAME")


def test_what_a_task_raises_is_the_reason(address: str) -> None:
    from stagescope_service.ray_mapper import ray_tasks

    class Raising(MemoryDump):
        def read(self, entry: DumpEntry) -> DumpContents:
            raise MemoryError("no room")

    good = split(batch())
    with pytest.raises(ComparisonFailed, match="MemoryError: no room") as failed:
        compare([good, Raising(good.records)], mapper=ray_tasks(address))
    assert type(failed.value) is ComparisonFailed
    assert "the files may be sound" in failed.value.advice
