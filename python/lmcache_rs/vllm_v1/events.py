"""KV events: what the cache holds, told through vLLM's own channel (docs/kv-events.md).

Each worker half reads its store's sink once a step (`EventReports`) and hands a `RankReport` to
vLLM, which carries it to the scheduler half. There `KVEventStream` keeps the books of all ranks,
puts a chunk's tokens and vLLM's own block hashes to it, and gives vLLM what it publishes.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from vllm.distributed.kv_events import (
    MEDIUM_CPU,
    MEDIUM_STORAGE,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
    KVConnectorKVEvents,
)
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    to_event_extra_keys,
)
from vllm.v1.kv_cache_interface import (
    get_kv_cache_spec_kind,
    get_kv_cache_spec_sliding_window,
)

from lmcache_rs.key import HASH_BYTES
from lmcache_rs.vllm_v1 import compat

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

    from lmcache_rs import _native

LOCAL_CPU = "local_cpu"
LOCAL_TIERS = frozenset({LOCAL_CPU, "local_disk"})
"""Tiers of this host; all others are somewhere else."""
SALT = "cache_salt"
"""vLLM's tag of a salt among a block's extra keys."""
MIN_KEPT = 4096
"""Chunks that are described and stored nowhere, at least; see `KVEventStream`."""

ToldChunk = tuple[bool, str, str, bytes, int, int]
"""Whether it is stored from here on; tier, namespace, hash, bytes, tokens."""


def are_wanted(vllm_config: VllmConfig) -> bool:
    """Whether the operator has switched vLLM's KV events on."""
    events = vllm_config.kv_events_config
    return events is not None and events.enable_kv_cache_events


class RankReport(NamedTuple):
    """What one rank's store took in and gave up since its last report.

    Args:
        rank: The worker's number, from 0 on.
        is_anew: Whether `chunks` are all that the rank holds, and what was reported before is void.
        chunks: In the order in which it happened.
    """

    rank: int
    is_anew: bool
    chunks: list[ToldChunk]


class LMCacheKVEvents(KVConnectorKVEvents):
    """Reports on their way to the scheduler half.

    vLLM takes a container's contents for finished events, which are the same on all ranks and come
    in the same step. They are neither here: ranks evict at different times, and copies end when
    they end. So reports pass as they are, each with its rank, and are put together where all
    that came before is known.
    """

    def __init__(self, reports: list[RankReport]) -> None:
        self.reports = reports

    def add_events(self, events: list[Any]) -> None:
        """Takes in another rank's reports."""
        self.reports.extend(events)

    def get_all_events(self) -> list[Any]:
        """The reports."""
        return list(self.reports)

    def aggregate(self) -> LMCacheKVEvents:
        """Nothing is put together here."""
        return self

    def increment_workers(self, count: int = 1) -> None:
        """Reports name their rank."""

    def get_number_of_workers(self) -> int:
        """Ranks that reported."""
        return len({report.rank for report in self.reports})

    def clear_events(self) -> None:
        """Drops the reports."""
        self.reports = []


class EventReports:
    """The worker half's side: reads the store's sink.

    Args:
        rank: This worker's number among those of its engine, from 0 on.
        sink: Where the store and the tiers tell.
    """

    def __init__(self, rank: int, sink: _native.EventSink) -> None:
        self._rank = rank
        self.sink = sink
        # Once vLLM asks for events it goes on asking; a connector around ours may not pass it on.
        self.are_asked_for = False

    def take(self) -> LMCacheKVEvents | None:
        """What changed since the last call; None if nothing did."""
        is_anew, chunks = self.sink.drain()
        if not is_anew and not chunks:
            return None
        return LMCacheKVEvents([RankReport(self._rank, is_anew, chunks)])


@dataclass(slots=True)
class _Content:
    """What a chunk holds, in the words of vLLM's events. `num_tiers` hold it now, on all ranks."""

    block_hashes: tuple[bytes, ...]
    parent: bytes | None = None
    token_ids: Sequence[int] = ()
    block_tokens: int = 0
    lora_id: int | None = None
    lora_name: str | None = None
    extra_keys: tuple[Any, ...] | None = None
    session_id: str | None = None
    num_tiers: int = 0


class _ChunkName(NamedTuple):
    namespace: str
    chunk_hash: bytes


class _Place(NamedTuple):
    tier: str
    chunk: _ChunkName


class KVEventStream:
    """The scheduler half's side: the books of all ranks, and the events that follow from them.

    A chunk is stored when the last of the ranks has it, and removed when the first of them has
    not. Its blocks are named by vLLM's own block hashes, as in vLLM's events of the accelerator's
    blocks. Chunks that part in their middle share the blocks before it, and namespaces (tags,
    adapters' files, resets) are no part of these names: of several chunks that hold a block, the
    first that comes and the last that goes are told.

    What a chunk holds is noted while its request is there (`note`) and kept as long as a tier holds
    the chunk. Chunks that none holds (yet) are kept up to a bound that no engine's blocks can
    exceed: what is on its way into a tier comes from them.

    Args:
        num_ranks: Workers that keep KV.
        chunk_size: Tokens of a chunk, a multiple of `block_tokens`.
        block_tokens: Tokens of one of the engine's blocks.
        hash_tokens: Tokens from one of the engine's block hashes to the next.
        num_blocks: The engine's blocks.
        kind: vLLM's word for the kind of cache.
        window: Tokens of its sliding window, if it has one.
        common_name: The namespace that the scheduler half uses where a rank names its own.
    """

    def __init__(
        self,
        *,
        num_ranks: int,
        chunk_size: int,
        block_tokens: int,
        hash_tokens: int,
        num_blocks: int,
        kind: str | None = None,
        window: int | None = None,
        common_name: Callable[[str], str] = str,
    ) -> None:
        self._common_name = common_name
        self._all_ranks = (1 << num_ranks) - 1
        self._chunk_size = chunk_size
        self._block_tokens = block_tokens
        self._hash_tokens = hash_tokens
        self._kind = kind
        self._window = window
        self._max_kept = MIN_KEPT + 2 * num_blocks * block_tokens // chunk_size
        # One bit a rank.
        self._holders: dict[_Place, int] = {}
        self._contents: dict[_ChunkName, _Content] = {}
        # Of these, the ones that no tier holds, the longest unused first.
        self._kept: dict[_ChunkName, None] = {}
        # What was told, by tier and block hash: how many chunks hold the block.
        self._told: dict[tuple[str, bytes], int] = {}
        self._events: list[KVCacheEvent] = []
        self._manager: KVCacheManager | None = None
        self._is_to_repeat = False

    @classmethod
    def of_engine(
        cls,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        chunk_size: int,
        common_name: Callable[[str], str] = str,
    ) -> KVEventStream:
        """The stream of an engine."""
        spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
        return cls(
            num_ranks=len(compat.storing_ranks_of(vllm_config, kv_cache_config)),
            chunk_size=chunk_size,
            block_tokens=compat.block_size_of(kv_cache_config),
            hash_tokens=compat.hash_block_size_of(kv_cache_config),
            num_blocks=kv_cache_config.num_blocks,
            kind=get_kv_cache_spec_kind(spec).value,
            window=get_kv_cache_spec_sliding_window(spec),
            common_name=common_name,
        )

    # --- what chunks hold ---------------------------------------------------------------------

    def note(self, request: Request, namespace: str, hashes: bytes) -> None:
        """A request's chunks, from its first one on, may be stored from now on."""
        for at in range(0, len(hashes), HASH_BYTES):
            name = _ChunkName(namespace, hashes[at : at + HASH_BYTES])
            if name not in self._contents:
                content = self._content(request, at // HASH_BYTES)
                if content is None:
                    return
                self._contents[name] = content
                self._kept[name] = None
            elif name in self._kept:
                self._keep(name)
        self._forget_old()

    def _content(self, request: Request, index: int) -> _Content | None:
        """What chunk `index` of a request holds; None where vLLM has not hashed that far."""
        start, end = index * self._chunk_size, (index + 1) * self._chunk_size
        stride = self._block_tokens // self._hash_tokens
        first, last = start // self._hash_tokens, end // self._hash_tokens
        links = request.block_hashes[first:last]
        if len(links) < last - first or end > len(request.all_token_ids):
            return None
        adapter = request.lora_request
        return _Content(
            block_hashes=tuple(bytes(link) for link in links[stride - 1 :: stride]),
            parent=bytes(request.block_hashes[first - 1]) if first else None,
            token_ids=array("q", request.all_token_ids[start:end]),
            block_tokens=self._block_tokens,
            lora_id=None if adapter is None else adapter.adapter_id,
            lora_name=None if adapter is None else adapter.name,
            extra_keys=self._extra_keys(request, start, end),
            session_id=getattr(request, "session_id", None),
        )

    def _extra_keys(self, request: Request, start: int, end: int) -> tuple[Any, ...] | None:
        """Of each block, what is hashed beside its tokens. Never a salt: it is a secret."""
        is_plain = not request.lora_request and not request.mm_features
        if is_plain and request.prompt_embeds is None:
            return None
        each: list[tuple[Any, ...] | None] = []
        for at in range(start, end, self._block_tokens):
            # From item 0 on: chunks are not noted in order.
            keys, _ = generate_block_hash_extra_keys(request, at, at + self._block_tokens, 0)
            each.append(tuple(key for key in keys or () if key[0] != SALT) or None)
        return tuple(to_event_extra_keys(each) or ())

    def _keep(self, name: _ChunkName) -> None:
        self._kept.pop(name, None)
        self._kept[name] = None

    def _forget_old(self) -> None:
        while len(self._kept) > self._max_kept:
            oldest = next(iter(self._kept))
            del self._kept[oldest], self._contents[oldest]

    # --- what ranks report --------------------------------------------------------------------

    def take_in(self, reports: Iterable[RankReport]) -> None:
        """Brings the books up to date."""
        for report in reports:
            bit = 1 << report.rank
            if report.is_anew:
                self._begin_anew(bit, report.chunks)
                continue
            for is_stored, tier, namespace, chunk_hash, *_ in report.chunks:
                place = self._place(tier, namespace, chunk_hash)
                if is_stored:
                    self._stored(place, bit)
                else:
                    self._removed(place, bit)
        self._forget_old()

    def _begin_anew(self, bit: int, chunks: list[ToldChunk]) -> None:
        """What a rank holds is told in full: only what is different now becomes an event."""
        now = {
            self._place(tier, namespace, chunk_hash): None
            for _, tier, namespace, chunk_hash, *_ in chunks
        }
        for place in [place for place, holders in self._holders.items() if holders & bit]:
            if place not in now:
                self._removed(place, bit)
        for place in now:
            self._stored(place, bit)

    def _place(self, tier: str, namespace: str, chunk_hash: bytes) -> _Place:
        return _Place(tier, _ChunkName(self._common_name(namespace), chunk_hash))

    def _stored(self, place: _Place, bit: int) -> None:
        holders = self._holders.get(place, 0)
        self._holders[place] = holders | bit
        if holders | bit != self._all_ranks or holders == self._all_ranks:
            return
        content = self._contents.get(place.chunk)
        if content is None:
            # Nobody has told what it holds; it is named by the one hash that is known.
            content = self._contents[place.chunk] = _Content((place.chunk.chunk_hash,))
        self._kept.pop(place.chunk, None)
        content.num_tiers += 1
        self._tell_stored(place.tier, content)

    def _removed(self, place: _Place, bit: int) -> None:
        holders = self._holders.get(place, 0)
        if not holders & bit:
            return
        self._holders[place] = holders & ~bit
        if not holders & ~bit:
            del self._holders[place]
        if holders != self._all_ranks:
            return
        content = self._contents[place.chunk]
        content.num_tiers -= 1
        if not content.num_tiers:
            if content.block_tokens:
                self._keep(place.chunk)
            else:
                # Whoever asks for the chunk next may say what it holds.
                del self._contents[place.chunk]
        gone = [link for link in content.block_hashes if self._count(place.tier, link, -1) == 0]
        if gone:
            self._events.append(_removed_event(place.tier, gone))

    def _tell_stored(self, tier: str, content: _Content) -> None:
        counts = [self._count(tier, link, 1) for link in content.block_hashes]
        if 1 in counts:
            # Who has a block has those before it.
            self._events.append(self._stored_event(tier, content, counts.index(1)))

    def _count(self, tier: str, link: bytes, change: int) -> int:
        count = self._told.pop((tier, link), 0) + change
        if count:
            self._told[tier, link] = count
        return count

    # --- what vLLM publishes ------------------------------------------------------------------

    def bind_kv_cache_manager(self, manager: KVCacheManager) -> None:
        """Takes in whose events are published ahead of ours."""
        self._manager = manager

    def watch_for_clears(self) -> None:
        """Looks whether vLLM is about to tell that it has emptied its own prefix cache.

        Its event names no medium, and a consumer may drop with it what we hold still.
        """
        queue = getattr(getattr(self._manager, "block_pool", None), "kv_event_queue", ())
        if any(isinstance(event, AllBlocksCleared) for event in queue):
            self._is_to_repeat = True

    def take(self) -> list[KVCacheEvent]:
        """The events since the last call, in order."""
        if self._is_to_repeat:
            self._is_to_repeat = False
            self._repeat()
        events, self._events = self._events, []
        return events

    def _repeat(self) -> None:
        """Tells again all that is held, taken back before: a consumer that dropped it has it then,
        and one that counts has it once."""
        told, self._told = self._told, {}
        for tier in {tier for tier, _ in told}:
            links = [link for of_tier, link in told if of_tier == tier]
            self._events.append(_removed_event(tier, links))
        for place, holders in self._holders.items():
            if holders == self._all_ranks:
                self._tell_stored(place.tier, self._contents[place.chunk])

    def _stored_event(self, tier: str, content: _Content, first: int) -> BlockStored:
        """A chunk's blocks from `first` on."""
        parent = content.block_hashes[first - 1] if first else content.parent
        extra_keys = content.extra_keys
        return BlockStored(
            block_hashes=_external(content.block_hashes[first:]),
            parent_block_hash=None if parent is None else _external([parent])[0],
            token_ids=list(content.token_ids[first * content.block_tokens :]),
            block_size=content.block_tokens,
            lora_id=content.lora_id,
            medium=_medium(tier),
            lora_name=content.lora_name,
            extra_keys=None if extra_keys is None else list(extra_keys[first:]),
            group_idx=0,
            kv_cache_spec_kind=self._kind,
            kv_cache_spec_sliding_window=self._window,
            locality=_locality(tier),
            ownership=_ownership(tier),
            session_id=content.session_id,
        )


def _removed_event(tier: str, links: Iterable[bytes]) -> BlockRemoved:
    return BlockRemoved(
        block_hashes=_external(links),
        medium=_medium(tier),
        group_idx=0,
        locality=_locality(tier),
        ownership=_ownership(tier),
    )


def _external(hashes: Iterable[bytes]) -> list[Any]:
    """Block hashes as vLLM publishes them: whole, or as the number that an operator asked for."""
    return [maybe_convert_block_hash(cast(Any, link)) for link in hashes]


def _medium(tier: str) -> str:
    return MEDIUM_CPU if tier == LOCAL_CPU else MEDIUM_STORAGE


def _locality(tier: str) -> str:
    return "LOCAL" if tier in LOCAL_TIERS else "REMOTE"


def _ownership(tier: str) -> str | None:
    return None if tier == LOCAL_CPU else tier
