"""The rulebook against planted faults, and against healthy runs."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from tests.service.rules.benchmark.faults.streams import last_zero, padding_masked
from tests.service.rules.planted import (
    ROWS,
    STAGE,
    Batch,
    after_first,
    all_right,
    all_wrong,
    and_scalars,
    bfloat16,
    copied,
    cut_vocabulary,
    diagnosed,
    equal_rewards,
    first_tokens,
    found_in,
    grow,
    last_tokens,
    late_rounds,
    less_likely_first_tokens,
    middle_round,
    noisy_trainer,
    not_finite,
    old_versions,
    one_replica,
    other_rows,
    rank_two,
    report,
    retokenise,
    rounded_logits,
    rows_of,
    sharpened,
    shift,
    shown_by,
    since,
    single,
    tails,
    train,
    versions_ahead,
    warmer,
)
from tests.support.api import Rank, Service
from tests.support.command_line import invoke

import stagescope
from stagescope_service.rules import facts as facts_module
from stagescope_service.rules.causes import Diagnosis
from stagescope_service.rules.doctor import diagnose, rulebook
from stagescope_service.rules.evidence import Evidence
from stagescope_service.rules.history import RunHistory
from stagescope_service.rules.symptom import FAMILIES, SymptomRule, read_symptom
from stagescope_service.statistics import Comparability, examine
from stagescope_service.views import diagnosis as api_diagnosis
from stagescope_wire.errors import InvalidPlan
from stagescope_wire.schema import LOG

DOCS: Final = Path(__file__).parents[3] / "docs"
PLANTED: Final[dict[str, tuple[dict[str, Any], set[str]]]] = {
    "mismatch_grows": ({"change": grow, "syncs": True}, {"mismatch_jump_at_first_sync"}),
    "mismatch_jump": ({"change": since(15, lambda batch: batch.add(0.05))}, set()),
    "mismatch_jump_at_first_sync": ({"change": after_first, "syncs": True}, set()),
    "mismatch_rises_with_rounds": (
        {"change": late_rounds}, {"round_apart", "mismatch_rises_with_position"},
    ),
    "rank_apart": ({"change": rank_two}, set()),
    "round_apart": ({"change": middle_round}, set()),
    "streams_shifted": ({"change": shift}, {"streams_unrelated", "sampling_differs"}),
    "streams_unrelated": ({"change": other_rows}, {"sampling_differs"}),
    "sampling_differs": ({"change": cut_vocabulary}, {"streams_unrelated"}),
    "rounded_stream": ({"change": bfloat16}, set()),
    "first_token": ({"change": first_tokens}, set()),
    "last_token": ({"change": last_tokens}, set()),
    "streams_copied": ({"change": copied}, set()),
    "engine_apart": ({"change": one_replica}, set()),
    "lattice": ({"change": rounded_logits}, {"rounded_stream"}),
    "hidden_tails": ({"change": tails}, {"streams_unrelated", "tokens_apart"}),
    "staleness": ({"change": old_versions}, set()),
    "versions_impossible": ({"change": versions_ahead}, set()),
    "retokenised": ({"change": retokenise, "keep": ["trajectories"]}, set()),
    "groups_equal": ({"change": equal_rewards}, {"groups_all_wrong", "groups_all_right"}),
    "groups_all_wrong": ({"change": all_wrong}, {"groups_equal"}),
    "groups_all_right": ({"change": all_right}, {"groups_equal"}),
    "groups_of_one": ({"change": single}, set()),
    "non_finite_log_probs": ({"change": not_finite}, {"streams_unrelated"}),
    "reward_flat": (
        {"scalars": and_scalars(reward=lambda step: 0.5 + 0.02 * (-1) ** step)}, set(),
    ),
    "entropy_collapse": ({"scalars": and_scalars(entropy=lambda step: 0.8**step)}, set()),
    "kl_to_reference": ({"scalars": and_scalars(kl_loss=lambda step: 0.1 * step)}, set()),
    "clip_fraction": ({"scalars": and_scalars(clip_fraction=lambda step: 0.4)}, set()),
    "gradient_spikes": (
        {"scalars": and_scalars(grad_norm=lambda step: 80.0 if step == 17 else 1.0)}, set(),
    ),
    "non_finite_scalars": (
        {"scalars": and_scalars(loss=lambda step: float("nan") if step == 9 else 1.0)}, set(),
    ),
    "responses_truncated": (
        {"scalars": and_scalars(**{"response_length/clip_ratio": lambda step: 0.4})}, set(),
    ),
    "straggler": ({"seconds": lambda step, rank: 2.5 if rank == 3 else 1.0}, set()),
}  # fmt: skip
"""SymptomRule -> how its symptom is planted, and what else the same fault may be called."""
PROOFS: Final = {
    "clip_fraction": "stagescope series clip_fraction ",
    "first_token": "stagescope anatomy 1 --by place ",
    "last_token": "stagescope anatomy 1 --by end ",
    "mismatch_grows": "stagescope series logprob_abs_diff/mean --by rank ",
    "mismatch_jump": "stagescope series logprob_abs_diff/mean --by rank ",
    "mismatch_jump_at_first_sync": "stagescope series logprob_abs_diff/mean --by rank ",
    "responses_truncated": "stagescope series response_length/clip_ratio ",
    "sampling_differs": "stagescope anatomy 1 --by probability ",
    "streams_shifted": "stagescope metrics 24 ",
    "streams_unrelated": "stagescope metrics 24 ",
}
"""SymptomRule -> the command that shows its symptom where no engine can score the tokens again."""


@pytest.mark.parametrize("rule", PLANTED)
def test_a_planted_fault_is_found(rule: str, live: Service) -> None:
    arguments, also = PLANTED[rule]
    rows = diagnosed(live, f"sick-{rule}", **arguments)
    row = rows[rule]
    assert row["verdict"] == "found", row
    # A fault since some step may make the mismatch of all ranks jump there.
    assert found_in(rows) <= {rule, "mismatch_jump", "trigger_fired", *also}, {
        name: rows[name]["for"] for name in found_in(rows)
    }
    assert "trigger_fired" not in found_in(rows) or rows["trigger_fired"]["explained_by"]
    assert row["for"]
    assert row["next"]
    assert not [line for line in row["next"] if "{" in line]
    if rule == "entropy_collapse":  # the run's own name of it
        assert f"stagescope series entropy --run sick-{rule}  # when it fell" in row["next"]
    proof = row["next"][0].partition("  # ")[0]
    assert proof.startswith(PROOFS.get(rule, "stagescope ")), row["next"]
    shown = shown_by(live, *shlex.split(proof)[1:])
    # The JSON of a sample also says what else could have been recorded.
    assert "--json" in proof or "not recorded" not in shown
    assert 0.0 < row["sure"] <= 1.0


def test_a_sentence_says_what_was_examined_and_nothing_twice(live: Service) -> None:
    sentences = {
        "rank_apart": "One rank's mismatch differs from the others', actor rank 2, since step 10, "
        "in 10 of 10 examined steps",
        "last_token": "The last token of each round differs more than the others, since step 1, "
        "in 3 of 3 examined steps",
    }
    for rule, change in (("rank_apart", rank_two), ("last_token", last_tokens)):
        row = diagnosed(live, f"said-{rule}", change)[rule]
        assert row["sentence"] == sentences[rule]


def test_float32_that_was_rounded_is_told_from_bfloat16(live: Service) -> None:
    row = diagnosed(live, "was-rounded", rounded_logits, steps=range(1, 4))["rounded_stream"]
    texts = " ".join(row["for"] + row["against"])
    values = "in float32, only bfloat16 values"
    assert f"(old {values}, rollout {values})" in texts


def test_a_temperature_without_fresh_tokens_is_told_by_many_steps(live: Service) -> None:
    """One step does not tell it from an update; updates add up, and a temperature does not."""
    row = diagnosed(live, "warmer", warmer)["sampling_differs"]
    assert (row["verdict"], row["since_step"]) == ("found", 1)
    assert "Had 23 updates done that, the policy would be " in row["for"][0]
    for run, change, steps in (("sharpened", sharpened, 25), ("warmer-short", warmer, 8)):
        train(live, run, change, steps=range(1, steps))
        assert live.get("/steps/5/metrics", run=run)["comparable"] == "unknown"
        row = rows_of(live, run)["sampling_differs"]
        assert row["verdict"] == "not measured"
        assert "temperature not decided: old grows by 1.0" in row["against"][0]


def test_an_engine_that_lacks_the_last_update_is_no_temperature(live: Service) -> None:
    """Its tokens are said to be fresh, or to be of no version; step 1 is before any update."""

    def lags(batch: Batch) -> None:
        batch.q = batch.q / 1.05**batch.step  # a surer policy finds its own tokens likelier
        batch.p = batch.q.copy()
        batch.add(0.002)
        if batch.step > 1:
            warmer(batch, 1.05)
        batch.versions = None if batch.step % 2 else np.full(batch.q.shape, batch.step)

    def hot(batch: Batch) -> None:
        if batch.step > 1:
            warmer(batch, 1.05)
        batch.versions = None

    rows = diagnosed(live, "lags-unsaid", lags, steps=range(1, 21))
    behind = rows["engine_behind"]
    assert (behind["verdict"], behind["since_step"]) == ("found", 2)
    assert behind["explained_by"] == []
    assert behind["for"][0].startswith("in steps 2 to 20 old grows by 1.0")
    assert rows["sampling_differs"]["explained_by"] == ["engine_behind"]
    (first, *_) = live.catalogue.findings(run="lags-unsaid", kind="streams_temperature")
    assert (
        "or the engine lacks an update that sharpened or flattened the policy" in first["message"]
    )
    rows = diagnosed(live, "hot-since-2", hot, steps=range(1, 21))
    assert rows["engine_behind"]["verdict"] == "not found"
    assert "did not become as steep" in rows["engine_behind"]["against"][0]
    assert rows["sampling_differs"]["explained_by"] == []


def test_of_two_ranks_the_one_with_the_higher_mismatch_is_named(live: Service) -> None:
    def second(batch: Batch) -> None:
        if batch.rank == 1 and batch.step >= 10:
            batch.add(0.1)

    row = diagnosed(live, "two-ranks", second, ranks=2)["rank_apart"]
    assert (row["verdict"], row["where"], row["since_step"]) == ("found", "actor rank 1", 10)
    assert row["for"][0].endswith(" at the other")
    assert diagnosed(live, "two-healthy-ranks", ranks=2)["rank_apart"]["verdict"] == "not found"


@pytest.mark.parametrize(
    ("reward", "found", "other"),
    [(0.0, "groups_all_wrong", "groups_all_right"), (1.0, "groups_all_right", "groups_all_wrong")],
)
def test_a_window_of_one_reward_is_judged_by_earlier_rewards(
    reward: float, found: str, other: str, live: Service
) -> None:
    def of_one_reward(batch: Batch) -> None:
        batch.rewards = np.full(ROWS, reward)

    rows = diagnosed(live, f"since-5-{found}", since(5, of_one_reward))
    assert rows[found]["verdict"] == "found"
    assert rows[found]["since_step"] == 5
    assert rows[other]["verdict"] == "not found"
    rows = diagnosed(live, f"always-{found}", of_one_reward)
    assert rows["groups_equal"]["verdict"] == "found"
    for name in (found, other):
        assert rows[name]["verdict"] == "not measured"
        assert f"every reward is {reward:g}" in rows[name]["against"][0]


def test_first_tokens_off_to_one_side_are_no_other_distribution(live: Service) -> None:
    rows = diagnosed(live, "first-down", since(8, less_likely_first_tokens))
    assert found_in(rows) - {"mismatch_jump"} == {"first_token"}
    assert rows["first_token"]["since_step"] == 8
    assert "first tokens of rounds differ by 0.599 nat" in rows["sampling_differs"]["against"][0]
    answer = live.get("/steps/24/metrics", run="first-down")
    assert [each["code"] for each in answer["comparability"]] == ["first_token", "versions"]


def test_scalars_of_two_roles_are_not_averaged(live: Service) -> None:
    name = "two-roles"
    train(live, name, scalars=and_scalars(grad_norm=lambda step: 40.0 if step == 17 else 1.0))
    critic = Rank(live, run=name, role="critic", rank=0, key="a1", world_size=1, start=1_000.0)
    for step in range(1, 25):
        critic.stage("critic_update", step, scalars={"grad_norm": 0.01})
    row = rows_of(live, name)["gradient_spikes"]
    assert row["verdict"] == "found"
    assert row["for"] == ["grad_norm of actor is up to 40, 40.0 times its median before (step 17)"]


def test_scalars_of_two_stages_are_not_averaged(live: Service) -> None:
    rank = Rank(live, run="two-stages", world_size=1)
    for step in range(1, 25):
        rank.stage("actor_update", step, scalars={"grad_norm": 1.0})
    rank.begin("actor_update", 25)
    rules = [each for each in rulebook() if each.name == "gradient_spikes"]

    def spikes() -> Evidence:
        return diagnose(RunHistory(live.catalogue, "two-stages"), rules)[0].evidence

    rank.say(LOG, step=17, scalars={"grad_norm": 5e6})
    text = "grad_norm of actor_update stays below 10 times its median 1 in the newest 24 steps"
    assert spikes().against == (text,)
    for step in range(10, 17):
        rank.say(LOG, step=step, scalars={"grad_norm": 2.0})
    assert spikes().supports[0].startswith("grad_norm without a stage is up to 5e+06, ")


def test_a_number_is_asked_for_and_drawn_by_the_run_s_own_name(live: Service) -> None:
    def scalars(step: int) -> dict[str, float]:
        flat = 0.5 + 0.02 * (-1) ** step
        return {"critic/score/mean": flat, "actor/entropy": 0.8**step, "grad_norm": 1.0}

    train(live, "own-names", scalars=scalars)
    critic = Rank(live, run="own-names", role="critic", rank=0, key="a1", world_size=1, start=1e3)
    for step in range(1, 25):
        critic.stage("critic_update", step, scalars={"actor/entropy": 0.01})
    rows = rows_of(live, "own-names")
    figure = rows["reward_flat"]["figure"]
    assert figure == "/figures/overview?run=own-names&metric=critic/score/mean"
    assert "critic/score/mean" in str(live.get(figure))
    series = "stagescope series actor/entropy --run own-names  # when it fell"
    assert series in rows["entropy_collapse"]["next"]  # not of one role's label


@pytest.mark.parametrize("is_equal", [False, True])
def test_a_mismatch_within_the_noise_floor_is_a_note(is_equal: bool, live: Service) -> None:
    def change(batch: Batch) -> None:
        if is_equal:
            batch.p = batch.q.copy()
        noisy_trainer(batch)

    run = f"noisy-{is_equal}"
    assert diagnosed(live, run, change)["within_noise_floor"]["verdict"] == "not found"
    notes = {note["rule"]: note["text"] for note in live.get(f"/runs/{run}/diagnosis")["notes"]}
    assert "that of the trainer against itself" in notes["within_noise_floor"]


def test_missing_ranks_losses_and_hangs_are_found(live: Service) -> None:
    train(live, "partial")
    rank = Rank(live, run="partial", rank=0, key="b1", world_size=2, start=20_000.0)
    for step in range(30, 40):
        rank.stage(STAGE, step)
    rank.begin(STAGE, 40)
    rows = rows_of(live, "partial", attempt=2)
    assert rows["ranks_missing"]["verdict"] == "found"
    rank.say("dropped", stage=STAGE, step=39, what="payload", count=3, reason="no room")
    lost = rows_of(live, "partial", attempt=2)["payloads_lost"]
    assert lost["verdict"] == "found"
    died = Rank(live, run="died", world_size=1)
    died.stage(STAGE, 1)
    died.begin(STAGE, 2)
    live.engine.fall_silent(died)
    rows = rows_of(live, "died")
    # What it handed over has arrived: it is its stage that has no end.
    assert rows["payloads_lost"]["verdict"] == "not found"
    failed = rows["processes_failed"]
    assert (failed["verdict"], failed["since_step"], failed["where"]) == ("found", 2, "actor 0")
    assert failed["for"] == [
        f"{STAGE} of step 2: its process stopped reporting inside the stage (1 rank)"
    ]
    # Two were killed at once, one of them between its stages: neither is the cause.
    pair = [Rank(live, run="died-together", rank=rank, world_size=2) for rank in (0, 1)]
    for rank in pair:
        rank.stage(STAGE, 1)
    pair[0].begin(STAGE, 2)
    for rank in pair:
        live.engine.fall_silent(rank)
    failed = rows_of(live, "died-together")["processes_failed"]
    assert failed["where"] == "actor 0-1"
    assert failed["for"] == [
        f"{STAGE} of step 2: its process stopped reporting inside the stage (1 rank)",
        "actor ranks 0-1 stopped reporting; which of them died first is not known",
    ]
    failing = Rank(live, run="failing", world_size=1)
    failing.begin(STAGE, 1)
    failing.end(STAGE, 1, status="failed", error_type="ValueError", error_message="no")
    failed = rows_of(live, "failing")["processes_failed"]
    assert failed["verdict"] == "found"
    assert "ValueError" in failed["for"][0]
    assert len(failed["for"]) == 1  # no attempt follows


@pytest.mark.parametrize(
    ("kind", "rule"),
    [
        ("sample_ids_contradict", "ids_contradict"),
        ("superseded_work", "work_superseded"),
        ("rounds_fragmented", "pieces_unplaced"),
        ("tokens_unaccounted", "tokens_unaccounted"),
        ("replicas_differ", "copies_differ"),
        ("nonfinite_values", "non_finite_values"),
    ],
)
def test_a_finding_is_evidence_of_what_it_says_alone(kind: str, rule: str, live: Service) -> None:
    train(live, kind, steps=range(1, 6))
    report(live, kind, kind, "said so")
    rows = rows_of(live, kind)
    assert found_in(rows) == {rule}
    assert rows[rule]["for"] == ["said so"]


# --- false alarms -----------------------------------------------------------------------------
@pytest.mark.parametrize("seed", range(4))
def test_a_healthy_run_has_no_symptom(seed: int, live: Service) -> None:
    rows = diagnosed(live, f"well-{seed}", steps=range(1, 51), seed=seed)
    assert not found_in(rows), {name: rows[name]["for"] for name in found_in(rows)}
    assert live.get(f"/runs/well-{seed}/diagnosis")["unexplained"] == {}
    unknown = {name for name, row in rows.items() if row["verdict"] == "not measured"}
    assert unknown == {
        "mismatch_jump_at_restart", "mismatch_jump_at_first_sync", "staleness",
        "within_noise_floor", "verl_settings", "engine_apart", "retokenised", "current_differs",
        "turn_stops", "versions_impossible", "bisected",
        # Nothing of a canary, of weights or of a capture is recorded.
        "adapter_not_applied", "engine_inconsistent", "engine_weights", "non_finite_operator",
        "prefix_cache_stale", "sampling_temperature", "tokenizers_differ", "weights_differ",
        # Nor routes of experts.
        "layers_swapped", "routes_empty", "routes_explain", "routes_missing", "routes_shifted",
    }  # fmt: skip
    assert all(rows[name]["against"] for name in unknown)
    assert rows["staleness"]["record"].startswith("record versions")


def test_rounds_of_less_sure_tokens_are_no_symptom(live: Service) -> None:
    def unsure(batch: Batch) -> None:
        """The same relative noise on tokens of 4 and 16 times the surprise."""
        scale = 4.0 ** np.maximum(batch.rounds, 0)
        batch.q = 0.1 * scale * batch.q
        batch.p = batch.q * (1.0 + batch.random.normal(0.0, 0.02, batch.q.shape))

    row = diagnosed(live, "less-sure", unsure, steps=range(1, 13))["mismatch_rises_with_rounds"]
    assert row["verdict"] == "not found"
    assert "rises with the round in 0 of 10 steps" in row["against"][0]
    assert "in 10 more, as their tokens grow less sure" in row["against"][0]


@pytest.mark.parametrize(
    ("name", "is_recorded", "since"),
    [
        ("one-rank", lambda step, rank: rank != 2 or step < 8, 8),
        ("two-ranks", lambda step, rank: rank < 2 or step < 16, 16),
        ("with-pauses", lambda step, rank: rank != 2 or (step < 13 and step % 3 == 0), 13),
        ("never-did", lambda step, rank: rank in (0, 3), None),
        ("by-turns", lambda step, rank: (step + rank) % 4 == 0, None),
        ("every-fourth-step", lambda step, rank: step % 4 == 0, None),
        ("two-steps", lambda step, rank: rank != 2 or step < 23, None),
        ("came-back", lambda step, rank: rank != 2 or step < 8 or step == 24, None),
        ("nobody-does", lambda step, rank: step < 12, 12),
    ],
)
def test_ranks_whose_log_probs_stop_are_named(
    name: str, is_recorded: Callable[[int, int], bool], since: int | None, live: Service
) -> None:
    def change(batch: Batch) -> None:
        batch.has_streams = is_recorded(batch.step, batch.rank)

    row = diagnosed(live, name, change)["streams_stopped"]
    assert row["since_step"] == since, row
    assert (row["verdict"] == "found") == (since is not None)
    if since is not None:
        stopped = {16: "actor ranks 2-3", 12: "actor ranks 0-3"}
        assert row["where"] == stopped.get(since, "actor rank 2")
        assert f"from {since} to 24" in row["for"][0]


def test_a_mask_over_padding_explains_responses_of_one_length(live: Service) -> None:
    rows = diagnosed(live, "padded", padding_masked, scalars=lambda step: {}, steps=range(1, 7))
    assert rows["mask_covers_padding"]["sentence"].startswith("The mask covers padding")
    assert rows["responses_truncated"]["explained_by"] == ["mask_covers_padding"]
    assert rows["streams_shifted"]["verdict"] == "not found"


def test_a_stop_token_without_a_value_is_named(live: Service) -> None:
    row = diagnosed(live, "no-stop", last_zero, steps=range(1, 7))["streams_lack_values"]
    assert row["sentence"].startswith("The mask covers the last token of each round")


@pytest.mark.parametrize("has_ids", [True, False])
def test_ids_that_are_recorded_are_not_asked_for(has_ids: bool, live: Service) -> None:
    def change(batch: Batch) -> None:
        other_rows(batch)
        batch.has_ids = has_ids

    rows = diagnosed(live, f"ids-{has_ids}", change, steps=range(1, 7))
    advice = " ".join(rows["streams_unrelated"]["next"])
    assert rows["streams_unrelated"]["verdict"] == "found"
    assert ("give sample_ids" in advice) is not has_ids


def test_a_rank_that_a_restart_leaves_out_has_not_stopped(live: Service) -> None:
    train(live, "smaller", steps=range(1, 9))
    train(live, "smaller", steps=range(9, 17), key="a2", start=2_000.0, ranks=2)
    shown = rows_of(live, "smaller")["streams_stopped"]
    assert shown["verdict"] == "not found"


def test_every_rule_has_a_planted_fault_or_a_finding_behind_it() -> None:
    elsewhere = {
        "mismatch_jump_at_restart", "ranks_missing", "payloads_lost", "processes_failed",
        "steps_unreported", "hangs", "verl_settings", "current_differs", "turn_stops",
        "stream_changed", "within_noise_floor", "bisected", "streams_stopped",
        "mask_covers_padding", "streams_lack_values", "streams_not_log_probs", "training_quiet",
        "engine_behind", "tokens_apart", "mismatch_rises_with_position", "gradient_zero",
        "entropy_rises", "trigger_fired",
        # tests/service/views/steps/test_routing.py
        "layers_swapped", "routes_empty", "routes_explain", "routes_missing", "routes_shifted",
    }  # fmt: skip
    of_findings = {rule.name for rule in rulebook() if rule.evidence.function == "finding"}
    assert {rule.name for rule in rulebook()} == {*PLANTED, *elsewhere, *of_findings}


# --- the rulebook -----------------------------------------------------------------------------
def test_the_rulebook_is_complete() -> None:
    rules = rulebook()
    assert len({rule.title for rule in rules}) == len(rules) > 30
    for rule in rules:
        assert rule.family in FAMILIES
        assert not rule.title.endswith(".")
        assert rule.meaning.endswith(".")


@pytest.mark.parametrize(
    ("pages", "families"),
    [
        (["doctor-rules", "doctor-training"], {"service", "reward", "time", "settings"}),
        (["doctor-precision"], {"precision"}),
        (["doctor-mismatch", "doctor-streams"], {"mismatch"}),
    ],
)
def test_pages_list_every_symptom_of_their_families(pages: list[str], families: set[str]) -> None:
    text = "".join((DOCS / f"{name}.md").read_text("utf-8") for name in pages)
    rows = [line.split(" | ")[0] for line in text.splitlines() if "`) | " in line]
    of_pages = [rule for rule in rulebook() if rule.family in families]
    assert sorted(rows) == sorted(f"| {rule.title} (`{rule.name}`)" for rule in of_pages)


def test_the_rule_that_the_documentation_shows_is_the_rule() -> None:
    page = (DOCS / "doctor-own-rules.md").read_text("utf-8")
    (shown,) = re.findall(r"^```yaml\n(.*?)^```", page, re.M | re.S)
    named = {rule.name: rule for rule in rulebook()}
    assert read_symptom("rounded_stream", shown) == named["rounded_stream"]


def test_what_to_do_next_are_commands_that_exist() -> None:
    values: dict[str, object] = {
        "run": "r", "step": 5, "newest": 6, "attempt": 2, "before": 1, "scalar": "entropy",
        "engine": "e", "where": "bisect-r-6", "example": "5 s1",
    }  # fmt: skip
    commands = [
        line.partition(" #")[0].format(**values)
        for rule in rulebook()
        for line in rule.next
        if line.startswith("stagescope ")
    ]
    assert len(commands) > 40
    for command in commands:
        # An unknown command, argument or option is refused before the help is printed.
        done = invoke(*shlex.split(command)[1:], "--help")
        assert done.exit_code == 0, (command, done.stderr)
        name = command.split()[1]
        assert ("--attempt" in done.stdout) == (name in api_diagnosis.OF_AN_ATTEMPT), name


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({"title": ""}, "title is ''"),
        ({"extra": 1}, "has no field 'extra'"),
        ({"family": "weather"}, "family is 'weather'"),
        ({"evidence": {"function": "guess"}}, "evidence is 'guess'"),
        ({"evidence": {"function": "scalar_above", "names": ["x"]}}, "evidence: .*'bound'"),
        ({"evidence": {"function": "lost", "bound": 1}}, "evidence: .*'bound'"),
    ],
)
def test_a_wrong_rule_is_refused_with_its_name(change: Mapping[str, object], wrong: str) -> None:
    rule = {
        "title": "t", "family": "service", "evidence": {"function": "lost"}, "meaning": "m.",
        "next": ["n"], "sources": ["s"],
    }  # fmt: skip
    assert read_symptom("mine", json.dumps(rule)).evidence.function == "lost"
    with pytest.raises(InvalidPlan, match=f"rule mine.*{wrong}"):
        read_symptom("mine", json.dumps({**rule, **change}))


def test_a_run_without_closed_steps_is_not_measured(live: Service) -> None:
    Rank(live, run="young").begin(STAGE, 1)
    answer = live.get("/runs/young/diagnosis")
    assert answer["steps"] == 0
    assert answer["mismatch"] == []
    assert not found_in({row["rule"]: row for row in answer["rows"]})


def test_a_diagnosis_of_unchanged_steps_is_computed_once(
    live: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed = []

    def counted(history: RunHistory) -> list[Diagnosis]:
        computed.append(history.run)
        return diagnose(history)

    monkeypatch.setattr(api_diagnosis, "diagnose", counted)
    for name in ("_LIVE", "_ENDED"):
        monkeypatch.setattr(f"stagescope_service.views.reading.changes.{name}", 1e9)
    train(live, "unchanged", steps=range(1, 4))
    first = rows_of(live, "unchanged")
    assert rows_of(live, "unchanged") == first
    live.get("/runs/unchanged/diagnosis", limit=3)
    assert computed == ["unchanged"]
    live.get("/runs/unchanged/diagnosis", step=2)
    assert len(computed) == 2
    assert diagnosed(live, "unchanged", rank_two, steps=range(4, 14)) != first
    assert len(computed) == 3


def test_a_diagnosis_examines_the_streams_of_a_step_once(
    live: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it looks for the step since which a fault is there."""
    examined_steps = []

    def counted(summary: Any, ranks: Any = ()) -> Comparability:
        examined_steps.append(summary)
        return examine(summary, ranks)

    monkeypatch.setattr(facts_module, "examine", counted)
    train(live, "once", cut_vocabulary, steps=range(1, 4))
    assert "sampling_differs" in found_in(rows_of(live, "once"))
    assert len(examined_steps) <= 3


def test_notebook_and_terminal_show_the_same(live: Service) -> None:
    assert live.tokens is not None
    train(live, "shown", rank_two)
    with stagescope.attach(live.server.url, token=live.tokens.read) as session:
        table = session.doctor("shown")
    assert [row["rule"] for row in table.found] == ["rank_apart", "mismatch_jump"]
    assert table.found[1]["explained_by"] == ["rank_apart"]
    assert repr(table).startswith("One rank's mismatch differs from the others', actor rank 2, ")
    assert table.causes == table.found[:1]
    assert "  prove it: stagescope ranks" in repr(table)
    assert "it explains 1 symptom:\n  * The mismatch jumps inside an attempt" in repr(table)
    assert "<details open>" in table._repr_html_()
    shown = shown_by(live, "doctor", "shown")
    assert "actor rank 2" in " ".join(shown.split())
    lines = shown.splitlines()
    is_command = ("  -> stagescope ", "  prove it: stagescope ")
    assert lines[0] == table.causes[0]["sentence"]
    assert lines[1] == f"  prove it: {table.causes[0]['next'][0]}"
    assert all(len(line) <= 80 for line in lines[2:] if not line.startswith(is_command))
    capture = next(line for line in lines if "capture --stages" in line)
    assert "--level L0 --run" in capture  # a command is pasted as a whole
    full = shown_by(live, "doctor", "shown", "--all")
    unknown = [row for row in table if row["verdict"] == "not measured"]
    assert len(unknown) > 5
    for row in unknown:
        assert f"  {row['rule']}: " in full
        assert f"  {row['rule']}: " not in shown
    assert f"\n{len(unknown)} not measured (doctor --all says why)\n" in shown
    whole = " ".join(shown.split())  # on several lines, but not cut inside a call
    records = [str(row["record"]) for row in unknown if not row["waits"]]
    versions = next(text for text in records if text.startswith("record vers"))
    assert f"{versions}: 2 rules" in whole
    assert all(text in whole for text in records if text.startswith("record "))
    assert repr(table.all()) == full.rstrip("\n")


def test_what_was_never_looked_for_is_not_measured(live: Service) -> None:
    rows = diagnosed(live, "unlooked", steps=range(1, 4))
    lacking = {
        "adapter_not_applied": "no canary was recorded",
        "engine_inconsistent": "no canary was recorded",
        "engine_weights": "no canary was recorded",
        "non_finite_operator": "no operators of a step were captured",
        "prefix_cache_stale": "no canary was recorded",
        "sampling_temperature": "no canary was recorded",
        "tokenizers_differ": "no canary was recorded",
        "weights_differ": "no weights were recorded on both sides of a sync",
    }
    for rule, why in lacking.items():
        assert (rows[rule]["verdict"], rows[rule]["against"]) == ("not measured", [why]), rule
        assert rows[rule]["record"]


def test_what_lacks_steps_alone_names_nothing_to_record(live: Service) -> None:
    rows = diagnosed(live, "short", steps=range(1, 7))
    assert rows["reward_flat"]["against"] == ["reward has 6 finite steps, 20 are needed"]
    assert (rows["reward_flat"]["record"], rows["reward_flat"]["waits"]) == (None, True)
    assert rows["staleness"]["record"] is not None
    restart = rows["mismatch_jump_at_restart"]
    assert (restart["record"], restart["waits"]) == (None, False)
    shown = shown_by(live, "doctor", "short")
    assert f"\n  more steps are needed: {sum(row['waits'] for row in rows.values())} rules" in shown
    assert "\n  no recording would help: they need what the training has not done so far" in shown


def test_before_a_step_closed_there_is_nothing_to_record(live: Service) -> None:
    Rank(live, run="opened", rank=0, world_size=1).begin(STAGE, 1)
    rows = rows_of(live, "opened")
    unknown = [row for row in rows.values() if row["verdict"] == "not measured"]
    assert {(row["record"], row["waits"]) for row in unknown} == {(None, True)}
    shown = shown_by(live, "doctor", "opened").splitlines()
    assert shown[-1] == f"  more steps are needed: {len(unknown)} rules"


def test_a_run_without_streams_is_told_to_record_them(live: Service) -> None:
    def without(batch: Batch) -> None:
        batch.has_streams = False

    rows = diagnosed(live, "streamless", without, steps=range(1, 6))
    assert rows["streams_shifted"]["record"].startswith("record rollout_log_probs")


def test_counted_groups_name_their_steps(live: Service) -> None:
    row = diagnosed(live, "wrong-for-long", all_wrong, steps=range(1, 31))["groups_all_wrong"]
    assert row["sentence"].endswith(f"in {row['shown']} of {row['examined']} groups")
    assert row["examined"] > 80
    assert row["for"][0].startswith("78 of 80 groups of the newest 10 steps have the lowest")


def test_a_damaged_rule_hides_no_other(live: Service, tmp_path: Path) -> None:
    train(live, "still", steps=range(1, 5))
    history = RunHistory(live.catalogue, "still")
    broken = SymptomRule.parse(
        {"name": "broken", "title": "t", "family": "service", "meaning": "m.", "next": ["n"],
         "evidence": {"function": "finding", "kinds": ["x"]}},
        "rule broken",
    )  # fmt: skip
    found = diagnose(history, [broken, *rulebook()[:3]])
    assert len(found) == 4
