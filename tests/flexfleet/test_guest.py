"""A run from Python is a guest: the process stays as it was, and what the host has set changes none of its bits."""

from __future__ import annotations

import logging
import random
import signal
import sys
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import flexfleet as ff
from fl_engine.training.isolation import isolated
from fl_engine.training.numerics import flushes_now
from tests.harness.from_python import SMALL


@pytest.fixture(scope="module")
def plain(module_folder: Path) -> ff.Result:
    return ff.run(**SMALL)


def test_the_process_is_as_before(module_folder: Path) -> None:
    def now() -> list[Any]:
        legacy: Any = np.random.get_state()
        return [
            torch.get_num_threads(), torch.get_rng_state().tolist(), random.getstate(), legacy[1].tolist(),
            torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark, list(sys.path),
            [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
            logging.getLogger().handlers[:], logging.getLogger().level, logging.getLogger("flexfleet").handlers[:],
            logging.getLogger("flexfleet").level, flushes_now(),
        ]  # fmt: skip

    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        before = now()
        found = ff.run(**{**SMALL, "progress": None})
        _ = found.metrics, found.model(), found.levels
        assert now() == before
    finally:
        torch.set_num_threads(threads)


OPERATIONS = ("mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn", "cuda.matmul", "cudnn.conv", "cudnn.rnn")


def set_by(text: str) -> Any:
    return partial(exec, text, {"torch": torch, "at": torch.backends})


OLDER_NAMES = (
    set_by("torch.set_float32_matmul_precision('medium')"),
    set_by(
        "torch.set_float32_matmul_precision('highest'); "
        "at.cuda.matmul.fp32_precision = at.mkldnn.matmul.fp32_precision = 'none'"
    ),
)
CONVOLUTIONS = (
    set_by("at.mkldnn.conv.fp32_precision = 'bf16'"),
    set_by("at.mkldnn.conv.fp32_precision = 'none'"),
)


@pytest.mark.parametrize("warns", [False, True])
def test_isolated_run_has_default_algorithms_and_restores_them(warns: bool) -> None:
    torch.use_deterministic_algorithms(True, warn_only=warns)
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        with isolated():
            assert not torch.are_deterministic_algorithms_enabled()
            torch.use_deterministic_algorithms(True, warn_only=not warns)  # as `prepare_process` does for CUDA
            torch.utils.deterministic.fill_uninitialized_memory = True
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled() is warns
        assert not torch.utils.deterministic.fill_uninitialized_memory
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True


@pytest.mark.parametrize(
    ("setting", "undo"),
    [
        (lambda: torch.set_default_dtype(torch.float64), lambda: torch.set_default_dtype(torch.float32)),
        OLDER_NAMES,
        (
            lambda: setattr(torch.backends.mkldnn, "enabled", False),
            lambda: setattr(torch.backends.mkldnn, "enabled", True),
        ),
        (lambda: torch.set_default_device("meta"), lambda: torch.set_default_device(None)),
        (lambda: torch.set_grad_enabled(False), lambda: torch.set_grad_enabled(True)),
        CONVOLUTIONS,
    ],
    ids=["float64", "matmul precision", "no mkldnn", "device", "no gradients", "convolutions in bf16"],
)
def test_what_the_host_has_set_changes_no_bit(plain: ff.Result, setting: Any, undo: Any) -> None:
    def now() -> list[Any]:
        return [
            torch.get_default_dtype(), torch.get_float32_matmul_precision(), torch.backends.mkldnn.enabled,
            torch.get_default_device(), torch.is_grad_enabled(),
            [attrgetter(name)(torch.backends).fp32_precision for name in OPERATIONS],
        ]  # fmt: skip

    here = now()
    setting()
    try:
        before = now()
        assert before != here
        found = ff.run(**SMALL)
        assert now() == before
    finally:
        undo()
    assert found.model_sha256 == plain.model_sha256 and now() == here
