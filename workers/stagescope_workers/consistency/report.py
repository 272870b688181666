"""Formats a comparison as text and as JSON, and records it as a step of a run."""

from __future__ import annotations

import dataclasses
import sys
import uuid
from collections.abc import Iterator, Mapping
from typing import Final

import numpy as np

from stagescope.table import Table
from stagescope_wire import discovery, render
from stagescope_wire.engines import EngineInfo
from stagescope_wire.errors import Unreachable
from stagescope_workers.consistency.comparison import EngineComparison
from stagescope_workers.probe.lifecycle import init
from stagescope_workers.probe.probe import Probe

_MAX_SHOWN: Final = 3
_COLUMNS: Final = ("abs_diff", "q", "p", "sample", "position", "token_id", "token")
_MARKS: Final = {True: "ok", False: "NOT", None: "?"}


class Report:
    """The output of `stagescope consistency`."""

    def __init__(self, found: EngineComparison, recorded: str) -> None:
        self._found = found
        self._recorded = recorded

    @property
    def heading(self) -> str:
        """The two engines that were compared."""
        return f"{side(self._found.engine)} against {side(self._found.other)}"

    def lines(self, *, width: int = 80) -> list[str]:
        """Return the report as lines of at most `width` columns."""
        lines = []
        for text in self._lines():
            indent = " " * (len(text) - len(text.lstrip()))
            lines += render.wrapped(indent, text.strip(), width)
        return [*lines, *self._tables(width), *render.wrapped("", self._recorded, width)]

    def _lines(self) -> Iterator[str]:
        found = self._found
        temperature = found.sampling.temperature
        how = "greedily" if temperature == 0 else f"at temperature {temperature:g}"
        counts = f"{len(found.rows)} answers, {found.numbers['counts/tokens']:.0f} tokens"
        yield f"  engine  {found.engine.place}"
        yield f"  against {found.other.place}"
        if found.stored:
            yield f"{counts} of the stored {found.stored}"
        else:
            yield f"{counts}, sampled {how} by {found.engine.kind}"
        for warning in found.warnings:
            yield f"warning: {warning}"
        for check in found.checks:
            yield f"  {_MARKS[check.ok]:<3} {check.name:<10} {check.text}"
        for stream, provenance in found.streams.items():
            yield f"  {'q' if stream == 'rollout' else 'p'} is {_provenance(provenance)}"
        if found.left_out:
            shown = list(found.left_out.items())[:_MAX_SHOWN]
            reasons = "; ".join(f"{name}: {reason}" for name, reason in shown)
            yield f"left out {len(found.left_out)} answers ({reasons})"
        if (agreement := found.agreement) is not None:
            yield (
                f"answers: {agreement.same} of {agreement.answers} the same token by token; "
                f"{agreement.token_share:.1%} of the tokens before the first that differs"
            )
            if (accuracy := agreement.accuracy) is not None:
                yield (
                    f"accuracy over {agreement.marked}: {found.engine.kind} {accuracy[0]:.1%}, "
                    f"{found.other.kind} {accuracy[1]:.1%}"
                )

    def _tables(self, width: int) -> list[str]:
        if not self._found.rows:
            return []
        columns = {"name": tuple(self._found.numbers), "value": tuple(self._found.numbers.values())}
        worst = Table.from_rows(
            [dataclasses.asdict(token) for token in self._found.worst], order=_COLUMNS
        )
        return [
            *Table(columns).lines(width=width),
            "worst tokens (q the engine's log-prob, p the other side's)",
            *worst.lines(width=width),
        ]

    def to_dict(self) -> dict[str, object]:
        """Return everything but the tokens themselves, as JSON."""
        found = self._found
        agreement = found.agreement
        return {
            "engine": dataclasses.asdict(found.engine),
            "against": dataclasses.asdict(found.other),
            "sampling": dataclasses.asdict(found.sampling),
            "stored": found.stored or None,
            "aligned": found.aligned,
            "checks": [dataclasses.asdict(check) for check in found.checks],
            "warnings": list(found.warnings),
            "streams": {name: dict(stream) for name, stream in found.streams.items()},
            "metrics": dict(found.numbers),
            "worst": [dataclasses.asdict(token) for token in found.worst],
            "left_out": dict(found.left_out),
            "answers": None if agreement is None else dataclasses.asdict(agreement),
            "recorded": self._recorded,
        }


def side(info: EngineInfo) -> str:
    """Describe an engine briefly, without its address."""
    details = ", ".join(detail for detail in (info.dtype, info.quantisation) if detail)
    version = f" {info.version}" if info.version else ""
    return f"{info.kind}{version}{f' ({details})' if details else ''}"


def _provenance(stream: Mapping[str, object]) -> str:
    kind = "after temperature and cuts" if stream.get("processed") else "raw"
    parts = [f"{stream.get('engine')}'s, {kind}"]
    if stream.get("processed"):
        parts.append(f"temperature {stream.get('temperature'):g}")
    if stream.get("quantisation"):
        parts.append(str(stream["quantisation"]))
    return ", ".join(parts)


STAGE = "rollout_generate"
ROLE = "rollout"


def record(
    found: EngineComparison, *, run: str, step: int, timeout: float = 60.0,
    url: str | None = None, attempt_key: str | None = None,
) -> bool:  # fmt: skip
    """Record a comparison as a step of the role `rollout`; return whether it was received.

    It is sent over Ray where this process has joined it, else over HTTP to the service that
    `stagescope.attach` would find. Without `attempt_key`, each call is a new attempt.

    Raises:
        Unreachable: no service is known here.
        InvalidInput: an invalid run name.
    """
    probe = open_probe(
        run, attempt_key or f"consistency-{uuid.uuid4().hex}", url,
        layout={"engine": found.engine.kind, "engine_version": found.engine.version},
        settings={"engine": found.engine.place, "against": found.other.place},
    )  # fmt: skip
    with probe.stage(STAGE, step=step) as stage:
        stage.record(_payload(found))
        stage.log(**_scalars(found))
    probe.end_step(step)
    return probe.close(timeout)


def open_probe(
    run: str, attempt_key: str, url: str | None, *, settings: Mapping[str, object],
    layout: Mapping[str, object] | None = None,
) -> Probe:  # fmt: skip
    """Open a probe of the role `rollout` that records results of an experiment.

    Raises:
        Unreachable: no service is known here.
        InvalidInput: an invalid run name.
    """
    service = discovery.find(url) if url is not None or not _in_ray() else None
    return init(
        run=run,
        role=ROLE,
        rank=0,
        world_size=1,
        attempt_key=attempt_key,
        layout=layout or {},
        settings=settings,
        keep={"what": ["trajectories", "old_log_probs"]},  # to be compared or scored again
        captures=False,
        watchdog=0,
        strict=True,
        url=None if service is None else service.url,
        token=None if service is None else service.operate_token,
    )


def _in_ray() -> bool:
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def _payload(found: EngineComparison) -> dict[str, object]:
    rows = found.rows
    optional: dict[str, object] = {}
    if all(row.group is not None for row in rows):
        optional["group_ids"] = [row.group for row in rows]
    if all(row.reward is not None for row in rows):
        optional["rewards"] = np.array([row.reward for row in rows], np.float32)
    return {
        **optional,
        "rollout_log_probs": [row.q.astype(np.float32) for row in rows],
        "old_log_probs": [row.p.astype(np.float32) for row in rows],
        "response_mask": [row.counted.astype(np.int8) for row in rows],
        "responses": [np.array(row.ids, np.int64) for row in rows],
        "prompts": [np.array(row.prompt, np.int64) for row in rows],
        "sample_ids": [row.name for row in rows],
        "streams": {name: dict(stream) for name, stream in found.streams.items()},
        "left_out": dict(found.left_out),
    }


def _scalars(found: EngineComparison) -> dict[str, float]:
    scalars: dict[str, float] = {
        "consistency/left_out": float(len(found.left_out)),
        "consistency/checks_failed": float(sum(check.ok is False for check in found.checks)),
    }
    if (agreement := found.agreement) is not None:
        scalars["consistency/same_answers"] = float(agreement.same)
        scalars["consistency/token_share"] = agreement.token_share
        if (accuracy := agreement.accuracy) is not None:
            scalars["consistency/engine_accuracy"] = accuracy[0]
            scalars["consistency/other_accuracy"] = accuracy[1]
    return scalars


def reason_against_recording(url: str | None) -> str | None:
    """Return why nothing can be recorded; None where a service is known."""
    if url is None and _in_ray():
        return None
    try:
        discovery.locate(url)
    except Unreachable as error:
        return error.wrong
    return None
