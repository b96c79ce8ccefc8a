"""The cell of test_settings.py that draws random numbers."""

# %% seeds
import random

import torch


def draw():
    return random.random(), torch.rand(1).item()


for how in ({}, {"seed": 3}):
    with Session(2, seed_ranks=True, **how) as session:
        first, second = session.run_all(draw)
        assert first[0] != second[0] and first[1] != second[1]
    with Session(2, **how) as session:
        assert len(set(session.run_all(draw))) == 1
with Session(2, seed=3) as alike, Session(2, seed=3, seed_ranks=True) as differ:
    assert alike.run(draw) == differ.run(draw)
