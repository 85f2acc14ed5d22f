"""Starting a pipeline on Kubeflow: a new version is uploaded where the graph has changed, then a run is created.

A version is named after what it was compiled to, so the same code and image never make a second one.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fl_engine import __version__
from fl_engine.errors import ConfigError, EnvironmentFailure, nearest
from pipelines.compile import PIPELINES, compiled


@dataclass(frozen=True)
class Submitted:
    run_id: str
    url: str
    pipeline: str
    version: str
    uploaded: bool
    """Whether the version was new."""


def form(text: str) -> dict[str, Any]:
    """The parameters of a compiled pipeline, with their defaults."""
    spec = next(yaml.safe_load_all(text))
    given: dict[str, Any] = spec["root"]["inputDefinitions"]["parameters"]
    return {name: about.get("defaultValue") for name, about in given.items()}


def submit(
    name: str,
    parameters: Mapping[str, Any],
    *,
    host: str | None = None,
    namespace: str | None = None,
    experiment: str = "flexfleet",
    run_name: str | None = None,
    service_account: str | None = None,
) -> Submitted:
    """Starts a run of the pipeline `name`. `host`: None is what the KFP SDK finds (KF_PIPELINES_ENDPOINT, its own
    configuration). `namespace`: of the profile, where there are several users.

    Raises ConfigError for an unknown pipeline or parameter, EnvironmentFailure where the server refuses or is not to be
    reached.
    """
    if name not in PIPELINES:
        raise ConfigError(f"no pipeline is named {name!r}{nearest(name, PIPELINES)}: {', '.join(PIPELINES)}")
    text = compiled(name)
    asked = form(text)
    for key in parameters:
        if key not in asked:
            raise ConfigError(f"the pipeline {name} has no parameter {key!r}{nearest(key, asked)}")
    version = f"{__version__}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    with _client(host) as client:
        pipeline_id, version_id, uploaded = _uploaded(client, name, version, text, namespace)
        where = client.create_experiment(experiment, namespace=namespace)
        run = client.run_pipeline(
            where.experiment_id,
            run_name or f"{name}-{version}",
            params=dict(parameters),
            pipeline_id=pipeline_id,
            version_id=version_id,
            service_account=service_account,
        )
        url = f"{client._get_url_prefix()}/#/runs/details/{run.run_id}"
    return Submitted(run.run_id, url, name, version, uploaded)


@contextlib.contextmanager
def _client(host: str | None) -> Iterator[Any]:
    """The SDK prints links as it goes: what is worth telling is in the result."""
    import kfp
    from kfp_server_api.exceptions import ApiException
    from urllib3.exceptions import HTTPError

    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield kfp.Client(host=host)
    except ApiException as error:
        said = (error.body or b"").decode(errors="replace") if isinstance(error.body, bytes) else str(error.body or "")
        raise EnvironmentFailure(f"Kubeflow Pipelines refused: {error.status} {error.reason} {said[:300]}") from error
    except HTTPError as error:
        raise EnvironmentFailure(f"Kubeflow Pipelines at {host or 'its default'} cannot be reached: {error}") from error


def _uploaded(client: Any, name: str, version: str, text: str, namespace: str | None) -> tuple[str, str, bool]:
    """Ids of pipeline and version; whether the version had to be uploaded."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / f"{name}.yaml"
        path.write_text(text)
        pipeline_id = client.get_pipeline_id(name)
        if pipeline_id is None:
            pipeline_id = client.upload_pipeline(str(path), name, namespace=namespace).pipeline_id
        for known in _versions(client, pipeline_id):
            if known.display_name == version:
                return pipeline_id, known.pipeline_version_id, False
        made = client.upload_pipeline_version(str(path), version, pipeline_id=pipeline_id)
    return pipeline_id, made.pipeline_version_id, True


def _versions(client: Any, pipeline_id: str) -> Iterator[Any]:
    token = ""
    while True:
        page = client.list_pipeline_versions(pipeline_id, page_token=token, page_size=100)
        yield from page.pipeline_versions or []
        token = page.next_page_token or ""
        if not token:
            return
