from __future__ import annotations

import math
from typing import Any, cast

import numpy as np
import pytest
from tests.support.api import Rank, Service
from tests.support.measure import payload

from stagescope.table import coverage_notes
from stagescope_service.statistics import cell as cells
from stagescope_service.statistics.comparability import examine
from stagescope_service.statistics.mismatch import publish
from stagescope_service.statistics.summarise import summarise
from stagescope_service.statistics.token_batch import TokenBatch
from stagescope_service.views.reading.completeness import gaps
from stagescope_service.views.steps.numbers import slice_rows

LOG_PROB = "actor_compute_log_prob"


def two_ranks(live: Service, **keywords: Any) -> list[Rank]:
    return [Rank(live, rank=rank, host=f"h{rank}", **keywords) for rank in (0, 1)]


def measured(live: Service, step: int = 5, *, close: bool = True) -> list[Rank]:
    """Two ranks hand over four rows each; a later step closes this one."""
    ranks = two_ranks(live)
    for index, rank in enumerate(ranks):
        rank.stage(LOG_PROB, step, payload(seed=index, first_sample=4 * index))
    if close:
        for rank in ranks:
            rank.begin("rollout_generate", step + 1)
    return ranks


def reference() -> dict[str, float]:
    """The published numbers of both ranks' rows in one batch."""
    parts = [payload(seed=index, first_sample=4 * index) for index in (0, 1)]
    tensors = {}
    for name, (dtype, shape, _, _) in parts[0]["tensors"].items():
        buffer = np.concatenate([part["tensors"][name][2] for part in parts])
        tensors[name] = (dtype, (2 * shape[0], shape[1]), buffer, None)
    strings = {"sample_ids": [uid for part in parts for uid in part["strings"]["sample_ids"]]}
    return publish(summarise(TokenBatch.from_tensors(tensors, strings, {})))


def number(value: Any) -> float:
    return float(value)


def test_what_a_step_says_of_its_streams_is_its_own(live: Service) -> None:
    rank = Rank(live)
    metas: list[dict[str, Any]] = [
        {"temperature": 1.0, "engine": "vllm", "streams": {"rollout": {"top_p": 0.9}}},
        {"temperature": 0.7, "engine": "sglang", "streams": {"rollout": {"top_p": 0.8}}},
        {},
    ]
    for step, meta in enumerate(metas, start=5):
        handed = payload(seed=step)
        if step == 6:
            _, shape, values, _ = handed["tensors"]["old_log_probs"]
            handed["tensors"]["old_log_probs"] = ("float64", shape, values.astype(float), None)
        rank.stage(LOG_PROB, step, {**handed, "meta": meta})
    rank.stage(LOG_PROB, 8, {**payload(seed=8), "meta": metas[0]})
    again = {**payload(seed=9, first_sample=8), "meta": metas[1]}
    rank.stage(LOG_PROB, 8, again, microbatch=1)
    rank.begin(LOG_PROB, 9)
    answers = [live.get(f"/steps/{step}/metrics")["streams"]["rollout"] for step in (5, 6, 8)]
    found = [(own.get("temperature"), own.get("engine"), own.get("top_p")) for own in answers]
    assert found == [(1.0, "vllm", 0.9), (0.7, "sglang", 0.8), (None, None, None)]
    for step, dtype in ((5, "float32"), (6, "float64")):
        old = live.get(f"/steps/{step}/metrics")["streams"]["old"]
        assert (old["dtype"], old["dtypes"]) == (dtype, [dtype])


def test_rounds_beyond_the_limit_are_said_beside_the_numbers(live: Service) -> None:
    (rank,) = two_ranks(live)[:1]
    tokens = 8300
    q = -np.random.default_rng(0).exponential(1.0, (1, tokens)).astype(np.float32)
    sent = payload(seed=0)
    sent["strings"] = {"sample_ids": ["a"]}
    sent["tensors"] = {
        name: (str(values.dtype), values.shape, values, None)
        for name, values in {
            "rollout_log_probs": q, "old_log_probs": q * np.float32(1.001),
            "response_mask": np.arange(tokens)[None] % 2,
        }.items()
    }  # fmt: skip
    rank.stage(LOG_PROB, 5, sent)
    rank.begin(LOG_PROB, 6)
    answer = live.get("/steps/5/metrics")
    assert answer["metrics"]["per_round/total_rounds"] == 4096
    assert answer["coverage"]["ignored_tensors"] == ["response_mask"]
    (note,) = coverage_notes(answer["coverage"])
    assert "from 4096 on they count as one, and total_rounds stops there" in note
    page = live.get("/steps/5/rounds", limit=3)
    assert [row["round"] for row in page["rows"]] == [0, 1, 2]
    rest = live.get("/steps/5/rounds", limit=2, cursor=page["next"])
    assert [row["round"] for row in rest["rows"]] == [3, 4]


def test_rows_of_rounds_do_not_merge_all_of_them_each(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {
        "rollout_log_probs": -np.random.default_rng(0).exponential(1.0, (1, 2000)),
        "old_log_probs": -np.random.default_rng(1).exponential(1.0, (1, 2000)),
        "response_mask": np.arange(2000)[None] % 2,
    }
    wire = {name: (str(each.dtype), each.shape, each, None) for name, each in tensors.items()}
    summary = summarise(TokenBatch.from_tensors(wire, {}, {}))
    merges: list[int] = []
    merge = cells.merge

    def counted(rows: Any) -> Any:
        merges.append(len(rows))
        return merge(rows)

    monkeypatch.setattr(cells, "merge", counted)
    rows = slice_rows(summary, examine(summary), "round", 10, 500)
    assert [row["round"] for row in rows] == [*range(10, 510)]
    assert len(merges) <= 2


class TestMetrics:
    @pytest.mark.parametrize("close", [True, False])
    def test_are_those_of_the_unsplit_batch(self, live: Service, close: bool) -> None:
        measured(live, close=close)
        answer = live.get("/steps/5/metrics")
        assert (answer["run"], answer["attempt"], answer["step"]) == ("r", 1, 5)
        assert answer["complete"] == ("complete" if close else "open")
        assert answer["missing"] == []
        assert answer["stage"] == LOG_PROB
        assert answer["role"] == "actor"
        expected = reference()
        assert set(answer["metrics"]) == set(expected)
        for name, value in expected.items():
            assert number(answer["metrics"][name]) == pytest.approx(value, rel=1e-9, nan_ok=True)

    def test_of_a_rank_are_its_own(self, live: Service) -> None:
        measured(live)
        whole = live.get("/steps/5/metrics")
        slices = [live.get("/steps/5/metrics", rank=rank) for rank in (0, 1)]
        assert [part["coverage"]["tokens"] for part in slices] == [44, 44]
        means = [part["metrics"]["logprob_abs_diff/mean"] for part in slices]
        assert whole["metrics"]["logprob_abs_diff/mean"] == pytest.approx(sum(means) / 2)
        assert means[0] != means[1]

    def test_of_a_round_are_its_row(self, live: Service) -> None:
        measured(live)
        rows = live.get("/steps/5/rounds")["rows"]
        for row in rows:
            answer = live.get("/steps/5/metrics", round=row["round"])
            assert answer["round"] == row["round"]
            assert answer["metrics"]["counts/tokens"] == row["tokens"]
            assert answer["metrics"]["rollout_corr/kl"] == row["kl"]
            assert answer["metrics"]["logprob_abs_diff/mean"] == row["abs_diff_mean"]
        assert live.problem(404, "/steps/5/metrics", round=9)["expected"] == "one of 0, 1"

    def test_of_another_stage(self, live: Service) -> None:
        ranks = measured(live, close=False)
        for index, rank in enumerate(ranks):
            rank.stage("actor_update", 5, payload(seed=9 + index, first_sample=4 * index))
        assert live.get("/steps/5/metrics")["stage"] == LOG_PROB
        other = live.get("/steps/5/metrics", stage="actor_update")
        assert other["stage"] == "actor_update"
        assert other["coverage"]["tokens"] == 88
        problem = live.problem(404, "/steps/5/metrics", stage="critic_update")
        assert problem["expected"] == f"one of {LOG_PROB}, actor_update"

    def test_nonfinite_numbers_are_strings(self, live: Service) -> None:
        taken = payload()
        taken["tensors"]["old_log_probs"][2][0, 0] = math.nan
        taken["tensors"]["rollout_log_probs"][2][1, 1] = -math.inf
        rank = Rank(live, world_size=1)
        rank.stage(LOG_PROB, 5, taken)
        answer = live.get("/steps/5/metrics")
        assert answer["nonfinite"]["old"]["nan"] == 1
        assert answer["nonfinite"]["rollout"]["neginf"] == 1
        rows = live.get("/steps/5/tokens", kind="nonfinite")["rows"]
        odd = [(row["p"] == "nan", row["q"] == "-inf") for row in rows]
        assert odd == [(True, False), (False, True)]
        assert all(row["abs_diff"] is None for row in rows)

    def test_without_a_token_are_nan(self, live: Service) -> None:
        taken = payload()
        taken["tensors"]["response_mask"][2][:] = 0
        Rank(live, world_size=1).stage(LOG_PROB, 5, taken)
        answer = live.get("/steps/5/metrics")
        assert answer["metrics"]["rollout_corr/kl"] == "nan"
        assert answer["metrics"]["counts/tokens"] == 0
        assert answer["coverage"]["empty_rows"] == 4

    def test_noise_floor(self, live: Service) -> None:
        taken = payload()
        dtype, shape, old, _ = taken["tensors"]["old_log_probs"]
        taken["tensors"]["recomputed_log_probs"] = (dtype, shape, old + np.float32(1e-4), None)
        rank = Rank(live, world_size=1)
        rank.stage(LOG_PROB, 5, taken)
        before = live.get("/steps/5/metrics")
        assert before["noise_floor"]["logprob_abs_diff/mean"] == pytest.approx(1e-4, rel=0.01)
        rank.begin(LOG_PROB, 6)
        assert live.get("/steps/5/metrics")["noise_floor"] == before["noise_floor"]

    @pytest.mark.parametrize("close", [False, True])
    def test_ids_that_repeat_across_ranks_lose_no_token(self, live: Service, close: bool) -> None:
        ranks = [Rank(live, rank=rank, world_size=8) for rank in range(8)]
        for index, rank in enumerate(ranks):
            rank.stage(LOG_PROB, 5, payload(2 + index % 3, 8 + 2 * index, seed=index))
        for rank in ranks if close else ():
            rank.begin(LOG_PROB, 6)
        sent = sum((2 + index % 3) * (7 + 2 * index) for index in range(8))
        answer = live.get("/steps/5/metrics")
        assert answer["coverage"]["tokens"] == sent
        assert answer["coverage"]["tokens_sent"] == sent
        assert answer["coverage"]["tokens_left_out"] == {}
        assert answer["coverage"]["tokens_unaccounted"] == 0
        assert answer["coverage"]["sequences"] == sum(2 + index % 3 for index in range(8))
        if close:
            assert answer["complete"] == "complete"

    def test_replicas_count_once(self, live: Service) -> None:
        for rank in (0, 1):
            Rank(live, rank=rank, data_rank=0).stage(LOG_PROB, 5, payload())
        answer = live.get("/steps/5/metrics")
        assert answer["coverage"]["tokens"] == 44
        assert answer["coverage"]["duplicates_left_out"] == 44
        assert answer["coverage"]["tokens_sent"] == 88
        assert answer["coverage"]["tokens_left_out"] == {"replica": 44}
        assert answer["coverage"]["tokens_unaccounted"] == 0
        rows = live.get("/steps/5/ranks")["rows"]
        counted = [(row["rank"], row["parts_counted"], row["tokens"]) for row in rows]
        assert counted == [(0, 1, 44), (1, 0, 44)]

    def test_ranks_with_one_data_rank_and_other_rows_are_no_replicas(self, live: Service) -> None:
        ranks = [Rank(live, rank=rank, data_rank=0) for rank in range(3)]
        for rank, tokens in zip(ranks, (12, 9, 12), strict=True):
            handed = {**payload(tokens=tokens, seed=tokens), "strings": {}}
            rank.stage(LOG_PROB, 5, handed)
        for rank in ranks:
            rank.begin(LOG_PROB, 6)
        left_out = live.get("/steps/5/metrics")["coverage"]["tokens_left_out"]
        assert left_out == {"replica": 76}
        (found,) = live.get("/findings", kind="replicas_differ")["rows"]
        assert found["severity"] == "error"
        assert found["message"].endswith(
            "1 ranks are left out as replicas of a rank with the same data_rank, but they "
            "hold other rows: actor 1 has 32 tokens and actor 0 has 44"
        )
        assert [pair["rank"] for pair in found["evidence"]["pairs"]] == [1]

    @pytest.mark.parametrize("late", [False, True], ids=["in order", "late"])
    def test_of_samples_that_a_rank_hands_over_again_the_newest_count(
        self, live: Service, late: bool
    ) -> None:
        """Also where they are split otherwise, and the first ones arrive last."""
        rank = Rank(live)
        newest = payload(seed=1)
        first = payload(seed=1)
        _, shape, values, _ = first["tensors"]["old_log_probs"]
        first["tensors"]["old_log_probs"] = ("float32", shape, values - np.float32(1), None)
        handed = [rank.draft_stage(LOG_PROB, 5, first)]
        for index, rows in enumerate((slice(0, 3), slice(3, 4))):
            piece: Any = {**newest, "strings": {}}
            piece["strings"]["sample_ids"] = newest["strings"]["sample_ids"][rows]
            piece["tensors"] = {
                name: (dtype, (rows.stop - rows.start, shape[1]), buffer[rows], None)
                for name, (dtype, shape, buffer, _) in newest["tensors"].items()
            }
            handed.append(
                rank.draft_stage(LOG_PROB, 5, piece, occurrence=1 - index, microbatch=index)
            )
        for report in reversed(handed) if late else handed:
            live.engine.take_together([report])
        rank.begin(LOG_PROB, 6)
        summary = summarise(TokenBatch.from_tensors(newest["tensors"], newest["strings"], {}))
        answer, expected = live.get("/steps/5/metrics"), publish(summary)
        for name, value in expected.items():
            assert number(answer["metrics"][name]) == pytest.approx(value, nan_ok=True), name
        assert answer["coverage"]["tokens_left_out"] == {"repeated": 44}
        worst = live.get("/steps/5/tokens", limit=3)["rows"]
        assert [row["p"] for row in worst] == summary.worst.p[:3].tolist()
        rounds = live.get("/steps/5/rounds")["rows"]
        assert [row["abs_diff_mean"] for row in rounds] == pytest.approx(
            [expected[f"per_round/round_{i}_abs_diff_mean"] for i in (0, 1)]
        )
        (of_rank,) = live.get("/steps/5/ranks")["rows"]
        assert (of_rank["parts_counted"], of_rank["tokens"]) == (2, 44)
        (found,) = live.get("/findings", kind="replicas_differ")["rows"]
        assert "newest parts count (actor 0: " in found["message"]
        assert "occurrence 1 counts, not occurrence 0" in found["message"]

    def test_ranks_with_different_settings_are_named_and_measured(self, live: Service) -> None:
        chosen: Any = ({"rollout_is": "token", "rollout_is_threshold": 2.0}, {})
        ranks = [Rank(live, rank=at, settings=settings) for at, settings in enumerate(chosen)]
        for at, rank in enumerate(ranks):
            rank.stage(LOG_PROB, 5, payload(seed=at, first_sample=4 * at))
        for rank in ranks:
            rank.begin(LOG_PROB, 6)
        answer = live.get("/steps/5/metrics")
        assert answer["coverage"]["tokens"] == 88
        found = [number(answer["metrics"][name]) for name in reference()]
        assert found == pytest.approx([*reference().values()], nan_ok=True)
        (row,) = live.get("/findings", kind="settings_differ")["rows"]
        named = "(actor rank 0: rollout_is token, threshold 2.0; actor rank 1: no rollout_is)"
        assert named in row["message"]

    def test_a_late_payload_changes_a_remembered_answer(self, live: Service) -> None:
        ranks = two_ranks(live)
        ranks[0].stage(LOG_PROB, 5, payload())
        for rank in ranks:
            rank.begin(LOG_PROB, 6)
        first = live.get("/steps/5/metrics")
        assert (first["complete"], first["coverage"]["tokens"]) == ("partial", 44)
        (missing,) = first["missing"]
        assert (missing["role"], missing["rank"], missing["stage"]) == ("actor", 1, LOG_PROB)
        ranks[1].stage(LOG_PROB, 5, payload(seed=1, first_sample=4))
        second = live.get("/steps/5/metrics")
        assert (second["complete"], second["coverage"]["tokens"]) == ("complete", 88)

    def test_before_anything_was_measured(self, live: Service) -> None:
        Rank(live).begin(LOG_PROB, 5)
        problem = live.problem(404, "/steps/5/metrics")
        assert "both streams" in problem["wrong"]
        assert "rollout_log_probs" in problem["expected"]

    def test_the_error_lists_what_was_recorded_instead(self, live: Service) -> None:
        handed = payload()
        handed["tensors"]["rollout_logprobs"] = handed["tensors"].pop("rollout_log_probs")
        rank = Rank(live)
        declared = {name: ["float32", [4, 12], None] for name in handed["tensors"]}
        announced = {"tensors": declared, "bytes": 1, "meta": {}}
        rank.begin(LOG_PROB, 5)
        rank.say("end", handed, stage=LOG_PROB, step=5, payload=announced)
        problem = live.problem(404, "/steps/5/metrics")
        assert f"it recorded in {LOG_PROB}: old_log_probs, response_mask" in problem["wrong"]
        assert problem["reason"] == "not_measured"
        assert "rollout_logprobs seems to mean rollout_log_probs" in problem["advice"]


class TestRounds:
    @pytest.mark.parametrize("params", [{}, {"rank": 1}])
    def test_add_up_to_the_step(self, live: Service, params: dict[str, int]) -> None:
        measured(live)
        answer = live.get("/steps/5/rounds", **params)
        rows, whole = answer["rows"], answer["whole"]
        assert len(rows) == 2
        for name in ("tokens", "masked_tokens", "over_0.1", "over_0.5", "nonfinite"):
            assert sum(row[name] for row in rows) == whole[name]
        for name in ("abs_diff_sum", "diff_sum"):
            assert sum(row[name] for row in rows) == pytest.approx(whole[name], rel=1e-12)
        assert max(row["abs_diff_max"] for row in rows) == whole["abs_diff_max"]
        published = live.get("/steps/5/metrics", **params)["metrics"]
        assert whole["tokens"] == published["counts/tokens"]
        assert whole["abs_diff_mean"] == pytest.approx(published["logprob_abs_diff/mean"])
        for row in rows:
            name = f"per_round/round_{row['round']}_abs_diff_mean"
            assert row["abs_diff_mean"] == published[name]

    def test_by_turn_and_staleness(self, live: Service) -> None:
        taken = payload()
        shape = taken["tensors"]["response_mask"][1]
        turns = np.tile(np.arange(shape[1]) // 4, (shape[0], 1))
        taken["tensors"]["turn_ids"] = ("int64", shape, turns, None)
        taken["tensors"]["versions"] = ("int64", (shape[0],), np.array([3, 4, 4, 2]), None)
        taken["meta"] = {"policy_version": 4}
        Rank(live, world_size=1).stage(LOG_PROB, 5, taken)
        turn_rows = live.get("/steps/5/rounds", by="turn")["rows"]
        assert [row["turn"] for row in turn_rows] == [0, 1, 2]
        ages = live.get("/steps/5/rounds", by="staleness")["rows"]
        assert {row["staleness"]: row["tokens"] for row in ages} == {0: 22, 1: 11, 2: 11}
        assert live.problem(422, "/steps/5/rounds", by="moon")["code"] == "invalid_input"


class TestRanks:
    def test_say_where_they_ran(self, live: Service) -> None:
        for rank in (0, 1):
            layout = {"host": f"h{rank}", "dp_rank": rank, "dp_size": 2}
            handed = payload(seed=rank, first_sample=4 * rank)
            Rank(live, rank=rank, layout=layout).stage(LOG_PROB, 5, handed)
        rows = live.get("/steps/5/ranks")["rows"]
        places = [(row["rank"], row["host"], row["dp_rank"]) for row in rows]
        assert places == [(0, "h0", 0), (1, "h1", 1)]
        assert sum(row["tokens"] for row in rows) == 88
        one = live.get("/steps/5/ranks", rank=1)["rows"]
        assert [row["rank"] for row in one] == [1]
        problem = live.problem(404, "/steps/5/ranks", rank=7)
        assert problem["expected"] == "one of 0, 1"
        problem = live.problem(404, "/steps/5/metrics", rank=7)
        assert problem["expected"] == "one of 0, 1"


class TestTokens:
    def test_worst_first_with_their_places(self, live: Service) -> None:
        measured(live)
        answer = live.get("/steps/5/tokens", limit=1000)
        rows = answer["rows"]
        assert len(rows) == 64
        sizes = [row["abs_diff"] for row in rows]
        assert sizes == sorted(sizes, reverse=True)
        assert sizes[0] == live.get("/steps/5/metrics")["metrics"]["logprob_abs_diff/max"]
        for row in rows:
            sample = int(row["sample_uid"].removeprefix("sample-"))
            taken = payload(seed=sample // 4)["tensors"]
            at = (sample % 4, row["position"])
            assert row["rank"] == sample // 4
            assert row["p"] == float(taken["old_log_probs"][2][at])
            assert row["q"] == float(taken["rollout_log_probs"][2][at])
            assert row["token_id"] == int(taken["responses"][2][at])
            assert row["round"] == (0 if row["position"] < 6 else 1)

    def test_filters(self, live: Service) -> None:
        measured(live)
        problem = live.problem(404, "/steps/5/tokens", round=99)
        assert problem["wrong"] == "there is no round 99"
        assert problem["expected"].startswith("one of 0")
        own = live.get("/steps/5/tokens", rank=1, round=0, limit=1000)["rows"]
        assert len(own) == 24
        assert {(row["rank"], row["round"]) for row in own} == {(1, 0)}


class TestStages:
    def test_missing_ranks_have_their_time(self, live: Service) -> None:
        ranks = two_ranks(live, world_size=3)
        ranks[0].stage("actor_update", 5, seconds=2.5)
        ranks[1].clock += 1.0
        ranks[1].begin("actor_update", 5)
        live.now = ranks[1].clock + 10.0
        answer = live.get("/steps/5/stages")
        assert answer["complete"] == "open"
        assert answer["expected"] == {"actor": {"actor_update": [0, 1, 2]}}
        begun = ranks[0].clock - 2.5
        missing = {"role": "actor", "stage": "actor_update"}
        assert answer["missing"] == [
            {**missing, "rank": 1, "status": "open", "since": ranks[1].clock},
            {**missing, "rank": 2, "status": "not begun", "since": begun},
        ]
        rows = answer["rows"]
        statuses = {row["rank"]: row["status"] for row in rows}
        assert statuses == {0: "ok", 1: "open", 2: "not begun"}
        assert rows[0]["seconds"] == 2.5
        assert rows[1]["seconds"] is None
        assert rows[1]["open_seconds"] == 10.0
        assert rows[2]["waited_seconds"] == live.now - begun

    def test_without_world_size_is_unknown(self, live: Service) -> None:
        rank = Rank(live, world_size=None)
        rank.stage("actor_update", 5)
        rank.begin("actor_update", 6)
        assert live.get("/steps/5/stages")["complete"] == "unknown"

    def test_filters(self, live: Service) -> None:
        ranks = two_ranks(live)
        for rank in ranks:
            rank.stage("actor_update", 5)
            rank.stage("weight_sync", 5)
        rows = live.get("/steps/5/stages", stage="weight_sync", rank=1)["rows"]
        assert [(row["stage"], row["rank"]) for row in rows] == [("weight_sync", 1)]
        problem = live.problem(404, "/steps/5/stages", stage="weight_sink")
        assert problem["expected"] == "one of actor_update, weight_sync"
        problem = live.problem(404, "/steps/5/stages", role="critic")
        assert problem["expected"] == "one of actor"


class TestScalars:
    def test_filters(self, live: Service) -> None:
        for index, rank in enumerate(two_ranks(live)):
            rank.stage("actor_update", 5, scalars={"loss": 0.5 + index, "grad_norm": math.inf})
        one = live.get("/steps/5/scalars", name="loss", rank=0)["rows"]
        assert [row["value"] for row in one] == [0.5]
        problem = live.problem(404, "/steps/5/scalars", name="los")
        assert problem["expected"] == "one of grad_norm, loss"


class TestDumps:
    def test_with_place_size_and_state(self, live: Service) -> None:
        rank = Rank(live, world_size=1)
        rank.begin("actor_update", 5)
        said = {
            "stage": "actor_update", "capture_id": "c1", "path": "/data/r/a1/step_5",
            "state": "complete", "bytes": 1234, "files": 3, "seconds": 0.5, "task": "statistics",
            "level": "L1", "overrides": ["rank"],
        }  # fmt: skip
        rank.say("dump", step=5, **said)
        row = live.get("/steps/5/dumps")["rows"][0]
        assert said.items() <= row.items()
        assert live.get("/steps/5/dumps", rank=0)["rows"] == [row]
        assert live.problem(404, "/steps/5/dumps", rank=3)["expected"] == "one of 0"


@pytest.mark.parametrize(
    ("mark", "text"),
    [
        (None, "no numbers yet: they are being aggregated"),  # read before its payload was
        (7, "no numbers: no rank handed over both streams"),
    ],
)
def test_a_step_that_was_never_aggregated_does_not_lack_streams(
    live: Service, mark: int | None, text: str
) -> None:
    [rank] = [Rank(live, rank=0)]
    rank.stage(LOG_PROB, 5, payload(seed=1))
    rank.begin(LOG_PROB, 6)
    catalogue = live.catalogue
    [row] = [each for each in catalogue.steps(run="r") if each["step"] == 5]
    before = {**row, "has_summary": False, "parts_mark": mark, "summary_mark": mark}
    assert gaps(catalogue, [cast("Any", before)]) == {(row["attempt_id"], 5): text}


def test_a_step_has_its_neighbours_and_its_numbers_or_why_it_has_none(live: Service) -> None:
    measured(live)
    found = live.get("/steps/5")
    assert found["numbers"] == live.get("/steps/5/metrics")
    assert found["unmeasured"] is None
    assert (found["earlier"], found["later"]) == (None, {"step": 6, "attempt": 1})
    after = live.get("/steps/6")
    problem = live.problem(404, "/steps/6/metrics")
    assert after["numbers"] is None
    assert after["unmeasured"] == {key: problem[key] for key in ("wrong", "expected", "advice")}
    assert after["earlier"] == {"step": 5, "attempt": 1}
    # A slice without numbers is no error either.
    assert "7" in live.get("/steps/5", role="actor", rank=7)["unmeasured"]["wrong"]
    assert live.get("/steps/5", round=0)["numbers"]["round"] == 0


def test_the_neighbours_of_a_step_are_current_or_of_the_requested_attempt(live: Service) -> None:
    def train(key: str, steps: range, **resumed: Any) -> None:
        rank = Rank(live, key=key, world_size=1, **resumed)
        for step in steps:
            rank.stage("actor_update", step)

    train("a1", range(1, 5))
    train("a2", range(3, 7), resumed_from_step=2)

    def beside(step: int, **asked: int) -> list[tuple[int, int] | None]:
        found = live.get(f"/steps/{step}", **asked)
        return [each and (each["step"], each["attempt"])
                for each in (found["earlier"], found["later"])]  # fmt: skip

    assert live.get("/steps/3")["repeats"] == [1]
    assert [live.get("/steps/3", attempt=1)["repeats"], live.get("/steps/5")["repeats"]] == [[], []]
    assert beside(2) == [(1, 1), (3, 2)]
    assert beside(3) == [(2, 1), (4, 2)]
    assert beside(3, attempt=1) == [(2, 1), (4, 1)]
    assert beside(4, attempt=1) == [(3, 1), (5, 2)]
    assert beside(6) == [(5, 2), None]
