"""A figure is written whole or not at all."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from fl_engine.data import figures

pytestmark = pytest.mark.pictures


class Half:
    """A figure that a full disk cuts off."""

    def savefig(self, to: Path, **_: Any) -> None:
        to.write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_leaves_no_half_figure_and_the_error_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "partition.svg"
    path.write_text("before")
    with pytest.raises(OSError, match="No space left on device") as error:
        figures.save(Half(), path, "svg")
    assert error.value.filename == str(path)
    assert [each.read_text() for each in tmp_path.iterdir()] == ["before"]
