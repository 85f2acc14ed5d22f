"""The tasks of the pipeline `nightly`, besides `compare_tasks.run`: prepare, gate, decide."""

from typing import Any, List  # noqa: UP035 - kfp accepts lists of artifacts only as typing.List

from kfp import dsl

from components.task import task

# No `from __future__ import annotations` here: kfp needs annotations that are types, not text.
Artifact = dsl.Artifact


@task
def prepare(
    suite: str,
    mlflow_uri: str,
    store_uri: str,
    night_id: str,
    job_id: str,
    advanced: dict[str, Any],
    shared: dsl.Output[Artifact],
    pairs: dsl.Output[Artifact],
) -> list[str]:
    from pathlib import Path

    from flexfleet.config.form import overrides_of
    from flexfleet.experiments import nightly
    from flexfleet.experiments.nightly_run import Night
    from flexfleet.kubeflow.task_end import ending
    from flexfleet.pipeline import reachable

    given = locals()

    def checked(store_uri: str) -> Night:
        return nightly.prepare(suite, night_id or f"night-{job_id}", overrides_of(mlflow_uri, store_uri, advanced))

    with ending("night_id", given):
        night = reachable.check_form(given, checked)
        return nightly.hand_over(night, Path(shared.path), Path(pairs.path), job_id)


@task
def gate(
    suite: str,
    mlflow_uri: str,
    store_uri: str,
    night_id: str,
    job_id: str,
    advanced: dict[str, Any],
    pairs: dsl.Input[Artifact],
    run_folders: dsl.Input[List[Artifact]],  # noqa: UP006
    night: dsl.Output[Artifact],
    page: dsl.Output[dsl.HTML],
    verdict: dsl.Output[dsl.Markdown],
    metrics: dsl.Output[dsl.Metrics],
) -> str:
    import shutil
    from pathlib import Path

    from flexfleet.config.form import overrides_of
    from flexfleet.config.form_fields import platform_store
    from flexfleet.experiments import nightly
    from flexfleet.experiments.comparison_tasks import PairsFile
    from flexfleet.experiments.nightly_figures import TASKS
    from flexfleet.kubeflow.task_end import ending, patiently

    with ending("night_id", locals()):
        store = store_uri or platform_store() or ""
        asked = nightly.prepare(suite, night_id or f"night-{job_id}", overrides_of(mlflow_uri, store, advanced))
        file, out = PairsFile.read(Path(pairs.path)), Path(night.path)
        nightly.check_pairs(asked, file)
        folders = nightly.folders_of(asked, [Path(run.path) for run in run_folders])
        found = patiently(lambda: nightly.settle(asked, folders, out, TASKS, file.mlflow))
        shutil.copyfile(out / "regression.html", page.path)
        Path(verdict.path).write_text(nightly.card(found), encoding="utf-8")
        metrics.log_metric("passed", int(found.passed))
        for check in found.checks:
            metrics.log_metric(f"{check.metric}/{check.label}", check.now)
        seen = found.model_copy(update={"report": nightly.where(asked, found, job_id)})
        return "" if found.passed else nightly.told(seen)


# Fails if the gate failed. It is a task of its own because Kubeflow keeps no artifacts of a task that fails.
@task
def decide(failed: str) -> None:
    from fl_engine.core.errors import GateFailed
    from flexfleet.experiments import webhook
    from flexfleet.kubeflow.task_end import ending

    with ending("night_id"):
        if failed:
            webhook.call(failed)
            raise GateFailed(failed)
