"""What holds for every test: hypothesis judges what is right, not how fast a shared machine is."""

from __future__ import annotations

import importlib.metadata
import os

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "shared-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("shared-machine")

# CTranslate2 reads it when it is first imported; see examples/countdown/engine.py.
os.environ.setdefault("CT2_USE_MKL", "1")


def pytest_configure(config: pytest.Config) -> None:
    """Let Rays before 2.50 leave their log files and processes to the garbage collector."""
    major, minor = map(int, importlib.metadata.version("ray").split(".")[:2])
    if (major, minor) < (2, 50):
        config.addinivalue_line("filterwarnings", "ignore::ResourceWarning")
