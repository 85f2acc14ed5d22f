"""Nightly regression run: prepare -> (for each case, algorithm and seed) run -> gate -> decide.

The suite and its reference come from the image, and the earlier runs that passed come from MLflow. `gate` measures,
judges, reports, and registers the models if the verdict is good. A separate task, `decide`, fails if the gate failed:
Kubeflow keeps no artifacts of a failed task, and people need the report of a failed run.

`flexfleet nightly` makes a recurring run of it: an empty `night_id` becomes the pipeline run's id.

Retries: a run resumes from its folder, which therefore has to outlive a pod. Caching is off, for the reasons given in
pipelines/train.py.
"""

from typing import Any

from kfp import dsl, kubernetes

from components.compare_tasks import run
from components.nightly_tasks import decide, gate, prepare
from pipelines.shared import COORDINATOR_KEYS, WEBHOOK_KEY, WEBHOOK_SECRET, described, on_cluster, pipeline

# No `from __future__ import annotations` here: kfp needs annotations that are types, not text.


@pipeline(
    name="nightly",
    display_name="Nightly regression",
    description=described(
        "A fixed suite, compared with a reference and with the nightly regression runs that passed.",
        "mlflow_uri (which has the earlier runs) and store_uri (where the runs are kept)",
        '{"publish.onnx": false}',
        own="",
    ),
)
def nightly(
    suite: str = "digits",
    mlflow_uri: str = "",
    store_uri: str = "",
    night_id: str = "",
    advanced: dict[str, Any] = {},  # noqa: B006 - kfp writes it into the specification, nobody holds it
) -> None:
    """Fails if a figure is worse than before by more than noise explains.

    Args:
        suite: A suite of flexfleet/experiments/nightly_suites: what is run, and its reference figures.
        mlflow_uri: Tracking URI of an MLflow server, which has the earlier runs; empty: the one that Kubeflow gives
            tasks, else the reference alone.
        store_uri: s3://bucket/prefix of all runs, or a folder of a volume; empty: the platform's bucket, if the Secret
            flexfleet-s3 names one (S3_STORE).
        night_id: Name of the night's folder; the same name resumes it. Empty: the pipeline run's id.
        advanced: Parameters of params.yaml that change no figure, by their dotted names (run.*, kubernetes.*, ...), as
            in {"publish.onnx": false}.
    """
    job_id = dsl.PIPELINE_JOB_ID_PLACEHOLDER
    given = {"suite": suite, "mlflow_uri": mlflow_uri, "store_uri": store_uri, "night_id": night_id,
             "job_id": job_id, "advanced": advanced}  # fmt: skip
    start = prepare(**given)
    pairs = start.outputs["pairs"]
    with dsl.ParallelFor(start.outputs["Output"], name="runs") as number:
        one = run(number=number, pairs=pairs, shared=start.outputs["shared"], job_id=job_id)
    judged = gate(**given, pairs=pairs, run_folders=dsl.Collected(one.outputs["run_folder"]))
    decided = decide(failed=judged.outputs["Output"])
    for each, name in ((start, "1 Prepare"), (one, "2 Run"), (judged, "3 Judge and report"), (decided, "4 Decide")):
        each.set_display_name(name)
    on_cluster(start, retries=0, trains=True)
    on_cluster(decided, retries=0)
    on_cluster(one, keys=COORDINATOR_KEYS, trains=True)
    on_cluster(judged, trains=True)
    for each in (start, one, judged, decided):  # each tells of its own failure: see docs/guides/nightly.md
        kubernetes.use_secret_as_env(each, WEBHOOK_SECRET, {WEBHOOK_KEY: WEBHOOK_KEY}, optional=True)
