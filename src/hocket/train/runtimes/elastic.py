"""Collectives among workers that come and go: one generation of members after another.

- A loss interrupts the exchange in progress on all members. They form the next generation, agree whether the exchange counts, and
  otherwise begin it again from what they had before it.
- Workers join and leave at the end of a step that all agree on; one that joins gets the state of a worker that has it.
- A worker that the others went on without (it was stopped, or cut off) joins again as a new one.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hocket.cluster.elastic import ElasticCluster
from hocket.drivers.elastic import GenerationStore, MemberDriver
from hocket.errors import HocketError, WorkerLost
from hocket.programs.elastic.generation import Generation, Position, agreed
from hocket.strategy import Strategy
from hocket.train.elastic import Elastic
from hocket.train.handover import pack_state, unpack_state
from hocket.train.runtimes.base import Binding
from hocket.train.runtimes.collective import CollectiveRuntime

_BUILD_S = 20.0
"""How long members of a generation wait for each other's connections; longer than a rendezvous takes to find a lost one."""
_OWN = ("error", "u", "v", "momentum", "inner", "sender", "owner")
"""What codes keep of a worker's own rows: one that joins begins without it."""
_MOST_TRIES = 50


class Rejoined(Exception):
    """This worker was away; it has the others' state now, and what it was about to do is void."""


class Left(SystemExit):
    """This worker has handed over and left; the others go on."""


@dataclass(frozen=True)
class Change:
    """What a new generation changes: ranks of those that were lost, and this worker's rank and the number of workers."""

    before: int
    """How many workers there were; 0: this worker joins."""
    lost: tuple[int, ...]
    rank: int
    size: int
    positions: Tensor
    """What every member told of its data, a row each."""


class ElasticRuntime(CollectiveRuntime):
    """The worker of this process, whose group ``driver`` learns of."""

    def __init__(self, cluster: ElasticCluster, driver: MemberDriver, elastic: Elastic) -> None:
        super().__init__(cluster)
        self.alone = False
        self.cluster: ElasticCluster = cluster
        self.driver, self.member, self.elastic = driver, driver.program, elastic
        self.events: list[dict[str, Any]] = []
        """What happened: one entry per generation."""
        self.data_position: Callable[[], list[float]] = list
        """What the other members need to know of this worker's place in its data."""
        self.on_members: Callable[[Change], None] = lambda _: None
        self._newcomer, self._hold, self._members = True, False, tuple[int, ...]()
        self._given: list[tuple[int, Tensor]] = []
        self._flags: list[bool] = []
        cluster.latest_generation = lambda: self.member.latest.number
        cluster.abandoned = lambda: (
            self.member.excluded or (self.member.latest.number > self.cluster.generation and not self.member.latest.planned)
        )
        cluster.on_change = self._interrupted
        driver.on_abandon = lambda generation: cluster.abort(
            generation.number if not self.member.excluded else cluster.generation + 1
        )

    # --- as a runtime ----------------------------------------------------------------------------------------------------------

    def refuse(self, strategy: Strategy, scaler: Any) -> None:
        super().refuse(strategy, scaler)
        if strategy.topology.sums_on_servers:
            raise HocketError(f"{strategy}: servers that sum know a fixed number of workers; use allreduce with elastic.")

    def join(self, binding: Binding) -> None:
        super().join(binding)
        self.cluster.drain = self.program.drain
        self._terms = f"{binding.strategy}, seed {binding.seed}, layout {binding.layout.digest()[:16]}"

    def hooked(self) -> None:
        self.driver.call(self.member.join, self._terms)
        self._form()
        super().hooked()

    def gradient_ready(self, bucket: int, rows: Tensor) -> None:
        self._given.append((bucket, rows))
        super().gradient_ready(bucket, rows)

    def flags_ready(self, flags: list[bool]) -> None:
        self._flags = flags
        super().flags_ready(flags)

    def gradients_done(self) -> list[bool]:
        try:
            return super().gradients_done()
        except Rejoined:  # gradients of weights that nobody has any more: zeros
            for bucket, rows in self._given:
                rows.zero_()
                self.program.gradient_ready(bucket, rows)
            if not self.program.mixes_gradients:
                return self._flags
            self.flags_ready(self._flags)
            return super().gradients_done()
        finally:
            self._given = []

    def before_update(self, gradients: Sequence[Tensor]) -> None:
        try:
            super().before_update(gradients)
        except Rejoined:
            super().before_update(gradients)

    def after_update(self) -> None:
        with contextlib.suppress(Rejoined):  # the state is that of the end of a step
            super().after_update()
            self._end_of_step()

    def any_worker(self, flag: bool) -> bool:
        with self._in_step():
            return super().any_worker(flag)

    @contextlib.contextmanager
    def averaged(self) -> Iterator[nn.Module]:
        with self._in_step(), super().averaged() as model:
            yield model

    def finish(self) -> nn.Module:
        with self._in_step():
            model = super().finish()
            self.driver.begin(self.member.finish)
            while not self.member.over:  # others may have to know that the mean counts
                self.driver.call(self.member.wait_newer, self.cluster.generation)
                if not self.member.over:
                    self._form()
            return model

    def leave(self) -> None:
        super().leave()
        with contextlib.suppress(HocketError, RuntimeError):
            self.driver.begin(self.member.say_goodbye, 0)
        self.driver.close()
        self.cluster.close()

    def _mean(self, rows: Tensor) -> None:
        self.cluster.transact(lambda: self.cluster.mean(rows, self.cluster.world), rows)

    @contextlib.contextmanager
    def _in_step(self) -> Iterator[None]:
        try:
            yield
        except Rejoined:
            raise WorkerLost("This worker was away, and the others went on without it; start it again to join them.") from None

    # --- generations -----------------------------------------------------------------------------------------------------------

    def _end_of_step(self) -> None:
        """Where workers join and leave; with too few, wait for more."""
        alone = self.cluster.size == 1 and self.member.latest.number > self.cluster.generation
        while self.cluster.change or self._hold or alone:
            alone = False
            self.program.drain()
            self.driver.call(self.member.wait_newer, self.cluster.generation)
            self._form()

    def _interrupted(self, error: BaseException | None) -> bool:
        """An exchange has failed: form the next generation; whether the exchange counts."""
        number = self.cluster.generation
        if not self.cluster.abandoned():
            self.driver.begin(self.member.has_failed, number)
        self.driver.call(self.member.wait_newer, number)
        return self._form()

    def _form(self) -> bool:
        begun, again = time.monotonic(), False
        for _ in range(_MOST_TRIES):
            if self.member.excluded or not self.member.inside:
                if self.member.leaving:
                    self.driver.begin(self.member.say_goodbye, self.member.latest.number)
                    self.driver.close()
                    raise Left(0)
                again = self._newcomer = True
                self.program.abandon()
                self.driver.call(self.member.join, self._terms)
            generation = self.member.latest
            try:
                with self.cluster.uncounted():
                    counts = self._form_one(generation, begun)
            except WorkerLost:
                raise
            except RuntimeError:
                self.driver.begin(self.member.has_failed, generation.number)
                self.driver.call(self.member.wait_newer, generation.number)
                continue
            if again:
                raise Rejoined
            return counts
        raise WorkerLost(f"The workers could not form a group in {_MOST_TRIES} tries; see the rendezvous' output.")

    def _form_one(self, generation: Generation, begun: float) -> bool:
        cluster, before = self.cluster, self._members
        rank, size = generation.rank(self.member.uid), len(generation.members)
        cluster.form(generation.number, GenerationStore(self.driver, generation.number), rank, size, _BUILD_S)
        own = [-1.0 if self._newcomer else cluster.done, cluster.held, self.binding.weight, len(before), *self.data_position()]
        table = self._gathered(torch.tensor([own], dtype=torch.float64))
        if (table[:, 0] < 0).all():
            table[0, 0] = 0.0  # the run begins, with the first one's weights
        count = agreed([Position(int(done), bool(held)) for done, held in table[:, :2].tolist()])
        donor = int((table[:, 0] == count).nonzero()[0])
        joins = self._newcomer and donor != rank
        self._hand_over(donor, [r for r in range(size) if table[r, 0] < 0])
        counts = not self._newcomer and cluster.done < count
        found = self.program.regrouped(counts, self.binding.weights)
        cluster.start(lambda: cluster.all_reduce_any(torch.zeros(1, 1, dtype=torch.bool)))()  # all have the weights
        # --- from here on this generation is formed ---
        known = table[:, 0] >= 0
        scale = 1.0 if joins else float(size / table[known, 2].sum().clamp(min=1e-9)) * (float(known.sum()) / size)
        self.program.adopt(found, scale if abs(scale - 1.0) > 1e-9 else 1.0)
        was = int(table[donor, 3])
        self.elastic.rescale(self.binding.optimizer, size / was if was else 1.0)
        cluster.done, cluster.held, self._newcomer = count, False, False
        self._hold, self._members = generation.hold, generation.members
        lost = tuple(r for r, uid in enumerate(before) if uid not in generation.members)
        self.on_members(Change(0 if joins else len(before), lost, rank, size, table[:, 4:]))
        self.driver.begin(self.member.has_formed, generation.number)
        seconds = time.monotonic() - begun
        entry = {"generation": generation.number, "workers": size, "step": self.program.step, "seconds": seconds}
        self.events.append({**entry, "lost": len(lost), "joined": int((~known).sum()), "planned": generation.planned})
        return counts

    def _gathered(self, values: Tensor) -> Tensor:
        return self.cluster.start(lambda: self.cluster.all_gather_metrics(values))()

    # --- the state of a worker that joins --------------------------------------------------------------------------------------

    def _hand_over(self, donor: int, newcomers: list[int]) -> None:
        if self.cluster.rank == donor and newcomers:
            packed = pack_state(self._state())

            def give() -> None:
                for rank in newcomers:
                    dist.send(torch.tensor([packed.numel()]), rank)
                    dist.send(packed, rank)

            self.cluster.start(give)()
        elif self.cluster.rank in newcomers:

            def take() -> Tensor:
                size = torch.zeros(1, dtype=torch.int64)
                dist.recv(size, donor)
                packed = torch.empty(int(size), dtype=torch.uint8)
                dist.recv(packed, donor)
                return packed

            self._load(unpack_state(self.cluster.start(take)()))

    def _state(self) -> dict[str, Any]:
        binding = self.binding
        return {
            "weights": binding.weights,
            "others": [t.detach() for t in self._others()],
            "optimizer": binding.optimizer.state_dict(),
            "program": self.program.state_dict(),
            "share": [one.state_dict() for one in self.elastic.share],
        }

    def _load(self, state: dict[str, Any]) -> None:
        binding, program = self.binding, state["program"]
        with torch.no_grad():
            for own, given in zip([*binding.weights, *self._others()], [*state["weights"], *state["others"]], strict=True):
                own.copy_(given)
        binding.optimizer.load_state_dict(state["optimizer"])
        program["workers"] = self.program._identity()["workers"]
        program["gradient_state"] = [_without_own(one) for one in program["gradient_state"]]
        program["weight_state"] = [{**one, "inner": {}} if "inner" in one else one for one in program["weight_state"]]
        for one in program["outer_state"]:
            if "held" in one:
                one["held"].zero_()
        self.program.load_state_dict(program)
        for mine, given in zip(self.elastic.share, state["share"], strict=True):
            mine.load_state_dict(given)

    def _others(self) -> list[Tensor]:
        """Frozen parameters and buffers."""
        ours = {id(p) for own in self.binding.params for p in own}
        return [*(p.data for p in self.binding.model.parameters() if id(p) not in ours), *self.binding.model.buffers()]


def _without_own(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name not in _OWN}
