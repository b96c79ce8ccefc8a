"""The operations of a workflow, its steps: each is one class, of what it makes, learns, saves, and has a server do."""
