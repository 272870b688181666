"""With which earlier dumps an order compares, by stage, part and rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from tests.support.stores import url_of, write

from stagescope_service.coordinator.captures import with_baseline
from stagescope_service.store.catalogue import Catalogue
from stagescope_service.store.contract import Put
from stagescope_service.store.sql import SqlStore
from stagescope_wire.captures import validate_capture
from stagescope_wire.errors import Conflict, Forbidden, InvalidPlan
from stagescope_wire.plan import CaptureSpec

ORDER: dict[str, object] = {"stages": ["actor_update"], "steps": [9], "task": "tensor"}
BENCH = {"capture_id": "c1", "step": 5}


@pytest.fixture
def catalogue(tmp_path: Path) -> Iterator[Catalogue]:
    store = SqlStore(url_of(tmp_path))
    store.open()
    write(
        store,
        *(dump(tmp_path, rank, part) for rank in (0, 1) for part in (0, 1)),
        dump(tmp_path, 2, 0, again="again_1/"),
        dump(tmp_path, 3, 0, state="truncated"),
        capture("c1", {"task": "tensor", "tensor": {"summary_mode": "md5"}}),
        capture("c2", {"task": "statistics"}),
    )
    found = Catalogue(url_of(tmp_path))
    yield found
    found.close()
    store.close()


def capture(capture_id: str, config: Mapping[str, object]) -> Put:
    return Put("captures", {"capture_id": capture_id, "spec": {"config": config}})


def dump(root: Path, rank: int, part: int, again: str = "", **said: object) -> Put:
    place = f"r/a/step_5/actor_update/{f'0.0.{part}.0/' if part else ''}{again}step0/rank{rank}"
    row = {
        "incarnation": f"i{rank}", "work_key": f"5||actor_update|0.0.{part}.0", "capture_id": "c1",
        "attempt_id": 1, "step": 5, "stage": "actor_update", "role": "actor", "rank": rank,
        "occurrence": 0, "epoch": 0, "minibatch": part, "microbatch": 0, "state": "complete",
        "task": "tensor", "path": str(root / place), **said,
    }  # fmt: skip
    return Put("dumps", row)


def ordered(tmp_path: Path, **fields: object) -> CaptureSpec:
    return validate_capture({**ORDER, **fields}, allowed_roots=[str(tmp_path)])


def test_each_rank_and_part_finds_its_own(catalogue: Catalogue, tmp_path: Path) -> None:
    found = with_baseline(catalogue, ordered(tmp_path, bench=BENCH), [tmp_path])
    base = tmp_path / "r/a/step_5/actor_update"
    place = {"stage": "actor_update", "role": "actor"}
    assert found["bench"] == {
        **BENCH,
        "dumps": [
            {**place, "part": "0.0.0.0", "path": str(base), "ranks": [0, 1]},
            {**place, "part": "0.0.1.0", "path": str(base / "0.0.1.0"), "ranks": [0, 1]},
            {**place, "part": "0.0.0.0", "path": str(base / "again_1"), "ranks": [2]},
        ],
    }
    plain = ordered(tmp_path)
    assert with_baseline(catalogue, plain, [tmp_path]) == plain


def test_what_is_not_there_or_lies_elsewhere(catalogue: Catalogue, tmp_path: Path) -> None:
    for bench, said in (
        ({"capture_id": "c1", "step": 6}, "no dump in step 6"),
        ({"capture_id": "c2", "step": 5}, "no checksums"),
        ({"capture_id": "local", "step": 5}, "no dump in step 5"),
    ):
        with pytest.raises(Conflict, match=said):
            with_baseline(catalogue, ordered(tmp_path, bench=bench), [tmp_path])
    with pytest.raises(Forbidden):
        with_baseline(catalogue, ordered(tmp_path, bench=BENCH), [tmp_path / "elsewhere"])


@pytest.mark.parametrize(
    "fields",
    [
        {"bench": "c1"},
        {"bench": {"capture_id": "c1"}},
        {"bench": {"capture_id": "c1", "step": "5"}},
        {"bench": {**BENCH, "rank": 0}},
        {"bench": BENCH, "task": "statistics"},
        {"bench": BENCH, "task": None, "config_path": "/config.json"},
    ],
)
def test_an_order_that_cannot_have_a_bench(tmp_path: Path, fields: Mapping[str, object]) -> None:
    with pytest.raises((InvalidPlan, Forbidden)):
        ordered(tmp_path, **fields)
    config = {"task": "tensor", "tensor": {"bench_path": str(tmp_path)}}
    with pytest.raises(InvalidPlan, match="both bench"):
        validate_capture(
            {"stages": "all", "steps": [1], "config": config, "bench": BENCH},
            allowed_roots=[str(tmp_path)],
        )
