"""Why two sides have their verdict: the first difference, and the words for it."""

from __future__ import annotations

from collections.abc import Sequence

from stagescope.compared import ALONE, SIDES
from stagescope_service.compare import flow
from stagescope_service.compare.results import Finding, First, TensorResult, Verdict


def first_difference(tensors: Sequence[TensorResult], findings: Sequence[Finding]) -> First | None:
    """Return the first thing that differs in the order in which data flows, None if nothing."""
    alone = [f for f in findings if f.verdict is Verdict.DIFFERENT and f.section in flow.SAMPLING]
    if alone:
        return First("tokens", alone[0].section or "", "samples", alone[0].message)
    for tensor in tensors:
        if tensor.verdict is Verdict.DIFFERENT:
            return First(tensor.station, tensor.section, tensor.name, tensor.reason, tensor.first)
    other = [f for f in findings if f.verdict is Verdict.DIFFERENT]
    if not other:
        return None
    section = other[0].section or ""
    name = other[0].items[0] if other[0].items else ""
    return First(flow.station(section, name), section, name, other[0].message)


def reason_of(
    verdict: Verdict,
    tensors: Sequence[TensorResult],
    findings: Sequence[Finding],
    sides: tuple[int, int],
) -> str:
    """Return why a comparison has its verdict, in words; `sides`: the places of its two."""
    counts = {each: sum(tensor.verdict is each for tensor in tensors) for each in reversed(Verdict)}
    words = [f"{count} {each}" for each, count in counts.items() if count]
    text = f"of {len(tensors)} tensors and numbers {', '.join(words)}" if tensors else ""
    if not tensors:
        text = "the two sides have nothing in common that could be compared"
    told: dict[str, dict[str, None]] = {}
    for finding in findings:
        if finding.verdict is verdict and verdict is not Verdict.SAME:
            letters = told.setdefault(finding.message, {})
            letters.update({} if finding.side is None else {SIDES[sides[finding.side]]: None})
    why = [
        f"{' and '.join(letters)}: {message}" if letters else message
        for message, letters in told.items()
    ]
    lacking = dict.fromkeys(
        f.section or f.message for f in findings if f.kind in ALONE and f.message not in told
    )
    if lacking:
        why.append(f"on one side only: {', '.join(lacking)}")
    return "; ".join([text, *why[:3]])


def non_finite(tensors: Sequence[TensorResult]) -> list[Finding]:
    """Return what is the same NaN or infinity on both sides."""
    return [
        Finding(
            "note", f"{tensor.section}/{tensor.name}: {tensor.reason}", None, tensor.section,
        )
        for tensor in tensors
        if tensor.found.agreeing_non_finite and not tensor.found.disagreeing_non_finite
    ]  # fmt: skip
