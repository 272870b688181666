"""`stagescope convert` and `stagescope export`: dumps in other file formats."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from stagescope import render, terminal

if TYPE_CHECKING:
    from stagescope_service.dumps.unpickling import Conversion

_JSON: Final = click.option("--json", "as_json", is_flag=True, help="Strict JSON on stdout.")
_SHOWN: Final = 20
_OUT: Final = click.Path(file_okay=False, path_type=Path)
_WARNING: Final = (
    "Loading them RUNS whatever code they hold, with your rights. Each is loaded in a process of "
    "its own, with an empty environment and in an empty directory; that is no prison."
)


@click.command()
@click.argument("source", type=click.Path(exists=True, path_type=Path))
@click.argument("out", type=_OUT)
@click.option("--yes", is_flag=True, help="Do not ask before code of the files is run.")
@_JSON
@click.pass_context
def convert(ctx: click.Context, source: Path, out: Path, yes: bool, as_json: bool) -> None:
    """Rewrite .pt files as safetensors and JSON, which every reader here takes in their place.

    SOURCE is a file or a directory, OUT a new directory. Files that hold more than tensors and
    plain values are refused everywhere else; here they are loaded after a question, each in a
    process of its own, AND LOADING THEM RUNS CODE THAT THEY HOLD: only for files whose writer you
    trust. Exit status 1 where a file could not be converted: the others are there.
    """
    try:
        from stagescope_service.dumps.unpickling import convert_files, plan_conversion
    except ImportError as error:
        raise terminal.needs_extra(error, "service") from error
    plan = plan_conversion(source)
    if plan.unsafe and not yes:
        _confirm(plan)
    with terminal.progress("converting", hidden=as_json):
        convert_files(plan, out, run_code=True)
    if as_json:
        failed = {str(path): why for path, why in plan.failed.items()}
        terminal.show_json(
            {"out": str(out), "files": plan.written, "ran_code_of": [*map(str, plan.unsafe)],
             "failed": failed}
        )  # fmt: skip
    else:
        click.echo(f"{_files(plan.written)} in {out}")
        _list("not converted", [why for _, why in sorted(plan.failed.items())])
    ctx.exit(1 if plan.failed else 0)


@click.command()
@click.argument("source", type=click.Path(exists=True, path_type=Path))
@click.argument("out", type=_OUT)
@click.option("--format", "format", type=click.Choice(["pt", "jsonl"]), default="pt",
              show_default=True, help="Of the files that are written.")  # fmt: skip
@click.option("--step", type=int, help="Only this step.")
@click.option(
    "--from", "kind", help="Format of SOURCE, where it is not recognised: own, slime, ..."
)
@_JSON
def export(
    source: Path, out: Path, format: str, step: int | None, kind: str | None, as_json: bool
) -> None:
    """Write a dump in NexRL's layout, for scripts that were made for NexRL's files.

    SOURCE is a directory or file of this project, NexRL, slime, AReaL, NeMo-RL, prime-rl,
    verl or msprobe; OUT a new directory. What NexRL's layout has no place for is listed.
    """
    try:
        from stagescope_service.dumps.discover import open_dump
        from stagescope_service.dumps.nexrl_writer import write_nexrl
    except ImportError as error:
        raise terminal.needs_extra(error, "service") from error
    with terminal.progress("exporting", hidden=as_json):
        written = write_nexrl(open_dump(source, step=step, kind=kind), out, format)
    if as_json:
        terminal.show_json(
            {"out": str(out), "files": written.files, "bytes": written.bytes,
             "left_out": written.left_out}
        )  # fmt: skip
        return
    click.echo(f"{_files(written.files)}, {render.format_bytes(written.bytes)}, in {out}")
    _list("left out", written.left_out)


def _confirm(plan: Conversion) -> None:
    """List the files whose code would run and ask; anything but yes ends the command."""
    click.echo(f"more than tensors and plain values is in {_files(len(plan.unsafe))}:", err=True)
    for path, why in [*plan.unsafe.items()][:_SHOWN]:
        for line in render.wrapped("  ", why or str(path), terminal.width()):
            click.echo(render.printable(line), err=True)
    if len(plan.unsafe) > _SHOWN:
        click.echo(f"  ... and {len(plan.unsafe) - _SHOWN} more", err=True)
    for line in render.wrapped("", _WARNING, terminal.width()):
        click.echo(terminal.style(line, bold=True, err=True), err=True)
    click.confirm("Do you trust whoever wrote them?", abort=True, err=True)


def _list(title: str, lines: list[str]) -> None:
    """Print the first of some messages under a title, wrapped."""
    if not lines:
        return
    click.echo(f"{title}:")
    for text in lines[:_SHOWN]:
        for line in render.wrapped("  ", text, terminal.width()):
            click.echo(render.printable(line))
    if len(lines) > _SHOWN:
        click.echo(f"  ... and {len(lines) - _SHOWN} more (--json has all)")


def _files(count: int) -> str:
    return f"{count} file" + ("" if count == 1 else "s")
