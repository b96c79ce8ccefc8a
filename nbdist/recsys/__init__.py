"""Recommender systems at notebook scale, from ratings on disk to answered requests, on any number of ranks.

`datasets` has ratings to begin with; `etl` makes training files of them, and `loader` batches of the files; `models`
has models, `sharding` and `parallel` put them on all ranks, and `training` trains them, by `metrics`; `retrieval` finds
items by their vectors; `triton` serves what was trained. What several of these use lies in `io` (files) and `ranks`
(what ranks send each other). Uses the launcher like any notebook would.
"""
