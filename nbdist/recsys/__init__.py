"""Recommender systems at notebook scale: data sets first. Uses the launcher like any notebook would."""
