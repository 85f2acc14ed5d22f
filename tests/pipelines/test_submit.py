"""Submitting to a fake server that checks every request by the models of Kubeflow's published API."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_engine.algorithms.flexfl import FlexFL
from fl_engine.core.errors import Unreachable
from flexfleet.config import load_config
from flexfleet.config.dotted import SHORT
from flexfleet.config.form import config_from, parameters_of
from flexfleet.kubeflow.retarget import documents
from flexfleet.kubeflow.submit import Scheduled, form, schedule, submit
from tests.pipelines.kubeflow import drops, takes_and


def test_submit_uploads_a_graph_once(kubeflow: tuple[Any, str], monkeypatch: pytest.MonkeyPatch) -> None:
    server, host = kubeflow
    first = submit("train", {"rounds": 3, "advanced": {"algorithm.kd_weight": 5}}, host=host, run_name="mine")
    (run,) = server.runs
    assert (run["display_name"], run["runtime_config"]["parameters"]) == (
        "mine", {"rounds": 3, "advanced": {"algorithm.kd_weight": 5}}
    )  # fmt: skip
    assert run["pipeline_version_reference"] == {"pipeline_id": "p0", "pipeline_version_id": "v0"}
    assert (first.run_id, first.uploaded) == ("r1", True) and first.url.endswith("/#/runs/details/r1")
    again = submit("train", {}, host=host)
    assert (again.version, again.uploaded, len(server.versions), len(server.experiments)) == (
        first.version, False, 1, 1
    )  # fmt: skip
    monkeypatch.setenv("FLEXFLEET_IMAGE", "here/flexfleet:1")
    changed = submit("train", {}, host=host)
    assert changed.uploaded and changed.version != first.version and len(server.versions) == 2
    monkeypatch.delenv("FLEXFLEET_IMAGE")
    assert submit("train", {}, host=host).uploaded is False, "an old version is found on the second page"


def test_submit_sends_parameters_that_differ_from_defaults(
    kubeflow: tuple[Any, str], flexfleet: Any, own_folder: None
) -> None:
    server, host = kubeflow
    sets = ["model.name=vgg16", "model.width=0.25", "run.remote=s3://bucket/runs", "run.backend=kubernetes"]
    sets += ["kubernetes.pools={weak: {memory: 2Gi}}"]
    done = flexfleet("submit", "train", "--host", host, "--param", "run_id=mine", "--json", sets=sets).ok()
    given = server.runs[0]["runtime_config"]["parameters"]
    assert (given["model"], given["store_uri"], given["run_id"]) == ("vgg16", "s3://bucket/runs", "mine")
    assert given["mlflow_uri"] == "", "a database of this machine is no tracking there"
    assert given["advanced"]["run.backend"] == "kubernetes" and given["advanced"]["model.width"] == 0.25
    assert done.json["run_id"] == "r1" and done.json["uploaded"] is True
    done = flexfleet("submit", "compare", "--host", host, "--param", "algorithms=flexfl,fedprox").ok()
    given = server.runs[1]["runtime_config"]["parameters"]
    assert given["algorithms"] == "flexfl,fedprox" and "seed" not in given and "trials" not in given
    assert "(new)" in done.out
    own = {"no_kd:algorithm.kd_weight": 0, "training.momentum": 0.9}
    argv = ("--param", "algorithms=flexfl,no_kd=flexfl")
    flexfleet("submit", "compare", "--host", host, *argv, sets=[f"{path}={own[path]}" for path in own]).ok()
    assert server.runs[2]["runtime_config"]["parameters"]["advanced"] == own


def test_dry_run_prints_the_yaml_that_submit_uploads(
    kubeflow: tuple[Any, str], flexfleet: Any, own_folder: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, host = kubeflow
    monkeypatch.setenv("FLEXFLEET_PULL_SECRETS", "registry")
    monkeypatch.setenv("FLEXFLEET_SERVICE_ACCOUNT", "tasks")
    argv = ("submit", "train", "--host", host)
    dry = flexfleet(*argv, "--dry-run", "--json", sets=["rounds.stop=7"]).ok().json
    assert server.heard == [] and dry["parameters"]["rounds"] == 7
    assert flexfleet("submit", "--terminate", "r1", "--dry-run").code == 2
    flexfleet("export-pipeline", "train", "--out", "new/train.yaml").ok()
    assert Path("new/train.yaml").read_text() == dry["yaml"] == flexfleet("export-pipeline", "train").ok().out
    flexfleet(*argv, sets=["rounds.stop=7"]).ok()
    (run,), (version,) = server.runs, server.versions
    spec, platform = documents(dry["yaml"])
    assert version["pipeline_spec"] == {"pipeline_spec": spec, "platform_spec": platform}
    assert (version["display_name"], run["service_account"]) == (dry["version"], "tasks")
    assert run["runtime_config"]["parameters"] == dry["parameters"]


@dataclass(frozen=True)
class Mine(FlexFL):
    """An algorithm of the user's own."""


OWN = f"{__name__}:Mine"


@pytest.mark.parametrize("how", ["--set", "--param"])
def test_own_class_is_sent_in_advanced(kubeflow: tuple[Any, str], flexfleet: Any, own_folder: None, how: str) -> None:
    """Kubeflow accepts only values of a field's list."""
    server, host = kubeflow
    named = ["--param", f"algorithm={OWN}"] if how == "--param" else []
    sets = ["algorithm.kd_weight=5.0", *([f"algorithm.name={OWN}"] if how == "--set" else [])]
    flexfleet("submit", "train", "--host", host, "--param", "model=vgg16", *named, sets=sets).ok()
    given = server.runs[0]["runtime_config"]["parameters"]
    assert "algorithm" not in given and given["model"] == "vgg16"
    assert given["advanced"] == {"algorithm.name": OWN, "algorithm.kd_weight": 5}
    known = {name: value for name, value in (form("train") | given).items() if name in SHORT}
    assert config_from(known, given["advanced"]).algorithm == {"name": OWN, "kd_weight": 5}


@pytest.mark.parametrize(
    ("argv", "sets", "path"),
    [
        (["tune"], ["seed=7"], "seed"),
        (["compare"], ["algorithm={name: fedavg}"], "algorithm.name"),
        (["nightly"], ["rounds.stop=3"], "rounds.stop"),
        (["train", "--param", "advanced={}"], [], "advanced"),
        (["trian"], [], None),
        (["train", "--param", "round=3"], [], "round"),
        (["train", "--param", "store_uri=http://minio/b"], [], None),
        (["train", "--param", "mlflow_uri=mlflow:5000"], [], "tracking.mlflow"),
        (["tune"], ["tune.workers=81"], None),
        (["train", "--param", "rounds=many"], [], "rounds"),
        (["train", "--param", "learning_rate=nan"], [], "learning_rate"),
        (["train", "--param", "rounds=0"], [], None),
        (["train", "--param", "dataset=nope"], [], None),
        (["train", "--param", "run_id=a/b"], [], None),
        (["compare", "--param", f"seeds={','.join(map(str, range(41)))}"], [], None),
        (["train"], ["run.remote=s3:/b"], None),
        (["compare"], ["no_kd:algorithm.kd_weight=0"], None),
        (["tune", "--param", "trials=0"], [], None),
        (["train", "--param", "rounds=5"], ["rounds.stop=7"], None),
        (["train", "--param", "rounds=5", "--param", "rounds=6"], [], None),
        (["nightly"], ["algorithm.kd_weight=7"], None),
        (["nightly", "--config", "mine.yaml"], [], None),
        (["nightly", "--param", "suite=mine.yaml"], [], "suite"),
    ],
)
def test_submit_refuses_what_the_first_task_would_refuse(
    kubeflow: tuple[Any, str], flexfleet: Any, own_folder: None, argv: list[str],
    sets: list[str], path: str | None,
) -> None:  # fmt: skip
    server, host = kubeflow
    done = flexfleet("submit", *argv, "--host", host, "--json", sets=sets)
    assert (done.code, server.runs, server.versions) == (2, [], []), done.err
    assert path is None or done.json["error"]["path"] == path, done.err


def test_submit_nightly_ignores_params_yaml(kubeflow: tuple[Any, str], flexfleet: Any, own_folder: None) -> None:
    server, host = kubeflow
    Path("params.yaml").write_text("algorithm: {kd_weight: 5}\nfleet: {tiers: '8:1:1'}\n")
    flexfleet("submit", "nightly", "--host", host, sets=["run.remote=s3://bucket/n", "publish.onnx=false"]).ok()
    assert server.runs[0]["runtime_config"]["parameters"] == {
        "mlflow_uri": "", "store_uri": "s3://bucket/n", "advanced": {"publish.onnx": False}
    }  # fmt: skip


CONFIGS = st.fixed_dictionaries(
    {},
    optional={
        "seed": st.integers(0, 99),
        "training.lr": st.sampled_from([0.01, 1, 5e-3]),
        "training.lr_steps": st.sampled_from([[], [3, 9]]),
        "algorithm.kd_weight": st.sampled_from([0, 2.5]),
        "algorithm.gammas": st.sampled_from([None, [0.8, 1.2]]),
        "fleet.tiers": st.sampled_from(["conf1", "8:1:1"]),
        "run.remote": st.just("s3://bucket/runs"),
        "kubernetes.pools": st.just({"weak": {"arch": "arm64"}}),
        "tune.space": st.just({"training.lr": {"low": 0.1, "high": 1}}),
        "tracking.mlflow": st.just("http://mlflow:5000"),
    },
)


@settings(max_examples=60)
@given(values=CONFIGS)
def test_form_gives_the_same_configuration_in_the_task(values: dict[str, Any]) -> None:
    config = load_config(None, [f"{path}={json.dumps(value)}" for path, value in values.items()])
    parameters, advanced = parameters_of(config)
    there = config_from(json.loads(json.dumps(parameters)), json.loads(json.dumps(advanced)))
    if "tracking.mlflow" not in values:
        there = there.model_copy(update={"tracking": config.tracking})
    assert there == config


def test_submit_does_not_look_for_mlflow_of_the_tasks(kubeflow: tuple[Any, str]) -> None:
    server, host = kubeflow
    submit("train", {"mlflow_uri": f"sqlite:///{__file__}/a.db"}, host=host)
    assert server.pipelines


@pytest.mark.parametrize(
    ("argv", "sets"),
    [
        (["--cron", "0 2 * * *"], []),
        (["--suite", "digit"], []),
        ([], ["training.lr=1"]),
        ([], ["tracking.mlfow=x"]),
        (["--param", "suite=nope"], []),
        (["--param", "store_uri=x"], ["run.store=y"]),
        (["--param", "night_id=x"], []),
        (["--param", "suit=x"], []),
    ],
)
def test_nightly_refuses_what_the_first_task_would_refuse(
    kubeflow: tuple[Any, str], flexfleet: Any, argv: list[str], sets: list[str]
) -> None:
    server, host = kubeflow
    done = flexfleet("nightly", "--host", host, *argv, sets=sets)
    assert (done.code, server.recurring) == (2, []), done.err


@pytest.mark.parametrize(
    "argv",
    [
        ("submit", "train", "--set", "tracking.mlflow=http://me:pl4nted@mlflow"),
        ("submit", "tune", "--set", "tune.storage=postgresql://me:pl4nted@host/db"),
        ("submit", "train", "--param", "store_uri=s3://me:pl4nted@bucket/x"),
        ("nightly", "--cron", "0 0 2 * * *", "--set", "tracking.mlflow=http://me:pl4nted@mlflow"),
    ],
    ids=lambda argv: " ".join(argv[:2]),
)
def test_password_is_not_sent_to_kubeflow(
    kubeflow: tuple[Any, str], flexfleet: Any, own_folder: None, argv: tuple[str, ...]
) -> None:
    server, host = kubeflow
    done = flexfleet(*argv, "--host", host)
    assert done.code == 2
    assert not server.runs and not server.versions and "pl4nted" not in done.err


# -------------------------------------------------------------------------------------------------- recurring runs
NAME, OLD, NEW = "mine", "0 0 1 * * *", "0 0 2 * * *"


def nightly(host: str, cron: str) -> Scheduled:
    return schedule("nightly", {}, NAME, cron, host=host)


def enabled(server: Any) -> list[str]:
    """The cron fields of the recurring runs that Kubeflow starts."""
    mine = [job for job in server.recurring if job["display_name"] == NAME and job["mode"] == "ENABLE"]
    return [job["trigger"]["cron_schedule"]["cron"] for job in mine]


def test_nightly_disables_old_recurring_run(
    kubeflow: tuple[Any, str], flexfleet: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, host = kubeflow
    nightly(host, OLD)
    first, again = (flexfleet("nightly", "--host", host, "--name", NAME, "--json").json for _ in range(2))
    assert (first["made"], first["replaced"]) == (True, 1) and (again["made"], again["replaced"]) == (False, 0)
    assert enabled(server) == [NEW] and [job["recurring_run_id"] for job in server.recurring] == ["j1", "j2"]
    monkeypatch.setenv("FLEXFLEET_SERVICE_ACCOUNT", "tasks")
    assert flexfleet("nightly", "--host", host, "--name", NAME, "--json").json["replaced"] == 1
    assert [job.get("service_account") for job in server.recurring] == [None, None, "tasks"]


@pytest.mark.parametrize("call", ["POST recurringruns", "POST recurringruns/*"])
@pytest.mark.parametrize("taken", [True, False])
def test_interrupted_nightly_is_completed_by_next_call(kubeflow: tuple[Any, str], call: str, taken: bool) -> None:
    server, host = kubeflow
    other = schedule("nightly", {}, "another", OLD, host=host).recurring_run_id
    nightly(host, OLD)
    server.spoils[call] = [takes_and(drops) if taken else drops]
    with pytest.raises(Unreachable):
        nightly(host, NEW)
    assert enabled(server), "at no time is there no recurring run"
    server.spoils.clear()
    nightly(host, NEW)
    assert enabled(server) == [NEW]
    (untouched,) = (job for job in server.recurring if job["display_name"] != NAME)
    assert (untouched["recurring_run_id"], untouched["mode"]) == (other, "ENABLE")


@pytest.mark.parametrize("off", [{"mode": "DISABLE"}, {"status": "DISABLED"}])
def test_nightly_replaces_disabled_recurring_run(kubeflow: tuple[Any, str], off: dict[str, str]) -> None:
    server, host = kubeflow
    nightly(host, NEW)
    server.recurring[0] |= off
    assert nightly(host, NEW).made and enabled(server)
