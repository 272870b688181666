"""One stage of a step as it runs in a training process."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from stagescope.wire.captures import orders_msprobe
from stagescope.wire.errors import InvalidInput, InvalidTensor, StagescopeError
from stagescope.wire.keep import is_wanted, kept_sections
from stagescope.wire.schema import BEGIN, DUMP, END, LOG, Work
from stagescope_workers.device import DeviceTimer, HostCopy, PinnedPool, take_tensor
from stagescope_workers.payload import datum_columns, describe, is_torch
from stagescope_workers.probe.draft import Draft
from stagescope_workers.probe.reporter import Reporter
from stagescope_workers.transport.outbox import Awaited

if TYPE_CHECKING:
    from stagescope_workers.capture.msprobe_capture import ArmedCapture
    from stagescope_workers.capture.shards import Shards

_MAX_MESSAGE: Final = 2000


class Stage:
    """A piece of work: `with probe.stage(...) as stage`, or `probe.begin` and `probe.end`.

    `record` and `log` may be called any number of times until the end; what they were given
    travels with the end. No method raises, unless the probe is strict, or a capture that is.
    """

    def __init__(self, probe: Reporter, work: Work | None, model: object = None) -> None:
        self.work = work
        """None where the call that made this stage was refused: then it does nothing."""
        self._probe = probe
        self._model = model
        self._draft = Draft(probe.pool)
        self._scalars: dict[str, float | HostCopy] = {}
        self._begun: tuple[float, float] | None = None
        self._begin_seq: int | None = None
        self._ended = False
        self._is_wrong = False
        self._timer: DeviceTimer | None = None
        self._captures: list[ArmedCapture] = []
        self._shards: tuple[Shards, list[Mapping[str, Any]]] | None = None

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
        """Report the stage as begun, and arm the captures that order it.

        Raises:
            CaptureError, InvalidPlan: a capture that is strict could not be armed.
        """
        work = self.work
        if work is None or work.stage is None or self._begun is not None or self._probe.is_inert:
            return
        probe = self._probe
        with probe.guard("begin", work):
            # Taken before anything that could fail: an end always has a beginning.
            self._begun = (time.time(), time.monotonic())
            if probe.device_events:
                self._timer = DeviceTimer.start()
            fields = work.fields()
            fields["device_time"] = self._timer is not None
            entry = probe.outbox.put(BEGIN, fields)
            self._begun, self._begin_seq = (entry.wall, entry.mono), entry.seq
            probe.standing.enter(entry.seq, work)
        captures: list[Mapping[str, Any]] = []
        with probe.guard("begin", work):
            captures = probe.plan.begin(work.step, work.stage)
        if captures:
            with probe.guard("begin", work):
                self._take_shards(captures)
            self._arm(captures, work, work.stage)

    def record(self, values: Mapping[str, object] | None = None, /, **named: object) -> None:
        """Hand over tensors, lists of ids, and metadata; each is owned when this returns.

        Args:
            values: names and values, for names that are no Python identifiers.
            named: tensors (see `payload.host_tensor` for the forms taken), lists of strings with
                one for each row (`sample_ids`, `group_ids`), and anything else as metadata
                (`temperature=1.0`, `streams={"rollout": {"engine": "vllm"}}`). None is left out.

        Raises:
            InvalidInput: only when the probe is strict.
        """
        if self.work is None or self._ended or self._probe.is_inert:
            return
        with self._probe.guard("record", self.work):
            for error in self._draft.add({**(values or {}), **named}):
                self._refuse("record", error)

    def hand_over(self, values: Mapping[str, object] | None = None, /, **named: object) -> None:
        """Hand over tensors that nobody writes from now on: as `record`, without its copy.

        For what a computation left behind, such as the intermediates of a loss. On the host dense
        torch tensors are held until the background thread has copied them. One that was written
        all the same, as torch counts it, is not kept, and a finding names it; of anything else a
        copy is made at once.

        Raises:
            InvalidInput: only when the probe is strict.
        """
        if self.work is None or self._ended or self._probe.is_inert:
            return
        with self._probe.guard("hand_over", self.work):
            for error in self._draft.add({**(values or {}), **named}, borrowed=True):
                self._refuse("hand_over", error)

    def record_datums(self, datums: Sequence[Mapping[str, object]]) -> None:
        """Hand over what is sent to a remote trainer: a list of dicts of lists, a row each.

        Each key becomes the packed tensor `datums/KEY` (of texts a list of them), keys of nested
        dicts are joined by dots. Numbers that the trainer returns belong into `log`.

        Raises:
            InvalidInput: only when the probe is strict.
        """
        if self.work is None or self._ended or self._probe.is_inert:
            return
        with self._probe.guard("record_datums", self.work):
            for error in self._draft.add(datum_columns(datums)):
                self._refuse("record_datums", error)

    def _refuse(self, what: str, error: StagescopeError, *, quiet: bool = False) -> None:
        """Report a tensor that is missing or does not fit the others.

        The payload then says so: the service, which finds the same in it, need not report it again.
        """
        wrong = isinstance(error, InvalidTensor)
        self._is_wrong = self._is_wrong or wrong
        self._probe.refuse(what, error, self.work, quiet=quiet, is_error=wrong)

    def wants(self, name: str) -> bool:
        """Say, cheaply, whether a tensor of this name is kept of this stage.

        For what is only worth a copy when it is: `if stage.wants("prob_ratio"): ...`. A section's
        name may be asked for, too (`"is_loss"`).
        """
        work = self.work
        if work is None or work.stage is None or self._probe.is_inert:
            return False
        return is_wanted(self._probe.plan.wanted(work.step, work.stage), work.stage, name)

    def log(self, **scalars: object) -> None:
        """Hand over named numbers: Python or numpy numbers, or tensors of one element.

        Raises:
            InvalidInput: only when the probe is strict.
        """
        if self.work is None or self._ended or self._probe.is_inert:
            return
        with self._probe.guard("log", self.work):
            for error in take_scalars(scalars, self._scalars, self._probe.pool):
                self._probe.refuse("log", error, self.work)

    def end(self, error: BaseException | None = None) -> None:
        """Report the end, with what was recorded; `error` is what the stage raised, or None.

        Raises:
            InvalidInput: only when the probe is strict, and `error` is None.
            CaptureError: a capture that is strict failed, and `error` is None.
        """
        work = self.work
        if work is None or self._begun is None or self._ended or self._probe.is_inert:
            return
        self._ended = True
        self._probe.standing.leave(self._begin_seq)
        problems: list[InvalidTensor] = []
        misspelt: list[InvalidTensor] = []
        with self._probe.guard("end", work, quiet=error is not None):
            if self._timer is not None:
                self._timer.stop()
            self._hand_over_shards()
            problems += self._draft.problems()
            self._is_wrong = self._is_wrong or bool(problems)
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
            "error_type": None if error is None else type(error).__name__,
            "error_message": None if error is None else _message(error),
            "scalars": dict(self._scalars),
            "payload": None if draft is None else draft.description(reported=self._is_wrong),
            "device_seconds": None,
        }
        timer = self._timer

        def finalise(fields: dict[str, Any]) -> None:
            settle_scalars(fields)
            if timer is not None:
                fields["device_seconds"] = timer.seconds()

        awaits: list[Awaited] = [*self._draft.copies(), *_copies(self._scalars)]
        if timer is not None:
            awaits.append(timer)
        self._probe.outbox.put(END, fields, draft=draft, awaits=awaits, finalise=finalise)

    def _keeps_scalars(self, work: Work) -> bool:
        """Say whether numbers are kept of a stage that handed over nothing else.

        The service keeps what comes as a payload: then an empty one goes with them.
        """
        words = self._probe.plan.wanted(work.step, work.stage or "") if self._scalars else ()
        return bool(words and kept_sections(words, work.stage, (), self._scalars))

    # --- captures -------------------------------------------------------------------------

    def _take_shards(self, captures: list[Mapping[str, Any]]) -> None:
        """Begin to take what captures order of the model's parameters and gradients."""
        ordered = [each for each in captures if each.get("parameters") or each.get("gradients")]
        if not ordered:
            return
        from stagescope_workers.capture.shards import Shards

        names = {
            kind: [pattern for each in ordered for pattern in each.get(kind) or ()]
            for kind in ("parameters", "gradients")
        }
        try:
            self._shards = (Shards(self._model, **names), ordered)
        except StagescopeError as error:
            for each in ordered:
                if _reports_shards(each):
                    self._send_dump(_of_shards(each, "failed", str(error)))
            raise

    def _hand_over_shards(self) -> None:
        """Put what was taken into the payload, which carries it like anything recorded."""
        if self._shards is None:
            return
        (shards, ordered), self._shards = self._shards, None
        tensors, places, error = shards.finish()
        problems = [*self._draft.add({**tensors, **({"shards": places} if places else {})})]
        for problem in problems:
            self._probe.refuse("record", problem, self.work)
        error = error or (str(problems[0]) if problems else None)
        state = "failed" if error else "complete"
        for each in ordered:
            if _reports_shards(each):
                size = sum(spec.nbytes for spec in self._draft.specs().values())
                self._send_dump({**_of_shards(each, state, error), "bytes": size})

    def _arm(self, captures: list[Mapping[str, Any]], work: Work, stage: str) -> None:
        from stagescope_workers.capture.msprobe_capture import Capturer

        probe = self._probe
        try:
            for capture in captures:
                armed = Capturer().begin(
                    capture,
                    run=probe.run,
                    attempt_key=probe.attempt_key or probe.incarnation,
                    stage=stage,
                    step=work.step,
                    part=work.part,
                    role=probe.role,
                    rank=probe.rank,
                    model=self._model,
                    data_root=probe.data_root,
                    out_of_reach=probe.out_of_reach,
                    tokens=probe.models.tokens_of(stage),
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
        # One by one, whatever the others raise: a capture left running would slow every step.
        with contextlib.ExitStack() as stack:
            for armed in captures:
                stack.callback(self._finish_capture, armed, error)

    def _finish_capture(self, armed: ArmedCapture, error: BaseException | None) -> None:
        try:
            fields = armed.finish(error)
        except StagescopeError as failure:  # strict: it has its result all the same
            self._send_dump(armed.finish(failure))
            raise
        self._send_dump(fields)

    def _send_dump(self, fields: dict[str, Any]) -> None:
        work = {} if self.work is None else self.work.fields()
        self._probe.outbox.put(DUMP, work | fields)


def _reports_shards(capture: Mapping[str, Any]) -> bool:
    """Say whether shards are the dump of a capture: msprobe's own follows, a configuration's are
    files that are kept like any other."""
    return not orders_msprobe(capture) and capture.get("source") != "keep"


def _of_shards(capture: Mapping[str, Any], state: str, error: str | None) -> dict[str, Any]:
    """Return the DUMP fields of a capture that orders no msprobe."""
    capture_id = capture.get("capture_id")
    return {"capture_id": capture_id, "state": state, "task": "parameters", "error": error}


def log_scalars(probe: Reporter, work: Work, scalars: Mapping[str, object]) -> None:
    """Queue a LOG event with the numbers in `scalars`."""
    taken: dict[str, float | HostCopy] = {}
    for error in take_scalars(scalars, taken, probe.pool):
        probe.refuse("log", error, work)
    if taken:
        fields = work.fields() | {"scalars": dict(taken)}
        probe.outbox.put(LOG, fields, awaits=_copies(taken), finalise=settle_scalars)


def _copies(scalars: Mapping[str, float | HostCopy]) -> list[HostCopy]:
    return [value for value in scalars.values() if isinstance(value, HostCopy)]


def take_scalars(
    given: Mapping[str, object], into: dict[str, float | HostCopy], pool: PinnedPool
) -> Iterator[StagescopeError]:
    """Put the numbers of `given` into `into`; yield what is wrong with single ones.

    A number that lies on a device is copied behind the device's work, and read later.
    """
    for name, value in given.items():
        try:
            if is_torch(value):
                into[name] = _tensor_scalar(name, value, pool)
            elif isinstance(value, bool | int | float | np.generic | np.ndarray):
                into[name] = float(np.asarray(value).reshape(()))
            elif value is not None:
                raise ValueError
        except StagescopeError as error:  # noqa: PERF203 - the others are to be taken
            yield error
        except (TypeError, ValueError, OverflowError):
            yield InvalidInput(f"the scalar {name} is {describe(value)}", expected="one number")


def _tensor_scalar(name: str, value: Any, pool: PinnedPool) -> float | HostCopy:
    if value.numel() != 1:
        raise ValueError
    if value.device.type == "cpu":
        return float(value.detach())
    taken = take_tensor(name, value.detach().reshape(1).double(), pool)
    return taken if isinstance(taken, HostCopy) else float(taken[2][0])


def settle_scalars(fields: dict[str, Any]) -> None:
    """Read the numbers that a device was still writing. Not for the training thread."""
    scalars = fields.get("scalars") or {}
    for name, value in scalars.items():
        if isinstance(value, HostCopy):
            scalars[name] = float(value.finish()[2].reshape(-1)[0])


def _message(error: BaseException) -> str:
    try:
        return str(error)[:_MAX_MESSAGE]
    except Exception:
        return "(the exception's message cannot be read)"
