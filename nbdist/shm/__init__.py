"""Collectives of CPU ranks on one machine in shared memory."""
