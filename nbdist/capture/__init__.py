"""The capture of a call: the objects that are sent to the ranks with it, pickled in the kernel and read in a rank."""
