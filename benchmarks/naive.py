"""Hand-written training loop in plain PyTorch, with one process per core or GPU and all data in memory as tensors.

The workers share the memory of the global model. A worker copies the model (or the sub-network of the client), trains
it, and returns the weights as arrays. One message contains the weights of several clients. The server averages the
weights. A free worker immediately gets the next clients.

Usage:
    python -m benchmarks.naive W3
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import networks
from benchmarks.gate import Gate
from benchmarks.workloads import Workload, chosen, normalised

if TYPE_CHECKING:
    from fl_engine.core.contracts import Algorithm
    from fl_engine.exchange.client import Site

TEMPERATURE = 3.0


@dataclass(frozen=True)
class Pick:
    """Client of a round, with the indices of the client's sub-network and teachers in `Plan.nets`."""

    client: int
    net: int = 0
    teachers: tuple[int, ...] = ()


@dataclass
class Plan:
    """Untrained sub-networks (the largest is last), and the clients of each round."""

    nets: list[nn.Module]
    rounds: Iterator[list[Pick]]
    kd_weight: float = 0.0
    binary: bool = False


def plan_of(name: str, w: Workload) -> Plan:
    if w.algorithm != "fedavg":
        from benchmarks.ours import site_of

        return plan_like(*site_of(name, w))
    net = network_of(name, w)
    rng = np.random.default_rng(1)

    def rounds() -> Iterator[list[Pick]]:
        while True:
            yield [Pick(int(c)) for c in rng.choice(w.clients, w.per_round, replace=False)]

    return Plan([net], rounds(), binary=name == "W3")


def network_of(name: str, w: Workload) -> nn.Module:
    if name == "W1":
        return networks.mcmahan_cnn(w.shape[0], w.shape[1], w.classes)
    if name == "W3":
        return networks.mlp(w.shape[0])
    return networks.family_of(name, w).module()


def plan_like(algorithm: Algorithm, site: Site) -> Plan:
    """Return a plan with flexfleet's sub-networks and selected clients, so that both contestants do the same work."""
    from benchmarks.ours import works_of

    specs = [m.spec for m in site.pool]

    def rounds() -> Iterator[list[Pick]]:
        for works in works_of(algorithm, site):
            picks = []
            for work in works:
                teachers = work.task.distillation.teachers if work.task.distillation else ()
                trained = specs.index(work.task.spec)
                picks.append(Pick(work.assignment.client, trained, tuple(specs.index(spec) for spec in teachers)))
            yield picks

    kd_weight = getattr(algorithm, "kd_weight", 0.0)
    return Plan([site.family.module(spec) for spec in specs], rounds(), kd_weight)


# ------------------------------------------------------------------------------------------------- a client
class Client:
    """Data and networks of a worker process, which trains one client after another."""

    def __init__(self, w: Workload, plan: Plan, device: str = "cpu") -> None:
        torch.set_num_threads(1)
        x, y = w.data()
        self.w, self.plan = w, plan
        self.x, self.y = torch.from_numpy(normalised(x)).to(device), torch.from_numpy(y).to(device)
        self.nets = [copy.deepcopy(net).to(device).train() for net in plan.nets]

    def train(self, pick: Pick, weights: dict[str, Tensor], order: Sequence[Tensor] | None = None) -> dict[str, Tensor]:
        """Train a client. `order` contains a permutation of the samples for each epoch. If `order` is None,
        permutations are random."""
        w, net = self.w, self.nets[pick.net].train()
        net.load_state_dict(cut(weights, net))
        teachers = [self.nets[i].eval() for i in pick.teachers]  # As in FlexFL, teachers do not use dropout.
        optimizer = torch.optim.SGD(net.parameters(), w.lr, momentum=w.momentum)
        x, y = self.x[pick.client], self.y[pick.client]
        for epoch in range(w.epochs):
            permutation = torch.randperm(len(y)) if order is None else order[epoch]
            for batch in permutation.split(w.batch):
                logits = net(x[batch])
                loss = self.loss(logits, y[batch])
                if teachers and self.plan.kd_weight > 0:
                    loss = loss + self.plan.kd_weight * self.distil(net, teachers, logits, x[batch])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        return {name: t.detach() for name, t in net.state_dict().items()}

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        if not self.w.classes:
            return F.mse_loss(logits.squeeze(1), y)
        if self.plan.binary:
            return F.binary_cross_entropy_with_logits(logits.squeeze(1), y.float())
        return F.cross_entropy(logits, y)

    def distil(self, net: nn.Module, teachers: Sequence[nn.Module], logits: Tensor, x: Tensor) -> Tensor:
        """Return FlexFL's distillation loss (Eq. 4). The teachers are smaller sub-networks with the current weights."""
        log_s = F.log_softmax(logits / TEMPERATURE, dim=1)
        state = net.state_dict()
        terms = []
        for teacher in teachers:
            with torch.no_grad():
                for name, t in teacher.state_dict().items():
                    t.copy_(state[name][tuple(slice(0, k) for k in t.shape)])
                soft = F.softmax(teacher(x) / TEMPERATURE, dim=1)
            terms.append(F.kl_div(log_s, soft, reduction="none").mean() * TEMPERATURE**2)
        return torch.stack(terms).mean()


def cut(weights: dict[str, Tensor], net: nn.Module) -> dict[str, Tensor]:
    """Return the weights of a sub-network, which are the first channels of every tensor of the global model."""
    return {name: weights[name][tuple(slice(0, k) for k in t.shape)] for name, t in net.state_dict().items()}


# ------------------------------------------------------------------------------------------------- the server
def average(weights: dict[str, Tensor], updates: Iterator[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Average each element over the clients that trained it. Elements that no client trained keep their old values.

    The mean is not weighted, because all clients have the same number of samples.
    """
    total = {name: torch.zeros_like(t) for name, t in weights.items()}
    count = {name: torch.zeros_like(t) for name, t in weights.items()}
    for update in updates:
        for name, t in update.items():
            region = tuple(slice(0, k) for k in t.shape)
            total[name][region] += t
            count[name][region] += 1
    means = {name: total[name] / count[name].clamp(min=1) for name in weights}
    return {name: torch.where(count[name] > 0, means[name], t) for name, t in weights.items()}


_client: Client
_weights: dict[str, Tensor]


def _start(w: Workload, plan: Plan, device: str, weights: dict[str, Tensor]) -> None:
    global _client, _weights
    _client, _weights = Client(w, plan, device), weights


def _work(picks: Sequence[Pick]) -> list[dict[str, np.ndarray]]:
    return [{name: t.cpu().numpy().copy() for name, t in _client.train(pick, _weights).items()} for pick in picks]


def main(argv: list[str]) -> None:
    gate = Gate()
    name, w, options = chosen(argv)
    processes = len(options.devices)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    plan = plan_of(name, w)
    rounds, plan.rounds = plan.rounds, iter(())
    weights = {key: t.clone().share_memory_() for key, t in plan.nets[-1].state_dict().items()}
    with mp.get_context("fork").Pool(processes, _start, (w, plan, options.devices[0], weights)) as pool:
        for picks in rounds:
            gate.round_begins()
            size = max(1, len(picks) // (8 * processes))
            jobs = [picks[i : i + size] for i in range(0, len(picks), size)]
            updates = (update for chunk in pool.imap_unordered(_work, jobs) for update in chunk)
            new = average(weights, ({key: torch.from_numpy(a) for key, a in u.items()} for u in updates))
            for key, t in weights.items():
                t.copy_(new[key])


if __name__ == "__main__":
    main(sys.argv[1:])
