"""Export a sub-model as files for inference on a device.

A network whose batch norm uses the statistics of the current batch cannot make predictions for a single sample.
Therefore the export computes the statistics of each batch norm from the server's proxy data, and stores them in the
exported model. HeteroFL's static batch norm (ICLR 2021, section 3) uses the clients' data instead. Even if a level
already has statistics for evaluation (`PoolModel.static_bn`), the export computes new statistics. The test metric of
the exported level then differs from the test metric in the rounds. `submodel.json` contains both metrics.

Each level is exported to a separate folder. `model.safetensors` contains the weights, and `load` rebuilds the network
from `submodel.json`. `model.onnx` accepts raw samples (images, numbers or tokens) and runs without flexfleet.
"""

from __future__ import annotations

import logging
import math
import tempfile
import warnings
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fl_engine.core.contracts import ModelFamily
from fl_engine.core.errors import ConfigError, EnvironmentFailure, FlexfleetError, IntegrityError
from fl_engine.core.records import Record, parsed
from fl_engine.core.samples import Data, outputs_of
from fl_engine.core.slicing import blank, initial_params, is_statistic, runnable
from fl_engine.core.system import install_command
from fl_engine.core.types import FULL, Params, PoolModel, SubmodelSpec
from fl_engine.models.build import FROM_DATA, build_model
from fl_engine.storage.store import FolderStore, decode, encode, sha256
from fl_engine.tasks import Classification
from fl_engine.training.evaluation import collect_statistics, score, weights_of

ABOUT, WEIGHTS, ONNX = "submodel.json", "model.safetensors", "model.onnx"
OPSET = 18
AGREE = 1e-3
"""Maximum difference between the outputs of the ONNX file and of the network for test samples, relative to max(1,
largest absolute output)."""
CHECKED = 64
BATCH = 128
"""Maximum number of samples in a batch of proxy data."""


Floats = tuple[float, ...]


class About(Record):
    """submodel.json."""

    level: str
    dataset: str
    model: str
    """The value of `model.name`."""
    options: dict[str, Any]
    """Options of the network: the `model` section of the configuration without `name`."""
    input_chw: tuple[int, ...]
    """Shape of one sample; (C, H, W) for images."""
    samples: Literal["uint8", "float32", "int64"]
    """Data type of the samples x: uint8 for images, float32 for numbers, int64 for tokens. `mean` and `std` normalise x
    / 255 for images and x for numbers; if `mean` and `std` are empty, the network does not normalise x."""
    classes: int
    """The number of outputs."""
    names: tuple[str, ...]
    """Class names; empty if the data set has no class names."""
    mean: Floats
    std: Floats
    spec: dict[str, Any]
    ensemble: bool
    """True if the output is the mean over all exits."""
    metric: str
    accuracy_trained: float
    """Test metric after the last round."""
    accuracy_exported: float
    """Test metric of the exported model."""
    proxy_statistics: bool
    """True if the batch-norm statistics were computed from the proxy data."""
    weights_sha256: str


class RawNetwork(nn.Module):
    """Network with normalisation; maps raw samples (B, ...) with the data type `samples` to outputs (B, outputs)."""

    mean: Tensor
    std: Tensor

    def __init__(self, network: nn.Module, samples: str, axes: int, mean: Floats, std: Floats, ensemble: bool) -> None:
        super().__init__()
        self.network, self.samples, self.ensemble = network, samples, ensemble
        shape = (1, -1, 1, 1) if axes == 3 else (*[1] * axes, -1)  # There is one mean per channel or feature.
        self.register_buffer("mean", torch.tensor(mean).view(shape), persistent=False)
        self.register_buffer("std", torch.tensor(std).view(shape), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.mean.numel():
            x = ((x.to(torch.float32) / 255 if self.samples == "uint8" else x) - self.mean) / self.std
        exits = outputs_of(self.network(x))
        return torch.stack(exits).mean(0) if self.ensemble else exits[-1]


def raw_network(network: nn.Module, data: Data, ensemble: bool) -> RawNetwork:
    """Return the network with the normalisation of `data`, in evaluation mode."""
    return RawNetwork(network, type_of(data), len(data.input_shape), data.mean, data.std, ensemble).eval()


def type_of(data: Data) -> Literal["uint8", "float32", "int64"]:
    return "uint8" if data.has_images else "int64" if data.has_tokens else "float32"


def export(
    model_name: str,
    family: ModelFamily,
    published: Params,
    member: PoolModel,
    data: Data,
    proxy: Tensor,
    trained: float,
    out: Path,
) -> tuple[About, RawNetwork]:
    """Write submodel.json and model.safetensors of one pool model to the folder `out`.

    Args:
        published: The return value of `evaluation.published`.
        proxy: Indices (N,) of the server's proxy samples in the training data.
        trained: The test metric after the last round.
    """
    trained_weights = weights_of(published, family.layout(), member)
    family, params = with_statistics(family, trained_weights, member, data, proxy)
    network = runnable(family, member.spec, params).eval()
    weights = encode(params)
    options = {f.name: getattr(family, f.name) for f in fields(cast(Any, family))}
    options |= getattr(family, "keywords", {})
    about = About(
        level=member.name,
        dataset=data.name,
        model=model_name,
        options={k: v for k, v in options.items() if k not in FROM_DATA},
        input_chw=data.input_shape,
        samples=type_of(data),
        classes=data.task.outputs,
        names=tuple(getattr(data.task, "names", ())),
        mean=data.mean,
        std=data.std,
        spec=member.spec.to_json(),
        ensemble=member.ensemble,
        metric=data.task.metric.name,
        accuracy_trained=trained,
        accuracy_exported=score(network, data, member.ensemble).value,
        proxy_statistics=params is not trained_weights,
        weights_sha256=sha256(weights),
    )
    store = FolderStore(out)
    store.put(WEIGHTS, weights)
    store.put(ABOUT, (about.model_dump_json(indent=1) + "\n").encode())
    return about, raw_network(network, data, member.ensemble)


def with_statistics(
    family: ModelFamily, params: Params, member: PoolModel, data: Data, proxy: Tensor
) -> tuple[ModelFamily, Params]:
    """Return a network that stores batch-norm statistics, and its weights, including the statistics of the proxy
    samples. Return `family` and `params` unchanged if no statistics are needed (see `check`)."""
    if not check(family, len(proxy), member.static_bn):
        return family, params
    module = runnable(family, member.spec, dict(params)).eval()
    stores_none = by_batch(module)
    samples = data.train_x[proxy]
    # Use batches of nearly equal size, because each batch has the same weight in the statistics.
    batches = math.ceil(len(samples) / BATCH)
    collect_statistics(module, data, samples, "cpu", math.ceil(len(samples) / batches))
    found = params | {name: tensor for name, tensor in module.state_dict().items() if is_statistic(name)}
    return replace(cast(Any, family), norm="static") if stores_none else family, found


def check(family: ModelFamily, proxy: int, static_bn: bool) -> bool:
    """Return whether the export must compute statistics, because a batch norm does not store any or `static_bn` is set.
    Raises ConfigError if the export cannot compute or store the statistics."""
    module = blank(family)
    stores_none = by_batch(module)
    if not stores_none and not (static_bn and any(isinstance(m, _BatchNorm) for m in module.modules())):
        return False
    if stores_none and "norm" not in {f.name for f in fields(cast(Any, family))}:
        raise ConfigError(
            f"{type(family).__name__} cannot be exported, because its batch norm uses the current batch. Choose a "
            "network with the option model.norm=static. In your own network, remove track_running_stats=False",
            path="model.name",
        )
    if not proxy:
        others = " and ".join(["model.norm=static"] * stores_none + ["algorithm.static_bn=false"] * static_bn)
        text = f"batch norm of an exported network requires proxy data. Set partition.proxy above 0, or {others}"
        raise ConfigError(text, path="partition.proxy")
    return True


def check_onnx(family: ModelFamily, data: Data) -> None:
    """Test the ONNX export with random weights. Raises ConfigError if the export fails."""
    if by_batch(family.module(FULL)):
        family = replace(cast(Any, family), norm="static")
    network = runnable(family, FULL, initial_params(family, 0)).eval()
    with tempfile.TemporaryDirectory() as folder:
        try:
            to_onnx(raw_network(network, data, ensemble=False), data, Path(folder) / ONNX)
        except (EnvironmentFailure, OSError):
            raise
        except Exception as error:  # The errors of torch and onnxruntime have no common base class.
            cause = str(error).strip().partition("\n")[0]
            message = f"{type(family).__name__} cannot be exported to ONNX ({cause}). Set publish.onnx=false"
            raise ConfigError(message, path="publish.onnx") from error


def by_batch(module: nn.Module) -> bool:
    """Return whether any batch norm uses the statistics of the current batch even in evaluation mode."""
    return any(isinstance(m, _BatchNorm) and m.running_mean is None for m in module.modules())


def write_onnx(network: RawNetwork, data: Data, path: Path) -> None:
    """Write the network as an ONNX file for any batch size n. The file's input is `images`, uint8 (n, C, H, W), or
    `samples` (n, ...). The file's output is `logits`, float32 (n, classes), for classification and `outputs` (n,
    outputs) for other tasks.

    The function uses torch's older exporter, which creates the same graph as the newer exporter in a tenth of the time.
    Raises EnvironmentFailure if onnx is not installed.
    """
    try:
        import onnx  # noqa: F401 - torch's exporter needs it
        import onnxruntime  # noqa: F401
    except ImportError as error:
        raise EnvironmentFailure(
            f"{error.name} is not installed. Run `{install_command('export')}`, or set publish.onnx=false"
        ) from error
    input_name = "images" if data.has_images else "samples"
    output_name = "logits" if isinstance(data.task, Classification) else "outputs"
    path.parent.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            network,
            (data.test_x[:2],),
            str(path),
            input_names=[input_name],
            output_names=[output_name],
            dynamic_axes={input_name: {0: "n"}, output_name: {0: "n"}},
            opset_version=OPSET,
            dynamo=False,
        )


def to_onnx(network: RawNetwork, data: Data, path: Path) -> None:
    """Write the network with `write_onnx`. Raises IntegrityError if the outputs of the file and the outputs of the
    network differ for test samples."""
    write_onnx(network, data, path)
    samples = data.test_x[:CHECKED]
    with torch.no_grad():
        wanted = network(samples)
    difference = float((run_session(open_session(path), samples) - wanted).abs().max())
    if not difference <= AGREE * max(1.0, float(wanted.abs().max())):
        raise IntegrityError(
            f"{path}: the file's outputs differ from the network's outputs by up to {difference:g} on test samples"
        )


def open_session(path: Path) -> Any:
    """Return an ONNX Runtime session with one thread, so that results of different machines are comparable."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def run_session(session: Any, x: Tensor) -> Tensor:
    """Run the ONNX session and return the outputs (N, outputs, ...) for raw samples (N, ...)."""
    return torch.from_numpy(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0])


def load(folder: str | Path) -> RawNetwork:
    """Load the network from an exported folder, in evaluation mode. The network maps raw samples, such as uint8 images
    (B, C, H, W), to outputs, such as logits (B, classes).

    Raises IntegrityError if files are missing, damaged or from different exports.

    Examples:
        load(mlflow.artifacts.download_artifacts("models:/<name>-<level>@champion"))
    """
    about = read(folder)
    path = Path(folder) / WEIGHTS
    value = FolderStore(Path(folder)).get(WEIGHTS)
    if sha256(value) != about.weights_sha256:
        raise IntegrityError(f"{path} is damaged: its SHA-256 differs from the value in {ABOUT}. Export it again")
    try:
        family = build_model({**about.options, "name": about.model}, about.input_chw, about.classes)
        network = runnable(family, SubmodelSpec.from_json(about.spec), decode(value, str(path)))
        axes = len(about.input_chw)
        return RawNetwork(network, about.samples, axes, about.mean, about.std, about.ensemble).eval()
    except (FlexfleetError, TypeError, ValueError, RuntimeError, ArithmeticError) as error:
        raise IntegrityError(f"{path} does not match the network in {ABOUT}: {error}") from error


def read(folder: str | Path) -> About:
    path = Path(folder) / ABOUT
    if not path.exists():
        raise IntegrityError(f"{path} does not exist. Pass the folder of an exported level")
    return parsed(About, path.read_bytes(), str(path))


logging.getLogger("torch.onnx").setLevel(logging.ERROR)
