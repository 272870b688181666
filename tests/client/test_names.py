"""Names of tensors that seem to mean a known one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagescope_wire.names import (
    KNOWN,
    MAX_ID,
    closest,
    closest_by_words,
    closest_stage,
    display_name,
    misspelt,
    misspelt_beside,
    misspelt_streams,
    normal_run_name,
    storable_id,
    storable_text,
)
from stagescope_wire.schema import STAGES, check_run_name


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("rollout_logprobs", "rollout_log_probs"), ("rollout_log_prob", "rollout_log_probs"),
        ("rollouts_log_probs", "rollout_log_probs"), ("rolout_log_probs", "rollout_log_probs"),
        ("rollout_logps", "rollout_log_probs"), ("Old-LogProb", "old_log_probs"),
        ("current_log_probs", "log_probs"), ("respones_mask", "response_mask"),
        ("sample_id", "sample_ids"), ("weight_versions", "versions"),
        ("policy_versions", "versions"),
    ],
)  # fmt: skip
def test_a_misspelling_has_a_closest_name(name: str, meant: str) -> None:
    assert closest(name) == meant


@pytest.mark.parametrize(
    "name",
    [
        *sorted(KNOWN), "prev_log_probs", "teacher_log_probs", "old_values", "rewards_scaled",
        "token_level_rewards", "logits", "mask", "datums/rollout_logprobs", "",
    ],
)  # fmt: skip
def test_known_and_different_names_have_no_match(name: str) -> None:
    assert closest(name) is None


def test_a_name_beside_the_known_one_is_told_apart() -> None:
    recorded = ["old_log_probs", "old_logprobs", "reward", "responses", "response", "logits"]
    assert list(misspelt(recorded)) == [("reward", "rewards")]
    assert list(misspelt_beside(recorded)) == [("old_logprobs", "old_log_probs")]
    assert list(misspelt_streams(["rollout", "rolout", "old"])) == [("rolout", "rollout")]


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("actor_updat", "actor_update"), ("update_actor", "actor_update"),
        ("Actor-Update", "actor_update"), ("compute_ref_log_prob", "ref_compute_log_prob"),
        ("rollout_generat", "rollout_generate"), ("actor_update", None), ("eval", None),
        ("reward_shaping", None), ("val_generate", None),
    ],
)  # fmt: skip
def test_a_misspelt_stage_has_a_closest_one(name: str, meant: str | None) -> None:
    assert closest_stage(name, STAGES) == meant


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("jmp", "jump"),
        ("jupm", "jump"),
        ("JUMP", "jump"),
        ("qwen3-8b-cuontdown", "qwen3-8b-countdown"),
        ("qwen3_8b_countdown", "qwen3-8b-countdown"),
        ("qwen38b-countdwn", None),  # two things at once: said by the note's list of runs
        ("jump", None),
        ("jump2", None),
        ("jump-long", None),
        ("qwen3-14b-countdown", None),
        ("qwen3-8b-math", None),
        ("sweep-b", None),
        ("eval", None),
        ("qwen3-8b-recountdown", None),
        ("jump1-1", None),
        ("mujp", None),
    ],
)
def test_a_misspelt_run_has_a_closest_one(name: str, meant: str | None) -> None:
    assert closest_by_words(name, ["sweep-a", "jump", "qwen3-8b-countdown"]) == meant


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("qwen-sync", "qwen-async"), ("qwen-drgrpo", "qwen-grpo"), ("a-nomask", "a-mask"),
        ("r-nothinking", "r-thinking"), ("exp-1-1", "exp-11"), ("exp-1.1", "exp-11"),
        ("exp_v1.0", "exp_v10"), ("expert", "expect"), ("except", "expect"), ("peek", "keep"),
    ],
)  # fmt: skip
def test_names_that_are_varied_on_purpose_are_their_own(name: str, other: str) -> None:
    assert closest_by_words(name, [other]) is None
    assert closest_by_words(other, [name]) is None


@given(st.lists(st.text(st.characters(codec=None), max_size=600), unique=True, max_size=5))
def test_an_id_is_stored_as_a_text_of_its_own(ids: list[str]) -> None:
    """Lone surrogates and NULs (`characters(codec=None)` makes both) are in no stored id."""
    stored = [storable_id(each) for each in ids]
    assert len(set(stored)) == len(ids)
    for each, text in zip(ids, stored, strict=True):
        text.encode()
        assert "\0" not in text
        assert len(text) <= MAX_ID
        assert storable_id(text) == text
        if len(each) <= MAX_ID and each.isprintable():
            assert text == each


def test_long_ids_that_begin_alike_stay_apart() -> None:
    prompts = [f"{'x' * 7000}{number}" for number in range(50)]
    assert len({storable_id(each) for each in prompts}) == 50
    assert storable_id(storable_id(prompts[0])) == storable_id(prompts[0])


def test_a_text_is_stored_with_lone_surrogates_as_escapes() -> None:
    assert storable_text("a\ud800b\0é") == "a\\ud800b?é"
    assert storable_text("\ud800" * 10, 12) == "\\ud800\\ud800"


@given(st.lists(st.text(), max_size=20, unique=True))
def test_other_texts_are_other_names_of_runs(texts: list[str]) -> None:
    names = [normal_run_name(text) for text in texts]
    assert len({*names}) == len(texts)
    assert [check_run_name(name) for name in names] == names
    assert [normal_run_name(name) for name in names] == names  # a stored name stays


def test_texts_that_look_alike_once_normalised_are_other_runs() -> None:
    names = [normal_run_name(text) for text in ("a/b", "a b", "a-b", " a-b", "a//b", "a\ud800b")]
    assert len({*names}) == 6
    assert names[:3] == ["a-b-c14cddc0", "a-b-c8687a08", "a-b"]
    assert normal_run_name("") == "run-e3b0c442"


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("qwen3/grpo", "qwen3/grpo"), ("  my\n run\x1b[31m ", "my run [31m"),
        ("训练 👩‍🔬", "训练 👩‍🔬"), ("a\0\ud800b", "a b"), ("\u202eab", "ab"),
        (" \n", None), ("", None), ("x" * 1000, "x" * 300),
    ],
)  # fmt: skip
def test_a_display_name_is_one_line(given: str, shown: str | None) -> None:
    assert display_name(given) == shown
