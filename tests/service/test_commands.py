from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.command_line import invoke


@pytest.mark.parametrize("command", ["serve", "stop"])
def test_a_wrong_setting_is_named_without_its_value(
    command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("STAGESCOPE_HOME", str(tmp_path))
    monkeypatch.setenv("STAGESCOPE_RING_BYTES", "secret-value")
    result = invoke(command)
    assert result.exit_code == 2
    assert "ring_bytes" in result.stderr.lower()
    assert "secret-value" not in result.output


def test_a_port_that_is_none() -> None:
    result = invoke("serve", "--port", "70000")
    assert result.exit_code == 2
    assert "--port" in result.stderr
