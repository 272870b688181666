"""The settings of the service and their defaults; each may be set as `STAGESCOPE_<NAME>`.

Sizes are bytes, times are seconds. Captures and triggers change while the service runs and are no
settings.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

GIB = 1 << 30
MIB = 1 << 20
_ADDRESS = re.compile(
    r"(?=.{1,500}$)https?://([\w.-]+|\[[0-9A-Fa-f:]+\])(:\d+)?(/[\w.~%/-]*)?", re.ASCII
)
_RAYS_OWN = frozenset({"CPU", "GPU", "memory", "object_store_memory"})
_OWN_HEADERS = frozenset({"authorization", "cookie", "host", "origin", "x-stagescope-user"})


class Settings(BaseSettings):
    """The configuration of one service, read once at its start.

    In the environment, lists are paths joined by `:` (`allowed_roots`) or names joined
    by `,` (`allowed_hosts`, `allowed_origins`, `trusted_proxies`, `webhook_hosts`).

    Usage:
        >>> Settings(data_dir="/data/stagescope", port=0)   # everything else by default
        >>> Settings()                                      # STAGESCOPE_DATA_DIR and so on
    """

    model_config = SettingsConfigDict(env_prefix="STAGESCOPE_", extra="forbid", frozen=True)

    home: Path = Field(
        default=Path("~/.stagescope"),
        description="Directory of the tokens and of service.json (made with mode 0700).",
    )
    data_dir: Path | None = Field(
        default=None,
        description="Directory of the catalogue, the ring and the kept files; default: the folder "
        "data in STAGESCOPE_HOME.",
    )
    database_url: str | None = Field(
        default=None,
        description="SQLAlchemy URL of the catalogue; default SQLite at data_dir/catalogue.db.",
    )

    database_schema: str | None = Field(
        default=None,
        pattern=r"^[a-z_][a-z0-9_]{0,62}$",  # needs no quotes
        description="Schema of a PostgreSQL catalogue, made if missing: one for each service that "
        "shares a database.",
    )

    host: str = Field(default="127.0.0.1", description="Address that the API binds.")
    port: int = Field(default=8700, ge=0, le=65535, description="Port of the API; 0 = any free.")
    auth: bool = Field(
        default=True,
        description="Ask for bearer tokens. False is refused for a bind beyond loopback.",
    )
    read_token: SecretStr | None = Field(
        default=None,
        description="Token to read; default: that of the file read.token in STAGESCOPE_HOME.",
    )
    operate_token: SecretStr | None = Field(
        default=None,
        description="Token to operate; default: that of the file operate.token in STAGESCOPE_HOME.",
    )
    allowed_hosts: Annotated[tuple[str, ...], NoDecode] = Field(
        default=(),
        description="Names accepted in the Host header beside localhost, this host and addresses.",
    )
    allowed_origins: Annotated[tuple[str, ...], NoDecode] = Field(
        default=(), description="Web origins accepted beside the API's own."
    )
    allowed_roots: Annotated[tuple[Path, ...], NoDecode] = Field(
        default=(),
        description="Directories in which a capture's data_dir and config_path may lie, beside "
        "the service's data_dir.",
    )

    trusted_proxy_header: str | None = Field(
        default=None,
        description="Header in which a reverse proxy names the user who logged in, such as "
        "X-Forwarded-Email. Default: no header is trusted. The proxy must remove this header from "
        "what browsers send.",
    )
    trusted_proxies: Annotated[tuple[str, ...], NoDecode] = Field(
        default=(),
        description="Addresses or networks of proxies whose header is trusted; default: loopback.",
    )
    trusted_proxy_role: Literal["none", "read", "operate"] = Field(
        default="read",
        description="Role of people that the proxy names and `stagescope token` does not.",
    )

    public_url: str | None = Field(
        default=None,
        description="Address at which people open the page, such as https://HOST/scope/ behind a "
        "proxy. Links in the messages of webhooks lead there. Its name is accepted in the Host "
        "header, its pages may ask, and its path may stand in requests. Default: the API's own.",
    )
    webhook_hosts: Annotated[tuple[str, ...], NoDecode] = Field(
        default=(),
        description="The hosts that rules' webhooks may call: rules with others are refused. "
        "Default: any.",
    )

    max_body_bytes: int = Field(
        default=256 * MIB, ge=1024, description="Largest body of a request (413 beyond)."
    )
    max_json_bytes: int = Field(
        default=16 * MIB, ge=1024, description="Largest JSON in a request (413 beyond)."
    )
    max_events: int = Field(default=10_000, ge=1, description="Most events of one batch.")
    header_seconds: float = Field(
        default=10.0, gt=0, description="Longest that the head of a request may take to arrive."
    )
    body_seconds: float = Field(
        default=10.0,
        gt=0,
        description="Window of a request's body: in each window it must bring "
        "body_rate bytes a second on average.",
    )
    body_rate: float = Field(
        default=16384.0, ge=0, description="Least bytes per second of a request's body."
    )
    max_bodies: int = Field(
        default=4,
        ge=1,
        description="Batches of events carried out at one time; others wait. As many of the "
        "largest size are held in memory.",
    )
    page_size: int = Field(
        default=50, ge=1, description="Rows of a list where the request names no limit."
    )
    max_page_size: int = Field(default=1000, ge=1, description="Most rows of a page.")
    cache_steps: int = Field(
        default=64, ge=0, description="Closed steps whose decoded summary is kept in memory."
    )
    prometheus_runs: int = Field(
        default=20, ge=0, description="Newest runs that /metrics includes."
    )

    poll_seconds: float = Field(
        default=20.0, gt=0, le=60, description="Longest wait of a poll; it renews the lease."
    )
    lease_seconds: float = Field(
        default=45.0, gt=0, description="A process that has not polled for so long is gone."
    )

    service_resource: str = Field(
        default="node:__internal_head__",
        min_length=1,
        description="Ray resource of the nodes on which coordinator and API may run; default: the "
        "head node's. Where several nodes have it, the catalogue is to be in PostgreSQL.",
    )
    relay_ranks: int = Field(
        default=512,
        ge=0,
        description="From so many live ranks on they call through a relay on their node.",
    )

    stuck_seconds: float = Field(
        default=30.0, gt=0, description="A rank that is quiet for less is never stuck."
    )
    stuck_factor: float = Field(
        default=3.0,
        ge=1,
        description="A rank is stuck beyond so many times what its stage usually takes.",
    )

    ring_bytes: int = Field(
        default=2 * GIB, ge=0, description="Disk for the last steps' tensors, on each node."
    )
    ingestor_bytes: int = Field(
        default=4 * GIB, ge=64 * MIB, description="Memory that one ingestor may use."
    )
    triggers: Path | None = Field(
        default=None,
        description="YAML file of rules. They stay active until PUT /triggers sets others, and are "
        "set again when the file changes. Default: the rules that ship.",
    )
    keep: Path | None = Field(
        default=None,
        description="YAML file that says what to keep (stagescope_wire.keep): the fields of one "
        "configuration for every run, or runs: {pattern: fields}. Read at the start.",
    )
    kept_bytes: int = Field(
        default=20 * GIB, ge=0, description="Disk for kept files, on each node; 0 keeps nothing."
    )
    kept_days: float | None = Field(
        default=None, gt=0, description="Days after which kept files go; default: never."
    )
    kept_steps: int | None = Field(
        default=None,
        ge=1,
        description="Newest steps of an attempt whose kept files stay; default: all.",
    )
    reserve_bytes: int = Field(
        default=512 * MIB,
        ge=0,
        description="Disk that kept files and the ring leave free for others.",
    )
    bundle_bytes: int = Field(
        default=4 * GIB,
        ge=0,
        description="Disk for the bundles that are made of attempts which die; one takes at most "
        "a quarter, the oldest go. 0 makes none.",
    )
    tokenizer: Path | None = Field(
        default=None,
        description="A tokenizer.json, or a directory that holds one. It decodes the samples of "
        "runs that name no tokenizer.",
    )
    keep_steps: int = Field(
        default=2000,
        ge=1,
        description="Newest steps of an attempt that keep the summary of each part; older ones "
        "keep their summary, with its rounds, ranks and worst tokens.",
    )

    keep_row_steps: int = Field(
        default=20_000,
        ge=100,
        description="Newest steps of a run that keep their rows (stages, scalars, payloads, "
        "samples, weight checksums); older ones keep their summary, rounds and findings. Pinned "
        "steps keep everything.",
    )

    weight_names: Annotated[tuple[tuple[str, str], ...], NoDecode] = Field(
        default=(),
        description="Rules `pattern -> replacement` (regular expressions, joined by `;`). They "
        "make the weight names of trainer and rollout equal.",
    )

    @field_validator("home", mode="after")
    @classmethod
    def _absolute(cls, value: Path) -> Path:
        return value.expanduser().absolute()

    @field_validator("data_dir", "triggers", "keep", "tokenizer", mode="after")
    @classmethod
    def _absolute_or_none(cls, value: Path | None) -> Path | None:
        return None if value is None else value.expanduser().absolute()

    @field_validator("service_resource", mode="after")
    @classmethod
    def _check_resource(cls, value: str) -> str:
        if value in _RAYS_OWN:
            raise ValueError(f"a resource that nodes are given for this, not Ray's own {value}")
        return value

    @field_validator("allowed_roots", mode="before")
    @classmethod
    def _split_paths(cls, value: str | Iterable[str | Path]) -> tuple[Path, ...]:
        if isinstance(value, str):
            value = [part for part in value.split(os.pathsep) if part]
        return tuple(Path(part).expanduser().absolute() for part in value)

    @field_validator(
        "allowed_hosts", "allowed_origins", "webhook_hosts", "trusted_proxies", mode="before"
    )
    @classmethod
    def _split_names(cls, value: str | Iterable[str]) -> tuple[str, ...]:
        if isinstance(value, str):
            value = [part.strip() for part in value.split(",") if part.strip()]
        return tuple(value)

    @field_validator("trusted_proxies", mode="after")
    @classmethod
    def _check_networks(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(str(ipaddress.ip_network(each, strict=False)) for each in value)

    @field_validator("trusted_proxy_header", mode="after")
    @classmethod
    def _check_header(cls, value: str | None) -> str | None:
        if not value:
            return None
        if not re.fullmatch(r"[A-Za-z0-9-]{1,100}", value) or value.lower() in _OWN_HEADERS:
            raise ValueError("a header of the proxy's own, such as X-Forwarded-Email")
        return value

    @field_validator("webhook_hosts", mode="after")
    @classmethod
    def _check_names(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            if not re.fullmatch(r"[\w.-]+|[0-9A-Fa-f:]+", name, re.ASCII):
                raise ValueError(f"{name!r} is no host's name, without scheme, port and path")
        return tuple(name.lower() for name in value)

    @field_validator("public_url", mode="after")
    @classmethod
    def _check_public_url(cls, value: str | None) -> str | None:
        # Its characters need no escaping in any message.
        if value and not _ADDRESS.fullmatch(value):
            raise ValueError("an address such as https://stagescope.example.com, without a query")
        return value.rstrip("/") if value else None

    @field_validator("weight_names", mode="before")
    @classmethod
    def _split_rules(cls, value: str | Iterable[Iterable[str]]) -> tuple[tuple[str, ...], ...]:
        if not isinstance(value, str):
            return tuple(tuple(rule) for rule in value)
        rules = [rule.partition("->") for rule in value.split(";") if rule.strip()]
        return tuple((pattern.strip(), replacement.strip()) for pattern, _, replacement in rules)

    @field_validator("weight_names", mode="after")
    @classmethod
    def _check_patterns(cls, value: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
        for pattern, replacement in value:
            try:
                re.sub(pattern, replacement, "")
            except (re.error, IndexError) as error:
                raise ValueError(f"{pattern!r} -> {replacement!r}: {error}") from error
            if not pattern:
                raise ValueError("a rule is `pattern -> replacement`")
        return value

    @model_validator(mode="after")
    def _check_schema(self) -> Settings:
        url = self.database_url or ""
        if self.database_schema is not None and (
            not url.startswith("postgresql") or "options=" in url
        ):
            raise ValueError(
                f"database_schema {self.database_schema!r} needs a database_url of PostgreSQL "
                "without options"
            )
        return self

    @property
    def data_path(self) -> Path:
        """The data directory, absolute."""
        return self.data_dir or self.home / "data"

    @property
    def proxy_networks(self) -> tuple[str, ...]:
        """The networks that may send the proxy's header."""
        return self.trusted_proxies or ("127.0.0.0/8", "::1/128")

    @property
    def catalogue_url(self) -> str:
        """The catalogue's SQLAlchemy URL."""
        url = self.database_url or f"sqlite:///{self.data_path / 'catalogue.db'}"
        if self.database_schema is None:
            return url
        return f"{url}{'&' if '?' in url else '?'}options=-csearch_path%3D{self.database_schema}"

    @property
    def roots(self) -> tuple[Path, ...]:
        """The directories in which a capture may read and write, the data directory first."""
        return (self.data_path, *self.allowed_roots)
