"""The table that a trial prints, and the JSON that it writes."""

from __future__ import annotations

import dataclasses
import json
import os
import typing
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tests.tools.trial_device.results import Check, Figure, Outcome, Result

SCHEMA: Final = 1
_LABEL: Final = 66


@dataclasses.dataclass(frozen=True)
class Trial:
    """The measurements so far, by name, and what they were made on."""

    device: Mapping[str, object]
    is_quick: bool
    seconds: float
    results: Mapping[str, Result]

    @property
    def checks(self) -> Sequence[Check]:
        return [each for result in self.results.values() for each in result.checks]

    @property
    def outcome(self) -> Outcome:
        """Failed where a check failed; else passed."""
        failed = any(each.outcome is Outcome.FAILED for each in self.checks)
        return Outcome.FAILED if failed else Outcome.PASSED


def heading(device: Mapping[str, Any]) -> str:
    drivers = "".join(f", {name} {str(version).splitlines()[0]:.100}"
                      for name, version in device["drivers"].items())  # fmt: skip
    memory = f", {device['memory_gb']} GB" if device["memory_gb"] else ""
    return (
        f"{device['kind']}: {device['name']}{memory}\n"
        f"torch {device['torch']}, Python {device['python']}, {device['machine']}{drivers}\n"
    )


def table(result: Result) -> str:
    """Return the figures of a result and the outcome of its checks."""
    lines = [f"\n{result.title}", *_rows(result, "  ")]
    for each in result.checks:
        lines += [f"  {each.outcome.value.upper()}: {each.statement}", f"      {each.reason}"]
    return "\n".join(lines) + "\n"


def verdict(trial: Trial) -> str:
    counts = Counter(each.outcome for each in trial.checks)
    parts = ", ".join(f"{counts[outcome]} {outcome.value}" for outcome in Outcome)
    return f"\n{len(trial.checks)} checks: {parts}; {trial.seconds:.0f} s\n"


def _rows(result: object, indent: str) -> Iterator[str]:
    for name, figure in _figures(type(result)).items():
        value = getattr(result, name)
        if isinstance(value, tuple):
            for item in value:
                if (line := getattr(item, "line", None)) is not None:
                    yield f"{indent}{item.name:<{_LABEL - len(indent)}} {line}"
                else:
                    yield f"{indent}{item.name}"
                    yield from _rows(item, f"{indent}  ")
        elif figure is not None:
            shown = "-" if value is None else f"{value:.4g} {figure.unit}".rstrip()
            yield f"{indent}{figure.label:<{_LABEL - len(indent)}} {shown}"


def _figures(kind: type) -> Mapping[str, Figure | None]:
    """Return field -> how it is shown; None: a tuple of parts, or not shown."""
    hints = typing.get_type_hints(kind, include_extras=True)
    found: dict[str, Figure | None] = {}
    for field in dataclasses.fields(kind):
        if field.name != "checks":
            metadata = getattr(hints[field.name], "__metadata__", (None,))
            found[field.name] = metadata[0]
    return found


def as_json(trial: Trial) -> dict[str, object]:
    """Return what `--json` writes."""
    return {
        "schema": SCHEMA,
        "outcome": trial.outcome.value,
        "device": dict(trial.device),
        "quick": trial.is_quick,
        "seconds": round(trial.seconds, 3),
        "measurements": {
            name: {"title": result.title, **dataclasses.asdict(result)}
            for name, result in trial.results.items()
        },
    }


def write(path: Path, trial: Trial) -> None:
    """Replace the file: after each measurement, so that one that hangs costs no other's figures."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(json.dumps(as_json(trial), indent=1) + "\n")
    os.replace(draft, path)
