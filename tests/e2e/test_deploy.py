"""deploy/ and the Containerfile: each checked by what can check it here, and against a real server."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import kubernetes_validate
import pytest
import yaml

from firstlight.base.environment import cache_directory
from firstlight.facts.sources import resolve_model
from support import container
from support.serving import RunningServer, write_chat_model

REPOSITORY = Path(__file__).parents[2]
DEPLOY = REPOSITORY / "deploy"
CONTAINERFILE = REPOSITORY / "Containerfile"
DEADLINE_S = 120.0
_METRIC = re.compile(r"\b(firstlight:[a-z_]+)(\{[^}]*\})?")
_BY = re.compile(r"\bby \(([^)]*)\)")
_OF_PROMETHEUS = {"job", "instance", "le"}  # which it adds itself, or which a histogram has


def instructions() -> list[tuple[str, str]]:
    """The Containerfile as instruction and rest."""
    text = re.sub(r"\\\n", " ", CONTAINERFILE.read_text())
    rows = [row for row in text.splitlines() if row.strip() and not row.startswith("#")]
    return [(row.split(maxsplit=1)[0], row.split(maxsplit=1)[1]) for row in rows]


def copied() -> list[str]:
    """What the first stage takes of the repository."""
    rows = [rest.split() for name, rest in instructions() if name == "COPY" and not rest.startswith("--from")]
    return [source for row in rows for source in row[:-1]]


def setting(wanted: str) -> str:
    return next(rest for name, rest in reversed(instructions()) if name == wanted)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    model = write_chat_model(tmp_path_factory.mktemp("models") / "tiny")
    with RunningServer(model, "--drafter", "ngram") as running:
        for _ in range(2):
            body = {"prompt": "a b a b a b", "max_tokens": 16, "temperature": 0}
            assert httpx.post(f"{running.url}/v1/completions", json=body, timeout=60).is_success
        yield running
        assert running.stop() == 0


@pytest.fixture(scope="module")
def scraped(server: RunningServer) -> dict[str, set[str]]:
    """Every metric of a real scrape, with its labels."""
    found: dict[str, set[str]] = {}
    for row in httpx.get(f"{server.url}/metrics").text.splitlines():
        if match := re.match(r"([a-zA-Z_:]+)(?:\{(.*)\})? ", row):
            found.setdefault(match[1], set()).update(re.findall(r'(\w+)="', match[2] or ""))
    return found


def expressions() -> list[str]:
    board = json.loads((DEPLOY / "grafana-dashboard.json").read_text())
    rules = yaml.safe_load((DEPLOY / "prometheus-rules.yaml").read_text())
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    return [*asked, *(rule["expr"] for group in rules["groups"] for rule in group["rules"])]


@pytest.mark.parametrize("expression", expressions())
def test_what_is_asked_for_is_in_a_real_scrape(expression: str, scraped: dict[str, set[str]]) -> None:
    for name, selector in _METRIC.findall(expression):
        assert name in scraped
        labels = set(re.findall(r'(\w+)=~?"', selector))
        labels |= {one.strip() for by in _BY.findall(expression) for one in by.split(",")}
        assert labels - _OF_PROMETHEUS <= scraped[name]


@pytest.mark.needs("promtool")
def test_rules_and_queries_are_understood(tmp_path: Path) -> None:
    queries = [re.sub(r"\$__rate_interval", "5m", one).replace("$instance", ".*") for one in expressions()]
    rules = [{"record": f"query{number}", "expr": one} for number, one in enumerate(queries)]
    path = tmp_path / "queries.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    for checked in (DEPLOY / "prometheus-rules.yaml", path):
        command = ["promtool", "check", "rules", "--lint=all", "--lint-fatal", str(checked)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.needs("systemd-analyze")
def test_the_unit_is_understood_and_its_command_too(tmp_path: Path) -> None:
    text = (DEPLOY / "firstlight.service").read_text()
    program = "/opt/firstlight/bin/firstlight"
    unit = tmp_path / "firstlight.service"
    unit.write_text(text.replace(program, sys.executable))
    command = ["systemd-analyze", "verify", "--man=no", str(unit)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    (exec_start,) = re.findall(r"^ExecStart=(.*)$", text, re.MULTILINE)
    assert_understood(exec_start.removeprefix(program).split())


def documents() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))


@pytest.mark.parametrize("document", documents(), ids=lambda document: document["kind"])
def test_the_manifest_has_the_schema_of_kubernetes(document: dict[str, Any]) -> None:
    kubernetes_validate.validate(document, "1.31", strict=True)


def test_the_manifest_s_probes_and_command_are_those_of_the_server(server: RunningServer) -> None:
    (deployment,) = (one for one in documents() if one["kind"] == "Deployment")
    pod = deployment["spec"]["template"]["spec"]
    (only,) = pod["containers"]
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert httpx.get(server.url + only[probe]["httpGet"]["path"]).status_code == 200
    assert_understood(only["args"])
    assert {mount["name"] for mount in only["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    user = setting("USER").split(":")[0]
    assert str(pod["securityContext"]["runAsUser"]) == user


def assert_understood(arguments: list[str]) -> None:
    """Flags of ours: the command gets as far as the model, which is not there."""
    flags = [word for word in arguments[1:] if word.startswith("-") and not word.startswith("--api-key-file")]
    command = [sys.executable, "-m", "firstlight", "serve", "/no/such/model", "--port", "0", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert "/no/such/model does not exist" in done.stderr
    assert done.returncode == 3


def test_the_containerfile_takes_what_there_is_and_starts_what_we_are() -> None:
    assert all((REPOSITORY / source).exists() for source in copied())
    assert json.loads(setting("ENTRYPOINT")) == ["firstlight"]
    assert_understood(json.loads(setting("CMD")))
    assert [name for name, _ in instructions()].count("FROM") == 2


@pytest.mark.slow
@pytest.mark.needs("mount namespace")
def test_what_it_copies_becomes_a_package_that_serves_with_its_kernels(tmp_path: Path) -> None:
    """Its steps without its base images: the sources it copies, the wheel, and a stranger's container."""
    source, site = tmp_path / "source", tmp_path / "site"
    source.mkdir()
    for name in copied():
        place = REPOSITORY / name
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
        if place.is_dir():
            shutil.copytree(place, source / name, ignore=ignored)
        else:
            shutil.copy(place, source / name)
    wheel = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path))
    subprocess.run((*wheel, str(source)), check=True, timeout=DEADLINE_S * 3)
    built = str(next(tmp_path.glob("*.whl")))
    install = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site), built)
    subprocess.run(install, check=True, timeout=DEADLINE_S)
    checks = [rest for name, rest in instructions() if name == "RUN" and "library_name" in rest]
    script = re.search(r'-c "(.*)"', checks[0])
    assert script is not None
    variables = {"PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1"}
    done = container.start(tmp_path, [sys.executable, "-c", script[1]], shown=[site], variables=variables)
    assert done.wait(DEADLINE_S) == 0
    resolve_model(None)  # fetched with pip, as `make serve` does
    variables["FIRSTLIGHT_CACHE"] = str(cache_directory())
    command = [
        sys.executable,
        "-m",
        "firstlight",
        *json.loads(setting("CMD")),
        "--host",
        "127.0.0.1",
        "--port",
        "0",
    ]
    folder = tmp_path / "second"
    folder.mkdir()
    served = container.start(
        folder,
        command,
        shown=[site, cache_directory()],
        variables=variables,
        stderr=subprocess.PIPE,
    )
    try:
        assert served.stderr is not None
        said = ""
        for line in served.stderr:
            said += line
            if line.startswith("ready in"):
                break
        assert "ready in" in said, said
        assert "our own kernels" in said
        assert "the one that comes with the package" in said
    finally:
        container.end(served)
        served.stderr.close()
