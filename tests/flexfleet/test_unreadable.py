"""A file whose disk gives an error while it is read for its checksum is named."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from fl_engine.core.errors import EnvironmentFailure
from flexfleet.pipeline.prepare import Resolved
from flexfleet.pipeline.pretrain import inputs_of
from flexfleet.pipeline.retry import digest_of

BROKEN = Path("/proc/self/mem")
"""Reading it from its beginning fails as a broken disk does: EIO, which names no file."""

pytestmark = pytest.mark.skipif(not BROKEN.exists(), reason="there is no /proc")


@pytest.mark.parametrize("name", ["partition.json", "pool.json"])
def test_a_run_s_identity_says_which_file_it_could_not_read(quick: Sequence[str], tmp_path: Path, name: str) -> None:
    for each in ("partition.json", "pool.json"):
        (tmp_path / each).write_bytes(b"{}")
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to(BROKEN)
    resolved = Resolved.load(None, quick)
    with pytest.raises(EnvironmentFailure, match=rf"{tmp_path / name}: Input/output error"):
        digest_of(resolved, tmp_path, tmp_path)


def test_a_preparation_says_which_partition_it_could_not_read(quick: Sequence[str], tmp_path: Path) -> None:
    (tmp_path / "partition.json").symlink_to(BROKEN)
    with pytest.raises(EnvironmentFailure, match=rf"{tmp_path}/partition\.json: Input/output error"):
        inputs_of(Resolved.load(None, quick), "apoz", tmp_path)
