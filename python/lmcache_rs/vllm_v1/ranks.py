"""The ranks of one engine: what each calls its part of a chunk, and what all of them have said.

The scheduler half speaks of chunks without saying whose part is meant; every rank puts its own
place into the names, so that no rank ever finds another one's bytes. Back come the reports of
single ranks, each of what is new to that rank in that step. What all have done follows only from
everything that was said before, so it is put together here, where that is kept, and not on the way.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from lmcache_rs import _native
from lmcache_rs.lookup import Rank

if TYPE_CHECKING:
    from lmcache_rs.config import LMCacheMetadata
    from lmcache_rs.vllm_v1.metadata import LMCacheWorkerMetadata

MAX_KEPT = 4096

_OF_NO_RANK = {
    "worker": "0",
    "fact.num_layers": "any",
    "fact.pipeline_parallel_rank": "any",
    "fact.tensor_parallel_rank": "any",
}


class RankNames:
    """Namespaces with one rank's place in them, or with none.

    An engine whose ranks all hold the same has no use for the difference: its names are whole from
    the start.

    Args:
        fields: What a namespace has in these fields, by their names in its text.
    """

    def __init__(self, fields: Mapping[str, str]) -> None:
        self.fields = fields
        self._known: OrderedDict[str, str] = OrderedDict()

    @classmethod
    def of_rank(cls, metadata: LMCacheMetadata) -> RankNames:
        """Those under which a rank keeps its part."""
        if not _is_split(metadata):
            return cls({})
        facts = metadata.facts()
        own = {name: facts[name.removeprefix("fact.")] for name in _OF_NO_RANK if "fact." in name}
        return cls({"worker": str(metadata.worker_id), **own})

    @classmethod
    def of_no_rank(cls, metadata: LMCacheMetadata) -> RankNames:
        """Those that the scheduler half uses. No rank keeps anything under them."""
        return cls(_OF_NO_RANK if _is_split(metadata) else {})

    def of(self, namespace: str) -> str:
        """The namespace with these fields."""
        if not self.fields or not namespace:
            return namespace
        named = self._known.get(namespace)
        if named is None:
            named = _native.namespace_with_fields(namespace, self.fields)
            self._known[namespace] = named
            if len(self._known) > MAX_KEPT:
                self._known.popitem(last=False)
        return named


def _is_split(metadata: LMCacheMetadata) -> bool:
    """Whether ranks hold different parts of a chunk."""
    return metadata.world_size > 1 or (metadata.pipeline_parallel_size or 1) > 1


class RankBooks:
    """What the ranks of an engine have said so far, put together.

    Args:
        ranks: All of them.
        storing: Those that keep KV, where the others read it from them; None for all.
    """

    def __init__(self, ranks: Iterable[Rank], storing: Iterable[Rank] | None = None) -> None:
        self._ranks = frozenset(ranks)
        self._storing = self._ranks if storing is None else frozenset(storing)
        self.lookup_ids: dict[Rank, str] = {}
        # By rank, each counted by the rank itself.
        self.failures: dict[Rank, int] = {}
        self._saves_ended: dict[Rank, int] = {}
        self._load_speeds: dict[Rank, float] = {}
        self._loaded_tokens: dict[Rank, int] = {}
        self._stored_tokens: dict[Rank, int] = {}
        self.with_lower_tiers: set[Rank] = set()

    def take_in(self, told: LMCacheWorkerMetadata) -> None:
        """One rank's report; what it does not say again stands."""
        rank = told.rank
        self.lookup_ids = self.lookup_ids | told.lookup_ids
        self.failures = self.failures | {rank: max(self.failures.get(rank, 0), told.failures)}
        if told.saves_ended is not None:
            self._saves_ended[rank] = max(self._saves_ended.get(rank, 0), told.saves_ended)
        if told.load_bytes_per_second > 0:
            self._load_speeds[rank] = told.load_bytes_per_second
        if told.has_lower_tiers:
            self.with_lower_tiers.add(rank)
        for sums, of_requests in (
            (self._loaded_tokens, (each.loaded_tokens for each in told.outcomes.values())),
            (self._stored_tokens, (each.stored_tokens for each in told.outcomes.values())),
        ):
            sums[rank] = sums.get(rank, 0) + sum(of_requests)

    @property
    def are_all_known(self) -> bool:
        """Whether every rank has said where its store is, or that it can read another's."""
        return self.lookup_ids.keys() == self._ranks

    @property
    def all_have_lower_tiers(self) -> bool:
        """Whether every rank has tiers below its host memory."""
        return self.with_lower_tiers == self._ranks

    @property
    def stores(self) -> dict[Rank, str]:
        """Where the ranks that keep KV can be asked."""
        return {rank: name for rank, name in self.lookup_ids.items() if rank in self._storing}

    @property
    def saves_ended(self) -> int:
        """The last step that, with all before it, has no save under way on any rank."""
        return self.least(self._saves_ended)

    @property
    def loaded_tokens(self) -> int:
        """Tokens that every rank has loaded its part of."""
        return self.least(self._loaded_tokens)

    @property
    def stored_tokens(self) -> int:
        """Tokens that every rank which keeps KV has stored its part of."""
        return self.least_stored(self._stored_tokens)

    @property
    def load_bytes_per_second(self) -> float:
        """How fast the slowest rank loads, which all wait for; 0 while nobody knows."""
        return min(self._load_speeds.values(), default=0.0)

    def least(self, by_rank: Mapping[Rank, int]) -> int:
        """The least over all ranks; 0 for one that has said nothing."""
        return min(by_rank.get(rank, 0) for rank in self._ranks)

    def least_stored(self, by_rank: Mapping[Rank, int]) -> int:
        """As `least`, over the ranks that keep KV."""
        return min(by_rank.get(rank, 0) for rank in self._storing)
