"""Flower as a contestant: its FedAvg strategy over its Ray simulation, without evaluation.

python -m benchmarks.flower W3

It is set up to be as fast as possible:

* There are two Ray actors with one CPU and one torch thread each. An actor makes the data and the network once and
  keeps them; a client is only a number. It trains with the code of the hand-written loop.
* Flower 1.41 has two simulation engines, both marked as deprecated. `start_simulation` hands a client directly to an
  actor; `run_simulation` uses a store of messages, which it searches ten times a second for every client. The first was
  faster with many small clients (W3, side by side on a busy machine: 0.90 s a round against 1.35 s), and equal
  otherwise, so it is used here.
* Ray would run its actors at a lower priority than the server; this is switched off.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from functools import cache
from typing import Any

# Flower and Ray read these when they are imported.
os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}

import numpy as np
import ray
import torch
from flwr.client import Client, NumPyClient
from flwr.common import Context, FitIns, Parameters, ndarrays_to_parameters
from flwr.server import ServerConfig
from flwr.server.client_manager import ClientManager
from flwr.server.client_proxy import ClientProxy
from flwr.server.strategy import FedAvg
from flwr.simulation import start_simulation

from benchmarks import naive
from benchmarks.gate import Gate
from benchmarks.workloads import WORKLOADS, Workload, chosen

PROCESSES = 2


# ------------------------------------------------------------------------------------------- in an actor
@cache
def held(name: str, samples: int) -> naive.Client:
    """The data and the network, which an actor makes once and keeps for all clients."""
    w = replace(WORKLOADS[name], samples=samples)
    return naive.Client(w, naive.plan_of(name, w))


class Numbered(NumPyClient):
    def __init__(self, number: int) -> None:
        self._number = number

    def fit(self, parameters: list[np.ndarray], config: dict[str, Any]) -> tuple[list[np.ndarray], int, dict[str, Any]]:
        client = held(config["workload"], config["samples"])
        names = client.nets[-1].state_dict()
        weights = {key: torch.from_numpy(a) for key, a in zip(names, parameters, strict=True)}
        update = client.train(naive.Pick(self._number), weights)
        return [t.numpy() for t in update.values()], client.w.samples, {}


def client_of(context: Context) -> Client:
    return Numbered(int(context.node_config["partition-id"])).to_client()


# --------------------------------------------------------------------------------------------- the server
class GateOfRay(Gate):
    """Stops Ray before the process ends; else some of Ray's processes would run for another half minute."""

    def _say(self, what: dict[str, Any]) -> None:
        if "peak_mb" in what:
            ray.shutdown()
        super()._say(what)


class Gated(FedAvg):
    """FedAvg that waits at the gate before each round."""

    def __init__(self, gate: Gate, name: str, w: Workload, initial: Parameters) -> None:
        super().__init__(
            fraction_fit=w.per_round / w.clients,
            min_fit_clients=w.per_round,
            min_available_clients=w.clients,
            fraction_evaluate=0.0,
            min_evaluate_clients=0,
            accept_failures=False,
            initial_parameters=initial,
            on_fit_config_fn=lambda _: {"workload": name, "samples": w.samples},
        )
        self._gate = gate

    def configure_fit(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[ClientProxy, FitIns]]:
        self._gate.round_begins()
        return super().configure_fit(server_round, parameters, client_manager)


def main(argv: list[str]) -> None:
    gate = GateOfRay()
    name, w, _ = chosen(argv)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    net = naive.plan_of(name, w).nets[-1]
    start_simulation(
        client_fn=client_of,
        num_clients=w.clients,
        client_resources={"num_cpus": 1, "num_gpus": 0},
        config=ServerConfig(num_rounds=10**9),
        strategy=Gated(gate, name, w, ndarrays_to_parameters([t.numpy() for t in net.state_dict().values()])),
        ray_init_args={"num_cpus": PROCESSES, "include_dashboard": False, "log_to_driver": False},
    )


if __name__ == "__main__":
    # Imports this module by its name. Ray sends functions of __main__ to the actors as code, anew for each client, so
    # that `held` would keep nothing.
    from benchmarks import flower

    flower.main(sys.argv[1:])
