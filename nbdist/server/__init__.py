"""The fork server: a process that has imported the libraries of ranks, and forks the ranks."""
