"""Convert a catalogue of revision 0011 to the tables of 0.1.0, once.

    python -m tests.support.convert_catalogue OLD NEW

OLD and NEW are data directories or database URLs. Stop the service first; OLD stays as it is.
"""

from __future__ import annotations

import json
import sys
import zlib
from pathlib import Path
from typing import Any, Final

import safetensors.numpy
import sqlalchemy as sa

from stagescope_service.statistics import codec
from stagescope_service.store import connect
from stagescope_service.store.copying import batches
from stagescope_service.store.tables import metadata
from stagescope_service.store.tables.compact import KNOWN_TEXTS

RENAMED: Final = {
    "whole": "step_summary", "whole_wall": "summary_wall", "whole_mark": "summary_mark",
}  # fmt: skip


def convert(source: str, target: str) -> None:
    """Copy every row of the catalogue at one URL into a new one at another."""
    reading, writing = connect.reader_engine(source), connect.writer_engine(target)
    with reading.begin() as old, writing.begin() as new:
        if (revision := connect.revision_of(old)) != "0011":
            raise SystemExit(f"{source} is of revision {revision}, not 0011")
        connect.make_tables(new)
        for table in metadata.sorted_tables:
            stored = sa.Table(table.name, sa.MetaData(), autoload_with=old)
            # Columns without types: values go over as they are.
            names = (RENAMED.get(each, each) for each in stored.c.keys())  # noqa: SIM118
            plain = sa.table(table.name, *map(sa.column, names))
            for rows in batches(old, sa.select(stored)):
                found = [_renamed(row) for row in rows]
                if table.name == "texts":
                    found = [row for row in found if row["text_id"] >= len(KNOWN_TEXTS)]
                if found:
                    new.execute(plain.insert(), found)
    reading.dispose()
    writing.dispose()


def _renamed(row: dict[str, Any]) -> dict[str, Any]:
    found = {RENAMED.get(name, name): value for name, value in row.items()}
    for name in ("step_summary", "summary", "slices"):
        if isinstance(found.get(name), bytes | memoryview):
            found[name] = _rewritten(found[name])
    return found


def _rewritten(data: bytes) -> bytes:
    """Return a stored summary whose JSON document is no longer in its header."""
    plain = zlib.decompress(data)
    header = json.loads(plain[8 : 8 + int.from_bytes(plain[:8], "little")])
    document = json.loads(header["__metadata__"]["stagescope"])
    kind = {"whole": "step summary"}.get(document["kind"], document["kind"])
    return codec.save(kind, 1, safetensors.numpy.load(plain), {**document, "kind": kind})


if __name__ == "__main__":
    urls = [each if "://" in each else connect.catalogue_url(Path(each)) for each in sys.argv[1:]]
    convert(*urls)
