"""Payloads: announced with a stage's END, read by an ingestor, settled once.

Every function changes only its arguments and returns the instructions that follow.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from stagescope_service.core import steps
from stagescope_service.core.catalogue_rows import (
    amount,
    loss_row,
    numbers,
    payload_row,
    plain,
    row_id,
    text,
)
from stagescope_service.core.entities import (
    ANNOUNCED,
    DROPPED,
    INGESTED,
    LOST,
    Attempt,
    PendingPayload,
    Process,
)
from stagescope_service.core.findings import by_message, finding, of_process
from stagescope_service.core.instructions import (
    Delete,
    Ingest,
    IngestJob,
    Instruction,
    PayloadKey,
    Settled,
)
from stagescope_service.statistics import available_pairs
from stagescope_wire.names import misspelt, misspelt_beside
from stagescope_wire.nonfinite import Json, JsonObject
from stagescope_wire.schema import Event, Work


def forgotten(process: Process, seqs: Iterable[int]) -> list[int]:
    """Return those of a process's payloads that may have been settled and are not in memory."""
    through = process.payloads_through
    return [
        seq
        for seq in seqs
        if (through is None or seq <= through)
        and seq not in process.settled
        and PayloadKey(process.incarnation, seq) not in process.payloads
    ]


def recall(process: Process, seq: int, state: str | None) -> None:
    """Note the final state in which the catalogue has the payload of an END that came again."""
    through = process.payloads_through
    if through is not None and not process.raw:
        process.payloads_through = max(through, seq)
    if state is not None and PayloadKey(process.incarnation, seq) not in process.payloads:
        process.settled.setdefault(seq, state)


def announce(
    attempt: Attempt,
    process: Process,
    event: Event,
    work: Work,
    announced: JsonObject,
    has_payload: bool,
) -> list[Instruction]:
    """Record a payload as announced and, if its refs came with it, have it ingested."""
    key = PayloadKey(process.incarnation, event.seq)
    settled = process.settled.get(key.seq)
    if settled == LOST and has_payload:
        del process.settled[key.seq]  # the process is alive after all, and still has it
    elif settled is not None:
        return [Settled(key, settled)]
    payload = process.payloads.get(key)
    out: list[Instruction] = []
    if payload is None:
        payload = PendingPayload(key, process.attempt_id, work)
        process.payloads[key] = payload
        steps.payload_pending(attempt, work.step, key)
        columns = _payload_columns(process, event, announced)
        out.append(payload_row(process, key, work, ANNOUNCED, reason=None, **columns))
        if process.raw:
            out += _misspelt(attempt, process, event, work, announced)
    if has_payload and not payload.in_flight:
        payload.in_flight = True
        job: IngestJob = {
            "run": attempt.run,
            "attempt_id": attempt.attempt_id,
            "attempt_key": attempt.key,
            "role": process.role,
            "rank": process.rank,
            "data_rank": process.data_rank,
            "layout": dict(process.layout),
            "settings": dict(process.settings),
            "step": work.step,
            "policy_version": work.policy_version,
            "stage": work.stage or "",
            "occurrence": work.part.occurrence,
            "epoch": work.part.epoch,
            "minibatch": work.part.minibatch,
            "microbatch": work.part.microbatch,
            "scalars": numbers(event.fields.get("scalars")),
            "bytes": amount(announced.get("bytes")),
            "reported": announced.get("reported") is True,
        }
        out.append(Ingest(key, process.node_id, job))
    return out


def _misspelt(
    attempt: Attempt, process: Process, event: Event, work: Work, announced: JsonObject
) -> list[Instruction]:
    """Return a finding of the names in a raw caller's payload that no statistic reads."""
    names = announced.get("tensors")
    wrong = dict(misspelt(map(str, names))) if isinstance(names, Mapping) else {}
    if isinstance(names, Mapping) and available_pairs(names):
        # A pair without its mask is refused, and that finding names the misspelt tensor.
        wrong = {name: meant for name, meant in wrong.items() if meant != "response_mask"}
    if isinstance(names, Mapping):
        wrong |= dict(misspelt_beside(map(str, names)))
    if not wrong:
        return []
    pairs = ", ".join(f"{name} (expected {meant})" for name, meant in wrong.items())
    found = finding(
        "misspelt_tensor",
        f"kept, but no statistic reads them: {pairs}"[:2000],
        **of_process(attempt, process, event.wall),
        stage=work.stage,
        evidence={"names": wrong, "step": work.step},
        advice="rename them in the payload",
    )
    return [by_message(found)]


def announce_dropped(
    attempt: Attempt, process: Process, event: Event, work: Work, dropped: JsonObject
) -> list[Instruction]:
    """Record a payload that its process dropped (its DROPPED event lists the loss)."""
    key = PayloadKey(process.incarnation, event.seq)
    payload = process.payloads.get(key)
    if key.seq in process.settled or (payload is not None and payload.in_flight):
        return []
    process.payloads.pop(key, None)
    process.settle(key.seq, DROPPED)
    columns = _payload_columns(process, event, dropped)
    reason = text(dropped.get("reason"), 1000)
    columns |= {"reason": reason, "settled_wall": event.wall}
    out: list[Instruction] = [payload_row(process, key, work, DROPPED, **columns)]
    if payload is not None:
        out += steps.payload_settled(attempt, work.step, key, event.wall)
    return [*out, Settled(key, DROPPED)]


def settle(
    attempt: Attempt,
    process: Process,
    payload: PendingPayload,
    state: str,
    reason: str | None,
    wall: float,
    **columns: object,
) -> list[Instruction]:
    """Set the final state of a payload: 'ingested', 'lost', 'refused' or 'dropped'."""
    key, work, reason = payload.key, payload.work, text(reason)
    process.payloads.pop(key, None)
    process.settle(key.seq, state, reason)
    row = payload_row(process, key, work, state, reason=reason, settled_wall=wall, **columns)
    out: list[Instruction] = [row]
    if state == INGESTED:
        # It may have been listed as lost after its process had lapsed.
        identity = (process.incarnation, work.key, "payload", key.seq)
        out.append(Delete("losses", {"loss_id": row_id(*identity)}))
    else:
        loss = {"identity": key.seq, "count": 1, "bytes": columns.get("bytes"), "wall": wall}
        out.append(loss_row(attempt, process, work, "payload", reason or state, **loss))
    out += steps.payload_settled(attempt, work.step, key, wall)
    return [*out, Settled(key, state)]


def _payload_columns(process: Process, event: Event, announced: JsonObject) -> dict[str, Json]:
    return {
        "tensors": plain(announced.get("tensors")),
        "meta": plain(announced.get("meta")),
        "bytes": amount(announced.get("bytes")),
        "node_id": process.node_id,
        "announced_wall": event.wall,
    }
