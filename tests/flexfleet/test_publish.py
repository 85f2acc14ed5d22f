"""What becomes of a finished run: levels exported and registered, files pushed and fetched by their pointers."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pytest
import torch

from fl_engine.algorithms.heterofl import HeteroFL
from fl_engine.core.errors import ConfigError, IntegrityError
from fl_engine.core.samples import Data
from fl_engine.core.slicing import initial_params
from fl_engine.models import SmallCNN, export
from fl_engine.storage.store import FolderStore, decode
from fl_engine.testing.tiny import tiny_pool
from fl_engine.training.evaluation import weights_of
from flexfleet.config import Config, load_config
from flexfleet.files.artifacts import EvaluationFile, PoolFile, Result
from flexfleet.pipeline import publish
from flexfleet.pipeline.prepare import Resolved
from flexfleet.pipeline.run import conclude, run
from flexfleet.tracking import dvc_remote, dvc_runs
from flexfleet.tracking.server import Patient, client_of


@dataclass(frozen=True)
class Ran:
    config: Config
    out: Path
    result: Result
    client: Any
    uri: str

    @property
    def data(self) -> Data:
        return Resolved.of(self.config).data


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory, quick: tuple[str, ...]) -> Ran:
    folder = tmp_path_factory.mktemp("published")
    uri = f"sqlite:///{folder}/mlflow.db"
    sets = [*quick, f"tracking.mlflow={uri}", f"run.store={folder}/runs", "rounds.stop=3"]
    sets += ["publish.models=true", f"publish.dvc={folder}/remote"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)  # artifacts of an SQLite MLflow go to ./mlruns
        config = load_config(None, sets)
        found = run(Resolved.of(config), "mine")
    return Ran(config, folder / "runs" / "mine", found, mlflow.MlflowClient(tracking_uri=uri), uri)


NAME = "digits-small_cnn-dirichlet-flexfl"


# ------------------------------------------------------------------------------------------------- export
def test_both_accuracies_of_a_level_are_what_is_measured(ran: Ran) -> None:
    scores = EvaluationFile.read(ran.out / "evaluation.json").levels
    run_of = ran.client.get_run(ran.result.mlflow_run_id)
    for name in scores:
        about = export.read(ran.out / "export" / name)
        network = export.load(ran.out / "export" / name)
        with torch.no_grad():
            right = (network(ran.data.test_x).argmax(1) == ran.data.test_y).double().mean().item()
        assert about.accuracy_trained == scores[name].value
        assert right == pytest.approx(about.accuracy_exported, abs=1 / len(ran.data.test_y))
        assert run_of.data.metrics[f"exported/{name}"] == about.accuracy_exported


@pytest.mark.parametrize(("samples", "close"), [(40, 1e-4), (130, 0.02)], ids=["one batch", "two"])
def test_the_statistics_are_those_of_the_proxy_by_hand(samples: int, close: float) -> None:
    family = SmallCNN((1, 8, 8), 10)
    data = Resolved.load(None, ["dataset.train_samples=200"]).data
    params, proxy = initial_params(family, 0), torch.arange(30, 30 + samples)
    member = replace(tiny_pool(HeteroFL(), family)[-1], static_bn=False)
    static, found = export.with_statistics(family, params, member, data, proxy)
    x = data.normalise(data.train_x[proxy])
    y = torch.nn.functional.conv2d(x, params["conv1.conv.weight"], params["conv1.conv.bias"], padding=1)
    assert torch.allclose(found["conv1.bn.running_mean"], y.mean((0, 2, 3)), atol=1e-5)
    assert torch.allclose(found["conv1.bn.running_var"], y.var((0, 2, 3)), rtol=close)
    assert static == replace(family, norm="static")
    again = export.with_statistics(static, found, member, data, proxy)
    assert again[0] is static and again[1] is found, "a network that keeps statistics has them already"
    with pytest.raises(ConfigError, match=r"partition\.proxy"):
        export.with_statistics(family, params, member, data, proxy[:0])


def test_a_network_with_exits_is_exported_as_it_is_used(tmp_path: Path) -> None:
    resolved = Resolved.load(None, ["algorithm.name=depthfl", "dataset.train_samples=200"])
    data, family = resolved.data, resolved.family
    member = tiny_pool(resolved.algorithm, family)[-1]
    assert member.ensemble
    params = initial_params(family, 3)
    made = export.export("small_cnn", family, params, member, data, torch.arange(100), 0.1, tmp_path)
    network = export.load(tmp_path)
    with torch.no_grad():
        assert torch.equal(network(data.test_x[:9]), made.network(data.test_x[:9]))
        outs = network.network(data.normalise(data.test_x[:9]))
        assert torch.allclose(torch.stack(outs).mean(0), network(data.test_x[:9]), atol=1e-6)
    assert network.network.training is False


def test_onnx_answers_the_same_with_nothing_of_this_package(ran: Ran) -> None:
    images = ran.data.test_x[:7]
    np.save(ran.out / "images.npy", images.numpy())
    code = (
        "import sys, numpy, onnxruntime\n"
        "session = onnxruntime.InferenceSession(sys.argv[1], providers=['CPUExecutionProvider'])\n"
        "for some in (numpy.load(sys.argv[2]), numpy.load(sys.argv[2])[:1]):\n"
        "    print(session.run(None, {'images': some})[0].argmax(1).tolist())\n"
        "assert not {'torch', 'fl_engine'} & set(sys.modules)\n"
    )
    told = subprocess.run(
        [sys.executable, "-c", code, ran.out / "export" / "M3" / "model.onnx", ran.out / "images.npy"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    with torch.no_grad():
        wanted = export.load(ran.out / "export" / "M3")(images).argmax(1).tolist()
    assert [json.loads(line) for line in told.stdout.splitlines()] == [wanted, wanted[:1]]


def test_an_onnx_file_that_answers_something_else_is_refused(ran: Ran, tmp_path: Path) -> None:
    shutil.copytree(ran.out / "export" / "M1", tmp_path / "M1")
    made = export.Exported(export.read(tmp_path / "M1"), export.load(tmp_path / "M1"))
    real, calls = torch.onnx.export, []

    def other(network: Any, *rest: Any, **given: Any) -> None:
        real(export.load(ran.out / "export" / "M1").requires_grad_(False), *rest, **given)
        calls.append(1)
        made.network.network.classifier.bias.data += 1  # type: ignore[union-attr, operator]

    with pytest.MonkeyPatch.context() as patch, pytest.raises(IntegrityError, match="from the network's on 60"):
        patch.setattr(torch.onnx, "export", other)
        export.to_onnx(made, ran.data, tmp_path / "other.onnx")
    assert calls


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("model.safetensors", b"other", "is damaged: its sha256"),
        ("submodel.json", b'{"level": "M1"}', "submodel.json"),
        ("submodel.json", b"nothing", "submodel.json"),
    ],
)
def test_what_is_damaged_is_not_loaded(ran: Ran, tmp_path: Path, file: str, content: bytes, said: str) -> None:
    shutil.copytree(ran.out / "export" / "M1", tmp_path / "M1")
    (tmp_path / "M1" / file).write_bytes(content)
    with pytest.raises(IntegrityError, match=said):
        export.load(tmp_path / "M1")
    with pytest.raises(IntegrityError, match="give the folder of an exported level"):
        export.load(tmp_path)


# ------------------------------------------------------------------------------------------------ registry
def test_each_level_is_registered_and_loads_from_there(
    ran: Ran, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {model.name: model for model in ran.client.search_registered_models()}
    assert set(names) == {NAME, *(f"{NAME}-{level}" for level in ("M1", "M2", "M3"))}
    assert [str(model.aliases["candidate"]) for model in names.values()] == ["1"] * 4
    monkeypatch.setenv("MLFLOW_TRACKING_URI", ran.uri)
    monkeypatch.setenv("MLFLOW_REGISTRY_URI", ran.uri)
    folder = mlflow.artifacts.download_artifacts(
        f"models:/{NAME}-M2@candidate", dst_path=str(tmp_path), tracking_uri=ran.uri
    )
    assert (Path(folder) / "model.onnx").is_file()
    images = ran.data.test_x[:5]
    with torch.no_grad():
        assert torch.equal(export.load(folder)(images), export.load(ran.out / "export" / "M2")(images))


@pytest.mark.long
def test_registered_model_predicts_without_this_package(ran: Ran, tmp_path: Path) -> None:
    np.save(tmp_path / "images.npy", ran.data.test_x[:5].numpy())
    code = (
        "import sys, numpy, mlflow, json\n"
        "sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in str(f).lower()]\n"
        "mlflow.set_tracking_uri(sys.argv[1]); mlflow.set_registry_uri(sys.argv[1])\n"
        f"model = mlflow.pyfunc.load_model('models:/{NAME}@candidate')\n"
        "images = numpy.load(sys.argv[2])\n"
        "print(json.dumps({n: model.predict(images, params={'level': n}).tolist() for n in ('M1', 'M3')}))\n"
        "print(json.dumps(model.predict(images).tolist()))\n"
        "import fl_engine; print(json.dumps(fl_engine.__file__))\n"
        "try: model.predict(images, params={'level': 'M9'})\n"
        "except ValueError as error: print(json.dumps(str(error)))\n"
    )
    told = subprocess.run(
        [sys.executable, "-P", "-c", code, ran.uri, tmp_path / "images.npy"],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert told.returncode == 0, told.stderr
    levels, default, where, wrong = (json.loads(line) for line in told.stdout.splitlines())
    for level, logits in levels.items():
        with torch.no_grad():
            wanted = export.load(ran.out / "export" / level)(ran.data.test_x[:5])
        assert torch.allclose(torch.tensor(logits), wanted, atol=1e-5)
    assert default == levels["M3"], "the largest, where no level is named"
    assert str(ran.out.parents[1]) in where or "mlruns" in where, "the engine that came with the model"
    assert wrong == "level is one of M1, M2, M3, got 'M9'"


def test_publishing_twice_creates_one_version_per_run(ran: Ran) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ran.out.parents[1])
        again = conclude(Resolved.of(ran.config), ran.out, FolderStore(ran.out))
        assert len(ran.client.search_model_versions(f"name = '{NAME}'")) == 1
        other = ran.config.model_copy(update={"seed": 9})
        second = run(Resolved.of(other), "second")
    assert again.mlflow_run_id == ran.result.mlflow_run_id

    def promote(result: Result) -> list[str]:
        return publish.promote(Patient(ran.uri, 0.0), str(result.mlflow_run_id), result.model_sha256)

    history = ran.client.get_metric_history(again.mlflow_run_id, "final/full")
    assert len(history) == 1 and len(ran.client.get_metric_history(again.mlflow_run_id, "exported/M1")) == 1
    assert aliases(ran, NAME) == {"candidate": "2"}
    assert promote(ran.result) == [NAME, f"{NAME}-M1", f"{NAME}-M2", f"{NAME}-M3"]
    assert aliases(ran, f"{NAME}-M1") == {"candidate": "2", "champion": "1"}
    assert promote(second)
    assert aliases(ran, f"{NAME}-M1") == {"candidate": "2", "champion": "2"}
    promote(ran.result)
    assert aliases(ran, f"{NAME}-M1")["champion"] == "2", "what a newer version has stays there"


def test_killed_registration_becomes_candidate_later(
    mlflow_uri: str, monkeypatch: pytest.MonkeyPatch, killed: type[BaseException]
) -> None:
    client = client_of(mlflow_uri)
    run_id = client.create_run(client.create_experiment("test")).info.run_id

    def kill(*_: Any) -> None:
        raise killed

    for number, model in enumerate(("first", "second"), 1):
        with monkeypatch.context() as patch, pytest.raises(killed):
            patch.setattr(mlflow.MlflowClient, "set_registered_model_alias", kill)
            publish._version(client, "m", "here", run_id, model, "about")
        publish._version(client, "m", "here", run_id, model, "about")
        assert client.get_registered_model("m").aliases == {"candidate": number}
    publish._version(client, "m", "here", run_id, "first", "about")
    assert client.get_registered_model("m").aliases == {"candidate": 2}, "an old one is no new candidate"
    client.set_registered_model_alias("m", "candidate", "1")
    publish._version(client, "m", "here", run_id, "second", "about")
    assert client.get_registered_model("m").aliases == {"candidate": 1}, "as somebody has set it by hand"


def test_a_lost_answer_leaves_one_version(mlflow_uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    client, create = client_of(mlflow_uri), mlflow.MlflowClient.create_model_version
    run_id = client.create_run(client.create_experiment("test")).info.run_id
    publish._version(client, "m", "here", run_id, "before", "about")

    def thrice(self: Any, *args: Any, **more: Any) -> Any:
        return [create(self, *args, **more) for _ in range(3)][-1]

    with monkeypatch.context() as patch:
        patch.setattr(mlflow.MlflowClient, "create_model_version", thrice)
        publish._version(client, "m", "here", run_id, "model", "about")
    publish._version(client, "m", "here", run_id, "model", "about")
    found = sorted(int(version.version) for version in client.search_model_versions("name = 'm'"))
    assert found == [1, 4], "what was there before may be somebody's"
    assert client.get_registered_model("m").aliases["candidate"] == 4


def aliases(ran: Ran, name: str) -> dict[str, str]:
    return {alias: str(version) for alias, version in ran.client.get_registered_model(name).aliases.items()}


# ----------------------------------------------------------------------------------------------------- DVC
def test_a_run_comes_back_by_its_pointers(ran: Ran, flexfleet: Any, tmp_path: Path) -> None:
    done = flexfleet("fetch", ran.result.mlflow_run_id, "--out", str(tmp_path / "back"), "--json",
                     sets=[f"tracking.mlflow={ran.uri}"])  # fmt: skip
    assert done.code == 0, done.err
    assert {Path(path).name for path in done.json["files"]} == set(dvc_runs.OF_RUN)
    for name in ("model.safetensors", "report.html", "pool/pool.json", "partition/partition.safetensors"):
        assert (tmp_path / "back" / name).read_bytes() == (ran.out / name).read_bytes()
    tags = ran.client.get_run(ran.result.mlflow_run_id).data.tags
    assert tags["dvc.model.safetensors"] == dvc_remote.md5(ran.out / "model.safetensors")
    assert tags["dvc.partition"] == dvc_remote.md5(ran.out / "partition")


def test_what_the_remote_has_lost_or_changed_is_told(ran: Ran, tmp_path: Path) -> None:
    remote, value = tmp_path / "remote", b"a model"
    (tmp_path / "m.bin").write_bytes(value)
    pointers = dvc_remote.push({"m.bin": tmp_path / "m.bin"}, str(remote))
    (kept,) = (p for p in remote.rglob("*") if p.is_file() and p.read_bytes() == value)
    kept.chmod(0o644)
    kept.write_bytes(b"another")
    with pytest.raises(IntegrityError, match=r"m\.bin"):
        dvc_remote.pull(pointers, str(remote), tmp_path / "back")
    kept.unlink(missing_ok=True)  # DVC deletes what is damaged
    with pytest.raises(IntegrityError):
        dvc_remote.pull(pointers, str(remote), tmp_path / "back")
    assert not (tmp_path / "back").exists()
    with pytest.raises(ConfigError, match=r"\.dvc pointer"):
        dvc_remote.pull({"m.bin": "nothing"}, str(remote), tmp_path / "back")


def test_a_remote_in_a_folder_is_found_from_any_other(
    ran: Ran, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ran.out, "run", ignore=shutil.ignore_patterns("rounds", "export"))
    tags = dvc_runs.push_run(Path("run"), "remote")
    assert Path(tags["dvc.remote"]) == tmp_path.resolve() / "remote"
    pointers = {path.stem: path.read_text() for path in Path("run", dvc_runs.POINTERS).iterdir()}
    Path("elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    brought = dvc_remote.pull(pointers, tags["dvc.remote"], tmp_path / "back")
    assert {path.name for path in brought} == set(dvc_runs.OF_RUN)
    with pytest.raises(ConfigError, match=r"publish\.dvc"):
        dvc_remote.pull(pointers, str(tmp_path / "nowhere"), tmp_path / "again")


def test_a_run_that_pushed_nothing_and_one_that_is_not_there(ran: Ran, flexfleet: Any) -> None:
    bare = ran.client.create_run(ran.client.create_experiment("bare")).info.run_id
    done = flexfleet("fetch", bare, sets=[f"tracking.mlflow={ran.uri}"])
    assert (done.code, "pushed nothing" in done.err) == (2, True)
    done = flexfleet("fetch", "f" * 32, sets=[f"tracking.mlflow={ran.uri}"])
    assert (done.code, "has no run ffff" in done.err) == (2, True)
    done = flexfleet("fetch", "f" * 32, sets=["tracking.mlflow=null"])
    assert (done.code, "tracking.mlflow is null" in done.err) == (2, True)


def test_decoupled_levels_are_exported_with_their_own_weights(tmp_path: Path, quick: tuple[str, ...]) -> None:
    sets = [*quick, "algorithm.name=decoupled", "tracking.mlflow=null", f"run.store={tmp_path}", "rounds.stop=2"]
    resolved = Resolved.load(None, [*sets, "publish.models=true", "publish.onnx=false"])
    run(resolved, "own")
    family = resolved.family
    params = decode((tmp_path / "own" / "model.safetensors").read_bytes(), "model")
    pool = PoolFile.read(tmp_path / "own" / "pool" / "pool.json").pool()
    for member in pool:
        own = weights_of(params, family.layout(), member)
        state = dict(export.load(tmp_path / "own" / "export" / member.name).network.state_dict())
        assert all(torch.equal(state[name], t) for name, t in own.items()) and len(state) > len(own)
    assert any(name.startswith(f"{pool[0].name}/") for name in params), "its own weights, not a slice"
