"""One stage of a step as it runs in a training process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Final

import numpy as np

from stagescope_wire.captures import uses_msprobe
from stagescope_wire.errors import InvalidInput, InvalidTensor, StagescopeError
from stagescope_wire.keep import is_selected, kept_sections
from stagescope_wire.plan import CaptureRequest
from stagescope_wire.schema import BEGIN, DUMP, END, LOG, MAX_SCALAR_NAME, Work
from stagescope_workers import steady_clock
from stagescope_workers.device import DeviceTimer, HostCopy, PinnedPool, copy_tensor
from stagescope_workers.payload import datum_columns, describe, is_torch
from stagescope_workers.probe.draft import Draft
from stagescope_workers.probe.reporter import Reporter

if TYPE_CHECKING:
    import torch

    from stagescope_workers.capture.msprobe_capture import ArmedCapture
    from stagescope_workers.capture.shards import Shards

_MAX_MESSAGE: Final = 2000


class Stage:
    """A piece of work: `with probe.stage(...) as stage`, or `probe.begin` and `probe.end`.

    `record` and `log` may be called any number of times until the end; their values are sent with
    the end. No method raises, unless the probe or a capture is strict.
    """

    def __init__(self, probe: Reporter, work: Work | None, model: object = None) -> None:
        self.work = work
        """None where the call that created this stage was refused: then it does nothing."""
        self._probe = probe
        self._model = model
        self._draft = Draft(probe.pool)
        self._scalars: dict[str, float | HostCopy] = {}
        self._begun: tuple[float, float] | None = None
        self._begin_seq: int | None = None
        self._ended = False
        self._has_errors = False
        self._timer: DeviceTimer | None = None
        self._captures: list[ArmedCapture] = []
        self._shards: tuple[Shards, list[CaptureRequest]] | None = None

    def __enter__(self) -> Stage:
        self.begin()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end(error)

    def begin(self) -> None:
        """Report the stage as begun, and arm the captures that request it.

        Raises:
            CaptureError, InvalidPlan: a capture that is strict could not be armed.
        """
        work = self.work
        if work is None or work.stage is None or self._begun is not None or self._probe.is_inert:
            return
        probe = self._probe
        with probe.guard("begin", work):
            # Before anything that could fail: an end always has a beginning.
            self._begun = steady_clock.now()
            if probe.device_events:
                self._timer = DeviceTimer.start()
            fields = work.fields()
            fields["device_time"] = self._timer is not None
            entry = probe.outbox.put(BEGIN, fields)
            self._begun, self._begin_seq = (entry.wall, entry.mono), entry.seq
            probe.stage_tracker.enter(entry.seq, work)
        captures: list[CaptureRequest] = []
        with probe.guard("begin", work):
            captures = probe.plan.begin(work.step, work.stage)
        if captures:
            with probe.guard("begin", work):
                self._begin_shards(captures)
            self._arm(captures, work, work.stage)

    def record(self, values: Mapping[str, object] | None = None, /, **named: object) -> None:
        """Record tensors, lists of ids, and metadata; each is copied when this returns.

        Args:
            values: names and values, for names that are not Python identifiers.
            named: tensors (in the forms of `payload.host_tensor`), lists of strings with one for
                each row (`sample_ids`, `group_ids`), and anything else as metadata
                (`temperature=1.0`, `streams={"rollout": {"engine": "vllm"}}`). None is omitted.

        Raises:
            InvalidInput: only when the probe is strict.
        """
        self._add("record", lambda: {**(values or {}), **named})

    def hand_over(self, values: Mapping[str, object] | None = None, /, **named: object) -> None:
        """Record tensors that nothing writes to any more: as `record`, but without its copy.

        Use it for results such as the intermediates of a loss. Dense torch tensors on the host are
        referenced until the background thread has copied them. If torch's version counter shows
        that one was written to, it is not kept, and a finding names it. All other values are copied
        at once.

        Raises:
            InvalidInput: only when the probe is strict.
        """
        self._add("hand_over", lambda: {**(values or {}), **named}, borrowed=True)

    def record_datums(self, datums: Sequence[Mapping[str, object]]) -> None:
        """Record the input of a remote trainer: a list of dicts of lists, one dict per row.

        Each key becomes the packed tensor `datums/KEY` (for strings, a list of them), keys of
        nested dicts are joined by dots. Pass numbers that the trainer returns to `log`.

        Raises:
            InvalidInput: only when the probe is strict.
        """
        self._add("record_datums", lambda: datum_columns(datums))

    def _add(
        self, call: str, read: Callable[[], Mapping[str, object]], *, borrowed: bool = False
    ) -> None:
        if self.work is None or self._ended or self._probe.is_inert:
            return
        with self._probe.guard(call, self.work):
            for error in self._draft.add(read(), borrowed=borrowed):
                self._refuse(call, error)

    def _refuse(self, call: str, error: StagescopeError, *, quiet: bool = False) -> None:
        """Report a tensor that is missing or does not fit the others.

        The payload is marked: the service, which finds the same error, does not report it again.
        """
        is_error = isinstance(error, InvalidTensor)
        self._has_errors = self._has_errors or is_error
        self._probe.refuse(call, error, self.work, quiet=quiet, is_error=is_error)

    def wants(self, name: str) -> bool:
        """Return, cheaply, whether a tensor of this name is kept of this stage.

        Use it to avoid copies: `if stage.wants("prob_ratio"): ...`. `name` may also be a section
        (`"is_loss"`). A misspelt name is reported once per stage.

        Raises:
            InvalidTensor: only when the probe is strict: a misspelt name.
        """
        work = self.work
        if work is None or work.stage is None or self._probe.is_inert:
            return False
        return self._probe.is_kept(name, work.stage, work.step)

    def log(self, **scalars: object) -> None:
        """Report named numbers: Python or numpy numbers, or tensors of one element.

        None is rejected: where there is no number, leave the name out.

        Raises:
            InvalidInput: only when the probe is strict.
        """
        if self.work is None or self._ended or self._probe.is_inert:
            return
        with self._probe.guard("log", self.work):
            for error in read_scalars(scalars, self._scalars, self._probe.pool):
                self._probe.refuse("log", error, self.work)

    def end(self, error: BaseException | None = None) -> None:
        """Report the end and everything recorded; `error` is what the stage raised, or None.

        Raises:
            InvalidInput: only when the probe is strict, and `error` is None.
            CaptureError: a capture that is strict failed, and `error` is None.
        """
        work = self.work
        if work is None or self._begun is None or self._ended or self._probe.is_inert:
            return
        self._ended = True
        self._probe.stage_tracker.leave(self._begin_seq)
        problems: list[InvalidTensor] = []
        misspelt: list[InvalidTensor] = []
        with self._probe.guard("end", work, quiet=error is not None):
            if self._timer is not None:
                self._timer.stop()
            self._finish_shards()
            self._draft.limit_routes(self._probe.outbox.max_bytes)
            self._draft.send_whole(self._kept_routes(work))
            problems += self._draft.problems()
            self._has_errors = self._has_errors or bool(problems)
            misspelt += self._probe.new_misspellings(work, self._draft)
            self._send_end(work, error)
        try:
            with self._probe.guard("end", work, quiet=error is not None):
                for problem in problems:
                    self._refuse("record", problem, quiet=error is not None)
                for problem in misspelt:
                    self._probe.refuse("record", problem, work, quiet=error is not None)
        finally:
            self._finish_captures(error)

    def _send_end(self, work: Work, error: BaseException | None) -> None:
        wall, mono = self._begun or (0.0, 0.0)
        draft = self._draft if self._draft or self._keeps_scalars(work) else None
        if work.stage is not None and (tokens := self._draft.tokens):
            self._probe.models.note_tokens(work.stage, tokens)
        fields = work.fields() | {
            "begin_seq": self._begin_seq,
            "begin_wall": wall,
            "begin_mono": mono,
            "status": "ok" if error is None else "failed",
            **error_fields(error),
            "scalars": dict(self._scalars),
            "payload": None if draft is None else draft.description(reported=self._has_errors),
            "device_seconds": None,
        }
        timer = self._timer

        def finalise(fields: dict[str, object]) -> None:
            settle_scalars(fields)
            if timer is not None:
                fields["device_seconds"] = timer.seconds()

        awaits: list[HostCopy | DeviceTimer] = [*self._draft.copies(), *_copies(self._scalars)]
        if timer is not None:
            awaits.append(timer)
        self._probe.outbox.put(END, fields, draft=draft, awaits=awaits, finalise=finalise)

    def _kept_routes(self, work: Work) -> list[str]:
        """Return the recorded routes that a keep configuration asks for."""
        routes, stage = self._draft.routes(), work.stage or ""
        if not routes:
            return []
        selectors = self._probe.plan.keep_selectors(work.step, stage)
        return [name for name in routes if is_selected(selectors, stage, name)]

    def _keeps_scalars(self, work: Work) -> bool:
        """Return whether numbers are kept of a stage without any other recorded value.

        The service only keeps payloads: then an empty one is sent with the numbers.
        """
        if not self._scalars:
            return False
        selectors = self._probe.plan.keep_selectors(work.step, work.stage or "")
        if selectors and kept_sections(selectors, work.stage, (), self._scalars):
            return True
        self._probe.plan.leave_out(work.step, work.stage or "", numbers=self._scalars)
        return False

    # --- captures -------------------------------------------------------------------------

    def _begin_shards(self, captures: list[CaptureRequest]) -> None:
        requests = [each for each in captures if each.get("parameters") or each.get("gradients")]
        if not requests:
            return
        from stagescope_workers.capture.shards import Shards

        parameters = [name for each in requests for name in each.get("parameters") or ()]
        gradients = [name for each in requests for name in each.get("gradients") or ()]
        try:
            shards = Shards(self._model, parameters=parameters, gradients=gradients)
        except StagescopeError as error:
            for each in requests:
                if _reports_shards(each):
                    self._send_dump(_shard_dump(each, "failed", str(error)))
            raise
        self._shards = (shards, requests)

    def _finish_shards(self) -> None:
        """Add the copied shards to the payload, like any recorded tensor."""
        if self._shards is None:
            return
        (shards, requests), self._shards = self._shards, None
        tensors, locations, error = shards.finish()
        values: dict[str, object] = {**tensors, **({"shards": locations} if locations else {})}
        problems = [*self._draft.add(values)]
        for problem in problems:
            self._probe.refuse("record", problem, self.work)
        error = error or (str(problems[0]) if problems else None)
        state = "failed" if error else "complete"
        for each in requests:
            if _reports_shards(each):
                size = sum(spec.nbytes for spec in self._draft.specs().values())
                self._send_dump({**_shard_dump(each, state, error), "bytes": size})

    def _arm(self, captures: list[CaptureRequest], work: Work, stage: str) -> None:
        from stagescope_workers.capture.msprobe_capture import begin_capture

        probe = self._probe
        try:
            for capture in captures:
                armed = begin_capture(
                    capture,
                    run=probe.run,
                    attempt_key=probe.dump_key,
                    stage=stage,
                    step=work.step,
                    part=work.part,
                    role=probe.role,
                    rank=probe.rank,
                    model=self._model,
                    data_root=probe.data_root,
                    out_of_reach=probe.out_of_reach,
                    tokens=probe.models.tokens(stage),
                )
                if armed is None:
                    continue
                self._captures.append(armed)
                if armed.collecting:
                    fields = work.fields() | {
                        "capture_id": capture.get("capture_id"),
                        "state": "armed",
                        "path": armed.path,
                    }
                    probe.outbox.put(DUMP, fields)
        except BaseException as error:
            self.end(error)
            raise

    def _finish_captures(self, error: BaseException | None) -> None:
        captures, self._captures = self._captures, []
        # Each of them, even if others raise: a capture left running would slow every step.
        with contextlib.ExitStack() as stack:
            for armed in captures:
                stack.callback(self._finish_capture, armed, error)

    def _finish_capture(self, armed: ArmedCapture, error: BaseException | None) -> None:
        try:
            fields = armed.finish(error)
        except StagescopeError as failure:  # strict: it has a result nevertheless
            self._send_dump(armed.finish(failure))
            raise
        self._send_dump(fields)

    def _send_dump(self, fields: Mapping[str, object]) -> None:
        work = {} if self.work is None else self.work.fields()
        self._probe.outbox.put(DUMP, {**work, **fields})


def _reports_shards(capture: CaptureRequest) -> bool:
    """Return whether a capture's shards are reported as its dump.

    They are not if msprobe's own dump is reported. They are not for a `keep` configuration either:
    its files are kept like any others.
    """
    return not uses_msprobe(capture) and capture.get("source") != "keep"


def _shard_dump(capture: CaptureRequest, state: str, error: str | None) -> dict[str, object]:
    capture_id = capture.get("capture_id")
    return {"capture_id": capture_id, "state": state, "task": "parameters", "error": error}


def log_scalars(probe: Reporter, work: Work, scalars: Mapping[str, object]) -> None:
    """Queue a LOG event with the numbers in `scalars`."""
    numbers: dict[str, float | HostCopy] = {}
    for error in read_scalars(scalars, numbers, probe.pool):
        probe.refuse("log", error, work)
    if numbers:
        fields = work.fields() | {"scalars": dict(numbers)}
        probe.outbox.put(LOG, fields, awaits=_copies(numbers), finalise=settle_scalars)


def _copies(scalars: Mapping[str, float | HostCopy]) -> list[HostCopy]:
    return [value for value in scalars.values() if isinstance(value, HostCopy)]


def read_scalars(
    values: Mapping[str, object], into: dict[str, float | HostCopy], pool: PinnedPool
) -> Iterator[StagescopeError]:
    """Add the numbers of `values` to `into`; yield an error for each invalid one.

    A number on a device is copied after the device's queued work, and read later.
    """
    for name, value in values.items():
        try:
            if len(name) > MAX_SCALAR_NAME:
                raise InvalidInput(
                    f"a scalar has a name of {len(name)} characters: {name:.60}…",
                    expected=f"at most {MAX_SCALAR_NAME}",
                )
            if is_torch(value):
                into[name] = _tensor_scalar(name, value, pool)
            elif isinstance(value, bool | int | float | np.generic | np.ndarray):
                into[name] = float(np.asarray(value).reshape(()))
            else:
                raise ValueError
        except StagescopeError as error:  # noqa: PERF203 - the others are still read
            yield error
        except (TypeError, ValueError, OverflowError):
            is_what = "None" if value is None else describe(value)
            yield InvalidInput(f"the scalar {name} is {is_what}", expected="one number")


def _tensor_scalar(name: str, value: torch.Tensor, pool: PinnedPool) -> float | HostCopy:
    if value.numel() != 1:
        raise ValueError
    if value.device.type == "cpu":
        return float(value.detach())
    copy = copy_tensor(name, value.detach().reshape(1).double(), pool)
    return copy if isinstance(copy, HostCopy) else float(copy[2][0])


def settle_scalars(fields: dict[str, object]) -> None:
    """Read the numbers that were still being copied from a device; not for the training thread."""
    scalars = fields.get("scalars")
    if not isinstance(scalars, dict):
        return
    for name, value in scalars.items():
        if isinstance(value, HostCopy):
            scalars[name] = float(value.finish()[2].reshape(-1)[0])


def error_fields(error: BaseException | None) -> dict[str, object]:
    """Return the fields of an event that say which exception ended a stage or a process.

    `error_type` and `error_message` are None without an exception. `interrupted` is present if a
    person stopped the training: Ctrl-C, a cancelled task, `sys.exit()` without a failure.
    """
    if error is None:
        return {"error_type": None, "error_message": None}
    fields: dict[str, object] = {
        "error_type": type(error).__name__,
        "error_message": _message(error),
    }
    return fields | ({"interrupted": True} if _is_interruption(error) else {})


def _is_interruption(error: BaseException) -> bool:
    if isinstance(error, SystemExit):
        return error.code in (None, 0)
    return not isinstance(error, Exception)


def _message(error: BaseException) -> str:
    try:
        return str(error)[:_MAX_MESSAGE]
    except Exception:
        return "(the exception's message cannot be read)"
