"""Run a single step with `python -m flexfleet.pipeline STEP --out DIR`, as dvc.yaml does."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from fl_engine.core.text import path_of
from flexfleet.files import terminal

STEPS: dict[str, tuple[str, dict[str, str]]] = {
    "partition": ("partition.partition", {}),
    "pretrain": ("pretrain.pretrain", {"partition": "partition"}),
    "model_pool": ("model_pool.model_pool", {"pretrain": "pretrain"}),
    "federate": ("federate.federate", {"partition": "partition", "pool": "model_pool"}),
    "retry": ("retry.federate_for_dvc", {"partition": "partition", "pool": "model_pool"}),
    "evaluate": ("dvc_plots.evaluate_for_dvc", {"run": "federate", "partition": "partition", "pool": "model_pool"}),
    "report": (
        "run.finish",
        {"run": "federate", "partition": "partition", "pretrain": "pretrain", "pool": "model_pool",
         "evaluation": "evaluate"},
    ),
    "share": ("pretrain.share", {}),
}  # fmt: skip
"""Map each step to its function and to {option: earlier step}, where the option expects the output folder of that step.
`retry` runs `federate` in another folder, because DVC deletes the output folder of a stage before it runs the stage.
`evaluate` also writes the files that `dvc metrics` and `dvc plots` show.
`share` runs `partition` and `pretrain` for a comparison."""


def main(argv: Sequence[str]) -> int:
    p = terminal.ArgumentParser(prog="python -m flexfleet.pipeline", description=__doc__)
    steps = p.add_subparsers(dest="step", required=True, metavar="step")
    for name, (_, reads) in STEPS.items():
        c = steps.add_parser(name)
        terminal.add_config(c)
        for option, step in reads.items():
            c.add_argument(f"--{option}", type=path_of, required=True, metavar="DIR", help=f"folder of the step {step}")
        c.add_argument("--out", type=path_of, required=True, metavar="DIR")
        if name == "federate":
            terminal.add_resume(c)
            terminal.add_faults(c)
    args = terminal.parsed(p, argv)
    from flexfleet.files.run_status import tally_in
    from flexfleet.pipeline.prepare import resolved_of, unchanged
    from flexfleet.pipeline.resume import Attempt

    function, reads = STEPS[args.step]
    module, _, name = function.partition(".")
    step = getattr(import_module(f"flexfleet.pipeline.{module}"), name)
    folders = [getattr(args, option) for option in (*reads, "out")]
    if args.step == "federate":
        attempt = Attempt(args.resume, args.discard_damaged, args.accept_numerics)
        written = step(resolved_of(args), *folders, attempt)
    elif args.step == "share":  # the `share` step may read its configuration from stdin, which can be read only once
        written = step(resolved_of(args), *folders)
    else:
        with unchanged(args) as resolved:
            written = step(resolved, *folders)
    if args.step == "report":
        from flexfleet.reports.finished_run import load
        from flexfleet.reports.report import table

        terminal.show(table([load(args.out)]))
        terminal.show(f"report: {written.report}")
    else:
        terminal.show(str(written))
    if args.step in ("federate", "report"):
        tally_in(args.out).check()
    return 0


if __name__ == "__main__":
    terminal.run_main(main)
