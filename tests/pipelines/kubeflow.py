"""A stand-in for Kubeflow Pipelines 2.17 that checks every request, and its own answers, by the models of the API.

A run moves when a client asks for it: by `moves`, if a test sets them, else to RUNNING and then to SUCCEEDED. A
terminated run ends as FAILED. Deleting a recurring run deletes the Workflows of its runs.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import kfp_server_api

from flexfleet.kubeflow.retarget import documents


class Server(ThreadingHTTPServer):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.over = threading.Event()
        """Ends answers that would never end, and so their threads."""


API = "/apis/v2beta1"


def checked(body: Any, model: str) -> Any:
    """The body, if it is what the model says: no field that it does not have, none of another type."""
    known = getattr(kfp_server_api, model).attribute_map.values()
    assert body.keys() <= set(known), f"{model} has no {sorted(body.keys() - set(known))}"
    return kfp_server_api.ApiClient()._ApiClient__deserialize(body, model)


Spoil = Callable[[BaseHTTPRequestHandler, Callable[[], tuple[int, Any]]], None]
"""Gets the handler of a request, which it answers or does not, and what would answer it."""


Answer = Callable[[], tuple[int, Any]]


def says(status: int, body: bytes, kind: str = "application/json") -> Spoil:
    """Answer with this in place of the server."""

    def spoil(handler: BaseHTTPRequestHandler, _: Answer) -> None:
        handler.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(body))}.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(body)

    return spoil


def refuses(status: int, code: int, text: str) -> Spoil:
    """Refuse as the API itself does."""
    return says(status, json.dumps({"error": text, "code": code, "message": text, "details": []}).encode())


def answers(handler: BaseHTTPRequestHandler, answer: Answer) -> None:
    """Answer as the server does."""
    status, told = answer()
    says(status, json.dumps(told).encode())(handler, answer)


def drops(handler: BaseHTTPRequestHandler, _: Answer) -> None:
    """Reset the connection before anything is done."""
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    handler.close_connection = True
    handler.wfile.close()
    handler.connection.close()
    handler.wfile = io.BytesIO()  # which the handler flushes


def takes_and(spoil: Spoil) -> Spoil:
    """Do what was requested, and lose the answer."""

    def taken(handler: BaseHTTPRequestHandler, answer: Answer) -> None:
        answer()
        spoil(handler, answer)

    return taken


def hangs(handler: BaseHTTPRequestHandler, _: Answer) -> None:
    """Never answer, until the client closes the connection."""
    with contextlib.suppress(OSError):
        handler.connection.recv(1)
    handler.close_connection = True


def called(method: str, path: str) -> str:
    """The name of a call: `GET pipelines/*/versions`."""
    return f"{method} {re.sub('/(?!upload|pod)[^/]+', '/*', path.removeprefix(f'{API}/').lstrip('/'), count=1)}"


TYPES: dict[str, Any] = {"STRING": str, "NUMBER_INTEGER": (int, float), "NUMBER_DOUBLE": (int, float), "STRUCT": dict}
ENDED = ("SUCCEEDED", "SKIPPED", "FAILED", "CANCELED")


def task(name: str, state: str, id: str = "", error: str = "") -> dict[str, Any]:
    """One of a run's `task_details`, as Kubeflow 2.16 has it."""
    about = {"display_name": name, "state": state, "task_id": id or f"{name}-1", "create_time": "2026-01-01T00:00:00Z"}
    return about | ({"error": {"code": 2, "message": error}} if error else {})


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
        self.refuse = 0
        self.moves: dict[str, list[dict[str, Any]]] = {}
        """By a run's id: what changes of it each time that a client asks for it. An ended run needs a retry first."""
        self.faults: list[int] = []
        """Statuses that the next questions for a run are answered with; 0 breaks the connection, 200 is a page."""
        self.asked = 0
        """How often a run was asked for."""
        self.logs: dict[str, str] = {}
        """The log of each pod, as the UI's server gives it."""
        self.namespace = ""
        """Namespace of the experiments, if the stand-in has several users."""
        self.retried: list[str] = []
        """The ids of the runs that were retried."""
        self.lost: set[str] = set()
        """Runs whose Workflow Kubernetes has deleted with its owner, the recurring run. Their state never changes."""
        self.artifacts: dict[str, bytes] = {}
        """What the UI's server gives out, by URI (minio://bucket/key)."""
        self.spoils: dict[str, list[Spoil]] = {}
        """By a call (`called`): what happens in place of its next answers, one each. The last one stays."""
        self.heard: list[str] = []
        """The calls, in their order."""

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
            case "GET", ["runs"]:
                assert query["experiment_id"] == ["e0"]
                listed = [run for run in self.runs if run["experiment_id"] == "e0"]
                if "filter" in query:
                    (wanted,) = json.loads(query["filter"][0])["predicates"]
                    assert (wanted["operation"], wanted["key"]) == ("IS_SUBSTRING", "description")
                    listed = [run for run in listed if wanted["stringValue"] in run.get("description", "")]
                return 200, {"runs": listed}
            case "GET", ["runs", id]:
                self.asked += 1
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
            case "GET", ["artifacts", "get"]:
                uri = "{}://{}/{}".format(*(query[name][0] for name in ("source", "bucket", "key")))
                return (200, self.artifacts[uri]) if uri in self.artifacts else (404, {"error": f"no {uri}"})
            case "GET", ["k8s", "pod", "logs"]:
                pod = query["podname"][0]
                if self.namespace and query.get("podnamespace") != [self.namespace]:
                    return 422, b"podnamespace argument is required"
                return (200, self.logs[pod].encode()) if pod in self.logs else (500, b"no log of this pod")
            case "POST", ["recurringruns", text]:
                id, _, verb = text.partition(":")
                assert verb in ("disable", "enable")
                job = next(job for job in self.recurring if job["recurring_run_id"] == id)
                job |= {"mode": verb.upper(), "status": f"{verb.upper()}D"}
                return 200, {}
            case "GET", ["recurringruns", id]:
                return 200, next(job for job in self.recurring if job["recurring_run_id"] == id)
            case "DELETE", ["recurringruns", id]:
                left = [job for job in self.recurring if job["recurring_run_id"] != id]
                assert len(left) == len(self.recurring) - 1
                self.recurring = left
                active = (run for run in self.runs if run["state"] not in ENDED)
                self.lost |= {run["run_id"] for run in active if run.get("recurring_run_id") == id}
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

    def fire(self, recurring: dict[str, Any]) -> dict[str, Any]:
        """The hour of a recurring run has come."""
        same = ("display_name", "experiment_id", "runtime_config", "pipeline_version_reference", "recurring_run_id")
        return self._begin({name: recurring[name] for name in same})

    def _asked(self, id: str) -> tuple[int, Any]:
        if self.faults:
            fault = self.faults.pop(0)
            return fault, b"<html>Log in</html>" if fault == 200 else {"error": "upstream connect error", "code": 14}
        run = next((run for run in self.runs if run["run_id"] == id), None)
        if run is None:
            return 404, {"error": f"Run {id} not found", "code": 5}
        before = run["state"]
        if id in self.lost or run["state"] in ENDED:
            pass
        elif self.moves.get(id):
            run |= self.moves[id].pop(0)
        elif run["state"] not in ENDED and id not in self.moves:
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
    """The stand-in, and its address."""
    found = Kubeflow()

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            url = urlsplit(self.path)
            call = called(self.command, url.path)
            found.heard.append(call)

            def answer() -> tuple[int, Any]:
                try:
                    return found.ask(self.command, url.path, parse_qs(url.query), body)
                except AssertionError as error:
                    return 400, {"error": str(error)}

            if left := found.spoils.get(call):
                (left.pop(0) if len(left) > 1 else left[0])(self, answer)
                return
            status, told = answer()
            if status == 0:
                self.connection.close()
                return
            value = told if isinstance(told, bytes) else json.dumps(told).encode()
            self.send_response(status)
            self.send_header("Content-Type", "text/plain" if isinstance(told, bytes) else "application/json")
            self.send_header("Content-Length", str(len(value)))
            self.end_headers()
            self.wfile.write(value)

        do_GET = do_POST = do_DELETE = _answer

        def log_message(self, *_: object) -> None:
            """Quiet."""

    server = Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield found, f"http://127.0.0.1:{server.server_port}"
    server.over.set()
    server.shutdown()
