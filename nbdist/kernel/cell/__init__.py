"""What ranks write, shown in the notebook's cell."""
