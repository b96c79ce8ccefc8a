"""The recording of trainings, and single steps of them that run again."""
