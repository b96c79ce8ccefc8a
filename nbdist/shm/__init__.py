"""Collectives of CPU ranks on one machine, through shared memory."""
