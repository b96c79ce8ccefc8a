"""The operating system and the interpreter, as any process of nbdist needs them."""
