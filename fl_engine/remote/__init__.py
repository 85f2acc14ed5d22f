"""Train clients on other machines, in worker processes that execute assignments.

A *worker* is a process in a pod or on an enrolled device. A worker reads messages from a mailbox in the run's store,
writes heartbeats and uploads results (`messages`). The *scheduler* leases assignments to the available workers
(`scheduler`, `leases`). A *provisioner* starts workers (`provisioner`).
"""
