"""One call: sent to the ranks, watched, stopped, answered."""
