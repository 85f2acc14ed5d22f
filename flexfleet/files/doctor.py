"""Report which extras are installed, and which features each extra enables."""

from __future__ import annotations

import logging
import os
import platform
from importlib.util import find_spec
from typing import Any

import fl_engine
from fl_engine.core.errors import DataError

log = logging.getLogger("flexfleet")

EXTRAS: dict[str, tuple[tuple[str, ...], str]] = {
    "engine": (("torch", "safetensors", "numpy", "boto3", "cryptography"), "models, rounds, run stores: training"),
    "data": (("sklearn", "dvc"), "the bundled digits; the steps as `dvc repro`, artifacts in a DVC remote"),
    "tracking": (("mlflow", "matplotlib", "jinja2"), "metrics in MLflow, drawings, the HTML report"),
    "hdf5": (("h5py",), "the data sets femnist_tff and stackoverflow_tff, which are published as HDF5"),
    "pipeline": (("kfp",), "compiling and submitting the steps as a Kubeflow pipeline"),
    "kubernetes": (("kubernetes", "boto3"), "clients as pods of a cluster, with their ledger in S3"),
    "tune": (("optuna",), "searching hyper-parameters"),
    "export": (("onnx", "onnxruntime"), "the models of a run as ONNX, for devices"),
    "privacy": (("dp_accounting",), "what private aggregation spends: epsilon of every round"),
    "detection": (("faster_coco_eval",), "mAP, the metric where objects in images are to be found"),
    "metrics": (("prometheus_client",), "Prometheus metrics of a coordinator: run.metrics_port"),
    "tensorboard": (("tensorboard",), "flexfleet.TensorBoardLogger"),
    "wandb": (("wandb",), "flexfleet.WandbLogger"),
    "testing": (("pytest", "hypothesis"), "the conformance suites: algorithms, networks, data, codecs of your own"),
    "run": (
        ("torch", "safetensors", "numpy", "sklearn", "matplotlib", "jinja2", "cryptography"),
        "`flexfleet run` on the bundled digits, with its report, and nothing else",
    ),
    "docs": (("mkdocs",), "the documentation as a site: make docs"),
}


def examine() -> dict[str, Any]:
    """Return versions, missing packages of extras, torch devices, bfloat16 support of the CPU, and available data
    sets."""
    extras = {
        name: {"missing": [m for m in modules if find_spec(m) is None], "enables": enables}
        for name, (modules, enables) in EXTRAS.items()
    }
    devices: list[str] = []
    data: dict[str, bool] = {}
    bf16: tuple[str, ...] = ()
    if not extras["engine"]["missing"]:
        import torch

        from fl_engine.datasets import DATASETS, data_root
        from fl_engine.training.numerics import cpu_bf16

        devices = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
        bf16 = cpu_bf16()
        try:
            data = {name: not source.missing(data_root()) for name, source in sorted(DATASETS.items())}
        except (OSError, DataError) as error:  # raised, for example, if a folder cannot be read
            log.warning("cannot list the data sets: %s", error)
    return {
        "version": fl_engine.__version__,
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "extras": extras,
        "devices": devices,
        "cpu_bf16": list(bf16),
        "data": data,
    }
