"""FlexFL's Table II setting, as the file in the repository has it (Chen et al., TCAD 2024, Sec. IV-A)."""

from __future__ import annotations

from pathlib import Path

from flexfleet.config import algorithm, load_config


def test_paper_scale_has_the_papers_setting() -> None:
    """10 of 100 clients a round, 5 epochs of batches of 50, SGD 0.01, momentum 0.5; the proxy is 1 % of the data. The
    printed figures are those of the best of 1000 rounds, so each is evaluated."""
    config = load_config(Path(__file__).parents[2] / "benchmarks" / "paper_scale.yaml")
    training = algorithm(config).training
    assert (config.rounds.stop, config.rounds.evaluate_every) == (1000, 1)
    assert (config.dataset.name, config.model["name"], config.algorithm["name"]) == ("cifar10", "vgg16", "flexfl")
    assert (config.partition.clients, config.partition.alpha, config.partition.proxy) == (100, 0.3, 0.01)
    assert (training.fraction, training.epochs, training.batch_size) == (0.1, 5, 50)
    assert (training.lr, training.momentum, training.lr_decay) == (0.01, 0.5, 0.998)
