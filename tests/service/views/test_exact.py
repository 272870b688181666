from __future__ import annotations

import textwrap
from typing import Any

import numpy as np
import pytest
from tests.support.api import Rank, Service
from tests.support.measure import Handed, payload
from tests.support.stores import write

from stagescope.series import Exact
from stagescope_service.coordinator.aggregation import assembly
from stagescope_service.coordinator.rules.firings import DueFiring, finding_of
from stagescope_service.core.findings import finding
from stagescope_service.rules.document import read_yaml
from stagescope_service.rules.replay import replay
from stagescope_service.store.contract import Put
from stagescope_service.store.tables import StepRow

LOG_PROB = "actor_compute_log_prob"
TWO = {"rollout_log_probs": "engine", "old_log_probs": "trainer"}


def handed(step: int, rank: int, *, producers: object = None, broken: bool = False) -> Handed:
    """A payload of equal streams, of which one token may be off by a bit."""
    sent = payload(seed=10 * step + rank, noise=0.0, first_sample=4 * rank)
    if broken:
        p = sent["tensors"]["old_log_probs"][2]
        p[2, 7] = np.nextafter(p[2, 7], np.float32(0))
        p[3, 1] = np.nextafter(p[3, 1], np.float32(0))
    sent["meta"] = {} if producers is None else {"producers": producers}
    return sent


def train(live: Service, steps: int, broken: int | None = None, **hello: Any) -> list[Rank]:
    ranks = [Rank(live, rank=rank, **hello) for rank in (0, 1)]
    for step in range(1, steps + 1):
        for index, rank in enumerate(ranks):
            bad = broken == step and index == 1
            rank.stage(LOG_PROB, step, handed(step, index, producers=TWO, broken=bad))
    for rank in ranks:
        rank.begin("rollout_generate", steps + 1)
    return ranks


def test_two_producers_that_agree_are_exact(live: Service) -> None:
    train(live, 2)
    answer = live.get("/steps/1/metrics")
    assert (answer["comparable"], answer["cause"]) == ("exact", None)
    reported = next(item for item in answer["comparability"] if item["code"] == "bitwise_equal")
    assert "proved on 88 tokens" in reported["text"]
    assert "old: trainer; rollout: engine" in reported["text"]
    for path in ("/steps/1/rounds", "/steps/1/ranks"):
        found = live.get(path)
        assert found["comparable"] == "exact"
        assert {row["comparable"] for row in found["rows"]} == {"exact"}


def test_one_producer_or_an_unknown_one_measures_nothing(live: Service) -> None:
    rank = Rank(live, world_size=1)
    same = {"rollout": "engine", "old": "engine"}
    answer: Any = None
    for step, producers in enumerate((same, {"rollout": "engine"}, None), start=1):
        rank.stage(LOG_PROB, step, handed(step, 0, producers=producers))
        answer = live.get(f"/steps/{step}/metrics")
        assert answer["comparable"] == "not measured"
        assert answer["cause"] == "bitwise_equal"
    assert "is not reported" in answer["comparability"][0]["text"]


def test_the_copies_of_one_rank_are_told_from_what_the_others_measured(live: Service) -> None:
    ranks = [Rank(live, rank=rank) for rank in (0, 1)]
    same = {"rollout": "trainer", "old": "trainer"}
    for index, rank in enumerate(ranks):
        rank.stage(LOG_PROB, 1, handed(1, index, producers=TWO if index else same))
        rank.stage(LOG_PROB, 2, handed(2, index, producers=TWO if index else None))
    answer = live.get("/steps/1/metrics")
    text = answer["comparability"][0]["text"]
    assert answer["comparable"] == "not measured"
    assert "both come from trainer in 50.0% of them (44 tokens: actor 0)" in text
    assert "exact, proved on 44 tokens" in text
    rows = live.get("/steps/1/ranks")["rows"]
    assert [row["comparable"] for row in rows] == ["not measured", "exact"]
    unknown = live.get("/steps/2/metrics")
    assert unknown["comparable"] == "not measured"  # one rank's producer is not known


def test_exact_says_since_when_not_and_where(live: Service) -> None:
    train(live, 5, broken=4)
    found = Exact(live.get("/exact"))
    assert found.first is not None
    location = {name: found.first[name] for name in ("step", "sample_uid", "round", "position")}
    assert location == {"step": 4, "sample_uid": "sample-6", "round": 1, "position": 7}
    assert found.text.startswith(
        "steps 1-3 exact (proved on 264 tokens); step 4 first differs: sample sample-6 of actor "
        "rank 1, round 1, token 7"
    )
    assert found.text.endswith("of the 1 step since then 0 differ; exact again: step 5")
    assert [(row["verdict"], row["steps"], row["unequal"]) for row in found["rows"]] == [
        ("exact", 3, 0), ("differs", 1, 2), ("exact", 1, 0)
    ]  # fmt: skip
    assert not found.is_exact
    assert "first differs" in repr(found)
    assert "not_exact" not in findings(live, 4)  # the run does not expect equal streams


def test_exact_reads_the_summary_of_the_first_step_that_differs_alone(
    live: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(live, 5, broken=4)
    reading = live.catalogue.step
    read: list[int] = []

    def counted(attempt_id: int, step: int) -> StepRow | None:
        read.append(step)
        return reading(attempt_id, step)

    monkeypatch.setattr(live.catalogue, "step", counted)
    live.get("/exact")
    assert read == [4]


@pytest.mark.parametrize("both", [False, True], ids=["one", "both"])
def test_a_token_that_is_no_number_is_not_exact(live: Service, both: bool) -> None:
    ranks = [Rank(live, rank=rank, settings={"expect": "bitwise"}) for rank in (0, 1)]
    for step in (1, 2):
        for index, rank in enumerate(ranks):
            sent = handed(step, index, producers=TWO)
            if step == 2 and index == 1:
                sent["tensors"]["rollout_log_probs"][2][2, 7] = np.nan
                sent["tensors"]["old_log_probs"][2][2, 7] = np.nan if both else -1.0
            rank.stage(LOG_PROB, step, sent)
    for rank in ranks:
        rank.begin("rollout_generate", 3)
    found = Exact(live.get("/exact"))
    verdicts = [(row["verdict"], row["unequal"], row["non_finite"]) for row in found["rows"]]
    answer = live.get("/steps/2/metrics")
    assert answer["comparable"] == ("not measured" if both else "suspect")
    by_rank = [row["comparable"] for row in live.get("/steps/2/ranks")["rows"]]
    assert by_rank == ["exact", answer["comparable"]]
    series = live.get("/series", metric="training/rollout_probs_diff_mean")
    assert series["comparable"][:2] == by_rank
    reported = findings(live, 2)
    if both:
        texts = {check["code"]: check["text"] for check in answer["comparability"]}
        assert answer["cause"] is None
        assert texts["bitwise_equal"].endswith(
            "proved on 87 tokens; 1 more is finite in neither stream, so it was not measured"
        )
        assert verdicts == [("exact", 0, 0), ("not measured", 0, 1)]
        assert found.text.endswith("(1 token is finite in neither stream; the others are equal)")
        assert "not_exact" not in reported
        return
    assert verdicts == [("exact", 0, 0), ("differs", 1, 1)]
    assert found.first is not None
    assert (found.first["role"], found.first["rank"], found.first["position"]) == ("actor", 1, 7)
    assert "sample-6 of actor rank 1, round 1, token 7: old -1.0, rollout nan" in found.text
    assert "sample-6 of actor rank 1, round 1, token 7" in reported["not_exact"]["message"]
    assert "1 of 88 tokens" in reported["not_exact"]["message"]


def test_a_copy_with_a_value_that_one_stream_lacks_differs_in_every_answer(live: Service) -> None:
    rank = Rank(live, world_size=1)
    sent = handed(1, 0)
    set_tokens(sent, (2, 7), np.nan, -1.0)
    rank.stage(LOG_PROB, 1, sent)
    rank.begin(LOG_PROB, 2)
    assert [row["verdict"] for row in live.get("/exact")["rows"]] == ["differs"]
    answer = live.get("/steps/1/metrics")
    assert (answer["comparable"], answer["cause"]) == ("suspect", "coverage")


def bitwise(live: Service, *ranks: Handed) -> dict[str, Any]:
    """Hand over a step of a run that expects no difference; return its findings."""
    for index, sent in enumerate(ranks):
        rank = Rank(live, rank=index, settings={"expect": "bitwise"})
        rank.stage(LOG_PROB, 1, sent)
        rank.begin(LOG_PROB, 2)
    return findings(live, 1)


def set_tokens(sent: Handed, at: Any, p: float, q: float) -> None:
    sent["tensors"]["old_log_probs"][2][at] = p
    sent["tensors"]["rollout_log_probs"][2][at] = q


def long(step: int) -> Handed:
    """Equal streams of two producers, of more tokens than are kept."""
    sent = payload(4, 100, seed=step, noise=0.0)
    sent["meta"] = {"producers": TWO}
    return sent


def test_a_difference_behind_all_kept_tokens_is_a_finding(live: Service) -> None:
    sent = long(1)
    set_tokens(sent, 0, np.nan, np.nan)  # 99 tokens, of which 64 are kept
    set_tokens(sent, (2, 7), -1.0, np.nan)
    reported = bitwise(live, sent)["not_exact"]
    found = Exact(live.get("/exact"))
    assert "differ in 1 of 396 tokens" in reported["message"]
    assert reported["message"].endswith("none to: in a token that was not kept")
    assert reported["evidence"] == {"unequal": 1}
    assert found.text == "step 1 first differs: in a token that was not kept"


@pytest.mark.parametrize(
    ("row", "is_first"), [(0, True), (3, False)], ids=["before the kept", "behind them"]
)
def test_a_token_is_the_first_only_where_none_before_it_may_differ(
    live: Service, row: int, is_first: bool
) -> None:
    sent = long(1)
    set_tokens(sent, 1, np.nan, np.nan)
    set_tokens(sent, (2, 7), -1.0, np.nan)
    set_tokens(sent, (row, 9), -1.0, -2.0)
    reported = bitwise(live, sent)["not_exact"]
    found = Exact(live.get("/exact"))
    assert found.first is not None
    location = found.first["sample_uid"], found.first["position"], found.first["is_first"]
    assert location == (f"sample-{row}", 9, is_first)
    assert (reported["evidence"]["is_first"], reported["evidence"]["unequal"]) == (is_first, 2)
    assert ("first in sample" in reported["message"]) == is_first
    assert ("such as in sample" in reported["message"]) != is_first
    for text in (reported["message"], found.text):
        assert ("one before it may differ that was not kept" in text) != is_first


def test_the_first_token_is_the_first_by_sample_not_by_rank(live: Service) -> None:
    ranks = [handed(1, 1 - index, producers=TWO) for index in (0, 1)]  # rank 1 has sample-0
    set_tokens(ranks[0], (2, 7), -1.0, -2.0)
    set_tokens(ranks[1], (3, 9), -1.0, np.nan)
    reported = bitwise(live, *ranks)["not_exact"]
    location = {name: reported["evidence"][name] for name in ("sample_uid", "rank", "is_first")}
    assert location == {"sample_uid": "sample-3", "rank": 1, "is_first": True}


def test_every_reason_why_a_step_is_not_measured_is_answered(live: Service) -> None:
    rank = Rank(live, world_size=1)
    plain, copy, odd, flat = (handed(step, 0) for step in range(1, 5))
    for sent in (odd, flat):
        sent["meta"] = {"producers": TWO}
    for sent in (copy, odd):
        set_tokens(sent, (2, 7), np.nan, np.nan)
    set_tokens(flat, ..., -0.5, -0.5)
    nothing = handed(5, 0, producers=TWO)
    set_tokens(nothing, ..., np.nan, np.nan)
    for step, sent in enumerate((plain, copy, odd, flat, nothing), start=1):
        rank.stage(LOG_PROB, step, sent)
    rank.begin(LOG_PROB, 6)
    rows = live.get("/exact")["rows"]
    one = "equal, and one stream is a copy, or its producer is unknown; 1 token is"
    assert [(row["from_step"], row["to_step"], row["reason"]) for row in rows] == [
        (1, 2, f"{one} finite in neither stream"),
        (3, 3, "1 token is finite in neither stream; the others are equal"),
        (4, 4, "equal, and suspect: the comparability in the step's metrics has the reason"),
        (5, 5, "no token counts; 44 tokens are finite in neither stream"),
    ]
    assert {row["verdict"] for row in rows} == {"not measured"}
    text = live.get("/exact")["text"]
    assert all(row["reason"] in text for row in rows)


def findings(live: Service, step: int) -> dict[str, Any]:
    attempt = live.catalogue.find_attempt("r")
    assert attempt is not None
    parts = assembly.begin(live.catalogue, attempt["attempt_id"], step)
    return {
        put.row["kind"]: put.row
        for put in assembly.rows_of(parts, "r")
        if isinstance(put, Put) and put.table == "findings"
    }


def test_the_first_unequal_token_of_a_run_that_expects_none_is_a_finding(live: Service) -> None:
    train(live, 2, broken=2, settings={"expect": "bitwise"})
    assert "not_exact" not in findings(live, 1)
    found = findings(live, 2)["not_exact"]
    assert found["severity"] == "error"
    assert "2 of 88 tokens" in found["message"]
    evidence = found["evidence"]
    assert (evidence["sample_uid"], evidence["round"], evidence["position"]) == ("sample-6", 1, 7)
    assert evidence["rank"] == 1


def assert_told_beside_the_healthy_rank(live: Service) -> None:
    """Of rank 0 alone nothing is wrong; its step is suspect in every answer and every row."""
    for path in ("metrics", "rounds", "ranks", "tokens"):
        answer = live.get(f"/steps/1/{path}", rank=0)
        assert (answer["step_comparable"], answer["step_cause"]) == ("suspect", "shifted"), path
        if path != "ranks":  # of which the answer's own verdict is the step's
            assert (answer["comparable"], answer["cause"]) == ("comparable", None), path
        if path in ("rounds", "ranks"):
            assert {row["comparable"] for row in answer["rows"]} == {"comparable"}, path
            assert {row["step_comparable"] for row in answer["rows"]} == {"suspect"}, path
    assert live.get("/steps/1/rounds", rank=0)["whole"]["step_comparable"] == "suspect"
    for by in ("rank", "round"):
        answer = live.get("/series", metric="logprob_abs_diff/mean", by=by)
        assert answer["comparable"][0] == "suspect"


def test_few_tokens_are_unknown_in_every_answer(live: Service) -> None:
    """Of 44 tokens half of the checks are not made; that is neither fine nor an alarm."""
    rank = Rank(live, world_size=1)
    rank.stage(LOG_PROB, 1, payload(noise=0.01))
    rank.begin(LOG_PROB, 2)
    for path in ("metrics", "rounds", "ranks", "tokens"):
        answer = live.get(f"/steps/1/{path}")
        assert (answer["comparable"], answer["cause"]) == ("unknown", None), path
        texts = {each["code"]: each["text"] for each in answer["comparability"]}
        assert texts["temperature"] == "not checked: it needs 128 tokens, and 44 counted"
    for name in ("distribution", "rounds", "anatomy"):
        assert "unknown: " in live.get(f"/figures/{name}", step=1)["note"], name
    assert "can be compared is unknown in step 1" in live.get("/figures/rank-steps")["note"]
    text = live.read.get("/metrics").text
    assert 'stagescope_step_comparable{cause="",run="r",verdict="unknown"} 0.0' in text
    verdicts = {
        row["rule"]: row["verdict"] for row in live.get("/runs/r/diagnosis", limit=200)["rows"]
    }
    assert verdicts["sampling_differs"] == verdicts["streams_unrelated"] == "not measured"
    assert verdicts["streams_shifted"] == "not found"


def test_a_shifted_rank_is_in_every_answer(live: Service) -> None:
    ranks = [Rank(live, rank=rank) for rank in (0, 1)]
    for index, rank in enumerate(ranks):
        sent = payload(8, 40, seed=index, noise=0.01, first_sample=8 * index)
        sent["strings"]["prompt_hashes"] = ["math:1"] * 8
        if index:
            dtype, shape, q, _ = sent["tensors"]["rollout_log_probs"]
            shifted = np.roll(q, 1, axis=1)
            sent["tensors"]["rollout_log_probs"] = (dtype, shape, shifted, None)
        rank.stage(LOG_PROB, 1, sent)
        rank.begin(LOG_PROB, 2)
    for path in ("metrics", "rounds", "ranks", "tokens"):
        answer = live.get(f"/steps/1/{path}")
        assert (answer["comparable"], answer["cause"]) == ("suspect", "shifted"), path
        assert "actor 1" in str(answer["comparability"]), path
        assert (answer["step_comparable"], answer["step_cause"]) == ("suspect", "shifted"), path
    for path in ("anatomy", "samples"):
        answer = live.get(f"/steps/1/{path}")
        assert (answer["comparable"], answer["cause"]) == ("suspect", "shifted"), path
    for name in ("distribution", "rounds", "rank-rounds", "anatomy"):
        assert "suspect" in live.get(f"/figures/{name}", step=1)["note"], name
    for name in ("rank-steps", "offenders"):
        assert "suspect in step 1" in live.get(f"/figures/{name}")["note"], name
    rows = live.get("/steps/1/ranks")["rows"]
    assert [row["comparable"] for row in rows] == ["comparable", "suspect"]
    assert {row["step_comparable"] for row in rows} == {"suspect"}
    assert_told_beside_the_healthy_rank(live)
    text = live.read.get("/metrics").text
    assert 'stagescope_step_comparable{cause="shifted",run="r",verdict="suspect"} 0.0' in text
    assert 'metric="calibration/z"' in text
    found = findings(live, 1)
    assert "streams_shifted" in found
    # What a rule says of these streams follows from it, and stands behind it.
    where: dict[str, Any] = {
        "run": "r",
        "attempt_id": 1,
        "step": 1,
        "stage": LOG_PROB,
        "role": "actor",
        "rank": 1,
    }
    write(live.store, finding("trigger_pearson", "below 0.9", wall=1.0, **where))
    kinds = [row["kind"] for row in live.get("/findings/groups")["rows"]]
    assert kinds.index("streams_shifted") < kinds.index("trigger_pearson")


def test_firings_of_streams_that_differ_for_other_reasons_are_groups_of_their_own(
    live: Service,
) -> None:
    Rank(live).begin(LOG_PROB, 1)
    for step, name in enumerate(("shifted", "shifted", "tempered")):
        write(
            live.store,
            finding(
                "trigger_pearson", f"{step} below 0.9", run="r", attempt_id=1, step=step, wall=1.0,
                evidence={"metric": "pearson", "cause": {"name": name, "text": "why"}},
                advice=f"explain first why ({name})",
            ),
        )  # fmt: skip
    groups = live.get("/findings/groups", only="trigger_*")["rows"]
    assert {(row["first_step"], row["findings"]): row["advice"] for row in groups} == {
        (0, 2): "explain first why (shifted)",
        (2, 1): "explain first why (tempered)",
    }


def test_each_rank_has_its_own_cause_in_the_findings(live: Service) -> None:
    ranks = [Rank(live, rank=rank, world_size=4) for rank in range(4)]
    for index, rank in enumerate(ranks):
        sent = payload(4, 24, seed=index, noise=0.01, first_sample=4 * index)
        dtype, shape, q, _ = sent["tensors"]["rollout_log_probs"]
        if index == 2:
            q = q.copy()
            q[1, 3] = np.nan
        elif index == 3:
            q = np.roll(q, 1, axis=1)
        sent["tensors"]["rollout_log_probs"] = (dtype, shape, q, None)
        rank.stage(LOG_PROB, 1, sent)
        rank.begin(LOG_PROB, 2)
    causes = [row["cause"] for row in live.get("/steps/1/ranks")["rows"]]
    assert causes == [None, None, "coverage", "shifted"]
    found = findings(live, 1)
    assert {kind for kind in found if kind.startswith("streams_")} == {
        "streams_coverage", "streams_shifted"
    }  # fmt: skip
    assert "in 1 of 4 ranks (actor 3)" in found["streams_shifted"]["message"]
    assert "logits at t - 1 score token t" in found["streams_shifted"]["advice"]
    assert list(map(tuple, found["streams_shifted"]["evidence"]["ranks"])) == [("actor", 3)]
    rules = """
    rules:
      - {name: pearson, metric: training/rollout_actor_probs_pearson_corr, by: rank,
         when: {"<": 0.9}, actions: {finding: {severity: warning, advice: compare weights}}}
    """
    parsed = read_yaml(textwrap.dedent(rules))
    (fired,), _ = replay(live.catalogue, "r", parsed, most=10)
    assert (fired["rank"], fired["evidence"]["cause"]["name"]) == (3, "shifted")
    (put,) = finding_of(DueFiring(parsed.rules[0], fired))
    advice = put.row["advice"]
    assert advice.startswith(
        "explain first why the streams cannot be compared (shifted, on actor rank 3)"
    )
    assert "1 token early" in advice or "1 token late" in advice
    assert advice.endswith("once that is fixed: compare weights")


def test_a_resumed_run_is_judged_over_the_attempts_in_force(live: Service) -> None:
    again: dict[str, Any] = {"key": "a2", "start": 2_000.0, "resumed_from_step": 4}
    for steps, hello in ((range(1, 7), {"key": "a1", "start": 1_000.0}), (range(5, 8), again)):
        rank = Rank(live, world_size=1, **hello)
        for step in steps:
            bad = step >= 4 and hello is not again
            rank.stage(LOG_PROB, step, handed(step, 0, producers=TWO, broken=bad))
        rank.begin("rollout_generate", steps[-1] + 1)
    found = Exact(live.get("/exact"))
    assert found.first is not None
    assert (found.first["step"], found.first["attempt"], found["attempt"]) == (4, 1, None)
    assert [(row["from_step"], row["to_step"], row["attempt"], row["verdict"])
            for row in found["rows"]] == [
        (1, 3, 1, "exact"), (4, 4, 1, "differs"), (5, 7, 2, "exact")
    ]  # fmt: skip
    assert "; step 4 of attempt 1 first differs" in found.text
    assert Exact(live.get("/exact", attempt=2)).is_exact
    assert Exact(live.get("/exact", attempt=1))["rows"][-1]["to_step"] == 6


def test_the_metrics_of_a_round_are_judged_by_its_own_tokens(live: Service) -> None:
    """Of two rounds the second one alone is shifted."""
    rank = Rank(live, world_size=1)
    tensors = (sent := payload(8, 80, noise=0.01))["tensors"]
    dtype, shape, q, _ = tensors["rollout_log_probs"]
    q[:, 40:] = np.roll(q[:, 40:], 1, axis=1)
    tensors["rollout_log_probs"] = (dtype, shape, q, None)
    tensors["round_ids"] = ("int64", shape, np.repeat([[0] * 40 + [1] * 40], 8, axis=0), None)
    rank.stage(LOG_PROB, 1, sent)
    rank.begin(LOG_PROB, 2)
    rows = live.get("/steps/1/rounds")["rows"]
    assert [(row["comparable"], row["cause"]) for row in rows] == [
        ("comparable", None),
        ("suspect", "shifted"),
    ]
    for row in rows:
        answer = live.get("/steps/1/metrics", round=row["round"])
        assert (answer["comparable"], answer["cause"]) == (row["comparable"], row["cause"])
        told = {each["code"] for each in answer["comparability"] if each["verdict"] == "suspect"}
        assert bool(told) == (row["comparable"] == "suspect")
        assert (answer["step_comparable"], answer["step_cause"]) == ("suspect", "shifted")
