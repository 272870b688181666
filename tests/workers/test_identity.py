"""Who a process is, without its secrets, and never at the price of an error."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from tests.support.coordinators import FakeCoordinator

from stagescope_service.compare.fingerprints import MOST_MODULES
from stagescope_workers.probe import identity, lifecycle
from stagescope_workers.probe.handshake import Handshake, launch_text
from stagescope_workers.probe.options import ProbeOptions
from stagescope_workers.probe.probe import Probe
from stagescope_workers.probe.watchdog import StageTracker
from stagescope_workers.transport.calls import Clock
from stagescope_workers.transport.outbox import Outbox


def test_secrets_are_left_out_by_name_and_by_value() -> None:
    environment = {
        "HF_TOKEN": "hidden", "wandb_api_key": "hidden", "DB_PASSWORD": "hidden",
        "AWS_SECRET_ACCESS": "hidden", "GOOGLE_APPLICATION_CREDENTIALS": "hidden",
        "PROXY": "http://user:hidden@proxy:80", "NCCL_DEBUG": "INFO", "CUDA_LONG": "x" * 10_000,
        "GIT_CRED": "hidden", "MY_DSN": "hidden", "RAY_AUTH_TOKEN": "hidden",
    }  # fmt: skip
    shown = identity.visible_environment(environment)
    assert set(shown) == {"NCCL_DEBUG", "CUDA_LONG"}
    assert len(shown["CUDA_LONG"]) == 2000


@pytest.mark.parametrize(
    ("argument", "shown"),
    [
        ("--api-key=hidden", "--api-key=..."),
        ("--lr=1e-6", "--lr=1e-6"),
        ("postgresql://me:hidden@db/x", "postgresql://...@db/x"),
    ],
)
def test_arguments_are_shown_without_secrets(argument: str, shown: str) -> None:
    assert identity.hide(argument) == shown


def test_a_line_is_shown_without_secrets() -> None:
    line = "python 'my train.py' --token hidden --lr 1e-6 --no-auth --n 5 https://me:hidden@host/x"
    shown = identity.visible_line(line)
    assert shown == "python my train.py --token ... --lr 1e-6 --no-auth --n 5 https://...@host/x"
    assert identity.visible_line("train.py --name it's --key=hidden") == (
        "train.py --name it's --key=..."
    )


def test_git_commit_and_dirt_are_read(tmp_path: Path) -> None:
    assert identity.git_state(tmp_path) is None
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e@example.org"]
    file = tmp_path / "train.py"
    file.write_text("1")
    for command in (["init", "-q"], ["add", "train.py"], ["commit", "-q", "-m", "one"]):
        subprocess.run([*git, *command], check=True)
    clean = identity.git_state(tmp_path)
    assert clean is not None
    assert len(str(clean["commit"])) == 40
    assert clean["dirty"] is False
    file.write_text("2")
    dirty = identity.git_state(tmp_path)
    assert dirty is not None
    assert dirty["dirty"] is True


def test_git_is_that_of_the_directory_that_the_training_was_started_in(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    there = identity.fingerprint({}, str(tmp_path))["git"]
    assert there == {"commit": None, "dirty": False}  # no commit yet: not this repository's
    assert identity.fingerprint({})["git"] == identity.git_state(Path.cwd())


def test_layout_keeps_what_was_declared_and_omits_what_is_unknown() -> None:
    layout = identity.detect_layout({"tp_rank": 1, "host": "mine", "x_rank": 3}, node=None)
    assert layout["tp_rank"] == 1
    assert layout["host"] == "mine"
    assert layout["x_rank"] == 3
    assert "node" not in layout


def test_best_round_trip_gives_the_clock_and_old_ones_do_not() -> None:
    clock = Clock()
    assert clock.best(0.0) is None
    clock.add(sent=100.0, duration=20.0, service=115.0, mono=1.0)
    clock.add(sent=200.0, duration=0.2, service=205.1, mono=2.0)
    best = clock.best(3.0)
    assert best is not None
    assert best == pytest.approx((5.0, 0.1))
    assert clock.best(1000.0) is None


def test_after_a_clock_was_set_earlier_round_trips_do_not_count() -> None:
    clock = Clock()
    clock.add(sent=200.0, duration=0.2, service=205.1, mono=2.0)
    clock.add(sent=300.0, duration=4.0, service=305.1, mono=3.0)  # slow, and it agrees
    assert clock.best(3.0) == pytest.approx((5.0, 0.1))
    clock.add(sent=400.0, duration=4.0, service=7605.1, mono=4.0)
    assert clock.best(4.0) == pytest.approx((7203.1, 2.0))


def test_finish_without_ray_closes_the_probes_of_the_process() -> None:
    program = """
import time
from stagescope_workers import finish, init
probe = init("plain", attempt_key="a", rank=0)
with probe.stage("s", step=1):
    pass
began = time.monotonic()
assert finish(timeout=4.0) is False  # nobody received anything, and it says so
assert time.monotonic() - began < 8.0
assert probe.is_inert
assert finish(timeout=4.0) is False  # nothing is left to wait for, and still nothing came
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_exit_of_a_plain_process_does_not_hang() -> None:
    program = "from stagescope_workers import init; init('plain').begin('s', step=1)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_rank_and_world_size_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("STAGESCOPE_ATTEMPT", "from-environment")
    probe = lifecycle.init("environment")
    assert (probe.rank, probe.attempt_key) == (3, "from-environment")
    assert probe._options.world_size == 4
    assert lifecycle.current() is probe
    probe.close(0.0)


MAIN = """
import json, helper, numpy, stagescope
from stagescope_workers.probe.identity import fingerprint
print(json.dumps(fingerprint({})["code"]))
"""


def hashes(folder: Path) -> dict[str, str]:
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=folder, capture_output=True, text=True, timeout=100,
        check=True,
    )  # fmt: skip
    found: dict[str, str] = json.loads(done.stdout)
    return found


def test_a_script_outside_of_git_and_what_it_imports_have_a_hash(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(MAIN)
    (tmp_path / "helper.py").write_text("LR = 1e-6\n")
    first = hashes(tmp_path)
    # Of packages and the standard library there are versions.
    assert set(first) == {"train.py", "helper"}
    assert hashes(tmp_path) == first
    (tmp_path / "helper.py").write_text("LR = 1e-5\n")
    second = hashes(tmp_path)
    assert {name for name in first if first[name] != second[name]} == {"helper"}
    (tmp_path / "train.py").write_text(MAIN + "# edited\n")
    assert hashes(tmp_path)["train.py"] != first["train.py"]


def test_the_script_of_a_ray_job_s_driver_is_found_by_its_command_line(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("1\n")
    expected = ("train.py", identity.file_hash(script))
    assert identity.script_of("python3 train.py --lr 1", str(tmp_path)) == expected
    assert identity.script_of(f"python3 {script} other.py", None) == expected
    for line in ("python3 -m verl.trainer", "python3 gone.py", "bash run.sh"):
        assert identity.script_of(line, str(tmp_path)) is None
    assert identity.script_of("python3 train.py", None) is None


def test_the_service_knows_how_many_modules_are_reported() -> None:
    assert identity.MAX_FILES == MOST_MODULES


LAZY = """
import importlib.util, json, sys
from stagescope_workers.probe.identity import loaded_code
spec = importlib.util.find_spec("lazy")
spec.loader = importlib.util.LazyLoader(spec.loader)
sys.modules["lazy"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["lazy"])
print(json.dumps(loaded_code()))
"""


def test_a_module_that_waits_for_its_first_use_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LAZY)
    (tmp_path / "lazy.py").write_text("raise SystemExit('it was run')\n")
    assert set(hashes(tmp_path)) == {"train.py", "lazy"}


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_alone_hashes_its_code(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def loaded_code() -> dict[str, str]:
        asked.append("code")
        return {"train.py": "0123"}

    monkeypatch.setattr(identity, "loaded_code", loaded_code)
    options, outbox = ProbeOptions(run="r", rank=rank), Outbox()
    Handshake(options, "i", outbox, StageTracker(outbox, watchdog_seconds=0.0)).fill_hello()
    [hello] = outbox.next_batch()
    assert (asked, "code" in cast("Any", hello.fields["fingerprint"])) == (
        (["code"], True) if rank == 0 else ([], False)
    )


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


MakeProbe = Callable[..., Probe]
OLD = "torch 2.3.1+cu121 is not supported, 2.4 and later are: pip install 'torch>=2.4'"
NEW = "ray 99.0.0 was not tried with stagescope: 2.44 to 2.60 were"


@pytest.fixture
def _odd_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have two packages installed that no test ran with."""
    versions = {"torch": "2.3.1+cu121", "ray": "99.0.0"}

    def version(package: str) -> str:
        if package in versions:
            return versions[package]
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(importlib.metadata, "version", version)


@pytest.mark.usefixtures("_odd_versions")
@pytest.mark.parametrize(
    ("rank", "logged"), [(0, [(logging.WARNING, OLD), (logging.INFO, NEW)]), (1, [])]
)
def test_rank_0_logs_it_once_and_every_rank_tells_the_service(
    make_probe: MakeProbe,
    coordinator: FakeCoordinator,
    caplog: pytest.LogCaptureFixture,
    rank: int,
    logged: list[tuple[int, str]],
) -> None:
    caplog.set_level(logging.INFO)
    probe = make_probe(rank=rank, strict=True)
    for step in range(3):
        with probe.stage("actor_update", step=step) as stage:
            stage.log(loss=1.0)
    coordinator.fields("end", 3)
    lines = [(record.levelno, record.getMessage()) for record in caplog.records]
    assert [line for line in lines if line[1] in (OLD, NEW)] == logged
    versions = coordinator.fields("hello")[0]["fingerprint"]["versions"]
    assert versions["unsupported"] == [OLD]
    assert NEW in versions["untried"]
