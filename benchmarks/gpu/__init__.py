"""Everything that was written for GPUs, shown and measured on real ones: `make gpu`.

Each part is a module with `LIMIT` (seconds), `NEEDS` (modules that it imports) and `run(device)`, and runs in a process
of its own; `notes` appends each finding to a file as soon as it is known.
"""
