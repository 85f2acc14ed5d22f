"""Details of clients' failures: bounded, printable, and without secrets or folders of the client."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from fl_engine.core.failure_details import failed, watched
from fl_engine.core.types import FAILURE_LENGTH as LENGTH
from fl_engine.core.types import FAILURE_LINES as LINES
from fl_engine.core.types import FULL, Assignment, ClientFailure, FailureDetails
from fl_engine.exchange.manifest import MANIFEST_BYTES, Rejected, ResultManifest, pack_result, read_manifest, sign

ASSIGNMENT = Assignment(0, 3, FULL, {}, 0, 0)


@watched()
def work(text: str) -> ClientFailure:
    log = logging.getLogger("mine")
    for number in range(2 * LINES):
        log.warning("line %d: %s", number, text)
    try:
        try:
            raise KeyError(text)
        except KeyError as error:
            raise ValueError("outer") from error
    except ValueError as error:
        return failed(ASSIGNMENT, "train", f"{error} {text}")


def test_details_contain_the_end_of_the_log_and_the_innermost_traceback() -> None:
    found = work("a").details
    assert found is not None
    assert found.log[-1] == f"warning: line {2 * LINES - 1}: a" and len(found.log) == LINES
    assert found.traceback[-1] == "KeyError: 'a'" and found.traceback[-2].startswith("test_failure_details.py:")
    assert found.peak_mb > 10 and found.seconds >= 0


def test_details_contain_no_secrets_folders_or_control_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "sesame-0123")
    failure = work("\x1b[31m sesame-0123 in /home/me/private/data.csv " + "x" * 10_000)
    assert failure.details is not None
    lines = [*failure.details.log, *failure.details.traceback]
    assert all(line.isprintable() and len(line) <= LENGTH for line in lines)
    texts = " ".join([*lines, failure.reason])
    assert "sesame" not in texts and "$MY_TOKEN" in texts
    assert "/home" not in texts and str(Path(__file__).parent) not in texts and "data.csv" in texts


def test_work_of_another_thread_is_not_in_the_log() -> None:
    record = logging.LogRecord("mine", logging.WARNING, "", 0, "of another", (), None)
    record.thread = 1

    @watched()
    def other() -> ClientFailure:
        logging.getLogger("mine").handle(record)
        return failed(ASSIGNMENT, "train", "failed")

    details = other().details
    assert details is not None and details.log == ()


@pytest.mark.parametrize(
    "wrong",
    [
        {"log": ["a"] * (LINES + 1)},
        {"traceback": [1]},
        {"peak_mb": -1.0},
        {"seconds": "long"},
        {"environment": {"HOME": "/root"}},
        {"log": ["\x00" * 2 * MANIFEST_BYTES]},
    ],
)
def test_manifest_with_unbounded_details_is_rejected(wrong: dict[str, Any]) -> None:
    manifest = pack_result(ClientFailure(0, 3, "train", "failed", details=FailureDetails()), ASSIGNMENT)[0]
    content = json.loads(sign(manifest, b"key").model_dump_json())
    content["details"] |= wrong

    def read(limit: int | None) -> bytes:
        value = json.dumps(content).encode()
        if limit is not None and len(value) > limit:
            raise Rejected("file", "too large")
        return value

    with pytest.raises(Rejected):
        read_manifest(read, ASSIGNMENT, b"key", by_worker=True)


def test_details_of_a_stranger_are_escaped_and_shortened() -> None:
    evil = {"log": ["\x1b]0;title\x07" + "x" * 10_000], "traceback": ["\u202eevil"]}
    manifest = ResultManifest.model_validate_json(
        json.dumps({"round": 0, "client": 3, "assignment": "", "stage": "train", "reason": "", "details": evil})
    )
    assert manifest.details is not None
    (log,), (line,) = manifest.details.log, manifest.details.traceback
    assert log.isprintable() and len(log) == LENGTH and line == "\\u202eevil"


def test_longest_failure_fits_into_a_manifest() -> None:
    longest = ("\U0001f600" * LENGTH,) * LINES
    details = FailureDetails(longest, longest, 1e9, 1e9)
    manifest = pack_result(ClientFailure(0, 3, "train", "\U0001f600" * 5000, details=details), ASSIGNMENT)[0]
    assert len(sign(manifest, b"key").model_dump_json().encode()) < MANIFEST_BYTES
