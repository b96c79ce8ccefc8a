"""The capture of a call: what goes to the ranks with it, written as bytes and read again."""
