"""A study in MLflow: a run that is the parent of the trials' runs."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

from flexfleet.config import Config
from flexfleet.tracking import server
from flexfleet.tracking.record import tracker
from flexfleet.tracking.trackers import TOKEN, MLflow

PARENT = "mlflow-run"
"""Attribute of the study: the MLflow run that is the parent of the trials' runs."""


def parent(config: Config, study: Any, given: Mapping[str, str]) -> MLflow | None:
    """The study's MLflow run, begun or continued. `given`: more tags. The study keeps a token before the MLflow run
    exists, so that a resumed study finds one that began as MLflow went away."""
    id, known = study.study_name, study.user_attrs.get(PARENT)
    if known is None and TOKEN not in study.user_attrs:
        study.set_user_attr(TOKEN, uuid.uuid4().hex)
    token = study.user_attrs.get(TOKEN, "")
    tags = {"flexfleet.study": id, "algorithm": str(config.algorithm["name"]), TOKEN: token, **given}
    return tracker(config, f"study {id}", tags, known)


def end_left(of: MLflow, study: Any) -> None:
    """Ends what is left running of trials, once they are all over: MLflow did not answer as their runs ended. `of`: the
    study's MLflow run."""
    with server.answering(of.uri, "does not end the runs of trials that are over"):
        running = f"attributes.status = 'RUNNING' and tags.`flexfleet.study` = '{study.study_name}'"
        for run in of.client.search_runs([of.experiment_id], running):
            if run.data.tags.get(server.PARENT) == of.root and "flexfleet.trial" in run.data.tags:
                of.client.set_terminated(run.info.run_id, "KILLED")


def tags(study: Any, **more: str) -> dict[str, str]:
    parent = study.user_attrs.get(PARENT)
    of = {} if parent is None else {server.PARENT: str(parent)}
    return {**of, "flexfleet.study": study.study_name, **{f"flexfleet.{key}": value for key, value in more.items()}}
