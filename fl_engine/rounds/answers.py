"""The results of a round, read one at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import median_low

from fl_engine.aggregation.spool import IN_MEMORY_BYTES, Spool
from fl_engine.core.types import ClientFailure, ClientUpdate, Outcome, Params, changed
from fl_engine.fleet.uniformity import Times
from fl_engine.storage.store import tensor_bytes


class Answers:
    """Weights are stored in a spool, so that many updates take no more memory than few. Reading is in client order,
    because floating-point sums depend on it."""

    def __init__(self, held_bytes: int = IN_MEMORY_BYTES) -> None:
        self._spool = Spool(held_bytes)
        self._heads: dict[int, Outcome] = {}
        self._places: dict[int, int] = {}
        self._sizes: dict[int, tuple[int, int]] = {}
        self._states: dict[int, int] = {}
        self.times: dict[int, Times] = {}
        """Map each client to the times of its update, also if it is not merged."""
        self.said: dict[int, int] = {}
        """Map each client to its reported sample count, if its update counts for fewer (`limit`)."""

    def add(self, outcome: Outcome, size: int | None = None) -> None:
        """`size`: bytes of an update's encoded weights, if `outcome` no longer holds them."""
        client = outcome.client
        if isinstance(outcome, ClientUpdate):
            self._places[client] = self._spool.put(outcome.payload)
            travelled = tensor_bytes(outcome.travels) if size is None else size
            self._sizes[client] = travelled, tensor_bytes(outcome.payload)
            if outcome.state:
                self._states[client] = self._spool.put(outcome.state)
            outcome = changed(outcome, payload={}, state={}, encoded=None)
        self._heads[client] = outcome

    def refuse(self, failures: Mapping[int, ClientFailure]) -> None:
        """Replace these clients' updates by failures."""
        self._heads |= failures

    def limit(self, bound: float | None) -> None:
        """Let no update count for more samples than `bound` times their lower median; None: no limit."""
        updates = {client: head for client, head in self._heads.items() if isinstance(head, ClientUpdate)}
        if bound is None or not updates:
            return
        most = int(bound * median_low(update.num_examples for update in updates.values()))
        self.said = {client: u.num_examples for client, u in updates.items() if u.num_examples > most}
        self._heads |= {client: changed(updates[client], num_examples=most) for client in self.said}

    def heads(self) -> Iterator[Outcome]:
        """Without weights, in client order."""
        for client in sorted(self._heads):
            head = self._heads[client]
            if isinstance(head, ClientFailure) and client in self.times:
                head = changed(head, elapsed=self.times[client].total)
            yield head

    def states(self) -> Iterator[tuple[int, Params]]:
        """Yield (client, state to store) of the merged updates, in client order."""
        for head in self.heads():
            if isinstance(head, ClientUpdate) and head.client in self._states:
                yield head.client, self._spool.get(self._states[head.client])

    def size(self, client: int) -> int:
        """Bytes of the client's encoded weights."""
        return self._sizes[client][0]

    def model_size(self, client: int) -> int:
        """Bytes of the client's weights in a model, before coding."""
        return self._sizes[client][1]

    def __iter__(self) -> Iterator[Outcome]:
        for head in self.heads():
            if isinstance(head, ClientUpdate):
                yield changed(head, payload=self._spool.get(self._places[head.client]))
            else:
                yield head
