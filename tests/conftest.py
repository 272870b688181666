"""What holds for every test: lanes, one cluster for several files, no service but its own."""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.metadata
import inspect
import json
import os
import shutil
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Final

import pytest
from hypothesis import HealthCheck, settings

from tests import lanes

# Hypothesis judges what is right, not how fast a shared machine is.
settings.register_profile(
    "shared-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("shared-machine")

# A probe looks for a service by itself: no test may find, and report to, its developer's own.
for _name in ("STAGESCOPE_URL", "STAGESCOPE_TOKEN", "STAGESCOPE_TOKEN_FILE"):
    os.environ.pop(_name, None)
os.environ["STAGESCOPE_HOME"] = tempfile.mkdtemp(prefix="stagescope-tests-")
atexit.register(shutil.rmtree, os.environ["STAGESCOPE_HOME"], ignore_errors=True)

# Processes of tests share the cores: OpenMP's threads, which wait busily, would fight for them.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# CTranslate2 reads it when it is first imported; see examples/countdown/engine.py.
os.environ.setdefault("CT2_USE_MKL", "1")


def _write_without_waiting_for_the_disk() -> None:
    """No test cuts the power: what is written need not have reached the disk to be read again."""
    os.fsync = lambda fd: None
    with contextlib.suppress(ImportError):
        from sqlalchemy import Engine, event

        from stagescope_service.store import connect

        flushed = connect.writer_engine

        @functools.wraps(flushed)
        def unflushed(url: str) -> Engine:
            engine = flushed(url)
            if engine.dialect.name == "sqlite":
                event.listen(engine, "connect", lambda each, _: each.execute(_UNFLUSHED))
            return engine

        connect.writer_engine = unflushed


_UNFLUSHED: Final = "PRAGMA synchronous=OFF"
_write_without_waiting_for_the_disk()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of `tests/lanes.py`."""
    parser.addoption("--lane", choices=lanes.LANES, help="only the files of this lane")
    parser.addoption("--record-durations", action="store_true", help=f"in {lanes.DURATIONS.name}")


def _path_of(path: Path) -> str:
    return path.relative_to(lanes.ROOT).as_posix()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out the files of other lanes."""
    lane = config.getoption("--lane")
    is_test = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    if lane and is_test and not lanes.has(lane, _path_of(collection_path)):
        return True
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests of other lanes. Begin with the files that take longest.

    So none of these is left when the others are done.
    """
    if lane := config.getoption("--lane"):
        others = [item for item in items if not lanes.is_in(lane, item.nodeid)]
        items[:] = [item for item in items if lanes.is_in(lane, item.nodeid)]
        config.hook.pytest_deselected(items=others)
    if hasattr(config, "workerinput"):
        seconds = lanes.durations()
        items.sort(key=lambda item: -seconds.get(_path_of(item.path), 0.0))


_SECONDS: Final = defaultdict[str, float](float)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note how long each file takes."""
    _SECONDS[report.nodeid.partition("::")[0]] += report.duration


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write down how long each file took, in its own lane."""
    config = session.config
    if config.getoption("--record-durations") and not hasattr(config, "workerinput"):
        lane = config.getoption("--lane")
        own = {name: round(took, 1) for name, took in _SECONDS.items()
               if lane is None or lanes.is_in(lane, name)}  # fmt: skip
        kept = {
            name: took
            for name, took in sorted((lanes.durations() | own).items())
            if took >= lanes.QUICK_SECONDS and (lanes.ROOT / name).exists()
        }
        lanes.DURATIONS.write_text(json.dumps(kept, indent=0) + "\n")


_CLUSTERS: Final = contextlib.ExitStack()


@pytest.fixture(scope="session")
def clusters() -> contextlib.ExitStack:
    """The cluster that `address` has started; once it is closed, the next file starts another."""
    return _CLUSTERS


@pytest.fixture(scope="module")
def address(clusters: contextlib.ExitStack) -> str:
    """The address of the cluster of which this process is the driver.

    A start costs seconds: files take turns with one cluster, each with a service of its own.
    """
    ray = pytest.importorskip("ray")
    from tests.support.cluster import ray_cluster

    if not ray.is_initialized():
        clusters.enter_context(ray_cluster())
    return str(ray.get_runtime_context().gcs_address)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End the cluster before a test that shall see none; after a failure, with each file.

    Ranks that a failed test has left would report to the next file's service.
    """
    if (
        nextitem is None
        or nextitem.get_closest_marker("ray") is None
        or (item.session.testsfailed and nextitem.path != item.path)
    ):
        _CLUSTERS.close()


def pytest_configure(config: pytest.Config) -> None:
    """Let Rays before 2.50 leave their log files and processes to the garbage collector."""
    if hasattr(config, "workerinput"):
        _know_frames_of_xdist()
    major, minor = map(int, importlib.metadata.version("ray").split(".")[:2])
    if (major, minor) < (2, 50):
        config.addinivalue_line("filterwarnings", "ignore::ResourceWarning")


def _know_frames_of_xdist() -> None:
    """Tell `inspect` which module the outer frames of a worker of pytest-xdist belong to.

    msprobe asks `inspect.stack()` at each operator. For each frame whose file is that of no module,
    that searches all modules anew: a capture took ten times as long as without pytest-xdist.
    """
    frame = inspect.currentframe()
    while frame is not None:
        name = frame.f_code.co_filename
        if inspect.getmodule(frame) is None:
            inspect.modulesbyfile[name] = "__main__"
            inspect.modulesbyfile[os.path.abspath(name)] = "__main__"
        frame = frame.f_back
