"""pytest fixtures that run functions of tests on ranks."""
