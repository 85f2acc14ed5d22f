"""`from_module` trains like the module: gradients that a trace loses, and the ways out that its errors name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from fl_engine.core.errors import ModelError
from fl_engine.core.slicing import initial_params, runnable
from fl_engine.core.types import FULL, HEAD
from fl_engine.models.traced import from_module
from tests.models.test_traced_refusals import Between


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return -gradient


class Holder(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x)


def without_gradient(_: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = torch.sigmoid(x)
    return x * scale


def with_hook(layer: nn.Module) -> nn.Module:
    layer.register_full_backward_hook(lambda _, gradients, __: (2 * gradients[0],))
    return layer


LOST: dict[str, Callable[[], nn.Module]] = {
    "autograd.Function": lambda: Between(lambda _, x: Reverse.apply(x)),  # type: ignore[no-untyped-call]
    "no_grad": lambda: Between(without_gradient),
    "hook of a module": lambda: Between(lambda m, x: m.inner(x), inner=with_hook(Holder())),
    "hook of a ReLU": lambda: Between(lambda m, x: m.relu(x), relu=with_hook(nn.ReLU())),
}


def gradients(network: nn.Module, x: Tensor) -> dict[str, Tensor]:
    network.train()(x).square().sum().backward()
    return {name: parameter.grad for name, parameter in network.named_parameters() if parameter.grad is not None}


def assert_trains_like(module: nn.Module, **options: Any) -> None:
    family, x = from_module(module, **options)((6,), 3), torch.randn(5, 6)
    found = gradients(runnable(family, FULL, initial_params(family, 0)), x)
    torch.testing.assert_close(found, gradients(module, x))


@pytest.mark.filterwarnings("ignore:For backward hooks to be called")
@pytest.mark.parametrize("name", LOST)
def test_trace_that_loses_gradients_is_refused(name: str) -> None:
    with pytest.raises(ModelError):
        from_module(LOST[name])((6,), 3)
    assert_trains_like(LOST[name](), whole=True)


@pytest.mark.parametrize(
    "middle",
    [
        lambda _, x: x * torch.sigmoid(x).detach(),
        lambda _, x: 2 * x.detach() - x,
        lambda _, x: x + (torch.round(x) - x).detach(),
    ],
    ids=["no_grad", "reversal", "straight-through"],
)
def test_detach_instead_of_no_grad_or_function_is_traced(middle: Any) -> None:
    network = Between(middle)
    assert_trains_like(network)
    assert from_module(network)((6,), 3).layout().groups == {"first": 8, HEAD: 3}


def test_submodel_whose_gradients_depend_on_width_is_refused() -> None:
    tanh = nn.Tanh()
    tanh.register_full_backward_hook(lambda _, gradients, __: (gradients[0] / gradients[0].shape[1],))
    with pytest.raises(ModelError):
        from_module(lambda: Between(lambda m, x: m.tanh(x), tanh=tanh))((6,), 3)


# ------------------------------------------------------------------------------------------------------ weights
def hooked() -> nn.Module:
    network = Between(lambda _, x: x)
    network.first.weight.register_hook(lambda gradient: gradient * 0)
    return network


@pytest.mark.parametrize("whole", [False, True])
def test_hook_of_a_parameter_is_refused(whole: bool) -> None:
    with pytest.raises(ModelError):
        from_module(hooked, whole=whole)((6,), 3)


class Mask(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", (torch.arange(48) % 2).view(8, 6).float())

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.get_buffer("mask")


@pytest.mark.parametrize("whole", [False, True])
def test_mask_by_parametrize_trains_like_the_module(whole: bool) -> None:
    network = Between(lambda m, x: m.wide(x), wide=nn.Linear(8, 8))
    parametrize.register_parametrization(network.first, "weight", Mask())
    assert_trains_like(network, whole=whole)


def test_forward_that_lists_its_parameters_is_refused() -> None:
    """In training they are plain attributes, so `parameters()` is empty and this penalty would be gone."""
    network = Between(lambda m, x: x + sum(each.square().sum() for each in m.first.parameters()))
    with pytest.raises(ModelError):
        from_module(network, whole=True)((6,), 3)


class Moving(nn.Module):
    """A norm with a mean of its own, which training changes in place, or replaces."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.in_place, self.fc = in_place, nn.Linear(6, 3)
        self.running_mean: Tensor
        self.register_buffer("running_mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            mean = 0.9 * self.running_mean + 0.1 * x.mean(0)
            if self.in_place:
                self.running_mean.copy_(mean)
            else:
                self.running_mean = mean
        return self.fc(x - self.running_mean)  # type: ignore[no-any-return]


def test_statistic_that_training_replaces_is_refused() -> None:
    assert_trains_like(Moving(in_place=True), whole=True)
    with pytest.raises(ModelError):
        from_module(lambda: Moving(in_place=False), whole=True)((6,), 3)
