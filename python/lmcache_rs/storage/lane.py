"""One thread that makes every call into one backend, and the two queues before it.

Asks (somebody waits for the answer) go before puts (nobody does). The backend is never called with
a lock held: the lock here guards the queues alone.
"""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from typing import Generic, TypeVar

from lmcache_rs._native import MemoryObj
from lmcache_rs.key import CacheEngineKey
from lmcache_rs.storage.faults import TierFaults

T = TypeVar("T")

_LONGEST_WAIT_S = threading.TIMEOUT_MAX / 2
"""For deadlines that are never to come: the system takes no infinite ones."""


class Answer(Future[T], Generic[T]):
    """The answer to an ask: there by a deadline, come what may.

    Args:
        miss: What the answer is where none has come.
        due: Time by which it is there, on the monotonic clock.
        lapsed: Called once if it was not.
    """

    def __init__(self, miss: Callable[[], T], due: float, lapsed: Callable[[], None]) -> None:
        super().__init__()
        self._miss = miss
        self._due = due
        self._lapsed = lapsed

    def settle(self, value: T) -> bool:
        """Gives the answer unless there is one; whether it was given."""
        try:
            self.set_result(value)
        except InvalidStateError:
            return False
        return True

    def settle_as_miss(self) -> bool:
        """Gives the answer of a chunk that is not there."""
        return self.settle(self._miss())

    def result(self, timeout: float | None = None) -> T:
        """The answer, at the latest by its deadline.

        Raises:
            TimeoutError: `timeout` seconds passed before that.
        """
        left = max(0.0, self._due - time.monotonic())
        if timeout is not None and timeout < left:
            return super().result(timeout)
        try:
            return super().result(left)
        except TimeoutError:
            if self.settle_as_miss():
                self._lapsed()
            return super().result(0)


@dataclass
class _Ask(Generic[T]):
    answer: Answer[T]
    call: Callable[[Answer[T]], T]
    verb: str


@dataclass
class Put:
    """A put that waits: the chunk and a handle that holds it."""

    key: CacheEngineKey
    memory_obj: MemoryObj
    nbytes: int


class Lane:
    """See the module documentation. The thread starts with the first job.

    Args:
        name: Of the thread.
        put: Makes one put.
        end: Ends the backend.
        deadline_s: Seconds that an ask may take, waiting included.
        max_queued_bytes: Bytes of the puts that may wait.
        faults: Counts what goes wrong.
    """

    def __init__(
        self,
        name: str,
        *,
        put: Callable[[Put], None],
        end: Callable[[], None],
        deadline_s: float,
        max_queued_bytes: int,
        faults: TierFaults,
    ) -> None:
        self._name = name
        self._put = put
        self._end = end
        self._deadline_s = min(deadline_s, _LONGEST_WAIT_S)
        self._max_queued_bytes = max_queued_bytes
        self._faults = faults
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._asks: deque[_Ask[object]] = deque()
        self._puts: OrderedDict[str, Put] = OrderedDict()
        self._queued_bytes = 0
        self._in_hand: Put | _Ask[object] | None = None
        self._since = 0.0
        self._closing = False
        self._abandoned = False
        self._ended = False
        self._thread: threading.Thread | None = None

    # --- what callers call --------------------------------------------------------------------

    def ask(self, verb: str, call: Callable[[Answer[T]], T], miss: Callable[[], T]) -> Answer[T]:
        """Has the thread call `call`, which may look whether its answer is still waited for.

        The answer is `miss()` if the call raises, if the deadline comes first, if the thread has
        been in another call for longer than one may take, or if the lane is closed.
        """
        self._require_own_process()
        found = f"no answer within {self._deadline_s} s"
        answer: Answer[T] = Answer(
            miss,
            time.monotonic() + self._deadline_s,
            lambda: self._faults.note("deadline", verb, found),
        )
        refused = None
        with self._changed:
            if threading.current_thread() is self._thread:
                refused = "reentry", "the backend asks its own tier from within a call"
            elif self._closing:
                refused = "closed", "the tier is closed"
            elif self._in_hand and time.monotonic() - self._since > self._deadline_s:
                refused = "stalled", "the backend has not come back from an earlier call"
            else:
                refused = self._start()
                if refused is None:
                    self._asks.append(_Ask(answer, call, verb))  # type: ignore[arg-type]
                    self._changed.notify_all()
        if refused is not None:
            reason, found = refused
            self._faults.note(reason, verb, found)
            answer.settle_as_miss()
        return answer

    def offer(self, put: Put) -> bool | None:
        """Queues a put: True; False if there is no room; None if one of that key is queued."""
        self._require_own_process()
        name = str(put.key)
        with self._changed:
            if name in self._puts:
                return None
            if self._closing or self._queued_bytes + put.nbytes > self._max_queued_bytes:
                return False
            refused = self._start()
            if refused is None:
                self._puts[name] = put
                self._queued_bytes += put.nbytes
                self._changed.notify_all()
        if refused is not None:
            reason, found = refused
            self._faults.note(reason, "put", found, key=put.key)
        return refused is None

    def withdraw(self, selects: Callable[[CacheEngineKey], bool]) -> int:
        """Takes the puts of these keys out of the queue; how many there were."""
        self._require_own_process()
        with self._changed:
            names = [name for name, put in self._puts.items() if selects(put.key)]
            withdrawn = [self._puts.pop(name) for name in names]
            self._queued_bytes -= sum(put.nbytes for put in withdrawn)
            self._changed.notify_all()
        return len(withdrawn)

    def queued(self) -> tuple[int, int]:
        """Puts that wait or are being made, and their bytes; walked."""
        with self._changed:
            puts = list(self._puts.values())
            if isinstance(self._in_hand, Put):
                puts.append(self._in_hand)
        return len(puts), sum(put.nbytes for put in puts)

    def flush(self, deadline_s: float) -> bool:
        """Waits until no put waits or is being made; false if the deadline came first."""
        self._require_own_process()

        def is_done() -> bool:
            return not self._puts and not isinstance(self._in_hand, Put)

        with self._changed:
            if threading.current_thread() is self._thread:
                return False
            return self._changed.wait_for(is_done, min(deadline_s, _LONGEST_WAIT_S))

    def close(self, deadline_s: float) -> bool:
        """Takes nothing more, makes the puts that wait, ends the backend. Idempotent.

        False if the deadline came first: the puts that still wait are then dropped, and the thread
        is left to the call that it does not come back from.
        """
        self._require_own_process()
        with self._changed:
            self._closing = True
            refused = self._start()
            self._changed.notify_all()
            if threading.current_thread() is self._thread:
                return False
            ended = refused is None and self._changed.wait_for(
                lambda: self._ended, min(deadline_s, _LONGEST_WAIT_S)
            )
            waiting, dropped = self._give_up()
        if refused is not None:
            reason, found = refused
            self._faults.note(reason, "close", found)
        for answer in waiting:
            answer.settle_as_miss()
        if dropped:
            self._faults.note("unfinished", "close", f"{len(dropped)} puts were not made in time")
        return ended

    def abandon(self) -> None:
        """Ends the lane without waiting, its puts dropped; for owners that went without a close.

        Called wherever the collector runs, so it leaves the queues to the thread.
        """
        if os.getpid() != self._pid:
            return
        self._closing = self._abandoned = True
        with self._changed:
            self._changed.notify_all()

    # --- inside -------------------------------------------------------------------------------

    def _require_own_process(self) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"this tier was made in process {self._pid} and is used in its fork {os.getpid()}; "
                "make a new one here, or start the process with the spawn method"
            )

    def _give_up(self) -> tuple[list[Answer[object]], list[Put]]:
        """What nobody will do any more, to be let go of where no lock is held."""
        waiting = [ask.answer for ask in self._asks]
        if isinstance(self._in_hand, _Ask):
            waiting.append(self._in_hand.answer)
        dropped = list(self._puts.values())
        self._asks.clear()
        self._puts.clear()
        self._queued_bytes = 0
        return waiting, dropped

    def _start(self) -> tuple[str, str] | None:
        """Starts the thread unless it runs; the reason and what was found, if there can be none."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                return "no_thread", str(error)
            self._thread = thread
        return None

    def _run(self) -> None:
        while self._take():
            in_hand = self._in_hand
            try:
                if isinstance(in_hand, Put):
                    self._put(in_hand)
                elif in_hand is not None and not in_hand.answer.done():
                    in_hand.answer.settle(in_hand.call(in_hand.answer))
            except BaseException as error:  # whatever it is, it is the backend's own
                if isinstance(in_hand, Put):
                    self._faults.note("error", "put", None, key=in_hand.key, error=error)
                elif in_hand is not None:
                    self._faults.note("error", in_hand.verb, None, error=error)
                    in_hand.answer.settle_as_miss()
                # Whoever keeps the exception does not keep what its frames held.
                traceback.clear_frames(error.__traceback__)
            # What it held ends here, not with the next job.
            del in_hand
            with self._changed:
                self._in_hand = None
                self._changed.notify_all()
        try:
            self._end()
        except BaseException as error:
            self._faults.note("error", "close", None, error=error)
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _take(self) -> bool:
        """Takes the next job in hand; false when all is done and the lane is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._asks or self._puts or self._closing)
            if self._abandoned:
                self._give_up()
                return False
            if self._asks:
                self._in_hand = self._asks.popleft()
            elif self._puts:
                _, put = self._puts.popitem(last=False)
                self._queued_bytes -= put.nbytes
                self._in_hand = put
            else:
                return False
            self._since = time.monotonic()
            return True
