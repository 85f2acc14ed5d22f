"""Entry point of the command `flexfleet`, and the arguments of all subcommands."""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import fl_engine
from fl_engine.core.errors import EnvironmentFailure
from fl_engine.core.text import at_home, path_of
from flexfleet.cli.listing import LISTS
from flexfleet.config.dotted import SHORT, STUDY
from flexfleet.files import terminal
from flexfleet.worker.__main__ import add_options

DESCRIPTION = """Model-heterogeneous federated learning on AIoT devices.

  flexfleet run                          train FlexFL on the bundled digits
  flexfleet run --algorithm all_large    train FedAvg, to compare with FlexFL
  flexfleet report runs/a runs/b         show two runs on one page
  flexfleet list algorithms              list algorithms; also models, datasets,
                                         fleets, suites, aggregations, ...
  flexfleet params rounds                show the parameters for rounds
  flexfleet init                         write a params.yaml with all parameters
  flexfleet compare --algorithms flexfl,all_large --seeds 0,1,2
"""

COMPARE = """Run several algorithms on the same task with several seeds, and compare them in
one table and on one page.

  flexfleet compare --algorithms flexfl,all_large --seeds 0,1,2 --jobs 2
  flexfleet compare --algorithms flexfl,no_kd=flexfl \\
      --set no_kd:algorithm.kd_weight=0
  flexfleet compare --algorithms flexfl,all_large --over training.lr=0.01,0.1
  flexfleet compare --suite fedaiot/aep --id aep --jobs 2

--set a.b=value applies to all runs, --set LABEL:a.b=value to one variant. Each
run is stored in <run.store>/<id>/<label>-s<seed>/.
"""

EXPORT = """Write the YAML of a pipeline, adapted to the cluster that environment variables
describe. Upload the file in Kubeflow's UI. `flexfleet submit` uploads the same
YAML.

  FLEXFLEET_IMAGE            image of the tasks and of the clients' pods
  FLEXFLEET_PULL_SECRETS     Secrets for the image's registry: name,name
  FLEXFLEET_TASK_NODES       labels of the tasks' nodes: label=value,...
  FLEXFLEET_PRIORITY_CLASS   priority class of the clients' pods
  FLEXFLEET_SERVICE_ACCOUNT  service account of the tasks (only submit, nightly)

docs/guides/kubeflow.md describes these and all other variables.
"""


def parser() -> argparse.ArgumentParser:
    p = terminal.ArgumentParser(
        prog="flexfleet", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--version", action="version", version=f"flexfleet {fl_engine.__version__}")
    subparsers = p.add_subparsers(dest="command", required=True, metavar="command")

    def plain(name: str, call: str, about: str) -> argparse.ArgumentParser:
        """Add a command. `call` is the function in `flexfleet.cli`, whose module is imported when the command runs."""
        c = subparsers.add_parser(name, help=about, description=about)
        c.set_defaults(call=call)
        c.add_argument("--json", action="store_true", help="print exactly one JSON object on stdout")
        terminal.add_loudness(c)
        return c

    def add(name: str, call: str, about: str) -> argparse.ArgumentParser:
        c = plain(name, call, about)
        terminal.add_config(c)
        return c

    def add_kubeflow(c: argparse.ArgumentParser) -> None:
        c.add_argument("--host", metavar="URL", help="address of Kubeflow Pipelines (default: KF_PIPELINES_ENDPOINT)")
        c.add_argument("--namespace", metavar="NAME", help="namespace of your profile, if Kubeflow has several users")
        c.add_argument("--experiment", default="flexfleet", metavar="NAME")
        c.add_argument(
            "--param", action="append", default=[], metavar="key=value", help="a field of the pipeline, such as run_id"
        )

    c = add("run", "runs.run", "partition, pre-train, build the pool, run the rounds, evaluate, and write a report")
    c.add_argument("--run-id", metavar="NAME", help="name of the run's folder (default: algorithm, seed and time)")
    terminal.add_resume(c)
    terminal.add_faults(c)
    c.add_argument(
        "--shared", type=path_of, metavar="DIR", help="use the partition and pre-training that a comparison computed"
    )
    c.add_argument("--tag", action="append", default=[], metavar="key=value", help="tag of the MLflow run; repeatable")
    terminal.add_short(c, SHORT)

    c = add("central", "runs.central", "train the network on all training samples, as a reference for federated runs")
    c.add_argument("--run-id", metavar="NAME", help="name of the run's folder (default: central, seed and time)")
    terminal.add_resume(c)
    c.add_argument("--tag", action="append", default=[], metavar="key=value", help="tag of the MLflow run; repeatable")
    terminal.add_short(c, ("dataset", "model", "seed", "mlflow_uri", "store_uri"))

    c = add("compare", "many_runs.compare", "compare several algorithms and seeds on one task, in one table")
    c.description, c.formatter_class = COMPARE, argparse.RawDescriptionHelpFormatter
    c.add_argument("--algorithms", metavar="LIST", help="algorithms: name or label=name, such as flexfl,no_kd=flexfl")
    c.add_argument("--suite", type=at_home, metavar="NAME", help="name or file of a suite; --algorithms selects rows")
    c.add_argument("--suites", action="store_true", help="list the suites (as `flexfleet list suites`)")
    c.add_argument("--seeds", metavar="LIST", help="seeds, such as 0,1,2 (default: from the suite or configuration)")
    c.add_argument(
        "--over", action="append", default=[], metavar="a.b=v,v",
        help="run every variant with each of these values; repeatable",
    )  # fmt: skip
    c.add_argument("--id", metavar="NAME", help="name of the comparison's folder (default: the time)")
    c.add_argument("--jobs", type=int, default=1, metavar="N", help="parallel runs, with one thread each (default: 1)")
    c.add_argument(
        "--to", metavar="LIST",
        help="show the rounds, simulated seconds and MB needed to reach these accuracies, such as 0.4,0.45",
    )  # fmt: skip
    c.add_argument(
        "--central", type=path_of, nargs="+", default=[], metavar="DIR",
        help="folders of `flexfleet central` runs, one for each seed, to show as a reference",
    )  # fmt: skip
    terminal.add_resume(c)
    terminal.add_faults(c)
    terminal.add_short(c, (name for name in SHORT if name not in ("algorithm", "seed")))

    c = add("tune", "many_runs.tune", "search hyper-parameters, then compare the best setting with the default")
    c.add_argument("--id", metavar="NAME", help="name of the study's folder (default: the time)")
    c.add_argument("--jobs", type=int, metavar="N", help="number of parallel workers (default: tune.workers)")
    c.add_argument("--resume", action="store_true", help="resume the study if it exists")
    terminal.add_short(c, (*SHORT, *STUDY))

    c = plain("regress", "many_runs.regress", "run a fixed suite; exit code 5 if a metric is worse than its reference")
    c.add_argument(
        "--suite", type=at_home, default="digits", metavar="NAME", help="shipped suite or file (default: digits)"
    )
    terminal.add_set(c, "override run.*, tracking.*, ...")
    c.add_argument("--id", metavar="NAME", help="name of the regression run's folder (default: the time)")
    c.add_argument("--jobs", type=int, default=1, metavar="N", help="number of parallel runs (default: 1)")
    c.add_argument("--update", action="store_true", help="run 20 seeds, and write the suite's reference values")
    c.add_argument("--resume", action="store_true", help="resume the regression run if it exists")

    c = add("submit", "kubeflow.submit", "start a pipeline on Kubeflow, and upload a new version if the graph changed")
    action = c.add_mutually_exclusive_group(required=True)
    action.add_argument("pipeline", nargs="?", help="train, compare, tune or nightly")
    c.add_argument(
        "--wait", action="store_true",
        help="follow the run until it ends (exit code 0: succeeded, 1: failed, 3: terminated), and retry it up to "
        "three times if a pod is killed, drained or lost",
    )  # fmt: skip
    action.add_argument("--follow", metavar="RUN_ID", help="follow the run with this ID until it ends")
    action.add_argument("--terminate", metavar="RUN_ID", help="terminate a run; its committed rounds are kept")
    action.add_argument("--retry", metavar="RUN_ID", help="retry the failed tasks of a run")
    action.add_argument("--logs", metavar="RUN_ID", help="print the logs of a run's tasks")
    add_kubeflow(c)
    c.add_argument("--run-name", metavar="NAME", help="name of the run (default: the pipeline and its version)")
    c.add_argument(
        "--dry-run", action="store_true", help="check the parameters, and print the pipeline's YAML; do not connect"
    )

    c = plain(
        "export-pipeline", "kubeflow.export_pipeline", "write a pipeline's YAML for this cluster, for Kubeflow's UI"
    )
    c.description, c.formatter_class = EXPORT, argparse.RawDescriptionHelpFormatter
    c.add_argument("pipeline", help="train, compare, tune or nightly")
    c.add_argument("--out", type=path_of, metavar="FILE", help="file to write (default: stdout)")

    c = plain(
        "nightly", "kubeflow.nightly", "schedule a nightly regression run on Kubeflow, and disable older schedules"
    )
    c.add_argument("--cron", default="0 0 2 * * *", help="six fields in UTC, seconds first (default: 0 0 2 * * *)")
    c.add_argument("--name", default="flexfleet-nightly", help="name of the recurring run (default: flexfleet-nightly)")
    c.add_argument("--suite", default="digits", metavar="NAME", help="a suite in the image (default: digits)")
    terminal.add_set(c, "override tracking.mlflow, run.remote, ...")
    add_kubeflow(c)

    c = add("pool", "runs.pool", "show the model pool: sizes, multiply-adds per sample (MACs), widths")
    terminal.add_short(c, ("dataset", "model", "algorithm"))
    c.add_argument(
        "--input",
        metavar="SHAPE",
        help="shape of a sample (3x32x32, 200x6, 18), with --classes, instead of a data set (default: the shape that "
        "the network was published for, if no data set is named or needed)",
    )
    c.add_argument("--classes", type=int, metavar="N", help="number of outputs of the network, with --input")
    c.add_argument("--apoz", type=path_of, metavar="FILE", help="use this apoz.json of a pretrain step, do not measure")
    c.add_argument(
        "--flops-as", choices=("thop",), help="count linear layers twice, as FedRolex's Table 3.6 does, and show means"
    )

    c = plain("report", "runs.report", "show finished runs in one table and on one HTML page")
    c.add_argument("runs", type=path_of, nargs="+", metavar="RUN", help="folder of a finished run")
    c.add_argument("--out", type=path_of, default=Path("report.html"), metavar="FILE")

    c = plain("verify", "checks.verify", "check that nothing in a run has changed, and compute parts of it again")
    c.add_argument("run", type=path_of, metavar="RUN", help="folder of a run")
    c.add_argument("--rounds", default="", metavar="LIST", help="train the clients of these rounds again, such as 3,7")
    c.add_argument("--sample", type=int, default=0, metavar="N", help="train the clients of N random rounds again")
    c.add_argument("--all", action="store_true", help="train the clients of all rounds again")
    c.add_argument("--public-key", metavar="HEX", help="expected key of the signature")

    c = plain("replay", "checks.replay", "train one client of one round again, and compare the bits with the run")
    c.add_argument("run", type=path_of, metavar="RUN", help="folder of a run")
    c.add_argument("--round", type=int, required=True, metavar="N", help="number of the round, from 1")
    c.add_argument("--client", type=int, required=True, metavar="N", help="number of the client")
    terminal.add_set(c, "change training.* or algorithm.* for this training only")
    c.add_argument("--pdb", action="store_true", help="open Python's debugger before each training step")
    c.add_argument(
        "--on-step", metavar="module:function", help="function to call with (spec, weights, batch) before each step"
    )

    c = plain("fork", "forks.fork", "continue a run after some round with other settings, or without some clients")
    c.add_argument("run", type=path_of, metavar="RUN", help="folder of a run")
    c.add_argument("--at", type=int, metavar="N", help="number of rounds that both runs share")
    terminal.add_set(c, "change a parameter for the rounds that follow")
    c.add_argument(
        "--without", action="append", default=[], metavar="WHO",
        help="leave out clients: client=7, client=7,9, tier=NAME or label=3 (clients with this label); may be repeated",
    )  # fmt: skip
    c.add_argument("--run-id", metavar="ID", help="name of the new run")
    c.add_argument("--resume", action="store_true", help="continue the fork --run-id")

    c = plain("contributions", "forks.contributions", "measure what each client contributes, by leaving it out")
    c.add_argument("run", type=path_of, metavar="RUN", help="folder of a finished run")
    c.add_argument("--by", choices=("client", "tier"), default="client", help="what to leave out (default: client)")
    c.add_argument("--jobs", type=int, default=1, metavar="N", help="number of parallel forks (default: 1)")

    c = plain("forget", "forks.forget", "train a run again without a client, and certify that no round asked it")
    c.add_argument("run", type=path_of, metavar="RUN", help="folder of a run")
    c.add_argument("--client", required=True, metavar="LIST", help="clients to forget, such as 7 or 7,9")
    c.add_argument("--run-id", metavar="ID", help="name of the new run")
    c.add_argument("--resume", action="store_true", help="continue the run --run-id")

    c = plain("diff", "checks.diff", "show where two runs part, and which parameters or inputs differ")
    c.add_argument("first", type=path_of, metavar="RUN", help="folder of a run")
    c.add_argument("second", type=path_of, metavar="RUN", help="folder of another run")

    c = plain("trace", "checks.trace", "write the measured times of a run's clients as a trace for the simulated clock")
    c.add_argument("run", type=path_of, metavar="RUN", help="folder of a finished run")
    c.add_argument(
        "--out", type=path_of, default=Path("trace.csv"), metavar="FILE", help="file to write (default: %(default)s)"
    )

    c = add("fetch", "host.fetch", "download and check data sets, or files that a run pushed with DVC; list data sets")
    c.add_argument("names", nargs="*", metavar="NAME", help="names of data sets, or the ID of an MLflow run")
    c.add_argument("--root", metavar="DIR", help="data folder (default: FLEXFLEET_DATA, or ~/.cache/flexfleet/data)")
    c.add_argument("--out", type=path_of, metavar="DIR", help="folder for the files of a run (default: runs/ID)")
    terminal.add_short(c, ("mlflow_uri",))

    c = add("status", "runs.status", "show the progress of runs, and the state of invited devices")
    c.add_argument(
        "run", type=path_of, nargs="?", metavar="RUN",
        help="folder of a run, a comparison or a study (default: all runs in run.store)",
    )  # fmt: skip
    c.add_argument("--failures", action="store_true", help="show why clients of RUN failed, with logs and tracebacks")

    c = add("gc", "runs.gc", "delete runs that nothing keeps, with their exports, MLflow runs and DVC objects")
    c.add_argument(
        "--keep", required=True, metavar="LIST",
        help="keep these runs, comparisons and studies: names, aliases of registered models, ages; champion,30d",
    )  # fmt: skip
    c.add_argument("--dry-run", action="store_true", help="list only, and delete nothing")
    terminal.add_short(c, ("mlflow_uri", "store_uri"))

    c = add(
        "invite", "host.invite", "invite devices that train with their own data (run.backend=agents), or revoke one"
    )
    c.add_argument("--tier", metavar="NAME", help="the devices' tier in the fleet (default: any)")
    c.add_argument("--count", type=int, default=1, metavar="N", help="number of devices (default: 1)")
    c.add_argument(
        "--out", type=path_of, default=Path("invitations"), metavar="DIR",
        help="folder for the invitations, with a file for each device (default: %(default)s)",
    )  # fmt: skip
    c.add_argument("--revoke", metavar="NAME", help="revoke this device, so that it gets no further assignments")

    c = plain("agent", "host.agent", "execute assignments on this invited device, until the server stops responding")
    add_options(c)

    c = add("profile", "host.profile", "measure how fast this device trains, and print an entry for fleet.tiers")
    c.add_argument("--tier", metavar="NAME", help="name of the tier (default: name of the machine)")
    c.add_argument("--memory", type=float, metavar="MB", help="memory that training may use (default: the free memory)")
    c.add_argument("--seconds", type=float, default=5.0, metavar="S", help="training time for each level (default: 5)")
    c.add_argument("--device", default="cpu", metavar="NAME", help="the torch device, e.g. cuda (default: cpu)")
    c.add_argument("--out", type=path_of, metavar="FILE", help="also write the entry to this file, as YAML")
    terminal.add_short(c, ("dataset", "model", "algorithm"))

    c = add("check", "runs.check", "check parameters, data, partition, fleet and pool without training")
    c.add_argument(
        "--connect", action="store_true",
        help="also contact S3, MLflow, the DVC remote, the cluster and Kubeflow; exit code 6 if one cannot be used",
    )  # fmt: skip
    terminal.add_short(c, SHORT)

    c = add("forecast", "checks.forecast", "forecast the time, traffic, memory and cost of a run, without running it")
    about = "seconds of training on this machine to measure time and memory (default: 10; 0: no measurement)"
    c.add_argument("--probe", type=float, default=10.0, metavar="SECONDS", help=about)
    c.add_argument("--prices", type=path_of, metavar="FILE", help="YAML with node_hour, gb_up, gb_down and gb_month")
    terminal.add_short(c, SHORT)

    c = plain("init", "listing.init", "write a params.yaml that explains every parameter, or files for a new algorithm")
    c.add_argument(
        "folder", type=path_of, nargs="?", default=Path(), metavar="DIR", help="folder (default: working directory)"
    )
    c.add_argument(
        "--algorithm", metavar="NAME",
        help="write NAME.py, a small algorithm to modify, and test_NAME.py, its conformance test, instead",
    )  # fmt: skip

    c = add("params", "listing.params", "explain the parameters in use, or all parameters that contain a word")
    c.add_argument("word", nargs="?", metavar="WORD", help="part of a name, choice or description, or an algorithm")
    terminal.add_short(c, ("model", "algorithm"))

    c = plain("list", "listing.list_", "list algorithms, models, data sets, fleets, suites and other components")
    c.add_argument("what", choices=tuple(LISTS), metavar="WHAT", help=", ".join(LISTS))

    c = plain(
        "completion",
        "completion.completion",
        'print the completion script of a shell: eval "$(flexfleet completion bash)"',
    )
    c.add_argument("shell", choices=("bash", "zsh", "fish"))
    c.set_defaults(parser=parser)

    c = plain("doctor", "host.doctor", "show what is installed, and which features each extra enables")
    return p


ON_DEVICES = ("agent", "check", "completion", "doctor", "fetch", "init", "list", "params", "profile")
"""Commands that also support Python 3.10, which JetPack 6 contains. The other commands need Python 3.11."""


def dispatch(argv: Sequence[str]) -> int:
    args = parser().parse_args(argv)
    if sys.version_info < (3, 11) and args.command not in ON_DEVICES:
        raise EnvironmentFailure(
            f"`flexfleet {args.command}` needs Python 3.11 or newer, got {platform.python_version()}. Python 3.10 "
            f"can run only {', '.join(ON_DEVICES)}"
        )
    terminal.settle(args)
    module, _, function = args.call.partition(".")
    return getattr(import_module(f"flexfleet.cli.{module}"), function)(args) or 0


def main() -> None:
    """Run the command line, and exit. Expected errors have the exit codes of their classes (`fl_engine.core.errors`).
    The other exit codes are 0 (success), 1 (unexpected error, or a followed run failed), 130 (Ctrl-C) and 143 (SIGTERM
    for an agent, a pod or a command that follows a run)."""
    terminal.run_main(dispatch)


if __name__ == "__main__":
    main()
