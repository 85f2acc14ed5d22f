"""The nightly regression: prepare -> (for each case, algorithm and seed) run -> gate -> decide.

The suite and its reference figures are the image's; the champion is MLflow's. `gate` measures, judges, registers the
models and tells; another task, `decide`, fails where it says so: Kubeflow keeps no artifacts of a task that fails, and
a night that fails is the one whose report is wanted.

`flexfleet nightly` makes a recurring run of it: an empty `night_id` is the job's.

Retries: a run goes on with what it finds in its folder, so that has to outlive a pod. Caching is off, for the reasons
given in pipelines/train.py.
"""

from typing import Any, List  # noqa: UP035 - kfp knows typing's own spelling of lists of artifacts only

from kfp import dsl, kubernetes

from pipelines.compare import run
from pipelines.task import COORDINATOR_KEYS, WEBHOOK_KEY, WEBHOOK_SECRET, described, on_cluster, pipeline, task

# No `from __future__ import annotations` here: kfp reads the annotations themselves.
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
) -> list[dict[str, str]]:
    from pathlib import Path

    from flexfleet.config.overrides import sets_of
    from flexfleet.kubeflow.in_pod import ending
    from flexfleet.nightly import regress

    with ending("night_id"):
        night = regress.prepare(suite, night_id or f"night-{job_id}", sets_of(mlflow_uri, store_uri, advanced))
        return regress.pairs_of(night, Path(shared.path), job_id)


@task
def gate(
    suite: str,
    mlflow_uri: str,
    store_uri: str,
    night_id: str,
    job_id: str,
    advanced: dict[str, Any],
    pairs: list[dict[str, str]],
    finished: dsl.Input[List[Artifact]],  # noqa: UP006
    night: dsl.Output[Artifact],
    page: dsl.Output[dsl.HTML],
    told: dsl.Output[dsl.Markdown],
    metrics: dsl.Output[dsl.Metrics],
) -> str:
    import shutil
    from pathlib import Path

    from flexfleet.config.overrides import sets_of
    from flexfleet.kubeflow.in_pod import ending, patiently
    from flexfleet.nightly import regress

    with ending("night_id"):
        asked = regress.prepare(suite, night_id or f"night-{job_id}", sets_of(mlflow_uri, store_uri, advanced))
        out = Path(night.path)
        folders = regress.folders_of(asked, [Path(run.path) for run in finished])
        verdict = patiently(lambda: regress.settle(asked, folders, out, regress.TASKS, pairs[0]["mlflow"]))
        shutil.copyfile(out / "regression.html", page.path)
        Path(told.path).write_text(regress.card(verdict))
        metrics.log_metric("passed", int(verdict.passed))
        for check in verdict.checks:
            if check.against == "reference":
                metrics.log_metric(f"{check.metric}/{check.label}", check.now)
        seen = verdict.model_copy(update={"report": regress.where(asked, verdict, job_id)})
        return "" if verdict.passed else regress.told(seen)


@task
def decide(failed: str) -> None:
    from fl_engine.core.errors import GateFailed
    from flexfleet.kubeflow.in_pod import ending
    from flexfleet.nightly import webhook

    with ending("night_id"):
        if failed:
            webhook.call(failed)
            raise GateFailed(failed)


@pipeline(
    name="nightly",
    display_name="Nightly regression",
    description=described(
        "A fixed suite, compared with the last night that passed and with a reference.",
        "mlflow_uri (which keeps the champion) and store_uri (where the runs are kept)",
        '{"publish.onnx": false}',
    ),
)
def nightly(
    suite: str = "digits",
    mlflow_uri: str = "",
    store_uri: str = "runs",
    night_id: str = "",
    advanced: dict[str, Any] = {},  # noqa: B006 - kfp writes it into the specification, nobody holds it
) -> None:
    """Fails where a figure is worse than before, beyond a threshold and beyond noise.

    Args:
        suite: Of flexfleet/nightly/suites: what is run, and its reference figures.
        mlflow_uri: Tracking URI of an MLflow server, which keeps the champion; empty: the one that Kubeflow gives
            tasks, else the reference alone.
        store_uri: s3://bucket/prefix of all runs, or a folder that outlives a pod.
        night_id: Name of the night's folder; the same name goes on with it. Empty: the job's.
        advanced: Parameters of params.yaml that move no figure by their dotted names (run.*, kubernetes.*, ...), e.g.
            {"publish.onnx": false}.
    """
    job_id = dsl.PIPELINE_JOB_ID_PLACEHOLDER
    given = {"suite": suite, "mlflow_uri": mlflow_uri, "store_uri": store_uri, "night_id": night_id,
             "job_id": job_id, "advanced": advanced}  # fmt: skip
    start = prepare(**given)
    with dsl.ParallelFor(start.outputs["Output"], name="runs") as pair:
        one = run(pair=pair, shared=start.outputs["shared"], job_id=job_id)
    judged = gate(**given, pairs=start.outputs["Output"], finished=dsl.Collected(one.outputs["finished"]))
    decided = decide(failed=judged.outputs["Output"])
    for each, name in ((start, "1 Prepare"), (one, "2 Run"), (judged, "3 Judge and report"), (decided, "4 Decide")):
        each.set_display_name(name)
    on_cluster(start, retries=0, trains=True)
    on_cluster(decided, retries=0)
    kubernetes.use_secret_as_env(decided, WEBHOOK_SECRET, {WEBHOOK_KEY: WEBHOOK_KEY}, optional=True)
    on_cluster(one, keys=COORDINATOR_KEYS, trains=True)
    on_cluster(judged, trains=True)
