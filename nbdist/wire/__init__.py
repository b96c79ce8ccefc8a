"""Both ends of every connection: between kernel and ranks, and between the ranks of a process group."""
