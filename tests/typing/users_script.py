"""A user's script, which `make lint` checks with mypy and Pyright outside the checkout. It is not run."""

# pyright: strict, reportUnnecessaryTypeIgnoreComment=true, reportMissingTypeStubs=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
from pathlib import Path

import torch
from typing_extensions import assert_type

import flexfleet as ff


class Enough(ff.Callback):
    def on_round(self, round: ff.Round) -> object:
        return ff.STOP if round.metrics["avg"] > 0.9 else None


result = ff.run("digits", rounds=2, callbacks=[Enough()])
assert_type(result, ff.Result)
assert_type(result.status, str)
assert_type(result.folder, Path)
assert_type(result.report, Path | None)
assert_type(result.params["conv1.weight"], torch.Tensor)
assert_type(result.resume(rounds=3), ff.Result)
print(result.history.iloc[-1], result.metrics["avg"])
ff.run(round=2)  # type: ignore[call-arg]

comparison = ff.compare(["fedavg", "heterofl"], seeds=range(3), rounds=2, learning_rate=0.1)
assert_type(comparison.runs["fedavg", 0], ff.Result)
assert_type(comparison.paired("fedavg", "heterofl").p, float | None)
ff.compare(["fedavg"], rounds="2")  # type: ignore[arg-type]
ff.compare(["fedavg"], round=2)  # type: ignore[call-arg]

study = ff.tune("fedprox", space={"algorithm.mu": (0.001, 1.0)}, seed=1, local_epochs=1)
assert_type(study, ff.Study)
assert_type(study.better, bool)
ff.tune("fedprox", epochs=1)  # type: ignore[call-arg]
