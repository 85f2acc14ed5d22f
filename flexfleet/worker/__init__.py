"""The program of a worker, which executes assignments: `flexfleet agent` on a device, or the container of a pod."""
