"""Shards compared as tasks of a Ray cluster: the same answer as in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support.dump_files import nexrl_directory

from stagescope import nonfinite
from stagescope_service.compare.comparison import compare
from stagescope_service.compare.mappers import threads
from stagescope_service.compare.report import as_json
from stagescope_service.dumps.discover import open_dump

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
        for mapper in (ray_tasks(address), threads(2))
    ]  # fmt: skip
    assert len(told) == 2 * told[-1][1]
    for answer in answers:
        del answer["seconds"]
    assert nonfinite.dumps(answers[0]) == nonfinite.dumps(answers[1])
    first = answers[0]["pairs"][0]["first"]
    assert (first["name"], first["location"]["a"]["place"]["rank"]) == ("log_probs", 1)
    damaged = [f for f in answers[0]["pairs"][0]["findings"] if f["kind"] == "damaged"]
    assert [finding["items"] for finding in damaged] == [[str(broken)]]
