"""`stagescope consistency`: compares an inference engine with transformers, token by token."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from stagescope import terminal
from stagescope_wire.batch import Batch
from stagescope_wire.engines import Engine, Sampling
from stagescope_wire.errors import MissingExtra, NotFound, StagescopeError, Unreachable
from stagescope_workers.consistency.comparison import EngineComparison, Options, compare
from stagescope_workers.consistency.opening import (
    EXPECTED,
    Opening,
    engine_options,
    model_option,
    read_config,
)
from stagescope_workers.consistency.prompts import (
    MATCHES,
    Item,
    Marking,
    Tokenizer,
    built_in,
    read_items,
)
from stagescope_workers.consistency.report import Report
from stagescope_workers.consistency.stored import STORED, read_batch, rescore

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command()
@model_option
@click.option(
    "--engine", required=True, metavar="ENGINE", help=f"Engine that serves rollouts: {EXPECTED}."
)
@click.option(
    "--against",
    default="transformers",
    show_default=True,
    metavar="ENGINE",
    help="Engine that scores the same tokens.",
)
@click.option("--prompts", type=_FILE, help="JSONL (prompt, messages or ids), or a prompt a line.")
@click.option(
    "--dataset",
    type=_FILE,
    help="JSONL with prompt, answer, and optional image (a file below): both sides answer.",
)
@click.option(
    "--match",
    type=click.Choice(MATCHES),
    default="contains",
    show_default=True,
    help="When an answer to --dataset is right.",
)
@click.option("--pattern", help="--match regex: its last find (first group) must be the answer.")
@click.option(
    "--batch",
    metavar="FILE|RUN:STEP",
    help="Score a kept step's tokens again instead; --against also stored[:NAME].",
)
@click.option("--chat", is_flag=True, help="Render texts by the model's chat template.")
@click.option("--as-text", is_flag=True, help="Send texts; the engine tokenises them itself.")
@click.option("--max-tokens", type=click.IntRange(min=1), default=64, show_default=True)
@click.option(
    "--temperature",
    type=terminal.FiniteFloat(min=0),
    help="Sampling temperature of the engine [default: 1; with --dataset 0, greedy].",
)
@click.option(
    "--top-p", type=terminal.FiniteFloat(0, 1, min_open=True), default=1.0, show_default=True
)
@click.option("--top-k", type=click.IntRange(min=0), default=0, show_default=True, help="0: all.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the engine.")
@click.option("--limit", type=click.IntRange(min=1), help="Most prompts.")
@click.option(
    "--run", type=terminal.RUN_NAME,
    help="Record as a step of this run [default: consistency-MODEL].",
)  # fmt: skip
@click.option("--step", type=click.IntRange(min=0), default=1, show_default=True)
@engine_options
@click.pass_context
def consistency(
    ctx: click.Context,
    /,
    engine: str,
    against: str,
    prompts: Path | None,
    dataset: Path | None,
    batch: str | None,
    run: str | None,
    step: int,
    limit: int | None,
    opening: Opening,
    no_record: bool,
    as_json: bool,
    **sampling: Any,  # the other options, see `_options`
) -> None:
    """Compare an inference engine with transformers: same prompts, same tokens.

    The engine answers the prompts. Both sides give the log-prob of each token that it sampled. The
    difference is printed, and recorded as a step where a service is known. Exit code 1 if the two
    sides do not use the same tokens.

    \b
    stagescope consistency --model DIR --engine http://HOST:PORT
    stagescope consistency --model DIR --engine ctranslate2:DIR8 --against transformers:float32
    stagescope consistency --model DIR --engine llm --dataset FILE.jsonl --match exact
    stagescope consistency --engine ctranslate2:DIR8 --batch RUN:5 --against stored
    """
    if sum(each is not None for each in (prompts, dataset, batch)) > 1:
        raise click.UsageError("give one of --prompts, --dataset and --batch")
    model = opening.model
    with terminal.ending_at_once(lambda: "interrupted"), contextlib.ExitStack() as stack:

        def opened(text: str) -> Engine:
            found = opening.engine(text)
            stack.callback(found.close)
            return found

        if batch is not None:
            stored = read_batch(batch, opening.url)
            found = _rescore(stored, opened, engine, against, model, limit)
        else:
            items = _items(prompts or dataset, limit)
            options = _options(answers=dataset is not None, **sampling)
            found = _compare(items, opened, engine, against, model, options)
    name = run or _run_name(model)
    recorded = "not recorded" if no_record else _record(found, name, step, opening.url)
    report = Report(found, recorded)
    if as_json:
        terminal.show_json(report.to_dict())
    else:
        terminal.show(report)
    ctx.exit(0 if found.aligned else 1)


def _compare(
    items: Sequence[Item],
    opened: Callable[[str], Engine],
    engine: str,
    against: str,
    model: Path | None,
    options: Options,
) -> EngineComparison:
    if model is None:
        raise click.UsageError("prompts need the --model, whose tokenizer makes tokens of them")
    first, second = opened(engine), opened(against)
    from stagescope_workers.consistency.transformers_engine import load_tokenizer

    tokenizer = load_tokenizer(model)
    options = dataclasses.replace(options, config=read_config(model))
    return compare(items, first, second, tokenizer, options, on_progress=_show_progress)


def _rescore(
    stored: Batch,
    opened: Callable[[str], Engine],
    engine: str,
    against: str,
    model: Path | None,
    limit: int | None,
) -> EngineComparison:
    kind, _, name = against.partition(":")
    first = opened(engine)
    second = (name or STORED) if kind == "stored" else opened(against)
    tokenizer = None if model is None else _tokenizer(model)
    return rescore(
        stored, first, second, tokenizer=tokenizer, limit=limit, on_progress=_show_progress
    )


def _tokenizer(model: Path) -> Tokenizer | None:
    # It only shows the texts of given tokens: the numbers need none.
    try:
        from stagescope_workers.consistency.transformers_engine import load_tokenizer

        return load_tokenizer(model)
    except (MissingExtra, NotFound):
        return None


def _show_progress(text: str) -> None:
    click.echo(text, err=True)


def _items(file: Path | None, limit: int | None) -> list[Item]:
    return built_in()[:limit] if file is None else read_items(file, limit)


def _options(
    *, answers: bool, temperature: float | None, match: str, pattern: str | None,
    chat: bool, as_text: bool, **sampling: Any,
) -> Options:  # fmt: skip
    if temperature is None:
        temperature = 0.0 if answers else 1.0
    return Options(
        sampling=Sampling(temperature=temperature, **sampling),
        chat=chat,
        as_text=as_text,
        answers=answers,
        marking=Marking(match, pattern),
    )


def _run_name(model: Path | None) -> str:
    name = "stored" if model is None else re.sub(r"[^A-Za-z0-9._-]+", "-", model.resolve().name)
    return f"consistency-{name}"[:100]


def _record(found: EngineComparison, run: str, step: int, url: str | None) -> str:
    """Record the comparison, and describe the result; the numbers are printed in any case."""
    from stagescope_workers.consistency.report import reason_against_recording, record

    if not found.rows:
        return "not recorded: no token has two log-probs"
    if (reason := reason_against_recording(url)) is not None:
        return f"not recorded: {reason}"
    try:
        arrived = record(found, run=run, step=step, url=url)
    except Unreachable as error:
        return f"not recorded: {error}"
    except StagescopeError as error:
        terminal.report(error)
        return f"not recorded: {error.wrong}"
    if not arrived:
        return "not recorded: the service did not acknowledge it in time"
    return f"recorded as step {step} of run {run}: stagescope metrics {step} --run {run}"
