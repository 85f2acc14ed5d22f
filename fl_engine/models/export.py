"""Exports a sub-model as files that a device can use without knowing about federated learning.

A network that normalises by the current batch cannot score a single sample. So the statistics of every batch norm are
computed once from the server's proxy data (HeteroFL's static batch norm, ICLR 2021, Sec. 3, uses the clients' data) and
become part of the exported model. A level that the rounds score with statistics of its own (`PoolModel.static_bn`) gets
new ones, too. The score on the test set then differs from that of the rounds; both are stored.

A folder per level: `model.safetensors`; `submodel.json`, from which `load` builds the network again; `model.onnx`,
which takes raw samples (images, numbers or tokens of any shape) and runs without this package.
"""

from __future__ import annotations

import logging
import math
import tempfile
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, cast

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fl_engine.core.contracts import ModelFamily
from fl_engine.core.errors import ConfigError, EnvironmentFailure, FlexfleetError, IntegrityError, brief
from fl_engine.core.samples import Data, outputs_of
from fl_engine.core.slicing import initial_params, is_statistic, runnable
from fl_engine.core.task import class_names
from fl_engine.core.types import FULL, Params, PoolModel, SubmodelSpec
from fl_engine.models.build import FROM_DATA, build_model
from fl_engine.storage.store import FolderStore, decode, encode, sha256
from fl_engine.tasks import Classification
from fl_engine.training.evaluation import collect_statistics, score, weights_of

ABOUT, WEIGHTS, ONNX = "submodel.json", "model.safetensors", "model.onnx"
OPSET = 18
AGREE = 1e-3
"""The largest difference between the outputs of the ONNX file and the network on test samples, relative to the largest
output or to 1, whichever is more."""
CHECKED = 64
BATCH = 128
"""Most samples in a batch of the proxy data."""


class About(BaseModel):
    """submodel.json."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: Literal[1]
    level: str
    dataset: str
    model: str
    """As in `model.name`."""
    options: dict[str, Any]
    """The network's options: the `model` section of a configuration without the name."""
    input_chw: tuple[int, ...]
    """The shape of a sample, (C, H, W) of an image."""
    samples: Literal["uint8", "float32", "int64"]
    """Images (uint8), numbers (float32) or tokens (int64). mean and std normalise x / 255 for images, and x for
    numbers; without them the network takes x itself."""
    classes: int
    """The number of outputs."""
    names: tuple[str, ...]
    """The name of each class, if the data set has names."""
    mean: tuple[float, ...]
    std: tuple[float, ...]
    spec: dict[str, Any]
    ensemble: bool
    """Whether the output is the mean over all exits."""
    metric: str
    accuracy_trained: float
    """The metric on the test set, as in the rounds."""
    accuracy_exported: float
    """The metric on the test set, as exported."""
    proxy_statistics: bool
    """Whether batch norm has statistics of the proxy data."""
    weights_sha256: str


class RawNetwork(nn.Module):
    """Raw samples (B, ...) of the type `samples` to outputs (B, outputs): a network with its normalisation."""

    def __init__(
        self,
        network: nn.Module,
        samples: str,
        axes: int,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        ensemble: bool,
    ) -> None:
        super().__init__()
        self.network = network
        self.samples = samples
        self.normalised = bool(mean)
        self.ensemble = ensemble
        self.mean: Tensor
        self.std: Tensor
        shape = (1, -1, 1, 1) if axes == 3 else (*[1] * axes, -1)  # per channel of maps, else per feature
        self.register_buffer("mean", torch.tensor(mean).view(shape), persistent=False)
        self.register_buffer("std", torch.tensor(std).view(shape), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.normalised:
            x = ((x.to(torch.float32) / 255 if self.samples == "uint8" else x) - self.mean) / self.std
        exits = outputs_of(self.network(x))
        return torch.stack(exits).mean(0) if self.ensemble else exits[-1]


def type_of(data: Data) -> Literal["uint8", "float32", "int64"]:
    return "uint8" if data.has_images else "int64" if data.has_tokens else "float32"


@dataclass(frozen=True)
class Exported:
    about: About
    network: RawNetwork


def export(
    model_name: str,
    family: ModelFamily,
    published: Params,
    member: PoolModel,
    data: Data,
    proxy: Tensor,
    trained: float,
    out: Path,
) -> Exported:
    """Write submodel.json and model.safetensors of one pool model into `out`.

    Args:
        published: The result of `evaluation.published`.
        proxy: (N,), the positions of the server's samples in the training data.
        trained: The task's metric after the last round.
    """
    trained_weights = weights_of(published, family.layout(), member)
    family, params = with_statistics(family, trained_weights, member, data, proxy)
    network = runnable(family, member.spec, params).eval()
    raw = RawNetwork(network, type_of(data), len(data.input_shape), data.mean, data.std, member.ensemble).eval()
    weights = encode(params)
    own = {f.name: getattr(family, f.name) for f in fields(cast(Any, family))}
    about = About(
        schema_version=1,
        level=member.name,
        dataset=data.name,
        model=model_name,
        options={k: v for k, v in own.items() if k not in FROM_DATA},
        input_chw=data.input_shape,
        samples=type_of(data),
        classes=data.task.outputs,
        names=class_names(data.task),
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
    return Exported(about, raw)


def with_statistics(
    family: ModelFamily, params: Params, member: PoolModel, data: Data, proxy: Tensor
) -> tuple[ModelFamily, Params]:
    """The network with stored batch-norm statistics, and the pool model's weights with the statistics of the proxy
    samples. Both are unchanged if they do not need any (`needs_statistics`)."""
    module = runnable(family, member.spec, dict(params)).eval()
    if not needs_statistics(module, member.static_bn):
        return family, params
    check(family, len(proxy), member.static_bn)
    stores_none = by_batch(module)
    samples = data.train_x[proxy]
    # Nearly equal batches, because each has the same weight.
    batches = math.ceil(len(samples) / BATCH)
    collect_statistics(module, data, samples, "cpu", math.ceil(len(samples) / batches))
    found = params | {name: tensor for name, tensor in module.state_dict().items() if is_statistic(name)}
    return replace(cast(Any, family), norm="static") if stores_none else family, found


def check(family: ModelFamily, proxy: int, static_bn: bool) -> None:
    """Raise ConfigError if statistics are needed but the proxy's size is 0, or the network cannot store them."""
    module = family.module(FULL)
    if not needs_statistics(module, static_bn):
        return
    stores_none = by_batch(module)
    if not proxy:
        what = "normalises by its batch" if stores_none else "is scored with statistics collected for each level"
        without = " and ".join(["model.norm=static"] * stores_none + ["algorithm.static_bn=false"] * static_bn)
        raise ConfigError(
            f"exporting a network that {what} needs the server's proxy data, but there are none: set partition.proxy "
            f"above 0, or partition.server_classes, or {without}"
        )
    if stores_none and "norm" not in {f.name for f in fields(cast(Any, family))}:
        raise ConfigError(
            f"{type(family).__name__} cannot be exported, because it normalises by its batch and has no option "
            "norm=static. In a network of your own, leave out track_running_stats=False"
        )


def check_onnx(family: ModelFamily, data: Data) -> None:
    """Try the ONNX export on the freshly initialised network. Raises ConfigError if it fails."""
    if by_batch(family.module(FULL)):
        family = replace(cast(Any, family), norm="static")
    network = runnable(family, FULL, initial_params(family, 0)).eval()
    raw = RawNetwork(network, type_of(data), len(data.input_shape), data.mean, data.std, ensemble=False).eval()
    with tempfile.TemporaryDirectory() as folder:
        try:
            _write(raw, data, Path(folder) / ONNX)
        except EnvironmentFailure:
            raise
        except Exception as error:  # torch's exporter and onnxruntime share no error class
            if getattr(error, "errno", None):  # an error of the system, such as a full disk
                raise
            said = str(error).strip().partition("\n")[0]
            raise ConfigError(
                f"{type(family).__name__} cannot be written as ONNX ({said}): set publish.onnx=false"
            ) from error


def by_batch(module: nn.Module) -> bool:
    """Whether a batch norm uses the statistics of the current batch, in evaluation too."""
    return any(isinstance(m, _BatchNorm) and m.running_mean is None for m in module.modules())


def needs_statistics(module: nn.Module, static_bn: bool) -> bool:
    """Whether a batch norm has no statistics for use: it stores none, or with `static_bn` the rounds use others."""
    return by_batch(module) or (static_bn and any(isinstance(m, _BatchNorm) for m in module.modules()))


def to_onnx(exported: Exported, data: Data, path: Path) -> Path:
    """Write the network as ONNX: `images` uint8 (n, C, H, W), or `samples` (n, ...) of another type, -> `logits`
    float32 (n, classes), or `outputs` (n, outputs) of another task; any n.

    Raises IntegrityError if the file's outputs on test samples differ from the network's.
    """
    return _write(exported.network, data, path)


def _write(network: RawNetwork, data: Data, path: Path) -> Path:
    try:
        import onnx  # noqa: F401 - torch's exporter needs it
        import onnxruntime
    except ImportError as error:
        raise EnvironmentFailure(
            f"{error.name} is not installed: pip install 'flexfleet[export]', or --set publish.onnx=false"
        ) from error
    samples, given = data.test_x[:CHECKED], "images" if data.has_images else "samples"
    _quietly(network, samples[:2], given, "logits" if isinstance(data.task, Classification) else "outputs", path)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (answer,) = session.run(None, {given: samples.numpy()})
    with torch.no_grad():
        wanted = network(samples)
    apart = float((torch.from_numpy(answer) - wanted).abs().max())
    if not apart <= AGREE * max(1.0, float(wanted.abs().max())):
        raise IntegrityError(f"{path}: its outputs are {apart:g} from the network's on {len(samples)} test samples")
    return path


def _quietly(network: nn.Module, samples: Tensor, given: str, answer: str, path: Path) -> None:
    """Export by tracing, which takes a tenth of the time of torch's newer exporter and returns the same graph."""
    import warnings

    path.parent.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            network,
            (samples,),
            str(path),
            input_names=[given],
            output_names=[answer],
            dynamic_axes={given: {0: "n"}, answer: {0: "n"}},
            opset_version=OPSET,
            dynamo=False,
        )


# ------------------------------------------------------------------------------------------------ loading
def load(folder: str | Path) -> RawNetwork:
    """Return the network of an exported folder, in evaluation mode. It takes raw samples, for example uint8 images (B,
    C, H, W), and returns outputs, for example logits (B, classes).

    Raises IntegrityError for files that are missing, damaged or do not belong together.

    Example:
        load(mlflow.artifacts.download_artifacts("models:/<name>-<level>@champion"))
    """
    about = read(folder)
    path = Path(folder) / WEIGHTS
    value = FolderStore(Path(folder)).get(WEIGHTS)
    if sha256(value) != about.weights_sha256:
        raise IntegrityError(f"{path} is damaged: its sha256 is not the one in {ABOUT}")
    try:
        family = build_model({**about.options, "name": about.model}, about.input_chw, about.classes)
        network = runnable(family, SubmodelSpec.from_json(about.spec), decode(value, str(path)))
        axes = len(about.input_chw)
        return RawNetwork(network, about.samples, axes, about.mean, about.std, about.ensemble).eval()
    except (FlexfleetError, TypeError, ValueError, AttributeError, RuntimeError, ArithmeticError) as error:
        raise IntegrityError(f"{path} is not of the network that {ABOUT} describes: {error}") from error


def read(folder: str | Path) -> About:
    path = Path(folder) / ABOUT
    try:
        return About.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise IntegrityError(f"{path} does not exist: give the folder of an exported level") from None
    except OSError as error:
        raise IntegrityError(f"{path} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        raise IntegrityError(f"{path} is not a description of an exported level: {brief(error)}") from error


logging.getLogger("torch.onnx").setLevel(logging.ERROR)
