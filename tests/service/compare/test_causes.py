from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
from tests.support.dump_files import nexrl_directory
from tests.support.memory_dumps import MemoryDump, batch, record, shifted, single, split

from stagescope_service.compare.causes import likely_causes
from stagescope_service.compare.comparison import compare
from stagescope_service.compare.flow import STATIONS, sort_key, station
from stagescope_service.compare.results import PairResult, Verdict
from stagescope_service.compare.tolerances import Tolerances, severity
from stagescope_service.dumps.discover import open_dump
from stagescope_wire.errors import InvalidInput


def pair(*sides: MemoryDump) -> PairResult:
    return compare(sides).pairs[0]


def titles(result: PairResult) -> list[str]:
    return [cause.title for cause in result.causes]


def checks(result: PairResult) -> str:
    return "\n".join(check for cause in result.causes for check in cause.checks)


def losses(**values: float) -> MemoryDump:
    return MemoryDump([record("loss", numbers=values, rank=rank) for rank in range(2)])


def test_a_loss_whose_terms_agree_has_another_coefficient() -> None:
    terms = {"pg_loss": 0.5, "entropy_loss": 2.0}
    found = pair(losses(loss=0.48, **terms), losses(loss=0.49, **terms))
    assert found.causes[0].title.startswith("entropy_coeff")
    assert "-0.01 and -0.005" in found.causes[0].evidence
    other = pair(losses(loss=0.48, **terms), losses(loss=0.49, pg_loss=0.51, entropy_loss=2.0))
    assert not any(title.startswith("entropy_coeff") for title in titles(other))
    assert "whether the random seed is fixed" in checks(other)
    assert "is_loss, in its order" in checks(other)


def test_operators_of_another_number_of_ranks_are_of_another_layout() -> None:
    def operators(ranks: int) -> MemoryDump:
        weights = np.arange(4, dtype=np.float32) * ranks
        records = [record("other", {"linear": weights}, rank=rank) for rank in range(ranks)]
        return MemoryDump(records, kind="msprobe")

    found = pair(operators(2), operators(1))
    assert found.causes[0].title.startswith("the sides have other parallel layouts")
    assert "ranks=all" in found.causes[0].checks[0]
    assert not any("layouts" in title for title in titles(pair(operators(2), operators(2))))


def test_equal_tokens_and_masks_exclude_the_sampling() -> None:
    samples = batch()
    found = pair(split(samples), split(shifted(samples, "entropy", 1)))
    excluded = "\n".join(found.excluded)
    for text in ("not the sampling", "not padding", "not the inference engine", "not the reward"):
        assert text in excluded
    assert "numerical precision" in checks(found)
    sampled = [dataclasses.replace(s, response=s.response + 1) for s in samples]
    found = pair(split(samples), split(sampled))
    assert not any("sampling" in text for text in found.excluded)
    assert "the two sides sampled differently" in titles(found)
    assert "temperature" in checks(found)


def without(dump: MemoryDump, *names: str) -> MemoryDump:
    """Return a dump as of a training that recorded no tensors of these names."""
    records = [
        dataclasses.replace(
            each, tensors={name: value for name, value in each.tensors.items() if name not in names}
        )
        for each in dump.records
    ]
    return dataclasses.replace(dump, records=records)


@pytest.mark.parametrize(
    ("name", "title", "instead"),
    [
        ("rollout_log_probs", "score the same tokens", "rollout log-probs differ, of the same"),
        ("old_log_probs", "forward pass differs on the same", "log-probs differ, of the same"),
    ],
)
def test_the_same_tokens_are_only_those_that_both_sides_recorded(
    name: str, title: str, instead: str
) -> None:
    one, other = split(batch()), split(shifted(batch(), name, -0.5))
    assert any(title in each for each in titles(pair(one, other)))
    ids = ("tokens", "responses", "prompts")
    for sides in ((without(one, *ids), without(other, *ids)), (without(one, *ids), other)):
        found = pair(*sides)
        assert found.first is not None
        assert found.first.name == name
        assert not any("the same tokens" in each and "others" not in each for each in titles(found))
        assert any(instead in each for each in titles(found))
        assert any("token ids is unknown" in cause.evidence for cause in found.causes)
        assert not any("tokens are equal" in each for each in found.excluded)
    prompts = pair(without(one, "responses"), without(other, "responses"))
    assert any(instead in each for each in titles(prompts))
    assert not any("tokens are equal" in each for each in prompts.excluded)


def test_what_comes_before_is_equal_only_where_it_was_compared() -> None:
    gradients = [record("gradients", {"w": np.array([value])}) for value in (1.0, 2.0)]
    loss = record("loss", numbers={"loss": 1.0})
    alone = pair(*(MemoryDump([each]) for each in gradients))
    assert titles(alone) == ["gradients differ, of the same loss or of another"]
    found = pair(*(MemoryDump([loss, each]) for each in gradients))
    assert titles(found) == ["gradients differ though the loss does not"]


def test_other_precisions_and_overflow_are_named() -> None:
    values = np.array([1.0, 2.0, 3.0], np.float32)
    one, half = (single("other", {"x": v}) for v in (values, values.astype(np.float16) + 1))
    found = pair(one, half)
    assert "the two sides compute in other precisions" in titles(found)
    assert "float32 on one side and float16 on the other" in found.causes[0].evidence
    found = pair(one, single("other", {"x": np.array([1.0, math.inf, 3.0], np.float32)}))
    assert "a side overflows or divides by zero" in titles(found)


def test_other_widths_without_a_mask_name_padding_and_max_length() -> None:
    result = compare([
        single("old_log_probs", {"old_log_probs": np.ones((2, width))}, samples=("a", "b"))
        for width in (4, 6)
    ])  # fmt: skip
    assert result.exit_status == 2
    found = result.pairs[0]
    assert "no mask says what is padding" in found.tensors[0].reason
    assert "sequence lengths differ" in titles(found)
    assert "max_length" in checks(found)


def test_settings_that_differ_come_first() -> None:
    one, other = losses(loss=1.0), losses(loss=2.0)
    one.about = {"settings": {"rollout": {"temperature": 1.0, "seed": 1}, "lr": 1e-6}}
    other.about = {"settings": {"rollout": {"temperature": 0.7, "seed": 1}, "lr": 1e-6}}
    first = pair(one, other).causes[0]
    assert first.evidence == "rollout.temperature: 1.0 and 0.7"


@pytest.mark.parametrize("kind", ["own", "nexrl"])
def test_what_one_side_alone_has_is_no_cause_where_the_rest_agrees(kind: str) -> None:
    one, other = losses(loss=1.0), dataclasses.replace(losses(loss=1.0), kind=kind)
    one.records.append(record("entropy", {"entropy": np.ones((1, 3))}))
    agrees = dataclasses.replace(pair(one, other), verdict=Verdict.SAME)
    assert "entropy" in [each.section for each in agrees.findings if each.kind == "section"]
    assert likely_causes(agrees, (one, other))[0] == ()


def test_missing_sections_name_the_options_that_write_them(tmp_path: Path) -> None:
    nexrl_directory(tmp_path / "a")
    nexrl_directory(tmp_path / "weaver", mode="weaver")
    found = compare([open_dump(tmp_path / "a"), open_dump(tmp_path / "weaver")]).pairs[0]
    text = checks(found)
    assert "trajectory: true, old_log_probs: true" in text
    assert "WEAVER_DEBUG_DUMP_ENABLED=1" in text
    alone = [finding for finding in found.findings if finding.kind == "section"]
    assert {finding.section for finding in alone} >= {"trajectories", "is_loss", "batch_inputs"}


@pytest.mark.parametrize("text", ["", "x", "=1", "x=", "x=a", "x=-1", "x=nan", "x=1,2,3"])
def test_a_tolerance_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="cannot be read"):
        Tolerances.parse([text])


def test_the_first_pattern_that_fits_wins() -> None:
    tolerances = Tolerances.parse(["loss/*=0.5", "*loss=0.25,0.125"])
    both = ("float32", "float32")
    assert tolerances.for_tensor("loss", "pg_loss", both).atol == 0.5
    assert tolerances.for_tensor("is_loss", "pg_loss", both).rtol == 0.125
    assert Tolerances().for_tensor("forward_data", "response_mask", both).atol == 0.0
    assert Tolerances().for_tensor("x", "log_probs", ("bfloat16", "float32")).rtol == 2.0**-7
    assert Tolerances().for_tensor("gradients", "w", ("bfloat16", "bfloat16")).relative == 1e-5


def test_names_lie_on_the_flow_in_the_order_of_the_stations() -> None:
    named = [
        ("trajectories", "tokens"), ("trajectories", "response_mask"),
        ("trajectories", "rollout_log_probs"), ("trajectories", "rewards"),
        ("old_log_probs", "old_log_probs"), ("advantages", "values"),
        ("advantages", "advantages"), ("forward_data", "entropy"), ("is_loss", "prob_ratio"),
        ("loss", "loss"), ("gradients", "w"), ("parameters", "w"), ("other", "strange"),
    ]  # fmt: skip
    assert [station(*each) for each in named] == list(STATIONS)
    assert sorted(named, key=lambda each: sort_key(*each)) == named


def test_severities_are_those_of_the_guide() -> None:
    words = [severity(value) for value in (0.0, 1e-6, 1e-4, 1e-2, 0.5, math.nan)]
    assert words == ["identical", "equivalent", "minor", "likely bug", "severe", ""]
