"""Access to the operating system and the interpreter, for any process of nbdist."""
