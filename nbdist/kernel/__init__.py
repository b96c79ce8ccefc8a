"""Code that runs in the notebook's kernel."""
