"""Recommender systems at notebook scale, from ratings on disk to answered requests, on any number of ranks.

`datasets` has ratings to start with; `etl` makes training files from them, and `loader` makes batches from the files;
`models` has models, `sharding` and `parallel` put them on all ranks, and `training` trains them and measures `metrics`;
`retrieval` finds items by their vectors; `triton` serves a trained model. `io` (files) and `ranks` (values that ranks
exchange) contain their common parts. This package uses the launcher like any notebook.
"""
