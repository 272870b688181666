"""What is read of verl's configuration: names, what shapes the statistics, and no secret."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.trainers import verl_fakes

from stagescope_workers.capture.verl_blocks import captures_from_verl
from stagescope_workers.integrations.configuration import visible_leaves
from stagescope_workers.integrations.verl import configuration, context
from stagescope_workers.integrations.verl.context import Context


def named(project: str | None, experiment: str | None) -> str:
    names = {"project_name": project, "experiment_name": experiment}
    return configuration.run_name({"trainer": names})


def test_a_run_is_named_by_project_and_experiment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert named("maths", "first") == "maths.first"
    assert named(None, "first") == "first"
    assert named(None, None) == "verl"
    assert named("a team", "grpo/8b") == "a team.grpo/8b"  # init normalises it
    monkeypatch.setenv("STAGESCOPE_RUN", "mine")
    assert named("maths", "first") == "mine"


def test_what_shapes_the_statistics_is_at_the_top() -> None:
    config = verl_fakes.config()
    config["algorithm"]["rollout_correction"] |= {"rollout_is": "token", "rollout_is_threshold": 2}
    found = configuration.settings(config)
    assert (found["rollout_is"], found["rollout_is_threshold"]) == ("token", 2)
    assert found["verl"]["actor_rollout_ref.rollout.name"] == "vllm"
    assert "rollout_is" not in configuration.settings(verl_fakes.config())


def test_no_secret_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "abcdefgh1234")
    shown = visible_leaves(
        {
            "trainer": {"hf_token": "x1", "entropy_coeff": 0.5, "max_tokens": 512},
            "judge": {"url": "https://x4@host/", "other": "abcdefgh1234"},
            "auth": {"method": "basic"},
            "list": [{"password": "x2"}, "abcdefgh1234"],
            "arguments": ["--api-key", "x3", "--seed", "1"],
        }
    )
    assert {"trainer.entropy_coeff": 0.5, "trainer.max_tokens": 512}.items() <= shown.items()
    reported = repr(shown)
    for secret in ("x1", "x2", "x3", "x4", "abcdefgh1234", "basic"):
        assert secret not in reported, secret


def test_streams_say_who_made_them() -> None:
    config = verl_fakes.config()
    config["actor_rollout_ref"]["rollout"] |= {"logprobs_mode": "processed_logprobs", "top_p": 0.9}
    streams = configuration.streams(config)["streams"]
    assert streams["rollout"] == {
        "producer": "rollout", "engine": "vllm", "processed": True,
        "temperature": 0.7, "top_p": 0.9,
    }  # fmt: skip
    assert streams["old"] == {"producer": "trainer", "engine": "fsdp2", "temperature": 0.7}


def test_verl_s_debugger_is_handed_on_with_absolute_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text('{"task": "statistics", "level": "L1"}')
    block = {
        "config_path": "config.json", "stages": ["critic_update"], "strict": True, "steps": [2, 7]
    }  # fmt: skip
    config: dict[str, object] = verl_fakes.config() | {
        "global_profiler": {
            "tool": "precision_debugger", "steps": [1, 2], "save_path": "dumps",
            "global_tool_config": {"precision_debugger": block},
        },
        "critic": {"profiler": {"enable": True, "all_ranks": True}},
    }  # fmt: skip
    assert configuration.profiler(verl_fakes.config()) is None
    planted = Context(run="r", attempt_key=None, step=1, profiler=configuration.profiler(config))
    found = context.parse(planted.text()).profiler
    assert found is not None
    [capture] = captures_from_verl(found)
    assert (capture["stages"], capture["steps"]) == (["critic_update"], [2])
    assert (capture["strict"], Path(str(capture["data_dir"]))) == (True, tmp_path / "dumps")


def test_a_context_of_a_later_version_is_understood() -> None:
    text = Context(run="r", attempt_key="a", step=3).text()
    later = text[:-1] + ', "colour": "red"}'
    assert context.parse(later) == context.parse(text)


def test_a_batch_that_can_carry_nothing_is_refused() -> None:
    with pytest.raises(TypeError, match="object has neither"):
        context.inject(object(), "text")
