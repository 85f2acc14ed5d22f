"""Every command of the documentation runs (stand_in.py says how)."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3.session
import pytest
import yaml

from tests.harness.moto_server import moto

ROOT = Path(__file__).parents[2]
COMMANDS = ("flexfleet", "python", "kubectl", "docker", "kind", "kustomize", "dvc", "make", "mlflow", "pytest")
PAGES = sorted(path for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")] if "```sh" in path.read_text())


def blocks(page: Path) -> list[tuple[str, str]]:
    """(language, text) of what a page says can be run."""
    return re.findall(r"^```(sh|python)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """A server with the files that the cluster's first run leaves."""
    with moto() as endpoint:
        client = boto3.session.Session("k", "s", region_name="us-east-1").client("s3", endpoint_url=endpoint)
        client.create_bucket(Bucket="flexfleet")
        for name in ("model.safetensors", "report.html", "result.json"):
            client.put_object(Bucket="flexfleet", Key=f"runs/first-run/{name}", Body=b"{}")
        yield endpoint


@pytest.fixture
def place(
    tmp_path: Path, kubeflow: tuple[Any, str], s3: str, python: Path, tiny_suite: dict[str, Any]
) -> dict[str, str]:
    """An environment whose PATH finds the stand-ins first; the folder looks like a checkout."""
    for name in ("benchmarks", "components", "tests", "pipelines", "fl_engine", "flexfleet", "params.yaml"):
        (tmp_path / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "k8s", tmp_path / "k8s")  # a command edits it
    path = tmp_path / ".venv" / "bin"
    path.mkdir(parents=True)
    (path / "activate").write_text("")
    for name in (*COMMANDS, "label-nodes"):
        file = path / name if name != "label-nodes" else tmp_path / "k8s/overlays/edge/label-nodes"
        file.write_text(f'#!/bin/sh\nexec {python} -m tests.docs.stand_in {name} "$@"\n')
        file.chmod(0o755)
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(tiny_suite))
    return {
        **os.environ,
        "PATH": f"{path}{os.pathsep}{os.environ['PATH']}",
        "DOCS_PATH": os.environ["PATH"],
        "DOCS_ROOT": str(ROOT),
        "DOCS_LOG": str(tmp_path / "log"),
        "DOCS_KUBEFLOW": kubeflow[1],
        "DOCS_S3": s3,
        "OMP_NUM_THREADS": "1",
    }


BEFORE = {
    "README.md": "flexfleet run --run-id a; flexfleet run --run-id b",
}
"""What a page takes for granted."""
TRACKED = ("publishing.md",)
"""Pages whose commands want MLflow."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_commands_of_a_page_run(page: Path, place: dict[str, str], tmp_path: Path) -> None:
    script = ["set -euo pipefail", BEFORE.get(page.name, "")]
    for language, text in blocks(page):
        if language == "sh":
            script.append(re.sub(r"<[^>]*>", "nvidia", text))
        elif page.name == "publishing.md":
            script.append(f"python - <<'END'\n{text}END")
    env = place | ({"DOCS_TRACKED": "1"} if page.name in TRACKED else {})
    done = subprocess.run(["bash", "-c", "\n".join(script)], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    ran = {json.loads(line)[0] for line in (tmp_path / "log").read_text().splitlines()}
    texts = "\n".join(text for language, text in blocks(page) if language == "sh")
    words = set(re.findall(r"^(?:\w+=\S+ )*(?:\S*/)?([\w-]+)", texts, re.MULTILINE))
    assert ran >= words & {*COMMANDS, "label-nodes"}, "each command of the page was seen by its stand-in"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_the_service_of_an_agent_is_valid_and_shut_in(tmp_path: Path) -> None:
    """It runs what its coordinator signs. systemd judges from 0 to 100, and calls what is above 50 exposed."""
    (unit,) = re.findall(r"^```ini\n(.*?)^```$", (ROOT / "docs/guides/agents.md").read_text(), re.M | re.DOTALL)
    file = tmp_path / "flexfleet-agent.service"
    file.write_text(unit.replace("/opt/flexfleet/bin/flexfleet", "/bin/true"))
    for judged in (["verify"], ["security", "--offline=true", "--threshold=30"]):
        done = subprocess.run(["systemd-analyze", *judged, file], capture_output=True, text=True)
        assert done.returncode == 0, (done.stdout + done.stderr)[-2000:]
