"""DVC with its remote in S3: what `dvc repro` has made, and what a pipeline's tasks push."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import boto3.session
import pytest

from fl_engine.core.errors import IntegrityError
from flexfleet.tracking import dvc_remote


def test_what_repro_has_made_is_pushed_and_pulled(server: str, checkout: Any) -> None:
    with checkout.config.edit() as settings:
        keys = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
        remote = {key.removeprefix("AWS_").lower(): os.environ[key] for key in keys}
        remote |= {"url": f"s3://runs/laptop-{server}", "endpointurl": os.environ["AWS_ENDPOINT_URL"]}
        settings["remote"], settings["core"] = {"here": remote}, {"remote": "here"}
    checkout._reset()
    assert len(checkout.reproduce()) == 6
    made = {path: path.read_bytes() for path in Path("work").rglob("*") if path.is_file()}
    assert checkout.push() > 0 and checkout.push() == 0
    shutil.rmtree("work")
    shutil.rmtree(".dvc/cache")
    checkout.pull()
    assert {path: path.read_bytes() for path in Path("work").rglob("*") if path.is_file()} == made
    assert checkout.reproduce() == [], "the second time there is nothing to do"


def test_a_task_pushes_and_another_machine_pulls(server: str, tmp_path: Path) -> None:
    prefix = f"Möbel 中 x/{server}"
    remote = f"s3://runs/{prefix}"
    (tmp_path / "pool").mkdir()
    (tmp_path / "pool" / "pool.json").write_text("{}")
    dvc_remote.hand_on(tmp_path / "pool", "pool", remote, tmp_path / "out" / "pointer")
    pointer = (tmp_path / "out" / "pointer").read_text()
    (back,) = dvc_remote.pull({"pool": pointer}, remote, tmp_path / "there")
    assert (back / "pool.json").read_text() == "{}" and dvc_remote.checksum(pointer).endswith(".dir")

    client = boto3.session.Session(region_name="us-east-1").client("s3")
    kept = client.list_objects_v2(Bucket="runs", Prefix=f"{prefix}/")["Contents"]
    (value,) = (o["Key"] for o in kept if not o["Key"].endswith(".dir"))
    client.put_object(Bucket="runs", Key=value, Body=b"[]")
    with pytest.raises(IntegrityError):
        dvc_remote.pull({"pool": pointer}, remote, tmp_path / "again")
    client.delete_object(Bucket="runs", Key=value)
    with pytest.raises(IntegrityError):
        dvc_remote.pull({"pool": pointer}, remote, tmp_path / "again")
    assert not (tmp_path / "again").exists()
