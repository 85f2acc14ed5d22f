"""Code blocks and tables of the documentation are rendered, and the Kubeflow guide names what exists."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from runpy import run_path
from typing import Any

import pytest
import yaml

import flexfleet
from flexfleet.kubeflow.retarget import documents, names, shipped

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
GUIDE = ROOT / "docs" / "guides" / "kubeflow.md"


def test_rendered_pages_show_no_fence_or_table_as_text() -> None:
    markdown = pytest.importorskip("markdown", reason="the site needs mkdocs: pip install -e '.[docs]'")
    pytest.importorskip("pymdownx")
    extensions = ["admonition", "tables", "pymdownx.highlight", "pymdownx.superfences"]
    for page in PAGES:
        rendered = markdown.markdown(page.read_text(), extensions=extensions)
        text = re.sub(r"<(pre|code)\b.*?</\1>", "", rendered, flags=re.DOTALL)
        assert re.findall(r".*(?:```|\|-{3}).*", text) == [], page


def test_make_docs_rejects_broken_links_and_anchors(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="the site needs mkdocs: pip install -e '.[docs]'")
    (arguments,) = re.findall(r"mkdocs (build.*)", (ROOT / "Makefile").read_text())
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/index.md").write_text("[a](missing.md) [b](#missing) [c](/missing) [d](missing/)")
    changed = {"INHERIT": str(ROOT / "mkdocs.yml"), "docs_dir": "docs", "nav": ["index.md"], "hooks": [], "plugins": []}
    (tmp_path / "mkdocs.yml").write_text(yaml.safe_dump(changed))
    command = [sys.executable, "-m", "mkdocs", *arguments.split()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and "Aborted with 4 warnings in strict mode" in done.stdout + done.stderr


def test_drawing_is_part_of_its_page() -> None:
    insert = run_path(str(ROOT / "docs" / "hooks.py"))["on_page_content"]
    assert "<img" not in insert('<p><img alt="x" src="../drawings/idea.svg" /></p>'), "an image ignores dark mode"


def test_reference_pages_name_objects_that_exist() -> None:
    found = [each for page in PAGES for each in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)]
    assert found
    for name in found:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            module, _, attribute = name.rpartition(".")
            assert hasattr(importlib.import_module(module), attribute), name


def test_python_reference_lists_the_public_names() -> None:
    found = re.findall(r"^::: flexfleet\.(\w+)$", (ROOT / "docs/reference/python.md").read_text(), re.MULTILINE)
    assert sorted(found) == sorted(set(flexfleet.__all__) - {"__version__"})


def test_kubeflow_guide_names_nodes_and_artifacts_that_exist() -> None:
    tasks, artifacts = set[str](), set[str]()
    for name in names():
        text = documents(shipped(name))[0]
        for dag in [text["root"], *text["components"].values()]:
            inner = dag.get("dag", {}).get("tasks", {})
            tasks |= {task["taskInfo"]["name"] for task in inner.values()}
        for component in text["components"].values():
            artifacts |= set(component.get("outputDefinitions", {}).get("artifacts", {}))
    guide = GUIDE.read_text()
    named = set(re.findall(r"`(\d [A-Z][^`]*)`", guide))
    assert named and named <= tasks
    assert {"links", "page"} <= artifacts & set(re.findall(r"`(\w+)`", guide))


def test_guide_restores_behaviour_of_kubeflow_2_16() -> None:
    """The Python part of the guide's command removes `templateDefaults`, and nothing else, from a ConfigMap."""
    (code,) = re.findall(r"python -c '\n(.*?)' \| kubectl", GUIDE.read_text(), re.DOTALL)
    defaults: dict[str, Any] = {
        "spec": {
            "templateDefaults": {"retryStrategy": {"limit": "2", "retryPolicy": "OnError"}},
            "podMetadata": {"labels": {"pipelines.kubeflow.org/v2_component": "true"}},
            "activeDeadlineSeconds": 604800,
        }
    }
    before: dict[str, Any] = {
        "kind": "ConfigMap",
        "metadata": {"name": "workflow-controller-configmap", "namespace": "kubeflow", "resourceVersion": "7"},
        "data": {"executor": "imagePullPolicy: IfNotPresent\n", "workflowDefaults": yaml.safe_dump(defaults)},
    }
    done = subprocess.run([sys.executable, "-c", code], input=json.dumps(before), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    after = json.loads(done.stdout)
    del defaults["spec"]["templateDefaults"]
    assert yaml.safe_load(after["data"].pop("workflowDefaults")) == defaults
    before["data"].pop("workflowDefaults")
    assert after == before
