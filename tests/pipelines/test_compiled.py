"""The compiled pipelines are up to date, and have the forms, credentials and resources that they need."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
from google.protobuf import json_format
from kfp.components import load_component_from_text
from kfp.kubernetes.kubernetes_executor_config_pb2 import KubernetesExecutorConfig
from kfp.pipeline_spec.pipeline_spec_pb2 import PipelineSpec

from components import describe
from fl_engine import PARAMETER_TABLE
from fl_engine.algorithms import CONTRACT
from fl_engine.core.errors import ConfigError
from fl_engine.data.partitioning import PartitionConfig
from fl_engine.datasets import DATASETS
from fl_engine.models import MODELS
from flexfleet.config import load_config
from flexfleet.config.dotted import SHORT
from flexfleet.config.form import comparison_from, config_from
from flexfleet.kubeflow.retarget import VARIABLES, documents, retarget, shipped
from pipelines import compile as compiling
from pipelines.compile import COMPILED, PIPELINES
from pipelines.shared import COORDINATOR_KEYS, S3_KEYS

ROOT = Path(__file__).parents[2]
ASSIGNMENT = ("partition", "pretrain", "model-pool", "federate", "evaluate", "report")
ROUNDS = ("exec-federate", "exec-run", "exec-search")
HEAVY = {"torch", "mlflow", "sklearn", "matplotlib", "flexfleet.config"}


@pytest.mark.parametrize("hash_seed", ["1", pytest.param("2", marks=pytest.mark.long)])
def test_compiled_files_are_current_and_need_no_torch(hash_seed: str) -> None:
    code = "import sys; from pipelines.compile import main; assert main(['--check']) == 0; print(*sys.modules)"
    clean = {k: v for k, v in os.environ.items() if not k.startswith("FLEXFLEET_")} | {"PYTHONHASHSEED": hash_seed}
    done = subprocess.run([sys.executable, "-c", code], env=clean, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not HEAVY & set(done.stdout.split())


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The environment without a cluster's settings."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_compiling_for_a_cluster_changes_no_tracked_file(clean: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = {path: path.read_text() for path in COMPILED.iterdir()}
    assert str(compiling.ADAPTED.relative_to(ROOT)) == "build/pipelines", "which git ignores"
    clean.setattr(compiling, "ADAPTED", tmp_path / "build" / "pipelines")
    clean.setenv("FLEXFLEET_IMAGE", "here/flexfleet:1")
    assert compiling.main([]) == 0
    assert {path: path.read_text() for path in COMPILED.iterdir()} == before
    for name in PIPELINES:
        text = (tmp_path / "build" / "pipelines" / f"{name}.yaml").read_text()
        assert text == retarget(shipped(name), {"FLEXFLEET_IMAGE": "here/flexfleet:1"})
    assert compiling.main(["--check"]) == 0


def root_of(name: str) -> dict[str, Any]:
    spec: dict[str, Any] = documents((COMPILED / f"{name}.yaml").read_text())[0]
    return spec["root"]  # type: ignore[no-any-return]


def form_of(name: str) -> dict[str, Any]:
    """Defaults of a run form that is short and explained."""
    form = root_of(name)["inputDefinitions"]["parameters"]
    assert len(form) <= 15
    assert all(p.get("description") for p in form.values())
    return {name: p["defaultValue"] for name, p in form.items()}


@pytest.mark.parametrize("name", PIPELINES)
def test_form_offers_the_registered_names(name: str) -> None:
    known = get_args(PartitionConfig.model_fields["rule"].annotation)
    text = (COMPILED / f"{name}.yaml").read_text()
    spec = json_format.ParseDict(documents(text)[0], PipelineSpec())
    fields = spec.root.input_definitions.parameters
    offered = {field: tuple(each.string_value for each in fields[field].literals) for field in fields}
    names = {"dataset": DATASETS, "model": MODELS, "algorithm": CONTRACT.registry}
    expected = {"partition_rule": known} | {field: tuple(sorted(registry)) for field, registry in names.items()}
    for field in fields:  # a nightly run's suite says what is run, and a comparison has several algorithms
        assert offered[field] == expected.get(field, ()), field
        assert fields[field].default_value.string_value in offered[field] or not offered[field]
    assert load_component_from_text(text).name == name
    info = spec.pipeline_info
    assert info.display_name and info.description.endswith(PARAMETER_TABLE), "where the form's `advanced` is explained"


# ------------------------------------------------------------------------------------------------- the schema's
def test_generated_files_are_current() -> None:
    """params.yaml and the forms' file, from which the pipelines are compiled."""
    assert describe.main(["--check"]) == 0


# ------------------------------------------------------------------------------------------------------- train
def test_form_defaults_are_the_configuration() -> None:
    values = form_of("train")
    assert set(values) == {*SHORT, "run_id", "advanced"}
    given = {name: values[name] for name in SHORT}
    assert config_from(given, values["advanced"]) == config_from({"mlflow_uri": ""}, {})
    assert config_from(given | {"mlflow_uri": "sqlite:///mlflow.db"}, values["advanced"]) == load_config()


def test_all_tasks_but_the_first_are_retried() -> None:
    tasks = root_of("train")["dag"]["tasks"]
    retried = {name: tasks[name].get("retryPolicy", {}).get("maxRetryCount", 0) for name in ASSIGNMENT}
    assert retried == {name: 0 if name == "partition" else 3 for name in ASSIGNMENT}


@pytest.mark.parametrize("name", PIPELINES)
def test_no_task_is_cached(name: str) -> None:
    spec = documents((COMPILED / f"{name}.yaml").read_text())[0]
    dags = [each["dag"] for each in (spec["root"], *spec["components"].values()) if "dag" in each]
    tasks = [task for dag in dags for task in dag["tasks"].values()]
    assert tasks and not any(task.get("cachingOptions") for task in tasks)


@pytest.mark.parametrize("name", PIPELINES)
def test_tasks_get_credentials_and_image(name: str) -> None:
    spec, platform = documents((COMPILED / f"{name}.yaml").read_text())
    executors = spec["deploymentSpec"]["executors"]
    settings = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    assert settings.keys() == executors.keys()
    for key, executor in executors.items():
        (variable,) = executor["container"]["env"]
        assert variable == {"name": "FLEXFLEET_IMAGE", "value": executor["container"]["image"]}
        secrets = {secret["secretName"]: secret for secret in settings[key]["secretAsEnv"]}
        assert all(secret["optional"] for secret in secrets.values())
        named = {name: {pair["secretKey"]: pair["envVar"] for pair in secret["keyToEnv"]}
                 for name, secret in secrets.items()}  # fmt: skip
        s3 = named.pop("flexfleet-s3")
        wanted = COORDINATOR_KEYS if key in ROUNDS or (name, key) == ("tune", "exec-report") else S3_KEYS
        assert s3 == {key: f"FLEXFLEET_{key}" for key in wanted}, "not those that Kubeflow's launcher reads"
        assert "AWS_SESSION_TOKEN" in s3
        mlflow = ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN")
        assert named.pop("flexfleet-mlflow") == {key: key for key in mlflow}
        storage = {"flexfleet-tune": {"FLEXFLEET_TUNE_STORAGE": "FLEXFLEET_TUNE_STORAGE"}}
        webhook = {"flexfleet-webhook": {"FLEXFLEET_WEBHOOK": "FLEXFLEET_WEBHOOK"}}
        own = {"nightly": webhook, "tune": storage}
        assert named == own.get(name, {}), "to whom they are of use, and nobody else"
        assert settings[key]["imagePullPolicy"] == "IfNotPresent"


@pytest.mark.parametrize("name", PIPELINES)
def test_tasks_run_as_non_root_with_requests_and_limits(name: str) -> None:
    """Namespaces that enforce `restricted` want the one said, quotas the other."""
    spec, platform = documents((COMPILED / f"{name}.yaml").read_text())
    for key, executor in spec["deploymentSpec"]["executors"].items():
        settings = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"][key]
        assert settings["securityContext"] == {"runAsNonRoot": True}
        given = executor["container"]["resources"]
        assert given.keys() >= {f"resource{what}{most}" for what in ("Cpu", "Memory") for most in ("Request", "Limit")}


def test_variables_set_cpu_memory_and_gpu() -> None:
    given = {"FLEXFLEET_TASK_CPU": "100m:1", "FLEXFLEET_TASK_MEMORY": "2Gi", "FLEXFLEET_TRAIN_GPU": "nvidia.com/gpu=2"}
    spec = documents(retarget(shipped("train"), given))[0]
    found = {key: each["container"]["resources"] for key, each in spec["deploymentSpec"]["executors"].items()}
    small = {"resourceCpuRequest": "100m", "resourceCpuLimit": "1", "resourceMemoryRequest": "2Gi"}
    assert found["exec-report"].items() >= (small | {"resourceMemoryLimit": "2Gi"}).items()
    asked = {key: each.get("accelerator", {}).get("resourceCount") for key, each in found.items()}
    assert asked == {
        f"exec-{name}": "2" if name in ("pretrain", "federate", "evaluate") else None for name in ASSIGNMENT
    }


def test_variables_set_nodes_data_and_secrets() -> None:
    given = {"FLEXFLEET_TASK_NODES": "kubernetes.io/arch=amd64,disk=fast", "FLEXFLEET_DATA_CLAIM": "sets"}
    given |= {"FLEXFLEET_KUBEFLOW_UI": "https://kubeflow", "FLEXFLEET_PRIORITY_CLASS": "low"}
    given |= {"FLEXFLEET_PULL_SECRETS": "here, there"}
    given |= {f"FLEXFLEET_{what}_SECRET": f"my-{what}" for what in ("S3", "MLFLOW", "TUNE")}
    spec, platform = documents(retarget(shipped("tune"), given))
    executors = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    for key, settings in executors.items():
        assert settings["nodeSelector"]["labels"] == {"kubernetes.io/arch": "amd64", "disk": "fast"}
        names = [secret["secretName"] for secret in settings["secretAsEnv"]]
        assert names == ["my-S3", "my-MLFLOW", "my-TUNE"]
        assert settings["pvcMount"][0]["mountPath"] == "/data"
        env = spec["deploymentSpec"]["executors"][key]["container"]["env"]
        assert {"name": "FLEXFLEET_DATA", "value": "/data"} in env
        passed = ("FLEXFLEET_KUBEFLOW_UI", "FLEXFLEET_PRIORITY_CLASS", "FLEXFLEET_PULL_SECRETS")
        assert all({"name": name, "value": given[name]} in env for name in passed)
        config = json_format.ParseDict(settings, KubernetesExecutorConfig())  # refuses unknown fields, as Kubeflow does
        secrets = [each.secret_name_parameter for each in config.image_pull_secret]
        assert [each.runtime_value.constant.string_value for each in secrets] == ["here", "there"]


@pytest.mark.parametrize("name", PIPELINES)
def test_retargeting_without_variables_changes_nothing(name: str) -> None:
    assert retarget(shipped(name), {}) == shipped(name) == (COMPILED / f"{name}.yaml").read_text()


@pytest.mark.parametrize(
    ("variable", "value"),
    [("TRAIN_CPU", "two"), ("TASK_MEMORY", "nan"), ("TASK_CPU", "0"), ("TRAIN_GPU", "a=b"), ("TRAIN_GPU", "1"),
     ("PULL_SECRETS", "a b"), ("PRIORITY_CLASS", "a,b"), ("TRAIN_GPU", "nvidia.com/gpu=0"),
     ("TASK_NODES", "fast"), ("TASK_NODES", "=fast"), ("TRAIN_CPU", "16:2")],
)  # fmt: skip
def test_malformed_variable_is_refused(variable: str, value: str) -> None:
    with pytest.raises(ConfigError):
        retarget(shipped("train"), {f"FLEXFLEET_{variable}": value})


# ----------------------------------------------------------------------------------------------------- compare
def test_comparison_form_defaults_are_the_configuration() -> None:
    values = form_of("compare")
    common = SHORT.keys() - {"algorithm", "seed"}
    assert set(values) == common | {"algorithms", "seeds", "comparison_id", "advanced"}
    given = {name: values[name] for name in common}
    runs = comparison_from(given, values["advanced"], values["algorithms"], values["seeds"], "a")
    assert [run.name for run in runs][:3] == ["flexfl-s0", "all_large-s0", "flexfl-s1"]
    expected = config_from({"seed": 0, "mlflow_uri": "", "store_uri": "runs/a"}, {})
    assert runs[0].config == expected
    given["store_uri"] = "s3://bucket/all/"
    for run in comparison_from(given, values["advanced"], values["algorithms"], values["seeds"], "a"):
        assert (run.config.run.remote, run.config.run.store) == ("s3://bucket/all/a", "runs/a")
