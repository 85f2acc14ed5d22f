"""Some of the attacks; and that the harness reports an attack that succeeds: a harness that cannot fail proves nothing.

Without radosgw, the tests that need it are skipped. `.ci/run` installs it, and lets them fail if it could not.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import boto3.session
import pytest
from botocore.config import Config

from fl_engine.storage.urls import Upload
from tests.harness.attacks import __main__ as attacks
from tests.harness.attacks import runs, settings, stored, updates, urls
from tests.harness.attacks.servers import BUCKET, HONEST, OWN, PREFIX, SECONDS, World, served
from tests.harness.attacks.table import Attack, Tally, try_all
from tests.harness.world import missing

REQUIRED = "FLEXFLEET_TEST_RADOSGW"
"""If it is `required`, tests that need radosgw fail without it instead of being skipped."""
QUICK = (
    "flexfl, 90 times the change",
    "flexfl, 90 times, in a first round of one",
    "cohort from the seed",
)


def named(*tables: tuple[Attack, ...]) -> pytest.MarkDecorator:
    found = [attack for table in tables for attack in table]
    return pytest.mark.parametrize("attack", found, ids=lambda attack: attack.name)


# ------------------------------------------------------------------------------------------- what the engine refuses
@pytest.mark.parametrize("room", [updates, settings, runs], ids=lambda room: room.__name__.rpartition(".")[2])
def test_what_is_honest_is_taken(room: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "RUINS", {key: lie for key, lie in runs.RUINS.items() if f"{key[0]}, {key[2]}" in QUICK})
    room.control()  # type: ignore[attr-defined]


@named(updates.ATTACKS, settings.ATTACKS, tuple(a for a in runs.ATTACKS if a.name in QUICK))
def test_the_engine_refuses(attack: Attack) -> None:
    assert attack.run() is None


# ------------------------------------------------------------------------------------------------------- on servers
@pytest.fixture(scope="module", params=["moto", "radosgw"])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    why = missing(request.param)
    if why is not None:
        (pytest.fail if os.environ.get(REQUIRED) == "required" else pytest.skip)(why)
    with served(request.param, tmp_path_factory.mktemp("s3")) as found:
        yield found


def test_a_server_refuses_what_was_not_signed(world: World) -> None:
    tally = Tally()
    try_all(urls.ATTACKS, tally, world, enforces=world.kind != "moto")
    assert tally.open == []
    if world.kind == "moto":
        assert tally.refused == [], "a refusal by moto proves nothing"
        assert {name.partition(":")[0] for name in tally.not_enforced} > {"another key", "read, wrong signature"}
    else:
        assert len(tally.refused) == len(urls.ATTACKS)


def test_what_a_client_does_to_its_own_files_stops_no_run(world: World) -> None:
    tally = Tally()
    some = [a for a in stored.attacks(world.kind) if not a.name.startswith("manifest") and "late" not in a.name]
    try_all(some, tally, world)
    assert tally.open == [] and len(tally.refused) == len(some)


# ------------------------------------------------------------------------------------------------------ the harness
class Careless(World):
    """Grants uploads by URLs whose signature covers only the address."""

    def grant(self, seconds: int = SECONDS) -> Upload:
        self.s3.delete_object(Bucket=BUCKET, Key=PREFIX + OWN)
        url = signing(self.s3.meta.endpoint_url).generate_presigned_url(
            "put_object", Params={"Bucket": BUCKET, "Key": PREFIX + OWN}, ExpiresIn=seconds
        )
        return Upload(verb="PUT", url=url, fields={}, size=len(HONEST))


@cache
def signing(endpoint: str) -> Any:
    session = boto3.session.Session(region_name="us-east-1")
    return session.client("s3", endpoint_url=endpoint, config=Config(signature_version="s3v4"))


def test_what_goes_through_is_open(world: World) -> None:
    wanted = {"acl public-read", "more bytes", *(a.name for a in urls.ATTACKS if a.name.startswith("copy-source"))}
    if world.kind == "radosgw":
        wanted |= {"grant-read", "grant-full-control", "grant-read-acp", "customer's key"}
    tally, careless = Tally(), Careless(world.kind, world.store, world.s3, "PUT", world.pool)
    try_all([attack for attack in urls.ATTACKS if attack.name in wanted], tally, careless)
    assert {name.partition(": ")[0] for name in tally.open} == wanted


def test_an_attack_that_cannot_be_tried_is_open() -> None:
    def breaks() -> str | None:
        raise RuntimeError("no such function")

    tally = Tally()
    try_all([Attack("a", "b", "engine", breaks), Attack("c", "d", "engine", lambda: None)], tally)
    assert tally.json() == {
        "tried": 2,
        "refused": 1,
        "open": ["a: could not be tried: RuntimeError: no such function"],
        "not_enforced": [],
    }


def test_the_command_prints_one_object_and_ends_with_its_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(attacks, "missing", lambda _: None)
    assert attacks.main(["--only", "wrong round", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"tried": 1, "refused": 1, "open": [], "not_enforced": []}
    got = (Attack("wrong round", "", "engine", lambda: "taken"),)
    monkeypatch.setitem(attacks.ENGINE, "updates", got)
    assert attacks.main(["--only", "wrong round", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["open"] == ["wrong round: taken"]


def test_without_radosgw_nothing_passes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert attacks.main(["--json"]) == 6
    said = capsys.readouterr()
    assert said.out == "" and "radosgw is not installed" in said.err


def test_every_attack_has_a_name_of_its_own() -> None:
    for table in (*attacks.ENGINE.values(), urls.ATTACKS, stored.attacks("moto"), stored.attacks("radosgw")):
        names = [attack.name for attack in table]
        assert len(names) == len(set(names)) > 0
        assert all(attack.decided == ("server" if table is urls.ATTACKS else "engine") for attack in table)
