"""What all pipelines share: how a function becomes a task, and the image that every task runs in."""

import os
from collections.abc import Callable
from typing import Any

from kfp import dsl

from fl_engine import __version__

DEFAULT_IMAGE = f"ghcr.io/flexfleet/flexfleet:{__version__}"

IMAGE = os.environ.get("FLEXFLEET_IMAGE", DEFAULT_IMAGE)
"""Chosen when a pipeline is compiled. Give a digest (`name@sha256:...`) where every task of every run is to have the
very same code."""

# kfp has no types; naming them here keeps `ignore` comments out of the components, whose source kfp copies.
task: Callable[[Callable[..., Any]], Any] = dsl.component(base_image=IMAGE, install_kfp_package=False)
pipeline: Callable[..., Callable[[Callable[..., Any]], Any]] = dsl.pipeline
