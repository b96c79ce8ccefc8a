"""Output of ranks, shown in the notebook's cell."""
