"""The `model.py` files of an exported Triton ensemble. They are copied into it, and import nothing of nbdist."""
