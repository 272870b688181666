"""Routes of a real MoE: vLLM samples, transformers scores, and they explain the mismatch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from tests.support.api import Service, service
from tests.support.command_line import invoke
from tests.support.coordinators import wait_for
from tests.support.engines.vllm_server import VllmServer
from tests.vllm.conftest import Folders
from transformers import AutoModelForCausalLM

import stagescope_workers
from stagescope_wire.engines import Sampling
from stagescope_workers.integrations.gates import trainer_routes
from stagescope_workers.integrations.vllm_routes import routes_of

STAGE = "actor_compute_log_prob"
DRAWN = np.random.default_rng(11)
PROMPTS = [[int(token) for token in DRAWN.integers(2, 500, 20 + n)] for n in range(8)]


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with service(tmp_path_factory.mktemp("service")) as running:
        yield running


@pytest.fixture(scope="module")
def step(moe: VllmServer, moe_folders: Folders) -> dict[str, Any]:
    """What a trainer records of one step, with the routes of both sides."""
    moe.reset_cache()
    assert moe.rpc("record_routes") == [{"layers": 2}]
    engine = moe.connect()
    made = engine.generate(PROMPTS, Sampling(max_tokens=48, temperature=1.0, seed=5))
    engine.close()
    rows = [[*prompt, *(each.token_ids or ())] for prompt, each in zip(PROMPTS, made, strict=True)]
    (records,) = moe.rpc("take_routes")
    moe.rpc("record_routes", on=False)
    model: Any = AutoModelForCausalLM.from_pretrained(moe_folders.base, dtype=torch.bfloat16)
    trainer, log_probs = [], []
    with trainer_routes(model) as routes, torch.inference_mode():
        for row in rows:
            ids = torch.tensor([row])
            logits = model(input_ids=ids).logits[0, :-1].float()
            trainer.append(routes.take())
            of_token = torch.log_softmax(logits, -1).gather(-1, ids[0, 1:, None])[:, 0]
            log_probs.append(of_token.numpy())
    responses = [np.array(each.token_ids) for each in made]
    return {
        "prompts": [np.array(prompt) for prompt in PROMPTS],
        "responses": responses,
        "rollout_log_probs": [np.array(each.log_probs, np.float32) for each in made],
        "old_log_probs": [row[-len(ids) :] for row, ids in zip(log_probs, responses, strict=True)],
        "response_mask": [np.ones(len(ids), np.int64) for ids in responses],
        "sample_ids": [f"row-{row}" for row in range(len(rows))],
        "rollout_routed_experts": routes_of(records, rows),
        "trainer_routed_experts": trainer,
    }


Routes = npt.NDArray[np.int16]


def as_is(routes: Routes) -> Routes:
    return routes


def layer_of_zeros(routes: Routes) -> Routes:
    faulty = routes.copy()
    faulty[:, 1] = 0
    return faulty


def late(routes: Routes) -> Routes:
    return np.concatenate([routes[:1], routes[:-1]])


def swapped(routes: Routes) -> Routes:
    return routes[:, ::-1].copy()


def answered(live: Service, run: str, step: dict[str, Any]) -> tuple[list[str], str]:
    """Report two steps; return what `doctor` and `routing` print."""
    assert live.tokens is not None
    environment = {"STAGESCOPE_URL": live.server.url, "STAGESCOPE_TOKEN": live.tokens.operate}
    with stagescope_workers.init(
        run, attempt_key="a", url=live.server.url, token=live.tokens.operate
    ) as probe:
        for number in (1, 2):
            with probe.stage(STAGE, step=number) as stage:
                stage.record(**step)
        with probe.stage(STAGE, step=3):
            pass
        wait_for(lambda: run in [row["run"] for row in live.get("/runs")["rows"]])
        wait_for(lambda: live.get(f"/runs/{run}/diagnosis")["measured"] == 2)
    doctor, routing = (invoke(*words, env=environment) for words in (
        ("doctor", run), ("routing", "1", "--run", run),
    ))  # fmt: skip
    assert routing.exit_code == 0, routing.output
    return doctor.stdout.splitlines(), routing.stdout


def test_the_routes_of_a_real_engine_explain_part_of_the_mismatch(
    live: Service, step: dict[str, Any]
) -> None:
    doctor, routing = answered(live, "moe", step)
    found = live.get("/steps/1/routing?run=moe")
    tokens = sum(len(ids) for ids in step["responses"])
    assert (found["tokens"], found["lacking"]) == (tokens, {"rollout": 0, "trainer": 0})
    assert all(row["agreement"] > 0.95 for row in found["rows"])
    assert 0 < found["hit_share"] < 0.1
    assert found["mean_hit"] > 3 * found["mean_same"]
    assert f"({found['hit']} of {tokens})" in " ".join(routing.split())
    assert found["faults"] == []
    assert not [line for line in doctor if "route" in line.lower()]


@pytest.mark.parametrize(
    ("plant", "says"),
    [
        (layer_of_zeros, "The rollout's routes are zeros in layer 1"),
        (late, "The rollout's routes are one token late"),
        (swapped, "The rollout's routes of layers 0 and 1 are swapped"),
    ],
)
def test_a_planted_fault_is_the_first_line_of_the_doctor(
    live: Service, step: dict[str, Any], plant: Any, says: str
) -> None:
    faulty = {
        **step, "rollout_routed_experts": [plant(each) for each in step["rollout_routed_experts"]],
    }  # fmt: skip
    doctor, routing = answered(live, plant.__name__, faulty)
    assert doctor[0].startswith(says), doctor
    assert says in " ".join(routing.split())
