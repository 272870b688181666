"""`stagescope convert` and `stagescope export`: dumps in other file formats."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import click

from stagescope import terminal
from stagescope_wire import render

_JSON: Final = click.option("--json", "as_json", is_flag=True, help="Strict JSON on stdout.")
_SHOWN: Final = 20
_OUT: Final = click.Path(file_okay=False, path_type=Path)


@click.command()
@click.argument("source", type=click.Path(exists=True, path_type=Path))
@click.argument("out", type=_OUT)
@_JSON
@click.pass_context
def convert(ctx: click.Context, source: Path, out: Path, as_json: bool) -> None:
    """Rewrite .pt files as safetensors and JSON, which every reader here accepts in their place.

    SOURCE is a file or a directory, OUT a new directory. A file that holds more than tensors and
    plain values is refused, and listed with the names that it needs: no code of a file ever runs.
    The exit status is 1 if a file could not be converted; the others are written.
    """
    try:
        from stagescope_service.dumps.converting import convert_files
    except ImportError as error:
        raise terminal.needs_extra(error, "service") from error
    with terminal.progress("converting", hidden=as_json):
        done = convert_files(source, out)
    if as_json:
        failed = {str(path): why for path, why in done.failed.items()}
        terminal.show_json({"out": str(out), "files": done.written, "failed": failed})
    else:
        click.echo(f"{_files(done.written)} in {out}")
        _list("not converted", [why for _, why in sorted(done.failed.items())])
    ctx.exit(1 if done.failed else 0)


@click.command()
@click.argument("source", type=click.Path(exists=True, path_type=Path))
@click.argument("out", type=_OUT)
@click.option("--format", "format", type=click.Choice(["pt", "jsonl"]), default="pt",
              show_default=True, help="Format of the new files.")  # fmt: skip
@click.option("--step", type=click.IntRange(min=0), help="Only this step.")
@click.option("--from", "kind", help="Format of SOURCE, if it is not recognised: own, slime, ...")
@_JSON
def export(
    source: Path, out: Path, format: str, step: int | None, kind: str | None, as_json: bool
) -> None:
    """Write a dump in NexRL's layout, for scripts that were made for NexRL's files.

    SOURCE is a directory or file of this project, NexRL, slime, AReaL, NeMo-RL, prime-rl,
    verl or msprobe. OUT is a new directory. Data without a place in NexRL's layout is listed.
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
