"""Pipeline parallelism: models in stages, schedules of stages and micro-batches.

Example:

>>> def actions(stage):
...     return tuple(tfpar.pipeline.Action(kind, stage, i) for kind in "FB" for i in range(2))
>>> print(tfpar.pipeline.Schedule("mine", microbatches=2, stages=2, actions=(actions(0), actions(1))))
mine: 2 devices, 2 stages, 2 micro-batches
0: F0.0 F0.1 B0.0 B0.1
1: F1.0 F1.1 B1.0 B1.1
"""

from tfpar.pipeline.schedules import Action, Schedule
from tfpar.pipeline.sequence import stages
from tfpar.pipeline.timeline import Timeline, timeline

__all__ = ["Action", "Schedule", "Timeline", "stages", "timeline"]
