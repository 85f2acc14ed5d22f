"""Pre-trains on the proxy, if the algorithm asks for it."""

from kfp import dsl

from components.task import task

# No `from __future__ import annotations` here: kfp needs annotations that are types, not text.
Artifact = dsl.Artifact


@task
def pretrain(config: dsl.Input[Artifact], parts: dsl.Input[Artifact], apoz: dsl.Output[Artifact]) -> None:
    from pathlib import Path

    from flexfleet.kubeflow.task_end import ending

    with ending("run_id"):
        if config.metadata.get("preparations") == "none":
            index = Path(apoz.path) / "prepared.json"
            index.parent.mkdir(parents=True, exist_ok=True)
            index.write_text('{"schema_version": 1, "made": {}}', encoding="utf-8")
            return
        from flexfleet.pipeline.prepare import Resolved  # imports torch, for two seconds
        from flexfleet.pipeline.pretrain import pretrain as step

        step(Resolved.load(config.path), Path(parts.path), Path(apoz.path))
