"""What Kubernetes, or who signs for it, would refuse is refused before a run begins."""

from __future__ import annotations

import pytest

from flexfleet.config import load_config
from tests.harness.settings import refused


def test_clients_urls_do_not_outlive_what_a_server_signs() -> None:
    assert load_config(None, ["kubernetes.deadline_s=604170"]).kubernetes.pending_s == 600
    said = refused("kubernetes.deadline_s=604171")
    assert "604801 seconds" in said and "604800 (seven days) at most" in said and "access=ambient" in said
    load_config(None, ["kubernetes.deadline_s=9999999", "kubernetes.access=ambient"])
    said = refused("kubernetes.lifetime=run", "kubernetes.deadline_s=604000", "kubernetes.lease_s=300")
    assert "deadline_s + pending_s + 30 + lease_s is 604930 seconds" in said


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        *((f"pools={{weak: {{memory: '{amount}'}}}}", "an amount as Kubernetes writes it is expected")
          for amount in ("", "banana", "1GB", "2 Gi", "-1Gi", "1_000Mi", "\u0661Gi", "nan", "Auto")),
        ("pools={weak: {memory: 512m}}", "a byte at least is expected"),
        ("pools={weak: {cpu: '0'}}", "more than 0 is expected"),
        ("pools={weak: {cpu: '1,5'}}", "an amount as Kubernetes writes it is expected"),
        ("data=nfs:x", "pvc:<claim> or host:/<folder of the node> is expected"),
        ("namespace=Bad_NS", "namespace"),
    ],
)  # fmt: skip
def test_what_kubernetes_would_refuse_is_refused_at_once(setting: str, said: str) -> None:
    assert said in refused(f"kubernetes.{setting}")


def test_amounts_as_kubernetes_writes_them_are_taken() -> None:
    for cpu, memory in (
        ("250m", "1Gi"),
        ("1.5", "1.5Gi"),
        (".5", "1e9"),
        ("2", "128974848"),
        ("1", "1.3Gi"),
        ("1", "1e30"),
    ):
        load_config(None, [f"kubernetes.pools={{weak: {{cpu: '{cpu}', memory: '{memory}'}}}}"])
    load_config(None, ["kubernetes.pools={weak: {memory: auto}}", "kubernetes.data=host:/"])
