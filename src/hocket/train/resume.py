"""The content of a run's checkpoint, and how a run resumes from one: on the same workers, split otherwise, or on other workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from hocket.cluster.base import Cluster
from hocket.errors import HocketError, SettingError
from hocket.files import copied, read_safetensors, unlike
from hocket.programs.repartition import mean_of
from hocket.split import Mesh
from hocket.train.checkpoints import WHOLE, Checkpoints, Generation, process_file
from hocket.train.loop import EpochLoop, Training
from hocket.train.other_workers import of_weights, one_for_all, optimizer_names, stacked_buffers
from hocket.train.record import ELSEWHERE, MAY_CHANGE, STATES, WEIGHTS, Record
from hocket.train.settings import RunSettings
from hocket.train.worker_states import Merged, merge_left


def states_of(settings: RunSettings, cluster: Cluster, training: EpochLoop) -> dict[str, Any]:
    """The states that this process writes into a checkpoint, by file; all processes must call it."""
    with training.cluster.uncounted():
        own = {process_file(cluster.rank): training.state_dict()}
        means = mean_files(training, settings.split is not None)
    return own if cluster.process else {**own, **means}


def mean_weights(settings: RunSettings, cluster: Cluster, training: EpochLoop) -> dict[str, Any] | None:
    """The mean model's weights and buffers by name, on the first process; all processes must call it."""
    found = mean_files(training, settings.split is not None)
    return None if cluster.process else found[WEIGHTS]


def mean_files(training: EpochLoop, split: bool) -> dict[str, Any]:
    """The mean model by file: its weights, and where each worker's model is ``split`` all of it in one piece, on the first process
    of each replica alone. All processes must call it."""
    with training.cluster.uncounted(), training.averaged() as model:
        if not split or not isinstance(training, Training):
            return {WEIGHTS: copied(model.state_dict())}
        whole = copied(training.full_state())
    return {} if whole is None else {WHOLE: whole, WEIGHTS: whole["model"]}


def facts_of(
    settings: RunSettings, cluster: Cluster, training: EpochLoop, run: Mapping[str, Any], taken: int = 0
) -> dict[str, Any]:
    """The facts of a checkpoint's manifest; ``run`` is run.json, ``taken`` how many rounds of an epoch under way are done."""
    where = {"workers": settings.workers.count, "processes": cluster.processes, "host_size": cluster.host_size}
    return {"step": training.step, "epoch": training.epoch, **where, "run": dict(run), **({"taken": taken} if taken else {})}


@dataclass(frozen=True)
class Resumption:
    """A run that resumes: its folder, and in which points it may differ from the run before."""

    settings: RunSettings
    cluster: Cluster
    training: EpochLoop
    run: dict[str, Any]
    """run.json as it will be."""
    place: int
    """This process among those that go on, and how many workers there are."""
    workers: int

    def load(self, kept: Checkpoints, record: Record, repeated: dict[str, Any], note: Callable[[str], None]) -> int:
        """Load the newest checkpoint that all processes have whole, and give its number; all must call it.

        ``repeated``: what a run must have in common with the one it goes on with.
        """
        before = record.read_run()
        if before is None and (newest := kept.newest()) is not None:
            before = newest.facts["run"]
            if self.place == 0:
                note(f"{record.folder}/run.json is missing or damaged; its copy in checkpoint {newest.number} is used.")
        if before is None:
            raise SettingError(f"There is no run in {record.folder} to go on with; start without <resume>.")
        elsewhere = () if before.get("virtual") == self.run["virtual"] else ELSEWHERE
        record.check_resumed(before, repeated, (*MAY_CHANGE, *elsewhere))
        whole: list[bool] = []
        generation = kept.resume(self._needed, lambda found: whole.append(self._load(found)))
        self.run["resumed"] = list(before.get("resumed", []))
        if self._moved(generation.facts) and (done := self._done(generation.facts, whole[-1])):
            self.run["resumed"].append({"epoch": self.training.epoch, "step": self.training.step, "done": done})
            if self.place == 0:
                note(done)
        return generation.number

    def _moved(self, facts: Mapping[str, Any]) -> bool:
        """Whether the checkpoint is of other workers, or elastic workers are here or were there."""
        here = (self.workers, self.workers if self.cluster.elastic else self.cluster.processes, self.run["virtual"])
        there = (facts["workers"], facts["processes"], facts["run"].get("virtual"))
        return there != here or self.cluster.elastic or "within" in facts

    def _resplit(self, facts: Mapping[str, Any]) -> bool:
        """Whether the model was split otherwise, or over another number of replicas."""
        before, now = _mesh(facts["run"]), _mesh(self.run)
        if before is None or now is None:
            return before != now
        # An elastic run may have had other replicas than it began with.
        return replace(before, data=1) != replace(now, data=1) or facts["workers"] != self.workers

    def _part_files(self, facts: Mapping[str, Any]) -> list[str]:
        """Files of the processes that held this one's part, where only the number of replicas is another."""
        before, now = _mesh(facts["run"]), _mesh(self.run)
        if self._messages or before is None or now is None or replace(before, data=1) != replace(now, data=1):
            return []
        return [process_file(process) for process in range(self.place % now.parts, facts["processes"], now.parts)]

    @property
    def _messages(self) -> bool:
        """Whether workers send messages: what is under way between them cannot be handed to others."""
        return self.settings.strategy.runtime != "collective"

    @property
    def _sharded(self) -> bool:
        return self.settings.sharding.fsdp

    def _needed(self, generation: Generation) -> list[str]:
        facts = generation.facts
        if self._resplit(facts):
            whole = process_file(0) if facts["run"].get("mesh") is None else WHOLE
            return [whole, *self._places(facts), *self._part_files(facts)]
        if self._moved(facts) and self._messages:
            return [process_file(0), WEIGHTS]
        if self._moved(facts):
            return [process_file(process) for process in range(facts["processes"])]
        return [process_file(self.place), *[process_file(0)] * self._sharded]

    def _load(self, generation: Generation) -> bool:
        """Go on from there; whether with the model in one piece, which has no residuals."""
        facts, training = generation.facts, self.training
        if facts.get("within") and not self.cluster.elastic:
            raise HocketError("it was saved in the middle of an epoch, and only an elastic run can go on there")
        if facts.get("taken") and (self._resplit(facts) or self._moved(facts)):
            raise HocketError("it was saved in the middle of an epoch, and only as many workers of the same kind can go on there")
        if self._resplit(facts):
            whole = not self._load_parts(generation)
            if whole:
                self._load_whole(generation)
            return whole
        if self._moved(facts) and self.settings.split is None:
            self._load_others(generation)
        else:
            state = generation.load(process_file(self.place))
            if self._sharded:
                state["replicas"]["whole"] = generation.load(process_file(0))["replicas"]["whole"]
            if self.settings.split is not None and not self._fits(state):
                self._load_whole(generation)
                return True
            check_structure(generation, training, state, whole=not (self.settings.split or self.settings.sharding.named))
            if not self.cluster.elastic:
                training.load_state_dict(state)
                training.taken = facts.get("taken", 0)  # type: ignore[attr-defined]
                return False
            training.replicas.load_state_dict(state["replicas"])
            self._go_on(generation, state)
        return False

    def _places(self, facts: Mapping[str, Any]) -> list[str]:
        """Files that say where the replicas of an elastic run stood in the data: one of each."""
        parts = facts["processes"] // facts["workers"]
        return [process_file(k * parts) for k in range(facts["workers"])] if self.cluster.elastic and "within" in facts else []

    def _go_on(self, generation: Generation, state: dict[str, Any]) -> None:
        """The positions of all replicas in the data; of a run that was not elastic the end of the epoch of ``state``."""
        assert isinstance(self.training, Training)
        self.training.go_on_after([generation.load(name) for name in self._places(generation.facts)] or [state])

    def _fits(self, state: Mapping[str, Any]) -> bool:
        """Whether all processes hold the parts that were saved: a cut that is measured may be elsewhere this time."""
        if self.cluster.elastic:
            return True  # cut by counted operations, so equal; a part that does not fit is refused when it is loaded
        fits = self.training.replicas.fits(state["replicas"])
        return not bool(self.cluster.all_reduce_any(torch.tensor([[not fits]], device=self.cluster.device)))

    def _load_parts(self, generation: Generation) -> bool:
        """Take what the processes of other replicas have left of the part that is held here, if all processes can."""
        facts, training = generation.facts, self.training
        states = [generation.load(name) for name in self._part_files(facts)]
        if not states or not self._fits(states[0]):
            return False
        for state in states:
            check_structure(generation, training, state, whole=False)
        host_size, before = facts.get("host_size"), _mesh(facts["run"])
        if host_size is not None and "within" not in facts and before is not None:  # it counts processes
            host_size = before.replicas_per_host(host_size)
        training.replicas.take_over([state["replicas"] for state in states], host_size)
        assert isinstance(training, Training)
        training.go_on_after(states)
        return True

    def _load_whole(self, generation: Generation) -> None:
        """Load the whole model, in one piece."""
        training, state = self.training, _whole(generation)
        assert isinstance(training, Training)
        training.load_full_state(state)
        if self.cluster.elastic:
            self._go_on(generation, state)
        elif generation.facts["workers"] != self.settings.workers.count:
            training.go_on_at(state)

    def _load_others(self, generation: Generation) -> None:
        """Load the merged states of other workers."""
        training, settings, facts = self.training, self.settings, generation.facts
        if self._messages:
            state = generation.load(process_file(0))
            progress = {"epoch": facts["epoch"], "metrics": state["metrics"]}
            training.replicas.take_over(of_weights(read_safetensors(generation.content(WEIGHTS)), training.replicas.layout))
            training.go_on_at(progress)
            model = training.replicas.model
            names = optimizer_names(model, settings.optimizer_for(model)(list(model.parameters())))
            folder, left = generation.folder.parents[1] / STATES, (facts["epoch"], facts["workers"], settings.strategy)
            _take_over(training, merge_left(state, folder, *left, training.replicas.layout, names), names)
            return
        assert isinstance(training, Training)
        states = [generation.load(process_file(process)) for process in range(facts["processes"])]
        replicas = [state["replicas"] for state in states]
        if self._sharded:
            buffers = {name: mean_of(rows) for name, rows in stacked_buffers(replicas).items()}
            training.replicas.load_state_dict({"whole": replicas[0]["whole"], "buffers": buffers})
        elif self.cluster.elastic and self.workers == facts["workers"] == len(states) and not facts["run"].get("virtual"):
            training.replicas.load_state_dict(replicas[self.place])
        else:
            given = (training.replicas.model, settings.optimizer_for(training.replicas.model), settings.resolved)
            common = one_for_all(replicas, *given, training.replicas.layout, settings.seed, facts.get("host_size"))
            training.replicas.take_over(common)  # type: ignore[attr-defined]
        training.go_on_after(states)

    def _done(self, facts: Mapping[str, Any], whole: bool) -> str:
        """What was done to go on with other workers, in words; ``whole``: from a model in one piece."""
        before, now = facts["workers"], self.workers
        where = f"epoch {self.training.epoch + 1} " + (
            "goes on behind its last sample" if facts.get("within") else "begins at its first sample"
        )
        if self._messages:
            taken = f"; {taken}" if (taken := self.training.taken_over) else ""  # type: ignore[attr-defined]
            anew = "; the servers' momentum begins anew" if self.settings.strategy.runtime == "server" else ""
            return f"{before} workers become {now}: all begin with the global weights{taken}{anew}; {where}."
        if before == now:
            return ""
        if whole:
            return (
                f"{before} replicas become {now}: each begins with the mean of their weights and buffers and with the optimiser "
                f"state of the first one, residuals begin anew; {where}."
            )
        what = "workers" if self.settings.split is None else "replicas"
        return (
            f"{before} {what} become {now}: each begins with the mean of their weights, buffers and optimiser states and with one "
            f"part of {now} of the sum of their residuals; {where}."
        )


def _take_over(training: Any, merged: Merged, names: Sequence[str]) -> None:
    """Let each virtual worker that sends messages begin with its part of the others' merged states; ``names`` are those of an
    optimiser's parameters."""
    size = training.cluster.size
    training.taken_over = merged.describe(size)
    for worker in training.protocol.workers if merged.owes else ():
        worker.begin_with(merged.part(size))
    if merged.moments:
        training.replicas.load_moments(merged.moments, names)


def check_structure(generation: Generation, training: EpochLoop, state: Mapping[str, Any], whole: bool = True) -> None:
    """Refuse a state of another structure before anything is loaded; ``whole``: of all, where no exchange is needed to know it."""
    for name in ("epoch", "step"):
        if state.get(name) != generation.facts[name]:
            raise HocketError(f"its {name} is {state.get(name)!r}, not {generation.facts[name]}")
    own = training.state_dict() if whole else {}
    if not isinstance(training, Training):  # messages under way may differ
        own = {name: own[name] if name == "replicas" else type(value)() for name, value in own.items()}
    if (place := unlike(own, state)) is not None:
        raise HocketError(f"its structure differs at '{place}'")


def _mesh(run: Mapping[str, Any]) -> Mesh | None:
    """The mesh that a run.json names."""
    return None if run.get("mesh") is None else Mesh.parse(run["mesh"])


def _whole(generation: Generation) -> dict[str, Any]:
    """The state of a run on any mesh, or on none, with the model in one piece."""
    if generation.facts["run"].get("mesh") is not None:
        return generation.load(WHOLE)
    state = generation.load(process_file(0))
    replica = state.pop("replicas")
    if not {"model", "optimizer"} <= set(replica):
        raise HocketError("it is of virtual workers; only a run of real workers can go on as a split one")
    return {**state, "model": replica["model"], "optimizer": replica["optimizer"]}
