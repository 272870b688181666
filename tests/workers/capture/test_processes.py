"""Captures in processes of their own: what is imported and printed, and several ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch.multiprocessing.spawn import spawn

REPOSITORY = Path(__file__).parents[3]
_START = """
import json, os, sys
sys.path[:0] = ["client", "workers", "."]
"""
# Before 2.5, torch.distributed leaves a temporary directory to the end of the process.
_WARNINGS = ("-W", "error", "-W", "ignore:Implicitly cleaning up:ResourceWarning")


def in_process(script: str, *arguments: str, **environment: str) -> str:
    """Run a script with warnings as errors and return what it printed."""
    inherited = {key: value for key, value in os.environ.items() if key != "MSPROBE_LOG_LEVEL"}
    done = subprocess.run(
        [sys.executable, *_WARNINGS, "-c", _START + textwrap.dedent(script), *arguments],
        cwd=REPOSITORY, env={**inherited, **environment}, capture_output=True, text=True,
        timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stderr == ""
    return done.stdout


def test_nothing_heavy_is_imported_before_a_capture() -> None:
    printed = in_process(
        """
        import stagescope_workers.probe.rank_plan
        import stagescope_workers.capture.msprobe_capture
        import stagescope_workers.capture.verl_blocks
        print(json.dumps([name for name in ("torch", "msprobe", "ray") if name in sys.modules]))
        """
    )
    assert json.loads(printed) == []


CAPTURE = """
import torch
from tests.support.small_decoder import begin, forward_backward, small_decoder, token_ids
model = small_decoder()
config = {"task": "statistics", "level": "mix"}
armed = begin({"config": config}, model, rank=4, data_root=sys.argv[1])
forward_backward(model, token_ids())
result = armed.finish(None)
assert result["state"] == "complete", result
"""


def test_a_capture_is_silent_and_leaves_no_false_tensorflow(tmp_path: Path) -> None:
    printed = in_process(
        CAPTURE
        + """
assert "tensorflow" not in sys.modules
assert "tensorflow.python" not in sys.modules
assert "MSPROBE_LOG_LEVEL" not in os.environ
""",
        str(tmp_path),
    )
    assert printed == ""


def test_a_chosen_log_level_is_respected(tmp_path: Path) -> None:
    printed = in_process(CAPTURE, str(tmp_path), MSPROBE_LOG_LEVEL="1")
    assert "debugger.start" in printed


def test_a_process_that_exits_inside_a_stage_leaves_its_dump(tmp_path: Path) -> None:
    script = CAPTURE.split("result =")[0] + "sys.exit(0)\n"
    in_process(script, str(tmp_path))
    dump = tmp_path / "run/k/step_1/actor_update/step0/rank4/dump.json"
    assert json.loads(dump.read_text(encoding="utf-8"))["data"]


def _rank(rank: int, world_size: int, directory: str) -> None:
    from tests.support.small_decoder import begin, forward_backward, small_decoder, token_ids
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{directory}/rendezvous", rank=rank, world_size=world_size
    )
    wait = vars(torch.distributed.Work)["wait"]
    model = DistributedDataParallel(small_decoder())
    tokens = token_ids(2 + rank)

    def gradients() -> dict[str, torch.Tensor]:
        forward_backward(model, tokens)
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    def all_reduce() -> object:
        work: Any = torch.distributed.all_reduce(torch.ones(1), async_op=True)
        return work.wait()

    expected, results = gradients(), []
    for step, level in enumerate(("L0", "L1", "mix", "L1")):
        request = {"config": {"task": "statistics", "level": level}}
        armed = begin(request, model, step=step, rank=rank, data_root=directory)
        gradients()
        all_reduce()
        results.append(armed.finish(None))
        assert vars(torch.distributed.Work)["wait"] is wait
        after = gradients()
        assert all(torch.equal(expected[name], after[name]) for name in expected)
        assert all_reduce() is True
    Path(directory, f"results-{rank}.json").write_text(json.dumps(results), encoding="utf-8")
    torch.distributed.barrier()  # gloo aborts a rank whose peer leaves in the middle of a call
    torch.distributed.destroy_process_group()


def test_two_ranks_of_ddp(tmp_path: Path) -> None:
    start: Any = spawn
    start(_rank, args=(2, str(tmp_path)), nprocs=2)
    for rank in range(2):
        results = json.loads((tmp_path / f"results-{rank}.json").read_text(encoding="utf-8"))
        assert [result["state"] for result in results] == ["complete"] * 4
        for step, result in enumerate(results):
            assert result["path"] == str(
                tmp_path / f"run/k/step_{step}/actor_update/step0/rank{rank}"
            )
            dump = json.loads((Path(result["path"]) / "dump.json").read_text(encoding="utf-8"))
            names = list(dump["data"])
            assert names
            collective = any(name.startswith("Distributed.all_reduce") for name in names)
            assert collective == (result["level"] != "L0")
