"""`stagescope bisect`: swaps one component at a time, and names what makes the mismatch."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import click

from stagescope import terminal
from stagescope.saving import is_bundle
from stagescope_wire import discovery
from stagescope_wire.engines import Engine, EngineInfo, OpenAIEngine
from stagescope_wire.errors import InvalidInput, StagescopeError
from stagescope_wire.names import EXPERIMENT
from stagescope_wire.schema import Target, read_target
from stagescope_workers.bisect import arms
from stagescope_workers.bisect.arms import NAMES, Scores
from stagescope_workers.bisect.bisection import Bisection
from stagescope_workers.bisect.bisection import bisect as run_bisect
from stagescope_workers.bisect.kept import Kept, kept_rows, spread
from stagescope_workers.bisect.places import found_place
from stagescope_workers.bisect.report import (
    PICTURES,
    CostReport,
    Report,
    record_arm,
    report_verdict,
    save_picture,
)
from stagescope_workers.bisect.scoring import DTYPES, Scorer, Sides
from stagescope_workers.bisect.state import State
from stagescope_workers.bisect.verdict import Verdict
from stagescope_workers.consistency.opening import (
    DIRECTORY,
    EXPECTED,
    Opening,
    engine_options,
    model_option,
    read_config,
)
from stagescope_workers.consistency.report import reason_against_recording
from stagescope_workers.consistency.stored import read_batch


def _arms(_: click.Context, __: click.Parameter, value: str | None) -> list[str] | None:
    if value is None:
        return None
    names = [name for part in value.split(",") if (name := part.strip())]
    unknown = [name for name in names if name not in NAMES]
    if unknown or not names:
        raise click.BadParameter(f"{', '.join(unknown) or 'nothing'}: one of {', '.join(NAMES)}")
    return names


def _picture(_: click.Context, __: click.Parameter, value: Path | None) -> Path | None:
    if value is not None and value.suffix.lower() not in PICTURES:
        raise click.BadParameter(f"{value} does not end with {' or '.join(PICTURES)}")
    return value


@click.command()
@click.argument("step", metavar="RUN:STEP|FILE")
@click.option("--engine", metavar="ENGINE", help=f"Engine that served the rollout: {EXPECTED}.")
@model_option
@click.option("--adapter", metavar="NAME", help="LoRA adapter that the engine served.")
@click.option("--checkpoint", type=DIRECTORY, help="The trainer's weights in that step.")
@click.option(
    "--dtype",
    type=click.Choice(DTYPES),
    help="The engine's dtype [default: what it reports, else that of the weights].",
)
@click.option("--arms", "chosen", callback=_arms, metavar="A,B", help="Only these arms.")
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    default=16,
    show_default=True,
    help="Most trajectories, spread over the step's mismatch.",
)
@click.option("--dry-run", is_flag=True, help="Only print what each arm costs.")
@click.option(
    "--picture",
    type=click.Path(dir_okay=False, path_type=Path),
    callback=_picture,
    help="Save the ladder as .svg or .html.",
)
@click.option(
    "--state",
    type=click.Path(file_okay=False, path_type=Path),
    help="Directory of the arms that are done [default: in ~/.stagescope/bisect].",
)
@engine_options
@click.pass_context
def bisect(
    ctx: click.Context,
    /,
    step: str,
    engine: str | None,
    adapter: str | None,
    checkpoint: Path | None,
    dtype: str | None,
    chosen: list[str] | None,
    limit: int,
    dry_run: bool,
    picture: Path | None,
    state: Path | None,
    opening: Opening,
    no_record: bool,
    as_json: bool,
) -> None:
    """Find what makes the mismatch of a kept step: swap one component at a time.

    The step's tokens are scored again in a ladder of arms, from the engine to the trainer. The
    answer names the swap at which the mismatch disappears. Each arm becomes a step of the run
    bisect-RUN-STEP where a service is known. After an interrupt the same command continues.

    \b
    stagescope bisect RUN:STEP --engine http://HOST:PORT --model DIR
    stagescope bisect RUN:STEP --engine llm --model DIR --checkpoint DIR --picture ladder.svg
    stagescope bisect step5.safetensors --model DIR --arms transformers,float32

    Exit code 0: a cause was named. 1: none was, or nothing is wrong with the step.
    """
    if engine is None and opening.model is None:
        raise click.UsageError("give --engine, --model, or both: what scores the tokens again?")
    kept = spread(found_place(kept_rows(read_batch(step, opening.url))), limit)
    name = _name(step)
    folder = state or _home() / "bisect" / name.removeprefix(EXPERIMENT)
    with contextlib.ExitStack() as stack:
        sides = _sides(stack, opening, engine, adapter, checkpoint, dtype)
        scorer = Scorer(kept, sides, chosen, _show)
        stack.callback(scorer.models.close)
        if dry_run:
            _print(CostReport(scorer.costs(), {}), as_json)
            return
        kept_state = State(folder, sides.fingerprint(kept))
        steps = _Steps(kept, sides, name, kept_state.key, opening.url, no_record)
        with terminal.ending_at_once(lambda: _interrupted(kept_state)):
            found = _run(scorer, kept_state, steps)
    steps.conclude(found.verdict, None if Path(step).is_file() else read_target(step))
    _print(Report(found, steps.text, folder), as_json)
    if picture is not None:
        save_picture(found, picture)
        _show(f"picture in {picture}")
    ctx.exit(0 if found.verdict.is_named else 1)


def _sides(
    stack: contextlib.ExitStack,
    opening: Opening,
    engine: str | None,
    adapter: str | None,
    checkpoint: Path | None,
    dtype: str | None,
) -> Sides:
    """Open the engine, which `stack` closes, and return it with the models."""
    opened = None
    if engine is not None:
        opened = opening.engine(engine)
        stack.callback(opened.close)
        opened = opened if adapter is None else _with_adapter(opened, adapter)
    info = None if opened is None else opened.info
    if info is not None and info.adapters and adapter is None:
        names = ", ".join(info.adapters)
        _show(f"the engine also serves {names}: --adapter NAME scores with an adapter")
    return Sides(
        engine=opened,
        model=opening.model,
        checkpoint=checkpoint,
        dtype=dtype or _engine_dtype(info, opening.model),
        adapter=adapter or "",
    )


def _run(scorer: Scorer, state: State, steps: _Steps) -> Bisection:
    """Say what it costs, and run it."""
    done = state.done()
    if state.is_continued and done:
        _show(f"continuing: {', '.join(done)} are done in {state.folder}")
    costs = CostReport(scorer.costs(), done)
    for line in (costs.heading, *costs.lines(width=terminal.width())):
        _show(line)
    return run_bisect(scorer, state, on_arm=steps, on_progress=_show)


def _interrupted(state: State) -> str:
    count = len(state.done())
    return f"interrupted: {count} arms are kept in {state.folder}; the same command continues"


def _print(report: CostReport | Report, as_json: bool) -> None:
    if as_json:
        terminal.show_json(report.to_dict())
    else:
        terminal.show(report)


class _Steps:
    """Records each arm as a step of a run; `text` says what was recorded."""

    def __init__(
        self,
        kept: Kept,
        sides: Sides,
        run: str,
        key: str,
        url: str | None,
        is_off: bool,
    ) -> None:
        self._kept, self._model = kept, sides.model
        self._engine = None if sides.engine is None else sides.engine.info
        self._run, self._key, self._url = run, key, url
        self._count = 0
        self._problem = _reason_against_recording(url, is_off)

    def __call__(self, scores: Scores) -> bool:
        """Record an arm; return whether the service has it."""
        if self._problem:
            return False
        info = self._engine if scores.arm in arms.ENGINE_ARMS else None
        info = info or EngineInfo("transformers", str(self._model or ""), processed=False)
        if scores.arm == arms.RECORDED:
            info = EngineInfo("stored", self._kept.heading)
        try:
            arrived = record_arm(
                self._kept, scores, info, run=self._run, key=self._key, url=self._url
            )
        except StagescopeError as error:
            self._problem = error.wrong
            return False
        if arrived:
            self._count += 1
        else:
            self._problem = "the service did not acknowledge a step in time"
        return arrived

    def conclude(self, verdict: Verdict, target: Target | None) -> None:
        """Report the answer on a step of the service, so that the doctor names it."""
        if self._problem or target is None:
            return
        try:
            report_verdict(
                verdict, target, self._kept.place, run=self._run, key=self._key, url=self._url
            )
        except StagescopeError as error:
            self._problem = error.wrong

    @property
    def text(self) -> str:
        """Describe what was recorded."""
        if self._problem:
            return f"not recorded: {self._problem}"
        return (
            f"{self._count} arms recorded as steps of run {self._run}: stagescope steps {self._run}"
        )


def _reason_against_recording(url: str | None, is_off: bool) -> str:
    if is_off:
        return "--no-record"
    if url is not None and is_bundle(url):
        return "a bundle is read only"
    return reason_against_recording(url) or ""


def _name(step: str) -> str:
    """Return the name of the run of the arms."""
    text = Path(step).stem if Path(step).is_file() else step
    return f"{EXPERIMENT}{re.sub(r'[^A-Za-z0-9._-]+', '-', text).strip('-')}"[:100]


def _with_adapter(engine: Engine, adapter: str) -> Engine:
    if not isinstance(engine, OpenAIEngine):
        raise InvalidInput(
            f"{engine.info.kind} has no adapter {adapter!r}", expected="an engine over HTTP"
        )
    return engine.using(adapter=adapter)


def _home() -> Path:
    return discovery.service_file().parent


def _engine_dtype(info: EngineInfo | None, model: Path | None) -> str:
    """Return the engine's dtype; unknown ones are those of the weights, at most 16 bits."""
    reported = str((info and info.dtype) or "").removeprefix("torch.")
    if reported in DTYPES or model is None:
        return reported or "bfloat16"
    config = read_config(model)
    own = str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")
    return own if own in ("bfloat16", "float16") else "bfloat16"


def _show(text: str) -> None:
    click.echo(text, err=True)
