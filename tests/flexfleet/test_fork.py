"""`flexfleet fork`, `contributions` and `forget`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import flexfleet as ff
from fl_engine.core.errors import IntegrityError
from fl_engine.storage.checkpoints import Checkpoints
from fl_engine.storage.store import FolderStore

SETS = ("algorithm.name=heterofl", "run.keep=all", "rounds.stop=4", "training.fraction=0.4")


@pytest.fixture(scope="module")
def sets(quick: Sequence[str]) -> list[str]:
    return [*(text for text in quick if not text.startswith("rounds.stop")), *SETS]


@pytest.fixture(scope="module")
def parent(flexfleet: Any, sets: list[str], module_folder: Path) -> Path:
    assert flexfleet("run", "--run-id", "a", sets=sets).code == 0
    return Path("runs/a").resolve()


@pytest.fixture(autouse=True)
def run(parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(parent, tmp_path / "runs" / "a"))


def links(run: str) -> list[str]:
    return [row.link for row in Checkpoints(FolderStore(Path(run).resolve())).rows()]


def asked_in(run: Path) -> list[list[int]]:
    return [[line["client"] for line in row.clients] for row in Checkpoints(FolderStore(run)).rows()]


def test_fork_shares_rounds_and_continues_with_other_settings(flexfleet: Any) -> None:
    done = flexfleet("fork", "runs/a", "--at", "2", "--run-id", "b", "--json", sets=["training.lr=0.2"])
    assert done.code == 0, done.err
    assert links("runs/b")[:2] == links("runs/a")[:2]
    assert "Rounds 1 to 2 (grey) are those of a." in Path("runs/b/report.html").read_text()
    found = flexfleet("diff", "runs/a", "runs/b", "--json").json
    assert found["settings"] == {"training.lr": [0.05, 0.2]} and found["round"] == 3
    proof = flexfleet("verify", "runs/b", "--all", "--json").json
    assert proof["trained"] == [3, 4] and any("rounds 1 to 2" in text for text in proof["not_checked"])


def test_fork_without_changes_gives_the_same_bits(flexfleet: Any) -> None:
    done = flexfleet("fork", "runs/a", "--at", "2", "--run-id", "b").ok()
    assert ff.load("runs/b").model_sha256 == ff.load("runs/a").model_sha256
    assert "not compared" not in done.out


def test_killed_fork_is_resumed(flexfleet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = flexfleet("fork", "runs/a", "--at", "1", "--run-id", "b", "--json").json
    put, count = FolderStore.put, 0

    def dying(self: FolderStore, key: str, value: Any) -> None:
        nonlocal count
        count += 1
        if count == stop:
            raise KeyboardInterrupt
        put(self, key, value)

    for stop in (2, 6, 9):
        count = 0
        monkeypatch.setattr(FolderStore, "put", dying)
        assert flexfleet("fork", "runs/a", "--at", "1", "--run-id", f"c{stop}").code != 0
        monkeypatch.setattr(FolderStore, "put", put)
        again = flexfleet("fork", "runs/a", "--at", "1", "--run-id", f"c{stop}", "--resume", "--json")
        assert again.code == 0, again.err
        assert again.json["model_sha256"] == expected["model_sha256"]


def test_other_runs_are_not_resumed_as_a_fork(flexfleet: Any) -> None:
    assert flexfleet("fork", "runs/a", "--at", "2", "--run-id", "a", "--resume").code == 2
    assert flexfleet("fork", "runs/a", "--at", "2", "--run-id", "b").code == 0
    assert flexfleet("fork", "runs/a", "--at", "1", "--run-id", "b", "--resume").code == 2
    assert flexfleet("fork", "runs/a", "--at", "2", "--run-id", "b", "--resume").code == 0


def test_fork_without_a_client_equals_the_run_that_never_had_it(flexfleet: Any, run: Path, sets: list[str]) -> None:
    rounds = asked_in(run)
    client = next(client for client in rounds[-1] + rounds[-2] if all(client not in each for each in rounds[:1]))
    forked = flexfleet("fork", "runs/a", "--without", f"client={client}", "--run-id", "b", "--json").json
    never = flexfleet("run", "--run-id", "never", "--json", sets=[*sets, f"rounds.without=[{client}]"]).json
    assert forked["model_sha256"] == never["model_sha256"]
    assert all(client not in each for each in asked_in(Path("runs/b")))
    assert flexfleet("diff", "runs/b", "runs/never", "--json").json["equal"]


@pytest.mark.parametrize("who", ["tier=weak", "label=3"])
def test_groups_of_clients_are_left_out(flexfleet: Any, who: str) -> None:
    assert flexfleet("fork", "runs/a", "--without", who, "--run-id", "b").code == 0
    left_out = json.loads(Path("runs/b/run.json").read_text())["config"]["rounds"]["without"]
    assert left_out and not {client for each in asked_in(Path("runs/b")) for client in each} & set(left_out)


@pytest.mark.parametrize(
    ("argv", "changes"),
    [
        ((), ()),
        (("--at", "5"), ()),
        (("--at", "-1"), ()),
        (("--at", "2"), ("seed=3",)),
        (("--at", "2"), ("partition.alpha=3",)),
        (("--at", "2"), ("algorithm.name=flexfl",)),
        (("--without", "client=999"), ()),
        (("--without", "client=a"), ()),
        (("--without", "tier=nobody"), ()),
        (("--without", "7"), ()),
    ],
)
def test_impossible_forks_are_refused(flexfleet: Any, argv: Sequence[str], changes: Sequence[str]) -> None:
    assert flexfleet("fork", "runs/a", "--run-id", "b", *argv, sets=changes).code == 2
    assert not Path("runs/b/run.json").exists()


def test_unknown_client_is_not_left_out(flexfleet: Any, sets: list[str]) -> None:
    done = flexfleet("run", "--run-id", "b", sets=[*sets, "rounds.without=[99]"])
    assert done.code == 2 and "rounds.without" in done.err


def test_fork_at_a_round_without_a_state_names_the_kept_rounds(flexfleet: Any, sets: list[str]) -> None:
    flexfleet("run", "--run-id", "sums", sets=[*sets, "run.keep=sums", "rounds.commit_every=1"])
    done = flexfleet("fork", "runs/sums", "--at", "1", "--run-id", "b")
    assert done.code == 2 and "3, 4" in done.err


def test_fork_without_a_client_begins_at_the_last_kept_state(flexfleet: Any, run: Path, sets: list[str]) -> None:
    client = asked_in(run)[1][0]
    flexfleet("run", "--run-id", "sums", sets=[*sets, "run.keep=sums", "rounds.commit_every=1"])
    forked = flexfleet("fork", "runs/sums", "--without", f"client={client}", "--run-id", "b", "--json").json
    never = flexfleet("run", "--run-id", "never", "--json", sets=[*sets, f"rounds.without=[{client}]"]).json
    assert forked["model_sha256"] == never["model_sha256"]
    assert json.loads(Path("runs/b/run.json").read_text())["forked"]["round"] == 0


def test_rounds_of_the_first_run_are_forked_and_verified_there(flexfleet: Any) -> None:
    flexfleet("fork", "runs/a", "--at", "2", "--run-id", "b", sets=["training.lr=0.2"]).ok()
    for argv in (("fork", "runs/b", "--at", "1", "--run-id", "c"), ("verify", "runs/b", "--rounds", "1")):
        done = flexfleet(*argv)
        assert done.code == 2 and "rounds of a" in done.err


@pytest.mark.parametrize("own", [("algorithm.name=ditto",), ("rounds.mode=buffered", "rounds.buffer=1")], ids=str)
def test_fork_with_client_states_or_pending_updates_is_verified_and_replayed(
    own: Sequence[str], flexfleet: Any, sets: list[str]
) -> None:
    flexfleet("run", "--run-id", "own", sets=[*sets, *own]).ok()
    flexfleet("fork", "runs/own", "--at", "2", "--run-id", "b").ok()
    assert ff.load("runs/b").model_sha256 == ff.load("runs/own").model_sha256
    assert flexfleet("verify", "runs/b", "--all", "--json").json["trained"] == [3, 4]
    client = asked_in(Path("runs/b"))[3][0]
    again, before = (ff.load(name).replay(round=4, client=client) for name in ("runs/b", "runs/own"))
    assert all(t.equal(again.update.payload[name]) for name, t in before.update.payload.items())


def test_forgotten_client_has_no_pending_update_in_the_shared_rounds(flexfleet: Any, sets: list[str]) -> None:
    flexfleet("run", "--run-id", "own", sets=[*sets, "rounds.mode=buffered", "rounds.buffer=1"]).ok()
    lines = [line for row in Checkpoints(FolderStore(Path("runs/own"))).rows() for line in row.clients]
    client = next(line["client"] for line in lines if line.get("staleness"))
    flexfleet("forget", "runs/own", "--client", str(client), "--run-id", "b").ok()
    assert ff.load("runs/b").verify().forgotten == (client,)
    assert ff.load("runs/b").model_sha256 != ff.load("runs/own").model_sha256


def test_contributions_of_a_fork_refuse_clients_of_the_shared_rounds_first(flexfleet: Any) -> None:
    flexfleet("fork", "runs/a", "--at", "3", "--run-id", "b").ok()
    done = flexfleet("contributions", "runs/b")
    assert done.code == 2 and "shared with a" in done.err and not list(Path("runs").glob("b-without*"))


def test_private_run_is_not_forked(flexfleet: Any, sets: list[str]) -> None:
    private = [
        *sets,
        "algorithm.aggregation={name: private, noise_multiplier: 1.0, clip: 1.0}",
        "rounds.stop=2",
        "algorithm.static_bn=false",
    ]
    assert flexfleet("run", "--run-id", "private", sets=private).code == 0
    refused = flexfleet("fork", "runs/private", "--without", "client=0", "--run-id", "b")
    assert refused.code == 2 and "private" in refused.err


def test_contributions_of_tiers(flexfleet: Any) -> None:
    found = flexfleet("contributions", "runs/a", "--by", "tier", "--jobs", "2", "--json").json
    assert found["metric"] == "avg"
    for each in found["contributions"]:
        avg = ff.load(f"runs/a-without-{each['name'].replace('=', '-')}").metrics["avg"] if each["rounds"] else None
        assert avg in (None, each["avg"])
        assert each["contribution"] == pytest.approx(ff.load("runs/a").metrics["avg"] - each["avg"])


def test_contributions_print_their_cost_first(flexfleet: Any) -> None:
    first = flexfleet("contributions", "runs/a", "--by", "tier").out.splitlines()[0]
    assert first.startswith(("1 forks", "2 forks", "3 forks")) and first.endswith("min with 1 jobs")


def test_client_of_a_shared_proxy_cannot_be_forgotten(flexfleet: Any, run: Path) -> None:
    record = json.loads((run / "run.json").read_text())
    record["config"]["partition"]["proxy_shared"] = True
    (run / "run.json").write_text(json.dumps(record))
    done = flexfleet("forget", "runs/a", "--client", "0", "--run-id", "b")
    assert done.code == 2 and "proxy_shared" in done.err and not Path("runs/b").exists()


def test_forgotten_client_is_certified(flexfleet: Any, run: Path) -> None:
    client = asked_in(run)[-1][0]
    assert flexfleet("forget", "runs/a", "--client", str(client), "--run-id", "b").code == 0
    assert flexfleet("verify", "runs/b", "--json").json["forgotten"] == [client]
    path = Path("runs/b/forgotten.json")
    text = path.read_text()
    path.write_text(text.replace(f"  {client}\n", f"  {client},\n  {client + 1}\n"))
    with pytest.raises(IntegrityError):
        ff.load("runs/b").verify()
    shutil.copy(path, "runs/a/forgotten.json")
    with pytest.raises(IntegrityError):
        ff.load("runs/a").verify()
