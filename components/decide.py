"""Fails if the gate failed. It is a task of its own because Kubeflow keeps no artifacts of a task that fails."""

from components.task import task

# No `from __future__ import annotations` here: kfp needs annotations that are types, not text.


@task
def decide(failed: str) -> None:
    from fl_engine.core.errors import GateFailed
    from flexfleet.experiments import webhook
    from flexfleet.kubeflow.task_end import ending

    with ending("night_id"):
        if failed:
            webhook.call(failed)
            raise GateFailed(failed)
