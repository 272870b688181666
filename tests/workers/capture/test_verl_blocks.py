from __future__ import annotations

import copy
import logging
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from stagescope_wire.errors import InvalidPlan
from stagescope_wire.plan import CaptureRequest
from stagescope_workers.capture.verl_blocks import captures_from_verl, otherwise_in_verl
from stagescope_workers.probe.rank_plan import captures_from_yaml

# The blocks of verl's guide.
GUIDE = """
global_profiler:
  tool: precision_debugger
  steps: [1, 2, 5]
  save_path: "outputs/profile" # optional, not used by msprobe
  global_tool_config:
    precision_debugger:
      _target_: verl.utils.profiler.config.PrecisionDebuggerToolConfig
      enable: True
      config_path: /path/to/config.json
      data_dir: outputs/precision_debug
      steps: [1, 2, 5]
      stages:
        - actor_update
        - actor_compute_log_prob
        - ref_compute_log_prob
        - compute_values
        - critic_update
        - compute_rm_score
      strict: False
actor_rollout_ref:
  actor:
    profiler:
      enable: True
      all_ranks: False
      ranks: [0]
  ref:
    profiler:
      enable: True
      all_ranks: False
      ranks: [0]
critic:
  profiler:
    enable: True
    all_ranks: False
    ranks: [0]
"""
BLOCK = "global_profiler.global_tool_config.precision_debugger"
VERL_PROFILERS = (
    "actor_rollout_ref.actor.profiler", "actor_rollout_ref.ref.profiler", "critic.profiler"
)  # fmt: skip


def config(**changes: object) -> dict[str, object]:
    """The guide's blocks, with dotted paths set, or removed by `...`."""
    content: dict[str, Any] = copy.deepcopy(yaml.safe_load(GUIDE))
    for path, value in changes.items():
        *above, name = path.replace("BLOCK", BLOCK).split(".")
        node = content
        for key in above:
            node = node[key]
        if value is ...:
            del node[name]
        else:
            node[name] = value
    return content


def by_id(captures: list[CaptureRequest]) -> dict[str, CaptureRequest]:
    return {capture["capture_id"]: capture for capture in captures}


def test_the_guides_blocks() -> None:
    captures = by_id(captures_from_verl(config()))
    assert {name: capture["stages"] for name, capture in captures.items()} == {
        "verl-actor": ["actor_compute_log_prob", "compute_rm_score", "actor_update"],
        "verl-ref": ["ref_compute_log_prob"],
        "verl-critic": ["compute_values", "critic_update"],
    }
    for capture in captures.values():
        assert capture["steps"] == [1, 2, 5]
        assert capture["ranks"] == [0]
        assert capture["config_path"] == "/path/to/config.json"
        assert capture["data_dir"] == "outputs/precision_debug"
        assert capture["strict"] is False
        assert capture["source"] == "verl"
    assert "compute_rm_score has no profiler block" in captures["verl-actor"].get("notes", [])[-1]


@pytest.mark.parametrize(
    "changes",
    [
        {"global_profiler.tool": "nsys"},
        {"global_profiler.tool": None},
        {"global_profiler.tool": ...},
        {"BLOCK.enable": False},
        {BLOCK.rpartition(".")[0]: None},
        {"global_profiler": None},
        {"global_profiler": ...},
        {"BLOCK.config_path": None},
    ],
)
def test_what_gates_the_whole_block(changes: dict[str, object]) -> None:
    assert captures_from_verl(config(**changes)) == []


@pytest.mark.parametrize(
    ("outer", "inner", "steps"),
    [
        ([1, 2, 5], [2, 5, 9], [2, 5]),
        ([5, 1], None, [1, 5]),
        (None, [3], [3]),
        ([1], [2], None),
        (None, None, None),
        ([], [1], None),
    ],
)
def test_steps_of_both_levels(outer: object, inner: object, steps: object) -> None:
    captures = captures_from_verl(config(**{"global_profiler.steps": outer, "BLOCK.steps": inner}))
    assert [capture["steps"] for capture in captures] == ([] if steps is None else [steps] * 3)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"BLOCK.steps": ..., "ALL": True}, ""),
        ({"BLOCK.steps": [5, 2, 1], "ALL": True}, ""),  # the same steps
        ({"global_profiler.tool": "nsys", "BLOCK.steps": [2]}, ""),
        ({"BLOCK.enable": False, "BLOCK.steps": [2]}, ""),
        (
            {"BLOCK.steps": [9], "ALL": True},
            "ignores precision_debugger.steps ([9]) and captures steps [1, 2, 5], "
            "stagescope nothing",
        ),
        (
            {"global_profiler.steps": None, "BLOCK.steps": [3], "ALL": True},
            "ignores precision_debugger.steps ([3]) and captures nothing, stagescope steps [3]",
        ),
        (
            {"BLOCK.steps": ..., "critic.profiler.enable": False},
            "captures every rank of actor, stagescope ranks [0]; it captures every rank of ref, "
            "stagescope ranks [0]",
        ),
    ],
)
def test_one_line_says_what_verl_would_do_otherwise(changes: dict[str, object], line: str) -> None:
    for path in VERL_PROFILERS if changes.pop("ALL", False) else ():
        changes[f"{path}.all_ranks"] = True
    told = otherwise_in_verl(config(**changes), "0.9.1")
    assert told == (f"precision_debugger: verl 0.9.1 {line}" if line else "")


@pytest.mark.parametrize(
    ("block", "ranks"),
    [
        ({"enable": True, "all_ranks": True, "ranks": [1]}, "all"),
        ({"enable": True, "all_ranks": False, "ranks": [3, 1]}, [1, 3]),
        ({"enable": True}, "all"),
        ({"enable": True, "ranks": []}, "all"),
        ({"enable": False, "all_ranks": True}, None),
        ({"all_ranks": True}, None),
        (None, None),
    ],
)
def test_ranks_of_a_role(block: object, ranks: object) -> None:
    captures = by_id(captures_from_verl(config(**{"critic.profiler": block})))
    assert (captures["verl-critic"]["ranks"] if ranks is not None else None) == ranks
    assert ("verl-critic" in captures) == (ranks is not None)
    assert captures["verl-actor"]["ranks"] == [0]


def test_verl_leaves_the_choice_of_ranks_to_msprobes_configuration(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    changes = {"BLOCK.config_path": str(file), "critic.profiler": {"enable": True, "all_ranks": 1}}
    file.write_text('{"task": "statistics", "rank": [3, 1]}', encoding="utf-8")
    assert {str(c["ranks"]) for c in captures_from_verl(config(**changes))} == {"[1, 3]"}
    assert otherwise_in_verl(config(**changes, **{"BLOCK.steps": ...}), "0.9.1") == ""
    file.write_text('{"task": "statistics", "rank": []}', encoding="utf-8")
    captures = by_id(captures_from_verl(config(**changes)))
    assert (captures["verl-actor"]["ranks"], captures["verl-critic"]["ranks"]) == ([0], "all")


def test_the_actors_block_decides_for_the_reward_model() -> None:
    off = by_id(captures_from_verl(config(**{"actor_rollout_ref.actor.profiler.enable": False})))
    assert set(off) == {"verl-ref", "verl-critic"}
    alone = captures_from_verl(config(**{"BLOCK.stages": ["compute_rm_score"]}))
    assert [capture["stages"] for capture in alone] == [["compute_rm_score"]]


@pytest.mark.parametrize("stages", [None, ...])
def test_no_stages_are_all_stages(stages: object) -> None:
    captures = captures_from_verl(config(**{"BLOCK.stages": stages}))
    assert sum(len(capture["stages"]) for capture in captures) == 6
    assert captures_from_verl(config(**{"BLOCK.stages": []})) == []


def test_generation_is_left_out_also_when_strict() -> None:
    captures = captures_from_verl(
        config(**{"BLOCK.stages": ["rollout_generate", "actor_update"], "BLOCK.strict": True})
    )
    assert [capture["stages"] for capture in captures] == [["actor_update"]]
    assert captures[0]["strict"] is True
    assert any("rollout_generate is omitted" in note for note in captures[0].get("notes", ()))


def test_an_unknown_stage_raises_only_when_strict(caplog: pytest.LogCaptureFixture) -> None:
    changes: dict[str, object] = {"BLOCK.stages": ["actor_updates", "critic_update"]}
    with caplog.at_level(logging.WARNING, "stagescope_workers"):
        captures = captures_from_verl(config(**changes))
    assert [capture["stages"] for capture in captures] == [["critic_update"]]
    assert "actor_updates" in captures[0].get("notes", [])[0]
    assert len([record for record in caplog.records if "actor_updates" in record.message]) == 1
    with pytest.raises(InvalidPlan, match="'actor_updates'"):
        captures_from_verl(config(**changes, **{"BLOCK.strict": True}))


@pytest.mark.parametrize(
    "changes",
    [{"BLOCK.steps": "1,2"}, {"BLOCK.steps": [1.5]}, {"BLOCK.stages": "actor_update"},
     {"critic.profiler.ranks": [True]}],
)  # fmt: skip
def test_a_value_that_cannot_be_read(changes: dict[str, object]) -> None:
    assert captures_from_verl(config(**changes)) == []
    with pytest.raises(InvalidPlan, match="expected"):
        captures_from_verl(config(**changes, **{"BLOCK.strict": True}))


class Lazy(Mapping[str, object]):
    """A mapping as OmegaConf's: not a dict, and missing values raise when they are read."""

    def __init__(self, content: dict[str, object]) -> None:
        self._content = content

    def __getitem__(self, name: str) -> object:
        value = self._content[name]
        if value == "???":
            raise RuntimeError(f"Missing mandatory value: {name}")
        return Lazy(value) if isinstance(value, dict) else value

    def __iter__(self) -> Iterator[str]:
        return iter(self._content)

    def __len__(self) -> int:
        return len(self._content)


def test_configurations_that_only_look_like_dicts() -> None:
    given = config(**{"BLOCK.stages": "???"})
    expected = captures_from_verl(config(**{"BLOCK.stages": None}))
    assert captures_from_verl(Lazy(given)) == expected

    def as_object(node: object) -> object:
        if isinstance(node, dict):
            return types.SimpleNamespace(**{key: as_object(value) for key, value in node.items()})
        return node

    assert captures_from_verl(as_object(config())) == captures_from_verl(config())


def test_a_yaml_file_with_verls_blocks(tmp_path: Path) -> None:
    file = tmp_path / "verl.yaml"
    file.write_text(GUIDE, encoding="utf-8")
    captures = captures_from_yaml(str(file))
    assert len(captures) == 3
    assert captures[0]["data_dir"] == str(tmp_path / "outputs/precision_debug")
    assert captures[0]["config_path"] == "/path/to/config.json"


def test_a_yaml_file_with_captures(tmp_path: Path) -> None:
    file = tmp_path / "captures.yaml"
    (tmp_path / "config.json").write_text('{"task": "tensor"}', encoding="utf-8")
    text = """
    captures:
      - {stages: [actor_update], ranks: [0], steps: {every: 10}, config: {level: mix}}
      - {stages: all, steps: [3], config_path: config.json, data_dir: dumps, force: true}
    """
    file.write_text(text, encoding="utf-8")
    first, second = captures_from_yaml(str(file))
    assert first["capture_id"] == "captures-0"
    assert first["steps"] == {"every": 10, "start": None, "count": None}
    assert first["source"] == "yaml"
    assert first.get("force") is False
    assert second["config_path"] == str(tmp_path / "config.json")
    assert second["data_dir"] == str(tmp_path / "dumps")
    assert second["ranks"] == "all"
    assert second.get("force") is True


@pytest.mark.parametrize(
    "text",
    ["", "captures: 3", "- 3", "- {stages: [a]}", "{stages: [a], steps: all}", "a: [",
     "- {stages: [a], steps: all, config: {level: L9}}",
     "- {stages: [a], steps: all, config: {}, typo: 1}",
     "- {stages: [a], steps: all, config_path: none.json}"],
)  # fmt: skip
def test_a_yaml_file_that_requests_nothing_sensible(tmp_path: Path, text: str) -> None:
    file = tmp_path / "captures.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(InvalidPlan):
        captures_from_yaml(str(file))
    with pytest.raises(InvalidPlan, match="cannot be read"):
        captures_from_yaml(str(tmp_path / "nothing.yaml"))
