"""Write steps into runs of TensorBoard, MLflow, W&B, SwanLab and Trackio, by their own clients.

Each client is imported when its target is opened. A tracker raises what its client raises. After
`write` has returned, the client has the steps.
"""

from __future__ import annotations

import contextlib
import contextvars
import io
import os
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar, Final

from stagescope.forwarding.records import FindingRecord, StepRecord
from stagescope_wire.errors import InvalidInput, MissingExtra
from stagescope_wire.versions import install_command

_OWN_FILE: Final = ".stagescope"
"""Ending of our event files."""
_TITLE: Final = 63
"""Characters of an alert's title in W&B."""
_METRICS_A_CALL: Final = 1000
"""Most metrics that MLflow accepts in one call."""
_TAG: Final = 5000
"""Most characters of a tag in MLflow."""


class Tracker(ABC):
    """A run of a tracker.

    Args:
        address: what follows the tracker's name in a target.
        prefix: before each name that is written.
        page: address of the run's page.
    """

    of_stages: ClassVar[bool] = False
    """Whether it accepts stages of every attempt, instead of numbers of the current attempts."""
    is_ordered: ClassVar[bool] = False
    """Whether writing a step hides later steps that were written before: they are rewritten."""
    notice: str = ""
    """Note for its reader, shown once."""

    def __init__(self, address: str, prefix: str, page: str) -> None:
        self.address, self.prefix, self.page = address, prefix, page
        self._load()

    @abstractmethod
    def _load(self) -> None:
        """Read the address and import the client; raise `InvalidInput` or `MissingExtra`."""

    @abstractmethod
    def write(self, steps: Sequence[StepRecord]) -> None:
        """Write steps, in this order."""

    def alert(self, findings: Sequence[FindingRecord]) -> None:  # noqa: B027 - not every tracker
        """Write findings, where the tracker has a place for them."""

    def close(self) -> None:  # noqa: B027 - not every tracker
        """Hand over what waits, and close connections and files."""

    def _named(self, record: StepRecord) -> dict[str, float]:
        return {f"{self.prefix}{name}": value for name, value in record.values.items()}

    def _misread(self, expected: str) -> InvalidInput:
        return InvalidInput(f"{self.address!r} names no run to forward to", expected=expected)


def _link(record: StepRecord) -> str:
    """Return a step's page and verdict as Markdown."""
    return f"[step {record.step}]({record.page}): {record.text}"


@contextlib.contextmanager
def installed(what: str, extra: str) -> Iterator[None]:
    """Turn a failed import into a `MissingExtra` that names the extra."""
    try:
        yield
    except ImportError as error:
        raise MissingExtra(
            f"forwarding to {what} needs {error.name or what}, which is not installed",
            advice=install_command(extra),
        ) from error


class TensorBoard(Tracker):
    """A separate event file in a directory: TensorBoard shows it in the run of that directory.

    TensorBoard's own loader reads only 32-bit numbers. It drops the points after a repeated step.
    """

    is_ordered = True

    def _load(self) -> None:
        if not self.address:
            raise self._misread("tensorboard:DIR")
        with installed("TensorBoard", "trackers"):
            from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, types_pb2
            from tensorboard.plugins.text import metadata
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        self._events, self._summaries = event_pb2, summary_pb2
        self._tensors, self._types, self._text = tensor_pb2, types_pb2, metadata
        self._make_writer: Callable[..., Any] = EventFileWriter
        self._writer: Any = None
        self._directory = Path(self.address).expanduser()
        found = self._directory.glob("events.out.tfevents.*")
        if not all(path.name.endswith(_OWN_FILE) for path in found):
            self.notice = (
                "this directory has other event files. TensorBoard's default loader reads all of "
                "them. With --load_fast=false it follows only the newest, unless you add "
                "--reload_multifile=true"
            )

    def write(self, steps: Sequence[StepRecord]) -> None:
        """Write an event with the numbers of each step, and its page as text."""
        for record in steps:
            values = [
                self._summaries.Summary.Value(tag=name, simple_value=value)
                for name, value in self._named(record).items()
            ]
            page = self._text_value("step/page", _link(record))
            self._add(record.step, record.wall, [*values, page])
        self._writer.flush()

    def alert(self, findings: Sequence[FindingRecord]) -> None:
        """Write each finding as text."""
        for each in findings:
            paragraphs = each.text.replace("\n", "\n\n")
            text = f"**{each.severity}** {each.title}\n\n{paragraphs}"
            value = self._text_value(f"findings/{each.kind}/{each.finding_id[:8]}", text)
            self._add(each.step or 0, each.wall, [value])
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def _add(self, step: int, wall: float, values: Sequence[Any]) -> None:
        if self._writer is None:
            self._await_next_second()
            self._writer = self._make_writer(str(self._directory), filename_suffix=_OWN_FILE)
        summary = self._summaries.Summary(value=values)
        self._writer.add_event(self._events.Event(wall_time=wall, step=step, summary=summary))

    def _await_next_second(self) -> None:
        """Wait until the name of a new file sorts after the existing ones.

        TensorBoard reads files by their names, which begin with the second in which each was made.
        """
        found = self._directory.glob(f"events.out.tfevents.*{_OWN_FILE}")
        newest = max((path.name.split(".")[3] for path in found), default="")
        deadline = time.monotonic() + 1.0  # a clock may have been set back
        while newest == str(int(time.time())) and time.monotonic() < deadline:
            time.sleep(0.02)

    def _text_value(self, name: str, text: str) -> Any:
        tag = f"{self.prefix}{name}"
        # Without a dimension: a text of one would be shown as a table.
        tensor = self._tensors.TensorProto(dtype=self._types.DT_STRING, string_val=[text.encode()])
        described = self._text.create_summary_metadata(display_name=tag, description="")
        return self._summaries.Summary.Value(tag=tag, tensor=tensor, metadata=described)


class MLflow(Tracker):
    """A run of an MLflow tracking server or database.

    A metric's time is when its step was closed, so that a call that is repeated adds nothing.
    """

    def _load(self) -> None:
        self._run_id, _, uri = self.address.partition("@")
        if not self._run_id:
            raise self._misread("mlflow:RUN_ID or mlflow:RUN_ID@TRACKING_URI")
        with installed("MLflow", "trackers"):
            from mlflow import MlflowClient
            from mlflow.entities import Metric, RunTag
        self._metric, self._tag = Metric, RunTag
        self._client = MlflowClient(uri or None)
        self._is_linked = False

    def write(self, steps: Sequence[StepRecord]) -> None:
        """Write the metrics of each step; the newest one's page is a tag."""
        self._link()
        for record in steps:
            wall, named = round(1000 * record.wall), self._named(record).items()
            metrics = [self._metric(name, value, wall, record.step) for name, value in named]
            for first in range(0, len(metrics), _METRICS_A_CALL):
                some = metrics[first : first + _METRICS_A_CALL]
                self._client.log_batch(self._run_id, metrics=some)
        if steps:
            newest = steps[-1]
            self._set({"stagescope.step": newest.page, "stagescope.verdict": newest.text})

    def alert(self, findings: Sequence[FindingRecord]) -> None:
        """Set a tag for each kind of finding."""
        self._set({f"stagescope.finding.{each.kind}": each.text for each in findings})

    def _link(self) -> None:
        """Add the page to the run's description, once."""
        if self._is_linked:
            return
        note = self._client.get_run(self._run_id).data.tags.get("mlflow.note.content", "")
        tags = {"stagescope.run": self.page}
        if self.page not in note:
            link = f"[stagescope: this run, step by step]({self.page})"
            tags["mlflow.note.content"] = f"{note}\n\n{link}".lstrip()
        self._set(tags)
        self._is_linked = True

    def _set(self, tags: Mapping[str, str]) -> None:
        found = [self._tag(name, text[:_TAG]) for name, text in tags.items()]
        self._client.log_batch(self._run_id, tags=found)


class _ResumedRun(Tracker):
    """A run named by three words, which its client opens before the first record."""

    form: ClassVar[str]
    """The target, such as `wandb:ENTITY/PROJECT/RUN_ID`."""
    _run: Any = None

    def _load(self) -> None:
        parts = self.address.split("/")
        if len(parts) != 3 or not all(parts):
            raise self._misread(self.form)
        self._owner, self._project, self._id = parts

    @abstractmethod
    def _resumed(self) -> Any:
        """Open the client's run."""

    def _opened(self) -> Any:
        if self._run is None:
            with _quiet():
                self._run = self._resumed()
        return self._run

    def close(self) -> None:
        """Send what waits, and finish this writer of the run."""
        run, self._run = self._run, None
        if run is not None:
            with _quiet():
                run.finish()


class Wandb(_ResumedRun):
    """A run of Weights & Biases, resumed beside its trainer; steps have a separate axis."""

    form = "wandb:ENTITY/PROJECT/RUN_ID"

    def _load(self) -> None:
        super()._load()
        with installed("W&B", "wandb"):
            import wandb
        self._wandb: Any = wandb

    def write(self, steps: Sequence[StepRecord]) -> None:
        """Write a row of history for each step; the newest one's page is in the summary."""
        run = self._opened()
        for record in steps:
            run.log({**self._named(record), f"{self.prefix}step": record.step})
            run.summary[f"{self.prefix}page"] = record.page
            run.summary[f"{self.prefix}verdict"] = record.text

    def alert(self, findings: Sequence[FindingRecord]) -> None:
        """Send an alert for each finding."""
        for finding in findings:
            self._opened().alert(
                title=finding.title[:_TITLE],
                text=finding.text,
                level="ERROR" if finding.severity == "error" else "WARN",
                # Within this time an alert of the same title would be dropped.
                wait_duration=timedelta(milliseconds=1),
            )

    def _resumed(self) -> Any:
        run = self._second_writer()
        axis = f"{self.prefix}step"
        run.config.update({"stagescope_page": self.page}, allow_val_change=True)
        run.define_metric(axis)
        run.define_metric(f"{self.prefix}*", step_metric=axis)
        return run

    def _second_writer(self) -> Any:
        """Open the run, as a second writer beside the trainer's if this version supports that."""
        # Nothing of this process but the numbers: neither its console, files, load nor its end.
        own: dict[str, Any] = {
            "silent": True, "console": "off", "disable_git": True, "disable_code": True,
            "x_primary": False, "x_label": "stagescope", "x_update_finish_state": False,
            "x_disable_stats": True, "x_disable_meta": True, "x_disable_machine_info": True,
            "x_save_requirements": False,
        }  # fmt: skip
        known = set(getattr(self._wandb.Settings, "model_fields", ()))
        own = {name: value for name, value in own.items() if name in known}
        named: dict[str, Any] = {"entity": self._owner, "project": self._project, "id": self._id}
        mode = os.environ.get("WANDB_MODE", "online")
        if mode != "online" or "x_primary" not in own:
            settings = self._wandb.Settings(**own)
            return self._wandb.init(**named, resume="must", settings=settings)
        # A shared run that does not exist would be created: ask first.
        self._wandb.Api(timeout=20).run(self.address)
        return self._wandb.init(**named, settings=self._wandb.Settings(mode="shared", **own))


class SwanLab(_ResumedRun):
    """A run of SwanLab, resumed."""

    form = "swanlab:WORKSPACE/PROJECT/RUN_ID"

    def _load(self) -> None:
        super()._load()
        with installed("SwanLab", "swanlab"):
            import swanlab  # pyright: ignore[reportMissingImports] # not beside protobuf 7
        self._swanlab: Any = swanlab

    def write(self, steps: Sequence[StepRecord]) -> None:
        """Write the metrics of each step, and its page as text."""
        run = self._opened()
        for record in steps:
            text = self._swanlab.Text(record.page, caption=record.text)
            run.log({**self._named(record), f"{self.prefix}page": text}, step=record.step)

    def alert(self, findings: Sequence[FindingRecord]) -> None:
        """Write each finding as text."""
        for finding in findings:
            text = self._swanlab.Text(finding.text, caption=finding.title)
            self._opened().log({f"{self.prefix}findings": text}, step=finding.step or 0)

    def _resumed(self) -> Any:
        # Neither this process's machine, packages nor load.
        names = ("hardware", "runtime", "requirements", "git", "swanlab", "monitor")
        return self._swanlab.init(
            workspace=self._owner, project=self._project, id=self._id, resume="must",
            settings=self._swanlab.Settings(probe=dict.fromkeys(names, False)),
        )  # fmt: skip


class Trackio(Tracker):
    """A run of Trackio: a local one, or of the server or Space that its environment names.

    Its client turns errors into warnings and sends in the background: the run is opened and
    finished in each call, and its warnings are errors.
    """

    def _load(self) -> None:
        self._project, _, self._name = self.address.partition("/")
        if not self._project or not self._name:
            raise self._misread("trackio:PROJECT/RUN")
        with installed("Trackio", "trackio"), _quiet():
            import trackio  # pyright: ignore[reportMissingImports] # not beside pillow 13
        self._trackio: Any = trackio

    def write(self, steps: Sequence[StepRecord]) -> None:
        """Write the metrics of each step, and its page as Markdown."""

        def log(run: Any) -> None:
            for record in steps:
                page = self._trackio.Markdown(_link(record))
                run.log({**self._named(record), f"{self.prefix}page": page}, step=record.step)

        self._in_run(log)

    def alert(self, findings: Sequence[FindingRecord]) -> None:
        """Send an alert for each finding."""
        levels = self._trackio.AlertLevel

        def alert(run: Any) -> None:
            for each in findings:
                level = levels.ERROR if each.severity == "error" else levels.WARN
                run.alert(each.title, text=each.text, level=level, step=each.step or 0)

        self._in_run(alert)

    def _in_run(self, write: Callable[[Any], None]) -> None:
        """Open the run, write and finish it, in a context without the caller's own open run."""
        with warnings.catch_warnings(record=True) as caught, _quiet():
            warnings.simplefilter("always")
            contextvars.Context().run(self._write_to_run, write)
        said = [str(each.message) for each in caught if "trackio" in str(each.message).lower()]
        if said:
            raise RuntimeError(said[0])

    def _write_to_run(self, write: Callable[[Any], None]) -> None:
        run = self._trackio.init(
            self._project, name=self._name, resume="must", embed=False, auto_log_gpu=False,
            auto_log_cpu=False,
        )  # fmt: skip
        # Its first record would replace the trainer's configuration: that, with the page, or none.
        run.config.clear()
        for stored in self._trackio.Api().runs(self._project):
            if stored.id == run.id:
                run.config.update({**(stored.config or {}), "stagescope_page": self.page})
        try:
            write(run)
        finally:
            run.finish()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep what a client prints from stdout, which belongs to the command."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield
