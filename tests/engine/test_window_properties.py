"""Any order of commands and steps, with windowed layers: what a window shows is always there."""

from __future__ import annotations

from hypothesis import settings

from engine.engine import Engine
from engine.types import FinishReason, SequenceRequest
from tests.engine.helpers import LIMITS, make_engine
from tests.engine.test_scheduler_properties import (
    BLOCK_SIZE,
    BLOCKS,
    ChunkingMachine,
    EngineMachine,
    OneByOneMachine,
)
from tests.engine.windowed_fake import WindowedFakeRunner, next_in_window

REACH = 6


class Windowed(EngineMachine):
    """Some layers see REACH tokens, in a pool of so many blocks."""

    windowed_blocks: int | None = 10

    def make_engine(self, **limits: float) -> Engine:
        self.runner = WindowedFakeRunner(BLOCKS, BLOCK_SIZE, REACH, self.windowed_blocks)
        return make_engine(
            BLOCKS,
            BLOCK_SIZE,
            self.runner,
            self.pace(),
            reach=REACH,
            windowed_blocks=self.windowed_blocks,
            **limits,
        )

    def windowed_from(self, asked: SequenceRequest) -> int:
        return max(0, len(asked.known_tokens) - REACH + 1)

    def one_step(self) -> None:
        super().one_step()
        self.runner.spoil(self.engine._scheduler)

    def teardown(self) -> None:
        super().teardown()
        for group in self.engine._scheduler._groups:
            assert group.pool.free == group.pool.num_blocks


class AllWindowed(Windowed):
    """All layers see REACH tokens."""

    windowed_blocks = None

    def handed_from(self, asked: SequenceRequest) -> int:
        return self.windowed_from(asked)

    def answer(self, asked: SequenceRequest) -> tuple[tuple[int, ...], FinishReason]:
        tokens = list(asked.known_tokens)
        while True:
            tokens.append(next_in_window(tokens, REACH))
            output = tuple(tokens[len(asked.prompt) :])
            if output[-1] in asked.sampling.stop_token_ids:
                return output, FinishReason.STOP
            if len(output) == asked.sampling.max_tokens or len(tokens) == LIMITS["max_model_len"]:
                return output, FinishReason.LENGTH


class WindowedMachine(Windowed, EngineMachine):
    pass


class WindowedChunkingMachine(Windowed, ChunkingMachine):
    windowed_blocks = 6  # a window, the longest chunk, and two for others


class WindowedOneByOneMachine(Windowed, OneByOneMachine):
    pass


class AllWindowedMachine(AllWindowed, EngineMachine):
    pass


class AllWindowedChunkingMachine(AllWindowed, ChunkingMachine):
    pass


TestWindowedMachine = WindowedMachine.TestCase
TestWindowedChunkingMachine = WindowedChunkingMachine.TestCase
TestWindowedOneByOneMachine = WindowedOneByOneMachine.TestCase
TestAllWindowedMachine = AllWindowedMachine.TestCase
TestAllWindowedChunkingMachine = AllWindowedChunkingMachine.TestCase
_SETTINGS = settings(max_examples=50, stateful_step_count=50, deadline=None)
TestWindowedMachine.settings = _SETTINGS
TestWindowedChunkingMachine.settings = _SETTINGS
TestWindowedOneByOneMachine.settings = _SETTINGS
TestAllWindowedMachine.settings = _SETTINGS
TestAllWindowedChunkingMachine.settings = _SETTINGS
