"""Own data: arrays, folders and other libraries; stored by fingerprint; same bits in other processes."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from torch import nn

import flexfleet as ff
from fl_engine.core.errors import IntegrityError
from fl_engine.data.transforms import fingerprint
from fl_engine.datasets import stored_data
from fl_engine.tasks import Classification, Multilabel, Regression, Segmentation
from flexfleet.config import parse
from flexfleet.config.sources import named

DRAWN = np.random.default_rng(0)
BYTES = DRAWN.integers(0, 256, (60, 8, 8), dtype=np.uint8)
LABELS = np.arange(60) % 3
WORDS = np.array(["ant", "bee", "cow"])[LABELS]
NUMBERS = DRAWN.normal(size=(60, 5)).astype(np.float32)


def test_images_become_bytes_with_the_channel_in_front() -> None:
    grey = ff.from_arrays(BYTES, LABELS)
    assert grey.train_x.dtype == torch.uint8 and grey.train_x.shape == (48, 1, 8, 8) and grey.task == Classification(3)
    assert grey.test_y.bincount().tolist() == [4, 4, 4]
    last = ff.from_arrays(BYTES[..., None].repeat(3, -1), LABELS)
    assert last.train_x.shape == (48, 3, 8, 8)
    assert torch.equal(last.train_x[:, :1], grey.train_x)
    unit = ff.from_arrays((BYTES[:, None] / 255).astype(np.float32), LABELS)
    assert torch.equal(unit.train_x, grey.train_x) and unit.mean == grey.mean
    odd = ff.from_arrays(DRAWN.random((60, 1, 8, 8)).astype(np.float32), LABELS)
    assert odd.train_x.dtype == torch.float32 and len(odd.mean) == 1


def test_numbers_are_normalised_and_floats_are_regression() -> None:
    data = ff.from_arrays(torch.from_numpy(NUMBERS), NUMBERS[:, 0])
    assert data.task == Regression(1)
    np.testing.assert_allclose(data.mean, data.train_x.numpy().mean(0), atol=1e-5)
    np.testing.assert_allclose(data.std, data.train_x.numpy().std(0), atol=1e-5)
    assert ff.from_arrays(NUMBERS, NUMBERS[:, :2]).task == Regression(2)
    tokens = ff.from_arrays(DRAWN.integers(0, 9, (60, 7)), LABELS)
    assert tokens.has_tokens and tokens.mean == ()
    flat = ff.from_arrays(np.ones((60, 2), np.float32), LABELS)
    assert flat.std == (1.0, 1.0)  # of features that never change
    given = ff.from_arrays(NUMBERS, LABELS, mean=torch.zeros(5), std=[2.0] * 5, name="mine")  # type: ignore[arg-type]
    assert given.std == (2.0,) * 5 and given.name == "mine"


@pytest.mark.parametrize(
    ("y", "task", "expected"),
    [
        (WORDS, None, Classification(3, names=("ant", "bee", "cow"))),
        (list(WORDS), None, Classification(3, names=("ant", "bee", "cow"))),
        (pd.Series(WORDS, dtype="category"), None, Classification(3, names=("ant", "bee", "cow"))),
        (pd.DataFrame({"y": WORDS}), None, Classification(3, names=("ant", "bee", "cow"))),
        (WORDS, Classification(4, names=("dog", "cow", "bee", "ant")), Classification(4)),
        (LABELS > 0, None, Classification(2)),
        (LABELS[:, None], None, Classification(3)),
        (np.eye(3)[LABELS], "classification", Classification(3)),
        (LABELS.astype(float), "classification", Classification(3)),
        (LABELS, "regression", Regression(1)),
        (np.eye(3)[LABELS], "regression", Regression(3)),
        (np.eye(3)[LABELS] > 0, "multilabel", Multilabel(3)),
        (BYTES // 64, "segmentation", Segmentation(4)),
        (BYTES[:, None] > 9, "segmentation", Segmentation(2)),
    ],
)
def test_task_is_chosen_or_given(y: Any, task: Any, expected: Any) -> None:
    data = ff.from_arrays(BYTES, y, task=task)
    assert data.task == (expected if task is None or isinstance(task, str) else task)
    if isinstance(expected, Classification) and expected.classes == 3:
        assert data.train_y.bincount().tolist() == [16, 16, 16]
    assert ff.from_torch(list(zip(BYTES, np.asarray(y), strict=True)), task=task).task == data.task


def test_zeros_and_ones_are_asked_about() -> None:
    with pytest.raises(ff.DataError) as refused:
        ff.from_arrays(NUMBERS, np.eye(3, dtype=np.float32)[LABELS])
    assert (refused.value.code, refused.value.path) == ("data", "task")


def test_frame_has_bool_columns_and_names_text_columns() -> None:
    frame = pd.DataFrame({"a": NUMBERS[:, 0], "b": LABELS > 0, "c": LABELS})
    data = ff.from_arrays(frame, LABELS, test=(frame, LABELS))
    assert torch.equal(data.train_x, torch.from_numpy(frame.to_numpy(np.float32)))
    assert torch.equal(ff.from_arrays(frame.convert_dtypes(), LABELS, test=(frame, LABELS)).train_x, data.train_x)
    with pytest.raises(ff.DataError, match="'kind'"):
        ff.from_arrays(frame.assign(kind=WORDS), LABELS)


def two_layers(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, outputs))


def embedded(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Embedding(9, 2), nn.Flatten(), nn.Linear(10, outputs))


def test_integers_are_numbers_unless_network_takes_tokens(own_folder: None) -> None:
    x = DRAWN.integers(0, 9, (60, 5))
    options = {"tracking.mlflow": None, "partition.minimum": 1}
    common: dict[str, Any] = {"clients": 4, "rounds": 1, "local_epochs": 1, "progress": False, "options": options}
    of_integers = ff.run(ff.from_arrays(x, WORDS), two_layers, "heterofl", **common)
    of_floats = ff.run(ff.from_arrays(x.astype(np.float32), WORDS), two_layers, "heterofl", **common)
    assert of_integers.model_sha256 == of_floats.model_sha256
    assert list(of_integers.confusion()) == ["ant", "bee", "cow"] == list(of_integers.confusion().index)
    assert of_integers.report is not None and ">bee</th>" in of_integers.report.read_text()
    assert ff.run(ff.from_arrays(x.astype(np.uint8), LABELS), embedded, "fedavg", **common).status == "finished"


@pytest.mark.parametrize(("y", "task"), [(NUMBERS[:, :2], None), (np.eye(3)[LABELS], "multilabel")])
def test_heterofl_learns_tasks_without_classes(y: Any, task: Any, own_folder: None) -> None:
    options = {"tracking.mlflow": None, "partition.minimum": 1}
    data = ff.from_arrays(NUMBERS, y, task=task)
    found = ff.run(data, two_layers, "heterofl", clients=4, rounds=1, local_epochs=1, progress=False, options=options)
    assert found.status == "finished"


def test_test_part_is_given_or_split_without_loss() -> None:
    data = ff.from_arrays(NUMBERS, LABELS, test=(NUMBERS[:10], LABELS[:10]))
    assert len(data.train_y) == 60 and len(data.test_y) == 10
    again, first = ff.from_arrays(NUMBERS, LABELS), ff.from_arrays(NUMBERS, LABELS)
    assert torch.equal(again.test_x, first.test_x)
    both = torch.cat([first.train_x, first.test_x])
    assert sorted(both[:, 0].tolist()) == sorted(NUMBERS[:, 0].tolist())  # none lost, none twice


def test_clients_become_a_natural_partition() -> None:
    parts = [(NUMBERS[i::3], LABELS[i::3] % 2) for i in range(3)]
    data = ff.from_clients(parts)
    assert data.natural_client is not None and data.natural_client.bincount().tolist() == [16, 16, 16]
    for i, (x, _) in enumerate(parts):
        held = data.train_x[data.natural_client == i]
        assert set(held[:, 0].tolist()) <= set(x[:, 0].tolist())
    own = ff.from_clients([(x, y, x[:2], y[:2]) for x, y in parts])
    assert (len(own.train_y), len(own.test_y)) == (60, 6) and torch.equal(own.test_x[2:4], own.train_x[20:22])
    small = ff.from_clients([*parts, (NUMBERS[:1], LABELS[:1] % 2)])
    assert small.natural_client is not None and small.natural_client.bincount().tolist() == [16, 16, 16, 1]
    common = ff.from_clients(parts, test=(NUMBERS, LABELS % 2))
    assert len(common.train_y) == 60 and len(common.test_y) == 60
    owned = ff.from_arrays(NUMBERS, LABELS, clients=np.array(["ann", "bob", "cy"])[LABELS])
    assert owned.natural_client is not None and set(owned.natural_client.tolist()) == {0, 1, 2}


def save_image(path: Path, value: int, size: tuple[int, int] = (6, 4)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((*size, 3), value, np.uint8)).save(path)


def test_from_folder_reads_one_folder_per_class(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for i in range(5):
        save_image(tmp_path / "cat" / f"{i}.png", 40 * i)
        save_image(tmp_path / "dog" / "more" / f"{i}.png", 40 * i + 1)
    data = ff.from_folder(tmp_path)
    assert data.name == tmp_path.name and data.train_x.shape == (8, 3, 6, 4)
    assert data.task == Classification(2, names=("cat", "dog"))
    assert all(int(x.max()) % 40 == int(y) for x, y in zip(data.train_x, data.train_y, strict=True))
    for name in (".ipynb_checkpoints/a.png", "cat/.hidden.png", "cat/notes.txt", "dog/more/Thumbs.db"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"no image")
    assert ff.from_folder(tmp_path, size=(3, 2)).train_x.shape == (8, 3, 3, 2)
    assert ff.from_folder(tmp_path, size=3).train_x.shape == (8, 3, 3, 3)
    assert "3 files" in caplog.messages[0]


def test_from_folder_refuses_what_it_cannot_read(tmp_path: Path) -> None:
    for size in [0, True, "8", (8, 8, 3), (8, 2.5)]:
        save_image(tmp_path / "a" / "0.png", 1)
        with pytest.raises(ff.DataError, match="size must be"):
            ff.from_folder(tmp_path, size=size)  # type: ignore[arg-type]
    save_image(tmp_path / "b" / "large.png", 1, (9, 9))
    with pytest.raises(ff.DataError, match=r"\(6, 4\), \(9, 9\)"):
        ff.from_folder(tmp_path)
    (tmp_path / "b" / "broken.png").write_bytes(b"no image")
    with pytest.raises(ff.DataError, match=r"broken\.png"):
        ff.from_folder(tmp_path)
    (tmp_path / "b" / "broken.png").unlink()
    (tmp_path / "emu").mkdir()
    with pytest.raises(ff.DataError, match="emu has no image"):
        ff.from_folder(tmp_path)
    with pytest.raises(ff.DataError, match="one folder for each class"):
        ff.from_folder(tmp_path / "nowhere")


class Items:
    def __init__(self, draws: bool = False) -> None:
        self.read: list[int] = []
        self.draws = draws

    def __len__(self) -> int:
        return 20

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        self.read.append(i)
        noise = torch.rand(1, 4, 4) if self.draws else 0
        return torch.full((1, 4, 4), i / 255) + noise, i % 2


def test_torch_data_set_is_read_once_and_must_not_draw() -> None:
    items = Items()
    data = ff.from_torch(items)
    assert items.read == list(range(20)) and data.train_x.dtype == torch.uint8 and len(data.train_y) == 16
    assert len(ff.from_torch(Items(), Items()).test_y) == 20
    unlike = [(row, np.zeros(1 + i % 2)) for i, row in enumerate(NUMBERS)]
    for wrong, why in ((Items(draws=True), "draws random numbers"), (iter(()), "length"), (unlike, "targets")):
        with pytest.raises(ff.DataError, match=why):
            ff.from_torch(wrong)


def _colours(i: int) -> Image.Image:
    """Red or blue above green, with a grey edge, 6 x 5."""
    pixels = np.zeros((6, 5, 3), np.uint8)
    pixels[:3, :, 0 if i % 2 else 2] = 200
    pixels[3:, :, 1] = 40 + i
    return Image.fromarray(pixels)


class Table:
    def __init__(self, **columns: list[Any]) -> None:
        self.columns = columns

    @property
    def column_names(self) -> list[str]:
        return list(self.columns)

    def __getitem__(self, name: str) -> list[Any]:
        return self.columns[name]


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGBA"])
def test_images_of_every_mode_have_equal_pixels_from_all_sources(mode: str, tmp_path: Path) -> None:
    images = [_colours(i).quantize(8) if mode == "P" else _colours(i).convert(mode) for i in range(10)]
    labels = [i % 2 for i in range(10)]
    wanted = np.stack([np.array(image.convert("L" if mode in ("1", "L") else "RGB")) for image in images])
    wanted = wanted[:, None] if mode in ("1", "L") else np.moveaxis(wanted, 3, 1)
    for i, (image, label) in enumerate(zip(images, labels, strict=True)):
        (tmp_path / str(label)).mkdir(exist_ok=True)
        image.save(tmp_path / str(label) / f"{i}.png")
    for data in (
        ff.from_folder(tmp_path),
        ff.from_torch(list(zip(images, labels, strict=True))),
        ff.from_huggingface(Table(image=images, label=labels)),
        ff.from_arrays(images, labels),
    ):
        rows = {row.tobytes() for row in (*data.train_x.numpy(), *data.test_x.numpy())}
        assert rows == {row.tobytes() for row in wanted} and data.input_shape == wanted.shape[1:]


def test_huggingface_table_has_named_columns() -> None:
    table = Table(image=list(BYTES), label=LABELS.tolist(), who=["a", "b"] * 30)
    data = ff.from_huggingface(table, client="who")
    assert data.train_x.shape == (48, 1, 8, 8) and data.natural_client is not None
    assert len(ff.from_huggingface(table, table).test_y) == 60
    for wrong in ({"image": "img"}, {"client": "whose"}):
        with pytest.raises(ff.DataError, match="no column"):
            ff.from_huggingface(table, **wrong)  # type: ignore[arg-type]


DEEP_IMAGE = Image.fromarray(np.full((4, 4), 3000, np.uint16))


@pytest.mark.parametrize(
    ("x", "y", "more"),
    [
        (NUMBERS, LABELS[:50], {}),
        (NUMBERS.astype(object), LABELS, {}),
        (NUMBERS, LABELS * 0, {}),
        (NUMBERS, np.array([10_000, -1, 7])[LABELS], {}),
        (NUMBERS, LABELS, {"test": 0.0}),
        (NUMBERS, LABELS, {"test": (NUMBERS[:0], LABELS[:0])}),
        (NUMBERS, LABELS, {"test": (NUMBERS, LABELS, 1)}),
        (NUMBERS, LABELS, {"mean": [0.0], "std": [1.0]}),
        (NUMBERS, LABELS, {"clients": np.where(LABELS == 1, np.nan, LABELS)}),
        (NUMBERS, LABELS, {"clients": [None, *"ab" * 29, "a"]}),
        (np.full((60, 5), np.nan, np.float32), LABELS, {}),
        (np.ma.masked_equal(np.eye(60), 1.0), LABELS, {}),
        (np.full((60, 5), 1e300), LABELS, {}),
        (NUMBERS, np.full(60, 2**63 + 5, np.uint64), {}),
        (NUMBERS, np.array(["a", None] * 30), {}),
        (NUMBERS, WORDS, {"task": "regression"}),
        (NUMBERS, WORDS, {"task": Classification(2, names=("ant", "bee"))}),
        (NUMBERS, np.eye(3)[LABELS], {}),
        (NUMBERS, np.eye(3)[LABELS] + 1, {"task": "multilabel"}),
        (NUMBERS, NUMBERS[:, 0], {"task": "classification"}),
        (NUMBERS, LABELS, {"task": "clasification"}),
        (NUMBERS, LABELS, {"task": Classification}),
        (BYTES, BYTES, {}),
        (BYTES, BYTES // 128 * 255, {"task": "segmentation"}),
        ([DEEP_IMAGE] * 60, LABELS, {}),
    ],
)
@pytest.mark.filterwarnings("error")
def test_arrays_that_are_not_samples_and_targets_are_refused(x: Any, y: Any, more: dict[str, Any]) -> None:
    with pytest.raises(ff.DataError):
        ff.from_arrays(x, y, **more)


@pytest.mark.parametrize(
    "parts",
    [
        [(NUMBERS, LABELS), (NUMBERS[:, :3], LABELS)],
        [(NUMBERS, LABELS), (NUMBERS, NUMBERS[:, 0])],
        [(NUMBERS, LABELS), (NUMBERS[:0], LABELS[:0])],
        [(NUMBERS, LABELS, 1)],
        [(NUMBERS, LABELS, NUMBERS, LABELS)],
        [(NUMBERS, LABELS), (NUMBERS, WORDS)],
        [],
        {"a": (NUMBERS, LABELS)},
    ],
)
def test_clients_with_unlike_samples_are_refused(parts: Any) -> None:
    with pytest.raises(ff.DataError):
        ff.from_clients(parts, test=(NUMBERS, LABELS))


# ------------------------------------------------------------------------------------------------------------ stored
def test_float_data_take_less_than_their_size_twice() -> None:
    """Also counts temporary arrays, because the peak of the memory is measured."""
    text = """
import numpy as np, flexfleet as ff
from fl_engine.core.system import resident_peak, restart_peak
x = np.ones((200_000, 250), np.float32)
x[::2] = 3
make = ff.from_arrays
before, _ = restart_peak()
data = make(x, np.arange(len(x)) % 2)
print((resident_peak() - before + x.nbytes) / x.nbytes)
"""
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True, timeout=300)
    assert 1.5 < float(done.stdout) < 2.25


MAPPED = """
import re, sys, numpy as np, flexfleet as ff
x = np.load(sys.argv[1], mmap_mode=sys.argv[2] or None)
y = np.arange(len(x)) % 2
held = lambda: 1024 * int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1])
make, before = ff.from_arrays, held()
data = make(x, y, test=(x[:10], y[:10]))
print((held() - before) / x.nbytes)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the memory of a process is read from /proc")
def test_memory_mapped_samples_stay_in_their_file(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.tile(np.float32([[1], [3]]), (60_000, 250)))
    shares = [
        float(subprocess.check_output([sys.executable, "-c", MAPPED, tmp_path / "x.npy", mode])) for mode in ("r", "")
    ]
    assert shares[0] < 0.2 and shares[1] > 0.9, "an array in memory is copied"


@pytest.mark.parametrize("dtype", ["uint8", "float32", "int64", "float64", ">f4"])
def test_part_of_a_file_gives_the_same_data_as_its_values(tmp_path: Path, dtype: str) -> None:
    shape = (50, 5, 6) if dtype == "int64" else (50, 1, 5, 6)  # tokens or images and maps
    x = np.random.default_rng(0).integers(0, 256, shape).astype(dtype)
    np.save(tmp_path / "x.npy", x)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    y = np.arange(50) % 3
    cuts = (slice(0, 40), slice(40, None)), (slice(3, 33), slice(0, 9)), (slice(0, 40, 2), slice(40, None))
    for train, test in cuts:
        data, expected = (ff.from_arrays(a[train], y[train], test=(a[test], y[test])) for a in (mapped, x))
        for found in (data, pickle.loads(pickle.dumps(data))):  # noqa: S301
            assert fingerprint(found) == fingerprint(expected)
    data.train_x.zero_()
    assert np.array_equal(np.load(tmp_path / "x.npy"), x), "the file of the user is not changed"


def test_torch_data_set_in_files_gives_the_same_model(tmp_path: Path, own_folder: None) -> None:
    sets = [
        [(image, int(label)) for image, label in zip(BYTES[at], LABELS[at], strict=True)]
        for at in (slice(48), slice(48, 60))
    ]
    written, kept = ff.from_torch(*sets, folder=tmp_path / "files"), ff.from_torch(*sets)
    assert fingerprint(written) == fingerprint(kept)
    options = {"tracking.mlflow": None, "partition.proxy": 0.2, "training.batch_size": 5, "partition.minimum": 5}
    common: dict[str, Any] = {"algorithm": "heterofl", "clients": 3, "local_epochs": 1, "progress": False}
    found = {
        ff.run(data, rounds=1, options={**options, "run.backend": backend}, **common).model_sha256
        for data, backend in ((kept, "in_process"), (written, "in_process"), (written, "processes"))
    }
    assert len(found) == 1
    with pytest.raises(ff.DataError, match="must be a Dataset"):
        ff.from_torch(sets[0], folder=tmp_path)
    with pytest.raises(ff.DataError, match="same type and shape"):
        ff.from_torch([*sets[0], (BYTES[0, 0], 1)], sets[1], folder=tmp_path)
    ff.from_torch(sets[0][::-1], sets[1][::-1], folder=tmp_path / "files")
    assert fingerprint(written) == fingerprint(kept), "data that are in use do not change"
    tokens = [(np.arange(i, i + 3, dtype=np.uint16), i % 2) for i in range(20)]
    assert ff.from_torch(tokens, tokens, folder=tmp_path / "tokens").has_tokens
    with pytest.raises(ff.EnvironmentFailure):
        ff.from_torch(*sets, folder=tmp_path / "files" / "train_x.npy")


def test_data_are_stored_once_and_read_back(tmp_path: Path) -> None:
    data = ff.from_clients([(BYTES, LABELS), (BYTES, LABELS)])
    name = stored_data.store(data, tmp_path)
    (folder,) = tmp_path.iterdir()
    samples = folder / "train_x.npy"
    before = samples.stat().st_mtime_ns
    assert stored_data.store(data, tmp_path) == name and samples.stat().st_mtime_ns == before
    assert stored_data.read(tmp_path, name) is data
    first = data.train_x[0].clone()
    data.train_x[0] ^= 1  # as a user may change the array
    back = stored_data.read(tmp_path, name)
    assert torch.equal(back.train_x[0], first)
    assert back.natural_client is not None and torch.equal(back.natural_client, data.natural_client)  # type: ignore[arg-type]
    assert (back.name, back.task, back.mean, back.std) == (data.name, data.task, data.mean, data.std)
    with pytest.raises(ff.DataError):
        stored_data.read(tmp_path / "elsewhere", name)
    with pytest.raises(ff.ConfigError):
        stored_data.read(tmp_path, "sha256:../../etc")
    about = json.loads((folder / stored_data.ABOUT).read_text())
    (folder / stored_data.ABOUT).write_text(json.dumps({**about, "mean": [0.9]}))
    with pytest.raises(IntegrityError, match="is damaged"):
        stored_data.read(tmp_path, name)
    for text in ("[]", *(json.dumps({**about, "task": task}) for task in (None, [], {"name": None}))):
        (folder / stored_data.ABOUT).write_text(text)
        with pytest.raises(IntegrityError):
            stored_data.read(tmp_path, name)


def test_processes_and_a_later_command_have_the_same_data(tmp_path: Path, own_folder: None, flexfleet: Any) -> None:
    data = ff.from_clients([(BYTES[i::4], LABELS[i::4]) for i in range(4)])
    options = {"tracking.mlflow": None, "partition.proxy": 0.0}
    common: dict[str, Any] = {"algorithm": "heterofl", "local_epochs": 1, "progress": False}
    here = ff.run(data, rounds=2, options=options, **common)
    there = ff.run(data, rounds=1, run_id="p", options={**options, "run.backend": "processes"}, **common)
    dealt = json.loads((here.folder / "partition" / "partition.json").read_text())
    assert (dealt["rule"], dealt["client_samples"]) == ("natural", [12, 12, 12, 12])
    config = tmp_path / "p.json"
    config.write_text(json.dumps({**there.config, "rounds": {**there.config["rounds"], "stop": 2}}))
    done = flexfleet("run", "--config", str(config), "--run-id", "p", "--resume", "--json")
    assert done.json["model_sha256"] == here.model_sha256
    with pytest.raises(ff.ConfigError):
        ff.run(data, rounds=1, options={**options, "run.backend": "kubernetes"}, **common)


@pytest.mark.parametrize("inside", [".", "compared"])
def test_data_are_found_in_a_store_that_was_moved(tmp_path: Path, own_folder: None, inside: str) -> None:
    options = {"tracking.mlflow": None, "partition.proxy": 0.2, "training.batch_size": 5, "partition.minimum": 5}
    common: dict[str, Any] = {"algorithm": "heterofl", "clients": 4, "local_epochs": 1, "progress": False}
    data = ff.from_arrays(BYTES, LABELS)
    ff.run(data, rounds=1, run_id="own", store_uri="here", options=options, **common)
    Path("here", inside).mkdir(exist_ok=True)
    Path("here", "own").rename(Path("here", inside, "own"))
    Path("here").rename("there")
    found = ff.load(Path("there", inside, "own"))
    with torch.no_grad():
        assert found.model()(data.test_x).shape == (12, 3)
    client = json.loads((found.folder / "history.json").read_text())["rounds"][0]["clients"][0]["client"]
    assert found.replay(1, client).update is not None
    more = ff.load(found).resume(2, progress=False)
    assert more.status == "finished" and more.config["dataset"]["root"] == str((tmp_path / "there" / ".data").resolve())
    whole = ff.run(data, rounds=2, run_id="whole", store_uri="there", options=options, **common)
    assert more.model_sha256 == whole.model_sha256
    (kept_in,) = Path("there", ".data").iterdir()
    kept_in.rename(tmp_path / "away")
    with pytest.raises(ff.DataError):
        ff.load(found).model()


def test_fingerprint_of_data_is_not_imported_as_code() -> None:
    code = "fl_engine.algorithms.fedavg:FedAvg"
    config = parse({"dataset": {"name": f"sha256:a{'0' * 63}"}, "algorithm": {"name": code}})
    assert named(config) == (code,)
