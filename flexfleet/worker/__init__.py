"""The worker program, which executes assignments. The program runs as `flexfleet agent` or in a pod."""
