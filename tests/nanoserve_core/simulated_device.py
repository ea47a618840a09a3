"""A model runner without a model: K/V memory in which each slot tells what it was computed from.

The K/V of a position is a number made of its token, its position, the weights and *everything read
from the blocks before it*; the next token is a number made of everything read up to it. So a step
that reads one slot which is stale, foreign or not written yet gives other tokens than a solo run,
as attention would. Every read is checked at once as well, and every write against the tables.

The device knows plans only, never the scheduler's books. Steps are executed in launch order; their
tokens are handed over when the test asks for them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from nanoserve_core.request import FinishReason, Request, Sequence
from nanoserve_core.request_group import RequestGroup
from nanoserve_core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable
    from collections.abc import Sequence as ListOf

    from torch import Tensor

    from nanoserve_core.block_manager import BlockManager
    from nanoserve_core.plan import ScheduledSeq, SlotAssignment, StepPlan
    from nanoserve_core.scheduler import Committed, Scheduler

Group: TypeAlias = "list[list[Sequence]]"
"""The samples of each request, here one, as `Scheduler.add` takes them."""

EOS = 0
VOCAB_SIZE = 7


class SimulatedModel:
    """Deterministic numbers in place of K/V and logits; another ``weights`` is another model."""

    def __init__(self, weights: int = 0, *, eos_every: int = VOCAB_SIZE) -> None:
        self.weights = weights
        self.eos_every = eos_every

    def first_state(self) -> int:
        """What attention has read before the first position."""
        return hash((self.weights,))

    def key_value(self, state: int, token: int, position: int) -> int:
        """K/V of a position whose earlier ones gave ``state``."""
        return hash((state, token, position))

    def read(self, state: int, key_value: int) -> int:
        """The state after one more slot was read."""
        return hash((state, key_value))

    def next_token(self, state: int, seed: int) -> int:
        """The token sampled after everything was read; `EOS` once in ``eos_every`` on average."""
        number = hash((state, seed, self.weights))
        if number % self.eos_every == 0:
            return EOS
        return 1 + number // self.eos_every % (VOCAB_SIZE - 1)

    def key_values(self, tokens: Iterable[int]) -> list[int]:
        """K/V of all positions, computed without blocks."""
        state, result = self.first_state(), []
        for position, token in enumerate(tokens):
            result.append(self.key_value(state, token, position))
            state = self.read(state, result[-1])
        return result

    def solo_run(self, sequence: Sequence) -> tuple[list[int], FinishReason]:
        """All tokens of a sequence that runs alone, without blocks, and why it ends."""
        tokens = list(sequence.request.prompt_token_ids)
        sampling, stop_after = sequence.request.sampling, stop_after_of(sequence)
        state = self.first_state()
        for position, token in enumerate(tokens):
            state = self.read(state, self.key_value(state, token, position))
        while len(tokens) < sequence.max_total_tokens:
            token = self.next_token(state, sequence.seed)
            state = self.read(state, self.key_value(state, token, len(tokens)))
            tokens.append(token)
            is_eos = token == EOS and not sampling.ignore_eos
            is_long = len(tokens) - sequence.num_prompt_tokens == stop_after
            if is_eos or is_long or token in sampling.stop_token_ids:
                return tokens, FinishReason.STOP
        return tokens, FinishReason.LENGTH


def choose_nothing(logits: Tensor, members: ListOf[int]) -> Tensor:
    """The sampler of groups: the simulated device samples in its place."""
    raise AssertionError(f"asked for {members} of {logits}")


def stop_after_of(sequence: Sequence) -> int | None:
    """After how many generated tokens the request's own check stops it."""
    stop_after: int | None = sequence.request.metadata.get("stop_after")
    return stop_after


def should_stop(sequence: Sequence) -> bool:
    """The check of requests that were made with ``stop_after``."""
    return sequence.num_output_tokens == stop_after_of(sequence)


@dataclass
class Slot:
    """A row of the device's batch state."""

    generation: int
    seed: int
    tokens: list[int]
    block_table: list[int] = field(default_factory=list)
    num_computed: int = -1
    """-1 until the first row tells how much was cached."""
    is_mixed: bool = False
    """The weights changed while it ran: its K/V is of both."""


@dataclass
class Launched:
    """A step that was executed, whose tokens nobody has fetched yet."""

    plan: StepPlan
    token_ids: list[int]
    written: dict[int, int] = field(default_factory=dict)
    """Block -> id of the sequence that wrote into it."""


class SimulatedDevice:
    """Executes plans as `ModelRunner.launch` must, and keeps what was launched."""

    def __init__(self, model: SimulatedModel, *, num_blocks: int, block_size: int) -> None:
        self.model = model
        self.block_size = block_size
        self.memory: list[list[int | None]] = [[None] * block_size for _ in range(num_blocks)]
        self.slots: dict[int, Slot] = {}
        self.generations: dict[int, int] = {}
        self.in_flight: deque[Launched] = deque()
        self.num_computed_tokens = 0

    def launch(self, plan: StepPlan) -> None:
        """Execute a plan; its tokens wait in ``in_flight``."""
        for slot in plan.released:
            del self.slots[slot]
        for assignment in plan.assigned:
            self._assign(assignment)
        launched = Launched(plan, [])
        copied = [list(self.memory[source]) for source, _ in plan.block_copies]
        for (_, destination), content in zip(plan.block_copies, copied, strict=True):
            self.memory[destination] = content  # all at the same time
        num_decode = sum(1 for row in plan.seqs[: plan.num_decode_seqs] if row.num_tokens == 1)
        assert num_decode == plan.num_decode_seqs, "a decode row has one token"
        for row in plan.seqs:
            self._run(row, launched)
        self._check_reads(launched)
        self.num_computed_tokens += plan.num_tokens
        self.in_flight.append(launched)

    def collect(self) -> tuple[StepPlan, list[int]]:
        """The oldest launched plan and its tokens."""
        launched = self.in_flight.popleft()
        return launched.plan, launched.token_ids

    def change_weights(self, weights: int) -> None:
        """Other weights from the next launch on."""
        self.model = SimulatedModel(weights, eos_every=self.model.eos_every)
        for slot in self.slots.values():
            slot.is_mixed = True

    def _assign(self, assignment: SlotAssignment) -> None:
        slot, generation = assignment.slot, assignment.generation
        assert slot not in self.slots, f"slot {slot} was not released"
        assert generation > self.generations.get(slot, -1), f"slot {slot} had {generation} before"
        self.generations[slot] = generation
        self.slots[slot] = Slot(generation, assignment.seed, list(assignment.token_ids))

    def _run(self, row: ScheduledSeq, launched: Launched) -> None:
        slot = self.slots[row.slot]
        assert slot.generation == row.generation, "the slot has another tenant"
        assert row.num_tokens >= 1, "a row without a query"
        slot.block_table.extend(row.new_block_ids)
        assert slot.num_computed in (-1, row.start), f"{slot.num_computed} computed, {row.start=}"
        tokens = slot.tokens[row.start : row.end]
        assert len(tokens) == row.num_tokens, "a position without a token"
        assert list(row.token_ids) == tokens or (not row.token_ids and row.num_tokens == 1)
        state = self._attend(slot, row, launched)
        slot.num_computed = row.end
        assert row.samples == (row.end == len(slot.tokens)), "sampled inside the sequence"
        if row.samples:
            token = self.model.next_token(state, slot.seed)
            slot.tokens.append(token)
            launched.token_ids.append(token)

    def _attend(self, slot: Slot, row: ScheduledSeq, launched: Launched) -> int:
        """Read every slot before each position and write the position's own; the final state."""
        model, block_size = self.model, self.block_size
        wanted = model.key_values(slot.tokens[: row.end])
        state = model.first_state()
        for position in range(row.end):
            block_id = slot.block_table[position // block_size]
            block, offset = self.memory[block_id], position % block_size
            if position >= row.start:
                block[offset] = model.key_value(state, slot.tokens[position], position)
                assert launched.written.setdefault(block_id, row.sequence_id) == row.sequence_id
            found = block[offset]
            assert found is not None, f"position {position} was never written"
            assert slot.is_mixed or found == wanted[position], f"position {position} is not its own"
            state = model.read(state, found)
        return state

    def _check_reads(self, launched: Launched) -> None:
        """A row may not rely on what another row of its step writes: the order is the kernel's."""
        for row in launched.plan.seqs:
            num_blocks = -(-row.end // self.block_size)
            for block_id in self.slots[row.slot].block_table[:num_blocks]:
                writer = launched.written.get(block_id, row.sequence_id)
                assert writer == row.sequence_id, f"block {block_id} is read as it is written"


class RequestFactory:
    """Makes requests and their sequences, numbered as an engine would."""

    def __init__(self) -> None:
        self.num_requests = 0
        self.num_sequences = 0

    def __call__(
        self,
        prompt: Iterable[int],
        max_tokens: int = 8,
        *,
        n: int = 1,
        priority: int = 0,
        cache_salt: str | None = None,
        prompt_logprobs: int | None = None,
        stop_token_ids: tuple[int, ...] = (),
        ignore_eos: bool = True,
        stop_after: int | None = None,
    ) -> list[Sequence]:
        """The n samples of a new request, ready for `Scheduler.add`."""
        sampling = SamplingParams(
            n=n,
            max_tokens=max_tokens,
            prompt_logprobs=prompt_logprobs,
            stop_token_ids=stop_token_ids,
            ignore_eos=ignore_eos,
        )
        request = Request(
            request_id=f"r{self.num_requests}",
            prompt_token_ids=tuple(prompt),
            sampling=sampling,
            priority=priority,
            cache_salt=cache_salt,
            metadata={"stop_after": stop_after},
        )
        self.num_requests += 1
        return [self._sequence(request, index) for index in range(n)]

    def group(self, prompts: Iterable[Iterable[int]], max_tokens: int = 8, **options: Any) -> Group:
        """One sequence for each prompt, all of one new group; options as for a request."""
        samples = [self(prompt, max_tokens, **options) for prompt in prompts]
        requests = [sequence.request for (sequence,) in samples]
        joined = RequestGroup.join(requests, choose_nothing)
        for (sequence,), request in zip(samples, joined, strict=True):
            sequence.request = request
            sequence.seed = sequence.sequence_id
        return samples

    def _sequence(self, request: Request, index: int) -> Sequence:
        number, num_prompt_tokens = self.num_sequences, len(request.prompt_token_ids)
        self.num_sequences += 1
        assert request.sampling.max_tokens is not None, "tests say how long a request may be"
        return Sequence(
            sequence_id=number,
            request=request,
            index=index,
            seed=index,
            arrival=number,
            max_total_tokens=num_prompt_tokens + request.sampling.max_tokens,
            token_ids=list(request.prompt_token_ids),
            num_prompt_tokens=num_prompt_tokens,
        )


class EngineLoop:
    """Scheduler and device put together as `Engine.step` does it, ``run_ahead`` steps ahead."""

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        block_manager: BlockManager,
        model: SimulatedModel,
        run_ahead: int = 0,
    ) -> None:
        self.scheduler = scheduler
        self.block_manager = block_manager
        self.device = SimulatedDevice(
            model, num_blocks=block_manager.num_blocks, block_size=block_manager.block_size
        )
        self.run_ahead = run_ahead
        self.plans: list[StepPlan] = []
        self.finished: list[Sequence] = []
        self.aborted: list[Sequence] = []
        """Members of groups that ended because another one failed."""

    def launch(self) -> StepPlan | None:
        """Schedule and launch one step."""
        plan = self.scheduler.schedule()
        if plan is not None:
            self.plans.append(plan)
            self.device.launch(plan)
        return plan

    def commit(self, *, failed: Collection[int] = ()) -> list[Committed]:
        """Commit the oldest launched step. A group of which a member failed is aborted."""
        plan, token_ids = self.device.collect()
        committed = self.scheduler.commit(plan, token_ids, should_stop=should_stop, failed=failed)
        for sequence in [c.sequence for c in committed if c.row in failed]:
            group = sequence.request.group
            for request_id in group.request_ids if group else ():
                self.aborted += self.scheduler.abort(request_id, FinishReason.ERROR)
        self.finished.extend(c.sequence for c in committed if c.sequence.is_finished)
        return committed

    def step(self) -> list[Committed]:
        """One step as the engine makes it."""
        while len(self.device.in_flight) <= self.run_ahead and self.launch() is not None:
            pass
        return self.commit() if self.device.in_flight else []

    def run(self, max_steps: int = 10_000) -> list[Sequence]:
        """Step until nothing is left; the sequences in the order in which they finished."""
        for _ in range(max_steps):
            if not self.scheduler.has_unfinished and not self.device.in_flight:
                return self.finished
            num_steps = len(self.plans)
            was_in_flight = bool(self.device.in_flight)
            self.step()
            assert was_in_flight or len(self.plans) > num_steps, "work is left, but nothing runs"
            self.scheduler.check()
        raise AssertionError(f"unfinished after {max_steps} steps")
