"""Where the rows of a comparison differ, beside the algorithm: found in configurations, told in every form."""

from __future__ import annotations

import json
from typing import Any

from fl_engine.models.small_cnn import SmallCNN
from fl_engine.testing.tiny import tiny_pool
from flexfleet.config import Config, algorithm, load_config
from flexfleet.experiments.row_differences import differences, options_of

FAMILY = SmallCNN((1, 8, 8), 10)


def found(**rows: list[str]) -> dict[str, dict[str, Any]]:
    """Of rows by label, each with its settings, the first of which is the algorithm."""
    configs = {label: load_config(None, [f"algorithm.name={name}", *sets]) for label, (name, *sets) in rows.items()}
    return differences(configs, {label: _pool(config) for label, config in configs.items()})


def _pool(config: Config) -> Any:
    method: Any = algorithm(config)
    return tiny_pool(method, method.network(FAMILY) if hasattr(method, "network") else FAMILY)


# ------------------------------------------------------------------------------------------------- what is found
def test_defaults_that_differ_are_found_and_equal_ones_are_not() -> None:
    apart = found(heterofl=["heterofl"], fedrolex=["fedrolex"], flexfl=["flexfl"])
    assert apart == {
        "algorithm.weighting": {"heterofl": "examples", "fedrolex": "uniform", "flexfl": "examples"},
        "algorithm.static_bn": {"heterofl": True, "fedrolex": True, "flexfl": False},
        "algorithm.scaler": {"heterofl": True, "fedrolex": True, "flexfl": False},
        "algorithm.mask_labels": {"heterofl": True, "fedrolex": False, "flexfl": False},
        "algorithm.selection": {"heterofl": "by_capacity", "fedrolex": "by_capacity", "flexfl": "resource_table"},
    }, "widths are equal, and overlap, rounding, rule, kd_weight are options of one row"


def test_training_precision_and_data_of_a_row_are_found() -> None:
    sets = ["training.epochs=2", "run.precision=bf16", "partition.alpha=0.7", "algorithm.server={name: yogi, lr: 0.02}"]
    apart = found(plain=["fedavg"], other=["fedavg", *sets, "run.store=elsewhere", "seed=0"])
    assert apart == {
        "training.epochs": {"plain": 5, "other": 2},
        "run.precision": {"plain": "fp32", "other": "bf16"},
        "partition.alpha": {"plain": load_config(None, []).partition.alpha, "other": 0.7},
        "algorithm.server": {"plain": "average", "other": {"name": "yogi", "lr": 0.02}},
    }, "where runs are kept is no difference"


def test_what_an_algorithm_makes_of_a_setting_counts() -> None:
    """FedSGD trains one step on all samples, whatever the section says; a selection is told although it is null."""
    apart = found(fedsgd=["fedsgd"], all_large=["all_large", "algorithm.eligible=capable"], adaptivefl=["adaptivefl"])
    assert apart["training.epochs"] == {"fedsgd": 1, "all_large": 5, "adaptivefl": 5}
    for label in ("fedsgd", "all_large"):
        assert apart["algorithm.selection"][label] == {"name": "uniform", "model": "largest"}
    assert apart["algorithm.selection"]["adaptivefl"]["name"] == "curiosity"
    assert apart["algorithm.eligible"] == {"fedsgd": "all", "all_large": "capable"}, "AdaptiveFL has no such option"


def test_every_option_of_a_row_is_looked_at() -> None:
    """No list of names: what the algorithm and the configuration have is there, but places and the row's identity."""
    config = load_config(None, ["algorithm.name=fedx"])
    options = options_of(config, algorithm(config), _pool(config))
    for key in ("algorithm.fine_tuning", "algorithm.bits", "training.lr", "partition.rule", "run.precision"):
        assert key in options
    assert not {"algorithm.name", "seed", "run.store", "run.backend", "tracking.mlflow"} & options.keys()
    json.dumps(options)
