"""A training loop for click models on ranks: evaluation, learning rates, a live table, snapshots, early stop."""

from .evaluation import evaluate
from .history import History, Record
from .schedule import Schedule, warmup_decay
from .snapshots import Snapshots
from .train import fit

__all__ = ["History", "Record", "Schedule", "Snapshots", "evaluate", "fit", "warmup_decay"]
