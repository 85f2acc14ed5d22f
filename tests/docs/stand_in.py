"""Stands in for the commands that the documentation names, found first in the PATH of its blocks.

What is here runs, only on less: a flexfleet command really runs on a few samples. What is not here (docker, kind, a
cluster) is checked as far as it can be: its verbs are known, its files exist, what it names is in the manifests. A
command that this does not know is an error. `python -m tests.docs.stand_in NAME WORDS...` is such a command.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import yaml

from flexfleet.config.dotted import SHORT
from tests.harness.forking import interpret

QUICK = (
    "dataset.name=digits",
    "dataset.train_samples=240",
    "dataset.test_samples=60",
    "partition.clients=6",
    "partition.minimum=5",
    "partition.proxy=0.1",
    "pretrain.epochs=1",
    "training.fraction=0.5",
    "training.epochs=1",
    "rounds.stop=1",
    "run.devices=[cpu]",
    "tune.trials=2",
    "tune.held_out=[100]",
    "publish.onnx=false",
)
FEW_SEEDS = """
from flexfleet.cli import main as cli
from flexfleet.files import terminal
from flexfleet.experiments import nightly
nightly.REFERENCE_SEEDS = (0, 1, 2)
terminal.run_main(cli.dispatch)
"""
WHOLE_SUITE = """
import sys
from flexfleet.cli import main as cli
from flexfleet.files import terminal
from flexfleet.experiments import nightly
args = cli.parser().parse_args(sys.argv[1:])
terminal.run_main(lambda _: 0 if nightly.prepare(args.suite, args.id, args.set) else 1)
"""
KNOWN_KUBECTL = (
    "apply", "create", "delete", "get", "label", "logs", "patch", "port-forward", "replace", "rollout", "taint", "wait"
)  # fmt: skip
CONFIG_MAP = {
    "kind": "ConfigMap",
    "metadata": {"name": "workflow-controller-configmap", "namespace": "kubeflow"},
    "data": {
        "workflowDefaults": "spec:\n  templateDefaults:\n    retryStrategy: {limit: 2, retryPolicy: OnError}\n"
        "  activeDeadlineSeconds: 600\n"
    },
}
"""As Kubeflow 2.17 has it."""
ROOT = Path(os.environ["DOCS_ROOT"])


def flexfleet(argv: list[str]) -> list[str]:
    if "KF_PIPELINES_ENDPOINT" in os.environ:
        os.environ["KF_PIPELINES_ENDPOINT"] = os.environ["DOCS_KUBEFLOW"]
    command, *rest = argv
    argv = [os.environ["DOCS_KUBEFLOW"] if re.match(r"https?://(localhost:8080|kubeflow\.example)", word) else word
            for word in argv]  # fmt: skip
    if command == "fetch" and rest and not re.fullmatch(r"[0-9a-f]{32}", rest[0]):
        known = json.loads(subprocess.check_output([sys.executable, "-m", "flexfleet", "fetch", "--json"]))
        assert set(rest) <= known["datasets"].keys(), rest
        return []
    if command in ("run", "check") and "--config" in argv:  # on a GPU, or on a cluster: checked, not run
        argv = ["check", *argv[1:]]
    if command == "compare":  # of one seed
        argv = [*argv, "--seeds", "0", "--jobs", "2"]
    untracked = () if "DOCS_TRACKED" in os.environ else ("tracking.mlflow=null",)  # seconds of each command
    if command == "forecast":
        argv += ["--probe", "0"]
    if command in ("run", "compare", "tune", "check", "forecast"):
        argv = [argv[0], *as_sets(argv[1:])]
        converted = any(word.startswith("publish.precision=") for word in argv)  # which takes the ONNX files
        quick = [pair for pair in QUICK if not (converted and pair == "publish.onnx=false")]
        argv += [word for pair in (*quick, *untracked) for word in ("--set", pair)]
    if command == "fork" and "--at" in argv:  # the run has one round
        argv[argv.index("--at") + 1] = "1"
    if command == "regress" and "--suite" not in argv:  # half an hour: all is checked, nothing runs
        return [sys.executable, "-c", WHOLE_SUITE, *argv]
    if command == "regress":  # with a reference of three seeds
        sets = [word for pair in ("publish.onnx=false", *untracked) for word in ("--set", pair)]
        return [sys.executable, "-c", FEW_SEEDS, *argv, *sets]
    return [sys.executable, "-m", "flexfleet", *argv]


def as_sets(argv: list[str]) -> list[str]:
    """Short options as --set, which those of QUICK come after: a parameter by both would be given twice."""
    out, words = [], iter(argv)
    for word in words:
        path = SHORT.get(word.removeprefix("--").replace("-", "_")) if word.startswith("--") else None
        out += [word] if path is None else ["--set", f"{path}={next(words)}"]
    return out


def python(argv: list[str]) -> list[str]:
    if argv[:2] == ["-m", "pipelines.compile"]:
        os.environ.pop("FLEXFLEET_IMAGE", None)
        return [sys.executable, *argv, "--check"]
    if "AWS_ENDPOINT_URL" in os.environ:
        os.environ["AWS_ENDPOINT_URL"] = os.environ["DOCS_S3"]
    return [sys.executable, *argv]


def kubectl(argv: list[str]) -> list[str]:
    words = [word for word in argv if not word.startswith("-")]
    if "-n" in argv:
        words.remove(argv[argv.index("-n") + 1])
    assert words[0] in KNOWN_KUBECTL, f"kubectl {words[0]}"
    named = "\n".join(path.read_text() for path in (ROOT / "k8s").rglob("*.yaml"))
    for kind, name in re.findall(r"\b(deployment|job|service)/([\w-]+)", " ".join(words)):
        assert name == "ml-pipeline-ui" or re.search(rf"name: {name}\b", named), f"no {kind} {name} in the manifests"
    if words[:3] == ["get", "configmap", "workflow-controller-configmap"]:
        return ["echo", json.dumps(CONFIG_MAP)]
    if words[0] == "replace":
        assert argv[-2:] == ["-f", "-"], argv
        replaced = json.load(sys.stdin)
        assert yaml.safe_load(replaced["data"]["workflowDefaults"]) == {"spec": {"activeDeadlineSeconds": 600}}
    for option in ("-k", "-f"):
        if words[0] == "apply" and option in argv:
            where = argv[argv.index(option) + 1]
            assert where.startswith("github.com/") or (ROOT / where).exists(), where
            if option == "-k" and (ROOT / where).is_dir() and shutil.which("kubectl", path=os.environ["DOCS_PATH"]):
                return [str(shutil.which("kubectl", path=os.environ["DOCS_PATH"])), "kustomize", str(ROOT / where)]
            if option == "-f":
                assert list(yaml.safe_load_all((ROOT / where).read_text()))
    return []


def docker(argv: list[str]) -> list[str]:
    assert argv[0] in ("build", "run", "buildx", "save", "load", "tag", "push", "image"), argv
    if argv[:2] == ["image", "inspect"]:
        return ["echo", f"{argv[2]}@sha256:{'0' * 64}"]
    if argv[0] == "run" and "flexfleet" in argv:
        return flexfleet(argv[argv.index("flexfleet") + 2 :])
    if argv[:2] == ["buildx", "imagetools"]:  # no registry is reached from here
        return ["echo", f"sha256:{'0' * 64}"]
    for option in ("--file", "--target"):
        if option in argv:
            value = argv[argv.index(option) + 1]
            text = (ROOT / "components" / "Dockerfile").read_text()
            assert (ROOT / value).is_file() if option == "--file" else f"AS {value}" in text, value
    return []


def kind(argv: list[str]) -> list[str]:
    assert argv[:2] in (["create", "cluster"], ["load", "docker-image"]), argv
    images = (ROOT / "Makefile").read_text()
    assert all(word in images for word in argv[2:] if word.startswith("flexfleet")), argv
    return []


def kustomize(argv: list[str]) -> list[str]:
    assert argv[:3] == ["edit", "set", "image"] and Path("kustomization.yaml").exists(), argv
    return []


def dvc(argv: list[str]) -> list[str]:
    assert argv == ["repro"], argv  # it runs in test_dvc.py
    stages = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]
    assert len(stages) == 6
    return []


def label_nodes(argv: list[str]) -> list[str]:
    assert len(argv) >= 3 and argv[0] in ("weak", "medium", "strong"), argv
    return ["bash", "-n", str(ROOT / "k8s/overlays/edge/label-nodes")]


COMMANDS = {
    "flexfleet": flexfleet,
    "python": python,
    "kubectl": kubectl,
    "docker": docker,
    "kind": kind,
    "kustomize": kustomize,
    "dvc": dvc,
    "label-nodes": label_nodes,
    "make": lambda argv: ["/usr/bin/env", f"PATH={os.environ['DOCS_PATH']}", "make", "-n", "-C", str(ROOT), *argv],
    "mlflow": lambda argv: [sys.executable, "-m", "mlflow", *argv, "--help"],
    "pytest": lambda argv: [sys.executable, "-m", "pytest", "--collect-only", "-q", "--rootdir", str(ROOT),
                            *(str(ROOT / word) if word.startswith("tests") else word for word in argv)],
}  # fmt: skip


def command_of(name: str, *words: str) -> list[str]:
    """What runs instead; empty if nothing does. Notes the command."""
    with open(os.environ["DOCS_LOG"], "a") as log:
        log.write(json.dumps([name, *words]) + "\n")
    return COMMANDS[name](list(words))


def main(name: str, *words: str) -> None:
    match command_of(name, *words):
        case []:
            return
        case [sys.executable, *rest]:
            interpret(rest)
        case command:
            os.execvp(command[0], command)


if __name__ == "__main__":
    main(*sys.argv[1:])
