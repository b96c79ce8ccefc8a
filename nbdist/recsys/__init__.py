"""Recommender systems at notebook scale: data sets, loaders, metrics. Uses the launcher like any notebook would."""
