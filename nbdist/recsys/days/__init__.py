"""Models that learn day after day: the next day in one call, its delta, and a log that grows."""

from .continuing import continue_training
from .day import Day, save_day
from .delta import Delta
from .following import follow
from .kafka import follow_kafka

__all__ = ["Day", "Delta", "continue_training", "follow", "follow_kafka", "save_day"]
