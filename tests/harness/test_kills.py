"""Twenty kills; and that the harness reports what it should: a harness that cannot fail proves nothing."""

from __future__ import annotations

import json
import math
import os
import random
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fl_engine.storage.store import FolderStore
from tests.harness import cuts, faults, invited, kills, outcome
from tests.harness.processes import Done
from tests.harness.world import BUCKET, SMALL, VARIANTS, Place, Variant, World, missing, opened, place

ROUNDS = 3
FOLDER, MOTO, STAYING, AGENTS = (
    next(v for v in VARIANTS if v.name == name)
    for name in ("folder-in_process", "moto-in_process", "moto-staying", "moto-agents")
)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with opened(ROUNDS) as found:
        yield found
        for left in found.folder.parent.glob("*-*-*"):
            shutil.rmtree(left)


Campaign = Callable[..., tuple[int, dict[str, Any], str]]


@pytest.fixture
def campaign(world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Campaign:
    """Runs the command in the world that exists already. Returns its exit code, the object on stdout, and stderr."""
    monkeypatch.setattr(kills, "opened", lambda _: nullcontext(world))

    def run(*argv: str) -> tuple[int, dict[str, Any], str]:
        code = kills.main([*argv, "--rounds", str(ROUNDS), "--json"])
        said = capsys.readouterr()
        return code, json.loads(said.out), said.err

    return run


# --------------------------------------------------------------------------------------------------- the campaign
@pytest.mark.parametrize(("stores", "count"), [(("folder", "moto"), 20), (("radosgw",), 6)], ids=["any", "radosgw"])
def test_runs_that_are_killed_come_to_what_undisturbed_ones_come_to(
    campaign: Campaign, stores: tuple[str, ...], count: int
) -> None:
    if why := next(filter(None, map(missing, stores)), None):
        pytest.skip(why)
    names = [variant.name for variant in VARIANTS if variant.store in stores]
    code, found, said = campaign("--kills", str(count), "--only", ",".join(names))
    assert code == 0, said
    assert (found["kills"], found["survived"], found["lost"], found["identical"]) == (count, count, 0, True)
    assert list(found["variants"]) == names
    for name, variant in found["variants"].items():
        assert variant["kills"] == sum(variant["landed"].values()) > 0 and name in said


# -------------------------------------------------------------------------------------------------------- devices
@pytest.fixture(scope="module")
def with_devices(world: World) -> kills.Undisturbed:
    found = kills.undisturbed(world, AGENTS)
    assert found.left == []
    return found


def test_devices_give_the_model_of_one_process(normal: kills.Undisturbed, with_devices: kills.Undisturbed) -> None:
    assert with_devices.outcome.model == normal.outcome.model


@pytest.mark.parametrize("how", cuts.HOWS)
def test_a_device_that_is_cut_off_for_good_in_an_upload_changes_nothing(
    world: World, with_devices: kills.Undisturbed, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(invited, "FATES", ("cut off",))
    monkeypatch.setattr(invited, "MOMENTS", {"an upload": (b"/leases/",)})
    for name, value in {"HOWS": (how,), "FOR_GOOD": 1.0, "AFTER": 2, "MEETS_S": 300.0}.items():
        monkeypatch.setattr(cuts, name, value)
    at, rng = place(world, AGENTS), random.Random(0)
    try:
        child = at.start()
        assert kills.a_device(child, at, with_devices, rng) == "cut off"
        assert at.devices is not None
        assert at.devices.cuts == Counter([f"{how} in an upload, for good"])
        done = child.wait(kills.HANGS_S)
        assert kills.verdict(at, with_devices, done) == []
        assert re.search(r"device-\d is silent for \d+ s; trying again", done.err)
    finally:
        at.close()


# -------------------------------------------------------------------------------- coordinators, and pods that stay
@pytest.mark.parametrize("how", kills.GIVES_UP)
def test_a_coordinator_that_is_cut_off_for_good_gives_up_and_the_same_command_goes_on(
    world: World, normal: kills.Undisturbed, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(kills, "WAYS", ())
    monkeypatch.setattr(kills, "GIVES_UP", (how,))
    monkeypatch.setattr(kills, "MOMENTS", {"a state": (b"state.",)})
    monkeypatch.setattr(kills, "PER_RUN", (1, 1))
    monkeypatch.setitem(SMALL, "fl_engine.storage.s3.ATTEMPTS", 3)  # it gives up sooner
    for name, value in {"FOR_GOOD": 1.0, "AFTER": 2, "MEETS_S": 300.0}.items():
        monkeypatch.setattr(cuts, name, value)
    at, tally = place(world, MOTO), kills.Tally()
    try:
        assert kills.disturbed(at, replace(normal, first_s=0.0, round_s=0.0), 1, random.Random(0), tally) == []
    finally:
        at.close()
    assert tally.points == Counter([f"{how} in a state, for good"]) and tally.starts == 2
    said = (at.folder / "logs" / "1.err").read_text()
    assert "cannot be reached" in said and "--resume" in said


def test_a_pod_that_is_cut_off_for_good_in_an_upload_changes_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    staying, rng, tally = kills.undisturbed(world, STAYING), random.Random(0), kills.Tally()
    monkeypatch.setattr(invited, "MOMENTS", {"an upload": (b"/leases/",)})
    for name, value in {"FOR_GOOD": 1.0, "AFTER": 2, "MEETS_S": 300.0}.items():
        monkeypatch.setattr(cuts, name, value)
    monkeypatch.setattr(rng, "choice", lambda of, choice=rng.choice: "cut off" if "cut off" in of else choice(of))
    at = place(world, STAYING)
    try:
        child = at.start()
        assert kills.a_pod_that_stays(child, at, set(), rng, tally) == "cut off"
        done = child.wait(kills.HANGS_S)
        assert kills.verdict(at, staying, done) == []
        assert re.search(r"is silent for \d+ s; trying again", done.err)
    finally:
        at.close()


# --------------------------------------------------------------------------------------------------- fault points
def in_a_fork(act: Callable[[], object]) -> int:
    child = os.fork()
    if not child:
        try:
            act()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


PART = r".b.PID.part"


@pytest.mark.parametrize(
    ("operation", "when", "left"),
    [
        ("put", "before", {"a": 8}),
        ("write", "middle", {"a": 8, PART: 4}),
        ("rename", "before", {"a": 8, PART: 8}),
        ("rename", "after", {"a": 8, "b": 8}),
        ("put", "after", {"a": 8, "b": 8}),
        ("delete", "before", {"a": 8, "b": 8, "c": 8}),
        ("put", "forgotten", {"a": 8, "c": 8}),
    ],
)
def test_a_process_dies_at_the_operation_that_it_was_told(
    tmp_path: Path, operation: str, when: faults.When, left: dict[str, int]
) -> None:
    store = FolderStore(tmp_path)

    def work() -> None:
        with faults.install(operation, when, 1 if operation == "delete" else 2):
            for key in "abc":
                store.put(key, b"8 bytes.")
            if when != "forgotten":
                store.delete("a")

    assert in_a_fork(work) == (0 if when == "forgotten" else -signal.SIGKILL)
    found = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert len(found) == len(left)
    for name, size in left.items():
        assert [s for n, s in found.items() if n == name or (name == PART and n.endswith(".part"))] == [size]


def test_operations_are_counted_and_elsewhere_the_system_is_left_alone(tmp_path: Path) -> None:
    counts, store = tmp_path / "counts", FolderStore(tmp_path / "store")

    def work() -> None:
        with faults.install("rename", "before", 3, counts=str(counts)):
            for key in ("a", "b/c"):
                store.put(key, b"")
            for name in ("d", "e", "f"):
                (tmp_path / "x").touch()
                os.replace(tmp_path / "x", tmp_path / name)
            store.delete("b/c")

    assert in_a_fork(work) == 0
    counted = json.loads(counts.read_text())
    assert {name: counted[name] for name in ("put", "write", "rename", "delete")} == {
        "put": 2, "write": 2, "rename": 2, "delete": 1
    }  # fmt: skip


# ------------------------------------------------------------------------------------------ what must be reported
@pytest.fixture(scope="module")
def normal(world: World) -> kills.Undisturbed:
    found = kills.undisturbed(world, FOLDER)
    assert found.left == []
    return found


@pytest.fixture(scope="module")
def finished(world: World, normal: kills.Undisturbed) -> tuple[Place, Done]:
    """A finished run without any fault."""
    at = place(world, FOLDER)
    done = at.start().wait()
    assert kills.verdict(at, normal, done) == []
    return at, done


def without_a_round(at: Place) -> None:
    path = at.out / "history.json"
    history = json.loads(path.read_text())
    path.write_text(json.dumps(history | {"rounds": history["rounds"][:-1]}))


def with_another_model(at: Place) -> None:
    path = at.out / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\0")


def sql(*statements: str) -> Callable[[Place], None]:
    def tamper(at: Place) -> None:
        with closing(sqlite3.connect(at.folder / "mlflow.db")) as data_base, data_base:
            for statement in statements:
                data_base.execute(statement)

    return tamper


AGAIN = (
    "insert into metrics select key, value, timestamp + 1, run_uuid, step, is_nan from metrics "
    "where key = 'avg' and step = 2"
)
TAMPERED: dict[str, tuple[Callable[[Place], object], str]] = {
    "a round is missing": (without_a_round, "rounds in order: [0, 1, 2] was expected, got [0, 1]"),
    "the model differs": (with_another_model, "model: "),
    "the model is missing": (lambda at: (at.out / "model.safetensors").unlink(), "the outcome cannot be read"),
    "a metric is there twice": (sql(AGAIN), "tracked avg at step 2: "),
    "a metric is missing": (sql("delete from metrics where key = 'peak_mb' and step = 1"), "tracked peak_mb at step 1"),
    "another value": (sql("update metrics set value = 2 where key = 'avg' and step = 1"), "tracked avg at step 1"),
    "it runs": (sql("update runs set status = 'RUNNING'"), "runs in MLflow: RUNNING"),
    "a temporary file": (lambda at: (at.out / ".x.1.part").touch(), "temporary file: "),
}


@pytest.mark.parametrize("what", TAMPERED)
def test_what_is_not_as_it_should_be_is_reported(
    finished: tuple[Place, Done], normal: kills.Undisturbed, tmp_path: Path, what: str
) -> None:
    at, done = finished
    copy = replace(at, folder=tmp_path / "copy")
    shutil.copytree(at.folder, copy.folder)
    tamper, expected = TAMPERED[what]
    tamper(copy)
    line, *_ = kills.verdict(copy, normal, done)
    assert line.startswith(expected)


def test_a_process_an_upload_and_an_object_of_the_cluster_that_stay_are_reported(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outcome, "ENDS_S", 0.1)
    at = place(world, replace(MOTO, clients="pod"))
    at.s3.create_multipart_upload(Bucket=BUCKET, Key=f"{at.prefix}a/x")
    world.cluster.objects["jobs", "a-r0"] = {}
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env={"TOKEN": at.token})
    expected = [f"unfinished upload: {at.prefix}a/x", f"process: {process.pid}", "in the cluster: jobs a-r0"]
    assert outcome.leftovers(at) == [*expected, "runs in MLflow: none"]
    process.communicate()
    world.cluster.objects.clear()
    assert outcome.leftovers(at)[1:] == ["runs in MLflow: none"]


def test_a_device_that_ends_hangs_or_meets_an_unnamed_error_is_reported(
    world: World, with_devices: kills.Undisturbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = place(world, AGENTS)
    try:
        done = at.start().wait()
        assert kills.verdict(at, with_devices, done) == [] and at.devices is not None
        ended, hangs, errs = sorted(at.devices.running)
        at.devices.running[ended].kill()
        at.devices.running[ended].wait()
        at.devices.running[hangs].send(signal.SIGSTOP)
        at.devices.back[hangs] = time.time()  # it should be back
        (at.folder / "logs" / f"{errs}-1.err").open("a").write("Traceback (most recent call last):\n")
        monkeypatch.setattr(invited, "IDLE_S", 0.5)
        found = kills.verdict(at, with_devices, done)
        assert [line.partition(":")[0] for line in found] == [
            f"{errs}-1.err", f"{ended} has ended with -9", f"{hangs} is not idle 0 s after the run"
        ]  # fmt: skip
        at.devices.back[hangs] = math.inf
        assert len(kills.verdict(at, with_devices, done)) == 2, "nobody waits for one that is lost for good"
    finally:
        at.close()


def test_a_request_to_the_nursery_that_a_signal_ends_leaves_the_next_ones_their_answers(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted:
        def readline(self) -> str:
            raise SystemExit(143)

    one, other = (world.nursery.start("flexfleet", "list", "models", cwd=tmp_path) for _ in range(2))
    stdout = world.nursery._process.stdout
    for child in (other, one):
        monkeypatch.setattr(world.nursery._process, "stdout", Interrupted())
        with pytest.raises(SystemExit):
            child.poll()
        monkeypatch.setattr(world.nursery._process, "stdout", stdout)
        assert child.wait(kills.HANGS_S).code == 0
        assert "small_cnn" in child.wait().out


def test_a_store_that_forgets_what_it_was_given_is_found_out(world: World, normal: kills.Undisturbed) -> None:
    """Each try forgets one write in the second half of a run. Some writes are needed only after a kill, so the harness
    has to report only one of the tries."""
    found = []
    for number in range(normal.operations["put"] // 2, normal.operations["put"]):
        at = place(world, FOLDER)
        done = at.start({"operation": "put", "when": "forgotten", "number": number}).wait()
        try:
            found.append(bool(kills.verdict(at, normal, done)))
        except kills.Lost:
            found.append(True)
    assert any(found)


def test_a_run_of_another_seed_fails_the_campaign_which_says_how_to_see_it_again(
    campaign: Campaign, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of_another(world: World, variant: Variant) -> kills.Undisturbed:
        return undisturbed(world, replace(variant, sets=(*variant.sets, "seed=1", "partition.seed=0")))

    undisturbed = kills.undisturbed
    monkeypatch.setattr(kills, "undisturbed", of_another)
    code, found, said = campaign("--kills", "1", "--seed", "7", "--only", FOLDER.name)
    assert code == 1
    assert (found["kills"], found["survived"], found["identical"], found["seed"]) == (1, 1, False, 7)
    assert "model_sha256: " in said
    assert "python -m tests.harness.kills --kills 1 --rounds 3 --seed 7 --only folder-in_process" in said
    kept = said.partition(" is kept")[0].split()[-1]
    assert (Path(kept) / "runs" / "a" / "history.json").exists()


def test_a_run_that_does_not_go_on_is_lost(
    world: World, normal: kills.Undisturbed, finished: tuple[Place, Done], tmp_path: Path
) -> None:
    copy = replace(finished[0], folder=tmp_path / "copy")
    shutil.copytree(finished[0].folder, copy.folder)
    (copy.out / "run.json").write_text("{}")
    with pytest.raises(kills.Lost, match="ended with 4"):
        kills.disturbed(copy, normal, 0, random.Random(0), kills.Tally())


def test_a_process_that_was_done_before_it_could_be_killed_does_not_count(
    world: World, normal: kills.Undisturbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kills, "WAYS", ("any_time",))
    slow, tally = replace(normal, first_s=1e6, round_s=1e6), kills.Tally()  # makes every kill come too late
    assert kills.disturbed(place(world, FOLDER), slow, 3, random.Random(0), tally) == []
    assert (tally.kills, tally.starts, tally.runs) == (0, 1, 1)
