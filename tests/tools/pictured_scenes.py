"""What the pictures show beside the investigated run: a hang, a weight sync that lacks a tensor,
a capture that is under way, and an engine that is not quite the trainer's model.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import numpy as np
from tests.support.api import Rank, Service
from tests.support.command_line import invoke
from tests.support.routes import routed
from tests.support.runs.shown import ShownRun
from tests.support.stores import eventually

from stagescope import cli
from stagescope_wire.schema import STACKS

HANGING: Final = "qwen3-8b-math"
EXPERTS: Final = "qwen3-30b-a3b-math"
SYNCED: Final = "qwen3-8b-search"
STUCK_STEP: Final = 33
STUCK_RANK: Final = 3
NEWEST_VERSION: Final = 5
_QUIET_SECONDS: Final = 218.0
_LAYERS: Final = 24
_FAILED: Final = 6
_TENSORS: Final = (
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)
_COLLECTIVE: Final = """\
  File "torch/distributed/distributed_c10d.py", in all_reduce
    work.wait()
  File "train.py", line 512, in update
    grad_norm = clip_grad_norm(model)
"""
_LOADER: Final = """\
  File "train.py", line 71, in load_references
    references = json.load(opened)
  File "train.py", line 498, in update
    batch = select(data, load_references())
"""


def set_rules(live: Service) -> None:
    """Put in force the rules that ship, and one by rank."""
    document = live.get("/triggers/defaults")
    rule = {
        "name": "rank-off", "metric": "logprob_abs_diff/mean", "by": "rank", "for": 2,
        "when": {">": 0.02, "median_ratio": 3}, "cooldown": 20,
        "actions": {
            "finding": {"severity": "error", "advice": "compare this rank's weights"}, "pin": 3,
        },
    }  # fmt: skip
    rules = [*document["rules"], rule]
    answer = live.operate.put("/triggers", json={"rules": rules, "runs": document["runs"]})
    assert answer.status_code == 200, answer.text


def hanging(live: Service, ranks: int = 4) -> None:
    """Feed a run whose rank `STUCK_RANK` does not begin a stage in which the others wait."""
    first = STUCK_STEP - 8
    start = time.time() - 60.0 * (STUCK_STEP - first + 0.5) - _QUIET_SECONDS
    actors = [
        Rank(
            live, run=HANGING, rank=rank, world_size=ranks, start=start,
            layout={"host": f"gpu-{rank // 2}"}, pid=4711 + rank,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    for step in range(first, STUCK_STEP + 1):
        for actor in actors:
            actor.clock = start + 60.0 * (step - first) + 0.9 * float(actor.sender.rank)
            actor.stage("rollout_generate", step, seconds=21.0)
            actor.stage("actor_compute_log_prob", step, seconds=6.0)
            if step < STUCK_STEP:
                actor.stage("actor_update", step, seconds=14.0)
            elif actor.sender.rank != STUCK_RANK:
                actor.begin("actor_update", step)
    _answer_stacks(live, actors)


def _answer_stacks(live: Service, actors: list[Rank]) -> None:
    """Take stacks of the stuck rank and of one that waits for it."""
    with ThreadPoolExecutor(1) as pool:
        body = {"run": HANGING, "ranks": [0, STUCK_RANK], "wait": 20}
        call = pool.submit(live.operate.post, "/stacks", json=body)
        request, *_ = eventually(live.catalogue.stacks)
        for rank in (0, STUCK_RANK):
            stack = _LOADER if rank == STUCK_RANK else _COLLECTIVE
            thread = {"name": "MainThread", "ident": 1, "is_training": True, "stack": stack}
            stage = "" if rank == STUCK_RANK else "actor_update"
            actors[rank].clock = time.time()
            actors[rank].say(
                STACKS, request_id=request["request_id"], threads=[thread], step=STUCK_STEP,
                **({"stage": stage} if stage else {}),
            )  # fmt: skip
        assert call.result(30).status_code == 200


def synced(live: Service) -> None:
    """Feed a run whose newest weight sync left a tensor of the version before in the engine."""
    names = ["model.embed_tokens.weight", "lm_head.weight"]
    names += [f"model.layers.{at}.{name}.weight" for at in range(_LAYERS) for name in _TENSORS]
    start = time.time() - 300.0
    trainer = Rank(live, run=SYNCED, world_size=1, start=start, host="gpu-0")
    engine = Rank(live, run=SYNCED, role="rollout", world_size=1, start=start, host="gpu-1")
    stale = f"model.layers.{_LAYERS // 2 - 1}.mlp.down_proj.weight"

    def checksums(version: int) -> dict[str, int]:
        return {name: hash((version, at)) % 2**64 for at, name in enumerate(names)}

    for version in range(NEWEST_VERSION - 2, NEWEST_VERSION + 1):
        received = checksums(version)
        if version == NEWEST_VERSION:
            received[stale] = checksums(version - 1)[stale]
        for side, rank, values in (
            ("trainer", trainer, checksums(version)),
            ("rollout", engine, received),
        ):
            rank.say(
                "weights", side=side, kind="exchanged", policy_version=version,
                step=version + 1 if side == "trainer" else None,
                tensors=[(name, value, "bfloat16", (896, 896), None)
                         for name, value in values.items()],
            )  # fmt: skip
            rank.clock += 50.0


def of_experts(live: Service) -> None:
    """Report steps of a mixture of experts: layer 8 of 12 disagrees, most in the last rounds."""
    rank = Rank(live, run=EXPERTS, world_size=1)
    step = routed(rows=32, tokens=160, layers=12, flips=0.004, seed=6)
    step.mask[:] = 1
    step.mask[:, 31::32] = 0
    drawn = np.random.default_rng(7)
    for number in range(5):
        part = slice(1 + 32 * number, 33 + 32 * number)
        other = drawn.random(step.rollout[:, part, 8, 0].shape) < 0.01 + 0.02 * number
        rollout = step.rollout[:, part, 8]
        rollout[other] = (rollout[other] + 1) % 16
    rank.stage("actor_compute_log_prob", 1, step.payload())
    rank.begin("actor_compute_log_prob", 2)


def captured(training: ShownRun, first: int) -> str:
    """Request a capture from step `first` on; one rank failed and one is still to come."""
    live, capture_id = training.live, training.capture()
    training.acknowledge(capture_id, range(training.ranks))
    start: int = eventually(lambda: live.get(f"/captures/{capture_id}")["agreement"]["start"])
    for actor in training.actors:
        actor.acknowledge()  # the plan with the agreed step
    for step in range(first, start + 1):
        training.do(step)
    for rank in range(training.ranks - 1):
        training.dump(capture_id, start, rank, "failed" if rank == _FAILED else "complete")
    return capture_id


def consistency_text(folder: Path, columns: int) -> str:
    """Return what `stagescope consistency` prints of a model and its own int8 engine."""
    import ctranslate2
    from tests.support.engines.tiny_llama import write_llama

    from stagescope_workers.consistency.command import consistency

    model = write_llama(folder / "tiny-llama")
    ctranslate2.converters.TransformersConverter(str(model)).convert(
        str(folder / "int8"), quantization="int8"
    )
    # The entry point of an installed package, also where only its sources are.
    cli.main.add_command(consistency, "consistency")
    words = ("--model", model, "--engine", f"ctranslate2:{folder / 'int8'}", "--limit", "8")
    answer = invoke("consistency", *map(str, words), env={"COLUMNS": str(columns)})
    assert answer.exit_code in (0, 1), answer.output
    return answer.stdout.replace(f"{folder}/", "./")
