"""A small recorded catalogue, and what the API answered of it when it was recorded.

    python -m tests.tools.recorded

writes both; do so only where answers are to change, and say why in the commit.
"""

from __future__ import annotations

import json
import lzma
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from tests.support.api import Rank, Service, service
from tests.support.measure import payload

from stagescope_service.settings import Settings

PROSE = frozenset({"text", "detail", "message", "advice", "expected", "wrong", "reasons"})
"""Sentences may be worded better."""
ADDED = frozenset({"nonfinite", "collectives"})
"""Fields that answers have now, and did not have when they were recorded."""
NAMED = frozenset({"metrics", "series", "units"})
"""Fields that hold numbers by name: a metric that is published since then is added to them."""

FOLDER = Path(__file__).parents[1] / "service" / "http" / "recorded"
CATALOGUE, ANSWERS = FOLDER / "catalogue.db.xz", FOLDER / "answers.json.xz"
NOW = 2_000.0
"""Unix seconds of the service that answers."""
LOG_PROB, UPDATE, SYNC = "actor_compute_log_prob", "actor_update", "weight_sync"
STEPS = range(1, 7)
_RUNS = ("sick", "well")
_OF_STEP = ("metrics", "rounds", "ranks", "stages", "scalars", "dumps", "tokens", "stuck", "stacks")
_OF_RUN = (
    "/steps", "/exact", "/findings", "/findings/groups", "/losses", "/losses/groups", "/weights",
    "/devices", "/stacks", "/triggers/firings", "/triggers/firings/groups",
)  # fmt: skip
_SERIES = (
    "training/rollout_probs_diff_mean", "rollout_corr/kl", "rollout_corr/k3_kl", "counts/tokens",
    "per_round/max_diff_value", "loss", "grad_norm",
)  # fmt: skip


def fill(live: Service) -> None:
    """Report two runs: one with restarts and everything that goes wrong, one without."""
    train(live, "well", "w1", STEPS)
    train(live, "sick", "s1", range(1, 5), start=1_200.0, sick=True)
    train(live, "sick", "s2", range(4, 7), start=1_500.0, sick=True)


def train(
    live: Service, run: str, key: str, steps: range, *, start: float = 1_000.0, sick: bool = False
) -> None:
    """Report steps of four data-parallel ranks."""
    ranks = [
        Rank(
            live, run=run, rank=rank, key=key, world_size=4, start=start, host=f"h{rank // 2}",
            layout={"dp_rank": rank, "dp_size": 4},
            settings={"algorithm.rollout_is": "token"},
        )
        for rank in range(4)
    ]  # fmt: skip
    for step in steps:
        for index, rank in enumerate(ranks):
            if sick and step == 5 and index == 3:
                continue  # this rank is missing
            seed = 100 * step + index
            of_rank = payload(seed=seed, first_sample=4 * index, noise=0.02 * step)
            if sick and step == 4 and index == 2:
                of_rank["tensors"]["old_log_probs"][2][1, 3] = float("nan")
            rank.stage(LOG_PROB, step, of_rank, policy_version=step - 1)
            scalars = {"loss": 1.0 / step, "grad_norm": float("inf") if sick else 0.5 + index}
            for minibatch in range(2):
                rank.stage(UPDATE, step, minibatch=minibatch, scalars=scalars)
            if sick and step == 6 and index == 1:
                rank.begin(SYNC, step)
                rank.end(SYNC, step, status="failed", error_type="RuntimeError",
                         error_message="broken pipe")  # fmt: skip
            else:
                rank.stage(SYNC, step)
            if sick and step == 2:
                rank.say("dropped", what="payload", count=1, bytes=10, reason="full", step=step,
                         stage=UPDATE)  # fmt: skip


def paths() -> Iterator[str]:
    """Yield what is asked."""
    yield "/runs"
    for run in _RUNS:
        yield f"/runs/{run}/attempts"
        for path in _OF_RUN:
            yield f"{path}?run={run}"
        for name in _SERIES:
            for more in ("", "&stage=actor_update", "&rank=1", "&attempt=1"):
                yield f"/series?run={run}&metric={name}{more}"
        for step in STEPS:
            for path in _OF_STEP:
                yield f"/steps/{step}/{path}?run={run}"
            for attempt in (1, 2):
                yield f"/steps/{step}/metrics?run={run}&attempt={attempt}"
            yield f"/steps/{step}/metrics?run={run}&stage={LOG_PROB}&role=actor"
    yield "/diff?a=well&b=sick"
    yield "/diff?a=sick@1&b=sick@2"


def ask(live: Service) -> dict[str, Any]:
    """Return the status and body of every answer."""
    live.now = NOW
    answers: dict[str, object] = {}
    for path in paths():
        answer: httpx.Response = live.read.get(path)
        answers[path] = [answer.status_code, answer.json()]
    return answers


def unpack(home: Path) -> Path:
    """Put the recorded catalogue into a home; return its file."""
    file = Path(Settings(home=home).catalogue_url.partition("///")[2])
    file.parent.mkdir(parents=True)
    file.write_bytes(lzma.decompress(CATALOGUE.read_bytes()))
    return file


def differences(
    found: object, answer: object, apart: frozenset[str], at: str = "", relative: float = 0.0
) -> Iterator[tuple[str, object, object]]:
    """Yield where two answers differ: path in the answer, the value found, the one recorded."""
    field = at.rpartition(".")[2]
    if field == "series" and isinstance(found, list) and isinstance(answer, list):
        found, answer = ({each["name"]: each for each in every} for every in (found, answer))
    if isinstance(found, dict) and isinstance(answer, dict):
        for key in sorted((found.keys() | answer.keys()) - apart):
            if (key in ADDED or field in NAMED) and key not in answer:
                continue
            one, other = found.get(key, "absent"), answer.get(key, "absent")
            yield from differences(one, other, apart, f"{at}.{key}", relative)
    elif isinstance(found, list) and isinstance(answer, list) and len(found) == len(answer):
        for index, (one, other) in enumerate(zip(found, answer, strict=True)):
            yield from differences(one, other, apart, f"{at}[{index}]", relative)
    elif isinstance(found, float) and isinstance(answer, float):
        if not math.isclose(found, answer, rel_tol=relative, abs_tol=relative):
            yield at, found, answer
    elif found != answer:
        yield at, found, answer


def record() -> None:
    """Record both anew."""
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        with service(Path(folder), recorded=False) as live:
            fill(live)
            answers = ask(live)
            database = Path(live.settings.catalogue_url.partition("///")[2])
        CATALOGUE.write_bytes(lzma.compress(database.read_bytes()))
    ANSWERS.write_bytes(lzma.compress(json.dumps(answers, sort_keys=True).encode()))
    codes = sorted({code for code, _ in answers.values()})
    print(len(answers), "answers", codes, CATALOGUE.stat().st_size, ANSWERS.stat().st_size)  # noqa: T201


if __name__ == "__main__":
    record()
