"""Who a process is, without its secrets, and never at the price of an error."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from stagescope_workers.probe import identity, lifecycle
from stagescope_workers.transport.calls import Clock


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
