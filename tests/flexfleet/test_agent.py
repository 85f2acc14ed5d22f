"""The device's side of letters and beats, without a process: what it remembers, and what it says when."""

from __future__ import annotations

import logging
import signal
import stat
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from fl_engine.backends.agents.post import Post
from fl_engine.backends.agents.roster import Roster
from fl_engine.core.errors import ClientError, ConfigError, EnvironmentFailure, IntegrityError
from fl_engine.exchange import code
from fl_engine.exchange.assignment import Assignment
from fl_engine.exchange.letters import Beat, Letter, Loan
from fl_engine.storage.store import FolderStore
from fl_engine.storage.urls import UrlStore
from fl_engine.training import cgroup
from flexfleet.cli import dispatch
from flexfleet.steps import agent
from flexfleet.steps.agent_line import Line, known_of
from tests.harness.devices import Clock

LOAN = Loan(id="11" * 8, seconds=3600, assignment=Assignment(round=0, clients=(0,), keys={0: "ab" * 32}, store="x"))


@pytest.fixture
def post(tmp_path: Path) -> Post:
    return Post(FolderStore(tmp_path / "letters"), Roster(FolderStore(tmp_path / "roster")))


@pytest.fixture
def invited(post: Post, tmp_path: Path) -> str:
    file = tmp_path / "weak-1.json"
    file.write_text(post.invite("weak", None).model_dump_json())
    return str(file)


@pytest.fixture
def line(invited: str, tmp_path: Path) -> Line:
    return Line(FolderStore(tmp_path / "device", 0o600), known_of(invited, tmp_path / "device")[0])


def beat_of(post: Post) -> Beat:
    return Beat.model_validate_json(post.home.get("weak-1/beat.json"))


def never(why: str) -> Any:
    raise AssertionError(why)


def test_a_late_beat_does_not_hide_that_the_order_failed(
    line: Line, post: Post, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread's beat hangs in the network while the main thread is through."""
    letter, hangs, on = line.read(), threading.Event(), threading.Event()
    put = FolderStore.put

    def slow(store: FolderStore, key: str, value: bytes) -> None:
        if key.endswith("beat.json") and threading.current_thread().name == "beats":
            hangs.set()
            assert on.wait(5)
        put(store, key, value)

    monkeypatch.setattr(FolderStore, "put", slow)
    working = agent.Working(line, letter.model_copy(update={"lease_s": 0.06}), LOAN, never)
    with working:
        assert hangs.wait(5)
        threading.Timer(0.05, on.set).start()
    line.failed("no data here")
    working._thread.join(5)
    assert not working._thread.is_alive()
    assert (beat_of(post).state, beat_of(post).said, beat_of(post).loan) == ("failed", "no data here", LOAN.id)


def test_a_failure_that_could_not_be_sent_is_said_again(
    line: Line, post: Post, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, sent, put = Clock(), [], FolderStore.put

    def broken(store: FolderStore, key: str, value: bytes) -> None:
        sent.append(key)
        if len(sent) < 4:
            raise EnvironmentFailure("no answer")
        put(store, key, value)

    monkeypatch.setattr(FolderStore, "put", broken)
    monkeypatch.setattr("flexfleet.steps.agent_line.time", clock)
    line.failed("no data here")
    assert len(sent) == 4 and beat_of(post).state == "failed" and clock.now < 1000 + line.lease_s


def test_no_error_ends_the_thread_that_ends_orders(line: Line, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    letter, tries, ended = line.read(), [], threading.Event()

    def broken(**_: Any) -> Letter:
        tries.append(1)
        if len(tries) < 3:
            raise RuntimeError("a bug")
        return letter.model_copy(update={"loan": None})

    monkeypatch.setattr(line, "read", broken)
    with agent.Working(line, letter.model_copy(update={"lease_s": 0.06}), LOAN, lambda why: ended.set()):
        assert ended.wait(5), "it has read that the order is not its own any more"
    assert line.known.done == LOAN.id and "a bug" in caplog.text


def test_an_order_that_takes_too_long_ends_without_a_beat(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    """A beat may take long where the network hangs, and would prolong the lease."""
    clock = Clock()
    monkeypatch.setattr(agent, "time", clock)
    working = agent.Working(line, line.read(), LOAN, never)
    monkeypatch.setattr(line, "beat", lambda *_, **__: never("a beat"))
    clock.sleep(LOAN.seconds + 1)
    assert working._ended() == "the order has taken more than 3600 s"


def test_a_letter_that_only_renews_urls_takes_no_beat(line: Line, post: Post, monkeypatch: pytest.MonkeyPatch) -> None:
    """A letter each ten minutes: one beat at the start and one in ten minutes, as without them; a new run takes one."""
    clock, beats, member = Clock(), [], post.roster.member("weak-1")
    monkeypatch.setattr(agent, "time", clock)
    real, written = line.read, [Letter.model_validate_json(post.home.get("weak-1/letter.json"))]

    def read() -> Letter:
        if clock.now < 1000 + 7200 and clock.now > 1000 + 600 * len(written):
            run = "b" if clock.now > 1000 + 6700 else ""
            written.append(post.write(member, written[-1], run=run))
        return real()

    monkeypatch.setattr(line, "read", read)
    monkeypatch.setattr(line, "beat", lambda *_: beats.append(clock.now))
    agent.serve(line, 3600.0, 100, False, never)
    assert len(written) == 12 and clock.now > 1000 + 7200 + 3000, "letters are signs of life"
    assert len([at for at in beats if 1000 + 1200 < at <= 1000 + 6600]) <= 9
    began = next(at for at in beats if at > 1000 + 6600)
    assert began < 1000 + 6700 + 100


def test_a_device_whose_urls_are_too_old_says_what_it_needs_and_not_at_each_look(
    line: Line, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock, looks = Clock(), []

    def refused(*_: Any) -> Letter:
        looks.append(clock.now)
        raise IntegrityError(f"GET the run store's letter.json: HTTP 403 <Error><RequestId>{len(looks)}</RequestId>")

    monkeypatch.setattr(agent, "time", clock)
    monkeypatch.setattr(line, "read", refused)
    agent.serve(line, 1500.0, 100, False, never)
    told = [each for each in caplog.messages if each.startswith("no letter")]
    assert len(looks) > 100 and len(told) == 3, "once in ten minutes"
    assert all("needs another invitation (`flexfleet invite`" in each for each in told)


def test_a_device_that_cannot_read_the_lease_says_so_not_at_each_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    post = Post(FolderStore(tmp_path / "letters"), Roster(FolderStore(tmp_path / "roster")), lease="lease/00001.json")
    file = tmp_path / "weak-1.json"
    file.write_text(post.invite("weak", None).model_dump_json())
    line = Line(FolderStore(tmp_path / "device", 0o600), known_of(str(file), tmp_path / "device")[0])
    monkeypatch.setattr(agent, "time", Clock())
    agent.serve(line, 3000.0, 100, False, never)
    told = [each for each in caplog.messages if each.startswith("no sign of the coordinator")]
    assert len(told) == 3, "once in ten minutes, from half of the silence on"


@pytest.mark.parametrize(("observe", "failures"), [("cgroup", [0, 1, 0, 1]), ("simulated", [0, 0, 0, 0])])
def test_an_order_that_killed_the_device_begins_again_one_level_lower(
    line: Line, invited: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, observe: str, failures: list[int]
) -> None:
    """Where it looks at the free memory. One that was merely ended begins as before."""

    class Killed(BaseException):
        pass

    seen, ends = list[int](), iter([Killed, SystemExit, Killed, Killed])

    def carry_out_all(told: Any, store: Any, algorithm: Any, site: Any, failures: int, room: Any) -> None:
        seen.append(failures)
        raise next(ends)

    monkeypatch.setattr(agent, "prepared", lambda *_: (None, None))
    monkeypatch.setattr(agent, "carry_out_all", carry_out_all)
    told = LOAN.assignment.model_copy(update={"observe": observe, "store": str(tmp_path)})
    loan, letter = LOAN.model_copy(update={"assignment": told}), line.read()
    for _ in failures:
        again = Line(FolderStore(tmp_path / "device", 0o600), known_of(invited, tmp_path / "device")[0])
        with pytest.raises((Killed, SystemExit)):
            agent._carry_out(again, letter, loan, None)
    assert seen == failures


@pytest.mark.parametrize("plain", [False, True], ids=["device", "pod"])
def test_a_pod_needs_a_memory_limit_and_is_told_how_often_its_order_has_killed_pods(
    line: Line, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plain: bool
) -> None:
    """A pod that does not see its limit would count all that its node has free."""
    seen = list[tuple[int, Any]]()
    monkeypatch.setattr(agent, "prepared", lambda *_: (None, None))
    monkeypatch.setattr(agent, "carry_out_all", lambda *args: seen.append(args[-2:]))
    line.remember(plain=plain)
    told = {"observe": "cgroup", "store": str(tmp_path), "failures": 3}
    loan = LOAN.model_copy(update={"assignment": LOAN.assignment.model_copy(update=told)})
    agent._carry_out(line, line.read(), loan, None)
    assert seen == [(3, cgroup.room if plain else cgroup.room_of_device)]


@pytest.mark.parametrize("owners", [None, "cuda:1"])
def test_the_owner_says_which_torch_device_trains(
    invited: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owners: str | None
) -> None:
    """Else the order does, as it does to pods. The site is made ready for it too."""
    seen = list[str]()

    def prepared(told: Assignment, *_: Any) -> tuple[None, None]:
        seen.append(told.device)
        return None, None

    monkeypatch.setattr(agent, "prepared", prepared)
    monkeypatch.setattr(agent, "carry_out_all", lambda told, *_: seen.append(told.device))
    told = LOAN.assignment.model_copy(update={"store": str(tmp_path), "device": "cuda:0"})
    line = Line(FolderStore(tmp_path / "device", 0o600), known_of(invited, tmp_path / "device")[0], owners)
    agent._carry_out(line, line.read(), LOAN.model_copy(update={"assignment": told}), None)
    assert seen == [owners or "cuda:0"] * 2


def test_a_torch_device_that_is_not_there_is_refused_before_any_order(invited: str, tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFailure, match="--device names 'cuda:99', which this torch cannot use"):
        agent.main([f"--invite={invited}", f"--folder={tmp_path / 'device'}", "--device=cuda:99"])
    assert not (tmp_path / "device").exists()


def test_a_device_that_missed_letters_ends(line: Line, post: Post) -> None:
    member = post.roster.member("weak-1").rotated().rotated()
    post.write(member, None)
    with pytest.raises(ClientError, match="needs another invitation"):
        agent.serve(line, 3600.0, 100, False, never)


def test_an_invitation_is_needed_once(line: Line, invited: str, tmp_path: Path) -> None:
    folder = tmp_path / "device"
    line.read()
    Path(invited).unlink()
    assert known_of(invited, folder) == (line.known, folder)
    with pytest.raises(ConfigError, match="cannot be read"):
        known_of(f"{invited}.other", folder)
    with pytest.raises(ConfigError, match="cannot be read"):
        known_of(invited, tmp_path)


def test_where_systemd_or_the_user_says_the_folder_it_is_found(
    line: Line, invited: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line.remember()
    Path(invited).unlink()
    monkeypatch.setenv("STATE_DIRECTORY", str(tmp_path / "device"))
    assert known_of(invited, None)[1] == tmp_path / "device"
    monkeypatch.delenv("STATE_DIRECTORY")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    (tmp_path / "device").rename(tmp_path / "flexfleet")
    (tmp_path / "flexfleet" / "weak-1").mkdir()
    (tmp_path / "flexfleet" / "agent.json").rename(tmp_path / "flexfleet" / "weak-1" / "agent.json")
    assert known_of(invited, None)[1] == tmp_path / "flexfleet" / "weak-1"


@pytest.mark.parametrize("there", [True, False])
def test_a_user_without_a_home_folder_is_told_to_name_one(
    invited: str, monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    """As a container's user that /etc/passwd does not know."""
    for variable in ("HOME", "STATE_DIRECTORY", "XDG_STATE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    with pytest.raises(ConfigError, match="no home folder: name where the device remembers by --folder"):
        known_of(invited if there else f"{invited}.other", None)


def test_the_device_s_key_is_its_own_at_every_instant(
    line: Line, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes: list[int] = []
    monkeypatch.setattr(
        "os.replace",
        lambda part, path: (modes.append(stat.S_IMODE(Path(part).stat().st_mode)), Path(part).rename(path)),
    )
    line.remember()
    assert modes == [0o600]


@pytest.fixture
def elsewhere() -> Iterator[tuple[str, list[str]]]:
    """A server that sends everybody to another address of its own."""
    asked: list[str] = []

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(302 if self.path == "/letter" else 503)
            self.send_header("Location", "/other")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()
    server.server_close()


def test_letters_are_read_from_no_other_place_and_in_two_tries(elsewhere: tuple[str, list[str]]) -> None:
    url, asked = elsewhere
    store = UrlStore({"letter.json": f"{url}/letter", "busy": "http://127.0.0.1:9/x"}, {}, within_s=2.0)
    with pytest.raises(IntegrityError, match="HTTP 302"):
        store.get("letter.json")
    assert asked == ["/letter"]
    with pytest.raises(EnvironmentFailure):
        store.get("busy")
    assert store._pool.connection_pool_kw["retries"].total == 1
    assert store._pool.connection_pool_kw["timeout"].read_timeout == 2.0


def test_the_two_threads_of_a_device_ask_side_by_side_without_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """A request that the thread of beats has begun goes on when the order is answered."""
    both = threading.Barrier(2, timeout=10)

    class Answers(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            both.wait()
            self.send_response(200)
            self.send_header("Content-Length", "1")
            self.end_headers()
            self.wfile.write(b"x")

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server, ThreadPoolExecutor(2) as threads:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        server.daemon_threads = True
        store = UrlStore({"letter.json": f"http://127.0.0.1:{server.server_port}/letter"}, {}, within_s=10.0)
        assert list(threads.map(store.get, ["letter.json"] * 2)) == [b"x"] * 2
        store._pool.clear()
        server.shutdown()
    assert not [each for each in caplog.records if each.name.startswith("urllib3") and each.levelno >= logging.WARNING]


@pytest.mark.parametrize("beats", [True, False])
def test_a_device_ends_when_the_coordinator_s_lease_is_silent_and_not_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beats: bool
) -> None:
    """No letter is new for an hour: the coordinator is at something else, but lives."""
    home = FolderStore(tmp_path / "letters")
    post = Post(home, Roster(FolderStore(tmp_path / "roster")), lease="lease/00001.json")
    file = tmp_path / "weak-1.json"
    file.write_text(post.invite("weak", None).model_dump_json())
    line = Line(FolderStore(tmp_path / "device", 0o600), known_of(str(file), tmp_path / "device")[0])
    clock = Clock()

    class Elsewhere(Clock):
        def monotonic(self) -> float:
            return clock.now

        def sleep(self, seconds: float) -> None:
            clock.now += seconds
            home.put("lease/00001.json", f"{clock.now // 5 if beats else 0}".encode())
            if clock.now > 1000 + 3600:
                raise KeyboardInterrupt

    monkeypatch.setattr(agent, "time", Elsewhere())
    if beats:
        with pytest.raises(KeyboardInterrupt):
            agent.serve(line, 300, 200, False, never)
        assert line.requests < 300, "it looks at the lease now and then"
    else:
        agent.serve(line, 300, 200, False, never)
        assert 1300 < clock.now < 1340


def test_an_order_that_takes_longer_than_the_silence_ends_no_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No letter is new meanwhile; the coordinator lives, and its next order comes a little later."""
    home = FolderStore(tmp_path / "letters")
    post = Post(home, Roster(FolderStore(tmp_path / "roster")), lease="lease/00001.json")
    file = tmp_path / "weak-1.json"
    file.write_text(post.invite("weak", None).model_dump_json())
    line = Line(FolderStore(tmp_path / "device", 0o600), known_of(str(file), tmp_path / "device")[0])
    member, clock, carried = post.roster.member("weak-1"), Clock(), list[float]()
    letters = [post.write(member, post.last(member), loan=LOAN)]
    home.put("lease/00001.json", b"0")

    def carry_out(line: Line, letter: Letter, loan: Loan, site: Any) -> tuple[None, None]:
        carried.append(clock.now)
        clock.sleep(500)
        line.remember(done=loan.id)
        return None, None

    class Elsewhere(Clock):
        def monotonic(self) -> float:
            return clock.now

        def sleep(self, seconds: float) -> None:
            clock.now += seconds
            home.put("lease/00001.json", f"{clock.now // 5}".encode())
            if len(carried) == len(letters) == 1 and clock.now > carried[0] + 502:
                letters.append(post.write(member, letters[-1], loan=LOAN.model_copy(update={"id": "22" * 8})))
            if len(carried) == 2:
                raise KeyboardInterrupt

    monkeypatch.setattr(agent, "time", Elsewhere())
    monkeypatch.setattr(agent, "_carry_out", carry_out)
    with pytest.raises(KeyboardInterrupt):
        agent.serve(line, 300, 200, False, never)


def test_no_beat_covers_that_the_order_failed_before_the_coordinator_has_read_it(
    line: Line, post: Post, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With agents.lease_s=1200 it reads beats every 100 seconds."""
    member, clock, seen = post.roster.member("weak-1"), Clock(), list[str]()
    letters = [post.write(member, post.last(member), loan=LOAN, lease_s=1200.0)]

    class Coordinator(Clock):
        def monotonic(self) -> float:
            return clock.now

        def sleep(self, seconds: float) -> None:
            if clock.now // 100 != (clock.now + seconds) // 100:
                seen.append(beat_of(post).state)
                if seen[-1] == "failed":
                    account = letters[-1].account.model_copy(update={"lost": 1})
                    letters.append(post.write(member, letters[-1], loan=None, account=account))
            clock.now += seconds
            if clock.now > 1000 + 1300:
                raise KeyboardInterrupt

    def carry_out(line: Line, letter: Letter, loan: Loan, site: Any) -> tuple[None, str]:
        line.remember(done=loan.id)
        return None, "no data here"

    monkeypatch.setattr(agent, "time", Coordinator())
    monkeypatch.setattr(agent, "_carry_out", carry_out)
    with pytest.raises(KeyboardInterrupt):
        agent.serve(line, 7200.0, 200, False, never)
    assert seen[0] == "failed" and set(seen[1:]) == {"idle"}, "and is there for others, once that is read"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_device_that_is_ended_says_so_however_often_it_is_told(
    invited: str, post: Post, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unstopped: None, number: signal.Signals
) -> None:
    put = FolderStore.put

    def told_again(store: FolderStore, key: str, value: bytes) -> None:
        if key.endswith("beat.json"):
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGHUP)
        put(store, key, value)

    monkeypatch.setattr(FolderStore, "put", told_again)
    monkeypatch.setattr(agent, "serve", lambda *_: signal.raise_signal(number))
    code = dispatch(["agent", "--invite", invited, "--folder", str(tmp_path / "device")])
    assert (code, beat_of(post).state) == (143, "gone")


def test_a_device_that_is_ended_within_a_destructor_ends_all_the_same(
    invited: str, post: Post, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unstopped: None
) -> None:
    """Python drops what a handler raises there."""

    class Resource:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGTERM)

    def serve(*_: Any) -> None:
        Resource()
        time.sleep(5)

    monkeypatch.setattr(agent, "serve", serve)
    code = dispatch(["agent", "--invite", invited, "--folder", str(tmp_path / "device")])
    assert (code, beat_of(post).state) == (143, "gone")


@pytest.mark.parametrize(("flag", "level"), [("-q", logging.WARNING), ("-v", logging.DEBUG)])
def test_a_process_that_starts_anew_is_as_loud_as_before(
    invited: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: str, level: int
) -> None:
    loggers, started = [logging.getLogger(name) for name in ("flexfleet", "fl_engine")], list[list[str]]()

    def execv(path: str, argv: list[str]) -> None:
        started.append(argv[3:])
        raise SystemExit(0)

    monkeypatch.setattr(agent.os, "execv", execv)
    monkeypatch.setattr(agent, "serve", lambda line, silence, recycle, once, restart: restart("enough"))
    given = [f"--invite={invited}", f"--folder={tmp_path / 'device'}", "--device=cpu", flag]
    for main, argv in ((dispatch, ["agent", *given]), (agent.main, given)):
        for logger in loggers:
            monkeypatch.setattr(logger, "level", logging.NOTSET)
        with pytest.raises(SystemExit):
            main(argv)
        assert {logger.level for logger in loggers} == {level}
        given = started[-1]
    assert started[0] == started[1] and "--device=cpu" in started[0]


def test_a_process_that_starts_anew_leaves_no_code_behind(
    invited: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "mine42.py").write_text("VALUE = 1\n")
    wheel, started = code.pack(tmp_path / "mine42.py"), []
    code.enable(wheel.value, wheel.sha256, "here")

    def execv(path: str, argv: list[str]) -> None:
        assert not list(tmp_path.glob("flexfleet-code-*"))
        started.extend(argv)
        raise SystemExit(0)

    assert list(tmp_path.glob("flexfleet-code-*"))
    monkeypatch.setattr(agent.os, "execv", execv)
    monkeypatch.setattr(agent, "serve", lambda line, silence, recycle, once, restart: restart("enough"))
    with pytest.raises(SystemExit):
        agent.main([f"--invite={invited}", f"--folder={tmp_path / 'device'}", "--recycle=3"])
    code.disable()
    assert "--recycle=3" in started and "flexfleet.steps.agent" in started
