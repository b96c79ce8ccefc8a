"""The part of the Ray engine that runs in the notebook's kernel."""
