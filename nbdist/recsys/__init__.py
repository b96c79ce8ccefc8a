"""Recommender systems at notebook scale, from ratings on disk to answered requests, on any number of ranks.

`datasets` has ratings to begin with; `etl` makes training files of them, and `loader` batches of the files; `sharding`
and `parallel` put a model on all ranks, and `training` trains it, by `metrics`; `triton` serves it. What several of
these use lies in `io` (files) and `ranks` (what ranks tell each other). Uses the launcher like any notebook would.
"""
