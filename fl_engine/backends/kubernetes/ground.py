"""A run's part of a namespace: what its Jobs are made from, and the ConfigMap that owns them."""

from __future__ import annotations

import os

from fl_engine.backends.kubernetes import jobs
from fl_engine.backends.kubernetes.cluster import Cluster, Resource
from fl_engine.backends.kubernetes.settings import KubernetesConfig
from fl_engine.core.errors import ConfigError, EnvironmentFailure
from fl_engine.exchange.mailbox import Mailbox
from fl_engine.storage import probe
from fl_engine.storage.s3 import S3Store
from fl_engine.storage.store import Store
from fl_engine.storage.urls import Verb

DATA_FOLDER = "/data"
RENEW_S = 600.0
"""Seconds after which a Job's Secret gets fresh URLs, for pods that start later. One that starts while it is written
anew waits for it."""


def check_reach(uri: str) -> None:
    """Raises ConfigError where the store at `uri` gives no URLs to pods that have no credentials."""
    if not uri.startswith("s3://"):
        raise ConfigError(
            f"kubernetes.access=presigned hands out URLs of an S3 server, but the store is {uri}: set "
            "run.remote=s3://bucket/prefix"
        )


def image_for(options: KubernetesConfig, store: Store) -> str:
    """The image that clients run in. Raises ConfigError where none is named, or pods cannot reach the store."""
    if options.access == "presigned":
        check_reach(store.uri())
    image = options.image or os.environ.get("FLEXFLEET_IMAGE")
    if not image:
        raise ConfigError("which image do clients run in? set kubernetes.image, or FLEXFLEET_IMAGE")
    return image


def reach(options: KubernetesConfig, run_id: str, store: Store) -> None:
    """Before anything trains: raises what `image_for` raises, and EnvironmentFailure for a cluster that does not answer
    or refuses what a run asks first."""
    image_for(options, store)
    Cluster(options.namespace).get("configmaps", jobs.run_label(run_id, store.uri()))


class Ground:
    """The store must be one that pods reach: S3, or with access=ambient any that opens under the same name there.
    Raises ConfigError where it is none, or no image is named. `verb`: how pods upload; None: they have credentials."""

    def __init__(
        self, options: KubernetesConfig, run_id: str, mailbox: Mailbox, cluster: Cluster | None = None
    ) -> None:
        if mailbox.key is None:
            raise ConfigError("clients in pods sign their updates: the mailbox needs a key")
        self.options = options.model_copy(update={"image": image_for(options, mailbox.store)})
        self.cluster = cluster or Cluster(options.namespace)
        self.template = jobs.template(options.template)
        self.run = jobs.run_label(run_id, mailbox.store.uri())
        self.store = mailbox.store.uri()
        self.verb: Verb | None = None
        if options.access == "presigned" and isinstance(mailbox.store, S3Store):
            self.verb = probe.upload_verb(mailbox.store)
        self._owner: Resource | None = None

    def owner(self) -> Resource:
        """A reference to the run's ConfigMap, which owns all objects of the run: they are deleted with it."""
        if self._owner is None:
            kept = {jobs.RUN: self.run, "app.kubernetes.io/part-of": "flexfleet"}
            body = {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": {"name": self.run, "namespace": self.options.namespace, "labels": kept},
                "data": {"store": self.store},
            }
            found = self.cluster.create("configmaps", body) or self.cluster.get("configmaps", self.run)
            if found is None:
                raise EnvironmentFailure(f"the ConfigMap {self.run} is being deleted: wait a moment, then resume")
            uid = found["metadata"]["uid"]
            self._owner = {"apiVersion": "v1", "kind": "ConfigMap", "name": self.run, "uid": uid}
        return self._owner

    def create_job(self, body: Resource, labels: dict[str, str]) -> Resource:
        """Makes a Job; gives the one with these labels where the answer to an earlier try was lost. Raises
        EnvironmentFailure where its name is taken by another one."""
        name = body["metadata"]["name"]
        # A Secret may be left of a deleted Job of that name; the new pods must not read it.
        self.cluster.delete("secrets", name)
        job = self.cluster.create("jobs", body)
        if job is None:
            job = next((j for j in self.cluster.select("jobs", labels) if j["metadata"]["name"] == name), None)
        if job is None:
            raise EnvironmentFailure(f"a Job {name} is there that is not this run's: delete it, then resume")
        return job

    def refusals(self) -> list[Resource]:
        """Events that say why pods were not made."""
        return self.cluster.select("events", {}, {"involvedObject.kind": "Job", "reason": "FailedCreate"})

    def forget_owner(self) -> None:
        """Somebody has deleted objects of the run, perhaps this one too: what a deleted one owns is deleted at once."""
        self._owner = None

    def clear(self) -> None:
        """Deletes everything of this run in the cluster."""
        self.cluster.delete("configmaps", self.run)

    @property
    def clearing(self) -> str:
        """The command that does the same."""
        return f"kubectl -n {self.options.namespace} delete jobs,configmaps -l {jobs.RUN}={self.run}"
