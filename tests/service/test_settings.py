from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from stagescope_service.settings import Settings


def test_defaults(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("STAGESCOPE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    settings = Settings()
    assert settings.home == tmp_path / ".stagescope"
    assert settings.data_path == settings.home / "data"
    assert settings.catalogue_url == f"sqlite:///{settings.data_path}/catalogue.db"
    assert (settings.host, settings.port) == ("127.0.0.1", 8700)
    assert settings.roots == (settings.data_path,)
    assert settings.auth


def test_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in {
        "HOME": str(tmp_path / "home"),
        "DATA_DIR": str(tmp_path / "data"),
        "PORT": "0",
        "ALLOWED_ROOTS": f"{tmp_path / 'a'}:{tmp_path / 'b'}",
        "ALLOWED_HOSTS": "head, head.cluster",
        "RING_BYTES": "1024",
        "URL": "http://elsewhere:1",  # the client's, not a setting
        "ATTEMPT": "a7",
    }.items():
        monkeypatch.setenv(f"STAGESCOPE_{name}", value)
    settings = Settings()
    assert settings.home == tmp_path / "home"
    assert settings.roots == (tmp_path / "data", tmp_path / "a", tmp_path / "b")
    assert settings.allowed_hosts == ("head", "head.cluster")
    assert (settings.port, settings.ring_bytes) == (0, 1024)


def test_survive_the_way_to_an_actor(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path, allowed_roots=(tmp_path,), allowed_hosts=("a", "b"))
    assert Settings(**settings.model_dump(mode="json", exclude_none=True)) == settings


@pytest.mark.parametrize(
    "wrong", [{"port": 70_000}, {"surprise": 1}, {"page_size": 0}, {"lease_seconds": 0}]
)
def test_what_cannot_be_is_refused(wrong: dict[str, int], tmp_path: Path) -> None:
    with pytest.raises(ValidationError):
        Settings(home=tmp_path, **wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("own", ["CPU", "memory"])
def test_a_resource_of_rays_own_chooses_no_node(own: str, tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match=f"not Ray's own {own}"):
        Settings(home=tmp_path, service_resource=own)


def test_addresses_are_checked(tmp_path: Path) -> None:
    hosts = "hooks.slack.com, OAPI.dingtalk.com,::1"
    found = Settings(home=tmp_path, webhook_hosts=hosts, public_url="https://head:8443/scope/")  # type: ignore[arg-type]
    assert found.webhook_hosts == ("hooks.slack.com", "oapi.dingtalk.com", "::1")
    assert found.public_url == "https://head:8443/scope"
    assert Settings(home=tmp_path, public_url="", webhook_hosts="").public_url is None  # type: ignore[arg-type]
    for wrong in ("http://hooks.slack.com", "host:80", "*.slack.com", "a/b"):
        with pytest.raises(ValidationError, match="no host's name"):
            Settings(home=tmp_path, webhook_hosts=(wrong,))
    for wrong in ("head:8700", "ftp://head", "http://user@head", "http://head/#/", "http://h/(x)",
                  "http://h/?q", "http://h|x", "http://h" + "x" * 500, "http://h\n"):  # fmt: skip
        with pytest.raises(ValidationError, match="an address such as"):
            Settings(home=tmp_path, public_url=wrong)


def test_every_setting_is_described() -> None:
    for name, field in Settings.model_fields.items():
        assert field.description, name


def test_are_not_changed_once_read(tmp_path: Path) -> None:
    with pytest.raises(ValidationError):
        Settings(home=tmp_path).port = 1


def test_rules_for_the_names_of_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAGESCOPE_WEIGHT_NAMES", r"^model\. -> ; _proj$ -> _projection")
    settings = Settings()
    assert settings.weight_names == ((r"^model\.", ""), ("_proj$", "_projection"))
    # As it travels to the coordinator.
    assert Settings(**settings.model_dump(mode="json")).weight_names == settings.weight_names


@pytest.mark.parametrize("rule", ["( -> x", r"a -> \7", " -> x"])
def test_rules_that_cannot_be_applied(monkeypatch: pytest.MonkeyPatch, rule: str) -> None:
    monkeypatch.setenv("STAGESCOPE_WEIGHT_NAMES", rule)
    with pytest.raises(ValidationError):
        Settings()
