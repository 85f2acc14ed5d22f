"""The program of a worker, which executes assignments: `flexfleet agent` on a device, the container of a pod."""
