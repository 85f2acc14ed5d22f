"""Clients as pods that stay: `kubernetes.lifetime=run`. The devices of `agents.backend` are a run's own pods."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from types import MappingProxyType

from fl_engine.backends.agents.backend import LOST, Agents
from fl_engine.backends.agents.post import Post
from fl_engine.backends.agents.roster import Roster
from fl_engine.backends.agents.settings import AgentsConfig
from fl_engine.backends.kubernetes import jobs
from fl_engine.backends.kubernetes.cluster import Cluster
from fl_engine.backends.kubernetes.crew import Crew
from fl_engine.backends.kubernetes.ground import Ground
from fl_engine.backends.kubernetes.quorum import Quorum, quorum_of, too_few, unanswered
from fl_engine.backends.kubernetes.settings import GRACE_S, KubernetesConfig
from fl_engine.core.contracts import Algorithm
from fl_engine.core.errors import ConfigError, FlexfleetError, Stopped
from fl_engine.core.types import ClientFailure, ClientUpdate, Device, Outcome, RoundPlan, WorkOrder
from fl_engine.exchange.letters import safe
from fl_engine.exchange.mailbox import Mailbox
from fl_engine.fleet.faults import Fault
from fl_engine.storage.lease import Lease
from fl_engine.storage.store import MemoryStore, Store
from fl_engine.training.memory import Peaks

log = logging.getLogger("flexfleet")

LETTERS = "agents"
"""In the run's store, where letters and beats are."""
GONE_S = 10.0
"""Seconds that pods may take to end when the run is over."""


def _say_plain(post: Post) -> None:
    try:
        safe(post.ways("probe")[0] or "https://")
    except ConfigError:
        log.warning(
            "pods call the store without TLS: their letters hold the keys that sign answers, and whoever listens in "
            "the cluster's network can answer for them (kubernetes.lifetime=round tells keys in Secrets alone)"
        )


class Lasting:
    """`home`: where letters are, held by `held`. All else as for `Kubernetes`."""

    durable = True
    phases: Mapping[str, float] = MappingProxyType({})

    def __init__(
        self,
        options: KubernetesConfig,
        run_id: str,
        fleet: Sequence[Device],
        mailbox: Mailbox,
        home: Store,
        held: Lease,
        cluster: Cluster | None = None,
        should_stop: Callable[[], bool] = lambda: False,
        code: str | None = None,
        memory: Peaks | None = None,
        site_sums: Mapping[str, str] = MappingProxyType({}),
        befalls: Callable[[WorkOrder], Fault | None] = lambda _: None,
    ) -> None:
        self._ground = Ground(options, run_id, mailbox, cluster)
        self._options, self._mailbox, self._home, self._held = self._ground.options, mailbox, home, held
        post = Post(home, Roster(MemoryStore(), rotates=False), self._ground.verb, options.endpoint, held.key)
        _say_plain(post)
        self._crew = Crew(self._ground, fleet, post)
        waits = AgentsConfig(
            lease_s=options.lease_s,
            deadline_s=options.deadline_s,
            attempts=options.attempts,
            wait_s=float(options.pending_s * options.attempts + GRACE_S),
            endpoint=options.endpoint,
            observe=options.observe,
            require_numerics=options.require_numerics,
        )
        self._agents = Agents(
            waits,
            run_id,
            fleet,
            mailbox,
            post,
            should_stop,
            code,
            check=held.check,
            keeper=self._crew,
            memory=memory,
            site_sums=site_sums,
            befalls=befalls,
        )

    def run(self, algorithm: Algorithm, plan: RoundPlan) -> Iterator[Outcome]:
        """Raises Stopped where fewer than the quorum answer, where no pod takes an order that any may have, and where
        `should_stop` says so. The others are called off once as many updates are there as the plan wants."""
        open_, lost = {order.client for order in plan.orders}, dict[int, ClientFailure]()
        updates = plan.adopted

        @cache  # a list of the store, once the orders are in it
        def quorum() -> Quorum:
            return quorum_of(self._mailbox, plan, self._options.quorum)

        def answers() -> int:
            return quorum().before + len(plan.orders) - len(open_)

        self._crew.lacks = lambda: quorum().enough - answers()
        try:
            if open_ and (plan.wanted is None or updates < plan.wanted):
                for outcome in self._agents.run(algorithm, plan):
                    if isinstance(outcome, ClientFailure) and outcome.stage == LOST:
                        lost[outcome.client] = outcome
                        continue
                    open_.discard(outcome.client)
                    updates += isinstance(outcome, ClientUpdate)
                    yield outcome
                    if plan.wanted is not None and updates >= plan.wanted:
                        break
        finally:  # it holds the plan, and with it what the round has sent
            self._crew.lacks = lambda: 1
        if not open_:
            return
        if answers() < quorum().enough:
            raise Stopped(f"{too_few(plan, answers(), quorum(), lost)}. {self._crew.looking}")
        yield from unanswered(plan, open_, lost)

    def finish(self) -> None:
        """Ends the run's pods, and deletes everything of this run in the cluster, and the letters."""
        self._ground.clear()
        until = time.monotonic() + GONE_S
        while self._ground.cluster.select("pods", {jobs.RUN: self._ground.run}) and time.monotonic() < until:
            time.sleep(self._options.poll_s)
        try:
            self._home.delete(*(key for key in self._home.list("") if key != self._held.key))
        except FlexfleetError as error:
            log.warning("the run is over; its pods' letters could not be deleted: %s", error)

    def what_is_left(self) -> str:
        """The command that removes what a stopped run leaves in the cluster."""
        return (
            f"pods finish what they hold, --resume finds them, and after {self._options.silence_s:g} s they end by "
            f"themselves. To end them now: {self._ground.clearing}"
        )
