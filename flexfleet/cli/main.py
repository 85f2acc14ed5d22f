"""The console command `flexfleet`: its arguments; `flexfleet.cli` carries them out."""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

import fl_engine
from fl_engine.core.errors import EnvironmentFailure
from fl_engine.core.text import at_home, path_of
from flexfleet.cli import devices, host, kubeflow, listing, many_runs, pool, runs
from flexfleet.config.form_fields import SHORT, STUDY
from flexfleet.files import terminal
from flexfleet.worker.__main__ import add_options

DESCRIPTION = """Model-heterogeneous federated learning on AIoT devices.

  flexfleet run                          FlexFL on the bundled digits
  flexfleet run --algorithm all_large    its control
  flexfleet report runs/a runs/b         both in one page
  flexfleet list algorithms              what there is; also models, datasets,
                                         fleets, suites
  flexfleet params rounds                parameters that have to do with rounds
  flexfleet init                         a params.yaml with all of them
  flexfleet compare --algorithms flexfl,all_large --seeds 0,1,2
"""

COMPARE = """Several algorithms on the same task, with several seeds, side by side in one
table and one page.

  flexfleet compare --algorithms flexfl,all_large --seeds 0,1,2 --jobs 2
  flexfleet compare --algorithms flexfl,no_kd=flexfl \\
      --set no_kd:algorithm.kd_weight=0
  flexfleet compare --algorithms even=flexfl,skewed=flexfl \\
      --set skewed:partition.alpha=0.1
  flexfleet compare --algorithms flexfl,all_large --over training.lr=0.01,0.1
  flexfleet compare --suites
  flexfleet compare --suite fedaiot/aep --id aep --jobs 2

--set a.b=value is for all runs, --set LABEL:a.b=value for one label
(LABEL:algorithm.x=value for its algorithm). All other parameters (data,
partition, fleet, training) are the same in all runs of a seed. Each run is a
usual run in the folder <run.store>/<id>/<label>-s<seed>/.
"""


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="flexfleet", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--version", action="version", version=f"flexfleet {fl_engine.__version__}")
    subparsers = p.add_subparsers(dest="command", required=True, metavar="command")

    def add(name: str, about: str, *, config: bool = True) -> argparse.ArgumentParser:
        c = subparsers.add_parser(name, help=about, description=about)
        if config:
            terminal.add_config(c)
        c.add_argument("--json", action="store_true", help="print exactly one JSON object on stdout")
        terminal.add_loudness(c)
        return c

    c = add("run", "partition, pre-train, build the pool, run the rounds, evaluate, report")
    c.add_argument("--run-id", metavar="NAME", help="name of the run's folder (default: algorithm, seed and time)")
    terminal.add_resume(c)
    terminal.add_faults(c)
    c.add_argument(
        "--shared", type=path_of, metavar="DIR", help="use the partition and pre-training that a comparison computed"
    )
    c.add_argument("--tag", action="append", default=[], metavar="key=value", help="tag of the MLflow run; repeatable")
    terminal.add_short(c, SHORT)
    c.set_defaults(call=runs.run)

    c = add("central", "train the network on all training samples, as a reference for federated runs (see `central`)")
    c.add_argument("--run-id", metavar="NAME", help="name of the run's folder (default: central, seed and time)")
    terminal.add_resume(c)
    c.add_argument("--tag", action="append", default=[], metavar="key=value", help="tag of the MLflow run; repeatable")
    terminal.add_short(c, ("dataset", "model", "seed", "mlflow_uri", "store_uri"))  # those that it reads
    c.set_defaults(call=runs.central)

    c = add("compare", "several algorithms and seeds on one task, in one table")
    c.description, c.formatter_class = COMPARE, argparse.RawDescriptionHelpFormatter
    c.add_argument("--algorithms", metavar="LIST", help="names, or label=name: flexfl,no_kd=flexfl")
    c.add_argument(
        "--suite", type=at_home, metavar="NAME", help="the rows of published tables, or a file; --algorithms picks rows"
    )
    c.add_argument("--suites", action="store_true", help="list the suites: paper, table or figure, cost, small twin")
    c.add_argument("--seeds", metavar="LIST", help="0,1,2 (default: the configuration's seed alone, or the suite's)")
    c.add_argument(
        "--over", action="append", default=[], metavar="a.b=v,v",
        help="a factor: make every label with each of these values, a row of the tables for each; repeatable",
    )  # fmt: skip
    c.add_argument("--id", metavar="NAME", help="name of the comparison's folder (default: the time)")
    c.add_argument("--jobs", type=int, default=1, metavar="N", help="runs side by side, one thread each (default: 1)")
    c.add_argument(
        "--to", metavar="LIST",
        help="accuracies to reach with avg and with the full model, as shares: 0.4,0.45; in rounds, simulated s and MB",
    )  # fmt: skip
    c.add_argument(
        "--central", type=path_of, nargs="+", default=[], metavar="DIR",
        help="folders of central trainings, one for each seed: a reference in the tables",
    )  # fmt: skip
    terminal.add_resume(c)
    terminal.add_faults(c)
    terminal.add_short(c, (name for name in SHORT if name not in ("algorithm", "seed")))
    c.set_defaults(call=many_runs.compare)

    c = add("tune", "search hyper-parameters: trials, then the best against the default on new seeds")
    c.add_argument("--id", metavar="NAME", help="name of the study's folder (default: the time)")
    c.add_argument("--jobs", type=int, metavar="N", help="workers side by side (default: tune.workers)")
    c.add_argument("--resume", action="store_true", help="go on with the study if it exists")
    terminal.add_short(c, (*SHORT, *STUDY))
    c.set_defaults(call=many_runs.tune)

    c = add("regress", "run a fixed suite; exit code 5 if a figure is worse than before", config=False)
    c.add_argument(
        "--suite", type=at_home, default="digits", metavar="NAME", help="a shipped suite, or a file (default: digits)"
    )
    terminal.add_set(c, "run.*, tracking.*, ...")
    c.add_argument("--id", metavar="NAME", help="name of the night's folder (default: the time)")
    c.add_argument("--jobs", type=int, default=1, metavar="N", help="runs side by side (default: 1)")
    c.add_argument("--update", action="store_true", help="instead write the suite's reference figures, of 20 seeds")
    c.add_argument("--resume", action="store_true", help="go on with the night if it exists")
    c.set_defaults(call=many_runs.regress)

    c = add("submit", "start a pipeline on Kubeflow; uploads a new version if the graph has changed")
    c.add_argument("pipeline", nargs="?", help="train, compare, tune or nightly")
    c.add_argument(
        "--wait", action="store_true",
        help="follow the run to its end (0 succeeded, 1 failed, 3 terminated), and retry it up to three times if a pod "
        "is killed, drained or lost",
    )  # fmt: skip
    for action, does in (
        ("follow", "follow a run that was started before, by its id in Kubeflow"),
        ("terminate", "end a run; its committed rounds stay"),
        ("retry", "start the failed tasks of a run again"),
        ("logs", "print the logs of a run's tasks"),
    ):
        c.add_argument(f"--{action}", metavar="RUN_ID", help=does)
    c.add_argument("--host", metavar="URL", help="address of Kubeflow Pipelines (default: KF_PIPELINES_ENDPOINT)")
    c.add_argument("--namespace", metavar="NAME", help="of your profile, if Kubeflow has several users")
    c.add_argument("--experiment", default="flexfleet", metavar="NAME")
    c.add_argument("--run-name", metavar="NAME", help="name of the run (default: the pipeline and its version)")
    c.add_argument(
        "--key", metavar="NAME",
        help="your own name of this start (of a CI job, say): the same command with the same key starts no second run",
    )  # fmt: skip
    c.add_argument(
        "--param", action="append", default=[], metavar="key=value", help="a parameter of the form alone, e.g. run_id"
    )
    c.set_defaults(call=kubeflow.submit)

    c = add("nightly", "let Kubeflow run the regression every night; replaces one of that name", config=False)
    c.add_argument("--cron", default="0 0 2 * * *", help="six fields, seconds first; UTC (default: 0 0 2 * * *)")
    c.add_argument("--name", default="flexfleet-nightly", help="name of the recurring run (default: flexfleet-nightly)")
    c.add_argument("--suite", default="digits", metavar="NAME", help="a suite that the image has (default: digits)")
    terminal.add_set(c, "tracking.mlflow, run.remote, ...")
    c.add_argument("--host", metavar="URL", help="address of Kubeflow Pipelines (default: KF_PIPELINES_ENDPOINT)")
    c.add_argument("--namespace", metavar="NAME", help="of your profile, if Kubeflow has several users")
    c.add_argument("--experiment", default="flexfleet", metavar="NAME")
    c.add_argument("--param", action="append", default=[], metavar="key=value", help="a parameter of the form alone")
    c.set_defaults(call=kubeflow.nightly)

    c = add("pool", "show the model pool: sizes, multiply-adds (MFLOPs: millions of them for a sample), widths")
    terminal.add_short(c, ("dataset", "model", "algorithm"))
    c.add_argument(
        "--input",
        metavar="SHAPE",
        help="shape of a sample (3x32x32, 200x6, 18); with --classes, instead of a data set (default: what the network "
        "was published for, where it says so and no data set is named or needed)",
    )
    c.add_argument("--classes", type=int, metavar="N", help="how many outputs the network has, with --input")
    c.add_argument("--apoz", type=path_of, metavar="FILE", help="apoz.json of a pretrain step, instead of measuring")
    c.add_argument(
        "--flops-as", choices=("macs", "thop"), default="macs",
        help="macs: multiply-adds, as in AdaptiveFL's Table 1; thop: as FedRolex's Table 3.6 counts, a linear layer's "
        "multiplications and additions apart, and gives its three columns, means over the models sent (default: "
        "%(default)s)",
    )  # fmt: skip
    c.set_defaults(call=pool.pool)

    c = add("report", "one page and one table for one or more finished runs", config=False)
    c.add_argument("runs", type=path_of, nargs="+", metavar="RUN", help="folder of a finished run")
    c.add_argument("--out", type=path_of, default=Path("report.html"), metavar="FILE")
    c.set_defaults(call=runs.report)

    c = add("fetch", "download data sets, or what a run pushed by DVC, and check them; without a name: list data sets")
    c.add_argument("names", nargs="*", metavar="NAME", help="names of data sets, or the id of an MLflow run")
    c.add_argument("--root", metavar="DIR", help="of data sets (default: FLEXFLEET_DATA, else ~/.cache/flexfleet/data)")
    c.add_argument("--out", type=path_of, metavar="DIR", help="where a run's files go (default: runs/<the id>)")
    c.set_defaults(call=host.fetch)

    c = add("status", "show how far runs are, and which invited devices are there")
    c.add_argument(
        "run", type=path_of, nargs="?", metavar="RUN",
        help="folder of a run, a comparison or a study (default: all in run.store)",
    )  # fmt: skip
    c.set_defaults(call=runs.status)

    c = add("invite", "invite devices that train where they are (run.backend=agents), or revoke one")
    c.add_argument("--tier", metavar="NAME", help="tier of the fleet whose clients they are (default: any)")
    c.add_argument("--count", type=int, default=1, metavar="N", help="how many devices (default: 1)")
    c.add_argument(
        "--out", type=path_of, default=Path("invitations"), metavar="DIR",
        help="folder for the invitations, a file for each device (default: %(default)s)",
    )  # fmt: skip
    c.add_argument("--revoke", metavar="NAME", help="instead revoke this device: it gets no assignments any more")
    c.set_defaults(call=devices.invite)

    c = add("agent", "execute assignments on this invited device, until the server is silent", config=False)
    add_options(c)
    c.set_defaults(call=devices.agent)

    c = add("profile", "measure how this device trains: an entry of fleet.tiers, for the simulated clock")
    c.add_argument(
        "--invite", type=at_home, metavar="FILE",
        help="its invitation, for the way to the object store: a file, or https",
    )  # fmt: skip
    c.add_argument("--tier", metavar="NAME", help="name of the tier (default: the invitation's, else the machine's)")
    c.add_argument("--share", type=float, default=1.0, metavar="P", help="the tier's part of the fleet (default: 1)")
    c.add_argument("--memory", type=float, metavar="MB", help="what training may take (default: what is free)")
    c.add_argument("--seconds", type=float, default=5.0, metavar="S", help="how long to train each level (default: 5)")
    c.add_argument("--device", default="cpu", metavar="NAME", help="the torch device, e.g. cuda (default: cpu)")
    c.add_argument("--out", type=path_of, metavar="FILE", help="write the entry there too, as YAML")
    terminal.add_short(c, ("dataset", "model", "algorithm"))
    c.set_defaults(call=devices.profile)

    c = add("check", "check parameters, data, partition, fleet and pool without training")
    terminal.add_short(c, SHORT)
    c.set_defaults(call=runs.check)

    c = add("init", "write a params.yaml with every parameter explained, or an algorithm of your own", config=False)
    c.add_argument("folder", type=path_of, nargs="?", default=Path(), metavar="DIR", help="where (default: here)")
    c.add_argument(
        "--algorithm", metavar="NAME",
        help="instead write NAME.py, a small algorithm to change, and test_NAME.py, which holds it to the laws of all",
    )  # fmt: skip
    c.set_defaults(call=listing.init)

    c = add("params", "show every parameter with its type, default, choices and meaning; or those that hold a word")
    c.add_argument("word", nargs="?", metavar="WORD", help="of a name, a choice, a meaning, or an algorithm: heterofl")
    terminal.add_short(c, ("model", "algorithm"))
    c.set_defaults(call=listing.params)

    c = add("list", "list what there is by name", config=False)
    c.add_argument("what", choices=("algorithms", "models", "datasets", "fleets", "suites"))
    c.set_defaults(call=listing.list_)

    c = add("completion", 'print the completion script of a shell: eval "$(flexfleet completion bash)"', config=False)
    c.add_argument("shell", choices=listing.SHELLS)
    c.set_defaults(call=listing.completion, parser=parser)

    c = add("doctor", "show what is installed, and what each missing extra would enable", config=False)
    c.add_argument("--measure", action="store_true", help="also how much quicker bf16 trains here: some seconds")
    c.set_defaults(call=host.doctor)
    return p


ON_DEVICES = ("agent", "check", "completion", "doctor", "fetch", "init", "list", "params", "profile")
"""Commands for Python 3.10 too, which is on devices (JetPack 6): what a coordinator needs is tested from 3.11 on."""


def dispatch(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if sys.version_info < (3, 11) and args.command not in ON_DEVICES:
        raise EnvironmentFailure(
            f"`flexfleet {args.command}` needs Python 3.11 or newer, and this is {platform.python_version()}: 3.10 is "
            f"for devices ({', '.join(ON_DEVICES)})"
        )
    terminal.settle(args)
    code: int = args.call(args)
    return code


def main() -> None:
    """Entry point. Exit codes: 0 ok, 1 unexpected error or a followed run that failed, 2 bad input, 3 stopped but
    resumable (a followed run: terminated), 4 integrity, 5 gate failed, 6 environment, 7 diverged or no update merged,
    42 permanent failure of an agent or pod, 130 Ctrl-C, 143 SIGTERM for an agent, a pod or a command that follows a
    run."""
    terminal.run_main(dispatch)


if __name__ == "__main__":
    main()
