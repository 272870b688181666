"""What the words of a configuration stand for."""

from __future__ import annotations

import pytest

from stagescope_service.dumps import records
from stagescope_wire.captures import validate_capture
from stagescope_wire.errors import InvalidPlan
from stagescope_wire.keep import (
    SECTIONS,
    capture_selectors,
    is_selected,
    kept_sections,
    matching_selectors,
    read_keep,
    sections_of,
    shard_capture,
    validate_keep,
)
from stagescope_wire.nonfinite import Json

WHERE: dict[str, Json] = {"stage": "actor_update", "role": "actor", "rank": 0}
UPDATE = ["log_probs", "old_log_probs", "advantages", "prob_ratio", "response_mask"]


def test_sections_have_the_names_of_the_dump_readers() -> None:
    assert {*SECTIONS} == {*records.SECTIONS}


def test_a_configuration_names_steps_ranks_and_selectors() -> None:
    keep = validate_keep({"every_n_steps": 10, "ranks": "0,2-3", "what": ["is_loss"]})
    assert matching_selectors(keep, **WHERE, step=20) == ("is_loss",)
    assert matching_selectors(keep, **WHERE, step=21) == ()
    assert matching_selectors(keep, **{**WHERE, "rank": 1}, step=20) == ()
    assert validate_keep(keep) == keep  # as it comes back from a process's settings
    listed = validate_keep({"steps": "3,5-6", "what": "loss"})
    assert [step for step in range(8) if matching_selectors(listed, **WHERE, step=step)] == [
        3,
        5,
        6,
    ]
    assert matching_selectors(validate_keep({"what": ["loss"]}), **WHERE, step=None) == ("loss",)


def test_names_of_other_projects_are_aliases() -> None:
    options = {"trajectory": True, "old_log_probs": True, "forward_data": False, "loss": True}
    assert validate_keep({"what": options})["what"] == ["trajectories", "old_log_probs", "loss"]
    weaver = ["forward_data", "loss", "is_loss_debug", "training_metrics", "datums"]
    assert validate_keep({"what": weaver})["what"] == [
        "forward_data", "loss", "is_loss", "metrics", "datums"
    ]  # fmt: skip
    everything = validate_keep({"what": "all"})["what"]
    assert {*SECTIONS} - {*everything} == {"parameters", "gradients"}


@pytest.mark.parametrize(
    ("spec", "wrong"),
    [
        ({}, "names nothing"), ("all", "keep is 'all'"),
        ({"what": ["loss"], "every": 3}, "no field 'every'"),
        ({"what": ["loss"], "every_n_steps": 0}, "steps is"),
        ({"what": ["loss"], "every_n_steps": 2, "steps": [1]}, "both every_n_steps and steps"),
        ({"what": ["loss"], "steps": "next"}, "steps is 'next'"),
        ({"what": ["loss"], "ranks": "worst(2)"}, "ranks is"), ({"what": [3]}, "what is"),
        ({"what": {"loss": 1}}, "what is"),
        ({"what": ["param"]}, "parameters without saying which"),
        ({"parameters": "*.weight"}, "parameters is"),
    ],
)  # fmt: skip
def test_an_invalid_configuration_is_refused(spec: Json, wrong: str) -> None:
    with pytest.raises(InvalidPlan, match=wrong.replace("(", r"\(")):
        validate_keep(spec)
    assert read_keep(spec) is None


def test_parameters_are_selected_by_patterns_in_the_actor_update() -> None:
    keep = validate_keep({"every_n_steps": 2, "gradients": ["*.q_proj.weight"]})
    capture = shard_capture(keep)
    assert capture is not None
    assert (capture["stages"], capture["gradients"]) == (["actor_update"], ["*.q_proj.weight"])
    assert matching_selectors(keep, **WHERE, step=4) == ("gradient/*",)
    assert capture_selectors(capture) == ("gradient/*",)
    assert shard_capture(validate_keep({"what": ["loss"]})) is None


def test_a_capture_accepts_the_same_selectors() -> None:
    spec = {"stages": "all", "steps": "all", "keep": ["trajectory", "my_tensor"]}
    capture = validate_capture({**spec, "parameters": ["*"]}, allowed_roots=())
    assert capture_selectors(capture) == ("trajectories", "my_tensor", "parameter/*")


def test_intermediates_are_of_the_loss_only_where_there_is_one() -> None:
    found = sections_of("actor_update", UPDATE, ["loss", "actor/pg_loss", "grad_norm"])
    assert found == {
        "old_log_probs": ["old_log_probs", "response_mask"],
        "forward_data": ["log_probs", "response_mask"],
        "advantages": ["advantages", "response_mask"],
        "is_loss": UPDATE,
        "loss": ["loss", "actor/pg_loss"],
        "metrics": ["grad_norm"],
    }
    assert "is_loss" not in sections_of("actor_update", ["log_probs", "old_log_probs"])
    assert "loss" not in sections_of("actor_update", ["elementwise_loss"])


def test_all_that_a_rollout_hands_over_is_of_its_trajectories() -> None:
    names = ["prompts", "responses", "response_mask", "targets"]
    assert sections_of("rollout_generate", names)["trajectories"] == names
    assert sections_of("compute_rm_score", ["rewards"]) == {"trajectories": ["rewards"]}
    beside = sections_of("actor_update", ["rollout_log_probs", "response_mask"])
    assert beside == {"other": ["rollout_log_probs", "response_mask"]}


def test_only_selected_data_are_kept() -> None:
    assert kept_sections({"forward_data"}, "actor_update", UPDATE) == {
        "forward_data": ["log_probs", "response_mask"]
    }
    assert kept_sections({"prob_ratio"}, "actor_update", UPDATE) == {"is_loss": ["prob_ratio"]}
    shards = ["gradient/0.weight", "gradient.1/0.weight", "parameter/0.weight"]
    assert kept_sections({"gradient/*"}, "actor_update", shards) == {"gradients": shards[:2]}
    assert kept_sections({"loss"}, "actor_update", UPDATE, ["loss", "lr"]) == {"loss": ["loss"]}
    assert kept_sections({"datums"}, "actor_update", UPDATE) == {}


@pytest.mark.parametrize("section", SECTIONS)
def test_what_is_kept_is_wanted_before(section: str) -> None:
    names = [*UPDATE, "input_ids", "prompts", "mine", "datums/x", "gradient/w", "parameter/w"]
    for stage in ("actor_update", "rollout_generate"):
        for held in kept_sections({section}, stage, names, ["loss"]).values():
            assert all(
                is_selected({section}, stage, name) for name in held if name != "response_mask"
            )


def test_a_rank_knows_what_is_not_wanted() -> None:
    assert is_selected({"is_loss"}, "actor_update", "prob_ratio")
    assert is_selected({"is_loss"}, "actor_update", "is_loss")
    assert not is_selected({"forward_data", "loss"}, "actor_update", "prob_ratio")
    assert not is_selected((), "actor_update", "prob_ratio")
    assert is_selected({"prob_ratio"}, "actor_update", "prob_ratio")


def test_a_streams_section_does_not_rest_on_what_else_is_recorded() -> None:
    names = ["rollout_log_probs", "old_log_probs", "response_mask"]
    for more in ([], ["rewards"]):
        found = sections_of("actor_compute_log_prob", [*names, *more])
        assert "rollout_log_probs" in found["trajectories"]
        assert "other" not in found
    # Beside an update it is what the importance weights are made of, and no trajectory.
    assert "trajectories" not in sections_of("actor_update", names)
