"""Tags become the digests that a registry holds, and what has none stays."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
import yaml

from components import digests
from fl_engine.core.errors import BadInput, EnvironmentFailure, IntegrityError

MANIFEST = json.dumps({"mediaType": "application/vnd.oci.image.manifest.v1+json", "layers": []}).encode()
INDEX = json.dumps(
    {
        "mediaType": "application/vnd.oci.image.index.v1+json",
        "manifests": [{"platform": {"os": "linux", "architecture": a}} for a in ("amd64", "arm64")],
    }
).encode()


def sha256(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


@dataclass
class Registry:
    address: str = ""
    held: dict[str, bytes] = field(default_factory=dict)
    """By `repository:tag`: the index of all architectures, or a manifest."""
    token: str = ""
    """Who reads needs this one, which the registry gives to anybody, or to `user` alone."""
    user: str = ""
    told: str = ""
    """What the registry says of the digest; empty: the truth."""


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Registry]:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    made = Registry()

    class Handler(BaseHTTPRequestHandler):
        def _say(self, status: int, body: bytes, **headers: str) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            url, who = urlsplit(self.path), self.headers.get("Authorization", "")
            if url.path == "/token":
                allowed = parse_qs(url.query)["scope"] == ["repository:team/app:pull"] and who == made.user
                self._say(200 if allowed else 401, json.dumps({"token": made.token} if allowed else {}).encode())
                return
            if made.token and who != f"Bearer {made.token}":
                scope = 'service="here",scope="repository:team/app:pull"'
                self._say(401, b"", WWW_Authenticate=f'Bearer realm="http://{made.address}/token",{scope}')
                return
            repository, _, tag = url.path.removeprefix("/v2/").partition("/manifests/")
            body = made.held.get(f"{repository}:{tag}")
            if body is INDEX and "image.index" not in self.headers["Accept"]:
                body = MANIFEST
            if body is None:
                self._say(404, b"{}")
            else:
                self._say(200, body, Docker_Content_Digest=made.told or sha256(body))

        def log_message(self, *_: object) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    made.address = f"127.0.0.1:{server.server_port}"
    yield made
    server.shutdown()
    server.server_close()


def kustomization(registry: Registry) -> str:
    return (
        "# Kept.\nresources:\n  - ../base\nimages:\n  # Kept, too.\n"
        f"  - name: app\n    newName: {registry.address}/team/app\n    newTag: '1.0'\n"
        "  - name: loaded\n    newName: loaded\n    newTag: latest\n"
        "configMapGenerator:\n  - name: a/b.c\n    newTag: left\n"
    )


@pytest.mark.parametrize("before", ["", "commonAnnotations:\n  built: 2024-05-01\n"])
def test_a_tag_becomes_the_digest_of_the_index_of_all_architectures(registry: Registry, before: str) -> None:
    registry.held["team/app:1.0"] = INDEX
    text = before + kustomization(registry)
    pinned, found = digests.pin(text)
    assert found == [f"{registry.address}/team/app@{sha256(INDEX)}"]
    assert pinned == text.replace("newTag: '1.0'", f"digest: {sha256(INDEX)} # 1.0")


@pytest.mark.parametrize(
    ("fields", "pinned"),
    [
        (["name: app", "newName: {}", "newTag: 1.0 # the release of May"], "digest: {} # 1.0 the release of May"),
        (["name: app", "newTag: 1.0", "newName: {}"], "digest: {} # 1.0"),
        (["newName: {}", "name: app", "newTag: '1.0' "], "digest: {} # 1.0"),
        (["newTag: 1.0", "name: {}"], "digest: {} # 1.0"),
        (["digest: sha256:old # 1.0 the release of May", "name: {}"], "digest: {} # 1.0 the release of May"),
    ],
    ids=lambda given: ", ".join(given) if isinstance(given, list) else "",
)
def test_fields_may_have_any_order_and_comments(registry: Registry, fields: list[str], pinned: str) -> None:
    registry.held["team/app:1.0"] = INDEX
    lines = [line.format(f"{registry.address}/team/app") for line in fields]
    other = f"  - name: other\n    newName: {registry.address}/team/app\n    newTag: 1.0\n"
    text = "images:\n  - " + "\n    ".join(lines) + "\n" + other
    (tagged,) = (line for line in lines if line.startswith(("newTag", "digest")))
    expected = text.replace(tagged, pinned.format(sha256(INDEX)), 1).replace(
        "newTag: 1.0", f"digest: {sha256(INDEX)} # 1.0"
    )
    assert digests.pin(text) == (expected, [f"{registry.address}/team/app@{sha256(INDEX)}"] * 2)
    assert digests.pin(expected)[0] == expected


@pytest.mark.parametrize(
    "entry",
    [
        "{{name: app, newName: {}, newTag: 1.0}}",
        "name: app\n    newName: {}\n    newTag: 1.0\n    digest: sha256:old",
        'name: app\n    newName: {}\n    "newTag": 1.0',
    ],
)
def test_an_image_that_would_keep_its_tag_is_refused(registry: Registry, entry: str) -> None:
    registry.held["team/app:1.0"] = INDEX
    text = kustomization(registry).replace(
        "  - name: loaded", f"  - {entry.format('localhost/left')}\n  - name: loaded"
    )
    with pytest.raises(BadInput, match=r"localhost/left would keep its tag 1\.0, which may move"):
        digests.pin(text)


@pytest.mark.parametrize("text", ["images: [", "- images", "images: 3"])
def test_what_is_no_kustomization_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match="is no kustomization"):
        digests.pin(text)


def test_one_image_is_printed_by_its_digest(registry: Registry, capsys: pytest.CaptureFixture[str]) -> None:
    registry.held["team/app:1.0"] = INDEX
    digests.main([f"{registry.address}/team/app:1.0"])
    assert capsys.readouterr().out == f"{registry.address}/team/app@{sha256(INDEX)}\n"
    for given in ("loaded:latest", f"{registry.address}/team/app", "k8s/overlays/nowhere"):
        with pytest.raises(BadInput, match="neither a folder"):
            digests.main([given])


def test_a_second_run_asks_for_the_same_tag_again(registry: Registry) -> None:
    registry.held["team/app:1.0"] = INDEX
    pinned, _ = digests.pin(kustomization(registry))
    registry.held["team/app:1.0"] = MANIFEST
    moved, _ = digests.pin(pinned)
    assert moved == pinned.replace(sha256(INDEX), sha256(MANIFEST))


@pytest.mark.parametrize("user", ["", "Basic bWU6c2VjcmV0"])
def test_a_registrys_token_is_fetched(registry: Registry, tmp_path: Path, user: str) -> None:
    registry.held["team/app:1.0"], registry.token, registry.user = INDEX, "t", user
    if user:
        auths = {registry.address: {"auth": user.partition(" ")[2]}}
        (tmp_path / "docker").mkdir()
        (tmp_path / "docker/config.json").write_text(json.dumps({"auths": auths}))
    assert digests.digest_of(f"{registry.address}/team/app", "1.0") == sha256(INDEX)


def test_what_a_registry_does_not_give_is_an_error(registry: Registry) -> None:
    with pytest.raises(EnvironmentFailure, match=r"answers 404 for .*/team/app:1\.0\. Was it pushed"):
        digests.pin(kustomization(registry))
    registry.token, registry.user = "t", "Basic else"
    with pytest.raises(EnvironmentFailure, match="gives no token: 401"):
        digests.pin(kustomization(registry))


def test_a_digest_that_is_not_of_what_was_sent_is_refused(registry: Registry) -> None:
    registry.held["team/app:1.0"], registry.told = INDEX, sha256(b"else")
    with pytest.raises(IntegrityError, match="the registry says sha256:"):
        digests.pin(kustomization(registry))


def test_an_overlay_without_a_registrys_images_says_what_to_do() -> None:
    with pytest.raises(BadInput, match="kustomize edit set image"):
        digests.pin("images:\n  - name: loaded\n    newName: loaded\n    newTag: latest\n")


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_the_overlay_for_clusters_can_be_pinned(registry: Registry, tmp_path: Path) -> None:
    shutil.copytree(Path(__file__).parents[2] / "k8s", tmp_path / "k8s")
    path = tmp_path / "k8s/overlays/cluster/kustomization.yaml"
    (image,) = yaml.safe_load(path.read_text())["images"]
    registry.held[f"flexfleet-mlflow:{image['newTag']}"] = INDEX
    here = f"newName: {registry.address}/flexfleet-mlflow"
    path.write_text(path.read_text().replace(f"newName: {image['newName']}", here))
    digests.main([str(path.parent)])
    made = subprocess.run(["kubectl", "kustomize", path.parent], capture_output=True, text=True, check=True).stdout
    assert f"image: {registry.address}/flexfleet-mlflow@{sha256(INDEX)}" in made
