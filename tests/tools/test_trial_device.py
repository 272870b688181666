"""A trial of a device: on the host as a process, on a pretended device, and with planted faults."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.pretended_device import PretendedTarget
from tests.tools.trial_device import (
    __main__,
    checksums,
    copies,
    load,
    ownership,
    pinned,
    report,
    timing,
    wheels,
)
from tests.tools.trial_device import target as target_module
from tests.tools.trial_device.results import QUICK, Effort, Outcome, Result
from tests.tools.trial_device.target import Target

from stagescope_workers import device
from stagescope_workers.device import DeviceTimer, HostCopy, PinnedPool
from stagescope_workers.payload import host_tensor
from stagescope_workers.probe import draft

ROOT = Path(__file__).resolve().parents[2]
HOST = Target("cpu")

Measure = Callable[[Target, Any], Result]


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> PretendedTarget:
    target = PretendedTarget()
    for module in (target_module, checksums, copies, timing):
        monkeypatch.setattr(module, "time", target.backend.clock)
    empty = torch.empty
    monkeypatch.setattr(device, "device_backend", lambda tensor: target.backend)
    monkeypatch.setattr(DeviceTimer, "start", lambda: DeviceTimer(target.backend))
    # Pinning needs an accelerator.
    monkeypatch.setattr(torch, "empty", lambda *a, pin_memory=False, **k: empty(*a, **k))
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: True)
    return target


def outcomes(result: Result) -> dict[str, Outcome]:
    return {each.statement: each.outcome for each in result.checks}


def is_figure(value: object) -> bool:
    if isinstance(value, list):
        return all(all(map(is_figure, part.values())) for part in value)
    return value is None or isinstance(value, str) or math.isfinite(float(str(value)))


def test_a_trial_on_the_host_passes_and_writes_its_figures(tmp_path: Path) -> None:
    file = tmp_path / "trial.json"
    done = subprocess.run(
        [sys.executable, "-m", "tests.tools.trial_device", "--device", "cpu", "--quick",
         "--json", str(file)],
        cwd=ROOT, capture_output=True, text=True, timeout=240,
        env={**os.environ, "PYTHONPATH": "client:workers:service:."},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(file.read_text())
    assert {*found} == {"schema", "outcome", "device", "quick", "seconds", "measurements"}
    assert (found["schema"], found["outcome"], found["quick"]) == (report.SCHEMA, "passed", True)
    assert found["device"]["kind"] == "cpu"
    assert found["device"]["name"]
    assert [*found["measurements"]] == [*__main__.MEASUREMENTS]
    for name, measured in found["measurements"].items():
        checks = measured.pop("checks")
        assert measured["title"] in done.stdout
        assert all(is_figure(value) for value in measured.values()), name
        for check in checks:
            assert {*check} == {"statement", "outcome", "reason"}
            assert check["outcome"] in ("passed", "not possible here"), check
            assert check["statement"] in done.stdout
    passed = {name for name, measured in _checks(file).items() if "passed" in measured}
    assert passed == {*__main__.MEASUREMENTS} - {"pinned", "timing"}
    assert "0 failed" in done.stdout


def _checks(file: Path) -> Mapping[str, list[str]]:
    found = json.loads(file.read_text())["measurements"]
    return {name: [check["outcome"] for check in found[name]["checks"]] for name in found}


@pytest.mark.parametrize(
    "measure", [pinned.measure, copies.measure, ownership.measure, timing.measure,
                checksums.measure]
)  # fmt: skip
def test_a_pretended_device_passes(pretended: PretendedTarget, measure: Measure) -> None:
    result = measure(pretended, QUICK)
    assert not [each for each in result.checks if each.outcome is Outcome.FAILED]
    assert any(each.outcome is Outcome.PASSED for each in result.checks)
    assert report.table(result)


def test_record_that_keeps_no_copy_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft, "copy_tensor", lambda name, value, pool: host_tensor(name, value))
    found = ownership.measure(HOST, QUICK)
    assert outcomes(found)[ownership._STATEMENT] is Outcome.FAILED
    assert "float32 of step 0" in found.checks[0].reason


def test_copy_that_is_read_too_late_is_found(
    pretended: PretendedTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where it is queued on another stream, behind what overwrites the tensor."""
    start = device._start_copy

    def late(name: str, values: torch.Tensor, offsets: Any, pool: PinnedPool) -> Any:
        copy = start(name, values, offsets, pool)
        if isinstance(copy, HostCopy):
            copy._pinned = values.as_subclass(torch.Tensor)
        return copy

    monkeypatch.setattr(device, "_start_copy", late)
    assert outcomes(ownership.measure(pretended, QUICK))[ownership._STATEMENT] is Outcome.FAILED
    assert outcomes(copies.measure(pretended, QUICK))[copies._RETURNS] is Outcome.FAILED


def test_copy_that_waits_for_the_device_is_found(
    pretended: PretendedTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_tensor = device.copy_tensor

    def blocking(name: str, value: object, pool: PinnedPool) -> Any:
        copy = copy_tensor(name, value, pool)
        assert isinstance(copy, HostCopy)
        copy._event.synchronize()
        return copy

    monkeypatch.setattr(copies, "copy_tensor", blocking)
    assert outcomes(copies.measure(pretended, QUICK))[copies._RETURNS] is Outcome.FAILED


def test_memory_that_grows_is_found() -> None:
    flat = {"memory of the process": 500.0, "device memory": 90.0, "pinned memory": 8.0,
            "reserved of the pinned pool": 0.0, "waiting bytes": 0.0, "descriptors": 9.0,
            "threads": 7.0}  # fmt: skip
    for what, most in (("pinned memory", 80.0), ("threads", 30.0), ("memory of the process", 900)):
        growing = [{**flat, what: flat[what] + at / 100.0 * most} for at in range(100)]
        assert [each.what for each in load._watched(growing) if each.is_growth] == [what]
    late_start = [{**flat, "device memory": 0.0}] * 10 + [flat] * 90
    assert not [each for each in load._watched(late_start) if each.is_growth]


def test_measurement_that_raises_fails_the_trial_and_hides_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(target: Target, effort: Effort) -> Result:
        raise RuntimeError("CUDA error: an illegal memory access")

    measurements = {"broken": broken, "pinned": pinned.measure}
    monkeypatch.setattr(__main__, "MEASUREMENTS", measurements)
    file = tmp_path / "trial.json"
    words = ["--device", "cpu", "--quick", "--json", str(file)]
    assert __main__.main(words) == 1
    assert _checks(file)["broken"] == ["failed"]
    assert {*_checks(file)["pinned"]} == {"not possible here"}
    shown = capsys.readouterr().out
    assert "RuntimeError: CUDA error: an illegal memory access" in shown
    assert "5 checks: 0 passed, 1 failed, 4 not possible here" in shown


def test_no_measurement_begins_after_the_limit(tmp_path: Path) -> None:
    trial = __main__.run(
        HOST, QUICK, deadline=time.monotonic() - 1.0, json=None, is_quick=True
    )  # fmt: skip
    assert {each.outcome for each in trial.checks} == {Outcome.NOT_POSSIBLE}
    assert trial.outcome is Outcome.PASSED


def test_device_that_is_missing_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has one")
    assert __main__.main(["--device", "cuda"]) == 2
    assert "finds no cuda device" in capsys.readouterr().err


def test_tarball_of_wheels_has_a_limit(tmp_path: Path) -> None:
    for name, size in (("small", 10), ("large", 3000)):
        (tmp_path / f"{name}-1-py3-none-any.whl").write_bytes(b"x" * size)
    archive = tmp_path / "dist" / wheels.archive_name("3.12", "aarch64")
    assert archive.name == "trial-device-wheels-cp312-aarch64.tar"
    with pytest.raises(ValueError, match=r"the largest wheels: large-1"):
        wheels.pack(tmp_path, archive, most_bytes=5000)
    assert not archive.exists()
    assert wheels.pack(tmp_path, archive) == archive.stat().st_size
    with tarfile.open(archive) as tar:
        assert tar.getnames() == ["large-1-py3-none-any.whl", "small-1-py3-none-any.whl"]
