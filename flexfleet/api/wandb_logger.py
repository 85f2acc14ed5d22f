"""Define a callback that logs the metrics of a run to Weights & Biases."""

from __future__ import annotations

import uuid
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from fl_engine.core.errors import EnvironmentFailure
from flexfleet.api.callbacks import Callback, Round
from flexfleet.files.terminal import missing

if TYPE_CHECKING:
    from flexfleet.api.results import Result


class WandbLogger(Callback):
    """Log the configuration and the metrics of each round to Weights & Biases. The step is the number of the round. If
    a run is resumed, its W&B run is continued.

    Args:
        project: Name of the W&B project.
        settings: Other arguments of `wandb.init`, such as entity, group, tags or mode.

    Raises:
        EnvironmentFailure: wandb is not installed.

    Examples:
        >>> flexfleet.run(callbacks=[flexfleet.WandbLogger("my-project", mode="offline")])
    """

    def __init__(self, project: str = "flexfleet", **settings: Any) -> None:
        if find_spec("wandb") is None:
            raise EnvironmentFailure(missing("wandb"))
        self._settings = {"project": project, **settings}

    def on_start(self, result: Result) -> None:
        import wandb

        known = result.folder / "wandb_id.txt"
        if not known.exists():
            known.write_text(uuid.uuid4().hex, encoding="utf-8")
        own = {
            "id": known.read_text(encoding="utf-8"),
            "resume": "allow",
            "reinit": "create_new",
            "name": result.run_id,
        }
        self._run = wandb.init(**{**own, "config": result.config, "dir": str(result.folder), **self._settings})

    def on_round(self, round: Round) -> None:
        if round.number >= self._run.step:  # skip rounds that a killed run has already logged
            self._run.log(dict(round.metrics), step=round.number, commit=True)

    def on_end(self, status: str) -> None:
        self._run.summary["status"] = status
        self._run.finish(exit_code=0 if status in ("finished", "stopped") else 1)
