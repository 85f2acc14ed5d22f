"""A Kubernetes API server of a few kinds, with a kubelet that runs the pods' commands as subprocesses.

Created objects are validated against the published schemas. `script` decides the fate of a pod, `refuse` which pods are
not created, `room` how many have a node at a time, `admits` when a queue admits a Job (kueue.py). The next responses
can be errors, or break the connection.
"""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import parse_qs, urlsplit

import yaml

from tests.harness import web
from tests.harness.web import Request
from tests.k8s import kueue, valid

Resource = dict[str, Any]
VERSION = "1.33"
KINDS = {"configmaps": "ConfigMap", "events": "Event", "jobs": "Job", "pods": "Pod", "secrets": "Secret"}
UNSCHEDULABLE = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
PATH = re.compile(r"/(?:api/v1|apis/batch/v1)/namespaces/(?P<namespace>[^/]+)/(?P<kind>[a-z]+)(?:/(?P<name>[^/]+))?")

Script = Callable[[Resource, int, int], str]
"""Maps (job, index, number of earlier starts) to the fate of the pod:

- run, image, unschedulable;
- vanish: its node is lost after the work is done, before the pod has ended.
"""


class Process(Protocol):
    """A container's process."""

    def poll(self) -> int | None: ...

    def kill(self) -> None: ...


def runs(job: Resource, index: int, before: int) -> str:
    return "run"


def start(command: list[str], env: dict[str, str], log: Path) -> Process:
    """Start a container's command with this environment, and write its output to `log`."""
    with log.open("w") as out:
        return subprocess.Popen(command, env=env, cwd=Path(__file__).parents[2], stdout=out, stderr=subprocess.STDOUT)


@dataclass
class Cluster:
    folder: Path
    image: str | None = None
    """The kubelet runs pods in containers of this image; None: as processes."""
    python: str = sys.executable
    """The interpreter for commands that begin with `python`."""
    script: Script = runs
    start: Callable[[list[str], dict[str, str], Path], Process] = start
    objects: dict[tuple[str, str], Resource] = field(default_factory=dict)
    faults: list[int] = field(default_factory=list)
    """Statuses of the next responses; 0 breaks the connection."""
    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(verb, kind), as a Role names them."""
    refuse: Callable[[Resource, int], str] = lambda job, index: ""
    """Maps (job, index) to the reason why no pod is created now; empty: a pod is created."""
    room: threading.Semaphore | None = None
    """Number of pods with a node at a time; the others are unschedulable. None: no limit."""
    admits: Callable[[Resource], bool] = lambda job: True
    """Whether the queue of a Job admits it now; called repeatedly."""
    nodes: list[Resource] | None = None
    """Nodes that a client may list; None: it may not."""
    denied: set[tuple[str, str]] = field(default_factory=set)
    """(verb, kind) that a review of the client's rights denies."""
    lost: set[str] = field(default_factory=set)
    """Pods on lost nodes."""
    created: list[Resource] = field(default_factory=list)
    lock: threading.RLock = field(default_factory=threading.RLock)
    slots: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(2))
    logs: list[str] = field(default_factory=list)
    running: dict[str, Process] = field(default_factory=dict)
    """By the pod's name."""

    # --------------------------------------------------------------------------------------------- API server
    def ask(self, method: str, path: str, query: dict[str, list[str]], body: Resource | None) -> tuple[int, Resource]:
        if path.endswith("/selfsubjectaccessreviews"):
            asked = (body or {})["spec"]["resourceAttributes"]
            return 201, {"status": {"allowed": (asked["verb"], asked["resource"]) not in self.denied}}
        if path == "/api/v1/nodes":
            return (403, {"message": "nodes is forbidden"}) if self.nodes is None else (200, {"items": self.nodes})
        match = PATH.fullmatch(path)
        if match is None or match["kind"] not in KINDS or match["namespace"] != "flexfleet-clients":
            return 404, {"kind": "Status", "message": f"no {path}"}
        kind, name = match["kind"], match["name"]
        verbs = {"POST": "create", "DELETE": "delete", "PATCH": "patch", "GET": "get" if name else "list"}
        verb = verbs[method]
        with self.lock:
            self.calls[verb, kind] += 1
            if verb == "list":
                labels, fields = (pairs(query, name) for name in ("labelSelector", "fieldSelector"))
                assert labels or fields, "what is listed is chosen"
                found = [o for (k, _), o in sorted(self.objects.items()) if k == kind]
                items = [o for o in found if has(o, labels) and is_so(o, fields)]
                return 200, {"items": json.loads(json.dumps(items)), "metadata": {}}
            if verb == "create":
                return self._create(kind, body or {}, dry="dryRun" in query)
            one = self.objects.get((kind, name))
            if one is None:
                return 404, {"kind": "Status", "message": f"{kind} {name} not found"}
            if verb == "delete":
                self._delete(kind, name)
            if verb == "patch":
                return self._patch(kind, one, body or {})
            return 200, one

    def _patch(self, kind: str, one: Resource, body: Resource) -> tuple[int, Resource]:
        """Change the size of a Job: both numbers together, if they are equal before and after."""
        spec = body.get("spec", {})
        assert kind == "jobs" and body.keys() == {"spec"} and spec.keys() <= {"completions", "parallelism"}
        after = one["spec"] | spec
        equal = all(each["completions"] == each["parallelism"] for each in (one["spec"], after))
        if one["spec"]["completions"] != after["completions"] and not equal:
            return 422, {"kind": "Status", "message": "spec.completions: field is immutable"}
        one["spec"] |= spec
        return 200, one

    def _create(self, kind: str, body: Resource, dry: bool = False) -> tuple[int, Resource]:
        validate(kind, body)
        if dry:
            return 201, body
        name = body["metadata"]["name"]
        if (kind, name) in self.objects:
            return 409, {"kind": "Status", "reason": "AlreadyExists", "message": f"{kind} {name} already exists"}
        size = sum(len(v) for v in body.get("stringData", {}).values())
        if size > 2**20:
            return 422, {"kind": "Status", "message": f"a Secret holds at most 1048576 bytes, got {size}"}
        made = json.loads(json.dumps(body))
        made["metadata"]["uid"] = str(uuid.uuid4())
        made["status"] = {}
        if kind == "jobs":
            kueue.receive(made)
        if kind == "secrets":
            told = {name: base64.b64encode(text.encode()).decode() for name, text in made.get("stringData", {}).items()}
            made["data"] = {**made.get("data", {}), **told}
        owners = {owner["uid"] for owner in made["metadata"].get("ownerReferences", ())}
        orphan = bool(owners) and not owners & {o["metadata"].get("uid") for o in self.objects.values()}
        self.objects[kind, name] = made
        self.created.append(made)
        if orphan:  # Kubernetes' garbage collector
            self._delete(kind, name)
        elif kind == "jobs":
            threading.Thread(target=self._run_job, args=(made,), daemon=True).start()
        return 201, made

    def _delete(self, kind: str, name: str) -> None:
        if kind == "pods" and name in self.lost:  # its node decides when it ends
            self.objects["pods", name]["metadata"] |= {"deletionTimestamp": now(), "deletionGracePeriodSeconds": 5}
            return
        gone = self.objects.pop((kind, name))
        uid = gone["metadata"]["uid"]
        for (k, n), other in list(self.objects.items()):
            if any(o["uid"] == uid for o in other["metadata"].get("ownerReferences", ())):
                self._delete(k, n)

    def alive(self, job: Resource) -> bool:
        return self.objects.get(("jobs", job["metadata"]["name"])) is job

    # ------------------------------------------------------------------------------------- Job controller, kubelet
    def _run_job(self, job: Resource) -> None:
        spec, results = job["spec"], dict[int, bool]()
        threads: dict[int, threading.Thread] = {}

        def till_its_end(index: int) -> None:
            failures = before = 0
            while self.alive(job) and index < spec["completions"]:
                if not kueue.admitted(self, job) or not self._allowed(job, index):
                    return
                end = self._pod(job, index, before, failures)
                before += 1
                if end == "ignored":
                    continue
                if end == "ok" or failures >= spec["backoffLimitPerIndex"]:
                    with self.lock:
                        results[index] = end == "ok"
                        for name, good in (("completedIndexes", True), ("failedIndexes", False)):
                            job["status"][name] = ",".join(str(i) for i in sorted(results) if results[i] is good)
                    return
                failures += 1
                time.sleep(min(0.1 * 2 ** (failures - 1), 1.0))

        while self.alive(job) and len(results) < spec["completions"]:
            for index in range(spec["completions"]):
                if index not in threads:
                    threads[index] = threading.Thread(target=till_its_end, args=(index,), daemon=True)
                    threads[index].start()
            time.sleep(0.02)
        with self.lock:
            good = all(results.values())
            kind = "Complete" if good else "Failed"
            job["status"]["conditions"] = [{"type": kind, "status": "True", "reason": "" if good else "FailedIndexes"}]
            job["over"] = True

    def _acquire(self, some: threading.Semaphore, job: Resource) -> bool:
        """Return False if the Job ended first."""
        while self._goes_on(job):
            if some.acquire(timeout=0.02):
                return True
        return False

    def _goes_on(self, job: Resource) -> bool:
        return self.alive(job) and "over" not in job

    def _allowed(self, job: Resource, index: int) -> bool:
        """Wait until a pod may be created, and report the reason in an event. Return False if the Job ended first."""
        while self._goes_on(job):
            why = self.refuse(job, index)
            if not why:
                return True
            name = f"{job['metadata']['name']}.refused"
            about = {"kind": "Job", "name": job["metadata"]["name"], "uid": job["metadata"]["uid"]}
            event = {
                "metadata": {"name": name, "uid": str(uuid.uuid4())},  # nobody's: it outlives its Job
                "involvedObject": about,
                "reason": "FailedCreate",
                "message": f'Error creating: pods "{job["metadata"]["name"]}-{index}-x" is forbidden: {why}',
                "lastTimestamp": now(),
            }
            with self.lock:
                if self.alive(job):
                    self.objects["events", name] = event
            time.sleep(0.05)
        return False

    def _pod(self, job: Resource, index: int, before: int, failures: int) -> str:
        """One pod from start to end: ok, failed, final (no retry) or ignored (does not count)."""
        fate = self.script(job, index, before)
        template = job["spec"]["template"]
        pod: Resource = {
            "metadata": {
                "name": f"{job['metadata']['name']}-{index}-{before}",
                "labels": {**template["metadata"]["labels"], "batch.kubernetes.io/job-name": job["metadata"]["name"]},
                "annotations": {"batch.kubernetes.io/job-completion-index": str(index)},
                "ownerReferences": [{"uid": job["metadata"]["uid"]}],
                "uid": str(uuid.uuid4()),
                "creationTimestamp": now(),
            },
            "spec": template["spec"],
            "status": {"phase": "Pending"},
        }
        with self.lock:
            if not self.alive(job):
                return "final"
            if kueue.suspended(job):
                return "ignored"
            self.objects["pods", pod["metadata"]["name"]] = pod
        return self._waits(job, pod, index, fate)

    def _waits(self, job: Resource, pod: Resource, index: int, fate: str) -> str:
        """Wait for a node, and run there."""
        status = pod["status"]
        if fate in ("image", "unschedulable"):
            if fate == "image":
                waiting = {"reason": "ImagePullBackOff", "message": "Back-off pulling image"}
                status["containerStatuses"] = self._statuses({"waiting": waiting})
            else:
                message = "0/3 nodes are available: 3 node(s) didn't match Pod's node affinity/selector"
                status["conditions"] = [{**UNSCHEDULABLE, "message": message}]
            while self._goes_on(job):
                time.sleep(0.05)
            return "final"
        if self.room is None:
            return self._on_a_node(job, pod, index, fate)
        message = "0/2 nodes are available: 1 Insufficient cpu, 1 node(s) had untolerated taint {other: }."
        status["conditions"] = [{**UNSCHEDULABLE, "message": message}]
        if not self._acquire(self.room, job):
            return "final"
        try:
            del status["conditions"]
            return self._on_a_node(job, pod, index, fate)
        finally:
            self.room.release()

    def _on_a_node(self, job: Resource, pod: Resource, index: int, fate: str) -> str:
        status, pod["spec"] = pod["status"], {**pod["spec"], "nodeName": "node"}
        while ("secrets", job["metadata"]["name"]) not in self.objects:  # a kubelet tries again to mount it
            if not self._goes_on(job):
                return "final"
            time.sleep(0.01)
        status |= {"phase": "Running", "containerStatuses": self._statuses({"running": {}})}
        code, message = self._execute(job, pod, index)
        if not self.alive(job):
            return "final"
        if fate == "vanish":
            status |= {"phase": "Failed", "conditions": [{"type": "DisruptionTarget", "status": "True"}]}
            return "ignored"
        reason = "Completed" if code == 0 else "OOMKilled" if code == 137 else "Error"
        over = {"exitCode": code, "reason": reason, "message": message}
        status["containerStatuses"] = self._statuses({"terminated": over})
        status["phase"] = "Failed" if code else "Succeeded"
        return "ok" if code == 0 else "failed"

    @staticmethod
    def _statuses(client: Resource) -> list[Resource]:
        return [{"name": "client", "state": client}]

    def lose(self, name: str) -> None:
        """Make the node of a pod unreachable."""
        with self.lock:
            self.lost.add(name)
            conditions = [{"type": "Ready", "status": "False"}, {"type": "ContainersReady", "status": "True"}]
            self.objects["pods", name]["status"]["conditions"] = conditions

    def _execute(self, job: Resource, pod: Resource, index: int) -> tuple[int, str]:
        (container,) = pod["spec"]["containers"]
        name = job["metadata"]["name"]
        invitations = self.objects["secrets", name]["stringData"]
        place = self.folder / pod["metadata"]["name"]
        place.mkdir(parents=True, exist_ok=True)
        (mount,) = (mount for mount in container["volumeMounts"] if mount["name"] == "invitation")
        assert mount["subPathExpr"] == "$(JOB_COMPLETION_INDEX)"
        (place / "invitation.json").write_text(invitations[str(index)])
        (place / "memory.max").write_text(str(quantity(container["resources"]["limits"]["memory"])))
        env = {"PATH": os.environ["PATH"], "JOB_COMPLETION_INDEX": str(index), "FLEXFLEET_CGROUP": str(place)}
        env["FLEXFLEET_PROC"] = str(place)  # a node that says nothing of its memory
        for variable in container["env"]:
            path = variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath", "")
            env[variable["name"]] = pod["metadata"]["uid"] if path == "metadata.uid" else variable["value"]
        env["FLEXFLEET_TERMINATION_LOG"] = str(place / "termination-log")
        words = [*container["command"], *container.get("args", ())]
        if self.image is None:
            here = {"python": self.python}
            paths = {"/etc/flexfleet": str(place), "/tmp/worker": str(place / "device")}
            command = [here.get(word, word) for word in words]
            for there, path in paths.items():
                command = [word.replace(there, path) for word in command]
        else:
            del env["PATH"], env["FLEXFLEET_CGROUP"], env["FLEXFLEET_PROC"]
            command = in_container(
                pod["spec"], self.image, env, {str(place / "invitation.json"): "/etc/flexfleet/invitation.json"}
            )
            env = dict(os.environ)
        with self.slots:
            if not self._goes_on(job):
                return 137, ""
            process = self.running[pod["metadata"]["name"]] = self.start(
                command, {**env, "HOME": str(place)}, place / "log"
            )
            while (code := process.poll()) is None:
                if not self._goes_on(job):
                    process.kill()
                time.sleep(0.02)
            del self.running[pod["metadata"]["name"]]
        self.logs.append(f"{pod['metadata']['name']}: {code}\n{(place / 'log').read_text()}")
        said = place / "termination-log"
        return code, said.read_text() if said.exists() else ""


def in_container(pod: Resource, image: str, env: dict[str, str], mounts: dict[str, str]) -> list[str]:
    """Return the docker command that runs a pod as a kubelet does."""
    (container,) = pod["containers"]
    user = pod["securityContext"]
    assert container["securityContext"]["readOnlyRootFilesystem"] and pod["securityContext"]["runAsNonRoot"]
    return [
        "docker", "run", "--rm", "--network=host", "--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges",
        f"--user={user['runAsUser']}:{user['runAsGroup']}", "--tmpfs=/tmp",
        f"--memory={quantity(container['resources']['limits']['memory'])}",
        *(f"--env={name}={value}" for name, value in env.items()),
        *(f"--volume={source}:{target}:ro" for source, target in mounts.items()),
        image, *container["command"], *container.get("args", ()),
    ]  # fmt: skip


def now() -> str:
    return datetime.now(UTC).isoformat()


def pairs(query: dict[str, list[str]], name: str) -> dict[str, str]:
    """A selector."""
    return dict(pair.split("=") for pair in query.get(name, [""])[0].split(",") if pair)


def is_so(resource: Resource, fields: dict[str, str]) -> bool:
    def of(path: str) -> Any:
        found: Any = resource
        for name in path.split("."):
            found = found.get(name, {})
        return found

    return all(of(path) == value for path, value in fields.items())


def has(resource: Resource, labels: dict[str, str]) -> bool:
    return labels.items() <= resource["metadata"].get("labels", {}).items()


def leftovers(cluster: Cluster) -> list[tuple[str, str]]:
    """Return what finished runs have left, except for keys."""
    return [(kind, name) for kind, name in sorted(cluster.objects) if kind != "secrets" or not name.endswith("-keys")]


def telling(resources: Iterable[Resource]) -> list[Resource]:
    """Return the Secrets with invitations, which are all but the keys of runs."""
    secrets = [each for each in resources if each.get("kind") == "Secret"]
    return [each for each in secrets if not each["metadata"]["name"].endswith("-keys")]


def validate(kind: str, body: Resource) -> None:
    assert body["kind"] == KINDS[kind]
    valid.validate(body, VERSION)
    spec = body["spec"]["template"]["spec"] if kind == "jobs" else {"containers": []}
    volumes = {volume["name"] for volume in spec.get("volumes", [])}
    for container in spec["containers"]:
        unknown = {mount["name"] for mount in container.get("volumeMounts", [])} - volumes
        assert not unknown, f"mounts of unknown volumes: {unknown}"


def quantity(text: str) -> int:
    number, unit = re.fullmatch(r"(\d+)(Ki|Mi|Gi)?", text).groups()  # type: ignore[union-attr]
    return int(number) * {None: 1, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}[unit]


@contextmanager
def serving(cluster: Cluster) -> Iterator[Path]:
    """Gives the path of a kubeconfig."""

    def answer(request: Request) -> None:
        text = request.body()
        fault = cluster.faults.pop(0) if cluster.faults else None
        if fault == 0:
            request.connection.close()
            return
        url = urlsplit(request.path)
        status, found = (
            (fault, {"kind": "Status", "message": "injected"})
            if fault
            else cluster.ask(request.command, url.path, parse_qs(url.query), json.loads(text) if text else None)
        )
        request.respond(status, json.dumps(found).encode(), {"Content-Type": "application/json"})

    cluster.folder.mkdir(parents=True, exist_ok=True)
    with web.serving(answer) as address:
        path = kubeconfig(cluster.folder, {"server": address})
        try:
            yield path
        finally:
            with cluster.lock:
                cluster.objects.clear()  # ends all pods


def kubeconfig(folder: Path, server: dict[str, str], user: Resource | None = None) -> Path:
    """Write a configuration with one cluster at the address `server`, and the credentials `user`."""
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "here", "cluster": server}],
        "users": [{"name": "somebody", "user": user or {}}],
        "contexts": [{"name": "here", "context": {"cluster": "here", "user": "somebody"}}],
        "current-context": "here",
    }
    path = folder / "kubeconfig"
    path.write_text(yaml.safe_dump(config))
    return path
