"""`publish.precision`: which files a run's levels get, and where their figures are told."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlflow
import pytest

from fl_engine.codecs import Half
from fl_engine.core.errors import ConfigError, IntegrityError
from fl_engine.core.pool import member
from fl_engine.core.types import FULL, Codecs
from fl_engine.models import SmallCNN, onnx_precisions
from flexfleet.config import load_config
from flexfleet.pipeline.publish import precisions_of
from flexfleet.reports import precisions
from flexfleet.reports.finished_run import load
from tests.harness.alike import run_of

LEVELS = ("M1", "M2", "M3")
ASKED = ("fp16", "int8")
PLAIN = {"model.onnx", "model.safetensors", "submodel.json"}


@dataclass(frozen=True)
class Ran:
    sets: list[str]
    runs: Path
    printed: dict[str, Any]
    client: Any

    @property
    def out(self) -> Path:
        return self.runs / "mine"

    @property
    def tracked(self) -> Any:
        return self.client.get_run(self.printed["mlflow_run_id"])


@pytest.fixture(scope="module")
def ran(module_folder: Path, quick: tuple[str, ...], flexfleet: Any) -> Ran:
    uri = f"sqlite:///{module_folder}/mlflow.db"
    sets = [*quick, f"tracking.mlflow={uri}", "rounds.stop=2", "publish.models=true"]
    done = run_of(flexfleet, "mine", [*sets, f"publish.precision=[{', '.join(ASKED)}]"])
    return Ran(sets, module_folder / "runs", done, mlflow.MlflowClient(tracking_uri=uri))


def test_every_level_has_its_files_and_figures(ran: Ran) -> None:
    told = ran.printed["metrics"]["precision"]
    assert list(told) == list(LEVELS)
    for level in LEVELS:
        folder = ran.out / "export" / level
        found = onnx_precisions.read(folder)
        assert found is not None and list(found.precisions) == ["fp32", *ASKED]
        assert {path.name for path in folder.iterdir()} == PLAIN | {
            "model.fp16.onnx", "model.int8.onnx", "precision.json"
        }  # fmt: skip
        assert told[level] == json.loads((folder / "precision.json").read_text())["precisions"]
        sizes = [told[level][name]["bytes"] for name in ("fp32", *ASKED)]
        assert sizes == [(folder / told[level][name]["file"]).stat().st_size for name in ("fp32", *ASKED)]
        about = json.loads((folder / "submodel.json").read_text())
        assert told[level]["fp32"]["value"] == pytest.approx(about["accuracy_exported"], abs=1e-9)
    assert json.loads((ran.out / "result.json").read_text())["metrics"]["precision"] == told


def test_another_precision_takes_no_other_run(ran: Ran, flexfleet: Any) -> None:
    shutil.copytree(ran.out, ran.runs / "kept")
    done = flexfleet("run", "--run-id", "mine", "--resume", sets=[*ran.sets, "publish.precision=auto"]).ok()
    assert re.search(r"^M3 +fp32 +", done.out, re.MULTILINE) and "int8" not in done.out
    assert {path.name for path in (ran.out / "export" / "M1").iterdir()} == PLAIN | {"precision.json"}
    done = flexfleet("run", "--run-id", "mine", "--resume", "--json", sets=ran.sets)
    assert {path.name for path in (ran.out / "export" / "M1").iterdir()} == PLAIN, "fp32 alone is measured by nobody"
    assert "precision" not in done.json["metrics"]
    assert done.json["model_sha256"] == ran.printed["model_sha256"]
    assert len(ran.client.search_model_versions("name = 'digits-small_cnn-dirichlet-flexfl'")) == 1
    assert "Precision of the exported levels" not in (ran.out / "report.html").read_text()
    shutil.rmtree(ran.out)
    shutil.move(ran.runs / "kept", ran.out)


def test_figures_of_another_or_damaged_model_are_not_reported(ran: Ran, tmp_path: Path) -> None:
    assert len(precisions.of_run(ran.out, LEVELS, ran.printed["model_sha256"])) == 3
    assert precisions.of_run(ran.out, LEVELS, "0" * 64) == ()
    shutil.copytree(ran.out, tmp_path / "a")
    (tmp_path / "a" / "export" / "M2" / "precision.json").write_text("{}")
    with pytest.raises(IntegrityError, match=r"M2/precision\.json"):
        load(tmp_path / "a")


@dataclass(frozen=True)
class Bits(Half):
    bits: int = 8  # type: ignore[misc]


def test_auto_goes_by_a_levels_own_codec_then_the_runs() -> None:
    level = member(SmallCNN((1, 8, 8), 10), "M1", FULL, dispatched=True, reported=True)
    auto = load_config(None, ["publish.precision=auto"])
    assert precisions_of(auto, level) == ("fp32",)
    for bits, wanted in ((8, "int8"), (9, "fp16"), (11, "fp16"), (20, "fp32")):
        assert precisions_of(auto, replace(level, codecs=Codecs(down=Bits(bits)))) == (wanted,)
    assert precisions_of(auto, replace(level, codecs=Codecs(up=Bits(8)))) == ("fp32",), "the way up says nothing"
    half = load_config(None, ["publish.precision=auto", "codec.down.name=half"])
    assert precisions_of(half, level) == ("fp16",)
    assert precisions_of(half, replace(level, codecs=Codecs())) == ("fp32",)
    named = load_config(None, ["publish.precision=[int8, fp32, int8]"])
    assert precisions_of(named, level) == ("int8", "fp32")


@pytest.mark.parametrize("wanted", ["[int8]", "auto"])
def test_precisions_without_onnx_are_refused(wanted: str) -> None:
    with pytest.raises(ConfigError, match=re.escape("publish.precision requires publish.onnx=true")):
        load_config(None, [f"publish.precision={wanted}", "publish.onnx=false"])
