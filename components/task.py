"""Define the decorator that turns a function into a pipeline task. Tasks call the steps of `flexfleet`."""

from collections.abc import Callable
from typing import Any

from kfp import dsl

from flexfleet.kubeflow.retarget import DEFAULT_IMAGE

# kfp is not typed. Without this annotation, each task would need a `type: ignore`, which kfp copies into pipelines.
task: Callable[[Callable[..., Any]], Any] = dsl.component(base_image=DEFAULT_IMAGE, install_kfp_package=False)
