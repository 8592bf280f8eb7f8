"""Pipeline parallelism: models in stages, schedules of stages and micro-batches."""

from tfpar.pipeline.schedules import Action, Schedule
from tfpar.pipeline.sequence import stages

__all__ = ["Action", "Schedule", "stages"]
