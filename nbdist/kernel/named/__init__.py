"""Sessions with a name, whose ranks belong to a keeper: the side of the process that uses them."""
