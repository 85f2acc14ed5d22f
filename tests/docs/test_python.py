"""The Python of README.md and of the guides for notebooks runs: all cells of a page in order, as one script."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import flexfleet as ff

ROOT = Path(__file__).parents[2]
FLOWER = "docs/guides/from-flower.md"
PAGES = ("README.md", "docs/guides/python.md", FLOWER)


def cells(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("name", PAGES)
def test_the_cells_of_a_page_run_one_after_the_other(name: str, tmp_path: Path) -> None:
    found = cells(ROOT / name)
    assert found
    done = [f"print('cell {i} done', flush=True)" for i in range(len(found))]
    script = tmp_path / "page.py"
    script.write_text("\n".join(f"{text}\n{said}" for text, said in zip(found, done, strict=True)))
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    ran = subprocess.run([sys.executable, script.name], cwd=tmp_path, env=env, capture_output=True, text=True)
    told = [line for line in ran.stdout.splitlines() if line.startswith("cell ")]
    assert ran.returncode == 0, f"after {told[-1:]}:\n{ran.stderr[-3000:]}"
    assert len(told) == len(found)


def test_the_data_set_and_the_network_of_the_guides_go_together(
    flexfleet: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    guides = ROOT / "docs/guides"
    data, (net, used) = cells(guides / "extending/data-sets.md")[0], cells(guides / "own-networks.md")
    for text, name in ((data, "mydata"), (net, "mynet")):
        assert text.startswith(f"# {name}.py ")
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
    y = np.arange(210) % 7
    x = (y * 30)[:, None, None, None].repeat(64, 1).reshape(210, 1, 8, 8).astype(np.uint8)
    np.savez("mine.npz", train_x=x[:140], train_y=y[:140], test_x=x[140:], test_y=y[140:])
    done = flexfleet(
        "check", "--json", sets=["dataset.name=mydata:SOURCE", "dataset.root=.", "model={name: mynet:Net}",
        "partition.rule=iid", "partition.clients=5", "partition.minimum=5", "training.batch_size=10",
        "tracking.mlflow=null"],
    ).ok()  # fmt: skip
    assert (done.json["dataset"], done.json["train"], done.json["model"]) == ("mine", 140, "mynet:Net")
    found: dict[str, Any] = {}
    exec(used, found)
    (said,) = re.findall(r"layout\(\)\.groups  # (.*)", used)
    assert found["family"].layout().groups == ast.literal_eval(said)


def test_the_flower_program_runs(tmp_path: Path) -> None:
    (text,) = re.findall(r"^```py\n(.*?)^```$", (ROOT / FLOWER).read_text(), re.MULTILINE | re.DOTALL)
    compile(text, "flower", "exec")
    pytest.importorskip("flwr", reason="Flower is not installed: pip install 'flwr[simulation]'")
    (tmp_path / "program.py").write_text(text)
    env = os.environ | {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run([sys.executable, "program.py"], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]
    (said,) = re.findall(r"^\{0: .*\}$", ran.stdout, re.MULTILINE)
    assert "2: {'accuracy'" in said


OPTIONS = {"tracking.mlflow": None, "pretrain.epochs": 1, "dataset.train_samples": 240, "dataset.test_samples": 60}


def smaller(call: Callable[..., Any], **less: Any) -> Callable[..., Any]:
    def wrapped(*args: Any, **given: Any) -> Any:
        few = {"rounds": 1, "clients": 4, "local_epochs": 1, "options": OPTIONS, "progress": False, **less}
        return call(*args, **{**given, **few})

    return wrapped


def test_blocks_about_comparisons_run_on_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    calls = {"compare": smaller(ff.compare), "tune": smaller(ff.tune, trials=2, held_out=(7,)), "run": smaller(ff.run)}
    monkeypatch.setitem(sys.modules, "flexfleet", SimpleNamespace(**{**vars(ff), **calls}))
    blocks = cells(ROOT / "docs/guides/python-compare.md")
    names: dict[str, Any] = {}
    exec("\n".join(blocks), names)  # what a reader types, one block after the other
    assert names["found"].labels == ("flexfl", "no_kd") and names["found"].seeds == (0, 1, 2)
    assert names["rates"].labels == ("heterofl-lr0.05", "heterofl-lr0.1")
    assert str(names["found"].paired("flexfl", "no_kd")).startswith("avg of flexfl - no_kd: mean")
    assert set(names["study"].best) == {"training.lr", "training.batch_size"}
