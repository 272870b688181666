"""A step's batch over HTTP: exactly what ranks recorded, and what is not there."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
from tests.support.api import Rank, Service, service
from tests.support.command_line import invoke
from tests.support.step_dumps import WholeStep

import stagescope
from stagescope_service.store.contract import Put
from stagescope_wire.batch import Batch
from stagescope_wire.errors import NotFound

deserialize: Callable[[bytes], Any] = safetensors.deserialize
WHOLE = WholeStep([9, 2, 4, 3])
STAGE = "actor_compute_log_prob"


def recorded(rows: list[int], *names: str, **extra: object) -> dict[str, Any]:
    """A payload of some rows, as a probe sends it."""
    ids = WHOLE.ids(rows)
    strings = {"sample_ids": ids["samples"], "group_ids": ids["groups"]}
    tensors = {**WHOLE.piece(rows, names or None), **extra}
    meta = {"temperature": 0.7, "policy_version": 4}
    return {"schema": 1, "tensors": tensors, "strings": strings, "meta": meta}


@pytest.fixture
def batches_service(tmp_path: Path) -> Iterator[Service]:
    """Step 5 of two ranks: log-probs, and an update in two epochs."""
    with service(tmp_path / "home") as running:
        running.use_ring()
        ranks = [Rank(running, rank=rank, settings={"clip": 0.2}) for rank in (0, 1)]
        for rank in (0, 1):
            rows = [2 * rank, 2 * rank + 1]
            ranks[rank].stage(STAGE, 5, recorded(rows), scalars={"entropy": 0.25 * rank})
            for epoch in (0, 1):
                width = int(WHOLE.lengths[rows].max())
                values = np.full((2, width), epoch + rank / 2, np.float32)
                payload = recorded(
                    rows, "response_mask",
                    log_probs=("float32", values.shape, values, None),
                    spare=("float32", values.shape, values, None),
                )  # fmt: skip
                loss = {"loss": epoch + 0.5 * rank}
                ranks[rank].hand("actor_update", 5, payload, scalars=loss, epoch=epoch)
        yield running


@pytest.fixture
def step(batches_service: Service) -> Iterator[stagescope.Step]:
    with batches_service.session() as session:
        yield session.step(5)


def test_it_comes_back_exactly(step: stagescope.Step) -> None:
    batch = step.batch()
    assert batch.rows == 4
    for name, (tag, _, values, _) in WHOLE.tensors.items():
        assert batch.tensor(name).dtype == tag
        assert batch[name].tobytes() == values.tobytes(), name
    assert batch.sample_ids == tuple(WHOLE.samples)
    heading = {name: batch.source[name] for name in ("run", "attempt", "step")}
    assert heading == {"run": "r", "attempt": 1, "step": 5}
    assert len(batch.source["files"]) == 6
    assert batch.meta["sampling"] == {"temperature": 0.7}
    assert batch.meta["settings"] == {"clip": 0.2}
    micro = list(batch.microbatches("actor_update"))
    assert [each.numbers["loss"] for each in micro] == [0.0, 0.5, 1.0, 1.5]
    assert [float(each["log_probs"].max()) for each in micro] == [0.0, 0.5, 1.0, 1.5]
    assert [each["log_probs"].shape for each in micro] == [(2, 9), (2, 4)] * 2


def test_the_payload_of_a_recreated_rank_replaces_its_first(
    batches_service: Service, step: stagescope.Step
) -> None:
    anew = Rank(batches_service, rank=1, start=2000.0, incarnation="anew")
    anew.stage(STAGE, 5, recorded([2]))
    batch = step.batch(stages=[STAGE])
    assert batch.sample_ids == tuple(WHOLE.samples[:3])
    assert len(batch.source["files"]) == 2


def test_gaps_list_what_was_not_kept(batches_service: Service, step: stagescope.Step) -> None:
    assert step.batch().gaps == (("tensor", "actor_update recorded spare: not kept"),)
    assert step.batch(names=["old_log_probs"]).gaps == ()
    rank = Rank(batches_service, rank=2, world_size=3)
    rank.begin(STAGE, 5)
    rank.begin("critic_update", 5)
    rank.end("critic_update", 5, scalars={"vf_loss": 1.0, "grad_norm": 2.0})
    gaps = step.batch().gaps
    assert ("rank", "actor 2 in actor_compute_log_prob: open") in gaps
    alone = "grad_norm, vf_loss, logged by 1 part of critic_update with no tensor kept"
    assert ("number", f"{alone}: step.scalars() has them") in gaps
    assert "number" not in {gap.kind for gap in step.batch(stages=[STAGE]).gaps}


def test_names_and_stages_are_chosen(batches_service: Service, step: stagescope.Step) -> None:
    batch = step.batch(names=["old_log_probs"], stages=[STAGE])
    assert set(batch) == {"old_log_probs", "response_mask"}
    assert batch.stages() == (STAGE,)
    with pytest.raises(NotFound, match="no tensor entropy"):
        step.batch(names=["entropy"])
    with pytest.raises(NotFound, match="expected one of actor_compute_log_prob, actor_update"):
        step.batch(stages=["weight_sync"])
    assert (
        batches_service.problem(422, "/steps/5/batch", names=" , ")["wrong"]
        == "' , ' names nothing"
    )


def test_kept_files_are_there_when_the_ring_is_not(batches_service: Service) -> None:
    batches_service.engine.keep("trajectories")
    rank = Rank(batches_service, rank=0, key="a2", world_size=1, start=2_000.0)
    rank.stage(STAGE, 7, recorded([0, 1, 2, 3], "responses", "response_mask", "rewards"))
    shutil.rmtree(batches_service.settings.data_path / "ring")
    with batches_service.session() as session:
        batch = session.step(7).batch()
        assert batch["responses"].tobytes() == WHOLE.tensors["responses"][2].tobytes()
        kept, *_ = batch.source["files"]
        assert kept["checksum"].startswith("sha256:")
        with pytest.raises(NotFound, match=r"no tensors of step 5 of r are kept.*keep it: init"):
            session.step(5).batch()


def test_files_of_another_node_are_fetched(batches_service: Service, step: stagescope.Step) -> None:
    whole = step.batch()
    ring = batches_service.settings.data_path / "ring"
    other = batches_service.settings.home / "elsewhere"
    shutil.move(ring, other / str(ring).lstrip("/"))
    with pytest.raises(NotFound, match="node here is gone"):
        step.batch()
    batches_service.engine.nodes["here"] = other
    again = step.batch()
    assert again["old_log_probs"].tobytes() == whole["old_log_probs"].tobytes()
    assert again.source["files"] == whole.source["files"]
    assert not list((batches_service.settings.data_path / "copies").iterdir())


def test_a_rollout_of_no_step_gives_the_samples_that_were_consumed(
    batches_service: Service,
) -> None:
    rollout = Rank(batches_service, role="rollout", rank=0, world_size=1)
    rows = [3, 0, 2]
    payload = recorded(rows, "rollout_log_probs", "response_mask", "responses")
    prompts = np.array([[3], [0], [2]])
    payload["tensors"]["prompts"] = ("int64", prompts.shape, prompts, None)
    batches_service.engine.keep("trajectories")
    rollout.stage("rollout_generate", None, payload, policy_version=4)
    rank = Rank(batches_service, rank=5, world_size=6)
    rank.stage(STAGE, 8, recorded([0, 3], "old_log_probs", "response_mask"))
    (row,) = [
        row for row in batches_service.catalogue.payloads(1) if row["stage"] == "rollout_generate"
    ]
    consumed = {name: row[name] for name in ("incarnation", "seq")} | {"consumed_step": 8}
    batches_service.store.submit([Put("payloads", consumed)]).result(30)
    with batches_service.session() as session:
        batch = session.step(8).batch()
    assert batch.sample_ids == (WHOLE.samples[0], WHOLE.samples[3])
    assert batch["prompts"].tolist() == [[0], [3]]
    assert (batch["responses"] == WHOLE.tensors["responses"][2][[0, 3]]).all()


def test_any_reader_of_safetensors_opens_the_answer(batches_service: Service) -> None:
    answer = batches_service.read.get("/steps/5/batch")
    assert answer.status_code == 200
    assert int(answer.headers["content-length"]) == len(answer.content)
    assert 'filename="r-1-step5.safetensors"' in answer.headers["content-disposition"]
    found = dict(deserialize(answer.content))
    assert found["old_log_probs"]["dtype"] == "BF16"
    assert batches_service.client(None).get("/steps/5/batch").status_code == 401


def test_the_command_line_writes_it(
    batches_service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAGESCOPE_URL", batches_service.server.url)
    monkeypatch.setenv("STAGESCOPE_TOKEN", batches_service.tokens.read)
    mistyped = tmp_path / "mistyped"
    nowhere = invoke("batch", "5", "--output", str(mistyped / "step.safetensors"))
    assert (nowhere.exit_code, mistyped.exists()) == (2, False)
    path = tmp_path / "step.safetensors"
    done = invoke("batch", "5", "--output", str(path))
    assert done.exit_code == 0, done.output
    assert "batch, run r, attempt 1, step 5, 4 rows" in done.output
    assert "tensor: actor_update recorded spare: not kept" in done.output
    assert f"written to {path}" in done.output.replace("\n", "")
    assert Batch.load(path)["rewards"].tobytes() == WHOLE.tensors["rewards"][2].tobytes()
    report = json.loads(invoke("batch", "5", "--names", "rewards", "--json").output)
    assert report["tensors"]["rewards"] == ["float32", [4]]
    missing = invoke("batch", "6")
    assert missing.exit_code == 4
