"""Callbacks see each round before it is committed, change no bit, and can end a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import flexfleet as ff
from tests.harness import from_python

pytestmark = pytest.mark.usefixtures("own_folder")

SMALL = {**from_python.SMALL, "algorithm": "heterofl", "rounds": 3}


@pytest.fixture(scope="module")
def plain(module_folder: Path) -> ff.Result:
    return ff.run(**SMALL)


class Diary(ff.Callback):
    """Records its calls, and overwrites every copy that it gets."""

    def __init__(self, stop: int = 0, fail: int = 0) -> None:
        self.lines: list[Any] = []
        self.stop, self.fail = stop, fail

    def on_start(self, result: ff.Result) -> None:
        self.lines.append(("start", result.status))
        self.folder = result.folder

    def on_update(self, assignment: Any, update: Any) -> None:
        for tensor in (*assignment.payload.values(), *update.payload.values()):
            tensor.fill_(float("nan"))
        update.metrics.update(dict.fromkeys(update.metrics, 1e9))
        assignment.hints["seen"] = True
        self.lines.append(("update", update.client))

    def on_round(self, round: ff.Round) -> Any:
        committed = ff.load(self.folder).history
        self.lines.append(("round", round.number, len(committed), sorted(round.metrics)[:1]))
        for tensor in round.params.values():
            tensor.fill_(float("nan"))
        dict(round.metrics).clear()
        for line in round.clients:
            line["client"] = 99  # type: ignore[index]
        if round.number == self.fail:
            raise ZeroDivisionError("of somebody else")
        return ff.STOP if round.number == self.stop else None

    def on_end(self, status: str) -> None:
        self.lines.append(("end", status))


@pytest.mark.parametrize("options", [{}, {"rounds.commit_every": 1}, {"run.backend": "processes"}])
def test_callbacks_do_not_change_the_bits(plain: ff.Result, options: dict[str, Any]) -> None:
    diary = Diary()
    seen = ff.run(**{**SMALL, "options": {**from_python.OPTIONS, **options}}, callbacks=[diary])
    assert seen.model_sha256 == plain.model_sha256
    assert seen.clients["client"].tolist() == plain.clients["client"].tolist()
    kinds = [line[0] for line in diary.lines]
    assert kinds[0] == "start" and kinds[-1] == "end" and diary.lines[-1] == ("end", "finished")
    assert [line[1] for line in diary.lines if line[0] == "round"] == [1, 2, 3]
    assert kinds.count("update") == int(plain.history["clients_trained"].sum())
    if "rounds.commit_every" in options:  # each round is reported before its commit
        assert [line[1:3] for line in diary.lines if line[0] == "round"] == [(1, 0), (2, 1), (3, 2)]


def test_stop_commits_the_round_and_the_run_can_be_resumed(plain: ff.Result) -> None:
    diary = Diary(stop=2)
    stopped = ff.run(**SMALL, callbacks=[diary])
    assert stopped.status == "stopped" and len(stopped.history) == 2 and diary.lines[-1] == ("end", "stopped")
    assert ".resume(rounds=2)" in repr(stopped)
    assert stopped.report is None and stopped.metrics["avg"] == plain.history["avg"].iloc[1]
    assert all(torch.isfinite(tensor).all() for tensor in stopped.params.values())
    with pytest.raises(ff.ConfigError, match="Resume"):
        stopped.confusion()
    again = Diary(stop=3)
    finished = stopped.resume(progress=False, callbacks=[again])
    assert finished.model_sha256 == plain.model_sha256
    assert finished.status == "finished" and again.lines[-1] == ("end", "finished"), "STOP after the last round"
    assert [line[1] for line in again.lines if line[0] == "round"] == [3] and "resume" not in repr(finished)


def test_run_can_be_resumed_after_an_error_in_a_callback(plain: ff.Result) -> None:
    diary = Diary(fail=2)
    with pytest.raises(ZeroDivisionError, match="of somebody else"):
        ff.run(**SMALL, run_id="failed", callbacks=[diary])
    assert diary.lines[-1] == ("end", "failed")
    left = ff.load("failed")
    assert left.status == "stopped" and len(left.history) == 1
    assert left.resume(progress=False).model_sha256 == plain.model_sha256


@pytest.mark.parametrize("wrong", [Diary, "print", lambda round: None])
def test_other_objects_than_callbacks_are_refused(wrong: Any) -> None:
    with pytest.raises(ff.ConfigError):
        ff.run(**SMALL, callbacks=[wrong])


def test_misspelled_method_of_a_callback_is_refused() -> None:
    class Misspelled(ff.Callback):
        def on_rounds(self, round: ff.Round) -> None: ...

    with pytest.raises(ff.ConfigError, match="'on_round'") as error:
        ff.run(**SMALL, callbacks=[Misspelled()])
    assert error.value.code == "config.own_code"
