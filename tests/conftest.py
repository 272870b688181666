"""What holds for every test: hypothesis judges what is right, not how fast a shared machine is."""

from __future__ import annotations

import atexit
import importlib.metadata
import os
import shutil
import tempfile

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "shared-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("shared-machine")

# A probe looks for a service by itself: no test may find, and report to, its developer's own.
for _name in ("STAGESCOPE_URL", "STAGESCOPE_TOKEN", "STAGESCOPE_TOKEN_FILE"):
    os.environ.pop(_name, None)
os.environ["STAGESCOPE_HOME"] = tempfile.mkdtemp(prefix="stagescope-tests-")
atexit.register(shutil.rmtree, os.environ["STAGESCOPE_HOME"], ignore_errors=True)

# CTranslate2 reads it when it is first imported; see examples/countdown/engine.py.
os.environ.setdefault("CT2_USE_MKL", "1")


def pytest_configure(config: pytest.Config) -> None:
    """Let Rays before 2.50 leave their log files and processes to the garbage collector."""
    major, minor = map(int, importlib.metadata.version("ray").split(".")[:2])
    if (major, minor) < (2, 50):
        config.addinivalue_line("filterwarnings", "ignore::ResourceWarning")
