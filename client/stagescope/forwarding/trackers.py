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
        self.address = address
        self.prefix = prefix
        self.page = page

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


@contextlib.contextmanager
def installed(what: str, extra: str) -> Iterator[None]:
    """Turn a failed import into an error that names the extra.

    Raises:
        MissingExtra: a library is not installed.
    """
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

    def __init__(self, address: str, prefix: str, page: str) -> None:
        super().__init__(address, prefix, page)
        if not address:
            raise self._misread("tensorboard:DIR")
        with installed("TensorBoard", "trackers"):
            from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, types_pb2
            from tensorboard.plugins.text import metadata
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        self._events, self._summaries = event_pb2, summary_pb2
        self._tensors, self._types, self._text = tensor_pb2, types_pb2, metadata
        self._make_writer: Callable[..., Any] = EventFileWriter
        self._writer: Any = None
        self._directory = Path(address).expanduser()
        found = self._directory.glob("events.out.tfevents.*")
        if not all(path.name.endswith(_OWN_FILE) for path in found):
            self.notice = (
                "there are other event files in this directory: TensorBoard's default loader reads "
                "all of them; with --load_fast=false it follows the newest alone, unless "
                "--reload_multifile=true is given"
            )

    def write(self, steps: Sequence[StepRecord]) -> None:
        """Write an event with the numbers of each step, and its page as text."""
        for record in steps:
            values = [
                self._summaries.Summary.Value(tag=name, simple_value=value)
                for name, value in self._named(record).items()
            ]
            text = f"[step {record.step}]({record.page}): {record.text}"
            self._add(record.step, record.wall, [*values, self._text_value("step/page", text)])
        self._flush()

    def alert(self, findings: Sequence[FindingRecord]) -> None:
        """Write each finding as text."""
        for finding in findings:
            text = f"**{finding.severity}** {finding.title}\n\n" + finding.text.replace(
                "\n", "\n\n"
            )
            value = self._text_value(f"findings/{finding.kind}/{finding.finding_id[:8]}", text)
            self._add(finding.step or 0, finding.wall, [value])
        self._flush()

    def close(self) -> None:
        """Close the event file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

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

    def _flush(self) -> None:
        if self._writer is not None:
            self._writer.flush()

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

    def __init__(self, address: str, prefix: str, page: str) -> None:
        super().__init__(address, prefix, page)
        self._run_id, _, uri = address.partition("@")
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
            metrics = [
                self._metric(name, value, round(1000 * record.wall), record.step)
                for name, value in self._named(record).items()
            ]
            for first in range(0, len(metrics), _METRICS_A_CALL):
                some = metrics[first : first + _METRICS_A_CALL]
                self._client.log_batch(self._run_id, metrics=some)
        if steps:
            tags = {"stagescope.step": steps[-1].page, "stagescope.verdict": steps[-1].text}
            self._set(tags)

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


class Wandb(Tracker):
    """A run of Weights & Biases, resumed beside its trainer; steps have a separate axis."""

    def __init__(self, address: str, prefix: str, page: str) -> None:
        super().__init__(address, prefix, page)
        parts = address.split("/")
        if len(parts) != 3 or not all(parts):
            raise self._misread("wandb:ENTITY/PROJECT/RUN_ID")
        self._entity, self._project, self._id = parts
        with installed("W&B", "wandb"):
            import wandb
        self._wandb: Any = wandb
        self._axis = f"{prefix}step"
        self._run: Any = None

    def write(self, steps: Sequence[StepRecord]) -> None:
        """Write a row of history for each step; the newest one's page is in the summary."""
        run = self._opened()
        for record in steps:
            run.log({**self._named(record), self._axis: record.step})
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

    def close(self) -> None:
        """Finish the writer, not the run: what waits is sent."""
        if self._run is not None:
            run, self._run = self._run, None
            run.finish()

    def _opened(self) -> Any:
        if self._run is None:
            self._run = self._resumed()
            self._run.config.update({"stagescope_page": self.page}, allow_val_change=True)
            self._run.define_metric(self._axis)
            self._run.define_metric(f"{self.prefix}*", step_metric=self._axis)
        return self._run

    def _resumed(self) -> Any:
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
        named: dict[str, Any] = {
            "entity": self._entity, "project": self._project, "id": self._id
        }  # fmt: skip
        mode = os.environ.get("WANDB_MODE", "online")
        if mode != "online" or "x_primary" not in own:
            settings = self._wandb.Settings(**own)
            return self._wandb.init(**named, resume="must", settings=settings)
        # A shared run that does not exist would be created: ask first.
        self._wandb.Api(timeout=20).run(self.address)
        return self._wandb.init(**named, settings=self._wandb.Settings(mode="shared", **own))


class SwanLab(Tracker):
    """A run of SwanLab, resumed."""

    def __init__(self, address: str, prefix: str, page: str) -> None:
        super().__init__(address, prefix, page)
        parts = address.split("/")
        if len(parts) != 3 or not all(parts):
            raise self._misread("swanlab:WORKSPACE/PROJECT/RUN_ID")
        self._workspace, self._project, self._id = parts
        with installed("SwanLab", "swanlab"):
            import swanlab  # pyright: ignore[reportMissingImports] # not beside protobuf 7
        self._swanlab: Any = swanlab
        self._run: Any = None

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

    def close(self) -> None:
        """Send what waits, and finish the run."""
        if self._run is not None:
            with _quiet():
                self._run.finish()
            self._run = None

    def _opened(self) -> Any:
        if self._run is None:
            names = ("hardware", "runtime", "requirements", "git", "swanlab", "monitor")
            with _quiet():
                self._run = self._swanlab.init(
                    workspace=self._workspace, project=self._project, id=self._id, resume="must",
                    # Neither this process's machine, packages nor load.
                    settings=self._swanlab.Settings(probe=dict.fromkeys(names, False)),
                )  # fmt: skip
        return self._run


class Trackio(Tracker):
    """A run of Trackio: a local one, or of the server or Space that its environment names.

    Its client turns errors into warnings and sends in the background: the run is opened and
    finished in each call, and its warnings are errors.
    """

    def __init__(self, address: str, prefix: str, page: str) -> None:
        super().__init__(address, prefix, page)
        self._project, _, self._name = address.partition("/")
        if not self._project or not self._name:
            raise self._misread("trackio:PROJECT/RUN")
        with installed("Trackio", "trackio"), _quiet():
            import trackio  # pyright: ignore[reportMissingImports] # not beside pillow 13
        self._trackio: Any = trackio

    def write(self, steps: Sequence[StepRecord]) -> None:
        """Write the metrics of each step, and its page as Markdown."""

        def log(run: Any) -> None:
            for record in steps:
                link = f"[step {record.step}]({record.page}): {record.text}"
                page = self._trackio.Markdown(link)
                values = {**self._named(record), f"{self.prefix}page": page}
                run.log(values, step=record.step)

        self._in_run(log)

    def alert(self, findings: Sequence[FindingRecord]) -> None:
        """Send an alert for each finding."""
        levels = self._trackio.AlertLevel

        def alert(run: Any) -> None:
            for each in findings:
                level = levels.ERROR if each.severity == "error" else levels.WARN
                run.alert(each.title, text=each.text, level=level, step=each.step or 0)

        if findings:
            self._in_run(alert)

    def _in_run(self, act: Callable[[Any], None]) -> None:
        """Open the run, act and finish it, in a context without the caller's own open run."""
        with warnings.catch_warnings(record=True) as caught, _quiet():
            warnings.simplefilter("always")
            contextvars.Context().run(self._act, act)
        said = [str(each.message) for each in caught if "trackio" in str(each.message).lower()]
        if said:
            raise RuntimeError(said[0])

    def _act(self, act: Callable[[Any], None]) -> None:
        run = self._trackio.init(
            self._project, name=self._name, resume="must", embed=False, auto_log_gpu=False,
            auto_log_cpu=False,
        )  # fmt: skip
        # Its first record would replace the trainer's configuration: that, with the page, or none.
        stored = (each for each in self._trackio.Api().runs(self._project) if each.id == run.id)
        trained = next(stored, None)
        run.config.clear()
        if trained is not None:
            run.config.update({**(trained.config or {}), "stagescope_page": self.page})
        try:
            act(run)
        finally:
            run.finish()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep what a client prints from stdout, which belongs to the command."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield
