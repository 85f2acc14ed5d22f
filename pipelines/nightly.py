"""Define the nightly pipeline: prepare -> run (for each case, algorithm and seed) -> gate -> decide.

The suite and its reference are part of the image, and earlier runs that passed are read from MLflow. `gate` checks the
metrics, writes the report, and registers the models if all checks pass. The separate task `decide` fails if the gate
failed, because Kubeflow does not keep artifacts of failed tasks. For retries and caching, see pipelines/train.py.
"""

from typing import Any

from kfp import dsl, kubernetes

from components.compare_tasks import run
from components.nightly_tasks import decide, gate, prepare
from pipelines.shared import COORDINATOR_KEYS, WEBHOOK_KEY, WEBHOOK_SECRET, described, on_cluster, pipeline

# kfp needs type objects as annotations, not strings, so do not add `from __future__ import annotations` here.


@pipeline(
    name="nightly",
    display_name="Nightly regression",
    description=described(
        "A fixed suite, compared with a reference and with earlier nightly regression runs that passed.",
        "mlflow_uri (which has the earlier runs) and store_uri (storage for the runs)",
        '{"publish.onnx": false}',
        own="",
    ),
)
def nightly(
    suite: str = "digits",
    mlflow_uri: str = "",
    store_uri: str = "",
    night_id: str = "",
    advanced: dict[str, Any] = {},  # noqa: B006 - kfp writes it into the specification
) -> None:
    """The run fails if a metric is worse than before by more than its noise.

    Args:
        suite: Name of a suite in flexfleet/experiments/nightly_suites, with runs and reference results.
        mlflow_uri: Tracking URI of the MLflow server with the earlier runs. If empty, Kubeflow's MLflow is used.
            Without MLflow, runs are compared only with the reference.
        store_uri: Folder of a volume, or s3://bucket/prefix, for all runs. If empty, the bucket in the Secret
            flexfleet-s3 (S3_STORE) is used.
        night_id: Name of the run's folder; the same name resumes the run. If empty, the name is the pipeline run's ID.
        advanced: Parameters of params.yaml that do not affect results, by dotted name (run.*, kubernetes.*), e.g.
            {"publish.onnx": false}.
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
    for each in (start, one, judged, decided):  # every task reports its own failure (docs/guides/nightly.md)
        kubernetes.use_secret_as_env(each, WEBHOOK_SECRET, {WEBHOOK_KEY: WEBHOOK_KEY}, optional=True)
