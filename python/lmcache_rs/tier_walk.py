"""A prompt's chunks between an engine's tensors and the tiers below host memory: `TierWalk`.

They go through pool memory a window at a time, so a prompt may be larger than the pool.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from lmcache_rs.gpu_connector import RegisteredCache
from lmcache_rs.key import keys_of

if TYPE_CHECKING:
    from lmcache_rs.storage import MemoryObj, StorageManager

MAX_WINDOW_BYTES = 256 << 20
"""Bytes of a window at most: one is copied while the next is read."""
PAGE_BYTES = 4096
WAIT_S = 5.0
"""Seconds that a store waits for puts to give memory back."""


def whole_pages(num_bytes: int) -> int:
    """Bytes that so many take in a pool, which gives whole pages."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


class TierWalk:
    """One prompt's walk.

    Args:
        storage: The tiers.
        registered: The engine's tensors.
        namespace: Everything but the tokens that decides the bytes.
        hashes: Packed hashes of the prompt's chunks, from the first one on.
        chunk_size: Tokens of a full chunk.
        num_tokens: Tokens that the hashes cover.
        slots: int64, one a token, at least `num_tokens`; -1 for tokens without a place.
    """

    def __init__(
        self,
        storage: StorageManager,
        registered: RegisteredCache,
        namespace: str,
        hashes: bytes,
        *,
        chunk_size: int,
        num_tokens: int,
        slots: Sequence[int],
    ) -> None:
        self._storage = storage
        self._registered = registered
        self._keys = keys_of(namespace, hashes)
        self._chunk_size = chunk_size
        self._num_tokens = num_tokens
        self._slots = slots
        self._chunk_bytes = whole_pages(registered.native.chunk_bytes(chunk_size))
        # Two windows are under way, and most of the pool stays with what it holds.
        window_bytes = min(MAX_WINDOW_BYTES, storage.capacity_bytes // 8)
        self._window = max(1, window_bytes // self._chunk_bytes)

    # --- the way down -------------------------------------------------------------------------

    def write_through(self, first: int) -> None:
        """Offers what host memory has of the chunks from `first` on to the tiers below."""
        self._storage.write_through(self._keys[first:])

    def store_from(self, first: int, *, is_queue_full: bool) -> int:
        """Stores the chunks from `first` on in the tiers below alone: tokens newly stored.

        Ends where there is no memory, and where no tier takes more. Before their queues are full
        it waits until they are empty; not for longer than `WAIT_S`, then the rest is not stored.

        Args:
            first: The first chunk, counted from the prompt's first one.
            is_queue_full: Whether as much was put just now as may wait.
        """
        storage, at, stored_tokens = self._storage, first, 0
        max_queued_bytes = storage.capacity_bytes // 4
        queued_bytes = max_queued_bytes if is_queue_full else 0
        while at < len(self._keys):
            known = storage.batched_contains(self._keys[at : at + self._window])
            if known:
                at += known
                continue
            starts, ends = self._placed_spans(at)
            num_bytes = len(starts) * self._chunk_bytes
            if queued_bytes and queued_bytes + num_bytes > max_queued_bytes:
                if not storage.flush(WAIT_S):
                    break
                queued_bytes = 0
            taken = self._put(at, starts, ends)
            if taken is None and queued_bytes and storage.flush(WAIT_S):
                queued_bytes = 0
                continue
            if not taken:
                break
            queued_bytes += num_bytes
            stored_tokens += sum(ends[:taken]) - sum(starts[:taken])
            at += taken
            if taken < len(starts):
                # Behind a gap nothing is found.
                break
        return stored_tokens

    def _put(self, at: int, starts: list[int], ends: list[int]) -> int | None:
        """Copies chunks out of the engine's tensors into the tiers' queues: how many were taken;
        None if there is no memory."""
        if not starts:
            return 0
        chunk_bytes = self._registered.native.chunk_bytes
        sizes = [chunk_bytes(end - start) for start, end in zip(starts, ends, strict=True)]
        objects = self._storage.batched_allocate(sizes)
        if objects is None:
            return None
        self._registered.gather(objects, *self._window_slots(starts, ends, 0))
        return self._storage.put_below(self._keys[at : at + len(objects)], objects)

    # --- the way up ---------------------------------------------------------------------------

    def load_from(self, end: int, *, skip: int) -> int:
        """Writes the stored chunks from the one of token `end` on into the engine's tensors: every
        token below what is returned is there then.

        A chunk that no tier gives in its deadline is the end. Chunks that fit into half of the pool
        are in host memory from then on; those behind them only pass through.

        Args:
            end: Every token below it is there now; the first token of a chunk, or `skip`.
            skip: Tokens below it are not written.
        """
        at = end // self._chunk_size
        ahead: Future[list[MemoryObj]] | None = None
        on_gpu = self._registered.device is not None
        # Whether there was less memory for what is read next than there will be: a window before it
        # is held by us, or by a GPU that is not done with it.
        is_held = on_gpu
        with ThreadPoolExecutor(1, "lmcache_rs-window") as reader:
            while at < len(self._keys):
                found = self._read(at) if ahead is None else ahead.result()
                ahead = None
                if not found:
                    if not is_held:
                        break
                    self._registered.settle()
                    is_held = False
                    continue
                # One window is copied and one is read, and all before them is out of the pool.
                self._registered.settle()
                first, at = at, at + len(found)
                if len(found) == self._window and at < len(self._keys):
                    with contextlib.suppress(RuntimeError):  # no thread: it is read in its turn
                        ahead = reader.submit(self._read, at)
                starts, ends = self._spans(first, len(found))
                self._registered.scatter(found, *self._window_slots(starts, ends, skip))
                end = max(end, ends[-1])
                del found
                is_held = on_gpu or ahead is not None
        return end

    def bring(self, first: int) -> list[MemoryObj]:
        """Brings the stored prefix of the chunks from `first` on into host memory, as far as half
        of the pool goes. They stay there as long as what is returned is held."""
        held: list[MemoryObj] = []
        end = min(len(self._keys), self._storage.capacity_bytes // 2 // self._chunk_bytes)
        while first + len(held) < end:
            found = self._read(first + len(held), end)
            held += found
            if len(found) < self._window:
                break
        return held

    def _read(self, at: int, end: int | None = None) -> list[MemoryObj]:
        """The stored prefix of a window, those chunks alone that have their tokens' bytes."""
        keys = self._keys[at:end][: self._window]
        half = self._storage.capacity_bytes // 2
        publish = (at + len(keys)) * self._chunk_bytes <= half
        found = self._storage.get_prefix(keys, publish=publish)
        chunk_bytes = self._registered.native.chunk_bytes
        for position, (start, end) in enumerate(zip(*self._spans(at, len(found)), strict=True)):
            if found[position].nbytes != chunk_bytes(end - start):
                return found[:position]
        return found

    # --- places -------------------------------------------------------------------------------

    def _spans(self, at: int, num_chunks: int) -> tuple[list[int], list[int]]:
        """The first token of each chunk, and the one behind its last."""
        size = self._chunk_size
        starts = [chunk * size for chunk in range(at, at + num_chunks)]
        return starts, [min(start + size, self._num_tokens) for start in starts]

    def _placed_spans(self, at: int) -> tuple[list[int], list[int]]:
        """The window's chunks up to the first with a token that has no place."""
        starts, ends = self._spans(at, min(self._window, len(self._keys) - at))
        for position, (start, end) in enumerate(zip(starts, ends, strict=True)):
            if -1 in self._slots[start:end]:
                return starts[:position], ends[:position]
        return starts, ends

    def _window_slots(
        self, starts: list[int], ends: list[int], skip: int
    ) -> tuple[list[int], list[int], Sequence[int]]:
        """The chunks' places among the slots of all of them; tokens below `skip` have none."""
        begin = starts[0]
        slots = self._slots[begin : ends[-1]]
        if skip > begin:
            slots = [-1] * (skip - begin) + list(slots[skip - begin :])
        return [start - begin for start in starts], [end - begin for end in ends], slots
