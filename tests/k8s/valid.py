"""Validation of resources by Kubernetes' own schemas, without unknown fields."""

from __future__ import annotations

from functools import cache
from typing import Any

import kubernetes_validate
from kubernetes_validate import utils

# Each resource would read a file of 1.5 MB again.
utils.schema_contents = cache(utils.schema_contents)


def validate(resource: dict[str, Any], version: str) -> None:
    """Raises kubernetes_validate.ValidationError. `version`: of Kubernetes, as 1.33."""
    kubernetes_validate.validate(resource, version, strict=True)
