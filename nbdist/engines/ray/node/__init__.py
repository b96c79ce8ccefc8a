"""The part of the Ray engine that runs on each node of the cluster."""
