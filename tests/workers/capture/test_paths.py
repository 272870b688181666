from __future__ import annotations

import concurrent.futures
import json
from pathlib import Path
from typing import Any

import pytest
from tests.support.small_decoder import small_decoder
from tests.workers.capture.conftest import Captures

from stagescope_wire.errors import CaptureError
from stagescope_wire.names import safe_name
from stagescope_wire.schema import Part
from stagescope_workers.capture import dump_paths


def capture(captures: Captures, **arguments: Any) -> Path:
    model = small_decoder()
    captures.run(model, level="L0", **arguments)
    return Path(captures.last["path"]).relative_to(captures.data_dir)


def test_a_capture_lies_under_run_attempt_step_and_stage(captures: Captures) -> None:
    path = capture(captures, run="qwen3-8b", attempt_key="session_1:0100/0000", step=12, rank=7)
    assert str(path) == "qwen3-8b/session_1_0100_0000/step_12/actor_update/step0/rank7"
    # Beside what msprobe wrote: DONE.json, and the mark that the service may read here.
    assert captures.last["files"] == len(list((captures.data_dir / path).iterdir())) - 2
    done = captures.done()
    assert {key: done[key] for key in ("state", "ok", "stage", "step", "rank", "attempt")} == {
        "state": "complete", "ok": True, "stage": "actor_update", "step": 12, "rank": 7,
        "attempt": "session_1:0100/0000",
    }  # fmt: skip
    assert done["seconds"] > 0


@pytest.mark.parametrize(
    ("step", "stage", "part", "path"),
    [
        (1, "s", Part(), "step_1/s"),
        (None, "s", Part(), "step_unknown/s"),  # verl's name
        (1, "s", Part(occurrence=1), "step_1/s/1.0.0.0"),
        (1, "s", Part(epoch=1, minibatch=2), "step_1/s/0.1.2.0"),
        (1, "s", Part(microbatch=3), "step_1/s/0.0.0.3"),
        (1, "../../up", Part(), "step_1/.._.._up"),
    ],
)
def test_a_stage_has_a_directory(step: int | None, stage: str, part: Part, path: str) -> None:
    root = dump_paths.attempt_directory(Path("/d"), run="run", attempt_key="../../etc", verl=False)
    assert root == Path("/d/run/.._.._etc")
    assert dump_paths.stage_directory(root, step, stage, part) == root / path


def test_the_same_work_twice_overwrites_nothing(tmp_path: Path) -> None:
    def claim(rank: int) -> str:
        return str(dump_paths.claim_rank_directory(tmp_path, rank)[1].relative_to(tmp_path))

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        claimed = set(pool.map(lambda _: claim(0), range(20)))
    again = {f"again_{number}/step0/rank0" for number in range(1, 20)}
    assert claimed == {"step0/rank0", *again}
    assert claim(1) == "step0/rank1"


def test_verls_block_keeps_verls_path_for_the_first_attempt(captures: Captures) -> None:
    def verl(attempt_key: str, run: str = "run", rank: int = 0) -> str:
        return str(
            capture(captures, source="verl", attempt_key=attempt_key, run=run, rank=rank)
        ).removesuffix(f"/step0/rank{rank}")

    assert verl("first") == "step_1/actor_update"
    assert verl("first", rank=1) == "step_1/actor_update"
    assert verl("second") == "attempt_second/step_1/actor_update"
    assert verl("first", run="another") == "attempt_first/step_1/actor_update"
    owner = json.loads((captures.data_dir / dump_paths.OWNER_FILE).read_text(encoding="utf-8"))
    assert owner == {"run": "run", "attempt_key": "first"}


def test_one_attempt_owns_a_directory_that_many_claim(tmp_path: Path) -> None:
    def claim(number: int) -> Path:
        return dump_paths.attempt_directory(tmp_path, run="run", attempt_key=str(number), verl=True)

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        directories = list(pool.map(claim, range(64)))
    assert directories.count(tmp_path) == 1
    assert len(set(directories)) == 64
    assert [file.name for file in tmp_path.iterdir()] == [dump_paths.OWNER_FILE]


@pytest.mark.parametrize("content", ["", "{", "[]", "null"])
def test_an_unreadable_owner_is_somebody_else(tmp_path: Path, content: str) -> None:
    (tmp_path / dump_paths.OWNER_FILE).write_text(content, encoding="utf-8")
    directory = dump_paths.attempt_directory(tmp_path, run="run", attempt_key="k", verl=True)
    assert directory == tmp_path / "attempt_k"


@pytest.mark.parametrize(
    ("name", "safe"),
    [
        ("plain-1.2_3", "plain-1.2_3"),
        ("a/b:c d", "a_b_c_d"),
        ("..", "__"),
        (".", "_"),
        ("", "_"),
        ("日本", "__"),
        ("x" * 300, "x" * 150),
        ("../../etc", ".._.._etc"),
    ],
)
def test_a_name_is_one_component(name: str, safe: str) -> None:
    assert safe_name(name) == safe


@pytest.mark.parametrize("bad", ["with space", "plus+", "at@", "日本"])
def test_characters_that_msprobe_refuses_are_named(tmp_path: Path, bad: str) -> None:
    with pytest.raises(CaptureError, match="data_dir"):
        dump_paths.claim_rank_directory(tmp_path / bad, 0)
    assert list(tmp_path.iterdir()) == []
