"""Pre-trains on the proxy, if the algorithm asks for it."""

from kfp import dsl

from components.task import task

# No `from __future__ import annotations` here: kfp needs annotations that are types, not text.
Artifact = dsl.Artifact


@task
def pretrain(config: dsl.Input[Artifact], parts: dsl.Input[Artifact], apoz: dsl.Output[Artifact]) -> None:
    from pathlib import Path

    from flexfleet.kubeflow.in_pod import ending
    from flexfleet.steps.prepare import Resolved
    from flexfleet.steps.pretrain import pretrain as step

    with ending("run_id"):
        step(Resolved.load(config.path), Path(parts.path), Path(apoz.path))
