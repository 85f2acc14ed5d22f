"""Imports the pipelines' graphs without the twenty seconds that kfp takes for it in a process of the tests.

At every setting of a task kfp asks `inspect.stack` for the name of the caller. `inspect` looks for the source of each
frame of the stack in all modules that are imported, and tests import thousands, with deep stacks.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType, ModuleType
from typing import Any

import pytest
from kfp.dsl import pipeline_task
from kfp.local import subprocess_task_handler as handler

LONGEST_WORD = 128 * 1024 - 1
"""Bytes of one argument of a command line that Linux takes (MAX_ARG_STRLEN, with its end)."""
OF_KUBEFLOW = {
    "uri": "s3://a-bucket-of-the-team/pipelines/a-team/v2/artifacts/compare/0f3f6a4e-8a11-4d1e-9a0e-8d7f0f6cbb11/run/"
    "0f3f6a4e-8a11-4d1e-9a0e-8d7f0f6cbb11/run_folder",
    "metadata": {
        "display_name": "run_folder",
        "store_session_info": json.dumps(
            {
                "Provider": "minio",
                "Params": {
                    "accessKeyKey": "accesskey",
                    "disableSSL": "true",
                    "endpoint": "minio-service.kubeflow.svc.cluster.local:9000",
                    "forcePathStyle": "true",
                    "fromEnv": "false",
                    "maxRetries": "5",
                    "region": "eu-central-1",
                    "secretKeyKey": "secretkey",
                    "secretName": "mlpipeline-minio-artifact",
                },
            }
        ),
    },
}
"""What an artifact has on Kubeflow: a longer address than here, and metadata of Kubeflow's own."""


@contextmanager
def commands() -> Iterator[list[list[str]]]:
    """Those of all tasks that kfp starts on this machine inside."""
    found: list[list[str]] = []
    started = handler.run_local_subprocess

    def noted(full_command: list[str], env_vars: dict[str, str] | None = None) -> int:
        found.append(full_command)
        return int(started(full_command=full_command, env_vars=env_vars))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(handler, "run_local_subprocess", noted)
        yield found


def given_to(task: str, command: Sequence[str]) -> str:
    """The word of a task's command that holds its parameters and artifacts; empty for another task's command."""
    if command[-2:] != ["--function_to_execute", task]:
        return ""
    return command[command.index("--executor_input") + 1]


def gathered(given: str, name: str, count: int) -> int:
    """Bytes of `given_to` on Kubeflow, for the task that gathers the artifact `name` of `count` runs. It is quoted
    twice: the driver puts it into the text of a pod's settings, and Argo puts that into the text of a template."""
    said = json.loads(given)
    each = max(said["inputs"]["artifacts"][name]["artifacts"], key=lambda one: len(json.dumps(one)))
    on_kubeflow = each | OF_KUBEFLOW | {"metadata": each["metadata"] | OF_KUBEFLOW["metadata"]}
    said["inputs"]["artifacts"][name]["artifacts"] = [on_kubeflow] * count
    return len(json.dumps(json.dumps(json.dumps(said))))


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
