"""Saves that go on behind the step that computed them, and the fences around their blocks.

A save is handed over when its step ends, and its blocks are only read from then on. They may be
neither freed nor overwritten before the copy is done, and vLLM knows of three ways to lose them:
a request ends (it keeps its blocks until it is named as sent), it is preempted, or its tokens are
computed anew. The last two are told in a step's description, and waited for before the step touches
any block. Where a window drops blocks, which is told nobody, that goes for every step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Self

from lmcache_rs.cache_engine import Stored
from lmcache_rs.key import HASH_BYTES
from lmcache_rs.transfers import Transfer

if TYPE_CHECKING:
    from lmcache_rs.vllm_v1.faults import Faults
    from lmcache_rs.vllm_v1.metadata import LMCacheConnectorMetadata, ReqMeta


@dataclass
class SaveFences:
    """What the scheduler half says of saves in a step.

    Args:
        step: The step's number; they count up.
        copied_first: Requests whose copies must be done before this step touches any block.
        copies_all_first: Whether that goes for all requests.
        awaited: Ended requests whose blocks vLLM keeps until they are named as sent.
    """

    step: int = 0
    copied_first: set[str] = field(default_factory=set)
    copies_all_first: bool = False
    awaited: set[str] = field(default_factory=set)


class SavedPart(NamedTuple):
    """Chunks of a request and the blocks that they lie in.

    Args:
        hashes: Packed hashes of neighbouring chunks.
        block_ids: Their blocks, from the first one's on.
        num_tokens: Their tokens.
    """

    hashes: bytes
    block_ids: list[int]
    num_tokens: int

    @classmethod
    def of(cls, req: ReqMeta, first: int, chunk_size: int, block_tokens: int) -> Self:
        """The request's full chunks from `first` on."""
        end = req.num_tokens // chunk_size
        return cls(
            req.hashes[first * HASH_BYTES : end * HASH_BYTES],
            req.block_ids[first * chunk_size // block_tokens :] if first else req.block_ids,
            (end - first) * chunk_size,
        )


class BackgroundSaves:
    """The worker half's saves that may not be done yet.

    Args:
        faults: Where faults of ours are noted.
        count: Told of each request and what it stored, once a save of it is done.
    """

    def __init__(self, faults: Faults, count: Callable[[ReqMeta, Stored], None]) -> None:
        self._faults = faults
        self._count = count
        self._under_way: list[tuple[int, ReqMeta, Transfer[Stored]]] = []
        # Ended requests that vLLM waits for and that were not named yet.
        self._awaited: set[str] = set()
        self._last_step = 0
        self._told_step = 0
        self.has_windows = False

    def add(self, step: int, req: ReqMeta, transfer: Transfer[Stored]) -> None:
        """A save that was handed over in a step."""
        if not transfer.is_done():
            self._under_way.append((step, req, transfer))
            return
        self._end(req, transfer)

    def note_step(self, step: int) -> None:
        """All that the step saves was handed over, or dropped."""
        self._last_step = max(self._last_step, step)

    def hold_back(self, metadata: LMCacheConnectorMetadata) -> None:
        """Returns once no copy reads a block that the step may free, give away or write."""
        fences = metadata.fences
        self.wait(None if self.has_windows or fences.copies_all_first else fences.copied_first)
        self.collect()

    def wait(self, req_ids: set[str] | None = None) -> None:
        """Returns once the saves of these requests, or all, are done."""
        for _, req, transfer in self._under_way:
            if req_ids is None or req.req_id in req_ids:
                transfer.wait()

    def take_sent(self, metadata: LMCacheConnectorMetadata) -> set[str]:
        """Ended requests whose blocks no copy reads any more; each is named once."""
        # Taken out of the description, so that a hook called again names nobody again.
        awaited, metadata.fences.awaited = metadata.fences.awaited, set()
        self._awaited |= awaited
        self.collect()
        busy = {req.req_id for _, req, _ in self._under_way}
        sent, self._awaited = self._awaited - busy, self._awaited & busy
        return sent

    def take_ended_step(self) -> int | None:
        """The last step that, with all before it, has no save under way; None if it was told."""
        self.collect()
        ended = min((step for step, _, _ in self._under_way), default=self._last_step + 1) - 1
        if ended <= self._told_step:
            return None
        self._told_step = ended
        return ended

    def collect(self) -> None:
        """Counts what was done since the last call."""
        under_way = []
        for save in self._under_way:
            _, req, transfer = save
            if transfer.is_done():
                self._end(req, transfer)
            else:
                under_way.append(save)
        self._under_way = under_way

    def _end(self, req: ReqMeta, transfer: Transfer[Stored]) -> None:
        try:
            self._count(req, transfer.outcome())
        except Exception as error:
            # It has ended all the same: whoever waits for it must hear that.
            self._faults.note("wait_for_save", error)
