"""What is under way for a lookup, and what came of it until somebody takes it: `EventManager`."""

from __future__ import annotations

import enum
import threading
from concurrent.futures import Future
from typing import Any


class EventType(enum.Enum):
    """What an event is about."""

    LOADING = "loading"
    """Chunks on their way from lower tiers into host memory."""


class EventStatus(enum.Enum):
    """How far an event is."""

    NOT_FOUND = "not found"
    ONGOING = "ongoing"
    DONE = "done"


class EventManager:
    """Events by kind and lookup id, at most one each. Any thread may call.

    Unlike LMCache's, an event leaves with whoever takes it: its result is handed over once, and so
    is what that holds.
    """

    def __init__(self) -> None:
        self._events: dict[tuple[EventType, str], Future[Any]] = {}
        self._lock = threading.Lock()

    def add_event(self, event_type: EventType, event_id: str, future: Future[Any]) -> None:
        """Enters an event, whose result `future` will have.

        Raises:
            ValueError: There is one of that kind and id; take it first.
        """
        with self._lock:
            if (event_type, event_id) in self._events:
                raise ValueError(
                    f"there is a {event_type.value} event {event_id!r} already; pop_event it first"
                )
            self._events[event_type, event_id] = future

    def get_event_status(self, event_type: EventType, event_id: str) -> EventStatus:
        """How far the event is."""
        with self._lock:
            future = self._events.get((event_type, event_id))
        if future is None:
            return EventStatus.NOT_FOUND
        return EventStatus.DONE if future.done() else EventStatus.ONGOING

    def pop_event(self, event_type: EventType, event_id: str) -> Future[Any] | None:
        """Takes the event, whatever its status; None if there is none."""
        with self._lock:
            return self._events.pop((event_type, event_id), None)

    def __len__(self) -> int:
        with self._lock:
            return len(self._events)
