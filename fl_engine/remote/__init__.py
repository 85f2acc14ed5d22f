"""Clients on other machines: workers that execute assignments.

A *worker* is a process of a pod or of an enrolled device. It reads messages from its mailbox in the run's store, writes
heartbeats and uploads results (`messages`). The *scheduler* leases assignments to the workers that are present
(`scheduler`, `leases`). A *provisioner* starts workers (`provisioner`).
"""
