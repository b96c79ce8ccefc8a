"""Measuring where the time of a call goes."""
