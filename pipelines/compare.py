"""Define the comparison pipeline: prepare -> run (for each algorithm and seed) -> compare.

The first task checks all runs, and computes one partition and one pre-training for each seed. The runs are executed in
parallel, in `<store_uri>/<comparison_id>/<label>-s<seed>`. The last task writes the table and the report.

The pipeline has one loop over pairs (algorithm, seed), because `kfp.local` cannot run nested loops. The items of the
loop are only indices into the file `pairs`, because Linux limits the length of a command line. Retries and caching are
described in pipelines/train.py.
"""

from typing import Any

from kfp import dsl

from components.compare_tasks import compare, prepare, run
from pipelines.form import FIELDS, Field, form
from pipelines.shared import COORDINATOR_KEYS, described, on_cluster, pipeline

# kfp needs type objects as annotations, not strings, so do not add `from __future__ import annotations` here.


@pipeline(
    name="compare",
    display_name="Compare",
    description=described(
        "Several federated algorithms on one task, with several seeds, in one table. Algorithms: "
        f"{', '.join(FIELDS['algorithm'].choices)}, or package.module:NAME.",
        "algorithms, seeds, rounds, store_uri (storage for the runs) and mlflow_uri (MLflow for the curves)",
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
    """The defaults are the same as in `flexfleet compare`, except for MLflow."""
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
