"""The part of the Ray engine that runs in Ray's driver process."""
