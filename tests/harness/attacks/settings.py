"""Names, paths and settings that would open a hole. The engine has to refuse them before anything is trained."""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from fl_engine.core.errors import BadInput, FlexfleetError
from fl_engine.remote.kubernetes import jobs
from fl_engine.remote.settings import KubernetesConfig
from fl_engine.testing.tiny import tiny_site
from flexfleet.cli import main as cli
from flexfleet.config import load_config
from flexfleet.files.run_folder import folder_lock
from flexfleet.pipeline import check
from flexfleet.pipeline.prepare import Resolved
from tests.harness.attacks.scene import ALGORITHM
from tests.harness.attacks.table import Attack
from tests.harness.processes import QUICK

ROOT = Path(__file__).parents[3]
WEEK_S = 604_800
PRIVATE = (*QUICK, "algorithm.aggregation={name: private}", "rounds.norm_bound=null")
IN_PODS = ("run.backend=kubernetes", "run.remote=s3://runs/a", "kubernetes.image=flexfleet")


@contextlib.contextmanager
def elsewhere() -> Iterator[Path]:
    """Changes to a new, empty folder."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            yield Path(folder)
        finally:
            os.chdir(before)


def control() -> None:
    """Checks that the settings below are accepted without the part that makes them wrong."""
    check.check(Resolved.load(None, [*PRIVATE, *IN_PODS]))
    load_config(None, [f"kubernetes.deadline_s={WEEK_S // 2}"])


def a_runs_name(name: str) -> str | None:
    with elsewhere() as here, contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            cli.dispatch(["run", f"--run-id={name}", *(f"--set={s}" for s in (*QUICK, "rounds.stop=1"))])
        except (BadInput, SystemExit):
            made = [p.name for p in here.rglob("*")]
            return f"refused, but left {made}" if made else None
    return "ran"


def a_lock_that_is_a_link() -> str | None:
    with tempfile.TemporaryDirectory() as folder:
        target, out = Path(folder) / "target", Path(folder) / "run"
        target.write_text("precious")
        out.mkdir()
        (out / ".lock").symlink_to(target)
        with contextlib.suppress(FlexfleetError, OSError), folder_lock(out):
            pass
        return None if target.read_text() == "precious" else "overwrote what the link points to"


def configured(*sets: str) -> str | None:
    try:
        check.check(Resolved.load(None, list(sets)))
    except BadInput:
        return None
    return f"taken: {', '.join(sets[-2:])}"


def a_node_with_many_devices() -> str | None:
    """If clients' data lies on their devices, a node may only get the orders of its own client."""
    fleet = tiny_site(ALGORITHM).fleet
    found = jobs.classes(fleet, KubernetesConfig(placement="device", data="host:/data"))
    shared = len(fleet) - len({of.host for of in found.values() if of.host is not None})
    return f"{shared} devices share a node with another one" if shared else None


def any_address() -> str | None:
    """The network policy of clients' pods in the overlay `cluster` must not allow every address."""
    wide = []
    for policy in yaml.safe_load_all((ROOT / "k8s/overlays/cluster/network.yaml").read_text()):
        for rule in policy["spec"].get("egress", ()):
            blocks = [to["ipBlock"]["cidr"] for to in rule.get("to", ()) if "ipBlock" in to]
            if not rule.get("to") or any(block.endswith("/0") for block in blocks):
                wide.append(policy["metadata"]["name"])
    return f"anywhere, by {', '.join(wide)}" if wide else None


def _attack(name: str, tries: str, run: Callable[..., str | None], *given: Any) -> Attack:
    return Attack(name, tries, "engine", partial(run, *given))


ATTACKS = (
    _attack("a run's name: line break", "to forge lines of the log", a_runs_name, "a\nb"),
    _attack("a run's name: escape", "the same", a_runs_name, "a\x1b[2J"),
    _attack("a run's name: turned around", "the same", a_runs_name, "a\u202eb"),
    _attack("a run's name: another folder", "to write elsewhere", a_runs_name, "../a"),
    _attack("a run's name: an option", "to be read as one", a_runs_name, "-a"),
    _attack("a lock that is a link", "to empty somebody's file", a_lock_that_is_a_link),
    _attack("a deadline beyond seven days", "URLs that end before", configured, f"kubernetes.deadline_s={WEEK_S + 1}"),
    _attack("private, with a reference", "all data's APoZ", configured, *PRIVATE, "pretrain.reference=true"),
    _attack("private, with a shared proxy", "clients' APoZ", configured, *PRIVATE, "partition.proxy_shared=true"),
    _attack("private, by the clock", "sample counts", configured, *PRIVATE, "rounds.stop_simulated_s=9.0"),
    _attack("private, curious", "single outcomes", configured, *PRIVATE, "algorithm.selection={name: curiosity}"),
    _attack("private, with a bound", "others decide", configured, *PRIVATE, "rounds.norm_bound=10"),
    _attack("placement: device", "the keys of other devices", a_node_with_many_devices),
    _attack("a pod's network", "any address on 443", any_address),
)
