"""Pending updates of asynchronous rounds (`buffer`), as a commit stores them: the changes of their weights in files
under `flights/`, the rest in its JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from fl_engine.core.errors import IntegrityError, ModelError, brief
from fl_engine.core.fields import Index, NotNegative
from fl_engine.core.types import ClientUpdate, SubmodelSpec, WorkOrder
from fl_engine.fleet.uniformity import Times
from fl_engine.storage.checkpoints import Checkpoints
from fl_engine.storage.run_files import WAY_OUT, Record
from fl_engine.storage.tensor_files import FILE, TensorFiles

FOLDER = "flights/"
KEY = "rounds/flying"
"""Key of a commit's JSON, beside the fields of the algorithm's state."""


@dataclass(frozen=True)
class Flight:
    """A pending update: the assignment and the update, both without weights."""

    order: WorkOrder
    update: ClientUpdate
    times: Times
    """What the assignment takes on the simulated clock."""
    finish: float
    """Seconds on the simulated clock."""
    down: int
    """Bytes that were sent: the encoded weights and the assignment's memory."""
    up: int
    """Bytes of the encoded weights that come back."""
    size: int
    """Bytes of the sent weights in a model."""
    file: str
    """Name of the file with the change of its weights."""


class Waiting(Record):
    """A `Flight` in JSON."""

    round: Index
    client: Index
    sent: dict[str, Any]
    """The sub-model that was sent, and the one that was trained."""
    spec: dict[str, Any]
    seed: int
    level: Index
    hints: dict[str, Any]
    trained: Index | None
    """The pool model that was trained, where it is one."""
    examples: Index
    metrics: dict[str, float]
    times: Times
    finish: NotNegative
    down: Index
    up: Index
    size: Index
    file: Annotated[str, Field(pattern=f"^{FILE.pattern}$")]


WAITING = TypeAdapter(tuple[Waiting, ...])


def said(flying: Sequence[Flight]) -> list[dict[str, Any]]:
    """Return the JSON of these updates for a commit."""
    return [
        Waiting(
            round=flight.order.round,
            client=flight.order.client,
            sent=flight.order.spec.to_json(),
            spec=flight.update.spec.to_json(),
            seed=flight.order.seed,
            level=flight.order.level,
            hints=dict(flight.order.hints),
            trained=flight.update.level,
            examples=flight.update.num_examples,
            metrics=dict(flight.update.metrics),
            times=flight.times,
            finish=flight.finish,
            down=flight.down,
            up=flight.up,
            size=flight.size,
            file=flight.file,
        ).model_dump(mode="json")
        for flight in flying
    ]


def read(rest: Mapping[str, Any]) -> tuple[Flight, ...]:
    """Return the updates that `said` wrote. Raises IntegrityError."""
    try:
        return tuple(map(_flight, WAITING.validate_python(rest.get(KEY, ()))))
    except (ValidationError, ModelError) as error:
        wrong = brief(error) if isinstance(error, ValidationError) else str(error)
        raise IntegrityError(f"stored state: {KEY!r} does not say which updates wait: {wrong}") from error


def _flight(w: Waiting) -> Flight:
    order = WorkOrder(w.round, w.client, SubmodelSpec.from_json(w.sent), {}, w.seed, w.level, w.hints)
    spec = SubmodelSpec.from_json(w.spec)
    update = ClientUpdate(w.round, w.client, spec, {}, w.examples, w.metrics, w.trained, w.times.total)
    return Flight(order, update, w.times, w.finish, w.down, w.up, w.size, w.file)


def check(files: TensorFiles, rest: Mapping[str, Any]) -> None:
    """Read all files that a commit's JSON names, one at a time. Raises IntegrityError if one is missing or damaged."""
    for flight in read(rest):
        try:
            files.get(flight.file)
        except IntegrityError as error:
            raise IntegrityError(f"{error}. {WAY_OUT}") from error


def files_in(checkpoints: Checkpoints) -> TensorFiles:
    return TensorFiles(checkpoints, FOLDER, lambda rest: [flight.file for flight in read(rest)])
