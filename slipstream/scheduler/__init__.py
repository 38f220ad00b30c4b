"""Who runs, on which row, with which blocks. NumPy columns by row; no torch, and nothing of the runner."""

from slipstream.scheduler.config import SchedulerConfig
from slipstream.scheduler.scheduler import Scheduler

__all__ = ["Scheduler", "SchedulerConfig"]
