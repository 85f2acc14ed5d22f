"""A fake server of Kubeflow Pipelines 2.17. It checks every request and response by the models of the API.

The state of a run changes when a client requests it: by `moves`, if a test sets them, else to RUNNING and then to
SUCCEEDED. A terminated run ends as FAILED.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import socket
import struct
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any
from urllib.parse import parse_qs, urlsplit

import kfp_server_api

from flexfleet.kubeflow.retarget import documents
from tests.harness import web
from tests.harness.web import Request

API = "/apis/v2beta1"


def checked(body: Any, model: str) -> Any:
    """Return the body as the model's object. Raises an error for an unknown field or a wrong type."""
    known = getattr(kfp_server_api, model).attribute_map.values()
    assert body.keys() <= set(known), f"{model} has no {sorted(body.keys() - set(known))}"
    return kfp_server_api.ApiClient()._ApiClient__deserialize(body, model)


Answer = Callable[[], tuple[int, Any]]
Spoil = Callable[[Request, Answer], None]
"""Gets the handler of a request, which it answers or does not, and what would answer it."""


def responds(status: int, body: bytes, kind: str = "application/json") -> Spoil:
    """Return a fault: this response in place of the server's."""

    return lambda request, _: request.respond(status, body, {"Content-Type": kind})


def passes(handler: Request, answer: Answer) -> None:
    """Answer as the server does."""
    status, found = answer()
    is_text = isinstance(found, bytes)
    value = found if is_text else json.dumps(found).encode()
    responds(status, value, "text/plain" if is_text else "application/json")(handler, answer)


def refuses(status: int, code: int, text: str) -> Spoil:
    """Return a fault: a refusal by the API itself."""
    return responds(status, json.dumps({"error": text, "code": code, "message": text, "details": []}).encode())


def drops(handler: Request, _: Answer) -> None:
    """Reset the connection before anything is done."""
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    handler.close_connection = True
    handler.wfile.close()
    handler.connection.close()
    handler.wfile = io.BytesIO()  # which the handler flushes


def takes_and(spoil: Spoil) -> Spoil:
    """Do what was requested, and lose the answer."""

    def taken(handler: Request, answer: Answer) -> None:
        answer()
        spoil(handler, answer)

    return taken


def hangs(handler: Request, _: Answer) -> None:
    """Never answer, until the client closes the connection."""
    with contextlib.suppress(OSError):
        handler.connection.recv(1)
    handler.close_connection = True


def called(method: str, path: str) -> str:
    """The name of a call: `GET pipelines/*/versions`."""
    return f"{method} {re.sub('/(?!upload|pod)[^/]+', '/*', path.removeprefix(f'{API}/').lstrip('/'), count=1)}"


TYPES: dict[str, Any] = {"STRING": str, "NUMBER_INTEGER": (int, float), "NUMBER_DOUBLE": (int, float), "STRUCT": dict}
ENDED = ("SUCCEEDED", "SKIPPED", "FAILED", "CANCELED")


def nodes(*tasks: tuple[str, str, int], workflow: str = "train-ab12c") -> list[dict[str, Any]]:
    """The `task_details` of Kubeflow 2.17: name, state and number of the pod of each task.

    Each template is in a retry node, so a task's node has a child `<task>(0)`. A `task_id` is the id of Argo's node;
    the name of a pod has the template between the workflow and the number. `error` is always null.
    """
    made: list[dict[str, Any]] = []

    def add(name: str, state: str, id: str, *children: str) -> None:
        created = f"2026-01-01T00:00:{len(made):02}Z"
        listed = [{"pod_name": child} for child in children]
        made.append(
            {"display_name": name, "state": state, "task_id": id, "create_time": created, "child_tasks": listed}
        )

    add(workflow, "RUNNING", workflow)
    for number, name in enumerate((f"{workflow}(0)", "root", "root(0)", "root-driver", "root-driver(0)")):
        add(name, "RUNNING", f"{workflow}-90{number}")
    for name, state, number in tasks:
        ids = [f"{workflow}-{number}{step}" for step in range(6)]
        add(f"{name}-driver", "SUCCEEDED", ids[4], ids[5])
        add(f"{name}-driver(0)", "SUCCEEDED", ids[5])
        add(name, state, ids[0], ids[1])
        add(f"{name}(0)", state, ids[1], ids[2])
        add("executor", state, ids[2], ids[3])
        add("executor(0)", state, ids[3])
    return made


def pod_of(number: int, workflow: str = "train-ab12c", template: str = "retry-system-container-impl") -> str:
    """The name of the pod of a task with this number in `nodes`."""
    return f"{workflow}-{template}-{number}3"


class Kubeflow:
    def __init__(self) -> None:
        self.pipelines: dict[str, str] = {}
        self.versions: list[dict[str, Any]] = []
        self.experiments: list[dict[str, Any]] = []
        self.runs: list[dict[str, Any]] = []
        self.recurring: list[dict[str, Any]] = []
        self.made = 0
        self.moves: dict[str, list[dict[str, Any]]] = {}
        """Map a run's id to its changes, one for each request. A run that has ended changes only after a retry."""
        self.logs: dict[str, str] = {}
        """The log of each pod, as the UI's server gives it."""
        self.namespace = ""
        """Namespace of the experiments, if the stand-in has several users."""
        self.retried: list[str] = []
        """The ids of the runs that were retried."""
        self.spoils: dict[str, list[Spoil]] = {}
        """Map a call (`called`) to the faults of its next responses. The last one stays."""
        self.heard: list[str] = []
        """The calls, in their order."""

    def ask(self, method: str, path: str, query: dict[str, list[str]], body: bytes) -> tuple[int, Any]:
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
                made = {"pipeline_id": query["pipelineid"][0], "display_name": query["name"][0]}
                made["pipeline_spec"] = self._uploaded(body)
                assert made["pipeline_id"] in self.pipelines.values()
                self.versions.append(made | {"pipeline_version_id": f"v{len(self.versions)}"})
                return 200, self.versions[-1]
            case "GET", ["pipelines", id, "versions"]:
                # A page each: as many as there are.
                at = int(query.get("page_token", ["0"])[0] or 0)
                own = [v for v in self.versions if v["pipeline_id"] == id]
                more = str(at + 1) if at + 1 < len(own) else ""
                return 200, {"pipeline_versions": own[at : at + 1], "next_page_token": more}
            case "GET", ["pipelines", id, "versions", version]:
                return 200, next(v for v in self.versions if v["pipeline_version_id"] == version)
            case "GET", ["experiments"]:
                return 200, {"experiments": self.experiments}
            case "GET", ["experiments", id]:
                found = next(each for each in self.experiments if each["experiment_id"] == id)
                return 200, found | {"namespace": self.namespace}
            case "POST", ["experiments"]:
                checked(json.loads(body), "V2beta1Experiment")
                self.experiments.append(json.loads(body) | {"experiment_id": "e0"})
                return 200, self.experiments[-1]
            case "POST", ["runs"]:
                run = json.loads(body)
                checked(run, "V2beta1Run")
                checked(run["runtime_config"], "V2beta1RuntimeConfig")
                checked(run["pipeline_version_reference"], "V2beta1PipelineVersionReference")
                self._typed(run)
                return 200, self._begin(run)
            case "GET", ["runs", id]:
                return self._asked(id)
            case "POST", ["runs", text]:
                id, _, verb = text.partition(":")
                return self._told(id, verb)
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
                self._typed(job)
                self.made += 1
                self.recurring.append(job | {"recurring_run_id": f"j{self.made}", "status": "ENABLED"})
                return 200, self.recurring[-1]
            case "GET", ["k8s", "pod", "logs"]:
                pod = query["podname"][0]
                if self.namespace and query.get("podnamespace") != [self.namespace]:
                    return 422, b"podnamespace argument is required"
                return (200, self.logs[pod].encode()) if pod in self.logs else (500, b"no log of this pod")
            case "POST", ["recurringruns", text]:
                id, _, verb = text.partition(":")
                assert verb == "disable"
                job = next(job for job in self.recurring if job["recurring_run_id"] == id)
                job |= {"mode": "DISABLE", "status": "DISABLED"}
                return 200, {}
        return 404, {"error": f"no {method} {path}"}

    def _typed(self, run: dict[str, Any]) -> None:
        """Its parameters are fields of its pipeline, of their types."""
        id = run["pipeline_version_reference"]["pipeline_version_id"]
        (version,) = (each for each in self.versions if each["pipeline_version_id"] == id)
        fields = version["pipeline_spec"]["pipeline_spec"]["root"]["inputDefinitions"]["parameters"]
        for name, value in (run["runtime_config"].get("parameters") or {}).items():
            kind = fields[name]["parameterType"]
            fits = isinstance(value, TYPES[kind]) and not isinstance(value, bool)
            assert fits and (kind != "NUMBER_INTEGER" or value == int(value)), f"{name} is no {kind}: {value!r}"

    def _begin(self, run: dict[str, Any]) -> dict[str, Any]:
        now = datetime.now(UTC).isoformat()
        self.runs.append(run | {"run_id": f"r{len(self.runs) + 1}", "state": "PENDING", "created_at": now})
        self._remember(self.runs[-1])
        return self.runs[-1]

    def _asked(self, id: str) -> tuple[int, Any]:
        run = next((run for run in self.runs if run["run_id"] == id), None)
        if run is None:
            return 404, {"error": f"Run {id} not found", "code": 5}
        before = run["state"]
        if run["state"] in ENDED:
            pass
        elif self.moves.get(id):
            run |= self.moves[id].pop(0)
        elif id not in self.moves:
            # A terminated run of 2.17 ends as FAILED; CANCELING is in its history only.
            following = {"PENDING": "RUNNING", "CANCELING": "FAILED"}
            run["state"] = following.get(run["state"], "SUCCEEDED")
        if run["state"] != before:
            self._remember(run)
        if run["state"] in ENDED:
            run.setdefault("finished_at", datetime.now(UTC).isoformat())
        checked(run, "V2beta1Run")
        for each in run.get("run_details", {}).get("task_details", []):
            checked(each, "V2beta1PipelineTaskDetail")
        return 200, run

    def _told(self, id: str, verb: str) -> tuple[int, Any]:
        run = next(run for run in self.runs if run["run_id"] == id)
        known = {"terminate": (("PENDING", "RUNNING"), "CANCELING"), "retry": (("FAILED",), "RUNNING")}
        assert verb in known, f"no verb {verb}"
        befitting, state = known[verb]
        if run["state"] not in befitting:
            return 400, {"error": f"a run that is {run['state']} takes no {verb}", "code": 3}
        run["state"] = state
        run.pop("finished_at", None)
        self._remember(run)
        if verb == "retry":
            self.retried.append(id)
            self.logs.clear()  # the pods of failed tasks are deleted
        return 200, {}

    def _remember(self, run: dict[str, Any]) -> None:
        about = {"state": run["state"], "update_time": "2026-01-01T00:00:00Z"}
        run["state_history"] = [*run.get("state_history", []), about]

    def _uploaded(self, body: bytes) -> dict[str, Any]:
        text = body.split(b"\r\n\r\n", 1)[1].rsplit(b"\r\n--", 1)[0].decode()
        spec, platform = documents(text)
        assert spec["schemaVersion"] and platform["platforms"]
        return {"pipeline_spec": spec, "platform_spec": platform}


@contextlib.contextmanager
def serving() -> Iterator[tuple[Kubeflow, str]]:
    """Yield the fake server and its address."""
    found = Kubeflow()

    def answer(request: Request) -> None:
        body, url = request.body(), urlsplit(request.path)
        call = called(request.command, url.path)
        found.heard.append(call)

        def asked() -> tuple[int, Any]:
            try:
                return found.ask(request.command, url.path, parse_qs(url.query), body)
            except AssertionError as error:
                return 400, {"error": str(error)}

        spoils = found.spoils.get(call) or [passes]
        (spoils.pop(0) if len(spoils) > 1 else spoils[0])(request, asked)

    with web.serving(answer) as address:
        yield found, address
