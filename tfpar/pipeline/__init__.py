"""Pipeline parallelism: models in stages, schedules of stages and micro-batches."""

from tfpar.pipeline.schedules import Action, Schedule
from tfpar.pipeline.sequence import stages
from tfpar.pipeline.timeline import Timeline, timeline

__all__ = ["Action", "Schedule", "Timeline", "stages", "timeline"]
