"""The quick look at many cells misses no check that fails."""

from __future__ import annotations

import numpy as np
from tests.service.statistics.test_comparability import DAMAGE, SAMPLING, assembled, sick_batch
from tests.support.sampler import draw

from stagescope_service.statistics.cell import Cell, merge_groups
from stagescope_service.statistics.comparability import examine_ranks, may_be_suspect
from stagescope_service.statistics.exact import are_equal
from stagescope_service.statistics.quick_look import CELL_CHECKS, may_be_equal, may_fail
from stagescope_service.statistics.step_checks import StepChecks


def test_every_check_that_fails_in_a_cell_is_among_the_candidates() -> None:
    """In ranks of sick batches, alone and two by two."""
    steps = [
        assembled(sick_batch(name, (8, 128, 20), model, "bf16")[1], 8)
        for name in (*SAMPLING, *DAMAGE)
        for model in ("usual", "sure", "certain")
    ]
    of_ranks = np.stack([row.cell.vector for step in steps for row in step.ranks])
    both = np.concatenate([of_ranks, np.random.default_rng(3).permutation(of_ranks)])
    pairs = np.tile(np.arange(len(of_ranks)), 2)
    vectors = np.concatenate([of_ranks, merge_groups(pairs, len(of_ranks), both)])
    candidates, may_equal = may_fail(vectors), may_be_equal(vectors)
    checks, failing = StepChecks(steps[0].summary), set()
    for at, cell in enumerate(map(Cell, vectors)):
        for check in checks.check_cell(cell):
            name = "calibration" if check.name == "renormalised" else check.name
            if check.status == "suspect":
                assert {n: mask for n, mask in candidates.items() if n == name and mask[at]}, check
                failing.add(name)
        assert may_equal[at] or not (are_equal(cell) and cell.tokens >= 32)
    assert failing == {*CELL_CHECKS}
    for each in steps:
        found = examine_ranks(each.summary, each.ranks)
        candidate = may_be_suspect(each.summary, each.ranks).tolist()
        assert all(may or not one.cause for may, one in zip(candidate, found, strict=True))


def test_healthy_ranks_are_no_candidates() -> None:
    step = assembled(draw(np.random.default_rng(7), 128, 20, model="usual", engine="bf16"), 8)
    assert not may_be_suspect(step.summary, step.ranks).any()
