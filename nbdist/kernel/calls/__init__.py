"""Calls: sending them to the ranks, watching them, stopping them, reading the answers."""
