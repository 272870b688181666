"""Registered engines and a recorded consistency on a real cluster, with the real coordinator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from stagescope_wire.engines import EngineInfo, Generation, Prompt, Sampling
from stagescope_wire.errors import NotFound
from stagescope_workers.consistency.comparison import EngineComparison
from stagescope_workers.consistency.report import record
from stagescope_workers.consistency.scored import Scored, numbers
from stagescope_workers.consistency.stored import rescore

pytest.importorskip("ray")
from tests.support.cluster import Service, eventually

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def service(address: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    service = Service.start(tmp_path_factory.mktemp("home"), address)
    yield service
    service.stop()


class Scorer:
    """An engine that scores the rows of a comparison as its other side did."""

    info = EngineInfo("scorer", "here", scores=True)

    def __init__(self, found: EngineComparison) -> None:
        self._rows = iter(found.rows)

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling | None = None
    ) -> list[Generation]:
        raise AssertionError("nothing is sampled")

    def score(self, rows: Sequence[Sequence[int]]) -> list[tuple[float, ...]]:
        # A prompt of three tokens stands before each answer.
        return [(0.0, 0.0, 0.0, *next(self._rows).p) for _ in rows]

    def close(self) -> None:
        pass


def comparison() -> EngineComparison:
    drawn = np.random.default_rng(0)
    rows = []
    for index in range(6):
        p = -drawn.exponential(2.0, 12).astype(np.float32).astype(float)
        q = (p + drawn.normal(0, 0.01, 12)).astype(np.float32).astype(float)
        rows.append(Scored(str(index), (1, 2, 3), tuple(range(12)), q, p))
    return EngineComparison(
        engine=EngineInfo("vllm", "http://127.0.0.1:9", version="0.33.0"),
        other=EngineInfo("transformers", "/models/m", version="5"),
        sampling=Sampling(temperature=0.7),
        rows=tuple(rows),
        numbers=numbers(rows),
        worst=(),
        checks=(),
        left_out={},
        streams={
            "rollout": {"engine": "vllm", "processed": False, "temperature": 0.7},
            "old": {"engine": "transformers", "temperature": 1.0},
        },
    )


def test_registered_kept_over_a_restart_and_removed(service: Service, tmp_path: Path) -> None:
    with service.session() as session:
        session.add_engine("http://127.0.0.1:9", name="llm", model="m")
        session.add_engine("http://127.0.0.1:9", name="llm", model="m2")
        [row] = session.engines(check=True).to_dicts()
        assert (row["model"], row["state"]) == ("m2", "unreachable")
        assert "operate token" in row["by"]
        service.kill_and_await("coordinator")
        assert session.engines()["name"] == ("llm",)
        session.remove_engine("llm")
        assert len(session.engines()) == 0
        with pytest.raises(NotFound):
            session.remove_engine("llm")


def test_a_comparison_is_a_step_like_any_other(service: Service) -> None:
    found = comparison()
    assert record(found, run="consistency", step=3, timeout=60)
    with service.session() as session:
        metrics = eventually(lambda: session.step(3, run="consistency").metrics())
        for name in ("logprob_abs_diff/mean", "rollout_corr/k3_kl", "counts/tokens"):
            assert metrics[name] == pytest.approx(found.numbers[name], rel=1e-9)
        assert metrics.complete == "complete"
        rollout = metrics.about["streams"]["rollout"]
        assert (rollout["engine"], rollout["temperature"]) == ("vllm", 0.7)
        kept = session.step(3, run="consistency").batch()
        assert kept.rows == 6
        assert kept["rollout_log_probs"].sum() == pytest.approx(
            sum(row.q.sum() for row in found.rows), rel=1e-6
        )
        again = rescore(kept, Scorer(found), "rollout_log_probs")
        assert again.numbers["logprob_abs_diff/mean"] == pytest.approx(
            found.numbers["logprob_abs_diff/mean"], rel=1e-9
        )
        assert [row.prompt for row in again.rows] == [(1, 2, 3)] * 6
        session.add_engine("http://127.0.0.1:9", name="llm")
        assert session.engines()["used_by"] == (["consistency"],)
