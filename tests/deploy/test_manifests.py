"""deploy/: manifests are valid, and every command, option, variable, path and port in it exists."""

from __future__ import annotations

import configparser
import difflib
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import click
import jsonschema
import kubernetes_validate
import pytest
import yaml
from fastapi import APIRouter
from fastapi.routing import APIRoute
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.scripts import scripts as ray_scripts

from stagescope import cli
from stagescope_service.commands import serving
from stagescope_service.http import stream
from stagescope_service.http.auth import OPEN_PATHS
from stagescope_service.http.routes import health
from stagescope_service.settings import Settings

ROOT: Final = Path(__file__).parents[2]
DEPLOY: Final = ROOT / "deploy"
KUBERNETES: Final = DEPLOY / "kubernetes"
VERSIONS: Final = ("1.31", "1.37")
"""Of Kubernetes: the oldest and the newest whose schemas the manifests are held against."""
RECORDED: Final = yaml.safe_load((Path(__file__).parent / "kuberay.yaml").read_text("utf-8"))
MANIFESTS: Final = sorted(
    path for path in KUBERNETES.rglob("*.yaml") if path.name != "kustomization.yaml"
)
OVERLAYS: Final = sorted(path.parent for path in KUBERNETES.glob("overlays/*/kustomization.yaml"))
TEXTS: Final = [
    path
    for path in sorted(DEPLOY.rglob("*"))
    if path.is_file() and not path.name.startswith("constraints")
]
COMMAND: Final = re.compile(
    r"(?:^\s*(?:- )?|[`;] ?|\$ |\buntil |/bin/|[A-Z_]+=\S+ )(stagescope|ray) ([a-z][a-z-]*)"
    r"((?: [^`;\n|]*)?)",
    re.M,
)
OF_RAY: Final = {
    "RAY_ADDRESS": "_private/worker.py", "RAY_AUTH_MODE": "exceptions.py",
    "RAY_AUTH_TOKEN": "exceptions.py", "RAY_HEAD_IP": "autoscaler/_private/util.py",
    "RAY_REDIS_ADDRESS": "_private/node.py",
}  # fmt: skip
"""Ray's variables that are used -> where Ray reads or names them."""


def read(path: Path) -> str:
    return path.read_text("utf-8")


def paths(router: APIRouter) -> set[str]:
    return {route.path for route in router.routes if isinstance(route, APIRoute)}


def documents(text: str) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(text) if document]


def pod_templates(document: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Every pod template in a resource, whatever its kind."""
    for key, value in document.items():
        if key == "template" and "spec" in value:
            yield value
        elif isinstance(value, dict):
            yield from pod_templates(value)
        elif isinstance(value, list):
            for item in value:
                yield from pod_templates(item) if isinstance(item, dict) else ()


def validate(document: dict[str, Any], version: str) -> None:
    """Hold a resource against Kubernetes' schemas, KubeRay's against what is recorded of them."""
    kind = document["kind"]
    if document["apiVersion"] != "ray.io/v1":
        kubernetes_validate.validate(document, version, strict=True)
        return
    schema = {**RECORDED, "$ref": f"#/definitions/{kind}"}
    jsonschema.Draft202012Validator(schema).validate(document["spec"])
    for template in pod_templates(document["spec"]):
        pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "a"}}
        kubernetes_validate.validate({**pod, "template": template}, version, strict=True)


def every_document() -> Iterator[dict[str, Any]]:
    for path in MANIFESTS:
        yield from documents(read(path))


def every_container() -> Iterator[dict[str, Any]]:
    for document in every_document():
        for template in pod_templates(document):
            yield from template["spec"]["containers"]


# --- Kubernetes ------------------------------------------------------------------------------
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_manifests_are_valid(path: Path, version: str) -> None:
    found = documents(read(path))
    assert found
    for document in found:
        validate(document, version)


def test_an_invalid_manifest_is_refused() -> None:
    (cluster,) = documents(read(KUBERNETES / "overlays/cluster/raycluster.yaml"))
    (container, *_) = cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"]
    container["volumeMount"] = container.pop("volumeMounts")
    with pytest.raises(kubernetes_validate.ValidationError, match="volumeMount"):
        validate(cluster, VERSIONS[0])
    (cluster,) = documents(read(KUBERNETES / "overlays/cluster/raycluster.yaml"))
    cluster["spec"]["authOptions"]["mode"] = "tokens"
    with pytest.raises(jsonschema.ValidationError, match="tokens"):
        validate(cluster, VERSIONS[0])


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.name)
def test_overlays_name_files_that_exist(overlay: Path) -> None:
    for folder in (overlay, KUBERNETES / "base"):
        (kustomization,) = documents(read(folder / "kustomization.yaml"))
        assert kustomization["kind"] == "Kustomization"
        for name in kustomization["resources"]:
            assert (folder / name).exists(), name
        for generator in kustomization["configMapGenerator"]:
            for name in (*generator.get("files", ()), *generator.get("envs", ())):
                assert (folder / name).is_file(), name


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.name)
def test_overlays_render_to_valid_resources_that_find_each_other(overlay: Path) -> None:
    command = next(
        ([*words, str(overlay)] for words in (["kubectl", "kustomize"], ["kustomize", "build"])
         if shutil.which(words[0])), None,
    )  # fmt: skip
    if command is None:
        pytest.skip("neither kubectl nor kustomize is installed")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    rendered = documents(done.stdout)
    for document in rendered:
        validate(document, VERSIONS[-1])
    assert len({document["metadata"]["namespace"] for document in rendered}) == 1
    made = {(document["kind"], document["metadata"]["name"]) for document in rendered}
    made |= {("Secret", name) for name in secrets_of_the_readme()}
    for template in (found for document in rendered for found in pod_templates(document)):
        assert references(template) <= made
    # What the service is started with, as the settings read it.
    (values,) = (d["data"] for d in rendered if d["metadata"]["name"] == "stagescope-settings")
    settings = settings_of(values)
    namespace = rendered[0]["metadata"]["namespace"]
    assert f"stagescope-api.{namespace}.svc" in settings.allowed_hosts
    assert settings.host == "0.0.0.0"


def references(template: Mapping[str, Any]) -> set[tuple[str, str]]:
    """Kind and name of everything that a pod needs beside itself."""
    spec = template["spec"]
    found: set[tuple[str, str]] = set()
    for container in spec["containers"]:
        found |= {
            ("ConfigMap", each["configMapRef"]["name"]) for each in container.get("envFrom", ())
        }
        for variable in container.get("env", ()):
            if "valueFrom" in variable:
                found.add(("Secret", variable["valueFrom"]["secretKeyRef"]["name"]))
    for volume in spec.get("volumes", ()):
        if "configMap" in volume:
            found.add(("ConfigMap", volume["configMap"]["name"]))
        if "secret" in volume:
            found.add(("Secret", volume["secret"]["secretName"]))
        if "persistentVolumeClaim" in volume:
            found.add(("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]))
    return found


def secrets_of_the_readme() -> dict[str, set[str]]:
    """Secret -> its keys, as the README makes them or asks for them."""
    text = read(DEPLOY / "README.md")
    lines = re.findall(r"create secret (?:generic|tls) (\S+) (.*)", text)
    found = {name: set(re.findall(r"--from-file=(\w+)=", rest)) for name, rest in lines}
    asked = dict(re.findall(r"Secret `([\w-]+)` with the key `(\w+)`", text))
    return found | {name: {key} for name, key in asked.items()}


def test_secrets_are_made_with_the_keys_that_are_read() -> None:
    made = secrets_of_the_readme()
    text = "\n".join(read(path) for path in KUBERNETES.rglob("*.yaml"))
    keys = re.findall(r"secretKeyRef:\s+name: (\S+)\s+key: (\S+)", text)
    assert {"stagescope-tokens", "stagescope-ray-token", "stagescope-postgresql"} <= dict(
        keys
    ).keys()
    for name, key in keys:
        assert key in made[name], f"{name}: {key}"
    assert not re.search(r"^kind: Secret", text, re.M), "no secret is in the repository"


def test_the_job_brings_the_cluster_that_stays() -> None:
    (cluster,) = documents(read(KUBERNETES / "overlays/cluster/raycluster.yaml"))
    (job,) = documents(read(KUBERNETES / "overlays/job/rayjob.yaml"))
    assert job["spec"]["rayClusterSpec"] == cluster["spec"]


def test_probes_ask_for_routes_that_need_no_token() -> None:
    routes = paths(health.router)
    asked = set()
    for container in every_container():
        named = {port["name"]: port["containerPort"] for port in container.get("ports", ())}
        for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
            for action in container.get(kind, {}).values():
                if not isinstance(action, dict):
                    continue
                assert named.get(action["port"], action["port"]) in (8700, 8443, 6379)
                if "path" in action:
                    assert action["path"] in routes & OPEN_PATHS
                    asked.add((container["name"], kind, action["path"]))
    assert asked == {
        ("stagescope", "startupProbe", "/healthz"), ("stagescope", "livenessProbe", "/healthz"),
        ("nginx", "readinessProbe", "/readyz"),
    }  # fmt: skip


def test_services_and_policies_select_pods_that_exist() -> None:
    labels = [
        template["metadata"]["labels"] for document in every_document()
        for template in pod_templates(document)
    ]  # fmt: skip
    for document in every_document():
        spec = document["spec"]
        selector = {"Service": spec.get("selector"), "NetworkPolicy": spec.get("podSelector")}
        chosen = selector.get(document["kind"])
        if chosen is None:
            continue
        chosen = {k: v for k, v in chosen.get("matchLabels", chosen).items()
                  if not k.startswith("ray.io/")}  # fmt: skip
        assert any(chosen.items() <= each.items() for each in labels), document["metadata"]


def test_no_service_gives_pods_a_variable_that_is_a_setting() -> None:
    settings = {f"STAGESCOPE_{name.upper()}" for name in Settings.model_fields}
    for document in every_document():
        if document["kind"] == "Service":
            prefix = document["metadata"]["name"].upper().replace("-", "_")
            assert not {f"{prefix}_PORT", f"{prefix}_SERVICE_HOST"} & settings


def test_ray_is_the_version_of_the_constraints() -> None:
    version = re.search(r"^ray==(\S+)", read(DEPLOY / "constraints.txt"), re.M)
    assert version is not None
    (cluster,) = documents(read(KUBERNETES / "overlays/cluster/raycluster.yaml"))
    assert cluster["spec"]["rayVersion"] == version[1]
    assert f"BASE=rayproject/ray:{version[1]}-py311-cpu" in read(DEPLOY / "Dockerfile")


# --- the others ------------------------------------------------------------------------------
def settings_of(values: Mapping[str, str]) -> Settings:
    prefix = "STAGESCOPE_"
    assert all(name.startswith(prefix) for name in values)
    return Settings(**{name.removeprefix(prefix).lower(): value for name, value in values.items()})  # type: ignore[arg-type]


def test_the_proxy_lets_through_what_the_service_takes() -> None:
    here, there = read(DEPLOY / "nginx.conf"), read(KUBERNETES / "base/nginx.conf")
    settings = Settings()
    assert f"client_max_body_size {settings.max_body_bytes >> 20}m;" in here
    assert f"server 127.0.0.1:{settings.port};" in here
    (longest,) = (
        field.le for field in Settings.model_fields["poll_seconds"].metadata if hasattr(field, "le")
    )
    times = {int(each) for each in re.findall(r"proxy_read_timeout (\d+)s;", here)}
    assert min(times) > max(longest, stream.HEARTBEAT_SECONDS)
    unbuffered = re.search(r"location = /stream \{[^}]*proxy_buffering off;", here)
    assert unbuffered
    assert "/stream" in paths(stream.router)
    changed = [
        line for line in difflib.ndiff(here.splitlines(), there.splitlines())
        if line[0] in "+-" and not line[1:].strip().startswith("#")
    ]  # fmt: skip
    assert [line.split() for line in changed] == [
        ["-", "server", "127.0.0.1:8700;"], ["+", "server", "stagescope-api:8700;"],
    ]  # fmt: skip


def test_nginx_accepts_its_configuration(tmp_path: Path) -> None:
    nginx, openssl = shutil.which("nginx", path="/usr/sbin:/usr/bin"), shutil.which("openssl")
    if nginx is None or openssl is None:
        pytest.skip("nginx or openssl is not installed")
    subprocess.run(
        [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=a", "-days", "1",
         "-keyout", tmp_path / "tls.key", "-out", tmp_path / "tls.crt"],
        check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    text = read(DEPLOY / "nginx.conf").replace("/etc/stagescope/tls", str(tmp_path))
    (tmp_path / "nginx.conf").write_text(text.replace("/tmp/stagescope-nginx", f"{tmp_path}/nginx"))
    done = subprocess.run(
        [nginx, "-t", "-c", tmp_path / "nginx.conf"], capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_ray_up_takes_the_cluster_file() -> None:
    config = prepare_config(yaml.safe_load(read(DEPLOY / "ray-cluster.yaml")))
    validate_config(config)
    with pytest.raises(jsonschema.ValidationError):
        validate_config({**config, "head_start_commands": []})


def test_units_name_each_other_and_absolute_commands() -> None:
    units = sorted((DEPLOY / "systemd").glob("*.service"))
    names = {unit.name for unit in units} | {"network-online.target", "multi-user.target"}
    for unit in units:
        parser = configparser.ConfigParser(strict=False, interpolation=None)
        parser.optionxform = str  # type: ignore[assignment, method-assign]
        parser.read(unit, "utf-8")
        assert parser.sections() == ["Unit", "Service", "Install"]
        for key, value in (*parser["Unit"].items(), *parser["Install"].items()):
            if key in ("After", "BindsTo", "Wants", "WantedBy"):
                assert value in names, f"{unit.name}: {value}"
        for key, value in parser["Service"].items():
            assert not key.startswith("Exec") or value.startswith("/")


def test_the_image_is_made_of_files_and_extras_that_exist() -> None:
    text = read(DEPLOY / "Dockerfile")
    copied = [name for line in re.findall(r"^COPY (.*) \S+$", text, re.M) for name in line.split()]
    ignored = read(DEPLOY / "Dockerfile.dockerignore").splitlines()
    for name in copied:
        assert (ROOT / name).exists()
        assert f"!{name}" in ignored
    pyproject = read(ROOT / "pyproject.toml")
    extras = {each for found in re.findall(r"EXTRAS=([\w,]+)", text) for each in found.split(",")}
    extras |= {
        each for found in re.findall(r"(?:'\.|stagescope)\[([\w,]+)\]", "\n".join(map(read, TEXTS)))
        for each in found.split(",")
    }  # fmt: skip
    assert {"service", "workers", "postgresql", "npu"} <= extras
    for extra in extras:
        assert re.search(rf"^{extra} = \[", pyproject, re.M), extra


def test_prometheus_scrapes_a_route_and_names_its_rules() -> None:
    config = yaml.safe_load(read(DEPLOY / "prometheus.yaml"))
    (job,) = config["scrape_configs"]
    assert job["metrics_path"] in paths(health.router)
    for name in config["rule_files"]:
        assert (DEPLOY / name).is_file()


# --- what is written exists --------------------------------------------------------------------
def commands() -> list[tuple[str, str, str, str]]:
    """File, program, command and arguments of everything that deploy/ says to run."""
    found = []
    for path in TEXTS:
        # One line for each command: YAML folds them, the shell continues them.
        text = re.sub(r"\\?\n\s+(?=--)", " ", read(path))
        found += [(path.name, m[1], m[2], m[3]) for m in COMMAND.finditer(text)]
    return found


def test_commands_and_their_options_exist() -> None:
    programs = {"stagescope": cli.main, "ray": ray_scripts.cli}
    seen = set()
    for file, program, name, arguments in commands():
        command = programs[program].get_command(click.Context(programs[program]), name)
        assert command is not None, f"{file}: {program} {name}"
        options = {each for option in command.params for each in option.opts}
        for option in re.findall(r"(?<= )--[a-z-]+", arguments):
            assert option in options | {"--help"}, f"{file}: {program} {name} {option}"
        seen.add((file, program, name))
    assert {
        ("stagescope.service", "stagescope", "serve"), ("stagescope.service", "stagescope", "stop"),
        ("ray-head.service", "ray", "start"), ("ray-cluster.yaml", "stagescope", "serve"),
        ("raycluster.yaml", "stagescope", "serve"), ("raycluster.yaml", "stagescope", "stop"),
        ("README.md", "stagescope", "import"), ("README.md", "ray", "up"),
    } <= seen  # fmt: skip


def test_variables_exist() -> None:
    ours = {f"STAGESCOPE_{name.upper()}" for name in Settings.model_fields}
    ours |= set(serving._OTHER_VARIABLES)
    ray = Path(ray_scripts.__file__).parents[1]
    used = set()
    for path in TEXTS:
        used |= set(re.findall(r"\b(?:STAGESCOPE|RAY)_[A-Z_]+\b", read(path)))
    assert {name for name in used if name.startswith("STAGESCOPE_")} <= ours
    assert {name for name in used if name.startswith("RAY_")} == OF_RAY.keys()
    for name, file in OF_RAY.items():
        assert name in read(ray / file), name


def test_the_readme_names_files_and_figures_that_are() -> None:
    text = read(DEPLOY / "README.md")
    for target in re.findall(r"\]\(([^)#\s]+)", text):
        assert "://" in target or (DEPLOY / target).exists(), target
    for name in re.findall(r"deploy/([\w./*-]+)", text):
        assert list(DEPLOY.glob(name.rstrip("/"))), name
    headings = {re.sub(r"[^\w -]", "", h).lower().replace(" ", "-")
                for h in re.findall(r"^## (.*)", text, re.M)}  # fmt: skip
    assert set(re.findall(r"\]\(#([\w-]+)\)", text)) <= headings
    settings = Settings()
    for amount, name in re.findall(r"\| (?:at most )?(\d+) GiB \| `STAGESCOPE_(\w+)`", text):
        assert getattr(settings, name.lower()) == int(amount) << 30, name
    assert settings.max_bodies * settings.max_body_bytes == 4 * 256 << 20
    assert settings.reserve_bytes == 512 << 20
    assert settings.keep_row_steps == 20_000
    assert f"{settings.port} the API" in text
