"""What is made on Kubeflow's server, each once, though answers get lost: what a request may have made is looked for
before anything is said or made again."""

from __future__ import annotations

import contextlib
import hashlib
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from fl_engine.core.errors import EnvironmentFailure, FlexfleetError
from flexfleet.kubeflow.server import equal, id_of, pages
from flexfleet.kubeflow.transport import NotFound, Undecided

LOOKS_S = (0.0, 1.0, 4.0)
"""Seconds before each look for what a request may have made: a server may still be at it when its answer is lost."""
LOOK_S = 15.0
"""Seconds after which no further look begins, where the server does not answer these either."""
Find = Callable[[], str | None]
"""Gives the id of a thing, if it is there."""


def ensured(find: Find, make: Callable[[], str]) -> tuple[str, bool]:
    """The id of what is there, else of what is made; and whether it was made."""
    found = find()
    return (found, False) if found is not None else (made(find, make), True)


def made(find: Find, make: Callable[[], str]) -> str:
    """The id of what is made. Raises what `make` raises; Undecided if neither the answer nor a look says whether it was
    made."""
    try:
        return make()
    except Undecided:
        end = time.monotonic() + LOOK_S
        for seconds in LOOKS_S:
            if time.monotonic() > end:
                break
            time.sleep(seconds)
            with contextlib.suppress(FlexfleetError):  # the first error is the one to tell
                found = find()
                if found is not None:
                    return found
        raise


def _named(client: Any, ask: Callable[..., Any], field: str, id: str, name: str) -> str | None:
    """The id of the first thing of that name in a list."""
    return next((id_of(client, each, id) for each in pages(client, ask, field) if each.display_name == name), None)


def fingerprint(settings: Any) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]


@contextlib.contextmanager
def told_if_interrupted(what: str) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(what) from None


# ------------------------------------------------------------------------------------------ pipelines and experiments
def experiment(client: Any, name: str, namespace: str | None) -> str:
    """The id of the experiment of that name, which is made if there is none."""
    import kfp_server_api

    api, where = client._experiment_api, namespace or client.get_user_namespace()
    own = {"namespace": where} if where else {}

    def find() -> str | None:
        same = partial(api.experiment_service_list_experiments, filter=equal("display_name", name), **own)
        return _named(client, same, "experiments", "experiment_id", name)

    def make() -> str:
        asked = kfp_server_api.V2beta1Experiment(display_name=name, **own)
        return id_of(client, api.experiment_service_create_experiment(experiment=asked), "experiment_id")

    return ensured(find, make)[0]


def uploaded(client: Any, name: str, version: str, text: str, namespace: str | None) -> tuple[str, str, bool]:
    """Ids of pipeline and version; whether the version had to be uploaded."""
    api, own = client._pipelines_api, {"namespace": namespace} if namespace else {}

    def pipeline() -> str | None:
        same = partial(api.pipeline_service_list_pipelines, filter=equal("display_name", name), **own)
        return _named(client, same, "pipelines", "pipeline_id", name)

    def of_that_name() -> str | None:
        every = partial(api.pipeline_service_list_pipeline_versions, pipeline_id)
        return _named(client, every, "pipeline_versions", "pipeline_version_id", version)

    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / f"{name}.yaml"
        path.write_text(text, encoding="utf-8")
        upload = client._upload_api
        pipeline_id, _ = ensured(
            pipeline, lambda: id_of(client, upload.upload_pipeline(str(path), name=name, **own), "pipeline_id")
        )
        version_id, new = ensured(
            of_that_name,
            lambda: id_of(
                client,
                upload.upload_pipeline_version(str(path), name=version, pipelineid=pipeline_id),
                "pipeline_version_id",
            ),
        )
    return pipeline_id, version_id, new


# -------------------------------------------------------------------------------------------------------------- runs
def job(pipeline_id: str, version_id: str, parameters: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """What a run and a recurring run have in common; `more`: fields of both kinds."""
    import kfp_server_api as api

    return {
        "pipeline_version_reference": api.V2beta1PipelineVersionReference(pipeline_id, version_id),
        "runtime_config": api.V2beta1RuntimeConfig(parameters=dict(parameters)),
        **more,
    }


def run(job: Mapping[str, Any]) -> Any:
    import kfp_server_api

    return kfp_server_api.V2beta1Run(**job)


def recurring_run(job: Mapping[str, Any], cron: str) -> Any:
    """One that starts a run at a time, at the hours of `cron`, without repeating missed ones."""
    import kfp_server_api as api

    trigger = api.V2beta1Trigger(cron_schedule=api.V2beta1CronSchedule(cron=cron))
    return api.V2beta1RecurringRun(mode="ENABLE", no_catchup=True, max_concurrency="1", trigger=trigger, **job)


def runs(client: Any, experiment_id: str, said: str) -> Iterator[Any]:
    """The experiment's runs with such a text in their description."""
    asked = equal("description", said, "IS_SUBSTRING")
    ask = partial(client._run_api.run_service_list_runs, experiment_id=experiment_id, filter=asked)
    return (run for run in pages(client, ask, "runs") if said in (run.description or ""))


def begun(client: Any, run: Any, find: Find) -> str:
    """The id of the run that is begun."""
    return made(find, lambda: id_of(client, client._run_api.run_service_create_run(run=run), "run_id"))


# ---------------------------------------------------------------------------------------------------- recurring runs
def recurring(client: Any, experiment_id: str, name: str) -> list[Any]:
    """The recurring runs of that name."""
    ask = client._recurring_run_api.recurring_run_service_list_recurring_runs
    listed = pages(client, partial(ask, experiment_id=experiment_id), "recurring_runs")
    return [each for each in listed if each.display_name == name]


def replacing(client: Any, wanted: Any) -> tuple[str, bool, int]:
    """Makes a recurring run, then deletes all others of its name, since none can be changed: at no instant is there
    none. One of the same description that is enabled stays in its place. Gives its id, whether it was made, and how
    many were deleted. Raises EnvironmentFailure if one stays beside it."""
    api = client._recurring_run_api

    def listed() -> dict[str, Any]:
        every = recurring(client, wanted.experiment_id, wanted.display_name)
        return {id_of(client, each, "recurring_run_id"): each for each in every}

    def same(listed: Mapping[str, Any]) -> str | None:
        alike = (id for id, each in listed.items() if each.description == wanted.description)
        return next((id for id in alike if "DISABLE" not in f"{listed[id].mode} {listed[id].status}"), None)

    def make() -> str:
        answer = api.recurring_run_service_create_recurring_run(recurring_run=wanted)
        return id_of(client, answer, "recurring_run_id")

    known = listed()
    kept = same(known)
    # (One that was looked for in vain before is not there: whatever is alike now was made by the request.)
    id = kept or made(lambda: same(listed()), make)
    others = [other for other in known if other != id]
    for at, other in enumerate(others):
        left = (
            f"{wanted.display_name} is there as {id}, and beside it, to start at its hours too, "
            f"{', '.join(others[at:])}: the same command again deletes what is beside it"
        )
        try:
            with told_if_interrupted(left), contextlib.suppress(NotFound):
                api.recurring_run_service_delete_recurring_run(other)
        except FlexfleetError as error:
            raise EnvironmentFailure(f"{left}. {error}") from error
    return id, kept is None, len(others)
