"""Comparisons of large tables in a separate process."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.dumps import table
from tests.support.small_decoder import small_decoder

from stagescope_service.compare.operators import comparison_process
from stagescope_service.compare.operators.differences import Thresholds
from stagescope_wire.errors import NotFound, NotReady, StagescopeError

LARGE = comparison_process.SMALL_ROWS + 1


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Tables of a model, and of one with a NaN in a layer."""
    broken = small_decoder()
    with torch.no_grad():
        broken.get_parameter("blocks.1.down.weight")[3, 5] = float("nan")
    models = (small_decoder(), broken)
    return [table(tmp_path_factory.mktemp("table"), model, level="mix") for model in models]


def divergence(
    tables: list[Path], rows: int, thresholds: Thresholds | None = None
) -> dict[str, Any]:
    a, b = tables
    thresholds = thresholds or Thresholds()
    return comparison_process.divergence(a, b, thresholds, rows=rows, skip_sharded=False, limit=5)


def test_a_separate_process_answers_the_same(tables: list[Path]) -> None:
    here, there = (divergence(tables, rows) for rows in (0, LARGE))
    assert repr(here) == repr(there)  # NaN differs from itself
    assert "blocks.1.down" in there["first"]["a"]["parent"]
    thresholds = Thresholds(by_dtype={"float32": 1.0}, factor=2.0)
    assert divergence(tables[:1] * 2, LARGE, thresholds)["same"] is True
    paths = dict(enumerate(tables))
    found = comparison_process.non_finite(paths, rows=LARGE)
    assert found == comparison_process.non_finite(paths, rows=0)
    assert found == {"earliest": 1, "together": [1], "order_differs": []}


def test_its_errors_are_raised_by_the_call(tables: list[Path], tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no operator table"):
        divergence([tables[0], tmp_path / "gone.parquet"], LARGE)


def test_it_ends_after_its_time_limit(tables: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stagescope_service.compare.operators.comparison_process.MAX_SECONDS", 0.01)
    with pytest.raises(NotReady, match="took over"):
        divergence(tables, LARGE)


def test_its_death_is_an_error(tables: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "false")
    with pytest.raises(StagescopeError, match="ended with code 1"):
        divergence(tables, LARGE)
