"""The `model.py` files of an exported Triton ensemble. They are copied into it, and do not import nbdist."""
