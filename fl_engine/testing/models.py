"""What every network has to hold, for pytest: subclass `ModelSuite`, give it a `family` fixture, done.

    class TestModels(ModelSuite):
        @pytest.fixture(params=sorted(MODELS))
        def family(self, request): ...

Use few channels: the suite runs each network some hundred times.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import lru_cache, partial
from itertools import combinations
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fl_engine.core import costs, slicing
from fl_engine.core.contracts import ModelFamily, TakesImages
from fl_engine.core.errors import ModelError
from fl_engine.core.slicing import take
from fl_engine.core.types import FULL, HEAD, ParamLayout, Params, Prunable, SubmodelSpec
from fl_engine.models.export import by_batch

# A family is immutable, so sharing it between examples is safe, whatever the scope of the fixture.
law = settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[
        HealthCheck.function_scoped_fixture,
        HealthCheck.differing_executors,
        HealthCheck.too_slow,
    ],
)


# ---------------------------------------------------------------------------------------- making things up
@st.composite
def specs(draw: st.DrawFn, family: ModelFamily, inside: SubmodelSpec = FULL) -> SubmodelSpec:
    """Any sub-model of `inside`: of each group all, a prefix, or any channels; of some choices others than the group's;
    some blocks dropped."""
    layout = family.layout()
    keep: dict[str, Sequence[int]] = {}
    for group in layout.groups:
        channels = _channels(layout, inside, group)
        kind = draw(st.sampled_from(("all", "prefix", "some")))
        if kind == "prefix":
            channels = channels[: draw(st.integers(1, len(channels)))]
        elif kind == "some":
            places = draw(st.sets(st.integers(0, len(channels) - 1), min_size=1))
            channels = [channels[place] for place in sorted(places)]
        keep[group] = channels
    for choice, of in layout.choices.items():
        if choice in inside.kept or draw(st.booleans()):
            count, held = len(keep[str(of)]), _channels(layout, inside, choice)
            places = draw(st.sets(st.integers(0, len(held) - 1), min_size=count, max_size=count))
            keep[choice] = [held[place] for place in sorted(places)]
    drops = [b for b in droppable(family) if draw(st.integers(0, 3)) == 0]
    blocks = [b for b in layout.blocks if layout.has_block(inside, b) and b not in drops]
    return SubmodelSpec.of(keep, None if len(blocks) == len(layout.blocks) else blocks)


@lru_cache(maxsize=32)
def droppable(family: ModelFamily) -> tuple[str, ...]:
    """The blocks without which the network can still be built."""
    blocks = family.layout().blocks
    return tuple(block for block in blocks if _built(family, _without(blocks, block)) is not None)


def _without(blocks: Sequence[str], block: str) -> SubmodelSpec:
    return SubmodelSpec.of({}, [b for b in blocks if b != block])


def _built(family: ModelFamily, spec: SubmodelSpec) -> nn.Module | None:
    try:
        with torch.device("meta"):
            return family.module(spec)
    except ModelError:
        return None


def _channels(layout: ParamLayout, spec: SubmodelSpec, group: str) -> list[int]:
    keep = layout.indices(spec, group)
    return list(range(keep)) if isinstance(keep, int) else list(keep)


@lru_cache(maxsize=32)
def random_params(family: ModelFamily) -> Params:
    """The full network in double precision, with random biases, affine parameters and statistics: the zeros
    and ones of a fresh one would hide a channel that is not where it should be. Never change it in place."""
    generator = torch.Generator().manual_seed(7)
    params = {}
    for name, tensor in slicing.initial_params(family, seed=7).items():
        if tensor.dim() > 1:
            params[name] = tensor.double()
            continue
        noise = torch.rand(tensor.shape, generator=generator, dtype=torch.float64)
        params[name] = noise + 0.5 if name.endswith("running_var") else noise - 0.3
    return params


def samples(family: ModelFamily, count: int) -> Tensor:
    return slicing.made_up(family, count, torch.Generator().manual_seed(11))


def kept_mask(layout: ParamLayout, spec: SubmodelSpec, name: str, shape: torch.Size) -> Tensor:
    """Which elements of a parameter a sub-model keeps: by the definition of an axis, not by way of `take`."""
    slot = layout.slots[name]
    mask = torch.full(shape, layout.has_block(spec, slot.block))
    for dim, axis in enumerate(slot.axes):
        runs: list[Tensor] = []
        for part in axis.parts:
            size = shape[dim] if axis.then is None else part.each * layout.groups.get(part.group or "", 1)
            channel = torch.arange(size) % (size // part.copies) // part.repeat
            every = torch.full((size,), True)
            key = part.key
            runs.append(every if key is None else torch.isin(channel, torch.tensor(_channels(layout, spec, key))))
        mask &= torch.cat(runs).view([-1 if d == dim else 1 for d in range(len(shape))])
    return mask


def zeroed(family: ModelFamily, spec: SubmodelSpec, params: Params) -> nn.Module:
    """The full network, in evaluation, with all that the sub-model leaves out zeroed. Its group and layer norms take
    their statistics from the channels that are kept."""
    layout, buffers = family.layout(), {name for name, _ in family.module().named_buffers()}
    kept = {name: kept_mask(layout, spec, name, t.shape) for name, t in params.items()}
    rest = {name: t if name in buffers else t * kept[name] for name, t in params.items()}
    whole = slicing.runnable(family, FULL, rest).eval()
    for name, layer in whole.named_modules():
        if isinstance(layer, nn.GroupNorm):
            layer.forward = partial(_over_kept, layer, kept[f"{name}.weight"])  # type: ignore[method-assign]
        elif isinstance(layer, nn.LayerNorm):
            layer.forward = partial(_over_kept_last, layer, kept[f"{name}.weight"])  # type: ignore[method-assign]
    return whole


def assert_same(left: Params, right: Params) -> None:
    assert list(left) == list(right)
    for name in left:
        assert torch.equal(left[name], right[name]), name


# ------------------------------------------------------------------------------------------------ the suite
class ModelSuite:
    """Needs a fixture `family`: a `ModelFamily`. `static` may be overridden."""

    def static(self, family: ModelFamily) -> ModelFamily:
        """The same network on given statistics, for the law that compares a slice with the zeroed network:
        the option `norm="static"` where there is one."""
        return _replaced(family, norm="static") if hasattr(family, "norm") else family

    # --- the full network
    @pytest.fixture(autouse=True)
    def the_same_first_weights(self) -> None:
        """With some, all ReLUs of a narrow layer are 0."""
        torch.manual_seed(1)

    def test_state_and_layout_agree_in_names_order_and_sizes(self, family: ModelFamily) -> None:
        for variant in (family, self.static(family)):
            layout, state = variant.layout(), slicing.full_shapes(variant)
            assert list(state) == list(layout.slots)
            for name, slot in layout.slots.items():
                assert len(slot.axes) == len(state[name]), name
                for size, axis in zip(state[name], slot.axes, strict=True):
                    assert size == axis.length(size, layout.groups.__getitem__), name

    def test_the_outputs_are_a_group(self, family: ModelFamily) -> None:
        assert family.layout().groups[HEAD] == family.outputs

    def test_a_family_is_a_value(self, family: ModelFamily) -> None:
        assert _replaced(family) == family
        assert hash(_replaced(family)) == hash(family)
        if isinstance(family, TakesImages):
            assert min(family.input_shape[1:]) >= family.min_hw

    def test_forward_gives_outputs_that_depend_on_the_sample(self, family: ModelFamily) -> None:
        with torch.no_grad():
            outputs = family.module().eval()(samples(family, 3))
        assert outputs.shape[:2] == (3, family.outputs)
        assert torch.isfinite(outputs).all()
        assert not torch.equal(outputs[0], outputs[1])

    def test_sample_has_the_same_outputs_alone_and_in_a_batch(self, family: ModelFamily) -> None:
        """In evaluation, on given statistics; of the shape (1, outputs, ...)."""
        static = self.static(family)
        module, x = slicing.runnable(static, FULL, random_params(static)).eval(), _in_double(samples(static, 3))
        if by_batch(module):
            pytest.skip("it normalises by its batch, and has no given statistics")
        with torch.no_grad():
            alone, among = module(x[:1]), module(x)[:1]
        assert alone.shape == among.shape
        torch.testing.assert_close(alone, among, rtol=1e-7, atol=1e-9)

    def test_first_weights_follow_from_the_seed(self, family: ModelFamily) -> None:
        assert_same(slicing.initial_params(family, seed=1), slicing.initial_params(family, seed=1))

    def test_gradients_reach_every_parameter(self, family: ModelFamily) -> None:
        module = family.module().train()
        module(samples(family, 4)).square().sum().backward()
        assert [name for name, p in module.named_parameters() if p.grad is None] == []

    def test_static_statistics_move_in_training_only(self, family: ModelFamily) -> None:
        module = self.static(family).module()
        before = {name: b.clone() for name, b in module.named_buffers()}
        module.eval()(samples(family, 4))
        assert_same(before, dict(module.named_buffers()))
        module.train()(samples(family, 4))
        assert all(not torch.equal(before[name], b) for name, b in module.named_buffers())

    def test_a_batch_normalised_network_keeps_no_statistics(self, family: ModelFamily) -> None:
        module = family.module()
        stateful = {name for name, _ in module.named_buffers()} - set(family.layout().slots)
        assert stateful == set(), "buffers that no sub-model would carry"

    # --- sub-networks
    @law
    @given(data=st.data())
    def test_a_sub_network_has_the_slices_shapes(self, family: ModelFamily, data: st.DataObject) -> None:
        spec = data.draw(specs(family))
        layout, full = family.layout(), slicing.full_shapes(family)
        with torch.device("meta"):
            state = family.module(spec).state_dict()
        module_shapes = {name: tuple(t.shape) for name, t in state.items()}
        assert list(module_shapes.items()) == list(slicing.shapes(layout, spec, full).items())
        slices = take(random_params(family), layout, spec)
        assert list(module_shapes.items()) == [(name, tuple(t.shape)) for name, t in slices.items()]
        assert costs.count_params(family, spec) == sum(t.numel() for t in state.values())

    @law
    @given(data=st.data())
    def test_a_slice_is_what_the_axes_say(self, family: ModelFamily, data: st.DataObject) -> None:
        spec = data.draw(specs(family))
        layout, params = family.layout(), random_params(family)
        for name, tensor in take(params, layout, spec).items():
            mask = kept_mask(layout, spec, name, params[name].shape)
            assert torch.equal(tensor.flatten(), params[name][mask]), name

    @law
    @given(data=st.data())
    def test_narrowing_composes(self, family: ModelFamily, data: st.DataObject) -> None:
        layout, params = family.layout(), random_params(family)
        outer = data.draw(specs(family))
        inner = data.draw(specs(family, inside=outer))
        assert slicing.contains(layout, outer, inner)
        assert_same(take(take(params, layout, outer), layout, inner, have=outer), take(params, layout, inner))

    @law
    @given(data=st.data())
    def test_a_slice_runs_like_the_full_network_with_the_rest_zeroed(
        self, family: ModelFamily, data: st.DataObject
    ) -> None:
        """A batch norm on given statistics; group and layer norms, whose statistics are those of the sample at hand,
        over the channels that are kept: a layout has to leave each of them in the group that it was in."""
        static = self.static(family)
        spec = data.draw(specs(static))
        layout, params, x = static.layout(), random_params(static), _in_double(samples(static, 2))
        with torch.no_grad():
            sub = slicing.runnable(static, spec, take(params, layout, spec)).eval()(x)
            full = zeroed(static, spec, params)(x)
        torch.testing.assert_close(sub, full[:, _channels(layout, spec, HEAD)], rtol=1e-7, atol=1e-9)

    def test_a_smaller_network_costs_less(self, family: ModelFamily) -> None:
        layout = family.layout()
        half = SubmodelSpec.of({g: max(1, n // 2) for g, n in layout.groups.items() if g != HEAD})
        assert 0 < costs.count_params(family, half) < costs.count_params(family)
        assert 0 < costs.count_macs(family, half) < costs.count_macs(family)

    def test_a_block_is_skipped_or_its_absence_refused_by_name(self, family: ModelFamily) -> None:
        layout = family.layout()
        for block in layout.blocks:
            spec = _without(layout.blocks, block)
            if block not in droppable(family):
                with pytest.raises(ModelError, match=f"'{block}'"):
                    family.module(spec)
                continue
            with torch.no_grad():
                assert family.module(spec).eval()(samples(family, 2)).shape[:2] == (2, family.outputs)

    def test_a_slice_out_of_range_is_an_error(self, family: ModelFamily) -> None:
        layout, params = family.layout(), random_params(family)
        for group, size in layout.groups.items():
            wrong: list[int | tuple[int, ...]] = [size + 1, (0, size)]
            for keep in wrong:
                with pytest.raises(ModelError, match=f"'{group}'.*{size}"):
                    take(params, layout, SubmodelSpec.of({group: keep}))
                with pytest.raises(ModelError, match=f"'{group}'.*{size}"):
                    family.module(SubmodelSpec.of({group: keep}))

    # --- what a pool prunes
    def test_prunable_layers_are_groups_in_network_order(self, family: ModelFamily) -> None:
        groups = [layer.group for layer in family.prunable()]
        assert groups
        assert groups == [g for g in family.layout().groups if g in groups], "unknown, twice, or out of order"
        assert HEAD not in groups

    def test_prunable_parameters_are_disjoint_without_the_classifier(self, family: ModelFamily) -> None:
        layout = family.layout()
        covered = [_covered(layout, layer) for layer in family.prunable()]
        assert all(covered)
        assert all(not a & b for a, b in combinations(covered, 2))
        for layer, names in zip(family.prunable(), covered, strict=True):
            unused = [prefix for prefix in layer.params if not any(n.startswith(prefix) for n in names)]
            assert unused == []
            axes = [axis for name in names for axis in layout.slots[name].axes]
            governing = {part.group for axis in axes for part in axis.parts}
            assert layer.group in governing
            assert HEAD not in governing

    def test_prunable_activations_are_all_relus_of_the_layer(self, family: ModelFamily) -> None:
        relus = [name for name, m in family.module().named_modules() if isinstance(m, nn.ReLU | nn.ReLU6)]
        for layer in family.prunable():
            assert sorted(layer.activations) == sorted(r for r in relus if r.startswith(layer.params))

    def test_prunable_activations_are_disjoint_and_run_once(self, family: ModelFamily) -> None:
        names = [name for layer in family.prunable() for name in layer.activations]
        assert len(names) == len(set(names))
        module, runs = family.module().eval(), dict.fromkeys(names, 0)

        def count(name: str) -> None:
            runs[name] += 1

        for name in names:
            module.get_submodule(name).register_forward_hook(lambda *_, name=name: count(name))
        with torch.no_grad():
            module(samples(family, 2))
        assert runs == dict.fromkeys(names, 1)


def _over_kept(norm: nn.GroupNorm, kept: Tensor, x: Tensor) -> Tensor:
    """What `norm` makes of x (B, C, ...), with statistics over the `kept` (C,) channels of each of its groups alone."""
    parts = x.view(len(x), norm.num_groups, len(kept) // norm.num_groups, -1)
    mask = kept.to(x.dtype).view(norm.num_groups, -1, 1).expand(parts.shape[1:])
    count = mask.sum((1, 2)).clamp(min=1).view(-1, 1, 1)  # a block that is dropped keeps none
    centred = parts - (parts * mask).sum((2, 3), keepdim=True) / count
    variance = (centred.square() * mask).sum((2, 3), keepdim=True) / count
    shape = (-1, *[1] * (x.dim() - 2))
    normal = (centred / (variance + norm.eps).sqrt()).reshape(x.shape)
    out: Tensor = normal * norm.weight.view(shape) + norm.bias.view(shape)
    return out


def _over_kept_last(norm: nn.LayerNorm, kept: Tensor, x: Tensor) -> Tensor:
    """What `norm` makes of x (..., C), with statistics over the `kept` (C,) channels alone."""
    of_kept = x[..., kept]
    centred = x - of_kept.mean(-1, keepdim=True)
    normal = centred / (of_kept.var(-1, correction=0, keepdim=True) + norm.eps).sqrt()
    out: Tensor = normal * norm.weight + norm.bias
    return out


def _in_double(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x


def _replaced(family: Any, **changes: Any) -> ModelFamily:
    replaced: ModelFamily = dataclasses.replace(family, **changes)
    return replaced


def _covered(layout: ParamLayout, layer: Prunable) -> set[str]:
    return {name for name in layout.slots if name.startswith(layer.params)}
