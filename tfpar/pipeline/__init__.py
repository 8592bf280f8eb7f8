"""Pipeline parallelism: schedules of stages and micro-batches."""
