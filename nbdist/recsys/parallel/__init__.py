"""A model on all ranks, with sharded tables or a copy on each rank, and its checkpoints."""
