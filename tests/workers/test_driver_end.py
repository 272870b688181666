"""What a driver reports of the exception that ends it."""

from __future__ import annotations

import pytest

from stagescope_wire.nonfinite import JsonObject
from stagescope_workers.probe import driver_end
from stagescope_workers.transport import link
from stagescope_workers.transport.link import RayProcess

Told = list[tuple[str | None, JsonObject | None]]
"""Attempt keys, and what is said to have ended their drivers."""


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    """Be the driver of the job `job`; return what the service is told."""
    said: Told = []

    class Link:
        def drain(
            self,
            run: str | None,
            timeout: float,
            attempt_key: str | None = None,
            *,
            ended_by: JsonObject | None = None,
        ) -> JsonObject:
            said.append((attempt_key, ended_by))
            return {}

        def close(self) -> None:
            pass

    monkeypatch.delenv("STAGESCOPE_ATTEMPT", raising=False)
    monkeypatch.setattr(link, "ray_process", lambda: RayProcess("job", "node", is_driver=True))
    monkeypatch.setattr(link, "find_link", lambda *_: Link())
    monkeypatch.setattr(driver_end, "_check_head", lambda: None)
    monkeypatch.setattr(driver_end, "_reported", set())
    return said


@pytest.mark.parametrize(
    ("error", "kind", "is_interruption"),
    [
        (KeyboardInterrupt(), "KeyboardInterrupt", True),
        (SystemExit(15), "SIGTERM", True),
        (SystemExit(1), "SystemExit", False),
        (ValueError("no data"), "ValueError", False),
    ],
)
def test_the_exception_that_ends_a_driver_is_reported_once(
    told: Told, error: BaseException, kind: str, is_interruption: bool
) -> None:
    try:
        raise error
    except BaseException:
        driver_end.report_handled()  # as in `finally: ray.shutdown()`
    driver_end.report(error)  # as at the end of the process
    [(key, fields)] = told
    assert key == "job"
    assert fields is not None
    assert fields["error_type"] == kind
    assert fields.get("interrupted", False) is is_interruption


@pytest.mark.parametrize("error", [SystemExit(), SystemExit(0), StopIteration(), None])
def test_an_ordinary_end_is_not_reported(told: Told, error: BaseException | None) -> None:
    try:
        if error is not None:
            raise error
    except BaseException:
        driver_end.report_handled()
    else:
        driver_end.report_handled()
    assert told == []


def test_a_worker_of_the_job_does_not_speak_for_it(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = RayProcess("job", "node", is_driver=False)
    monkeypatch.setattr(link, "ray_process", lambda: worker)
    driver_end.report(KeyboardInterrupt())
    assert told == []


@pytest.mark.parametrize("problem", [OSError("no head"), KeyboardInterrupt()])
def test_no_problem_of_the_report_reaches_the_driver(
    told: Told, monkeypatch: pytest.MonkeyPatch, problem: BaseException
) -> None:
    def fail() -> None:
        raise problem

    monkeypatch.setattr(driver_end, "_check_head", fail)
    driver_end.report(ValueError("no data"))
    assert told == []
