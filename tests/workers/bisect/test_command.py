"""`stagescope bisect` with transformers as the engine, and with a server of vLLM's shape."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi import Request, Response
from tests.support.answering import serving
from tests.support.api import Service, service
from tests.support.command_line import invoke
from tests.support.engines.servers import EngineServer, scores
from tests.support.kept_steps import kept_step

from stagescope import attach
from stagescope_wire.batch import Batch
from stagescope_wire.batch.data import BatchPart
from stagescope_wire.schema import Part
from stagescope_workers.bisect.state import State
from stagescope_workers.bisect.transformers_model import TransformersModel
from stagescope_workers.bisect.variants import PLAIN, Variant

pytestmark = pytest.mark.usefixtures("alone")
DRAWN = np.random.default_rng(2)
PROMPTS = [[0, *map(int, DRAWN.integers(2, 90, size))] for size in (3, 12, 30, 7)]
RESPONSES = [[int(token) for token in DRAWN.integers(2, 90, size)] for size in (40, 25, 33, 48)]
Scored = list[list[float]]


def run(*words: str | Path) -> Any:
    found = invoke("bisect", *map(str, words), "--json")
    assert found.exit_code in (0, 1), found.output
    assert found.stdout, found.stderr
    answer = json.loads(found.stdout)
    assert answer["named"] == (found.exit_code == 0)
    return answer


@pytest.fixture(scope="module")
def truth(model: Path) -> Callable[[Variant], Scored]:
    """Score the responses with the model in float32."""
    exact = TransformersModel(model, "float32")

    def found(variant: Variant) -> Scored:
        pairs = zip(PROMPTS, RESPONSES, strict=True)
        return [list(exact.score_as([*a, *b], variant)[len(a) :]) for a, b in pairs]

    return found


def step(rollout: Scored, trainer: Scored, folder: Path) -> Path:
    return kept_step(PROMPTS, RESPONSES, rollout, trainer).save(folder / "step5.safetensors")


RESPONSE = [len(prompt) for prompt in PROMPTS]


def shifted(truth: Callable[[Variant], Scored], by: int) -> Scored:
    """The response's position ids are shifted; 0: they begin at 0 again."""
    each = [truth(Variant(shift=by or -begin, shift_from=begin)) for begin in RESPONSE]
    return [each[row][row] for row in range(len(PROMPTS))]


@pytest.mark.parametrize("side", ["rollout", "trainer"])
@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        ("head_rounding", lambda truth: truth(Variant(head="bfloat16"))),
        ("softmax_rounding", lambda truth: truth(Variant(softmax="bfloat16"))),
        ("positions", lambda truth: shifted(truth, 1)),
        ("positions", lambda truth: shifted(truth, -2)),
        ("positions", lambda truth: shifted(truth, 0)),
        ("shifted", lambda truth: [[-1.0, *row[:-1]] for row in truth(PLAIN)]),
        ("rounded", lambda truth: [
            (np.array(row, np.float32).view(np.uint32) + 0x8000 & 0xFFFF0000)
            .view(np.float32).tolist() for row in truth(PLAIN)]),
    ],
)  # fmt: skip
def test_a_planted_fault_of_either_side_is_named(
    kind: str, fault: Callable[[Any], Scored], side: str, truth: Callable[[Variant], Scored],
    model: Path, tmp_path: Path,
) -> None:  # fmt: skip
    wrong, right = fault(truth), truth(PLAIN)
    rollout, trainer = (wrong, right) if side == "rollout" else (right, wrong)
    file = step(rollout, trainer, tmp_path)
    words = ("--engine", "transformers:float32", "--model", model)
    found = run(file, *words)
    assert found["kind"] == kind
    # Its engine is as the other side; what it gives today is not what was recorded, or is.
    assert found["text"].lower().startswith(f"the {side}'s") or kind == "shifted"


def test_a_fault_of_one_rank_of_four_is_named_with_the_rank(model: Path, tmp_path: Path) -> None:
    prompts, responses = PROMPTS * 4, [RESPONSES[(row + row // 4) % 4] for row in range(16)]
    pairs = list(zip(prompts, responses, strict=True))
    exact, coarse = (TransformersModel(model, dtype) for dtype in ("float32", "bfloat16"))
    trainer, rollout = (
        [list(each.score_as([*a, *b])[len(a) :]) for a, b in pairs] for each in (exact, coarse)
    )
    for row in range(4, 8):
        rollout[row] = [rollout[row][0], *rollout[row][:-1]]
    batch = kept_step(prompts, responses, rollout, trainer)
    parts = tuple(
        BatchPart("actor_compute_log_prob", "actor", rank, Part(), np.arange(4) + 4 * rank)
        for rank in range(4)
    )
    file = dataclasses.replace(batch, parts=parts).save(tmp_path / "step5.safetensors")
    found = run(file, "--engine", "transformers:bfloat16", "--model", model)
    assert found["kind"] == "shifted"
    assert found["text"].startswith("On actor rank 1, the rollout's log-probs are shifted: each")
    assert (found["trajectories"], found["trajectories_of_step"]) == (4, 16)
    assert found["place"]["ranks"] == [["actor", 1]]
    assert found["place"]["mean"] == pytest.approx(found["mismatch"]["mean"])
    assert found["place"]["rest"] < 0.1 * found["place"]["mean"]
    shown = invoke("bisect", str(file), "--model", str(model)).stdout
    assert "of 4 of 16 trajectories" in shown
    assert "Only tokens on actor rank 1 were scored: their mean |d| is" in shown


def test_a_healthy_step_and_a_coarse_engine(
    truth: Callable[[Variant], Scored], model: Path, tmp_path: Path
) -> None:
    healthy = step(truth(PLAIN), truth(PLAIN), tmp_path)
    words = ("--engine", "transformers:bfloat16", "--model", model)
    assert run(healthy, *words)["kind"] == "healthy"
    coarse = TransformersModel(model, "bfloat16")
    pairs = zip(PROMPTS, RESPONSES, strict=True)
    rounded = [list(coarse.score_as([*a, *b])[len(a) :]) for a, b in pairs]
    found = run(step(rounded, truth(PLAIN), tmp_path), *words, "--picture", tmp_path / "a.svg")
    assert found["kind"] == "healthy"
    assert "dtype" in found["text"]
    assert found["mismatch"]["mean"] > 0.002
    by_name = {each["arm"]: each for each in found["arms"]}
    assert by_name["prefill"]["to_before"]["max"] < 1e-5
    assert by_name["float32"]["to_trainer"]["max"] < 1e-5
    assert by_name["decoded"]["status"] == "left out"
    assert by_name["checkpoint"]["reason"] == "no --checkpoint is given"
    assert (tmp_path / "a.svg").read_text().startswith("<svg")


def test_what_is_printed(
    truth: Callable[[Variant], Scored], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    file = step(truth(Variant(head="bfloat16")), truth(PLAIN), tmp_path)
    dry = invoke("bisect", str(file), "--model", str(model), "--dry-run")
    assert dry.exit_code == 0, dry.output
    assert "4 arms to score: about" in dry.stdout
    assert "left out prefill: no --engine is given" in dry.stdout
    assert not (tmp_path / "home").exists()
    found = invoke("bisect", str(file), "--model", str(model), "--arms", "transformers,float32")
    assert found.exit_code == 0, found.output
    lines = found.stdout.splitlines()
    assert lines[0].startswith("The rollout's head is rounded to bfloat16: so computed, 0.")
    assert "left out head: not in --arms" in lines
    assert max(len(line) for line in lines if " " in line.strip()) <= 80
    assert "arms to score" in found.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [(("--arms", "prefil"), "one of recorded"), (("--picture", "a.bmp"), ".svg"), ((), "--engine")],
)
def test_usage_errors(
    words: tuple[str, ...], said: str, truth: Callable[[Variant], Scored], tmp_path: Path
) -> None:
    file = step(truth(PLAIN), truth(PLAIN), tmp_path)
    found = invoke("bisect", str(file), *words)
    assert found.exit_code == 2
    assert said in found.stderr


# --- a server of vLLM's shape -----------------------------------------------------------------
class Stopping(EngineServer):
    """Holds the first request that scores by prefill until it is released."""

    def __init__(self) -> None:
        super().__init__("vllm")
        self.reached = threading.Event()
        self.released = threading.Event()

    async def answer(self, request: Request) -> Response:
        body = await request.json() if request.method == "POST" else {}
        if body.get("prompt_logprobs") is not None and not self.released.is_set():
            self.reached.set()
            return Response(status_code=503)
        return await super().answer(request)

    def decoded(self) -> list[Any]:
        """The requests of the arm that reads the prefix cache."""
        bodies = [body for _, body in self.asked if body and "logprob_token_ids" in body]
        return [body for body in bodies if "cache_salt" not in body]


@pytest.fixture
def server() -> Iterator[tuple[Stopping, str]]:
    stopping = Stopping()
    with serving(stopping.app) as url:
        yield stopping, url


def vllm_step(folder: Path, fault: float) -> Path:
    prompts, responses = [[0, 5, 9], [0, 7]], [[3, 4, 5, 6, 7, 8], [9, 8, 7, 6]]
    true = [scores([*a, *b])[len(a) - 1 :] for a, b in zip(prompts, responses, strict=True)]
    # Every other token: no constant.
    off = [[value - 2 * fault * (at % 2) for at, value in enumerate(row)] for row in true]
    return kept_step(prompts, responses, off, true).save(folder / "step5.safetensors")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_bisect_continues(
    number: signal.Signals, server: tuple[Stopping, str], tmp_path: Path
) -> None:
    stopping, url = server
    words = [str(vllm_step(tmp_path, 0.5)), "--engine", url]
    program = (
        "import sys, time\n"
        "from stagescope_wire.engines.http import EngineHttp\n"
        "from stagescope_workers.bisect.command import bisect\n"
        "own = EngineHttp.post\n"
        "def post(self, path, body):\n"
        "    if 'prompt_logprobs' in body: time.sleep(600)\n"
        "    return own(self, path, body)\n"
        "EngineHttp.post = post\n"
        "bisect(sys.argv[1:])\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, *words], stderr=subprocess.PIPE, text=True, env=os.environ
    )
    assert process.stderr is not None
    seen = []
    for line in process.stderr:
        seen.append(line)
        if line.startswith("prefill: "):
            break
    assert any(line.startswith("prefill: ") for line in seen), seen
    process.send_signal(number)
    if number == signal.SIGINT:  # it waits for no answer
        assert "interrupted: 3 arms are kept" in process.stderr.read()
    assert process.wait(30) == (130 if number == signal.SIGINT else -number)
    process.stderr.close()
    first = len(stopping.decoded())
    assert first == 20
    stopping.released.set()
    found = run(*words)
    assert len(stopping.decoded()) == first
    assert found["kind"] == "changed"
    assert "0.5 becomes " in found["text"]
    assert [each["status"] for each in found["arms"][:5]] == ["done"] * 5
    # One that came to its end starts over.
    run(*words)
    assert len(stopping.decoded()) == 2 * first


def test_a_failed_arm_is_tried_again_and_other_tokens_start_over(
    server: tuple[Stopping, str], tmp_path: Path
) -> None:
    stopping, url = server
    file = vllm_step(tmp_path, 0.5)
    words = ("--engine", url, "--arms", "decoded,prefill", "--state", tmp_path / "state")
    failed = run(file, *words)
    by_name = {each["arm"]: each for each in failed["arms"]}
    assert by_name["prefill"]["status"] == "failed"
    assert "503" in by_name["prefill"]["reason"]
    # Other tokens: nothing of it counts.
    before = len(stopping.decoded())
    run(vllm_step(tmp_path, 0.25), *words)
    assert len(stopping.decoded()) == 2 * before
    # The same again, with an engine that answers: only the failed arm is scored.
    stopping.released.set()
    found = run(vllm_step(tmp_path, 0.25), *words)
    assert [each["status"] for each in found["arms"] if each["arm"] == "prefill"] == ["done"]
    assert len(stopping.decoded()) == 2 * before


# --- with a service ---------------------------------------------------------------------------
def test_arms_are_steps_of_a_run_that_can_be_compared(
    server: tuple[Stopping, str], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    stopping, url = server
    stopping.released.set()
    with service(tmp_path_factory.mktemp("service")) as started:
        assert started.tokens is not None
        monkeypatch.setenv("STAGESCOPE_URL", started.server.url)
        monkeypatch.setenv("STAGESCOPE_TOKEN", started.tokens.operate)
        found = run(vllm_step(tmp_path, 0.5), "--engine", url)
        assert found["recorded"].startswith("5 arms recorded as steps of run bisect-step5")
        with attach() as session:
            steps = session.steps("bisect-step5")
            assert sorted(row["step"] for row in steps) == [0, 1, 2, 3, 4]
            for number, mean in ((0, 0.5), (1, 0.0), (4, 0.0)):
                metrics = session.step(number, run="bisect-step5").metrics()
                assert metrics["logprob_abs_diff/mean"] == pytest.approx(mean, abs=1e-6)
                assert metrics["counts/tokens"] == 10
            rounds = session.step(1, run="bisect-step5").rounds()
            assert len(rounds) == 1
            engine = session.compare("bisect-step5:1", "bisect-step5:4")
            against = session.compare("bisect-step5:0", "bisect-step5:1")
            assert (engine.verdict, against.verdict) == ("same", "different")
            kept = session.step(1, run="bisect-step5").batch()
            assert isinstance(kept, Batch)
            assert "prompts" in kept
            _check_bundle(session, started, url, tmp_path)


def _check_bundle(session: Any, started: Service, url: str, folder: Path) -> None:
    """A step of a bundle, opened elsewhere, is bisected; nothing is recorded there."""
    bundle = folder / "step.tar.gz"
    session.save_bundle(bundle, run="bisect-step5", step=0)
    found = run("bisect-step5:0", "--url", bundle, "--engine", url, "--state", folder / "other")
    assert found["kind"] == "changed"
    assert found["recorded"] == "not recorded: a bundle is read only"


def test_an_arm_that_was_not_recorded_is_recorded_by_the_next_call(tmp_path: Path) -> None:
    State(tmp_path, "these tokens").mark_recorded("decoded")
    continued = State(tmp_path, "these tokens")
    assert (continued.is_continued, continued.recorded) == (True, {"decoded"})
    assert State(tmp_path, "other tokens").recorded == set()
