"""A step of two ranks on real Ray: given back exactly, put through its loss, trained once more."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

ray = pytest.importorskip("ray")
pytest.importorskip("ctranslate2")
import torch  # noqa: E402
from tests.support.cluster import Service, eventually  # noqa: E402

import stagescope  # noqa: E402
from examples.countdown.actors import Report  # noqa: E402
from examples.countdown.batch import Batch  # noqa: E402
from examples.countdown.config import Settings  # noqa: E402
from examples.countdown.losses import policy_loss  # noqa: E402
from examples.countdown.train import Job  # noqa: E402
from stagescope.replaying import Replay  # noqa: E402

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

RUN = "replayed"
SETTINGS = Settings(groups=4, warmup_steps=3, warmup_rows=8, entropy_coefficient=0.01)


class Recorded(NamedTuple):
    """What a training of two ranks did in its second step, and where it was recorded."""

    service: Service
    batch: Batch
    scalars: dict[str, float]
    checkpoints: Path


@pytest.fixture(scope="module")
def recorded(address: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorded]:
    service = Service.start(tmp_path_factory.mktemp("home"), address)
    checkpoints = tmp_path_factory.mktemp("checkpoints")
    job = Job(SETTINGS, Report(RUN, "one", keep={"what": ["all"]}))
    job.prepare(None)
    job.step(1)
    job.save(checkpoints / RUN, 1)
    batch, scalars = job.step(2)
    job.close(30.0)
    yield Recorded(service, batch, scalars, checkpoints)
    service.stop()


@pytest.fixture(scope="module")
def whole(recorded: Recorded) -> stagescope.Batch:
    """The step over HTTP, once all of it has arrived."""
    with recorded.service.session() as session:

        def all_there() -> stagescope.Batch | None:
            found = session.step(2, run=RUN).batch()
            gaps = [gap for gap in found.gaps if gap.kind in ("rank", "payload", "rows")]
            return None if gaps else found

        return eventually(all_there)


def test_a_step_of_two_ranks_comes_back_exactly(
    recorded: Recorded, whole: stagescope.Batch
) -> None:
    batch = recorded.batch
    assert whole.sample_ids == batch.sample_ids
    assert whole.strings["group_ids"] == batch.group_ids
    made: dict[str, Any] = {**batch.trajectories(), "rewards": batch.columns["rewards"]}
    for name in ("prompts", "responses", "response_mask", "turn_ids", "rollout_log_probs",
                 "versions", "rewards"):  # fmt: skip
        assert whole[name].tobytes() == made[name].tobytes(), name
        assert whole.tensor(name).dtype == made[name].dtype.name
    # What a rank computed is as wide as its own longest row; the rest the driver filled with 0.
    there = batch.turn_ids >= 0
    for name in ("old_log_probs", "ref_log_probs", "advantages"):
        assert whole[name][there].tobytes() == batch.columns[name][there].tobytes(), name
    updates = whole.parts_of("actor_update")
    assert [(part.rank, str(part.part)) for part in updates] == [
        (rank, f"0.{epoch}.{index}.0") for epoch in (0, 1) for index in (0, 1) for rank in (0, 1)
    ]
    losses = [part.numbers["loss"] for part in updates if part.rank == 0]
    assert sum(losses) / 4 == pytest.approx(recorded.scalars["loss"])
    assert whole.meta["settings"]["entropy_coefficient"] == 0.01
    assert whole.meta["sampling"]["temperature"] == 1.0


def intermediates(micro: stagescope.Batch) -> Mapping[str, Any]:
    given = micro.as_tensors()
    found = policy_loss(
        given["log_probs"],
        given["entropy"],
        old_log_probs=given["old_log_probs"],
        ref_log_probs=given["ref_log_probs"],
        advantages=given["advantages"],
        mask=given["response_mask"].float(),
        clip=SETTINGS.clip,
        kl_coefficient=SETTINGS.kl_coefficient,
        entropy_coefficient=SETTINGS.entropy_coefficient,
    )
    return {"elementwise_loss": found.elementwise, "prob_ratio": found.prob_ratio}


def spoiled(micro: stagescope.Batch) -> Mapping[str, object]:
    found = dict(intermediates(micro))
    if (micro.source["rank"], micro.source["part"]) == (1, "0.1.0.0"):
        ratio = found["prob_ratio"].clone()
        ratio[1, 0] += 0.5  # the model's first token
        found["prob_ratio"] = ratio
        found["elementwise_loss"] = torch.where(ratio > 0, found["elementwise_loss"] + 0.5, 0.0)
    return found


def test_the_loss_function_gives_what_was_stored_and_a_change_is_found(
    whole: stagescope.Batch,
) -> None:
    same = stagescope.replay(whole, intermediates)
    assert isinstance(same, Replay)
    assert len(same) == 16
    assert (same.verdict, same.first) == ("bitwise", None)
    first = stagescope.replay(whole, spoiled).first
    assert first is not None
    assert (first["name"], first["rank"], first["part"]) == ("prob_ratio", 1, "0.1.0.0")
    assert first["coordinate"] == [1, 0]
    assert first["computed"] - first["stored"] == pytest.approx(0.5)
    (part,) = [p for p in whole.parts_of() if (p.rank, str(p.part)) == (1, "0.1.0.0")]
    assert first["sample_id"] == (whole.sample_ids or ())[part.rows[1]]


def test_the_example_trains_from_it_to_the_same_loss(recorded: Recorded) -> None:
    service = recorded.service
    command = [
        sys.executable, "-m", "examples.countdown.train", "--address", service.address,
        "--replay", f"{RUN}:2", "--checkpoint-dir", str(recorded.checkpoints),
    ]  # fmt: skip
    known = {"STAGESCOPE_URL": service.info.url, "STAGESCOPE_TOKEN": service.token}
    environment = {**os.environ, **known, "PYTHONPATH": ":".join(path for path in sys.path if path)}
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = f"step 2: loss {recorded.scalars['loss']!r} is the stored one, bit by bit"
    assert said in done.stdout
    with service.session() as session:
        again = eventually(lambda: session.step(2, run=f"{RUN}.replay").batch())
    there = recorded.batch.turn_ids >= 0
    name = "rollout_log_probs"
    assert again[name][there].tobytes() == recorded.batch.rollout_log_probs[there].tobytes()


def test_files_alone_give_the_same_when_the_service_is_gone(
    recorded: Recorded, whole: stagescope.Batch
) -> None:
    for which in ("api", "coordinator", "ingestor"):
        recorded.service.kill(which)
    recorded.service.stop()
    program = (
        "import sys\n"
        "sys.modules['ray'] = None\n"
        "from pathlib import Path\n"
        "from examples.countdown.replay import read_step\n"
        f"read_step(Path({str(recorded.service.settings.data_path)!r}), 2, {RUN!r})"
        f".save({str(recorded.checkpoints / 'files.safetensors')!r})\n"
    )
    environment = {**os.environ, "PYTHONPATH": ":".join(path for path in sys.path if path)}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=100)
    alone = stagescope.Batch.load(recorded.checkpoints / "files.safetensors")
    assert alone.sample_ids == whole.sample_ids
    assert set(alone) == set(whole)
    for name in whole:
        assert alone[name].tobytes() == whole[name].tobytes(), name
    for mine, theirs in zip(whole.microbatches(), alone.microbatches(), strict=True):
        assert set(mine) == set(theirs)
        assert all(np.array_equal(mine[n], theirs[n], equal_nan=True) for n in mine)
    assert stagescope.replay(alone, intermediates).verdict == "bitwise"
