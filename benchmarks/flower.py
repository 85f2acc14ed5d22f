"""Run Flower as a contestant: its FedAvg strategy in its Ray simulation, without evaluation.

The benchmark uses Flower's fastest settings.

There are two Ray actors with one CPU and one torch thread each. An actor creates the data and the network only once and
trains with the code of the hand-written loop (`benchmarks.naive`). A client object contains only the client's number.
Flower 1.41 has two deprecated simulation engines. `start_simulation` passes a client directly to an actor, but
`run_simulation` polls a message store ten times a second for every client. This benchmark uses `start_simulation`,
because it was faster with many small clients (W3, on a busy machine: 0.90 s instead of 1.35 s per round). Actors have
the same process priority as the server, although Ray gives them a lower priority by default.

Usage:
    python -m benchmarks.flower W3
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from functools import cache
from typing import Any

# Flower and Ray read these variables when they are imported.
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
    """Create the data and the network once for all clients of an actor."""
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
    """Gate that stops Ray before the process ends, because otherwise some Ray processes run for another half minute."""

    def _report(self, what: dict[str, Any]) -> None:
        if "peak_mb" in what:
            ray.shutdown()
        super()._report(what)


class Gated(FedAvg):
    """FedAvg strategy that waits for the gate before each round."""

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
    # Call `main` of the imported module, not of __main__. Ray serializes functions of __main__ again for each client,
    # so the cache of `held` would always be empty.
    from benchmarks import flower

    flower.main(sys.argv[1:])
