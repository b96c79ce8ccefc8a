"""Fixtures for pytest: functions of tests that run on ranks."""
