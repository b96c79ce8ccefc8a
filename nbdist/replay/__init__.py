"""Recordings of trainings, and single recorded steps that are run again."""
