"""Pre-trains on the proxy, for the algorithms that ask for it."""

from kfp import dsl

from components.task import task

# No `from __future__ import annotations` here: kfp reads the annotations themselves.
Artifact = dsl.Artifact


@task
def pretrain(config: dsl.Input[Artifact], parts: dsl.Input[Artifact], apoz: dsl.Output[Artifact]) -> None:
    from pathlib import Path

    from flexfleet.kubeflow.in_pod import ending
    from flexfleet.steps.prepare import Resolved
    from flexfleet.steps.pretrain import pretrain as step

    with ending("run_id"):
        step(Resolved.load(config.path), Path(parts.path), Path(apoz.path))
