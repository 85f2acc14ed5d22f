"""Publishing a finished run: levels are exported and registered, files are pushed and fetched with DVC."""

from __future__ import annotations

import hashlib
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
from flexfleet.files.artifacts import EvaluationFile, PoolFile, RunResult
from flexfleet.pipeline import publish
from flexfleet.pipeline.prepare import Resolved
from flexfleet.pipeline.run import conclude, run
from flexfleet.tracking import dvc_remote
from flexfleet.tracking.server import Client


@dataclass(frozen=True)
class Ran:
    config: Config
    out: Path
    result: RunResult
    client: Any
    uri: str

    @property
    def data(self) -> Data:
        return Resolved.of(self.config).data


@pytest.fixture(scope="module")
def ran(module_folder: Path, quick: tuple[str, ...]) -> Ran:
    """Artifacts of an SQLite MLflow are stored in ./mlruns."""
    folder = module_folder
    uri = f"sqlite:///{folder}/mlflow.db"
    sets = [*quick, f"tracking.mlflow={uri}", f"run.store={folder}/runs", "rounds.stop=3"]
    sets += ["publish.models=true", f"publish.dvc={folder}/remote"]
    config = load_config(None, sets)
    found = run(Resolved.of(config), "mine")
    return Ran(config, folder / "runs" / "mine", found, mlflow.MlflowClient(tracking_uri=uri), uri)


NAME = "digits-small_cnn-dirichlet-flexfl"


# ------------------------------------------------------------------------------------------------- export
def test_exported_accuracies_are_those_measured(ran: Ran) -> None:
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
def test_exported_statistics_are_those_of_the_proxy(samples: int, close: float) -> None:
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


def test_network_with_exits_exports_its_ensemble(tmp_path: Path) -> None:
    resolved = Resolved.load(None, ["algorithm.name=depthfl", "dataset.train_samples=200"])
    data, family = resolved.data, resolved.family
    member = tiny_pool(resolved.algorithm, family)[-1]
    assert member.ensemble
    params = initial_params(family, 3)
    _, exported = export.export("small_cnn", family, params, member, data, torch.arange(100), 0.1, tmp_path)
    network = export.load(tmp_path)
    with torch.no_grad():
        assert torch.equal(network(data.test_x[:9]), exported(data.test_x[:9]))
        outs = network.network(data.normalise(data.test_x[:9]))
        assert torch.allclose(torch.stack(outs).mean(0), network(data.test_x[:9]), atol=1e-6)
    assert network.network.training is False


def test_onnx_predicts_the_same_without_this_package(ran: Ran) -> None:
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


class Other(torch.nn.Module):
    """Computes something else while it is exported."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.float().flatten(1) + float(torch.onnx.is_in_onnx_export())


def test_onnx_file_with_other_outputs_is_refused(ran: Ran, tmp_path: Path) -> None:
    with pytest.raises(IntegrityError):
        export.to_onnx(export.raw_network(Other(), ran.data, ensemble=False), ran.data, tmp_path / "other.onnx")


@pytest.mark.parametrize(("file", "content"), [("model.safetensors", b"other"), ("submodel.json", b'{"level": "M1"}')])
def test_damaged_level_is_not_loaded(ran: Ran, tmp_path: Path, file: str, content: bytes) -> None:
    shutil.copytree(ran.out / "export" / "M1", tmp_path / "M1")
    (tmp_path / "M1" / file).write_bytes(content)
    for folder in (tmp_path / "M1", tmp_path):
        with pytest.raises(IntegrityError):
            export.load(folder)


# ------------------------------------------------------------------------------------------------ registry
def test_each_level_is_registered_and_loads(ran: Ran, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        wanted = export.load(ran.out / "export" / "M2")(images)
        assert torch.equal(export.load(folder)(images), wanted)
    served = mlflow.pyfunc.load_model(folder)
    assert torch.equal(torch.from_numpy(served.predict(images.numpy())), wanted)
    assert served.metadata.signature.params is None and served.input_example.shape == (1, 1, 8, 8)


@pytest.mark.long
def test_registered_model_predicts_without_this_package(ran: Ran, tmp_path: Path) -> None:
    np.save(tmp_path / "images.npy", ran.data.test_x[:5].numpy())
    code = (
        "import os, sys, numpy, mlflow, json\n"
        "sys.path[:] = [each for each in sys.path if not os.path.isdir(f'{each}/fl_engine')]\n"
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
    assert wrong == "level must be one of M1, M2, M3, got 'M9'"


def test_publishing_twice_creates_one_version_per_run(ran: Ran) -> None:
    again = conclude(Resolved.of(ran.config), ran.out, FolderStore(ran.out))
    assert len(ran.client.search_model_versions(f"name = '{NAME}'")) == 1
    second = run(Resolved.of(ran.config.model_copy(update={"seed": 9})), "second")
    assert again.mlflow_run_id == ran.result.mlflow_run_id

    def promote(result: RunResult) -> list[str]:
        return publish.promote(Client(ran.uri), str(result.mlflow_run_id), result.model_sha256)

    history = ran.client.get_metric_history(again.mlflow_run_id, "final/full")
    assert len(history) == 1 and len(ran.client.get_metric_history(again.mlflow_run_id, "exported/M1")) == 1
    assert aliases(ran, NAME) == {"candidate": "2"}
    assert promote(ran.result) == [NAME, f"{NAME}-M1", f"{NAME}-M2", f"{NAME}-M3"]
    assert aliases(ran, f"{NAME}-M1") == {"candidate": "2", "champion": "1"}
    assert promote(second)
    assert aliases(ran, f"{NAME}-M1") == {"candidate": "2", "champion": "2"}
    promote(ran.result)
    assert aliases(ran, f"{NAME}-M1")["champion"] == "2"


def test_killed_registration_becomes_candidate_later(
    mlflow_uri: str, monkeypatch: pytest.MonkeyPatch, killed: type[BaseException]
) -> None:
    client = Client(mlflow_uri)
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
    assert client.get_registered_model("m").aliases == {"candidate": 2}, "an older version does not become candidate"
    client.set_registered_model_alias("m", "candidate", "1")
    publish._version(client, "m", "here", run_id, "second", "about")
    assert client.get_registered_model("m").aliases == {"candidate": 1}, "an alias set by hand stays"


def aliases(ran: Ran, name: str) -> dict[str, str]:
    return {alias: str(version) for alias, version in ran.client.get_registered_model(name).aliases.items()}


# ----------------------------------------------------------------------------------------------------- DVC
def test_fetch_restores_the_files_of_a_run(ran: Ran, flexfleet: Any, tmp_path: Path) -> None:
    done = flexfleet("fetch", ran.result.mlflow_run_id, "--out", str(tmp_path / "back"), "--json",
                     sets=[f"tracking.mlflow={ran.uri}"]).ok()  # fmt: skip
    assert {Path(path).name for path in done.json["files"]} == set(dvc_remote.OF_RUN)
    for name in ("model.safetensors", "report.html", "pool/pool.json", "partition/partition.safetensors"):
        assert (tmp_path / "back" / name).read_bytes() == (ran.out / name).read_bytes()
    tags = ran.client.get_run(ran.result.mlflow_run_id).data.tags
    assert tags["dvc.model.safetensors"] == hashlib.md5((ran.out / "model.safetensors").read_bytes()).hexdigest()
    assert tags["dvc.partition"] == dvc_remote.checksum((ran.out / "dvc" / "partition.dvc").read_text())


def test_damaged_file_of_a_remote_is_refused(ran: Ran, tmp_path: Path) -> None:
    remote, value = tmp_path / "remote", b"a model"
    (tmp_path / "m.bin").write_bytes(value)
    pointers = dvc_remote.push({"m.bin": tmp_path / "m.bin"}, str(remote))
    (pushed,) = (p for p in remote.rglob("*") if p.is_file() and p.read_bytes() == value)
    pushed.chmod(0o644)
    pushed.write_bytes(b"another")
    with pytest.raises(IntegrityError):
        dvc_remote.pull(pointers, str(remote), tmp_path / "back")
    assert not (tmp_path / "back").exists()
    with pytest.raises(ConfigError):
        dvc_remote.pull({"m.bin": "nothing"}, str(remote), tmp_path / "back")


def test_fetch_refuses_a_run_without_files(ran: Ran, flexfleet: Any) -> None:
    bare = ran.client.create_run(ran.client.create_experiment("bare")).info.run_id
    for run_id, mlflow_uri in ((bare, ran.uri), ("f" * 32, ran.uri), ("f" * 32, "null")):
        assert flexfleet("fetch", run_id, sets=[f"tracking.mlflow={mlflow_uri}"]).code == 2


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
