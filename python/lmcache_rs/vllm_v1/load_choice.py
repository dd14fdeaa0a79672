"""Whether a load holds up the step or runs beside others: `LoadChoice`, and the measured cost."""

from __future__ import annotations

import collections

ASSUMED_BYTES_PER_SECOND = 2e9
"""What a processor's core copies on a poor day; taken until the worker half has measured."""

LEAST_BYTES = 256 << 10
"""Of smaller copies most of the time is not the copy's."""

COPIES_KEPT = 8


class LoadSpeed:
    """Bytes per second into the engine's blocks: the best of the last copies.

    What disturbs a copy makes it slower and never quicker, and of some no more is known than that
    they were over by a certain time.
    """

    def __init__(self) -> None:
        self._last = collections.deque([ASSUMED_BYTES_PER_SECOND], maxlen=COPIES_KEPT)

    def note(self, num_bytes: int, seconds: float) -> None:
        """A copy that took no longer than this."""
        if num_bytes >= LEAST_BYTES and seconds > 0:
            self._last.append(num_bytes / seconds)

    @property
    def bytes_per_second(self) -> float:
        """What the next copy may be expected to do."""
        return max(self._last)


class LoadChoice:
    """Says of each load whether the step waits for it.

    A synchronous load makes every request of the step wait, an asynchronous one costs its own
    request at least one step more. So the first loads of a step are synchronous, as many as the
    budget pays for, and the first one of all where nobody else is there to be held up; and none is
    where vLLM has no safe answer to one that fails.

    Args:
        budget_ms: Milliseconds that all synchronous loads of one step may take; 0 for no such load.
        token_bytes: Bytes of one token's KV, all layers together.
        has_safe_failure: Whether vLLM recovers from a synchronous load that fails.
        keeps_all_blocks: Whether the engine keeps the blocks of all tokens, not of a window alone.
    """

    def __init__(
        self,
        budget_ms: float,
        token_bytes: int,
        *,
        has_safe_failure: bool = True,
        keeps_all_blocks: bool = True,
    ) -> None:
        # After an asynchronous load of a whole request vLLM takes one step back, to compute the
        # last token: behind a window, the first block that this token needs may be gone by then.
        self.may_load_last_token = keeps_all_blocks
        self._budget_s = budget_ms / 1e3 if has_safe_failure else 0.0
        self._token_bytes = token_bytes
        self._bytes_per_second = ASSUMED_BYTES_PER_SECOND
        self._spent_s = 0.0
        self._others_run = False

    def is_async(self, num_tokens: int) -> bool:
        """Whether a load of so many tokens is to run beside the steps."""
        if not self._budget_s:
            return True
        if not self._others_run:
            return False
        return self._spent_s + self.seconds(num_tokens) > self._budget_s

    def take(self, num_tokens: int) -> None:
        """A synchronous load of so many tokens goes ahead in the step that is being described."""
        self._spent_s += self.seconds(num_tokens)
        self._others_run = True

    def begin_step(self, *, others_run: bool) -> None:
        """The next step has its own budget; `others_run` says whether the last one computes."""
        self._spent_s = 0.0
        self._others_run = others_run

    def measured(self, bytes_per_second: float) -> None:
        """How fast loads are; 0 says nothing."""
        if bytes_per_second > 0:
            self._bytes_per_second = bytes_per_second

    def seconds(self, num_tokens: int) -> float:
        """In which so many tokens get from host memory into the engine's blocks."""
        return num_tokens * self._token_bytes / self._bytes_per_second
