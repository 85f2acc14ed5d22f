"""`flexfleet verify` and `flexfleet diff`: the chain of rounds, the signature, merges, training, and differences."""

from __future__ import annotations

import json
import math
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import flexfleet as ff
from fl_engine.core.errors import ConfigError, FlexfleetError, IntegrityError
from fl_engine.rounds import chain
from fl_engine.storage.checkpoints import Checkpoints, Row
from fl_engine.storage.store import FolderStore, laid_out, padded, sha256
from flexfleet.files.artifacts import RunFile, history_of
from flexfleet.files.run_folder import MANIFEST, manifest_of
from flexfleet.pipeline.difference import difference
from tests.harness.from_python import SMALL

KEPT: dict[str, Any] = {**SMALL, "rounds": 3, "options": {**SMALL["options"], "run.keep": "all"}}
NOT_COVERED = (".lock", "key", "report.html")


@pytest.fixture(scope="module")
def kept(module_folder: Path) -> Path:
    return ff.run(run_id="kept", **KEPT).folder


@pytest.fixture
def run(kept: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(kept, tmp_path / "kept"))


def forge(run: Path, rows: list[Row], secret: bytes) -> None:
    """Replace the rounds of a run, with correct links and checksums, and sign them with another key."""
    previous, ledger = "", Checkpoints(FolderStore(run), keep_rounds=math.inf)
    for number, row in enumerate(rows):
        row = chain.linked(row.model_copy(update={"round": number}), previous)
        previous, rows[number] = row.link, row
        state = ledger.read(number)
        (run / "rounds" / f"{number:05d}" / "COMMITTED").unlink()
        ledger.commit(number, *state, [row])
    model = json.loads((run / "history.json").read_text())["model_sha256"]
    FolderStore(run).put("history.json", history_of(rows, model, secret))
    manifest_of(run).write(run / MANIFEST)


def test_unchanged_run_is_merged_trained_and_evaluated_again(kept: Path, flexfleet: Any) -> None:
    found = flexfleet("verify", str(kept), "--rounds", "2", "--json").json
    assert (found["ok"], found["rounds"], found["trained"], found["merged"]) == (True, 3, [2], [1, 3])
    assert found["evaluated"] and found["not_checked"] == []
    assert ff.load(kept).verify(sample=1, public_key=found["public_key"]).rounds == 3
    assert ff.load(kept).verify(all=True).trained == (1, 2, 3)


def check_that_a_change_is_found(path: Path, run: Path, rng: random.Random) -> None:
    """Change a random bit of a file, except in the signature of an update, and restore the file afterwards."""
    if not (value := path.read_bytes()):
        return
    is_manifest = path.parent.name == "updates" and path.suffix == ".json"
    changed = bytearray(value)
    changed[rng.randrange(value.find(b'"signature"') if is_manifest else len(value))] ^= 1 << rng.randrange(8)
    path.write_bytes(changed)
    with pytest.raises(FlexfleetError):
        ff.load(run).verify()
    path.write_bytes(value)


def test_any_changed_byte_is_found(run: Path) -> None:
    rng = random.Random(0)
    files = [path for path in sorted(run.rglob("*")) if path.is_file() and path.name not in NOT_COVERED]
    files = [path for path in files if path.suffix not in (".svg", ".png")]
    updates = [path for path in files if path.parent.name == "updates"]
    for path in [*rng.sample(updates, 4), *(path for path in files if path not in updates)]:
        check_that_a_change_is_found(path, run, rng)
    shutil.rmtree(run / "secret")  # readers do not have the key
    ff.load(run).verify()


def test_any_changed_byte_of_a_ledger_in_a_bucket_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    options = {**KEPT["options"], "run.remote": str(tmp_path / "bucket")}
    folder = ff.run(run_id="a", **{**KEPT, "options": options}).folder
    rng = random.Random(0)
    for path in sorted(each for each in (tmp_path / "bucket" / "a" / "rounds").rglob("*") if each.is_file()):
        check_that_a_change_is_found(path, folder, rng)
    ff.load(folder).verify()


def test_changed_result_is_found_without_the_manifest(run: Path) -> None:
    (run / MANIFEST).unlink()
    assert any(MANIFEST in text for text in ff.load(run).verify().not_checked)
    result = json.loads((run / "result.json").read_text())
    result["metrics"]["avg"] += 0.05
    (run / "result.json").write_text(json.dumps(result))
    for numerics in (None, "another processor"):
        if numerics is not None:  # `verify` computes no round again
            given = RunFile.read(run / "run.json")
            given.model_copy(update={"numerics": {**given.numerics, "torch": numerics}}).write(run / "run.json")
        with pytest.raises(IntegrityError) as error:
            ff.load(run).verify()
        assert "result.json" in str(error.value)


@pytest.mark.parametrize("how", ["cut", "swapped", "other key"])
def test_rounds_that_were_signed_again_are_found(run: Path, how: str) -> None:
    key = ff.load(run).verify().public_key
    rows = Checkpoints(FolderStore(run)).rows()
    if how == "cut":
        shutil.rmtree(run / "rounds" / "00002")
        del rows[2]
    elif how == "swapped":
        rows[0], rows[1] = rows[1], rows[0]
    forge(run, rows, b"x" * 32)
    with pytest.raises(IntegrityError):
        ff.load(run).verify(public_key=key)


def test_forged_update_with_correct_links_is_found(run: Path, flexfleet: Any) -> None:
    rows = Checkpoints(FolderStore(run)).rows()
    lines = ({**rows[1].clients[0], "sha256": "0" * 64}, *rows[1].clients[1:])
    rows[1] = rows[1].model_copy(update={"clients": lines})
    forge(run, rows, b"x" * 32)
    assert flexfleet("verify", str(run), "--json").code == 4
    with pytest.raises(IntegrityError) as error:
        ff.load(run).verify()
    assert "round 2" in str(error.value) and f"client {lines[0]['client']}" in str(error.value)


def test_model_that_was_not_merged_is_found(run: Path) -> None:
    """The other file has the same weights in other bytes, so all accuracies are equal."""
    model = load_file(run / "model.safetensors")
    laid = laid_out(model)
    other = bytes(padded(laid, len(laid) + 8))
    (run / "model.safetensors").write_bytes(other)
    history = json.loads((run / "history.json").read_text())
    rows = Checkpoints(FolderStore(run)).rows()
    FolderStore(run).put("history.json", history_of(rows, sha256(other), b"x" * 32))
    result = (run / "result.json").read_text().replace(history["model_sha256"], sha256(other))
    (run / "result.json").write_text(result)
    manifest_of(run).write(run / MANIFEST)
    with pytest.raises(IntegrityError):
        ff.load(run).verify()


def test_stored_state_that_was_replaced_is_found(run: Path) -> None:
    ledger = Checkpoints(FolderStore(run), keep_rounds=math.inf)
    (tensors, rest), rows = ledger.read(0), ledger.rows()
    (run / "rounds" / "00000" / "COMMITTED").unlink()
    ledger.commit(0, {name: tensor + 1 for name, tensor in tensors.items()}, rest, rows[:1])
    with pytest.raises(IntegrityError) as error:
        ff.load(run).verify([2])
    assert "round 1" in str(error.value)


def test_updates_of_another_run_are_found(run: Path, tmp_path: Path) -> None:
    other = ff.run(run_id="other", **{**KEPT, "seed": 5}).folder
    shutil.rmtree(run / "rounds" / "00001" / "updates")
    shutil.copytree(other / "rounds" / "00001" / "updates", run / "rounds" / "00001" / "updates")
    with pytest.raises(IntegrityError):
        ff.load(run).verify()


def test_other_numerics_leave_training_and_merges_unchecked(run: Path) -> None:
    file = RunFile.read(run / "run.json")
    file.model_copy(update={"numerics": {**file.numerics, "cpu_capability": "other"}}).write(run / "run.json")
    manifest_of(run).write(run / MANIFEST)
    found = ff.load(run).verify(all=True)
    assert (found.rounds, found.merged, found.trained, found.evaluated) == (3, (), (), False)
    assert "cpu_capability" in found.not_checked[0]


def test_unknown_round_is_refused(kept: Path) -> None:
    with pytest.raises(ConfigError) as error:
        ff.load(kept).verify([4])
    assert error.value.path == "rounds"


def test_last_rounds_are_kept_and_sums_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for keep, merged in (("last-1", (3,)), ("last-2", (2, 3)), ("sums", ())):
        options = {**KEPT["options"], "run.keep": keep}
        assert ff.run(run_id=keep, **{**KEPT, "options": options}).verify().merged == merged


def test_diff_of_equal_and_unequal_runs(kept: Path, run: Path, flexfleet: Any) -> None:
    assert difference(kept, run).equal
    assert "equal" in flexfleet("diff", str(kept), str(run)).out
    other = ff.run(run_id="faster", **{**KEPT, "learning_rate": 0.02}).folder
    found = difference(kept, other)
    assert list(found.settings) == ["training.lr"] and found.inputs == {}
    assert (found.equal, found.round, found.what) == (False, 1, "update")
    assert found.client is not None and found.tensor is not None and found.largest > 0


def test_replay_trains_a_client_again_with_equal_bits(kept: Path, flexfleet: Any) -> None:
    client = Checkpoints(FolderStore(kept)).rows()[1].clients[0]["client"]
    chosen = ("replay", str(kept), "--round", "2", "--client", str(client), "--json")
    same, faster = flexfleet(*chosen).json, flexfleet(*chosen, "--set", "training.lr=0.01").json
    assert same["same_bits"] is True and faster["same_bits"] is None
    assert same["samples"] == faster["samples"] and same["loss"] != faster["loss"]
    with pytest.raises(ConfigError) as error:
        ff.load(kept).replay(2, client, settings={"rounds.stop": 5})
    assert error.value.path == "rounds.stop"


def test_replay_calls_a_function_before_each_step(kept: Path) -> None:
    client, seen = Checkpoints(FolderStore(kept)).rows()[0].clients[0]["client"], list[Any]()
    work = ff.load(kept).replay(1, client, on_step=lambda *step: seen.append(step))
    assert len(seen) == work.update.metrics["steps"]
    spec, weights, (samples, targets) = seen[0]
    assert spec == work.task.spec and {n: t.shape for n, t in weights.items()} == {
        n: t.shape for n, t in work.start.items()
    }
    assert len(samples) == len(targets) and samples.shape[1:] == (1, 8, 8)


def test_replay_options_call_the_function_or_the_debugger(
    kept: Path, tmp_path: Path, flexfleet: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    hooks = "import bdb\n\ndef seen(*step):\n    open('seen', 'a').write('x')\n\ndef leave():\n    raise bdb.BdbQuit\n"
    (tmp_path / "replay_hooks.py").write_text(hooks)
    client = str(Checkpoints(FolderStore(kept)).rows()[0].clients[0]["client"])
    chosen = ("replay", str(kept), "--round", "1", "--client", client)
    assert flexfleet(*chosen, "--on-step", "replay_hooks:seen").code == 0 and (tmp_path / "seen").exists()
    monkeypatch.setenv("PYTHONBREAKPOINT", "replay_hooks.leave")
    assert flexfleet(*chosen, "--pdb").code == 3
