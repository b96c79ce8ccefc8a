"""The process that holds a named session: its ranks, and the journal of what they write and return."""
