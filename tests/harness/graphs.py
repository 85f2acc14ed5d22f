"""Imports the pipelines' graphs without the twenty seconds that kfp takes for it in a process of the tests.

At every setting of a task kfp asks `inspect.stack` for the name of the caller. `inspect` looks for the source of each
frame of the stack in all modules that are imported, and tests import thousands, with deep stacks.
"""

from __future__ import annotations

import inspect
import sys
from types import FrameType, ModuleType
from typing import Any

from kfp.dsl import pipeline_task


class Shallow(ModuleType):
    """`inspect`, with a stack that has no source: kfp asks for the names of functions alone."""

    def __getattr__(self, name: str) -> Any:
        return getattr(inspect, name)

    @staticmethod
    def stack() -> list[tuple[FrameType, None, None, str]]:
        frames = []
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            frames.append((frame, None, None, frame.f_code.co_name))
            frame = frame.f_back
        return frames


def quick() -> None:
    """From now on, graphs are imported quickly in this process."""
    pipeline_task.inspect = Shallow("inspect")
