"""Whether a load holds up the step or runs beside others: `LoadChoice`, and the measured cost."""

from __future__ import annotations

ASSUMED_BYTES_PER_SECOND = 2e9
"""What a processor's core copies on a poor day; taken until the worker half has measured."""

LEAST_BYTES = 256 << 10
"""Of smaller copies most of the time is not the copy's."""

_KEPT = 0.8


class LoadSpeed:
    """Bytes per second of the last copies into the engine's blocks; the old ones fade."""

    def __init__(self) -> None:
        self._bytes = 0.0
        self._seconds = 0.0

    def note(self, num_bytes: int, seconds: float) -> None:
        """A copy that was waited for from its start to its end."""
        if num_bytes >= LEAST_BYTES and seconds > 0:
            self._bytes = self._bytes * _KEPT + num_bytes
            self._seconds = self._seconds * _KEPT + seconds

    @property
    def bytes_per_second(self) -> float:
        """0 while nothing was measured."""
        return self._bytes / self._seconds if self._seconds else 0.0


class LoadChoice:
    """Says of each load whether the step waits for it.

    A synchronous load makes every request of the step wait, an asynchronous one costs its own
    request at least one step more. So the first loads of a step are synchronous, as many as the
    budget pays for; and none is where vLLM has no safe answer to one that fails.

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
        # An asynchronous load of a whole request is one that vLLM takes a step back from, to compute
        # the last token: behind a window the block that this token needs first may be gone by then.
        self.may_load_last_token = keeps_all_blocks
        self._budget_s = budget_ms / 1e3 if has_safe_failure else 0.0
        self._token_bytes = token_bytes
        self._bytes_per_second = ASSUMED_BYTES_PER_SECOND
        self._spent_s = 0.0

    def is_async(self, num_tokens: int) -> bool:
        """Whether a load of so many tokens is to run beside the steps."""
        if not self._budget_s:
            return True
        return self._spent_s + self._seconds(num_tokens) > self._budget_s

    def take(self, num_tokens: int) -> None:
        """A synchronous load of so many tokens goes ahead in the step that is being described."""
        self._spent_s += self._seconds(num_tokens)

    def begin_step(self) -> None:
        """The next step has its own budget."""
        self._spent_s = 0.0

    def measured(self, bytes_per_second: float) -> None:
        """How fast loads are; 0 says nothing."""
        if bytes_per_second > 0:
            self._bytes_per_second = bytes_per_second

    def _seconds(self, num_tokens: int) -> float:
        return num_tokens * self._token_bytes / self._bytes_per_second
