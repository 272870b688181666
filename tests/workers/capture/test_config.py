from __future__ import annotations

import json
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.dumps import capture_request
from tests.support.small_decoder import begin, forward_backward, small_decoder, token_ids
from tests.workers.capture.conftest import Captures

from stagescope_wire.errors import InvalidPlan
from stagescope_workers.capture import msprobe_config
from stagescope_workers.capture.msprobe_config import MsprobeConfig, check_config, resolve_config

# The two examples of verl's guide, with every key that it shows.
STATISTICS = {
    "task": "statistics", "dump_path": "/home/data_dump", "rank": [], "step": [], "level": "L1",
    "async_dump": False,
    "statistics": {
        "scope": [], "list": [], "tensor_list": [], "data_mode": ["all"],
        "summary_mode": "statistics",
    },
}  # fmt: skip
TENSOR = {
    "task": "tensor", "dump_path": "/home/data_dump", "rank": [], "step": [], "level": "L1",
    "async_dump": False,
    "tensor": {
        "scope": [], "list": [], "data_mode": ["all"], "bench_path": "/home/bench_data_dump",
        "summary_mode": "md5", "diff_nums": 5,
    },
}  # fmt: skip


@pytest.mark.parametrize("config", [STATISTICS, TENSOR])
def test_every_key_passes_through(config: Mapping[str, object]) -> None:
    given = {**config, "risk_level": "ALL", "extra_info": False, "of_the_future": {"deep": [1]}}
    resolved = resolve_config(capture_request(config=given), dump_path="/data/d", step=3)
    assert resolved.content == {**given, "dump_path": "/data/d"}
    assert resolved.overrides == (
        "dump_path: config.json says '/home/data_dump', the plan says '/data/d'",
    )


def test_the_plan_takes_precedence_and_is_reported() -> None:
    given = {"rank": [1, "2-3"], "step": [7], "dump_enable": False}
    resolved = resolve_config(
        capture_request(config=given, ranks=[0], steps=[5]), dump_path="/data/d", step=5
    )
    assert resolved.content["rank"] == []
    assert resolved.content["step"] == []
    assert resolved.content["dump_enable"] is True
    assert resolved.overrides == (
        "rank: config.json says [1, '2-3'], the plan says [0]",
        "step: config.json says [7], the plan says [5] (now step 5)",
        "dump_enable: config.json says false, the plan requests a dump: true",
    )
    same = resolve_config(capture_request(config={"rank": [0]}, ranks=[0]), dump_path="/d", step=1)
    assert same.overrides == ()
    assert given["rank"] == [1, "2-3"], "the order itself is not changed"


@pytest.mark.parametrize(
    ("config", "reported"),
    [
        ([], "config is []"),
        ({"task": "statistic"}, "config.task is 'statistic'"),
        ({"level": "L9"}, "config.level is 'L9'"),
        ({"rank": 0}, "config.rank is 0"),
        ({"async_dump": "yes"}, "config.async_dump is 'yes'"),
        ({"risk_level": "HIGH"}, "config.risk_level"),
        ({"task": "tensor", "tensor": []}, "config.tensor is []"),
        ({"statistics": {"list": "linear"}}, "config.statistics.list is 'linear'"),
        ({"statistics": {"data_mode": ["all", "input"]}}, "config.statistics.data_mode"),
        ({"statistics": {"data_mode": ["sideways"]}}, "config.statistics.data_mode"),
        ({"statistics": {"summary_mode": "sha"}}, "config.statistics.summary_mode is 'sha'"),
        ({"task": "tensor", "tensor": {"diff_nums": 0}}, "config.tensor.diff_nums is 0"),
        ({"task": "tensor", "tensor": {"bench_path": 3}}, "config.tensor.bench_path is 3"),
        ({"task": "tensor", "async_dump": True}, "no list"),
        ({"async_dump": True, "statistics": {"summary_mode": "md5"}}, "summary_mode 'md5'"),
        ({"level": "L2"}, "config.level is 'L2'"),
        ({"task": "nan_check", "level": "L0"}, "nan_check"),
        ({"rank": [{1, 2}]}, "cannot be written as JSON"),
    ],
)
def test_what_msprobe_refuses_is_refused_with_a_reason(config: object, reported: str) -> None:
    with pytest.raises(InvalidPlan, match=r"expected|JSON") as raised:
        check_config(config)
    assert reported in str(raised.value)


@pytest.mark.parametrize("text", ["{", "[1]", ""])
def test_a_file_that_is_no_configuration(tmp_path: Path, text: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(InvalidPlan, match=str(file)):
        msprobe_config.load_config(str(file))


def test_the_file_handed_over_is_private_and_removed(tmp_path: Path) -> None:
    config = MsprobeConfig({"task": "statistics", "extra": 1})
    with msprobe_config.temporary_config(config, tmp_path) as path:
        assert stat.S_IMODE(Path(path).stat().st_mode) == 0o600
        assert json.loads(Path(path).read_text(encoding="utf-8")) == config.content
    assert list(tmp_path.iterdir()) == []


def test_a_capture_from_a_path_sees_the_file_of_the_moment(
    captures: Captures, tmp_path: Path
) -> None:
    model, file = small_decoder(), tmp_path / "config.json"
    levels = []
    for step, level in enumerate(("L0", "L1")):
        file.write_text(json.dumps({"task": "statistics", "level": level}), encoding="utf-8")
        request = {"data_dir": str(captures.data_dir), "config_path": str(file)}
        armed = begin(request, model, step=step)
        forward_backward(model, token_ids())
        levels.append(armed.finish(None)["level"])
    assert levels == ["L0", "L1"]


def test_msprobes_own_filters_do_not_interfere(captures: Captures) -> None:
    """Its step filter would end for good after step 2, its rank filter needs torch.distributed."""
    model = small_decoder()
    for step in (1, 7, 40):
        captures.run(model, step=step, rank=3, config={"rank": [0], "step": [1, 2]})
        assert captures.last["path"].endswith(f"step_{step}/actor_update/step0/rank3")
        assert len(captures.last["overrides"]) == 2
        assert captures.entries()


def test_list_tensor_list_and_data_mode_reach_msprobe(captures: Captures) -> None:
    model = small_decoder()
    captures.run(model, section={"list": ["linear"], "data_mode": ["forward"]})
    assert captures.entries()
    assert all("linear" in name and "forward" in name for name in captures.entries())
    captures.run(model, step=2, section={"tensor_list": ["softmax"]})
    saved = list(Path(captures.last["path"]).rglob("*.pt"))
    assert saved
    assert all("softmax" in file.name for file in saved)


def test_only_tensors_that_differ_from_an_earlier_capture_are_written(captures: Captures) -> None:
    model = small_decoder()
    captures.run(model, level="L0", section={"summary_mode": "md5"})
    path = str(Path(captures.last["path"]).parents[1])
    location = {"stage": "actor_update", "part": "0.0.0.0", "role": "actor", "ranks": [0]}
    baseline = {"capture_id": "c", "step": 1, "dumps": [{**location, "path": path}]}
    spec: dict[str, Any] = {"task": "tensor", "level": "L0", "bench": baseline}

    def tensors() -> set[str]:
        return {file.name for file in Path(captures.last["path"]).rglob("*.pt")}

    captures.run(model, step=2, **spec)
    assert tensors() == set()
    with torch.no_grad():
        model.get_parameter("blocks.1.down.weight").mul_(1.5)
    captures.run(model, step=3, **spec)
    forward = {name for name in tensors() if ".forward." in name}
    assert "Module.blocks.1.down.Linear.forward.0.output.0.pt" in forward
    assert not [name for name in forward if name.startswith("Module.blocks.0.")]
    result = captures.begin(model, step=4, rank=1, **spec).finish(None)
    assert result["state"] == "failed"
    assert "no dump of actor_update part 0.0.0.0 of actor rank 1" in result["error"]
    # A baseline that the configuration itself names.
    section = {"bench_path": path, "diff_nums": -1}
    result = captures.begin(model, task="tensor", step=5, section=section, rank=1).finish(None)
    assert result["state"] == "failed"
    assert "has no directory step0/rank1" in result["error"]


def test_level_debug_saves_values_and_gradients(captures: Captures) -> None:
    from stagescope_workers.capture.msprobe_capture import save

    model = small_decoder()
    save(model(token_ids()), "outside")
    with captures.around(model, level="debug", rank=2):
        logits = model(token_ids())
        save(logits, "logits")
        logits.sum().backward()
    save(model(token_ids()), "outside")
    text = (Path(captures.last["path"]) / "debug.json").read_text(encoding="utf-8")
    assert sorted(json.loads(text)["data"]) == ["logits.0.debug", "logits_grad.0.debug"]
    assert captures.last["path"].endswith("rank2")
    assert captures.last["state"] == "complete"
