"""Define the tuning pipeline: prepare -> search (for each worker) -> report.

The first task checks the configuration and runs the steps partition and pretrain. Then `tune.workers` pods run the
trials of one study, stored in `<store_uri>/<study_id>`. The last task compares the best setting with the default.

Several workers share the study through a database, whose address is set in `tune.storage` or a Secret. Without a
database, there is a single worker, which resumes from its folder. If this folder was deleted with the pod, it restarts
the study and reuses the rounds of trials with the same values. For retries and caching, see pipelines/train.py.
"""

from typing import Any

from kfp import dsl, kubernetes

from components.tune_tasks import prepare, report, search
from pipelines.form import FIELDS, NO_STORE, Field, form
from pipelines.shared import COORDINATOR_KEYS, TUNE_KEY, TUNE_SECRET, described, on_cluster, pipeline

# kfp needs type objects as annotations, not strings, so do not add `from __future__ import annotations` here.


@pipeline(
    name="tune",
    display_name="Tune",
    description=described(
        "A search for hyper-parameters, whose result is checked on held-out seeds.",
        "algorithm, trials, rounds, store_uri (storage for the study) and mlflow_uri (MLflow for the curves)",
        '{"tune.space": {"training.lr": {"low": 0.01, "high": 0.1, "log": true}}}',
    ),
)
@form(
    without=["seed"],
    rounds=FIELDS["rounds"]._replace(meaning="Rounds of each trial."),
    store_uri=Field("", f"Folder of a volume, for all studies; or s3://bucket/prefix for trials' rounds; {NO_STORE}"),
    study_id=Field(
        "", "Name of the study's folder; the same name resumes the study. Empty: algorithm, seed and run id."
    ),
    advanced=Field(
        {},
        'Any other parameter of params.yaml by its dotted name, e.g. {"tune.workers": 4}; the space as {"tune.space": '
        '{"training.lr": {"low": 0.01, "high": 0.1, "log": true}}}.',
    ),
)
def tuning(**given: Any) -> None:
    """The defaults are the same as in `flexfleet tune`, except for MLflow."""
    job_id = dsl.PIPELINE_JOB_ID_PLACEHOLDER
    start = prepare(**given, job_id=job_id)
    workers = start.outputs["Output"]
    with dsl.ParallelFor(workers, name="workers") as worker:
        one = search(worker=worker, prepared=start.outputs["prepared"], job_id=job_id)
    best = report(
        workers=workers,
        prepared=start.outputs["prepared"],
        searched=dsl.Collected(one.outputs["searched"]),
    )
    on_cluster(start, retries=0, trains=True)
    on_cluster(one, best, keys=COORDINATOR_KEYS, trains=True)
    for each, shown in ((start, "1 Prepare"), (one, "2 Trials"), (best, "3 Best against the default")):
        each.set_display_name(shown)
        kubernetes.use_secret_as_env(each, TUNE_SECRET, {TUNE_KEY: TUNE_KEY}, optional=True)
