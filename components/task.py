"""Makes a function a task of a pipeline. Each file that uses it defines one task, which calls a step of `flexfleet`."""

from collections.abc import Callable
from typing import Any

from kfp import dsl

from flexfleet.kubeflow.retarget import DEFAULT_IMAGE

# kfp has no type hints. This annotation saves each task a `type: ignore`, which kfp would copy with the task's source.
task: Callable[[Callable[..., Any]], Any] = dsl.component(base_image=DEFAULT_IMAGE, install_kfp_package=False)
