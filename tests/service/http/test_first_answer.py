"""What the API imports until its first answers: not what only some questions need."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys
import urllib.request
from pathlib import Path

from stagescope_service.http.app import make_app, prepare
from stagescope_service.http.server import ApiServer
from stagescope_service.report.bundle.keeper import BundleKeeper
from stagescope_service.settings import Settings
from stagescope_service.store.catalogue import Catalogue
from stagescope_service.store.sql import SqlStore

settings = Settings(home=Path(sys.argv[1]), port=0)
store = SqlStore(settings.catalogue_url)
store.open()
app = make_app(
    catalogue=Catalogue(settings.catalogue_url), commands=None, settings=settings, tokens=None
)
server = ApiServer(app, port=0, header_seconds=5.0)
server.start()
for path in ("/healthz", "/runs", "/"):
    assert urllib.request.urlopen(server.url + path).status == 200
prepare(app)
print(*sys.modules)
server.stop()
app.state.deps.close()
store.close()
"""
ON_USE = {
    "jinja2", "matplotlib", "numba", "pandas", "plotly.basedatatypes", "polars", "pyarrow", "ray",
    "rich", "scipy", "torch", "transformers",
}  # fmt: skip


def test_the_first_answers_import_what_they_need(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    loaded = {*done.stdout.split()}
    assert "sqlalchemy" in loaded
    assert loaded & ON_USE == set()
