"""Operators over HTTP: dumps that msprobe made, announced by ranks, requested over HTTP."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.api import Rank, Service, service
from tests.support.dumps import ExtraCall, capture, dumped
from tests.support.small_decoder import SmallDecoder, small_decoder

import stagescope
from stagescope_service.views.reading.dependencies import MAX_RUNNING, Computations
from stagescope_service.views.reading.operator_files import OperatorFiles
from stagescope_wire.errors import InvalidInput, NotReady

STAGE = "actor_update"
BOTH = {"a": {"step": 5, "stage": STAGE, "rank": 0}, "b": {"rank": 1}}


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Dumps of the same model: as it is, with a NaN, changed in a layer, with a call more."""
    root = tmp_path_factory.mktemp("dumps")
    broken, changed, extra = small_decoder(), small_decoder(), extra_call()
    with torch.no_grad():
        broken.get_parameter("blocks.1.down.weight")[3, 5] = float("nan")
        changed.get_parameter("blocks.0.up.weight").mul_(1.5)
    models = {"plain": small_decoder(), "nan": broken, "changed": changed, "extra": extra}
    return {name: capture(root / name, model, level="mix") for name, model in models.items()}


def extra_call() -> SmallDecoder:
    torch.manual_seed(0)
    return ExtraCall()


@pytest.fixture(scope="module")
def dumps_service(
    tmp_path_factory: pytest.TempPathFactory, dumps: dict[str, Path]
) -> Iterator[Service]:
    """Step 5: rank 1 has a NaN. Step 6: rank 1 was changed in a layer. Step 7: a call more."""
    with service(tmp_path_factory.mktemp("home")) as running:
        ranks = [Rank(running, rank=0), Rank(running, rank=1)]
        for step, other in ((5, "nan"), (6, "changed"), (7, "extra")):
            dumped(running, ranks[0], dumps["plain"], step)
            dumped(running, ranks[1], dumps[other], step)
        yield running


def test_the_operators_of_a_rank_in_order(dumps_service: Service) -> None:
    answer = dumps_service.get("/steps/5/operators", rank=0, limit=1000)
    assert (answer["run"], answer["attempt"], answer["step"]) == ("r", 1, 5)
    (table,) = answer["tables"]
    assert (table["state"], table["truncated"], table["done"]) == ("digested", False, True)
    assert len(answer["rows"]) == table["rows"]
    assert answer["next"] is None
    orders = [row["order"] for row in answer["rows"]]
    assert orders == sorted(orders)
    linear = next(row for row in answer["rows"] if row["name"].startswith("Functional.linear.0."))
    assert linear["dtype"] == "float32"
    assert linear["shape"] == [2, 6, 16]
    assert "small_decoder.py" in linear["source"]


def test_filters(dumps_service: Service) -> None:
    def names(**filters: object) -> list[str]:
        rows = dumps_service.get("/steps/5/operators", limit=1000, rank=1, **filters)["rows"]
        return [row["name"] for row in rows]

    assert set(names(name="*blocks.1.down*", direction="forward")) == {
        "Module.blocks.1.down.Linear.forward.0"
    }
    assert all("linear" in name for name in names(name="linear", kind="Functional"))
    assert names(dtype="float16") == []
    for name, wrong, known in (
        ("dtype", "flaot16", "float32"),
        ("kind", "Modul", "Functional, Module"),
        ("direction", "foward", "forward"),
        ("section", "inputs", "input_args"),
    ):
        problem = dumps_service.problem(404, "/steps/5/operators", **{name: wrong})
        assert known in problem["expected"]
    bad = dumps_service.get("/steps/5/operators", rank=1, non_finite=True, section="output")["rows"]
    assert {row["max"] for row in bad} == {"nan"}
    assert bad[0]["operator"] in ("linear", "blocks.1.down")


def test_pages_go_on_from_rank_to_rank(dumps_service: Service) -> None:
    whole = dumps_service.get("/steps/5/operators", limit=1000)
    assert whole["next"] is None
    rows: list[Any] = []
    page: dict[str, Any] = {"next": None}
    while not rows or page["next"] is not None:
        more = {"cursor": page["next"]} if page["next"] else {}
        page = dumps_service.get("/steps/5/operators", limit=37, **more)
        rows += page["rows"]
    assert rows == whole["rows"]
    assert [row["rank"] for row in (rows[0], rows[-1])] == [0, 1]


def test_the_stack_of_a_row(dumps_service: Service) -> None:
    row = dumps_service.get("/steps/5/operators", rank=0, name="Functional.linear.0.forward")[
        "rows"
    ][0]
    table_key = {name: row[name] for name in ("stage", "role", "rank", "part", "capture_id")}
    answer = dumps_service.get("/steps/5/operators/stack", stack_id=row["stack_id"], **table_key)
    assert any("small_decoder.py" in frame for frame in answer["frames"])
    several = dumps_service.problem(422, "/steps/5/operators/stack", stack_id="0")
    assert several["wrong"].endswith(" dumps of step 5 fit")
    assert several["advice"].startswith("see /steps/5/dumps?")
    assert dumps_service.problem(404, "/steps/5/operators/stack", stack_id="99999", rank=0)


def test_the_earliest_non_finite_operator_over_the_ranks(dumps_service: Service) -> None:
    answer = dumps_service.get("/steps/5/operators/non-finite")
    first, second = answer["rows"]
    assert (first["rank"], first["name"], first["earliest"]) == (0, None, False)
    assert (second["rank"], second["earliest"], second["certain"]) == (1, True, True)
    earliest = answer["earliest"]
    assert earliest["rank"] == 1
    assert earliest["operator"] == "linear"
    assert earliest["parent"] == "Module.blocks.1.down.Linear.forward.0"
    assert "small_decoder.py" in earliest["source"]
    assert dumps_service.get("/steps/6/operators/non-finite")["earliest"] is None


def ask(dumps_service: Service, body: Mapping[str, object]) -> Any:
    answer = dumps_service.read.post("/operators/divergence", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_the_first_divergent_operator_between_replicas(dumps_service: Service) -> None:
    a = {"step": 6, "rank": 0}
    answer = ask(dumps_service, {"a": a, "b": {"rank": 1}})
    assert answer["same"] is False
    assert (answer["a"]["rank"], answer["b"]["rank"]) == (0, 1)
    assert answer["b"]["step"] == 6
    first = answer["first"]
    assert first["a"]["parent"] == "Module.blocks.0.up.Linear.forward.0"
    assert answer["first_parameter"]["a"]["operator"] == "blocks.0.up"
    assert answer["first_gradient"] is not None
    assert first["relative"] > first["threshold"]
    same = ask(dumps_service, {"a": a, "b": {"step": 5}, "exact": True})
    assert same["same"] is True
    assert (same["a"]["step"], same["b"]["step"]) == (6, 5)
    stepless = ask(dumps_service, {"a": a, "b": {"rank": 1}, "by_dtype": {"float32": 10.0}})
    assert stepless["first"] is None


def test_operators_on_one_side_only_are_listed(dumps_service: Service) -> None:
    answer = ask(dumps_service, {"a": {"step": 7, "rank": 0}, "b": {"rank": 1}})
    assert answer["only_b_count"] > 0
    assert any("linear" in row["name"] for row in answer["only_b"])


@pytest.mark.parametrize(
    ("body", "status", "expected_text"),
    [
        ({}, 422, "side a"),
        ({"a": {"step": 5}, "b": {}}, 422, "names 2 dumps"),
        ({"a": {"rank": 0}, "b": {}}, 422, "names no step"),
        ({"a": {"step": "5"}, "b": {}}, 422, "an integer"),
        ({"a": {"step": 5, "rang": 0}, "b": {}}, 422, "rang"),
        ({"a": {"step": -1, "rank": 0}, "b": {}}, 422, "step of side a"),
        ({"a": {"step": 10**18, "rank": 0}, "b": {}}, 422, "step of side a"),
        ({"a": {"step": 5, "rank": -1}, "b": {}}, 422, "rank of side a"),
        ({"a": {"step": 5, "rank": 9}, "b": {}}, 404, "no rank 9"),
        ({"a": {"step": 99, "rank": 0}, "b": {}}, 404, "no step 99"),
        ({**BOTH, "factor": -1}, 422, "factor"),
        ({**BOTH, "exact": 1}, 422, "exact"),
        ({**BOTH, "limit": 0}, 422, "limit"),
        ({**BOTH, "by_dtype": {"float32": "x"}}, 422, "by_dtype"),
        ({**BOTH, "more": 1}, 422, "more"),
    ],
)
def test_what_cannot_be_compared(
    dumps_service: Service, body: Mapping[str, object], status: int, expected_text: str
) -> None:
    answer = dumps_service.read.post("/operators/divergence", json=body)
    assert answer.status_code == status, answer.text
    assert expected_text in answer.json()["detail"]


def test_a_missing_dump_is_reported(dumps_service: Service) -> None:
    Rank(dumps_service, run="other").stage(STAGE, 5)
    expected_text = dumps_service.problem(404, "/steps/5/operators", run="other")
    assert "stagescope capture" in expected_text["advice"]
    assert dumps_service.problem(404, "/steps/5/operators", rank=7)["expected"] == "one of 0, 1"


def test_devices_of_two_kinds_get_a_larger_threshold(live: Service, dumps: dict[str, Path]) -> None:
    for rank, kind in ((0, "cuda"), (1, "npu")):
        dumped(live, Rank(live, rank=rank, layout={"device_kind": kind}), dumps["plain"])
    answer = ask(live, BOTH)
    assert (answer["a"]["device"], answer["b"]["device"]) == ("cuda", "npu")
    assert answer["factor"] == 100.0
    assert ask(live, {**BOTH, "factor": 8})["factor"] == 8.0


def test_parts_and_captures_are_distinguished(live: Service, dumps: dict[str, Path]) -> None:
    rank = Rank(live, world_size=1)
    dumped(live, rank, dumps["plain"], part="a", minibatch=0)
    dumped(live, rank, dumps["changed"], part="b", minibatch=1)
    dumped(live, rank, dumps["nan"], part="c", capture_id="c2")
    tables = live.get("/steps/5/operators")["tables"]
    assert [(t["part"], t["capture_id"]) for t in tables] == [
        ("0.0.0.0", "c1"), ("0.0.1.0", "c1"), ("0.0.0.0", "c2"),
    ]  # fmt: skip
    a = {"step": 5, "part": "0.0.0.0", "capture_id": "c1"}
    answer = ask(live, {"a": a, "b": {"part": "0.0.1.0"}})
    assert answer["b"]["part"] == "0.0.1.0"
    assert answer["first"]["a"]["parent"] == "Module.blocks.0.up.Linear.forward.0"
    newest = ask(live, {"a": {"step": 5, "part": "0.0.0.0"}, "b": {"capture_id": "c1"}})
    assert (newest["a"]["capture_id"], newest["b"]["capture_id"]) == ("c2", "c1")


def test_what_was_captured_before_a_restart_is_the_newest_after_it(
    live: Service, dumps: dict[str, Path]
) -> None:
    dumped(live, Rank(live), dumps["plain"], 5)
    again = Rank(live, key="again")
    again.begin(STAGE, 9)
    answer = live.get("/steps/latest/operators", limit=1)
    assert (answer["attempt"], answer["step"]) == (1, 5)
    assert live.problem(404, "/steps/latest/operators", attempt=2)["code"] == "not_found"
    dumped(live, again, dumps["plain"], 10)
    answer = live.get("/steps/latest/operators", limit=1)
    assert (answer["attempt"], answer["step"]) == (2, 10)


def test_a_truncated_dump_says_so(live: Service, dumps: dict[str, Path], tmp_path: Path) -> None:
    cut = tmp_path / "cut"
    shutil.copytree(dumps["plain"], cut)
    text = (cut / "dump.json").read_bytes()
    (cut / "dump.json").write_bytes(text[:5000])
    (cut / "DONE.json").unlink()
    dumped(live, Rank(live), cut, state="truncated")
    answer = live.get("/steps/5/operators", limit=1000)
    (table,) = answer["tables"]
    assert (table["truncated"], table["truncated_at"], table["done"]) == (True, 5000, None)
    assert len(answer["rows"]) == table["rows"] > 0


def test_a_dump_that_cannot_be_read_says_why_and_the_others_answer(
    live: Service, dumps: dict[str, Path], tmp_path: Path
) -> None:
    dumped(live, Rank(live), dumps["plain"])
    other = Rank(live, rank=1)
    other.say("dump", path=str(tmp_path), stage=STAGE, step=5, capture_id="c1", state="complete")
    answer = live.get("/steps/5/operators")
    assert [table["state"] for table in answer["tables"]] == ["digested", "refused"]
    assert {row["rank"] for row in answer["rows"]} == {0}
    assert "allowed_roots" in answer["tables"][1]["reason"]


def test_a_table_on_another_node_is_fetched_once_and_a_lost_node_says_so(
    live: Service, dumps: dict[str, Path], tmp_path: Path
) -> None:
    rank = Rank(live, node_id="n")
    path = dumped(live, rank, dumps["plain"])
    before = live.get("/steps/5/operators")["rows"]
    # The directory is that of another node: here nothing lies at this path.
    there = tmp_path / "node" / str(path).lstrip("/")
    there.parent.mkdir(parents=True)
    shutil.move(path, there)
    gone = live.get("/steps/5/operators")
    assert gone["rows"] == []
    assert gone["tables"][0]["state"] == "unreachable"
    live.engine.nodes["here"] = tmp_path / "node"
    assert live.get("/steps/5/operators")["rows"] == before
    live.engine.nodes.clear()
    assert live.get("/steps/5/operators")["rows"] == before


def test_a_third_comparison_is_answered_not_ready() -> None:
    released, begun = threading.Event(), threading.Barrier(MAX_RUNNING + 1)

    def question() -> None:
        begun.wait(30)
        assert released.wait(30)

    computations = Computations()
    futures = [computations.start(question) for _ in range(MAX_RUNNING)]
    begun.wait(30)
    with pytest.raises(NotReady, match="ask again"):
        computations.start(question)
    released.set()
    for future in futures:
        future.result(30)
    assert computations.start(int).result(30) == 0


def test_other_answers_come_while_comparisons_are_computed(
    dumps_service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    released, begun = threading.Event(), threading.Barrier(MAX_RUNNING + 1)
    find: Callable[..., Path] = OperatorFiles.path

    def slow(files: OperatorFiles, row: Any) -> Path:
        if not released.is_set():
            begun.wait(30)
            assert released.wait(30)
        return find(files, row)

    monkeypatch.setattr(OperatorFiles, "path", slow)
    answers: list[int] = []
    threads = [
        threading.Thread(target=lambda: answers.append(ask(dumps_service, BOTH)["a"]["step"]))
        for _ in range(MAX_RUNNING)
    ]
    for thread in threads:
        thread.start()
    begun.wait(30)
    busy = dumps_service.read.post("/operators/divergence", json=BOTH)
    assert busy.status_code == 503
    assert busy.headers["retry-after"]
    assert "ask again" in busy.json()["detail"]
    assert dumps_service.get("/steps/5/stages")["rows"]
    released.set()
    for thread in threads:
        thread.join(30)
    assert answers == [5, 5]


def test_full_tensors_are_compared_by_msprobe(live: Service, tmp_path: Path) -> None:
    changed = small_decoder()
    with torch.no_grad():
        changed.get_parameter("blocks.0.up.weight").mul_(1.5)
    for rank, model in ((0, small_decoder()), (1, changed)):
        files = capture(tmp_path / str(rank), model, level="L1", task="tensor")
        dumped(live, Rank(live, rank=rank), files)
    with stagescope.attach(live.server.url, token=live.read.headers["authorization"][7:]) as asking:
        found = asking.tensors({"step": 5, "rank": 0}, {"rank": 1}, wait=60.0)
        differing = [row for row in found if row["max_abs_error"]]
        assert differing[0]["name"].startswith("Functional.linear.2.forward")
        assert found.about["count"] == len(found)
        text = found.lines()
        assert max(map(len, text)) <= 80
        assert differing[0]["name"] in text
        few = asking.tensors({"step": 5, "rank": 0}, {"rank": 1}, limit=2)
        assert few.about["count"] == len(found)
        assert few.lines()[-1] == f"... {len(found) - 2} more tensors"


def test_tensors_need_dumps_that_hold_them(dumps_service: Service) -> None:
    answer = dumps_service.read.post("/operators/tensors", json=BOTH)
    assert answer.status_code == 422
    assert "task statistics" in answer.json()["wrong"]
    assert "/operators/divergence" in answer.json()["advice"]


def test_tensors_on_another_node_say_so(live: Service, tmp_path: Path) -> None:
    files = capture(tmp_path / "dump", level="L0", task="tensor")
    path = dumped(live, Rank(live), files)
    (path / "dump.json").unlink()
    answer = live.read.post("/operators/tensors", json={"a": {"step": 5}, "b": {}})
    assert answer.status_code == 502
    assert "alone" in answer.json()["wrong"]


def test_a_long_computation_starts_once_and_again_where_it_failed() -> None:
    released = threading.Event()
    begun: list[int] = []

    def question() -> int:
        begun.append(1)
        assert released.wait(30)
        if len(begun) == 1:
            raise InvalidInput("broken")
        return len(begun)

    computations = Computations(1)
    _, first = computations.start_once(("a", "b"), question)
    assert computations.start_once(("a", "b"), question)[1] is first
    with pytest.raises(NotReady, match="ask again"):
        computations.start_once(("a", "c"), question)
    released.set()
    with pytest.raises(InvalidInput):
        first.result(30)
    _, second = computations.start_once(("a", "b"), question)
    assert second.result(30) == 2
    assert computations.start_once(("a", "b"), question)[1] is second


def test_the_captured_steps_of_all_attempts_are_named(
    live: Service, dumps: dict[str, Path]
) -> None:
    first = Rank(live, world_size=1)
    for step in (5, 6):
        dumped(live, first, dumps["plain"], step)
    second = Rank(live, key="a2", world_size=1, start=2_000.0)
    for step in (6, 7):
        second.stage(STAGE, step)
    problem = live.problem(404, "/steps/7/operators")
    assert problem["expected"] == "one of 5, 6 (attempt 1)"
