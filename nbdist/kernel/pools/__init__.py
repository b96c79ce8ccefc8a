"""Processes of the notebook that are no ranks: contexts, pools, `parallel_map`."""
