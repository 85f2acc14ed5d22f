"""Data of one's own: read by stated rules, kept under their fingerprint, the same bits in other processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import flexfleet as ff
from fl_engine.core.errors import IntegrityError
from fl_engine.datasets import stored_data
from fl_engine.tasks import TASKS, Classification, Regression
from flexfleet.config import parse
from flexfleet.config.sources import named

DRAWN = np.random.default_rng(0)
BYTES = DRAWN.integers(0, 256, (60, 8, 8), dtype=np.uint8)
LABELS = np.arange(60) % 3
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
    told = ff.from_arrays(NUMBERS, LABELS, mean=[0.0] * 5, std=[2.0] * 5, name="mine")
    assert told.std == (2.0,) * 5 and told.name == "mine"


def test_a_test_part_of_its_own_and_the_split_are_kept() -> None:
    data = ff.from_arrays(NUMBERS, LABELS, test=(NUMBERS[:10], LABELS[:10]))
    assert len(data.train_y) == 60 and len(data.test_y) == 10
    again, first = ff.from_arrays(NUMBERS, LABELS), ff.from_arrays(NUMBERS, LABELS)
    assert torch.equal(again.test_x, first.test_x)
    both = torch.cat([first.train_x, first.test_x])
    assert sorted(both[:, 0].tolist()) == sorted(NUMBERS[:, 0].tolist())  # none lost, none twice


def test_clients_are_a_natural_partition() -> None:
    parts = [(NUMBERS[i::3], LABELS[i::3] % 2) for i in range(3)]
    data = ff.from_clients(parts)
    assert data.natural_client is not None and data.natural_client.bincount().tolist() == [16, 16, 16]
    for i, (x, _) in enumerate(parts):
        held = data.train_x[data.natural_client == i]
        assert set(held[:, 0].tolist()) <= set(x[:, 0].tolist())
    common = ff.from_clients(parts, test=(NUMBERS, LABELS % 2))
    assert len(common.train_y) == 60 and len(common.test_y) == 60
    owned = ff.from_arrays(NUMBERS, LABELS, clients=np.array(["ann", "bob", "cy"])[LABELS])
    assert owned.natural_client is not None and set(owned.natural_client.tolist()) == {0, 1, 2}


def test_a_folder_of_images(tmp_path: Path) -> None:
    for label, word in enumerate(("cat", "dog")):
        (tmp_path / word).mkdir()
        for i in range(5):
            Image.fromarray(np.full((6, 4, 3), 40 * i + label, np.uint8)).save(tmp_path / word / f"{i}.png")
    data = ff.from_folder(tmp_path)
    assert data.name == tmp_path.name and data.train_x.shape == (8, 3, 6, 4)
    assert data.task == Classification(2, names=("cat", "dog"))
    assert all(int(x.max()) % 40 == int(y) for x, y in zip(data.train_x, data.train_y, strict=True))
    (tmp_path / ".ipynb_checkpoints").mkdir()
    assert ff.from_folder(tmp_path, size=(3, 2)).train_x.shape == (8, 3, 3, 2)
    assert ff.from_folder(tmp_path, size=3).train_x.shape == (8, 3, 3, 3)
    wrong: list[Any] = [0, -1, True, 8.0, "8", (8,), (8, 8, 3), (8, 0), (8, 2.5)]
    for size in wrong:
        with pytest.raises(ff.DataError, match=r"size: a side, or \(height, width\), in pixels"):
            ff.from_folder(tmp_path, size=size)
    Image.new("RGB", (9, 9)).save(tmp_path / "dog" / "large.png")
    with pytest.raises(ff.DataError, match=r"6x4 and 9x9: give size"):
        ff.from_folder(tmp_path)
    (tmp_path / "dog" / "broken.png").write_bytes(b"no image")
    with pytest.raises(ff.DataError, match=r"broken\.png"):
        ff.from_folder(tmp_path)
    (tmp_path / "dog" / "broken.png").unlink()
    (tmp_path / "dog" / "large.png").unlink()
    (tmp_path / "emu").mkdir()
    with pytest.raises(ff.DataError, match="emu: no image"):
        ff.from_folder(tmp_path)
    with pytest.raises(ff.DataError, match="a folder for each class is expected"):
        ff.from_folder(tmp_path / "nowhere")


SUFFIXES = ("png", "jpg", "jfif", "bmp", "webp", "tif", "gif", "pgm")


def folder_of_all_formats(root: Path) -> None:
    """For each of 2 classes, 2 images of each suffix, one of each in a subfolder, and one image without a suffix."""
    for label, word in enumerate(("a", "b")):
        (root / word / "more").mkdir(parents=True)
        for suffix in SUFFIXES:
            kind = {"jpg": "jpeg", "jfif": "jpeg", "tif": "tiff", "pgm": "ppm"}.get(suffix, suffix)
            for place in (root / word, root / word / "more"):
                Image.fromarray(np.full((8, 8), 100 * label, np.uint8)).save(place / f"0.{suffix}", kind)
        Image.fromarray(np.full((8, 8), 100 * label, np.uint8)).save(root / word / "bare", "png")


def test_a_folder_names_the_files_that_it_skips(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder_of_all_formats(tmp_path)
    skipped = ("notes.txt", "a/labels.csv", "a/more/Thumbs.db", "a/paper.pdf", "b/.hidden.png", "b/.cache/0.png")
    for name in skipped:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"no image")
    Image.new("L", (8, 8)).save(tmp_path / "beside.png")
    shades = [Image.new("L", (8, 8), shade) for shade in (0, 9)]
    shades[0].save(tmp_path / "a" / "moving.gif", save_all=True, append_images=shades[1:])
    data = ff.from_folder(tmp_path, test=0.5)
    assert len(data.train_y) + len(data.test_y) == 35
    (left_out,) = caplog.messages
    assert "(7)" in left_out and all(name in left_out for name in (*skipped, "beside.png"))


@pytest.mark.parametrize(
    ("clients", "said"),
    [
        (np.ma.array(LABELS, mask=LABELS == 1), "clients: 20 values are masked"),
        (np.where(LABELS == 1, np.nan, LABELS), "clients: 20 of 60 samples have no client"),
        ([None, *"ab" * 29, "a"], "clients: 1 of 60 samples have no client"),
        (np.array([1, "a"] * 30, dtype=object), "clients must be all numbers or all texts"),
        ([[1], [1, 2]] * 30, r"clients says whose each of 60 samples is, \(N,\)"),
    ],
)
def test_samples_without_a_client_are_refused(clients: Any, said: str) -> None:
    with pytest.raises(ff.DataError, match=said):
        ff.from_arrays(NUMBERS, LABELS, clients=clients)
    if isinstance(clients, list):
        with pytest.raises(ff.DataError, match=said):
            ff.from_huggingface(Table(image=list(NUMBERS), label=list(LABELS), who=clients), client="who")


def test_tensors_of_all_kinds_are_read() -> None:
    rows = [torch.tensor(row, requires_grad=True) for row in NUMBERS]
    wanted = ff.from_arrays(NUMBERS, LABELS, mean=[0.0] * 5, std=[1.0] * 5)
    for mean in (torch.zeros(5), torch.zeros(5, requires_grad=True), np.zeros(5, np.float32), [0.0] * 5):
        data = ff.from_arrays(rows, list(torch.tensor(LABELS)), mean=mean, std=torch.ones(5))  # type: ignore[arg-type]
        assert torch.equal(data.train_x, wanted.train_x) and (data.mean, data.std) == (wanted.mean, wanted.std)
    with pytest.raises(ff.DataError, match="x: 1 values are masked"):
        ff.from_arrays([*NUMBERS[1:], np.ma.array(NUMBERS[0], mask=[1, 0, 0, 0, 0])], LABELS)


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


def test_a_torch_data_set_is_read_once_and_must_not_draw() -> None:
    items = Items()
    data = ff.from_torch(items)
    assert items.read == list(range(20)) and data.train_x.dtype == torch.uint8 and len(data.train_y) == 16
    assert len(ff.from_torch(Items(), Items()).test_y) == 20
    with pytest.raises(ff.DataError, match="draws random numbers, so its transform augments"):
        ff.from_torch(Items(draws=True))
    with pytest.raises(ff.DataError, match="a Dataset with a length is expected, got generator"):
        ff.from_torch(x for x in ())


def _colours(i: int) -> Image.Image:
    """Red or blue above green, with a grey edge, 6 x 5."""
    pixels = np.zeros((6, 5, 3), np.uint8)
    pixels[:3, :, 0 if i % 2 else 2] = 200
    pixels[3:, :, 1] = 40 + i
    return Image.fromarray(pixels)


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "RGBA", "CMYK"])
def test_images_of_every_mode_have_equal_pixels_from_all_sources(mode: str, tmp_path: Path) -> None:
    images = [_colours(i).quantize(8) if mode == "P" else _colours(i).convert(mode) for i in range(10)]
    labels = [i % 2 for i in range(10)]
    wanted = np.stack([np.array(image.convert("L" if mode in ("1", "L") else "RGB")) for image in images])
    wanted = wanted[:, None] if mode in ("1", "L") else np.moveaxis(wanted, 3, 1)

    def check(data: Any) -> None:
        rows = {row.tobytes() for row in (*data.train_x.numpy(), *data.test_x.numpy())}
        assert rows == {row.tobytes() for row in wanted} and data.input_shape == wanted.shape[1:]

    for image, label in zip(images, labels, strict=True):
        (tmp_path / str(label)).mkdir(exist_ok=True)
        suffix = "jpg" if mode == "CMYK" else "png"
        image.save(tmp_path / str(label) / f"{len(list(tmp_path.rglob('*.*')))}.{suffix}")
    if mode != "CMYK":  # only JPEG has it, and that is lossy
        check(ff.from_folder(tmp_path))
    check(ff.from_torch(list(zip(images, labels, strict=True))))
    check(ff.from_huggingface(Table(image=images, label=labels)))
    check(ff.from_arrays(images, labels))


class Table:
    def __init__(self, **columns: list[Any]) -> None:
        self.columns = columns

    @property
    def column_names(self) -> list[str]:
        return list(self.columns)

    def __getitem__(self, name: str) -> list[Any]:
        return self.columns[name]


def test_a_table_of_huggingface() -> None:
    pictures = [Image.fromarray(each) for each in BYTES]
    table = Table(image=pictures, label=LABELS.tolist(), who=["a", "b"] * 30)
    data = ff.from_huggingface(table, client="who")
    assert data.train_x.shape == (48, 1, 8, 8) and data.natural_client is not None
    assert len(ff.from_huggingface(table, table).test_y) == 60
    with pytest.raises(ff.DataError, match=r"no column 'img'; there are image, label, who"):
        ff.from_huggingface(table, image="img")
    with pytest.raises(ff.DataError, match=r"no column 'whose'; there are image, label, who"):
        ff.from_huggingface(table, client="whose")


@pytest.mark.parametrize(
    ("x", "y", "more", "said"),
    [
        (NUMBERS, LABELS[:50], {}, "one target is needed for each sample"),
        (NUMBERS.astype(object), LABELS, {}, "numbers are expected, got an array of object"),
        (NUMBERS, LABELS > 0, {}, "targets are integers .* got bool"),
        (NUMBERS, LABELS * 0, {}, "at least two classes"),
        (NUMBERS, LABELS, {"test": 0.0}, "leaves one part empty"),
        (NUMBERS, LABELS, {"test": (NUMBERS[:0], LABELS[:0])}, "both parts need at least one"),
        (NUMBERS, LABELS, {"mean": [0.0] * 5}, "mean and std go together"),
        (NUMBERS, LABELS, {"mean": [0.0], "std": [1.0]}, "mean must have 5 values"),
        (NUMBERS, LABELS, {"clients": [0, 1]}, r"got the shape \(2,\)"),
        (np.full((60, 5), np.nan, np.float32), LABELS, {}, "NaN or infinity"),
        (np.ma.masked_equal(np.eye(60), 1.0), LABELS, {}, "x: 60 values are masked"),
        (BYTES.reshape(60, 64), LABELS, {}, "uint8 samples are images"),
        (np.full((60, 5), 1e300), LABELS, {}, "or more than float32 can hold: .* scale down what is too large"),
        (NUMBERS, np.full(60, 2**63 + 5, np.uint64), {}, "y: 9223372036854775813 is no class"),
        (NUMBERS, np.array(["a", "b"] * 30), {}, r"array of <U1. Labels that are words: numpy\.unique"),
    ],
)
@pytest.mark.filterwarnings("error")  # what is refused is told once
def test_what_cannot_be_meant_is_refused(x: Any, y: Any, more: dict[str, Any], said: str) -> None:
    with pytest.raises(ff.DataError, match=said):
        ff.from_arrays(x, y, **more)


def test_clients_with_unlike_samples_are_refused() -> None:
    with pytest.raises(ff.DataError, match="client 1 has x"):
        ff.from_clients([(NUMBERS, LABELS), (NUMBERS[:, :3], LABELS)])
    with pytest.raises(ff.DataError, match="no client has data"):
        ff.from_clients([])
    for parts in (None, {"a": (NUMBERS, LABELS)}, [NUMBERS, NUMBERS], [(NUMBERS, LABELS, 1)], [3]):
        with pytest.raises(ff.DataError, match=r"one \(x, y\) for each client is expected|no client has data"):
            ff.from_clients(parts)  # type: ignore[arg-type]
    with pytest.raises(ff.DataError, match="client 1 has x"):
        ff.from_clients([(NUMBERS, LABELS), (3, 4)])
    with pytest.raises(ff.DataError, match="a folder is expected, got None"):
        ff.from_folder(None)  # type: ignore[arg-type]


def test_labels_of_other_whole_numbers_are_alike() -> None:
    data = ff.from_clients([(NUMBERS, LABELS), (NUMBERS, LABELS.astype(np.uint8))])
    assert data.task == Classification(3)


def test_a_client_without_samples_is_refused_by_its_number() -> None:
    with pytest.raises(ff.DataError, match="client 1 has no sample: leave it out"):
        ff.from_clients([(NUMBERS, LABELS), (NUMBERS[:0], LABELS[:0])], test=(NUMBERS, LABELS))


@pytest.mark.parametrize("ids", [(10_000, 2_000_000, 7), (-1, 1, 0), (-5, 900, 1000), (2**62, 3, 1001)])
def test_labels_that_are_ids_become_classes_with_names(ids: tuple[int, ...], caplog: pytest.LogCaptureFixture) -> None:
    y = np.array(ids)[LABELS]
    data = ff.from_arrays(NUMBERS, y, test=(NUMBERS[:9], y[:9]))
    names = tuple(map(str, sorted(ids)))
    assert data.task == Classification(3, names=names)
    assert [int(names[i]) for i in data.train_y] == y.tolist() and torch.equal(data.test_y, data.train_y[:9])
    parts = [(NUMBERS[i != LABELS], np.array(ids)[LABELS[i != LABELS]]) for i in range(3)]
    assert ff.from_clients(parts).task == data.task
    assert len(caplog.messages) == 2


@pytest.mark.parametrize("pixels", [np.uint16, np.int32, np.float32])
def test_images_of_more_than_8_bits_are_refused(pixels: Any, tmp_path: Path) -> None:
    for word in ("a", "b"):
        (tmp_path / word).mkdir()
        Image.fromarray(np.full((4, 4), 3000, pixels)).save(tmp_path / word / "0.tif")
        (tmp_path / word / "0.tif").rename(tmp_path / word / "0.png")
    with pytest.raises(ff.DataError, match="more than 8 bits"):
        ff.from_folder(tmp_path)
    images = [Image.fromarray(np.full((4, 4), 3000, pixels))] * 10
    with pytest.raises(ff.DataError, match="row 0: its pixels have more than 8 bits"):
        ff.from_huggingface(Table(image=images, label=[0, 1] * 5))
    with pytest.raises(ff.DataError, match="item 0: its pixels have more than 8 bits"):
        ff.from_torch([(image, 0) for image in images])


def test_targets_of_different_shapes_are_refused() -> None:
    with pytest.raises(ff.DataError, match=r"train: targets have the shapes \[\(1,\), \(2,\)\]"):
        ff.from_torch([(row, np.zeros(1 + i % 2)) for i, row in enumerate(NUMBERS)])


# ------------------------------------------------------------------------------------------------------------ kept
def test_data_are_kept_once_and_read_back_whole(tmp_path: Path) -> None:
    data = ff.from_clients([(BYTES, LABELS), (BYTES, LABELS)])
    name = stored_data.store(data, tmp_path, TASKS)
    (folder,) = tmp_path.iterdir()
    before = (folder / stored_data.TENSORS).stat().st_mtime_ns
    assert (
        stored_data.store(data, tmp_path, TASKS) == name and (folder / stored_data.TENSORS).stat().st_mtime_ns == before
    )
    back = stored_data.read(tmp_path, name, TASKS)
    assert back.natural_client is not None and torch.equal(back.natural_client, data.natural_client)  # type: ignore[arg-type]
    assert (back.name, back.task, back.mean, back.std) == (data.name, data.task, data.mean, data.std)
    with pytest.raises(ff.DataError, match=r"dataset\.root"):
        stored_data.read(tmp_path / "elsewhere", name, TASKS)
    with pytest.raises(ff.ConfigError, match=r"dataset\.name"):
        stored_data.read(tmp_path, "sha256:../../etc", TASKS)
    about = json.loads((folder / stored_data.ABOUT).read_text())
    (folder / stored_data.ABOUT).write_text(json.dumps({**about, "mean": [0.9]}))
    with pytest.raises(IntegrityError, match="is damaged"):
        stored_data.read(tmp_path, name, TASKS)
    for text in ("[]", *(json.dumps({**about, "task": task}) for task in (None, [], {"name": None}))):
        (folder / stored_data.ABOUT).write_text(text)
        with pytest.raises(IntegrityError):
            stored_data.read(tmp_path, name, TASKS)


def test_processes_and_a_later_command_have_the_same_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flexfleet: Any
) -> None:
    monkeypatch.chdir(tmp_path)
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
    with pytest.raises(ff.ConfigError, match="which pods cannot reach"):
        ff.run(data, rounds=1, options={**options, "run.backend": "kubernetes"}, **common)


@pytest.mark.parametrize("inside", [".", "compared"])
def test_data_are_found_in_a_store_that_was_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inside: str) -> None:
    monkeypatch.chdir(tmp_path)
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
    with pytest.raises(ff.DataError, match=r"dataset\.root"):
        ff.load(found).model()


def test_the_name_of_kept_data_is_not_taken_for_code() -> None:
    code = "fl_engine.algorithms.fedavg:FedAvg"
    config = parse({"dataset": {"name": f"sha256:a{'0' * 63}"}, "algorithm": {"name": code}})
    assert named(config) == (code,)
