"""Letters to devices and their beats: what is not signed is not obeyed, and each lie of a device has its bound."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from fl_engine.backends.agents.post import Agent, Held, Post
from fl_engine.backends.agents.roster import AHEAD, Member, Roster
from fl_engine.core.errors import ClientError, ConfigError, IntegrityError
from fl_engine.exchange.letters import (
    BEAT_BYTES,
    Beat,
    Invitation,
    Leased,
    Letter,
    lease_key,
    next_key,
    pause,
    read_beat,
    read_letter,
)
from fl_engine.storage.s3 import S3Store
from fl_engine.storage.store import FolderStore
from tests.conftest import MemoryStore

KEY = "ab" * 32
HONEST: dict[str, Any] = {"name": "weak-1", "boot": "00" * 8, "number": 1, "state": "idle"}


@pytest.fixture
def post(tmp_path: Path) -> Post:
    return Post(FolderStore(tmp_path / "letters"), Roster(FolderStore(tmp_path / "roster")))


def left(post: Post, name: str, value: bytes) -> None:
    post.home.put(f"{name}/beat.json", value)


def test_a_letter_is_obeyed_only_with_the_device_s_key() -> None:
    letter = Letter(name="weak-1", number=3, run="a").signed(KEY)
    assert read_letter(letter.text(), KEY, 0) == (letter, KEY)
    with pytest.raises(IntegrityError, match="not signed with this device's key"):
        read_letter(letter.model_copy(update={"run": "b"}).text(), KEY, 0)
    with pytest.raises(IntegrityError, match="has 2 already"):
        read_letter(letter.text(), KEY, 2)
    with pytest.raises(ClientError, match="needs another invitation"):
        read_letter(letter.model_copy(update={"generation": 2}).signed(KEY).text(), KEY, 0)


def test_a_key_follows_from_the_one_before_and_the_letter_s_nonce() -> None:
    new = next_key(KEY, "77")
    letter = Letter(name="weak-1", number=3, generation=1, nonce="77").signed(new)
    assert read_letter(letter.text(), KEY, 0) == (letter, new)
    with pytest.raises(IntegrityError, match="not signed"):
        read_letter(letter.text(), "cd" * 32, 0)


@pytest.mark.parametrize(
    "lie",
    [
        {"name": "weak-2"}, {"name": "../weak-1"}, {"number": -1}, {"number": 10**9 + 1}, {"state": "dead"},
        {"said": "x" * 501}, {"version": "x" * 41}, {"requests": 10**9 + 1}, {"at": math.nan}, {"at": -1.0},
        {"loan": "../../other"}, {"boot": "x"}, {"more": 1},
    ],
    ids=str,
)  # fmt: skip
def test_a_beat_that_claims_too_much_is_none(lie: dict[str, Any]) -> None:
    good = Beat(**HONEST).signed(KEY)
    assert read_beat(good.text(), "weak-1", (KEY,)) == good
    with pytest.raises(IntegrityError):
        read_beat(good.model_copy(update=lie).text() if "more" not in lie else b'{"more": 1}', "weak-1", (KEY,))
    if "more" not in lie and "at" not in lie:
        with pytest.raises(IntegrityError):
            read_beat(good.model_copy(update=lie).signed(KEY).text(), "weak-1", (KEY,))


def test_a_device_that_lies_about_its_beat_counts_as_silent(post: Post) -> None:
    name = post.invite("weak", "weak").name
    member = post.roster.member(name)
    agent = post.meet(member)
    assert agent.away, "nobody was there yet"
    for bad in (b"", b"{", b" " * (BEAT_BYTES + 1), Beat(**HONEST).signed("cd" * 32).text()):
        left(post, name, bad)
        assert not post.hear(agent) and agent.away
    left(post, name, Beat(**HONEST).signed(member.key).text(BEAT_BYTES))
    assert post.hear(agent) and not agent.away
    assert not post.hear(agent), "the same beat is no second sign of life"


def test_a_folder_in_the_place_of_a_beat_hides_no_other_device(post: Post) -> None:
    post.invite("weak", None)
    (Path(post.home.uri("weak-1")) / "beat.json").mkdir()
    assert post.beat(post.roster.member("weak-1")) is None


def test_only_a_beat_that_names_the_loan_prolongs_its_lease(post: Post) -> None:
    name = post.invite("weak", None).name
    agent: Agent = post.meet(post.roster.member(name))
    agent.held = Held("11" * 8, [3], alone=True, since=0.0, heard=0.0)
    left(post, name, Beat(**{**HONEST, "number": 2, "loan": "22" * 8}).signed(agent.member.key).text())
    assert post.hear(agent) and not agent.held.taken and agent.held.heard == 0.0
    left(post, name, Beat(**{**HONEST, "number": 3, "loan": "11" * 8}).signed(agent.member.key).text())
    assert post.hear(agent) and agent.held.taken and agent.held.heard > 0.0


def test_the_key_is_changed_only_when_the_device_has_the_last_one(post: Post) -> None:
    invitation = post.invite("weak", None)
    name, key = invitation.name, invitation.key
    assert post.meet(post.roster.member(name)).member.generation == 0, "it was never there"
    left(post, name, Beat(**HONEST).signed(key).text())
    member = post.meet(post.roster.member(name)).member
    assert member.generation == 1 and member.key != key and member.before == key
    assert post.meet(post.roster.member(name)).member == member, "it has not read the letter yet"
    letter, found = read_letter(post.home.get(f"{name}/letter.json"), key, 0)
    assert found == member.key and letter.generation == 1
    left(post, name, Beat(**{**HONEST, "generation": 1}).signed(found).text())
    assert post.meet(post.roster.member(name)).member.generation == 2


def test_who_is_revoked_reads_so_and_its_name_is_not_given_again(post: Post) -> None:
    first, second = post.invite("weak", "weak"), post.invite("weak", "weak")
    assert (first.name, second.name) == ("weak-1", "weak-2")
    post.revoke("weak-1")
    assert post.roster.names() == ["weak-2"]
    assert read_letter(post.home.get("weak-1/letter.json"), first.key, 0)[0].revoked
    assert post.invite("weak", "weak").name == "weak-3"
    with pytest.raises(ConfigError, match="no device 'weak-1' is invited; invited are: weak-2, weak-3"):
        post.revoke("weak-1")


def test_an_answer_and_its_key_belong_to_one_loan(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    one, two = Leased(store, "11" * 8), Leased(store, "22" * 8)
    one.put("rounds/00000/updates/3.json", b"late")
    two.put("rounds/00000/updates/3.json", b"successor")
    assert two.get("rounds/00000/updates/3.json") == b"successor"
    assert one.list("rounds/00000/updates/") == ["rounds/00000/updates/3.json"]
    assert store.list("rounds/00000/updates/") == []
    keys = {lease_key(b"order", site, loan) for site in ("one", "other") for loan in ("11" * 8, "22" * 8)}
    assert len({*keys, b"order"}) == 5


def test_an_hour_without_orders_takes_about_170_looks() -> None:
    waited, looks = 0.0, 0
    while waited < 3600:
        waited, looks = waited + pause(waited), looks + 1
    assert 150 <= looks <= 185
    assert pause(0.0) == 0.2 and pause(100.0) == 10.0 and pause(1e9) == 30.0


def test_what_is_no_invitation_says_so() -> None:
    with pytest.raises(ConfigError, match="is no invitation"):
        Invitation.of(b"{}", "x.json")
    with pytest.raises(ConfigError, match="neither URLs nor a folder"):
        Invitation.of(Invitation(name="a-1", key=KEY, tier=None).model_dump_json().encode(), "x.json")
    assert Member(name="a-1", tier=None, key=KEY, before=KEY).rotated().before == KEY


def test_two_rosters_of_one_place_give_no_name_twice(tmp_path: Path) -> None:
    one, two = (Post(FolderStore(tmp_path / "letters"), Roster(FolderStore(tmp_path / name))) for name in "ab")
    first, second = one.invite("weak", None), two.invite("weak", None)
    assert (first.name, second.name) == ("weak-1", "weak-2")
    assert read_letter(one.home.get("weak-1/letter.json"), first.key, 0)[0].number == 0
    assert two.roster.names() == ["weak-2"], "the name that was taken is forgotten"


def test_letters_go_on_where_the_last_one_is_lost() -> None:
    """A device takes no letter with a lower number than the one before."""
    post = Post(MemoryStore(), Roster(MemoryStore()))
    name = post.invite("weak", None).name
    agent, numbers = post.meet(post.roster.member(name)), []
    for _ in range(2 * AHEAD + 3):
        post.say(agent, None)
        numbers.append(agent.letter.number)
    assert numbers == list(range(2, 2 * AHEAD + 5))
    for _ in range(2):
        post.home.delete(f"{name}/letter.json")
        numbers.append(post.meet(post.roster.member(name)).letter.number)
    assert numbers == sorted(set(numbers))


def test_a_device_that_is_revoked_while_the_roster_is_read_is_left_out(
    post: Post, monkeypatch: pytest.MonkeyPatch
) -> None:
    post.invite("weak", None), post.invite("weak", None)
    member = Roster.member

    def revoked(roster: Roster, name: str) -> Member:
        if name == "weak-1" and name in roster.names():
            monkeypatch.setattr(Roster, "member", member)
            post.revoke(name)
        return member(roster, name)

    monkeypatch.setattr(Roster, "member", revoked)
    assert [each.name for each in post.roster.members()] == ["weak-2"]


def test_nobody_is_invited_to_read_keys_in_the_clear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "k")
    roster = Roster(FolderStore(tmp_path))
    post = Post(S3Store("s3://runs/x", "http://s3.example"), roster, "POST")
    with pytest.raises(ConfigError, match=r"http://s3\.example is no https address"):
        post.invite("weak", None)
    assert roster.names() == []
