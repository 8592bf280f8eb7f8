"""The functions that Keras' `fit`, `evaluate` and `predict` call for a model in stages."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfpar import collectives, describe, devices, errors, op_support, op_warnings, training, transfer
from tfpar.compat import training as steps
from tfpar.pipeline import batches, loss_parts, schedules, updates, workers
from tfpar.pipeline.batches import MicroBatch
from tfpar.pipeline.plan import Pipeline
from tfpar.pipeline.run import Record, Run
from tfpar.pipeline.stage import Received, StageProgram, forward_program, traced, training_program


class PipelineTrainer(training.GlobalViewTrainer):
    """Builds a model's step functions.

    Args:
        pipeline: stages and schedule.
    """

    def __init__(self, pipeline: Pipeline):
        self.pipeline = pipeline
        self._workers: workers.Workers | None = None
        self.last: weakref.WeakKeyDictionary[keras.Model, Record] = weakref.WeakKeyDictionary()

    def train_function(self, model: keras.Model) -> Callable[[Iterable], Any]:
        if model.run_eagerly:
            return super().train_function(model)
        return training.over_batches(model, Steps(self, model).train)

    def test_function(self, model: keras.Model) -> Callable[[Iterable], Any]:
        if model.run_eagerly:
            return super().test_function(model)
        return training.over_batches(model, Steps(self, model).test)

    def predict_function(self, model: keras.Model) -> Callable[[list], Any]:
        if model.run_eagerly:
            return super().predict_function(model)
        return training.joined_outputs(Steps(self, model).predict)

    @property
    def workers(self) -> workers.Workers:
        """The threads, made when first used."""
        if self._workers is None:
            self._workers = workers.Workers(self.pipeline.schedule.devices)
        return self._workers


class Steps:
    """A model's steps and the functions that they are made of.

    Args:
        trainer: whose threads and schedule to use.
        model: the model.

    Raises:
        ValueError: the model overrides a step, or asks for XLA.
    """

    def __init__(self, trainer: PipelineTrainer, model: keras.Model):
        own = [name for name in _WHOLE if steps.overrides(model, name)]
        if own:
            raise ValueError(
                f"The model {model.name!r} has its own {own[0]}, which sees the whole model and cannot be cut into pipeline "
                "stages. Override compute_loss or compute_metrics instead, or use a mesh without the axis 'pipe'."
            )
        strategy = model.distribute_strategy
        strategy.check_owns(model)
        if model.jit_compile:
            raise errors.jit_compile(strategy)
        self._trainer, self._pipeline = trainer, trainer.pipeline
        self._model, self._strategy = model, strategy
        self._programs: dict[tuple, list[StageProgram]] = {}
        self._divisors: dict[tuple, Callable] = {}
        self._updates: list[tuple[updates.Holder, updates.Update]] = []
        self._finish: Callable | None = None

    def train(self, batch: Any) -> Any:
        """One training step on a host batch; returns the logs."""
        run, parts = self._run(batch, "train")
        self._update(run)
        return self._logs(run, parts)

    def test(self, batch: Any) -> Any:
        """One step of evaluation; returns the logs."""
        return self._logs(*self._run(batch, "test"))

    def predict(self, batch: Any) -> Any:
        """The outputs for a batch."""
        run, parts = self._run(batch, "predict")
        last = self._stages[-1]
        outputs = []
        for i, part in enumerate(parts):
            tensors = [transfer.to_host(tensor) for tensor in run.outputs[i]]
            values = self._programs["predict", part.signature][-1].form.unpack(tensors)
            outputs.append(last.graph.pack([values[number] for number in last.part.sends]))
            wrong = [leaf.shape for leaf in tf.nest.flatten(outputs[-1]) if leaf.shape[:1] != (part.examples,)]
            if wrong and len(parts) > 1:
                raise ValueError(
                    f"The model {self._model.name!r} has an output of shape {tuple(wrong[0])} for {part.examples} examples, "
                    "so that the outputs of micro-batches cannot be joined. Use microbatches=1."
                )
        return tf.nest.map_structure(lambda *leaves: tf.concat(leaves, 0), *outputs)

    def _prepare(self, batch: Any) -> None:
        """Builds, cuts and places a model, before its first step."""
        training.build(self._model, batch)
        self._strategy.lay_out(self._model, batch)
        self._stages = self._pipeline.stages(self._model, batch)
        if not self._programs:
            updates.place_state(self._model, self._pipeline.meshes, self._stages)

    def _run(self, batch: Any, mode: str) -> tuple[Run, list[MicroBatch]]:
        """The forwards, and the backwards when training, of all micro-batches."""
        self._prepare(batch)
        whole = batches.on_host(self._model, self._stages[0].graph, batch, mode)
        parts = batches.micro_batches(self._stages, whole, self._pipeline.microbatches)
        schedule = schedules.restricted(self._pipeline.schedule, len(parts), forward_only=mode != "train")
        while True:
            is_new = any((mode, part.signature) not in self._programs for part in parts)
            mailbox, programs = workers.Mailbox(), [self._program(part, mode) for part in parts]
            if is_new and mode == "train" and len(parts) > 1:
                self._check_loss(whole, parts, programs[0][-1].outputs)
            run = Run(self._stages, programs, parts, self._totals(whole, programs), mailbox)
            before = self._state() if is_new else []
            carry_out = workers.carry_out_in_turn if is_new else self._trainer.workers.carry_out
            try:
                carry_out(schedule, run.act, mailbox)
                break
            except workers.StageError as error:
                if not op_support.replicates(error.__cause__):
                    raise
                self._programs.clear()
                for variable, value in before:
                    variable.assign(value)
        self._trainer.last[self._model] = run.record
        if is_new:
            self._report(run, mode)
        return run, parts

    def _report(self, run: Run, mode: str) -> None:
        """Warns of what runs whole on every device, and remembers what devices send each other."""
        sent = collectives.of_new_programs()
        for graph in (phase.function.graph for program in run.programs[0] for phase in program.phases.values()):
            op_warnings.warn_replicated(graph)
            op_warnings.warn_gathered(graph, sent)
        if mode == "train":
            describe.remember_collectives(self._model, sent)

    def _check_loss(self, batch: batches.Batch, parts: list[MicroBatch], outputs: Any) -> None:
        """Refuses a loss that cannot be computed from micro-batches."""

        def of_batch(spec: tf.TensorSpec) -> tf.TensorSpec:
            return tf.TensorSpec([batch.examples, *spec.shape[1:]], spec.dtype) if spec.shape.rank else spec

        whole = tf.nest.map_structure(of_batch, outputs)
        with tf.device(devices.host()):
            loss_parts.check_parts(self._model, whole, batch.extra, [part.examples for part in parts])

    def _totals(self, batch: batches.Batch, programs: list[list[StageProgram]]) -> list[float]:
        """What the losses are divided by on the whole batch, where that depends on masks or weights."""
        if not programs[0][-1].totals:
            return []
        key = batch.signature
        if key not in self._divisors:
            graph = self._stages[0].graph
            self._divisors[key] = loss_parts.divisors(self._model, graph, batch.inputs, batch.extra)
        with tf.device(devices.host()):
            return [float(total) for total in self._divisors[key](*batch.flat)]

    def _state(self) -> list[tuple[keras.Variable, np.ndarray]]:
        """What a forward changes: statistics, seeds, metrics."""
        return [(v, v.numpy()) for v in [*self._model.non_trainable_variables, *self._model.metrics_variables]]

    def _program(self, part: MicroBatch, mode: str) -> list[StageProgram]:
        """The functions of all stages for micro-batches of one shape."""
        key = mode, part.signature
        if key not in self._programs:
            received, made = Received(), []
            for stage, feed in zip(self._stages, part.feeds):
                if mode == "train":
                    splits, again = self._pipeline.schedule.splits_backward, self._pipeline.recompute
                    made.append(training_program(stage, feed, received, splits, again))
                else:
                    made.append(forward_program(stage, feed, received, mode))
                received = Received(made[-1].sent, made[-1].form)
            self._programs[key] = made
        return self._programs[key]

    def _update(self, run: Run) -> None:
        """The optimizer's step on all devices."""
        sums = [
            dict(zip((id(v) for v, has in zip(stage.weights, program.trained) if has), run.sums[stage.part.index]))
            for stage, program in zip(self._stages, run.programs[0])
        ]
        is_new = not self._updates
        if is_new:
            self._make_updates({key for found in sums for key in found})
        if not self._updates:
            warnings.warn(f"The model {self._model.name!r} does not have any trainable weights.", stacklevel=2)
            return
        values = [updates.gradients(holder, sums) for holder, _ in self._updates]
        known: list[Any] = []
        if self._updates[0][1].facts is not None:
            known = updates.joined([made.facts(*own) for (_, made), own in zip(self._updates, values)])

        def apply(device: int) -> None:
            holder, made = self._updates[device]
            with errors.explained(self._model, self._strategy):
                made.apply(*values[device], *(transfer.to_mesh(fact, holder.mesh.layout(())) for fact in known))

        if is_new:
            for device in range(len(self._updates)):
                apply(device)
        else:
            self._trainer.workers.each(len(self._updates), apply, workers.Mailbox())

    def _make_updates(self, with_gradient: set[int]) -> None:
        scales = hasattr(self._model.optimizer, "check_finite")
        has = {id(variable): id(variable) in with_gradient for variable in self._model.trainable_variables}
        holders = [h for h in updates.holders(self._stages, has) if h.weights or scales]
        self._updates = [(holder, updates.update(holder)) for holder in holders]

    def _logs(self, run: Run, parts: list[MicroBatch]) -> Any:
        """Updates the metric "loss" and returns all metrics."""
        mesh = self._stages[-1].mesh
        if self._finish is None:

            def finish(loss: tf.Tensor, examples: tf.Tensor) -> Any:
                steps.track_loss(self._model, loss, examples)
                return self._model.get_metrics_result()

            specs = tf.TensorSpec((), tf.float64), tf.TensorSpec((), tf.int32)
            self._finish = traced(self._model, mesh, finish, *specs)
        loss = np.float64(sum(map(sum, run.losses)))
        examples = np.int32(sum(part.examples for part in parts))
        return run.logs | self._finish(*(transfer.to_mesh(value, mesh.layout(())) for value in (loss, examples)))


steps.cut_losses()
steps.follow_reductions()

_WHOLE = ("train_step", "test_step", "predict_step")
