"""Hashes of a training's code, in git or not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from stagescope_service.compare.fingerprints import MOST_MODULES
from stagescope_workers.probe import identity
from stagescope_workers.probe.handshake import Handshake
from stagescope_workers.probe.options import ProbeOptions
from stagescope_workers.probe.watchdog import StageTracker
from stagescope_workers.transport.outbox import Outbox

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
