"""What a job saves and goes on from: as one entry per process, gathered whole, or merged from other workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hocket.cluster.layout import Layout
from hocket.data.distribute import LoaderPositions
from hocket.errors import HocketError
from hocket.programs.repartition import take_over
from hocket.split.split_model import SplitModel
from hocket.strategy import Strategy
from hocket.train.job_view import JobView
from hocket.train.other_workers import OneForAll, load_moments, one_for_all

_HOST_SIZE = "host_size"
"""Workers of a host as they were when the state was saved: what a hierarchical exchange left behind is of such hosts."""


class JobState(JobView):
    """The state of a job; it satisfies ``torch.distributed.checkpoint.stateful.Stateful``."""

    strategy: Strategy
    layout: Layout
    split: SplitModel | None
    loaders: LoaderPositions | None = None
    """Where the training stands in its data; saved with the job."""

    def state_dict(self) -> dict[str, Any]:
        """All strategy state of this worker, and the place in its data; save it beside the model's and the optimiser's.

        It is one entry, named by this process and held in a tuple: ``torch.distributed.checkpoint`` then neither takes it apart (a
        new job lacks some of its tensors) nor confuses it with that of another worker.
        """
        return {self._entry: ({**self.own_state(), _HOST_SIZE: self.cluster.host_size},)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`; with servers or peers, before the first step."""
        if self.cluster.elastic:
            raise HocketError("Workers of an elastic run come and go: give all workers' states to job.load_workers(…).")
        if self._entry not in state:
            raise HocketError(
                f"The state has {', '.join(map(str, state)) or 'nothing'}, not {self._entry}: give each process the state that it "
                "saved, or all workers' to job.load_workers(…)."
            )
        self.load_own_state(state[self._entry][0])

    @property
    def _entry(self) -> str:
        return f"process {self.runtime.process if self.split is None else self.split.world.rank}"

    def own_state(self) -> dict[str, Any]:
        """The same, not wrapped."""
        state = self.runtime.state_dict()
        state = state if self.split is None else self.split.described_state(state)
        return state if self.loaders is None else {**state, "loaders": self.loaders.state_dict()}

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        own = {name: value for name, value in state.items() if name not in ("loaders", _HOST_SIZE)}
        self.runtime.load_state_dict(own if self.split is None else self.split.load_described(own))
        if self.loaders is not None and "loaders" in state:
            self.loaders.load_state_dict(state["loaders"])

    def load_workers(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Go on from what *all* workers of a run have saved, in their order, however many they were: each of ``saved`` has
        ``model``, ``optimizer`` and ``job``, the three ``state_dict()``. Every worker must be given all of them.

        As many workers as there were go on exactly. Others begin with the mean of the weights, buffers and optimiser states, and
        share out the sum of the residuals (:mod:`hocket.programs.repartition`); an epoch under way goes on behind its last sample.
        On a mesh give what all processes have saved, in the order of their ranks: each goes on with what those left that held its
        part, so the mesh may have another ``data=``, and be the same otherwise.
        In an elastic run a worker that joins others has its state from them, and this does nothing.
        """
        states = [{**each, "job": next(iter(each["job"].values()))[0]} for each in saved]
        stream = self.runtime.stream
        told = [state["job"] if self.split is None else state["job"].get("job", {}) for state in states]
        if any(("samples" in job) != (stream is not None) for job in told):
            saved_by, here = ("a run that is not elastic", "is") if stream is not None else ("an elastic run", "is not")
            raise HocketError(
                f"The states were saved by {saved_by}, but this run {here} elastic; give the same elastic= as when they were saved."
            )
        place, size = self.cluster.workers.start, self.cluster.size
        if self.split is not None:
            place, size = self.split.world.rank, self.split.world.processes
        elif self._binding.copied:
            place, size = self.runtime.process, self.runtime.processes
        if stream is not None:
            if self.runtime.began is None:
                return
            place, size = self.runtime.began
            stream.go_on([job["samples"] for job in told])
        if len(saved) == size:
            self.model.load_state_dict(saved[place]["model"])
            self.optimizer.load_state_dict(saved[place]["optimizer"])
            self.load_own_state(states[place]["job"])
            return
        parts = 1 if self.split is None else self.split.mesh.parts
        loaders, host_size = states[0]["job"].get("loaders"), states[0]["job"].get(_HOST_SIZE, self.cluster.host_size)
        self.take_over(states[place % parts :: parts], host_size)
        if self.loaders is not None and loaders is not None:
            self.loaders.load_state_dict(loaders)

    def take_over(self, states: Sequence[Mapping[str, Any]], host_size: int | None) -> None:
        """Go on with what other workers have left, each its ``model``, ``optimizer`` and ``job`` (:meth:`own_state`), or on a mesh
        the processes that held this part; ``host_size`` workers were a host."""
        program = self.runtime.program
        if program is None or self._binding.copied:
            raise HocketError(
                f"{self.strategy} on this model goes on with as many workers as it had; save the mean model of job.averaged(), or "
                "job.full_state() of a model in parts."
            )
        own = []
        for state in states:
            job = {name: value for name, value in state["job"].items() if name not in ("loaders", _HOST_SIZE)}
            job = job if self.split is None else self.split.load_described(job, other_replicas=True)
            own.append({**state, "job": job})
        self.begin_with(one_for_all(own, self.model, self.optimizer, self.strategy, self.layout, program.seed, host_size))

    def begin_with(self, common: OneForAll) -> None:
        """Go on with what other workers have left together."""
        program = self.runtime.program
        assert program is not None
        take_over(program, self.weights, common.merged)
        for name, buffer in self.model.named_buffers():
            buffer.data.copy_(common.buffers.get(name, buffer))
        load_moments(self.model, self.optimizer, common.moments)

    def full_state(self) -> dict[str, Any] | None:
        """Model and optimiser as if they had never been split or sharded (``{"model": …, "optimizer": …}``), on the first process
        of each replica; None elsewhere. All processes must call it."""
        return self.runtime.full_state() if self.split is None else self.split.full_state()

    def load_full_state(self, state: dict[str, Any]) -> None:
        """Go on from :meth:`full_state`, or from an unsplit model's and optimiser's; every process is given the whole."""
        (self.runtime if self.split is None else self.split).load_full_state(state)
