"""Submitting, against a stand-in that checks every request by the models of Kubeflow's published API."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import kfp_server_api
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from components.overrides import config_from, parameters_of
from fl_engine.config import Config, load_config
from fl_engine.errors import ConfigError, EnvironmentFailure
from pipelines.submit import submit

API = "/apis/v2beta1"


def checked(body: Any, model: str) -> Any:
    """The body, if it is what the model says: no field that it does not have, none of another type."""
    known = getattr(kfp_server_api, model).attribute_map.values()
    assert body.keys() <= set(known), f"{model} has no {sorted(body.keys() - set(known))}"
    return kfp_server_api.ApiClient()._ApiClient__deserialize(body, model)


class Kubeflow:
    def __init__(self) -> None:
        self.pipelines: dict[str, str] = {}
        self.versions: list[dict[str, str]] = []
        self.experiments: list[dict[str, Any]] = []
        self.runs: list[dict[str, Any]] = []
        self.recurring: list[dict[str, Any]] = []
        self.made = 0
        self.refuse = 0

    def ask(self, method: str, path: str, query: dict[str, list[str]], body: bytes) -> tuple[int, Any]:
        if self.refuse and path != f"{API}/healthz":
            return self.refuse, {"error": "no such right", "code": 7}
        match method, path.removeprefix(API).split("/")[1:]:
            case "GET", ["healthz"]:
                return 200, {"multi_user": False}
            case "GET", ["pipelines"]:
                (wanted,) = json.loads(query["filter"][0])["predicates"]
                assert (wanted["operation"], wanted["key"]) in ((1, "display_name"), ("EQUALS", "display_name"))
                found = [{"pipeline_id": i, "display_name": n} for n, i in self.pipelines.items()]
                return 200, {"pipelines": [p for p in found if p["display_name"] == wanted["stringValue"]]}
            case "POST", ["pipelines", "upload"]:
                self._uploaded(body)
                id = self.pipelines[query["name"][0]] = f"p{len(self.pipelines)}"
                return 200, {"pipeline_id": id, "display_name": query["name"][0]}
            case "POST", ["pipelines", "upload_version"]:
                self._uploaded(body)
                made = {"pipeline_id": query["pipelineid"][0], "display_name": query["name"][0]}
                assert made["pipeline_id"] in self.pipelines.values()
                self.versions.append(made | {"pipeline_version_id": f"v{len(self.versions)}"})
                return 200, self.versions[-1]
            case "GET", ["pipelines", id, "versions"]:
                # A page each: as many as there are.
                at = int(query.get("page_token", ["0"])[0] or 0)
                own = [v for v in self.versions if v["pipeline_id"] == id]
                more = str(at + 1) if at + 1 < len(own) else ""
                return 200, {"pipeline_versions": own[at : at + 1], "next_page_token": more}
            case "GET", ["experiments"]:
                return 200, {"experiments": self.experiments}
            case "POST", ["experiments"]:
                checked(json.loads(body), "V2beta1Experiment")
                self.experiments.append(json.loads(body) | {"experiment_id": "e0"})
                return 200, self.experiments[-1]
            case "POST", ["runs"]:
                run = json.loads(body)
                checked(run, "V2beta1Run")
                checked(run["runtime_config"], "V2beta1RuntimeConfig")
                checked(run["pipeline_version_reference"], "V2beta1PipelineVersionReference")
                self.runs.append(run)
                return 200, run | {"run_id": f"r{len(self.runs)}"}
            case "GET", ["recurringruns"]:
                at = int(query.get("page_token", ["0"])[0] or 0)
                more = str(at + 1) if at + 1 < len(self.recurring) else ""
                assert query["experiment_id"] == ["e0"]
                return 200, {"recurringRuns": self.recurring[at : at + 1], "next_page_token": more}
            case "POST", ["recurringruns"]:
                job = json.loads(body)
                checked(job, "V2beta1RecurringRun")
                checked(job["trigger"], "V2beta1Trigger")
                checked(job["runtime_config"], "V2beta1RuntimeConfig")
                self.made += 1
                self.recurring.append(job | {"recurring_run_id": f"j{self.made}"})
                return 200, self.recurring[-1]
            case "DELETE", ["recurringruns", id]:
                left = [job for job in self.recurring if job["recurring_run_id"] != id]
                assert len(left) == len(self.recurring) - 1
                self.recurring = left
                return 200, {}
        return 404, {"error": f"no {method} {path}"}

    def _uploaded(self, body: bytes) -> None:
        text = body.split(b"\r\n\r\n", 1)[1].rsplit(b"\r\n--", 1)[0]
        spec, platform = yaml.safe_load_all(text)
        assert spec["schemaVersion"] and platform["platforms"]


@pytest.fixture
def kubeflow() -> Iterator[tuple[Kubeflow, str]]:
    found = Kubeflow()

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            url = urlsplit(self.path)
            try:
                status, told = found.ask(self.command, url.path, parse_qs(url.query), body)
            except AssertionError as error:
                status, told = 400, {"error": str(error)}
            value = json.dumps(told).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(value)))
            self.end_headers()
            self.wfile.write(value)

        do_GET = do_POST = do_DELETE = _answer

        def log_message(self, *_: object) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield found, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def test_a_run_is_started_and_a_graph_that_has_not_changed_is_not_uploaded_again(
    kubeflow: tuple[Kubeflow, str], monkeypatch: pytest.MonkeyPatch
) -> None:
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
    monkeypatch.setattr("pipelines.submit.compiled", lambda name: _other(name))
    changed = submit("train", {}, host=host)
    assert changed.uploaded and changed.version != first.version and len(server.versions) == 2
    monkeypatch.undo()
    assert submit("train", {}, host=host).uploaded is False, "an old version is found on the second page"


def _other(name: str) -> str:
    from pipelines.compile import compiled

    return compiled(name).replace("Number of devices", "Devices")


def test_the_command_gives_what_differs_from_the_defaults(
    kubeflow: tuple[Kubeflow, str], flexfleet: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, host = kubeflow
    monkeypatch.chdir(tmp_path)
    sets = ["model.name=vgg16", "model.width=0.25", "run.remote=s3://bucket/runs", "run.backend=kubernetes"]
    sets += ["kubernetes.pools={weak: {memory: 2Gi}}"]
    done = flexfleet("submit", "train", "--host", host, "--param", "run_id=mine", "--json", sets=sets)
    assert done.code == 0, done.err
    given = server.runs[0]["runtime_config"]["parameters"]
    assert (given["model"], given["store_uri"], given["run_id"]) == ("vgg16", "s3://bucket/runs", "mine")
    assert given["mlflow_uri"] == "", "a data base of this machine is no tracking there"
    assert given["advanced"]["run.backend"] == "kubernetes" and given["advanced"]["model.width"] == 0.25
    assert done.json["run_id"] == "r1" and done.json["uploaded"] is True
    done = flexfleet("submit", "compare", "--host", host, "--param", "algorithms=flexfl,fedprox")
    assert done.code == 0, done.err
    given = server.runs[1]["runtime_config"]["parameters"]
    assert given["algorithms"] == "flexfl,fedprox" and "seed" not in given and "trials" not in given
    assert "(new)" in done.out


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


@settings(max_examples=60, deadline=None)
@given(values=CONFIGS)
def test_what_is_submitted_makes_the_same_configuration_there(values: dict[str, Any]) -> None:
    config = load_config(None, [f"{path}={json.dumps(value)}" for path, value in values.items()])
    parameters, advanced = parameters_of(config)
    there = config_from(json.loads(json.dumps(parameters)), json.loads(json.dumps(advanced)))
    if "tracking.mlflow" not in values:
        there = there.model_copy(update={"tracking": Config().tracking})
    assert there == config


def test_what_is_wrong_is_said_before_anything_is_uploaded(kubeflow: tuple[Kubeflow, str]) -> None:
    server, host = kubeflow
    with pytest.raises(ConfigError, match=r"no pipeline is named 'trian'.*train"):
        submit("trian", {}, host=host)
    with pytest.raises(ConfigError, match=r"the pipeline train has no parameter 'round'.*rounds"):
        submit("train", {"round": 3}, host=host)
    assert not server.pipelines
    server.refuse = 403
    with pytest.raises(EnvironmentFailure, match=r"refused: 403 .*no such right"):
        submit("train", {}, host=host)


def test_a_server_that_is_not_there_is_said() -> None:
    with pytest.raises(EnvironmentFailure, match=r"http://127\.0\.0\.1:9 cannot be reached"):
        submit("train", {}, host="http://127.0.0.1:9")


# ----------------------------------------------------------------------------------------------- every night
def test_the_nightly_is_made_once_and_replaced_by_its_name(
    kubeflow: tuple[Kubeflow, str], flexfleet: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, host = kubeflow
    monkeypatch.chdir(tmp_path)
    sets = ["tracking.mlflow=http://mlflow:5000", "run.remote=s3://bucket/nights", "publish.onnx=false"]
    done = flexfleet("nightly", "--host", host, "--name", "mine", "--json", sets=sets)
    assert done.code == 0, done.err
    (job,) = server.recurring
    assert (job["display_name"], job["mode"], job["no_catchup"]) == ("mine", "ENABLE", True)
    assert int(job["max_concurrency"]) == 1, "one at a time"
    assert job["trigger"]["cron_schedule"]["cron"] == "0 0 2 * * *"
    assert job["runtime_config"]["parameters"] == {
        "suite": "digits", "mlflow_uri": "http://mlflow:5000", "store_uri": "s3://bucket/nights",
        "advanced": {"publish.onnx": False},
    }  # fmt: skip
    assert done.json["recurring_run_id"] == "j1" and done.json["replaced"] == 0
    other = flexfleet("nightly", "--host", host, "--name", "another")
    assert other.code == 0 and len(server.recurring) == 2
    again = flexfleet("nightly", "--host", host, "--name", "mine", "--cron", "0 30 3 * * 1-5")
    assert again.code == 0 and "in place of 1" in again.out, again.err
    assert [(j["recurring_run_id"], j["display_name"]) for j in server.recurring] == [("j2", "another"), ("j3", "mine")]
    assert server.recurring[1]["trigger"]["cron_schedule"]["cron"] == "0 30 3 * * 1-5"


@pytest.mark.parametrize(
    ("argv", "sets", "said"),
    [
        (["--cron", "0 2 * * *"], [], "cron has six fields in Kubeflow, seconds first"),
        (["--suite", "digit"], [], "no suite is named 'digit': digits"),
        ([], ["training.lr=1"], "a suite says what is measured"),
        ([], ["run.stor=x"], "unknown parameter 'run.stor'"),
        (["--param", "suit=x"], [], "the pipeline nightly has no parameter 'suit'"),
    ],
)
def test_a_nightly_that_could_not_run_is_refused(
    kubeflow: tuple[Kubeflow, str], flexfleet: Any, argv: list[str], sets: list[str], said: str
) -> None:
    server, host = kubeflow
    done = flexfleet("nightly", "--host", host, *argv, sets=sets)
    assert (done.code, said in done.err, server.recurring) == (2, True, []), done.err
