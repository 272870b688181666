from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from examples.countdown.collective import Collective
from examples.countdown.config import NONE, Settings, Troubles
from examples.countdown.trainer import Trainer
from stagescope_workers import Probe, init


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch) -> Iterator[Probe]:
    """A real probe that finds no service: training must not notice."""
    monkeypatch.delenv("STAGESCOPE_URL", raising=False)
    probe = init("countdown-test", rank=0, world_size=1, strict=True)
    yield probe
    probe.close(0.0)


@pytest.fixture
def make_trainer(probe: Probe) -> Iterator[Callable[..., Trainer]]:
    threads = torch.get_num_threads()

    def make(troubles: Troubles = NONE, **changes: Any) -> Trainer:
        settings = Settings(
            **{"world_size": 1, "groups": 2, "warmup_steps": 2, "warmup_rows": 4, **changes}
        )
        return Trainer(settings, Collective(0, 1), probe, troubles=troubles)

    yield make
    torch.set_num_threads(threads)
