"""Submitting, against a stand-in that checks every request by the models of Kubeflow's published API."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_engine.algorithms.flexfl import FlexFL
from fl_engine.core.errors import ConfigError, EnvironmentFailure
from flexfleet.config import Config, load_config
from flexfleet.config.form import PARAMETERS, config_from, parameters_of
from flexfleet.kubeflow.retarget import shipped
from flexfleet.kubeflow.submit import form, submit


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
    monkeypatch.setattr("flexfleet.kubeflow.submit.shipped", _other)
    changed = submit("train", {}, host=host)
    assert changed.uploaded and changed.version != first.version and len(server.versions) == 2
    monkeypatch.undo()
    assert submit("train", {}, host=host).uploaded is False, "an old version is found on the second page"


def _other(name: str) -> str:
    return shipped(name).replace("Name: train", "Name: other")


def test_the_command_gives_what_differs_from_the_defaults(
    kubeflow: tuple[Any, str], flexfleet: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, host = kubeflow
    monkeypatch.chdir(tmp_path)
    sets = ["model.name=vgg16", "model.width=0.25", "run.remote=s3://bucket/runs", "run.backend=kubernetes"]
    sets += ["kubernetes.pools={weak: {memory: 2Gi}}"]
    done = flexfleet("submit", "train", "--host", host, "--param", "run_id=mine", "--json", sets=sets)
    assert done.code == 0, done.err
    given = server.runs[0]["runtime_config"]["parameters"]
    assert (given["model"], given["store_uri"], given["run_id"]) == ("vgg16", "s3://bucket/runs", "mine")
    assert given["mlflow_uri"] == "", "a database of this machine is no tracking there"
    assert given["advanced"]["run.backend"] == "kubernetes" and given["advanced"]["model.width"] == 0.25
    assert done.json["run_id"] == "r1" and done.json["uploaded"] is True
    done = flexfleet("submit", "compare", "--host", host, "--param", "algorithms=flexfl,fedprox")
    assert done.code == 0, done.err
    given = server.runs[1]["runtime_config"]["parameters"]
    assert given["algorithms"] == "flexfl,fedprox" and "seed" not in given and "trials" not in given
    assert "(new)" in done.out
    own = {"no_kd:algorithm.kd_weight": 0, "training.momentum": 0.9}
    argv = ("--param", "algorithms=flexfl,no_kd=flexfl")
    done = flexfleet("submit", "compare", "--host", host, *argv, sets=[f"{path}={own[path]}" for path in own])
    assert done.code == 0, done.err
    assert server.runs[2]["runtime_config"]["parameters"]["advanced"] == own


@dataclass(frozen=True)
class Mine(FlexFL):
    """An algorithm of the user's own."""


OWN = f"{__name__}:Mine"


@pytest.mark.parametrize("how", ["--set", "--param"])
def test_a_class_of_ones_own_travels_in_advanced(
    kubeflow: tuple[Any, str], flexfleet: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Kubeflow accepts only values of a field's list."""
    server, host = kubeflow
    monkeypatch.chdir(tmp_path)
    named = ["--param", f"algorithm={OWN}"] if how == "--param" else []
    sets = ["algorithm.kd_weight=5.0", *([f"algorithm.name={OWN}"] if how == "--set" else [])]
    done = flexfleet("submit", "train", "--host", host, "--param", "model=vgg16", *named, sets=sets)
    assert done.code == 0, done.err
    given = server.runs[0]["runtime_config"]["parameters"]
    assert "algorithm" not in given and given["model"] == "vgg16"
    assert given["advanced"] == {"algorithm.name": OWN, "algorithm.kd_weight": 5}
    known = {name: value for name, value in (form("train") | given).items() if name in PARAMETERS}
    assert config_from(known, given["advanced"]).algorithm == {"name": OWN, "kd_weight": 5}


@pytest.mark.parametrize(
    ("argv", "sets", "said"),
    [
        (["tune"], ["seed=7"], "the pipeline tune has no field for seed = 7. Leave it out"),
        (["compare"], ["algorithm.name=fedavg"], "the pipeline compare has no field for algorithm.name = 'fedavg'"),
        (["compare"], ["algorithm={name: fedavg}"], "the pipeline compare has no field for algorithm.name = 'fedavg'"),
        (["nightly"], ["rounds.stop=3"], "the pipeline nightly has no field for rounds.stop = 3"),
        (["train", "--param", "advanced={}"], [], "--param advanced: give each of its values with --set a.b=value"),
        (
            ["train", "--param", "rounds=many"],
            [],
            "the parameter rounds of the pipeline train must be a whole number, got",
        ),
        (
            ["train", "--param", "learning_rate=nan"],
            [],
            "the parameter learning_rate of the pipeline train must be a number",
        ),
        (["train", "--param", "rounds=0"], [], "rounds.stop: input should be greater than or equal to 1, got 0"),
        (["train", "--param", "dataset=nope"], [], "no data set named 'nope'"),
        (["train", "--param", "run_id=a/b"], [], "run_id is a plain name"),
        (["compare", "--param", "algorithms=flexfl,"], [], "algorithms"),
        (
            ["compare", "--param", f"seeds={','.join(map(str, range(41)))}"],
            [],
            "2 algorithms with 41 seeds are 82 runs",
        ),
        (["train", "--param", "store_uri=s3:/b"], [], "store_uri"),
        (["train"], ["run.remote=s3:/b"], "store_uri"),
        (["compare"], ["no_kd:algorithm.kd_weight=0"], "no algorithm of this comparison is labelled 'no_kd'"),
        (["train"], ["flexfl:algorithm.kd_weight=0"], "unknown parameter 'flexfl:algorithm'"),
        (["tune", "--param", "trials=0"], [], "tune.trials: input should be greater than or equal to 1, got 0"),
        (["train", "--param", "rounds=5"], ["rounds.stop=7"], "rounds.stop is given twice, by --param rounds"),
        (["train", "--param", "rounds=5", "--param", "rounds=6"], [], "--param rounds is given twice"),
        (["nightly"], ["algorithm.kd_weight=7"], "a suite says what is measured"),
        (["nightly", "--config", "mine.yaml"], [], "--config cannot be used with nightly"),
        (["nightly", "--param", "suite=nope"], [], "no suite is named 'nope': digits"),
        (["nightly", "--param", "suite=mine.yaml"], [], "must be one that comes with flexfleet (digits)"),
        (["train"], ["seed=9007199254740993"], "seed = 9007199254740993: Kubeflow rounds whole numbers above"),
    ],
)
def test_what_would_be_lost_on_the_way_is_refused(
    kubeflow: tuple[Any, str], flexfleet: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, argv: list[str],
    sets: list[str], said: str,
) -> None:  # fmt: skip
    server, host = kubeflow
    monkeypatch.chdir(tmp_path)
    done = flexfleet("submit", *argv, "--host", host, sets=sets)
    assert (done.code, said in done.err, server.runs, server.versions) == (2, True, [], []), done.err


def test_a_night_is_submitted_without_the_folders_parameters(
    kubeflow: tuple[Any, str], flexfleet: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, host = kubeflow
    monkeypatch.chdir(tmp_path)
    (tmp_path / "params.yaml").write_text("algorithm: {kd_weight: 5}\nfleet: {tiers: '8:1:1'}\n")
    done = flexfleet("submit", "nightly", "--host", host, sets=["run.remote=s3://b/n", "publish.onnx=false"])
    assert done.code == 0, done.err
    assert server.runs[0]["runtime_config"]["parameters"] == {
        "mlflow_uri": "", "store_uri": "s3://b/n", "advanced": {"publish.onnx": False}
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
def test_what_is_submitted_makes_the_same_configuration_there(values: dict[str, Any]) -> None:
    config = load_config(None, [f"{path}={json.dumps(value)}" for path, value in values.items()])
    parameters, advanced = parameters_of(config)
    there = config_from(json.loads(json.dumps(parameters)), json.loads(json.dumps(advanced)))
    if "tracking.mlflow" not in values:
        there = there.model_copy(update={"tracking": Config().tracking})
    assert there == config


def test_what_is_wrong_is_said_before_anything_is_uploaded(kubeflow: tuple[Any, str]) -> None:
    server, host = kubeflow
    for name, parameters, said in (
        ("trian", {}, "trian"),
        ("train", {"round": 3}, "round"),
        ("train", {"store_uri": "http://minio/b"}, "store_uri"),
        ("nightly", {"store_uri": 5}, r"run\.store"),
        ("nightly", {"mlflow_uri": "mlflow:5000"}, "http://"),
        ("train", {"mlflow_uri": 5}, r"tracking\.mlflow"),
        ("train", {"advanced": ["rounds.stop"]}, "advanced"),
        ("tune", {"advanced": {"tune.workers": 81}}, r"tune\.workers"),
    ):
        with pytest.raises(ConfigError, match=said):
            submit(name, parameters, host=host)
    assert not server.pipelines
    server.refuse = 403
    with pytest.raises(EnvironmentFailure, match=r"403 .*no such right"):
        submit("train", {}, host=host)


def test_a_path_of_mlflow_is_the_tasks_and_not_of_this_machine(kubeflow: tuple[Any, str]) -> None:
    server, host = kubeflow
    submit("train", {"mlflow_uri": f"sqlite:///{__file__}/a.db"}, host=host)
    assert server.pipelines


@pytest.mark.parametrize(
    ("argv", "sets", "said"),
    [
        (["--cron", "0 2 * * *"], [], "cron must have six fields, seconds first"),
        (["--suite", "digit"], [], "no suite is named 'digit': digits"),
        ([], ["training.lr=1"], "a suite says what is measured"),
        ([], ["tracking.mlfow=x"], "unknown parameter 'tracking.mlfow'"),
        (["--suite", "mine.yaml"], [], "must be one that comes with flexfleet (digits)"),
        (["--param", "suite=nope"], [], "--param suite: give it with --suite"),
        (["--param", "store_uri=x"], ["run.store=y"], "run.store is given twice, by"),
        (["--param", "night_id=x"], [], "every run would continue the same finished one"),
        (["--param", "suit=x"], [], "the pipeline nightly has no parameter 'suit'"),
    ],
)
def test_a_nightly_that_could_not_run_is_refused(
    kubeflow: tuple[Any, str], flexfleet: Any, argv: list[str], sets: list[str], said: str
) -> None:
    server, host = kubeflow
    done = flexfleet("nightly", "--host", host, *argv, sets=sets)
    assert (done.code, said in done.err, server.recurring) == (2, True, []), done.err


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
def test_a_password_is_not_sent_to_kubeflow(
    kubeflow: tuple[Any, str], flexfleet: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, argv: tuple[str, ...]
) -> None:
    server, host = kubeflow
    monkeypatch.chdir(tmp_path)
    done = flexfleet(*argv, "--host", host)
    assert done.code == 2 and "holds a password, and Kubeflow shows parameters" in done.err
    assert not server.runs and not server.versions and "pl4nted" not in done.err
