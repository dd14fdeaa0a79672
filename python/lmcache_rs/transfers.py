"""What a copy that goes on in the background looks like from outside: `Transfer`.

Whoever copies, a thread of ours or a GPU behind an event, answers the same three questions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

Outcome = TypeVar("Outcome")


class Ticket(Protocol):
    """A copy under way, as whoever copies knows it."""

    def is_done(self) -> bool:
        """Whether it has ended, one way or another."""
        ...

    def wait(self, timeout_ms: int | None = None) -> bool:
        """Returns once it has ended, or after `timeout_ms`; whether it has."""
        ...

    def outcome(self) -> list[int]:
        """What it did, in numbers; raises what became of it."""
        ...


class Transfer(Generic[Outcome]):
    """A store or load that was handed over whole.

    Until it is done the blocks it copies between are its own: nobody else may write them, and
    those of a load may not be read. Dropping the handle ends nothing.

    Args:
        ticket: The copy; None where there was nothing to do.
        outcome: Makes the outcome of the ticket's numbers.
        nothing: The outcome of doing nothing.
    """

    def __init__(
        self, ticket: Ticket | None, outcome: Callable[..., Outcome], nothing: Outcome
    ) -> None:
        self._ticket = ticket
        self._outcome = outcome
        self._nothing = nothing

    def is_done(self) -> bool:
        """Whether it has ended: its blocks are free to be used."""
        return self._ticket is None or self._ticket.is_done()

    def wait(self, timeout_ms: int | None = None) -> bool:
        """Returns once it has ended, or after `timeout_ms`; whether it has."""
        return self._ticket is None or self._ticket.wait(timeout_ms)

    def outcome(self) -> Outcome:
        """What it did.

        Raises:
            RuntimeError: It has not ended, or failed; a failed store has stored nothing, and what a
                failed load has written is unknown.
        """
        return self._nothing if self._ticket is None else self._outcome(*self._ticket.outcome())
