"""The tuning pipeline: prepare -> (for each worker) search -> report.

The first task resolves and checks the configuration, cuts the partition and pre-trains; then `tune.workers` pods run
trial after trial of one study, as `flexfleet tune` makes it in the folder `<store_uri>/<study_id>`; the last task runs
the best setting against the default and puts it on a page.

Several workers share the study through the database that `tune.storage` or a Secret names. The other workers, or the
next pod, take over the trials of a killed pod. One worker without a database resumes from its folder, if that outlives
a pod (a volume); else the study begins again: a trial with the number and the inputs of an earlier one takes that one's
rounds from the bucket, all others train. Caching is off, for the reasons given in pipelines/train.py.
"""

from typing import Any

from kfp import dsl, kubernetes

from components.tune_tasks import prepare, report, search
from pipelines.form import FIELDS, NO_STORE, Field, form
from pipelines.shared import COORDINATOR_KEYS, TUNE_KEY, TUNE_SECRET, described, on_cluster, pipeline

# No `from __future__ import annotations` here: kfp needs annotations that are types, not text.


@pipeline(
    name="tune",
    display_name="Tune",
    description=described(
        "A search for hyper-parameters, checked on seeds that no trial has seen.",
        "algorithm, trials, rounds, store_uri (where the study is kept) and mlflow_uri (where the curves go)",
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
    """The defaults are those of `flexfleet tune`, without MLflow."""
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
