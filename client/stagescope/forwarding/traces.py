"""Write the stages of steps as OpenTelemetry traces, over OTLP: for Tempo, Jaeger and others."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import logging.handlers
import queue
from collections.abc import Iterator, Sequence
from typing import Any, Final

from stagescope.forwarding.records import StepRecord
from stagescope.forwarding.trackers import Tracker, installed
from stagescope.table import Row
from stagescope.transport import given

_SPANS_A_CALL: Final = 512
_SECONDS: Final = 10.0
"""Time in which a collector must reply, with the exporter's own retries."""
_EXPORTER_LOG: Final = "opentelemetry.exporter"
_ATTRIBUTES: Final = {
    "stage": "stagescope.stage", "role": "stagescope.role", "rank": "stagescope.rank",
    "part": "stagescope.part", "status": "stagescope.status", "error_type": "error.type",
    "incarnation": "stagescope.process", "policy_version": "stagescope.policy_version",
    "device_seconds": "stagescope.device_seconds",
    "clock_error": "stagescope.clock_error_seconds",
}  # fmt: skip
"""Field of a stage -> attribute of its span."""
_FAILED: Final = ("failed", "unfinished")


class Otlp(Tracker):
    """A collector of OTLP over HTTP.

    A trace is a step of an attempt: a span of the step, and below it one for each stage, rank and
    part. Ids follow from what a span is of, so that a call that is repeated makes the same spans.
    """

    of_stages = True

    def _load(self) -> None:
        if not self.address.startswith(("http://", "https://")):
            raise self._misread("otlp:http://HOST:4318")
        with installed("OTLP", "trackers"):
            from opentelemetry import trace
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk import trace as sdk
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace.export import SpanExportResult
        self._trace, self._sdk, self._succeeded = trace, sdk, SpanExportResult.SUCCESS
        endpoint = self.address.rstrip("/")
        endpoint += "" if endpoint.endswith("/v1/traces") else "/v1/traces"
        self._exporter = OTLPSpanExporter(endpoint=endpoint, timeout=_SECONDS)
        self._resource = Resource({"service.name": "stagescope"})

    def write(self, steps: Sequence[StepRecord]) -> None:
        """Send the spans of each step."""
        spans = [span for record in steps for span in self._spans(record)]
        for first in range(0, len(spans), _SPANS_A_CALL):
            with _logged(_EXPORTER_LOG) as records:
                result = self._exporter.export(spans[first : first + _SPANS_A_CALL])
            if result is not self._succeeded:
                said = "the collector refused the spans" if records.empty() else records.get().msg
                raise ConnectionError(said)

    def close(self) -> None:
        """Close the connection."""
        self._exporter.shutdown()

    def _spans(self, record: StepRecord) -> Iterator[Any]:
        rows = [row for row in record.stages if row["begin_wall"] is not None]
        if not rows:
            return
        key = (record.run, record.attempt, record.step)
        step = self._context(key, ())
        common = {
            "stagescope.run": record.run, "stagescope.attempt": record.attempt,
            "stagescope.step": record.step, "stagescope.page": record.page,
        }  # fmt: skip
        ends = [max(_end(row, record), row["begin_wall"]) for row in rows]
        failed = [row for row in rows if row["status"] in _FAILED]
        yield self._span(
            f"step {record.step}", step, None,
            {**common, "stagescope.complete": record.complete},
            f"{len(failed)} of {len(rows)} stages failed or are unfinished" if failed else None,
            min(row["begin_wall"] for row in rows), max(ends),
        )  # fmt: skip
        for row, end in zip(rows, ends, strict=True):
            parts = ("stage", "role", "rank", "part", "incarnation", "revision")
            context = self._context(key, [row[name] for name in parts])
            known = given(**{attribute: row[name] for name, attribute in _ATTRIBUTES.items()})
            # Its process is gone, or it was still open: when it ended is not known.
            known["stagescope.end_is_known"] = row["end_wall"] is not None
            attributes, problem = {**common, **known}, _problem(row)
            yield self._span(
                row["stage"], context, step, attributes, problem, row["begin_wall"], end
            )

    def _span(
        self, name: str, context: Any, parent: Any, attributes: dict[str, Any], problem: str | None,
        begin: float, end: float,
    ) -> Any:  # fmt: skip
        failed = () if problem is None else (self._trace.StatusCode.ERROR, problem)
        return self._sdk.ReadableSpan(
            name=name, context=context, parent=parent, resource=self._resource,
            attributes=attributes, status=self._trace.Status(*failed),
            start_time=round(begin * 1e9), end_time=round(end * 1e9),
        )  # fmt: skip

    def _context(self, step: tuple[object, ...], own: Sequence[object]) -> Any:
        return self._trace.SpanContext(
            trace_id=_number(step, 16),
            span_id=_number((*step, *own), 8),
            is_remote=False,
            trace_flags=self._trace.TraceFlags(self._trace.TraceFlags.SAMPLED),
        )


def _end(row: Row, record: StepRecord) -> float:
    """Return when a stage ended; where that is not known, when its step was closed."""
    end: float | None = row["end_wall"]
    return record.wall if end is None else end


def _problem(row: Row) -> str | None:
    """Return why a stage did not end well; None: it did, or it is still open."""
    if row["status"] not in _FAILED:
        return None
    parts = (row["error_type"], row["error_message"])
    text = ": ".join(str(part) for part in parts if part)
    return text or ("its process is gone" if row["status"] == "unfinished" else "it failed")


def _number(parts: Sequence[object], size: int) -> int:
    digest = hashlib.sha256(repr(tuple(parts)).encode()).digest()
    return int.from_bytes(digest[:size], "big") or 1


@contextlib.contextmanager
def _logged(name: str) -> Iterator[queue.SimpleQueue[logging.LogRecord]]:
    """Collect what a library logs inside the block, instead of printing it."""
    logger, records = logging.getLogger(name), queue.SimpleQueue[logging.LogRecord]()
    handler, propagated = logging.handlers.QueueHandler(records), logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield records
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagated
