"""The steps of a workflow: one class each, for the columns that it makes, and for learning, saving and serving."""
