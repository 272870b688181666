from __future__ import annotations

import subprocess
import sys

import pytest

import stagescope
from stagescope_wire import errors

HEAVY = ("pandas", "polars", "pyarrow", "narwhals", "ray", "torch", "fastapi", "pydantic", "numba")
OTHERS = ("stagescope_service", "stagescope_workers")


def loaded_by(program: str) -> set[str]:
    program += "\nimport sys; print(*{name.partition('.')[0] for name in sys.modules})"
    output = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    return set(output.split())


def test_importing_the_package_is_light() -> None:
    loaded = loaded_by("import stagescope, stagescope_wire.schema, stagescope_wire.captures")
    assert loaded.isdisjoint({*HEAVY, *OTHERS, "httpx", "click", "numpy"})


def test_attaching_and_the_command_line_load_no_heavy_library() -> None:
    loaded = loaded_by("import stagescope.cli, stagescope.session; stagescope.attach")
    assert "httpx" in loaded
    assert loaded.isdisjoint({*HEAVY, *OTHERS, "numpy", "rich"})


def test_help_with_the_services_commands_stays_light() -> None:
    program = (
        "from click.testing import CliRunner\nfrom stagescope import cli\n"
        "result = CliRunner().invoke(cli.main, ['--help']); assert 'serve' in result.output"
    )
    assert loaded_by(program).isdisjoint(HEAVY)


def test_exports_exist() -> None:
    assert set(dir(stagescope)) == {*stagescope.__all__, "__version__"}
    assert set(errors.__all__) <= set(stagescope.__all__)
    for name in stagescope.__all__:
        assert getattr(stagescope, name).__name__ == name
    with pytest.raises(AttributeError, match="nothing"):
        stagescope.nothing  # noqa: B018
