"""docs/backup.md: its backup of a catalogue in use, and its restoration, as it has them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Final

from tests.support.api import Rank, service
from tests.support.measure import payload

from stagescope_service.store.catalogue import Catalogue

PAGE: Final = Path(__file__).parents[2] / "docs/backup.md"


def script(marker: str) -> str:
    """The block of the page that holds `marker`, without the commands of a running service."""
    blocks = re.findall(r"^```sh\n(.*?)^```", PAGE.read_text("utf-8"), re.M | re.S)
    (block,) = (found for found in blocks if marker in found)
    kept = [line for line in block.splitlines() if not line.startswith("stagescope ")]
    return "\n".join(["set -e", *kept])


def run(text: str, data: Path, backup: Path) -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "DATA": str(data), "BACKUP": str(backup), "PATH": path}
    done = subprocess.run(
        ["bash", "-c", text], env=environment, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def steps(catalogue: Path) -> list[int]:
    reader = Catalogue(f"sqlite:///{catalogue}")
    reader.check()
    (attempt,) = reader.attempts()
    return sorted(row["step"] for row in reader.steps(attempt["attempt_id"], limit=10_000))


def test_a_copy_of_a_catalogue_in_use_is_complete_and_is_restored(tmp_path: Path) -> None:
    with service(tmp_path / "home") as live:
        data = live.settings.data_path
        rank = Rank(live, world_size=1)
        for step in range(1, 6):
            rank.stage("actor_compute_log_prob", step, payload())
        stop = threading.Event()
        written = [5]

        def write() -> None:
            while not stop.is_set():
                rank.stage("actor_compute_log_prob", written[-1] + 1, payload())
                written.append(written[-1] + 1)

        writer = threading.Thread(target=write)
        writer.start()
        try:
            known = written[-1]
            run(script("VACUUM INTO"), data, tmp_path)
            during = written[-1]
        finally:
            stop.set()
            writer.join(timeout=60)
    copy = tmp_path / "catalogue.db"
    assert copy.stat().st_mode & 0o077 == 0
    copied = steps(copy)
    assert copied == list(range(1, len(copied) + 1))
    assert known <= len(copied) <= during + 1  # a step is written before it is counted
    assert (data / "catalogue.db").exists()
    run(script("catalogue.db-wal"), data, tmp_path)
    assert steps(data / "catalogue.db") == copied
