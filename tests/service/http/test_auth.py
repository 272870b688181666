from __future__ import annotations

import logging
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
from pydantic import SecretStr
from tests.support.api import Service, service

from stagescope_service.http.access_tokens import AccessTokens, token_path
from stagescope_service.http.app import make_app
from stagescope_service.http.auth import check_bind
from stagescope_service.settings import Settings
from stagescope_service.views.reading.dependencies import Commands
from stagescope_wire.errors import Forbidden, InvalidInput, StoreError

READS = ("/runs", "/plan", "/captures", "/metrics", "/status", "/openapi.json", "/no-such-route")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


class TestTokens:
    def test_are_made_once_with_mode_0600(self, tmp_path: Path) -> None:
        home = tmp_path / "deep" / "home"
        first = AccessTokens.load(Settings(home=home))
        assert first == AccessTokens.load(Settings(home=home))
        assert first.read != first.operate
        assert len(first.read) >= 40
        assert {mode(token_path(home, grade)) for grade in ("read", "operate")} == {0o600}
        assert mode(home) == 0o700
        assert sorted(path.name for path in home.iterdir()) == ["operate.token", "read.token"]

    def test_in_a_home_that_cannot_be_written_are_refused(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(StoreError, match="Not a directory") as caught:
            AccessTokens.load(Settings(home=tmp_path / "file" / "home"))
        assert "STAGESCOPE_HOME" in caught.value.advice

    def test_that_others_can_read_are_closed_again(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        AccessTokens.load(Settings(home=tmp_path))
        token_path(tmp_path, "read").chmod(0o644)
        tokens = AccessTokens.load(Settings(home=tmp_path))
        assert mode(token_path(tmp_path, "read")) == 0o600
        assert "was readable by others" in caplog.text
        assert tokens.read not in caplog.text

    def test_through_a_link_are_refused(self, tmp_path: Path) -> None:
        target = tmp_path / "elsewhere"
        target.write_text("x" * 40)
        token_path(tmp_path, "operate").symlink_to(target)
        with pytest.raises(Forbidden, match="cannot be read"):
            AccessTokens.load(Settings(home=tmp_path))

    @pytest.mark.parametrize("text", ["", "short", "with spaces in the middle", "ä" * 30])
    def test_that_cannot_be_sent_are_refused(self, tmp_path: Path, text: str) -> None:
        token_path(tmp_path, "read").write_text(text)
        with pytest.raises(InvalidInput, match="read token"):
            AccessTokens.load(Settings(home=tmp_path))

    def test_must_differ(self, tmp_path: Path) -> None:
        same = SecretStr("t" * 40)
        with pytest.raises(InvalidInput, match="are one"):
            AccessTokens.load(Settings(home=tmp_path, read_token=same, operate_token=same))

    def test_of_the_environment_make_no_files(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("STAGESCOPE_READ_TOKEN", "r" * 40)
        monkeypatch.setenv("STAGESCOPE_OPERATE_TOKEN", "o" * 40)
        settings = Settings(home=tmp_path)
        assert AccessTokens.load(settings) == AccessTokens("r" * 40, "o" * 40)
        assert not list(tmp_path.iterdir())
        assert "rrrr" not in repr(settings)

    def test_white_space_around_a_token_of_a_variable_is_none_of_it(self, tmp_path: Path) -> None:
        read, operate = SecretStr(f"{'r' * 40}\n"), SecretStr(" \n")
        tokens = AccessTokens.load(Settings(home=tmp_path, read_token=read, operate_token=operate))
        assert tokens.read == "r" * 40
        assert tokens.operate == token_path(tmp_path, "operate").read_text().strip()

    def test_are_in_no_repr(self) -> None:
        assert "secret" not in repr(AccessTokens("secret-read", "secret-operate"))

    def test_grade(self) -> None:
        tokens = AccessTokens("r" * 40, "o" * 40)
        assert tokens.grade("r" * 40) == "read"
        assert tokens.grade("o" * 40) == "operate"
        for wrong in ("", "r" * 39, "r" * 41, "\udcff", "ö" * 40):
            assert tokens.grade(wrong) is None


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """One service for the questions that change nothing."""
    with service(tmp_path_factory.mktemp("home")) as running:
        yield running


class TestMatrix:
    @pytest.mark.parametrize("path", READS)
    @pytest.mark.parametrize("token", [None, "wrong"])
    def test_everything_else_does(self, shared: Service, path: str, token: str | None) -> None:
        answer = shared.client(token).get(path)
        assert answer.status_code == 401
        assert answer.json()["code"] == "unauthorized"
        assert answer.headers["www-authenticate"].startswith("Bearer")

    def test_other_schemes_do_not_count(self, shared: Service) -> None:
        for scheme in ("Basic", "Token", "", "Bearer,"):
            value = f"{scheme} {shared.tokens.read}".strip()
            answer = shared.client(None, authorization=value).get("/runs")
            assert answer.status_code == 401
        answer = shared.client(None, authorization=f"bearer {shared.tokens.read}").get("/runs")
        assert answer.status_code == 200

    def test_a_token_in_the_url_does_not_count(self, shared: Service) -> None:
        assert (
            shared.client(None).get("/runs", params={"token": shared.tokens.read}).status_code
            == 401
        )

    @pytest.mark.parametrize(
        ("method", "path"),
        [
            ("POST", "/events"),
            ("POST", "/poll"),
            ("POST", "/drain"),
            ("POST", "/captures"),
            ("DELETE", "/captures/x"),
            ("PUT", "/runs"),
        ],
    )
    def test_the_read_token_changes_nothing(self, shared: Service, method: str, path: str) -> None:
        refused = shared.read.request(method, path, content=b"{}")
        assert refused.status_code == 403
        expected = refused.json()["expected"]
        assert f"operate token (by default in {shared.settings.home / 'operate.token'}" in expected
        allowed = shared.operate.request(method, path, content=b"{}")
        assert allowed.status_code in (404, 405, 422)

    def test_without_auth_loopback_may_do_everything(self, tmp_path: Path) -> None:
        with service(tmp_path, auth=False) as open_service:
            assert open_service.read.get("/audit").status_code == 200
            whoami = open_service.read.get("/whoami").json()
            assert (whoami["grade"], whoami["role"]) == ("operate", "admin")
            login = open_service.client(None).post("/login", json={"token": "any"})
            assert (login.status_code, "set-cookie" in login.headers) == (204, False)
            assert not list(tmp_path.glob("*.token"))


class TestHostAndOrigin:
    @pytest.mark.parametrize("host", ["evil.example", "evil.example:87", "localhost.evil.example"])
    def test_a_foreign_name_is_refused(self, shared: Service, host: str) -> None:
        answer = shared.read.get("/runs", headers={"host": host})
        assert answer.status_code == 403
        assert "STAGESCOPE_ALLOWED_HOSTS" in answer.json()["advice"]

    def test_health_is_no_way_round(self, shared: Service) -> None:
        assert (
            shared.client(None).get("/healthz", headers={"host": "evil.example"}).status_code == 403
        )

    @pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1:8700", "[::1]:8700"])
    def test_own_names_and_addresses_are_not(self, shared: Service, host: str) -> None:
        assert shared.read.get("/runs", headers={"host": host}).status_code == 200

    def test_names_of_the_settings_are_not(self, tmp_path: Path) -> None:
        public = "https://scope.example.com/path"
        with service(tmp_path, allowed_hosts=("head.cluster",), public_url=public) as running:
            found = running.read.get("/runs", headers={"host": "scope.example.com"})
            assert found.status_code == 200
            answer = running.read.get("/runs", headers={"host": "Head.Cluster:8700"})
            assert answer.status_code == 200

    def test_the_page_at_the_public_address_is_not_whatever_host_a_proxy_sends(
        self, tmp_path: Path
    ) -> None:
        with service(tmp_path, public_url="https://scope.example.com/path") as running:
            page = {"origin": "https://scope.example.com"}
            client = running.client(None, **page)
            login = client.post("/login", json={"token": running.tokens.operate})
            assert login.status_code == 204
            cookie = login.headers["set-cookie"].partition(";")[0]
            changed = client.post("/drain", json={"run": None}, headers={"cookie": cookie})
            assert changed.status_code == 200
            other = running.operate.get("/runs", headers={"origin": "http://scope.example.com"})
            assert other.status_code == 403

    @pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://127.0.0.1:1"])
    def test_a_page_of_elsewhere_is_refused(self, shared: Service, origin: str) -> None:
        answer = shared.operate.post("/captures", headers={"origin": origin}, json={})
        assert answer.status_code == 403

    def test_its_own_page_is_not(self, shared: Service) -> None:
        assert shared.read.get("/runs", headers={"origin": shared.server.url}).status_code == 200

    def test_an_allowed_page_is_not(self, tmp_path: Path) -> None:
        with service(tmp_path, allowed_origins=("https://board.example",)) as running:
            answer = running.read.get("/runs", headers={"origin": "https://board.example"})
            assert answer.status_code == 200


@pytest.mark.parametrize(
    ("path", "asked", "status"),
    [
        ("/scope", "/scope/runs", 200),
        ("/scope", "/scope/v1/runs", 200),
        ("/scope", "/scope", 307),
        ("/scope", "/scope2/runs", 404),
        ("/a/runs", "/a/runs/v1/runs", 200),
        ("/runs", "/runs", 200),  # the API's own: a proxy must remove it
        ("/runs", "/runs/runs", 404),
        ("/v1", "/v1/v1/runs", 404),
    ],
)
def test_a_proxy_may_leave_its_path(tmp_path: Path, path: str, asked: str, status: int) -> None:
    with service(tmp_path, recorded=False, public_url=f"https://head.example{path}/") as running:
        assert running.read.get(asked).status_code == status
        assert running.read.get("/runs").status_code == 200


class TestBind:
    @pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "::", "head"])
    def test_beyond_loopback_needs_tokens(self, host: str, tmp_path: Path) -> None:
        settings = Settings(home=tmp_path, host=host, auth=False)
        with pytest.raises(Forbidden, match="without tokens"):
            check_bind(settings, None)
        check_bind(settings, AccessTokens("r" * 40, "o" * 40))

    @pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
    def test_loopback_does_not(self, host: str, tmp_path: Path) -> None:
        check_bind(Settings(home=tmp_path, host=host), None)

    def test_is_checked_by_the_app(self, live: Service, tmp_path: Path) -> None:
        with pytest.raises(Forbidden):
            make_app(
                catalogue=live.catalogue,
                commands=cast("Commands", live.engine),
                settings=Settings(home=tmp_path, host="0.0.0.0"),
                tokens=None,
            )


class TestCaller:
    @pytest.mark.parametrize("user", ["a" * 101, "tab\there"])
    def test_must_be_printable(self, live: Service, user: str) -> None:
        answer = live.read.get("/runs", headers={"x-stagescope-user": user})
        assert answer.status_code == 422


def test_tokens_appear_in_no_log(live: Service, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        live.read.get("/runs")
        live.read.get("/nope", params={"token": live.tokens.read})
        live.operate.post("/events", content=b"broken")
    served = [
        record for record in caplog.records if not record.name.startswith(("httpx", "httpcore"))
    ]
    text = "\n".join(record.getMessage() for record in served)
    assert live.tokens.read not in text
    assert live.tokens.operate not in text


def test_a_websocket_finds_nothing(live: Service) -> None:
    headers = {
        "connection": "upgrade",
        "upgrade": "websocket",
        "sec-websocket-key": "dGhlIHNhbXBsZSBub25jZQ==",
        "sec-websocket-version": "13",
    }
    assert live.client(None).get("/runs", headers=headers).status_code == 401


def test_guard_is_the_outermost_check(live: Service) -> None:
    # An error of routing tells nothing to somebody without a token.
    assert live.client(None).get("/runs/%2e%2e/attempts").status_code == 401
    assert "Guard" in repr(live.app.user_middleware[0])
