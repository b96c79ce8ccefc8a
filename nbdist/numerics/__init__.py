"""Checks of a training's numbers while it runs: whether they are finite, and alike on all ranks."""
