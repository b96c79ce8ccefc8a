"""A training loop for click models on ranks: evaluation, learning rates, a live table, snapshots, early stop."""

from .callbacks import Callback
from .evaluation import evaluate
from .history import History, Record
from .objective import log_loss
from .schedule import Schedule, warmup_decay
from .segments import evaluate_by
from .snapshots import Snapshots
from .train import fit

__all__ = [
    "Callback",
    "History",
    "Record",
    "Schedule",
    "Snapshots",
    "evaluate",
    "evaluate_by",
    "fit",
    "log_loss",
    "warmup_decay",
]
