"""A training on a real vLLM with one planted fault: the doctor names it, its experiment proves it.

The training scores with transformers what the engine samples, and reports each step. In the last
steps something is wrong. A user types `stagescope doctor` and then the command that it prints.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest
from tests.support.api import Service, service
from tests.support.command_line import invoke
from tests.support.coordinators import wait_for
from tests.support.engines.vllm_server import VllmServer
from tests.vllm.conftest import Folders

import stagescope_workers
from stagescope import cli
from stagescope_wire.engines import Sampling
from stagescope_workers.bisect.command import bisect
from stagescope_workers.bisect.transformers_model import TransformersModel

STAGE: Final = "actor_compute_log_prob"
SICK: Final = 9
"""The first step with the fault."""
STEPS: Final = range(1, 13)
SICK_STEPS: Final = range(SICK, STEPS.stop)
DRAWN = np.random.default_rng(7)


def _tokens(count: int) -> list[int]:
    return [int(token) for token in DRAWN.integers(2, 500, count)]


SHARED = _tokens(70)
PROMPTS = [[*SHARED, *_tokens(3 + n)] for n in range(4)] + [_tokens(20 + n) for n in range(4)]


@dataclasses.dataclass
class Training:
    """What a fault may change from step `SICK` on.

    Attributes:
        server: the engine.
        folders: model directories.
        trainer: the directory with the trainer's weights.
        temperature: of the sampling.
        stack: ends what a fault began.
    """

    server: VllmServer
    folders: Folders
    trainer: Path
    temperature: float = 1.0
    stack: ExitStack = dataclasses.field(default_factory=ExitStack)


Fault = Callable[[Training], None]


Payload = dict[str, Any]
Log = npt.NDArray[np.float32]


def step(training: Training, number: int, model: TransformersModel) -> Payload:
    """Sample and score one step; return what a stage records of it."""
    engine = training.server.connect()
    sampling = Sampling(max_tokens=40, temperature=training.temperature, seed=number)
    made = engine.generate(PROMPTS, sampling)
    engine.close()
    rows = [list(each.token_ids or ()) for each in made]
    scores = model.score_at(
        [[*prompt, *ids] for prompt, ids in zip(PROMPTS, rows, strict=True)], 1.0
    )
    return {
        "prompts": [np.array(prompt) for prompt in PROMPTS],
        "responses": [np.array(ids) for ids in rows],
        "rollout_log_probs": [np.array(each.log_probs, np.float32) for each in made],
        "old_log_probs": [
            np.array(row[len(prompt) :], np.float32)
            for row, prompt in zip(scores, PROMPTS, strict=True)
        ],
        "response_mask": [np.ones(len(ids), np.int64) for ids in rows],
        "sample_ids": [f"{number}-{row}" for row in range(len(rows))],
    }


def steps(training: Training, numbers: Iterable[int]) -> list[Payload]:
    """Sample and score some steps with the training's weights."""
    model = TransformersModel(training.trainer, "float32")
    found = [step(training, number, model) for number in numbers]
    model.close()
    return found


@pytest.fixture(scope="module")
def healthy(dense32: VllmServer, dense_folders: Folders) -> list[Payload]:
    """The steps before the fault, which are the same in each training."""
    return steps(Training(dense32, dense_folders, dense_folders.base), range(STEPS[0], SICK))


def other_weights(training: Training) -> None:
    training.trainer = training.folders.updated


def processed(training: Training) -> None:
    training.temperature = 0.7
    training.stack.enter_context(training.server.fault("sampler", mode="processed_logprobs"))


def bfloat16_head(training: Training) -> None:
    training.stack.enter_context(training.server.fault("head", dtype="bfloat16"))


def stale_cache(training: Training) -> None:
    training.server.load_weights(training.folders.updated, reset_cache=False)
    training.stack.callback(training.server.load_weights, training.folders.base)
    training.trainer = training.folders.updated


def shifted_positions(training: Training) -> None:
    training.stack.enter_context(training.server.fault("positions", by=1, first=50))


FAULTS: Final[dict[str, tuple[Fault, str]]] = {
    "weights": (other_weights, "disappears when transformers with --model scores instead"),
    "processed": (processed, "The rollout's log-probs are at temperature 0.7"),
    "head": (bfloat16_head, "The rollout's head is rounded to bfloat16"),
    "cache": (stale_cache, "disappears when the engine's prefix cache is not used"),
    "positions": (shifted_positions, "position ids from token 50 of the sequence on are shifted"),
}
"""Name -> the fault, and how the answer names it."""


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with service(tmp_path_factory.mktemp("service")) as running:
        running.use_ring()
        yield running


def typed(live: Service, command: str) -> Any:
    assert live.tokens is not None
    environment = {"STAGESCOPE_URL": live.server.url, "STAGESCOPE_TOKEN": live.tokens.operate}
    return invoke(*shlex.split(command, comments=True), env=environment)


def proved(live: Service, run: str, url: str, trainer: Path) -> tuple[Any, str, str]:
    """Type `doctor` and the command that proves the symptom; `url`, `trainer`: what it asks for.

    Returns:
        The result of the command, and the first two lines of the doctor after it.
    """
    wait_for(lambda: live.get(f"/runs/{run}/diagnosis")["measured"] == len(STEPS))
    symptom, proof, *_ = typed(live, f"doctor {run}").stdout.splitlines()
    assert f"since step {SICK}" in symptom
    assert proof.startswith(f"  prove it: stagescope bisect {run}:{STEPS[-1]} ")
    command = proof.partition("prove it: stagescope ")[2]
    done = typed(live, command.replace("URL", url).replace("DIR", str(trainer)))
    wait_for(lambda: live.get(f"/runs/{run}/diagnosis")["rows"][0]["rule"] == "bisected")
    first, proof, *_ = typed(live, f"doctor {run}").stdout.splitlines()
    assert f"since step {SICK}" in first
    return done, first, proof


@pytest.mark.parametrize("name", FAULTS)
def test_bisect_proves_what_the_doctor_names(
    name: str, dense32: VllmServer, dense_folders: Folders, live: Service,
    healthy: list[Payload], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setitem(cli.main.commands, "bisect", bisect)
    fault, cause = FAULTS[name]
    training = Training(dense32, dense_folders, dense_folders.base)
    assert live.tokens is not None
    probe = stagescope_workers.init(
        name, attempt_key="a", url=live.server.url, token=live.tokens.operate
    )
    with training.stack, probe:
        dense32.reset_cache()
        dense32.connect().generate(PROMPTS, Sampling(max_tokens=1))  # as the last step left it
        fault(training)
        for number, payload in zip(STEPS, [*healthy, *steps(training, SICK_STEPS)], strict=True):
            with probe.stage(STAGE, step=number) as stage:
                stage.record(**payload)
                stage.log(**{"response_length/clip_ratio": 0.0})  # no fault of this training
        with probe.stage(STAGE, step=STEPS.stop):
            pass
        done, first, proof = proved(live, name, dense32.url, training.trainer)
        assert (done.exit_code, cause in " ".join(done.stdout.split())) == (0, True), done.output
        assert cause in first
        assert proof.startswith(f"  prove it: stagescope steps --run bisect-{name}-{STEPS[-1]}")


# --- a fault of one rank of several -----------------------------------------------------------
def late(rows: Sequence[Log]) -> list[Log]:
    return [np.concatenate([row[:1], row[:-1]]) for row in rows]


def lower(rows: Sequence[Log]) -> list[Log]:
    return [row - np.float32(0.1) for row in rows]


def next_rows(rows: Sequence[Log]) -> list[Log]:
    return [
        np.resize(other, len(row)) for row, other in zip(rows, [*rows[1:], rows[0]], strict=True)
    ]


OF_ONE_RANK: Final[dict[str, tuple[Callable[[Sequence[Log]], list[Log]], str]]] = {
    "late": (late, "the rollout's log-probs are shifted: each stands 1 token later"),
    "lower": (lower, "the rollout's log-probs are 0.1 nat below the trainer's everywhere"),
    "rows": (next_rows, "the rows of the two sides are in another order"),
}
"""Name -> what happens to the rollout's log-probs of rank 1, and how the answer names it."""


@pytest.fixture(scope="module")
def whole(dense32: VllmServer, dense_folders: Folders, healthy: list[Payload]) -> list[Payload]:
    """A healthy training."""
    return [*healthy, *steps(Training(dense32, dense_folders, dense_folders.base), SICK_STEPS)]


@pytest.mark.parametrize("name", OF_ONE_RANK)
def test_bisect_proves_a_fault_of_one_rank_of_two(
    name: str, dense32: VllmServer, dense_folders: Folders, live: Service, whole: list[Payload],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setitem(cli.main.commands, "bisect", bisect)
    fault, cause = OF_ONE_RANK[name]
    run, half = f"rank-{name}", len(PROMPTS) // 2
    assert live.tokens is not None
    with ExitStack() as stack:
        probes = [
            stack.enter_context(stagescope_workers.init(
                run, rank=rank, world_size=2, attempt_key="a", url=live.server.url,
                token=live.tokens.operate,
            ))
            for rank in range(2)
        ]  # fmt: skip
        for number, payload in zip(STEPS, whole, strict=True):
            for rank, probe in enumerate(probes):
                # Each rank has prompts with the shared prefix, and others.
                own = {key: values[rank::2] for key, values in payload.items()}
                assert len(own["responses"]) == half
                if rank == 1 and number >= SICK:
                    own["rollout_log_probs"] = fault(own["rollout_log_probs"])
                with probe.stage(STAGE, step=number) as stage:
                    stage.record(**own)
                    stage.log(**{"response_length/clip_ratio": 0.0})
        for probe in probes:
            with probe.stage(STAGE, step=STEPS.stop):
                pass
    done, first, _ = proved(live, run, dense32.url, dense_folders.base)
    assert " ".join(done.stdout.split()).startswith(f"On actor rank 1, {cause}"), done.output
    assert first.startswith(f"On actor rank 1, {cause}")
    rows = live.get(f"/runs/{run}/diagnosis")["rows"]
    lasting = [row for row in rows if row["verdict"] == "found" and row["last_step"] is None]
    assert [row["rule"] for row in lasting if row["cause"] is None] == ["bisected"]
