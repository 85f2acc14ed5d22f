"""Measure how long a coordinator needs for its idle devices if each request to the S3 server takes 50 ms.

A server in another process stores values in memory, and delays each response. The devices are simulated by their last
heartbeats. The coordinator uses the same classes as a run, including the client for S3.

    greeted: read the invitation and the first heartbeat of each device, and enroll the device
    checked: read the heartbeat of each device once
    written: write a message with new URLs to each device

`sequential` is the time of ten devices without overlapping requests, scaled to the number of devices.

Usage: `python -m benchmarks.devices [--count 1000] [--ms 50] [--json]`
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import multiprocessing
import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

from fl_engine.core.types import Device
from fl_engine.remote import messages
from fl_engine.remote.messages import Heartbeat
from fl_engine.remote.provisioner import Enrolled
from fl_engine.remote.registry import Mailboxes, Member, Registry
from fl_engine.remote.settings import AgentsConfig
from fl_engine.remote.workers import Workers
from fl_engine.storage.overlapping import overlapped
from fl_engine.storage.s3 import S3Store

FEW = 10
"""Number of devices with which the time of sequential requests is measured."""


def serve(link: Connection, delay_s: float) -> None:
    """Serve a bucket in memory over HTTP, and send the port to `link`. Each response takes at least `delay_s`."""
    files: dict[str, tuple[bytes, str]] = {}

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            verb, target, _ = line.decode().split(" ", 2)
            headers: dict[str, str] = {}
            while (line := await reader.readline()) not in (b"\r\n", b""):
                name, _, value = line.decode().partition(":")
                headers[name.lower()] = value.strip()
            if "expect" in headers:
                writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            await asyncio.sleep(delay_s)
            path, _, query = target.partition("?")
            status, extra, found = 200, "", b""
            if verb == "PUT":
                files[path] = body, headers.get("x-amz-meta-sha256", "")
            elif "list-type=2" in query:
                keys = [key.split("/", 2)[2] for key in sorted(files)]
                listed = "".join(f"<Contents><Key>{key}</Key></Contents>" for key in keys)
                found = f"<ListBucketResult>{listed}<IsTruncated>false</IsTruncated></ListBucketResult>".encode()
            elif path in files:
                found, sha256 = files[path]
                extra = f"x-amz-meta-sha256: {sha256}\r\n" if sha256 else ""
            else:
                status, found = 404, b"<Error><Code>NoSuchKey</Code></Error>"
            writer.write(f"HTTP/1.1 {status} OK\r\n{extra}Content-Length: {len(found)}\r\n\r\n".encode() + found)

    async def run() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=1024)
        link.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(run())


def heartbeat_of(member: Member) -> Heartbeat:
    """Return the first heartbeat of an idle device."""
    id = f"{int(member.name.rpartition('-')[2]):032x}"
    found = Heartbeat(name=member.name, id=id, worker=id[-16:], number=1, state="idle", at=time.time())
    return found.signed(messages.enrolled_key(member.invited, id))


def timed(act: Callable[[], object]) -> float:
    started = time.perf_counter()
    act()
    return time.perf_counter() - started


def measure(count: int, bucket: str, sequential: bool = False) -> dict[str, float]:
    """Return the seconds of each step with `count` devices."""
    mailboxes, registry = Mailboxes(S3Store(f"{bucket}/mail"), "PUT"), Registry(S3Store(f"{bucket}/registry"))
    members = [Member.new(f"device-{number}", None) for number in range(1, count + 1)]

    def invite(member: Member) -> None:
        registry.put(member)
        mailboxes.write(member, None)
        mailboxes.home.put(f"{member.name}/{messages.HEARTBEAT}", heartbeat_of(member).text())

    for _ in overlapped(mailboxes.home, 0, invite, members):
        pass
    if sequential:
        mailboxes.home.at_once = 1  # type: ignore[attr-defined]
    workers = Workers(Enrolled([Device(0, "weak", 100.0, 0.0)], registry, mailboxes, AgentsConfig()), lambda: None)
    found = {"greeted": timed(lambda: workers.refresh(at_once=True))}
    assert len(workers.present) == count
    for worker in workers.by_name.values():
        worker.polled_at = -math.inf
    found["checked"] = timed(workers.poll_due)
    for worker in workers.by_name.values():
        worker.written_at = -math.inf
    return found | {"written": timed(workers.renew)}


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--count", type=int, default=1000, help="number of devices (default: 1000)")
    p.add_argument("--ms", type=float, default=50.0, help="time of a request in milliseconds (default: 50)")
    p.add_argument("--json", action="store_true", help="print one JSON object")
    args = p.parse_args()
    here, there = multiprocessing.get_context("spawn").Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(there, args.ms / 1000), daemon=True)
    server.start()
    os.environ |= {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{here.recv()}", "AWS_REGION": "us-east-1"}
    os.environ |= {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s"}
    try:
        few, many = measure(FEW, "s3://few", sequential=True), measure(args.count, "s3://many")
    finally:
        server.terminate()
    rows = {name: {"seconds": many[name], "sequential": few[name] / FEW * args.count} for name in many}
    if args.json:
        print(json.dumps(rows))
        return
    print(f"{args.count} devices, {args.ms:g} ms per request")
    for name, row in rows.items():
        print(f"{name:8} {row['seconds']:6.1f} s   sequential {row['sequential']:6.1f} s")


if __name__ == "__main__":
    main()
