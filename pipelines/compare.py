"""The comparison pipeline: prepare -> (for each algorithm and seed) run -> compare.

The first task resolves and checks every run, cuts each seed's partition and pre-trains on its proxy once; then the
runs are made side by side, as many as the cluster has room for, each as `flexfleet run` makes it in the folder
`<store_uri>/<comparison_id>/<label>-s<seed>`; the last task puts them in one table and one page.

The loop is flat, over pairs of algorithm and seed: two nested loops would start a seed only when all runs of the seed
before have ended, and `kfp.local` cannot run them. Its items are the runs' numbers in the file `pairs`, since a task's
parameters are one argument of a command line, which Linux limits.

Retries: a run resumes from its folder, which therefore has to outlive a pod. Give `comparison_id` to resume the
comparison of an earlier pipeline run. Caching is off, for the reasons given in pipelines/train.py.
"""

from typing import Any

from kfp import dsl

from components.compare_tasks import compare, prepare, run
from pipelines.form import FIELDS, Field, form
from pipelines.shared import COORDINATOR_KEYS, described, on_cluster, pipeline

# No `from __future__ import annotations` here: kfp needs annotations that are types, not text.


@pipeline(
    name="compare",
    display_name="Compare",
    description=described(
        "Several federated algorithms on one task, with several seeds, in one table. Algorithms: "
        f"{', '.join(FIELDS['algorithm'].choices)}, or package.module:NAME.",
        "algorithms, seeds, rounds, store_uri (where the runs are kept) and mlflow_uri (where their curves go)",
        '{"training.momentum": 0.9, "flexfl:algorithm.kd_weight": 5}',
        own="dataset.name",
    ),
)
@form(
    without=["algorithm", "seed", "trials"],
    algorithms=Field(
        "flexfl,all_large",
        "Names of algorithms, separated by commas; a variant of one is label=name, e.g. flexfl,no_kd=flexfl.",
    ),
    seeds=Field("0,1,2", "Whole numbers, separated by commas; every algorithm runs with each."),
    comparison_id=Field("", "Name of the comparison's folder; the same name resumes it. Empty: the run's id."),
    advanced=Field(
        {},
        'Any other parameter of params.yaml by its dotted name, for all runs, e.g. {"training.momentum": 0.9}; for one '
        'algorithm alone with its label, e.g. {"no_kd:algorithm.kd_weight": 0}.',
    ),
)
def comparison(**given: Any) -> None:
    """The defaults are those of `flexfleet compare`, except for MLflow."""
    job_id = dsl.PIPELINE_JOB_ID_PLACEHOLDER
    start = prepare(**given, job_id=job_id)
    pairs = start.outputs["pairs"]
    with dsl.ParallelFor(start.outputs["Output"], name="runs") as number:
        one = run(number=number, pairs=pairs, shared=start.outputs["shared"], job_id=job_id)
    table = compare(pairs=pairs, run_folders=dsl.Collected(one.outputs["run_folder"]))
    for each, name in ((start, "1 Prepare"), (one, "2 Run"), (table, "3 Compare")):
        each.set_display_name(name)
    on_cluster(start, retries=0, trains=True)
    on_cluster(one, keys=COORDINATOR_KEYS, trains=True)
    on_cluster(table)
