"""What a launcher says of its starts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from stagescope_workers.probe.handshake import launch_text

TORCHRUN = {"TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_RESTART_COUNT": "0", "WORLD_SIZE": "2"}
FILE = "/tmp/torchelastic_x/none_1234/attempt_0/0/error.json"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (TORCHRUN, {**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "1"}),
        (TORCHRUN, {**TORCHRUN, "TORCHELASTIC_RUN_ID": "b"}),
        # Without an id of its own, the folder of each torchrun has one.
        (
            {**TORCHRUN, "TORCHELASTIC_ERROR_FILE": FILE},
            {**TORCHRUN, "TORCHELASTIC_ERROR_FILE": FILE.replace("1234", "5678")},
        ),
        ({"SLURM_JOB_ID": "7"}, {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}),
        ({"SLURM_JOB_ID": "7"}, {"SLURM_JOB_ID": "8"}),
        (
            {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"},
            {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "1", "SLURM_STEP_NUM_TASKS": "2"},
        ),
        ({"JOBSET_RESTART_ATTEMPT": "0"}, {"JOBSET_RESTART_ATTEMPT": "1", "JOBSET_NAME": "j"}),
    ],
)
def test_two_starts_of_a_launcher_differ(before: dict[str, str], after: dict[str, str]) -> None:
    assert launch_text(before, 2) == launch_text({**before}, 2)
    assert None not in (first := launch_text(before, 2), second := launch_text(after, 2))
    assert first != second


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"SLURM_STEP_ID": "3"},
        # It starts one of several ranks: that one may be replaced alone.
        {**TORCHRUN, "WORLD_SIZE": "1"},
    ],
)
def test_a_launcher_of_less_than_all_ranks_says_nothing(environ: dict[str, str]) -> None:
    assert launch_text(environ, 2) is None
    alone = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "3", "SLURM_STEP_NUM_TASKS": "1"}
    assert launch_text(alone, 2) == launch_text({**alone, "SLURM_STEP_ID": "4"}, 2)


def test_ray_s_workers_have_the_variables_of_ray_start() -> None:
    assert launch_text({**TORCHRUN, "SLURM_JOB_ID": "7"}, 2, in_ray=True) is None


def test_torchrun_s_own_restarts_differ(tmp_path: Path) -> None:
    """Rank 1 fails at first, and torchrun starts both again; then the whole command again."""
    pytest.importorskip("torch")
    script = tmp_path / "train.py"
    script.write_text(
        "import json, os, sys\n"
        "from stagescope_workers.probe.handshake import launch_text\n"
        "os.write(1, (json.dumps([os.environ['RANK'], launch_text(os.environ, 2)]) + '\\n')"
        ".encode())\n"
        "sys.exit(os.environ['RANK'] + os.environ['TORCHELASTIC_RESTART_COUNT'] == '10')\n"
    )
    said: list[tuple[str, str]] = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2",
             "--max-restarts", "1", "--master-port", "0", str(script)],
            capture_output=True, text=True, timeout=200, check=False,
        )  # fmt: skip
        said += [tuple(json.loads(line)) for line in done.stdout.splitlines()]
    launches = [launch for rank, launch in said if rank == "1"]
    assert len({*launches}) == len(launches) == 4, said
    assert {launch for rank, launch in said if rank == "0"} <= {*launches}
