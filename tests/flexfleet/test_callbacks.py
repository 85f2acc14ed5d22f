"""Callbacks see each round before it is committed, change no bit, and can end a run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import flexfleet as ff

pytestmark = pytest.mark.usefixtures("own_folder")

OPTIONS = {"tracking.mlflow": None, "dataset.train_samples": 300, "dataset.test_samples": 100}
SMALL: dict[str, Any] = {
    "algorithm": "heterofl", "clients": 4, "rounds": 3, "local_epochs": 1, "options": OPTIONS, "progress": False
}  # fmt: skip


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ff.Result]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("plain"))
        yield ff.run(**SMALL)


class Diary(ff.Callback):
    """Writes down what it is told, and spoils every copy that it gets."""

    def __init__(self, stop: int = 0, fail: int = 0) -> None:
        self.lines: list[Any] = []
        self.stop, self.fail = stop, fail

    def on_start(self, result: ff.Result) -> None:
        self.lines.append(("start", result.status))
        self.folder = result.folder

    def on_update(self, order: Any, update: Any) -> None:
        for tensor in (*order.payload.values(), *update.payload.values()):
            tensor.fill_(float("nan"))
        update.metrics.update(dict.fromkeys(update.metrics, 1e9))
        order.hints["seen"] = True
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
def test_they_change_no_bit(plain: ff.Result, options: dict[str, Any]) -> None:
    diary = Diary()
    seen = ff.run(**{**SMALL, "options": {**OPTIONS, **options}}, callbacks=[diary])
    assert seen.model_sha256 == plain.model_sha256
    assert seen.clients["client"].tolist() == plain.clients["client"].tolist()
    kinds = [line[0] for line in diary.lines]
    assert kinds[0] == "start" and kinds[-1] == "end" and diary.lines[-1] == ("end", "finished")
    assert [line[1] for line in diary.lines if line[0] == "round"] == [1, 2, 3]
    trained = sum("failure" not in line for row in _rows(plain) for line in row)
    assert kinds.count("update") == trained


def _rows(result: ff.Result) -> list[Any]:
    from flexfleet.files.artifacts import History

    return [row["clients"] for row in History.read(result.folder / "history.json").rounds]


def test_a_round_is_told_before_its_commit() -> None:
    diary = Diary()
    ff.run(**{**SMALL, "options": {**OPTIONS, "rounds.commit_every": 1}}, callbacks=[diary])
    assert [line[1:3] for line in diary.lines if line[0] == "round"] == [(1, 0), (2, 1), (3, 2)]


def test_stop_commits_the_round_and_the_run_can_go_on(plain: ff.Result) -> None:
    diary = Diary(stop=2)
    stopped = ff.run(**SMALL, callbacks=[diary])
    assert stopped.status == "stopped" and len(stopped.history) == 2 and diary.lines[-1] == ("end", "stopped")
    assert stopped.report is None and stopped.metrics["avg"] == plain.history["avg"].iloc[1]
    assert all(torch.isfinite(tensor).all() for tensor in stopped.params.values())
    with pytest.raises(ff.ConfigError, match="resume it"):
        stopped.confusion()
    again = Diary(stop=3)
    finished = stopped.resume(progress=False, callbacks=[again])
    assert finished.model_sha256 == plain.model_sha256
    assert finished.status == "finished" and again.lines[-1] == ("end", "finished"), "STOP after the last round"
    assert [line[1] for line in again.lines if line[0] == "round"] == [3]


def test_an_error_ends_the_run_so_that_it_can_be_resumed(plain: ff.Result) -> None:
    diary = Diary(fail=2)
    with pytest.raises(ZeroDivisionError, match="of somebody else"):
        ff.run(**SMALL, run_id="failed", callbacks=[diary])
    assert diary.lines[-1] == ("end", "failed")
    left = ff.load("failed")
    assert left.status == "stopped" and len(left.history) == 1
    assert left.resume(progress=False).model_sha256 == plain.model_sha256


@pytest.mark.parametrize("wrong", [Diary, "print", lambda round: None])
def test_what_is_no_callback_is_refused(wrong: Any) -> None:
    with pytest.raises(ff.ConfigError, match=r"objects of flexfleet\.Callback are expected"):
        ff.run(**SMALL, callbacks=[wrong])


class Chatty(ff.Callback):
    def on_round(self, round: ff.Round) -> Any:
        return "go on"


def test_on_round_returns_none_or_stop() -> None:
    with pytest.raises(ff.ConfigError, match=r"Chatty\.on_round returns None or flexfleet\.STOP, got 'go on'"):
        ff.run(**SMALL, callbacks=[Chatty()])
