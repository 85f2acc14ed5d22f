"""Define the tasks `prepare`, `gate` and `decide` of the pipeline `nightly`, which also uses `compare_tasks.run`."""

from typing import Any, List  # noqa: UP035 - kfp accepts lists of artifacts only as typing.List

from kfp import dsl

from components.task import task

# kfp needs type objects as annotations, not strings, so do not add `from __future__ import annotations` here.
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

    from flexfleet.config.form import overrides_from
    from flexfleet.experiments import nightly
    from flexfleet.experiments.nightly_suite import NightlyRun
    from flexfleet.kubeflow.task_end import ending
    from flexfleet.pipeline import check

    given = locals()

    def checked(store_uri: str) -> NightlyRun:
        return nightly.prepare(
            suite,
            night_id or f"night-{job_id}",
            overrides_from({"mlflow_uri": mlflow_uri, "store_uri": store_uri}, advanced),
        )

    with ending("night_id", given):
        prepared = check.check_form(given, checked)
        return nightly.hand_over(prepared, Path(shared.path), Path(pairs.path), job_id)


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

    from flexfleet.config.dotted import platform_store
    from flexfleet.config.form import overrides_from
    from flexfleet.experiments import nightly
    from flexfleet.experiments.compare import PairsFile
    from flexfleet.experiments.nightly_gate import TASKS
    from flexfleet.kubeflow.task_end import ending, patiently
    from flexfleet.tracking import record as track

    with ending("night_id", locals()):
        store = store_uri or platform_store() or ""
        prepared = nightly.prepare(
            suite,
            night_id or f"night-{job_id}",
            overrides_from({"mlflow_uri": mlflow_uri, "store_uri": store}, advanced),
        )
        file, out = PairsFile.read(Path(pairs.path)), Path(night.path)
        track.check_code(file.commit, prepared.id)
        folders = nightly.folders_of(prepared, [Path(run.path) for run in run_folders])
        found = patiently(lambda: nightly.settle(prepared, folders, out, TASKS, file.mlflow))
        shutil.copyfile(out / "regression.html", page.path)
        Path(verdict.path).write_text(found.markdown(), encoding="utf-8")
        metrics.log_metric("passed", int(found.passed))
        for check in found.checks:
            metrics.log_metric(f"{check.metric}/{check.label}", check.now)
        seen = found.model_copy(update={"report": nightly.link(prepared, found, job_id)})
        return "" if found.passed else seen.text()


# This task fails in place of the task `gate`, because Kubeflow would delete the artifacts of a failed `gate`.
@task
def decide(failed: str) -> None:
    from fl_engine.core.errors import GateFailed
    from flexfleet.experiments import webhook
    from flexfleet.kubeflow.task_end import ending

    with ending("night_id"):
        if failed:
            webhook.call(failed)
            raise GateFailed(failed)
