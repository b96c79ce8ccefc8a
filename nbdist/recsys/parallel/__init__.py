"""A model on all ranks: its tables sharded over them, or a copy on each; saved on some ranks and loaded on others."""
