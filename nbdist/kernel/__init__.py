"""What runs in the notebook's kernel."""
