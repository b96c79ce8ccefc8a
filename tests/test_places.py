"""Files in which a change is made: thirty typical changes, each with the file whose path alone should give it away."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

#: The change, as a newcomer would put it, and the file in which it is made first.
PLACES = {
    "the text of a RankDied": "nbdist/deaths.py",
    "a column of the status table": "nbdist/kernel/status.py",
    "a new %ddp subcommand": "nbdist/kernel/magics/magics.py",
    "a module that the fork server imports before the fork": "nbdist/server/preload.py",
    "a variable of torchrun's in ranks": "nbdist/rank/world.py",
    "which settings of logging hold in ranks, too": "nbdist/capture/settings.py",
    "a patch of fastai in ranks": "nbdist/fastai/patches.py",
    "a learning rate schedule": "nbdist/recsys/training/schedule.py",
    "a new metric": "nbdist/recsys/metrics/rows.py",
    "the port of the TCPStore": "nbdist/wire/rendezvous.py",
    "the format of a checkpoint": "nbdist/recsys/parallel/checkpoint.py",
    "a new kind of big data that ranks share without a copy": "nbdist/capture/big_data.py",
    "how a batch is assembled": "nbdist/recsys/loader/batches.py",
    "another kind of GPU": "nbdist/devices.py",
    "processes that ranks leave behind": "nbdist/server/orphans.py",
    "a new op of the ETL": "nbdist/recsys/etl/ops/round.py",
    "an optimizer for sharded tables": "nbdist/recsys/sharding/optimizers.py",
    "another Python release": "pyproject.toml",
    "another engine": "nbdist/engines/__init__.py",
    "another front end": "nbdist/notebook/shell.py",
    "a new widget library": "nbdist/kernel/cell/widgets.py",
    "another backend of process groups": "nbdist/devices.py",
    "how much of a call's output a cell shows": "nbdist/kernel/cell/excerpt.py",
    'output="tabs"': "nbdist/kernel/cell/tabs.py",
    "what is said when the stop button is pressed": "nbdist/kernel/calls/stopping.py",
    "input() of a rank": "nbdist/kernel/calls/keyboard.py",
    "the speed of a fastai learner": "nbdist/fastai/learners.py",
    "how a node of Ray starts its ranks": "nbdist/engines/ray/node/agent.py",
    "a message between kernel and ranks": "nbdist/wire/protocol.py",
    "a test that ids outside a table are refused": "tests/recsys/sharding/test_ids.py",
}


@pytest.mark.parametrize("change", PLACES)
def test_the_file_is_there(change: str) -> None:
    assert (ROOT / PLACES[change]).is_file()
