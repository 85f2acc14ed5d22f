"""How a function becomes a task of a pipeline. One file is one task: a few lines around a step of `flexfleet`."""

from collections.abc import Callable
from typing import Any

from kfp import dsl

from flexfleet.kubeflow.retarget import DEFAULT_IMAGE

# kfp has no types; naming it here keeps `ignore` comments out of the tasks, whose source kfp copies.
task: Callable[[Callable[..., Any]], Any] = dsl.component(base_image=DEFAULT_IMAGE, install_kfp_package=False)
