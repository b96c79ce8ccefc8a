"""Checks of a training's numbers while it runs: whether they are finite, and equal on all ranks."""
