"""`stagescope collectives DIR`: which collective hangs, from files of a flight recorder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from stagescope import terminal
from stagescope.cli.common import main
from stagescope_wire import render
from stagescope_wire.collectives.blocked import Member, blocked, is_recording
from stagescope_wire.collectives.files import RecordedFiles, read_directory
from stagescope_wire.collectives.rows import OFF_ADVICE, BlockedCollective, RanksAt, advice_of


@main.command()
@click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Strict JSON on stdout.")
@click.pass_context
def collectives(ctx: click.Context, directory: Path, as_json: bool) -> None:
    """Which collective hangs, from files of torch.distributed's flight recorder.

    DIRECTORY holds one file a rank, of NCCL (nccl_trace_rank_0), of HCCL (hccl_trace_rank_0) or of
    `torch._C._distributed_c10d._dump_fr_trace_json()`. No code of a file ever runs, and no service
    is needed. The exit status is 1 if a file could not be read; the others are.
    """
    files = read_directory(directory)
    members = [Member(rank, record) for rank, record in files.ranks.items()]
    rows = blocked(members)
    if as_json:
        terminal.show_json(
            {
                "ranks": [*files.ranks],
                "collectives": [row.to_json() for row in rows],
                "problems": files.problems,
            }
        )
    else:
        for line in _lines(files, rows, is_recording(members), terminal.width()):
            click.echo(render.printable(line))
    ctx.exit(1 if files.problems else 0)


def _lines(
    files: RecordedFiles, rows: Sequence[BlockedCollective], recording: bool, width: int
) -> Iterator[str]:
    read = render.counted(len(files.ranks), "rank")
    if not rows:
        why = (
            "no rank waits in a collective"
            if recording
            else f"no collective is recorded. {OFF_ADVICE}"
        )
        yield from render.wrapped("", f"{read} read: {why}", width)
    for row in rows:
        yield from render.wrapped("", row.message, width)
        for at, what in [
            *((at, "waiting") for at in row.waiting),
            *((at, "missing") for at in row.missing),
        ]:
            if at.place:
                yield from render.wrapped("   ", f"{_ranks(at)} ({what}): {at.place}", width)
    if rows:
        yield from render.wrapped("-> ", advice_of(rows[0]), width)
    if files.problems:
        yield "not read:"
        for path, why in files.problems.items():
            yield from render.wrapped("  ", f"{path}: {why}", width)


def _ranks(at: RanksAt) -> str:
    return render.ranges_text("rank", at.ranks)
