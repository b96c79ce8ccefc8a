"""Processes of the notebook that are not ranks: contexts, pools, `parallel_map`."""
