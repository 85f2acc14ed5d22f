"""Pins the images of an overlay to digests, so that a tag that moves later does not change what a cluster runs.

    python -m components.digests k8s/overlays/cluster        (`make pin-digests`)
    python -m components.digests REGISTRY/NAME:TAG           one image; prints REGISTRY/NAME@sha256:...

The command asks the registry for the digest of each entry in `images:` of the kustomization. It replaces `newTag: X` by
`digest: sha256:... # X`; when it runs again, it reads the tag X from the first word of that comment. An image without a
registry in its name keeps its tag: it was loaded into the nodes (kind), and no registry has a digest of it.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import urllib3
import yaml

from fl_engine.core.errors import BadInput, EnvironmentFailure, IntegrityError
from flexfleet.files.terminal import run_main

ACCEPT = ", ".join(
    (
        "application/vnd.oci.image.index.v1+json",  # an index of several architectures
        "application/vnd.docker.distribution.manifest.list.v2+json",
        "application/vnd.oci.image.manifest.v1+json",
        "application/vnd.docker.distribution.manifest.v2+json",
    )
)
FIELD = re.compile(
    r"(?P<key> *(?:- *)?)(?P<name>name|newName|newTag|digest): *(?P<value>[^\s#]\S*)(?: +#(?P<comment>.*)| *)"
)
TRIES = urllib3.Retry(3, backoff_factor=0.5, status_forcelist=(429, 500, 502, 503, 504), raise_on_status=False)


def pin(kustomization: str) -> tuple[str, list[str]]:
    """The kustomization's text with digests instead of tags, and the reference NAME@DIGEST of each pinned image, for
    settings such as FLEXFLEET_IMAGE.

    Raises EnvironmentFailure if a registry cannot be reached or refuses, IntegrityError if it sends other content than
    its digest says, BadInput if the overlay has no image to pin, or one that is written in another way than `kustomize
    edit` does.
    """
    lines, references = kustomization.splitlines(), []
    for entry in _entries(lines):
        name, tagged = entry.get("newName", entry.get("name")), entry.get("newTag", entry.get("digest"))
        if name is None or tagged is None or {"newTag", "digest"} <= entry.keys():
            continue
        words = [tagged.value, *tagged.comment] if "newTag" in entry else tagged.comment
        if not words or not _registry(name.value)[0]:
            continue
        digest = digest_of(name.value, words[0])
        lines[tagged.line] = f"{tagged.key}digest: {digest} # {' '.join(words)}"
        references.append(f"{name.value}@{digest}")
    pinned = "\n".join(lines) + "\n"
    _check_no_tag_is_left(pinned)
    if not references:
        raise BadInput(
            "the overlay names no image with a registry and a tag: pin the one that it builds on, if that names some "
            "(edge builds on cluster), or first run `kustomize edit set image NAME=REGISTRY/NAME:TAG` in its folder"
        )
    return pinned, references


class _Field(NamedTuple):
    line: int
    """Its number, from 0."""
    key: str
    """What stands before the field's name."""
    value: str
    comment: list[str]
    """Its words."""


def _entries(lines: Sequence[str]) -> list[dict[str, _Field]]:
    """The fields of each entry of `images:`, by their names."""
    entries: list[dict[str, _Field]] = []
    inside = False
    for i, line in enumerate(lines):
        if line and not line.startswith((" ", "-", "#")):
            inside = line.startswith("images:")
        if not inside:
            continue
        if line.lstrip().startswith("-"):
            entries.append({})
        if entries and (found := FIELD.fullmatch(line)):
            comment = (found["comment"] or "").split()
            entries[-1][found["name"]] = _Field(i, found["key"], found["value"].strip("\"'"), comment)
    return entries


def _check_no_tag_is_left(pinned: str) -> None:
    try:
        entries = (yaml.safe_load(pinned) or {}).get("images") or []
        left = [entry for entry in entries if "newTag" in entry]
        named = {str(entry.get("newName", entry.get("name"))): entry["newTag"] for entry in left}
    except (yaml.YAMLError, AttributeError, TypeError) as error:
        raise BadInput(f"the kustomization.yaml is no kustomization: {' '.join(str(error).split())}") from error
    for name, tag in named.items():
        if _registry(name)[0]:
            raise BadInput(
                f"images: {name} would keep its tag {tag}, which may move: give it a line for each of name, newName "
                "and newTag, and no digest, as `kustomize edit set image` writes them"
            )


def digest_of(name: str, tag: str) -> str:
    """The digest `sha256:...` of this tag in the registry; for an image of several architectures, that of the index."""
    registry, repository = _registry(name)
    scheme = "http" if registry.partition(":")[0] in ("localhost", "127.0.0.1") else "https"
    host = "registry-1.docker.io" if registry == "docker.io" else registry
    url, headers = f"{scheme}://{host}/v2/{repository}/manifests/{tag}", {"Accept": ACCEPT}
    try:
        with urllib3.PoolManager(retries=TRIES, timeout=30) as http:
            answer = http.request("GET", url, headers=headers)
            if answer.status == 401:
                headers["Authorization"] = _authorization(http, answer.headers.get("WWW-Authenticate", ""), registry)
                answer = http.request("GET", url, headers=headers)
    except urllib3.exceptions.HTTPError as error:
        raise EnvironmentFailure(f"the registry {registry} cannot be reached: {error}") from error
    if answer.status != 200:
        raise EnvironmentFailure(
            f"the registry {registry} answers {answer.status} for {name}:{tag}. Was it pushed, and is `docker login "
            f"{registry}` needed? (Credentials come from docker's config.json; credential helpers are not supported.)"
        )
    digest = f"sha256:{hashlib.sha256(answer.data).hexdigest()}"
    told = answer.headers.get("Docker-Content-Digest", digest)
    if told != digest:
        raise IntegrityError(f"{name}:{tag}: the registry says {told}, but what it sent has {digest}")
    return digest


def _registry(name: str) -> tuple[str, str]:
    """(registry, repository) of an image's name, split as docker does; the registry is empty if the name has none."""
    first, _, rest = name.partition("/")
    return (first, rest) if rest and ("." in first or ":" in first or first == "localhost") else ("", name)


def _authorization(http: urllib3.PoolManager, challenge: str, registry: str) -> str:
    """The header Authorization that answers a registry's challenge: docker's stored credentials, or a token, which is
    anonymous if docker has no credentials for the registry."""
    basic = _credentials(registry)
    kind, _, rest = challenge.partition(" ")
    if kind.lower() != "bearer":
        return basic
    told = dict(re.findall(r'(\w+)="([^"]*)"', rest))
    fields = {key: told[key] for key in ("service", "scope") if key in told}
    if "realm" not in told:
        raise EnvironmentFailure(f"the registry {registry} asks for a token, but does not say where: {challenge!r}")
    answer = http.request("GET", told["realm"], fields=fields, headers={"Authorization": basic} if basic else {})
    try:
        given = json.loads(answer.data)
        return f"Bearer {given.get('token') or given['access_token']}"
    except (ValueError, KeyError, AttributeError):
        raise EnvironmentFailure(f"the registry {registry} gives no token: {answer.status} {told['realm']}") from None


def _credentials(registry: str) -> str:
    path = Path(os.environ.get("DOCKER_CONFIG", Path.home() / ".docker")) / "config.json"
    key = "https://index.docker.io/v1/" if registry == "docker.io" else registry
    try:
        auth = json.loads(path.read_text("utf-8"))["auths"][key]["auth"]
        base64.b64decode(auth, validate=True)
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return f"Basic {auth}"


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(
        prog="python -m components.digests", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("given", metavar="OVERLAY|IMAGE", help="a folder with a kustomization.yaml, or REGISTRY/NAME:TAG")
    given = p.parse_args(argv).given
    path = Path(given) / "kustomization.yaml"
    if path.exists():
        pinned, references = pin(path.read_text("utf-8"))
        path.write_text(pinned, encoding="utf-8")
        print("\n".join(references))
        return 0
    name, _, tag = given.rpartition(":")
    if not _registry(name)[0] or "/" in tag:
        raise BadInput(f"{given} is neither a folder with a kustomization.yaml nor REGISTRY/NAME:TAG")
    print(f"{name}@{digest_of(name, tag)}")
    return 0


if __name__ == "__main__":
    run_main(main)
