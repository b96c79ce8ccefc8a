"""The fork server: a process that has imported what ranks need, has done nothing else, and forks them."""
