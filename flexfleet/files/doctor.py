"""What is installed, and what each missing extra would enable. Imports nothing heavy."""

from __future__ import annotations

import os
import platform
from importlib.util import find_spec
from typing import Any

import fl_engine

EXTRAS: dict[str, tuple[tuple[str, ...], str]] = {
    "engine": (("torch", "safetensors", "numpy", "boto3"), "models, rounds, run stores: everything that trains"),
    "data": (("sklearn", "dvc"), "the bundled digits; the steps as `dvc repro`, artifacts in a DVC remote"),
    "tracking": (("mlflow", "matplotlib", "jinja2"), "metrics in MLflow, drawings, the HTML report"),
    "pipeline": (("kfp",), "compiling and submitting the steps as a Kubeflow pipeline"),
    "kubernetes": (("kubernetes", "boto3"), "clients as pods of a cluster, with their ledger in S3"),
    "tune": (("optuna",), "searching hyper-parameters"),
    "export": (("onnx", "onnxruntime"), "the models of a run as ONNX, for devices"),
    "privacy": (("dp_accounting",), "what private aggregation spends: epsilon of every round"),
    "detection": (("faster_coco_eval",), "mAP, the metric where objects in images are to be found"),
    "testing": (("pytest", "hypothesis"), "the conformance suites: algorithms, networks, data, backends of your own"),
    "run": (
        ("torch", "safetensors", "numpy", "sklearn", "matplotlib", "jinja2"),
        "`flexfleet run` on the bundled digits, with its report, and nothing else",
    ),
    "docs": (("mkdocs",), "the documentation as a site: make docs"),
}


def examine() -> dict[str, Any]:
    """Versions, extras with what they lack, usable torch devices, and which data sets are there."""
    extras = {
        name: {"missing": [m for m in modules if find_spec(m) is None], "enables": enables}
        for name, (modules, enables) in EXTRAS.items()
    }
    devices: list[str] = []
    data: dict[str, bool] = {}
    if not extras["engine"]["missing"]:
        import torch

        from fl_engine.datasets import DATASETS, data_root

        devices = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
        data = {name: not source.missing(data_root()) for name, source in sorted(DATASETS.items())}
    return {
        "version": fl_engine.__version__,
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "extras": extras,
        "devices": devices,
        "data": data,
    }
