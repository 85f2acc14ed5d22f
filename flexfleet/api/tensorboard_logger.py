"""Define a callback that logs the metrics of a run to TensorBoard."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from fl_engine.core.errors import EnvironmentFailure
from fl_engine.core.text import path_of
from flexfleet.api.callbacks import Callback, Round
from flexfleet.files.terminal import missing

if TYPE_CHECKING:
    from flexfleet.api.results import Result


class TensorBoardLogger(Callback):
    """Log the metrics of each round with `torch.utils.tensorboard.SummaryWriter`. The step is the number of the round.

    Args:
        folder: Parent folder. The event files are written to `<folder>/<run_id>`. If None, `tensorboard` in the run's
            folder is used.

    Raises:
        EnvironmentFailure: TensorBoard is not installed.

    Examples:
        >>> flexfleet.run(callbacks=[flexfleet.TensorBoardLogger("tb")])
        >>> # tensorboard --logdir tb
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        if find_spec("tensorboard") is None:
            raise EnvironmentFailure(missing("tensorboard"))
        self._folder = None if folder is None else path_of(folder).absolute()

    def on_start(self, result: Result) -> None:
        from torch.utils.tensorboard import SummaryWriter

        at = result.folder / "tensorboard" if self._folder is None else self._folder / result.run_id
        # With `purge_step`, TensorBoard ignores rounds that were logged but not committed before the run was killed.
        self._writer = SummaryWriter(at, purge_step=len(result._history) + 1)

    def on_round(self, round: Round) -> None:
        for name, value in round.metrics.items():
            self._writer.add_scalar(name, value, round.number)
        self._writer.flush()

    def on_end(self, status: str) -> None:
        self._writer.close()
