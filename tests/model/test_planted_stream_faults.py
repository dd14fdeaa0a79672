"""Faults planted in loads that are streamed: the search finds each of them, too."""

from __future__ import annotations

from typing import Any

import pytest
from lossy_shelf import LossyShelf
from planted import PlantedFaults

from lmcache_rs.cache_engine import Loaded
from lmcache_rs.vllm_v1.streams import Stream, Streams

DELIVERED = "what was promised is delivered or reported"
OVER = "a load that is said to be over writes nothing"
OWN = "a request reads its own prefix"
FAULTS = PlantedFaults()
fault = FAULTS.fault


@fault(DELIVERED, OWN)
def a_stream_that_ends_early_is_taken_for_whole(plant: pytest.MonkeyPatch) -> None:
    outcome = Stream.outcome

    def whole(stream: Any) -> Loaded:
        loaded = outcome(stream)
        return loaded._replace(end=stream.req.load_spec.lmcache_cached_tokens)

    plant.setattr(Stream, "outcome", whole)


@fault(DELIVERED, OWN)
def a_window_goes_to_the_blocks_before_its_own(plant: pytest.MonkeyPatch) -> None:
    copy = Streams._copy

    def shifted(streams: Any, stream: Any, first: int, end: int, source: Any = None) -> Any:
        is_moved = first > stream.first and source is not None
        if is_moved:
            ids = stream.req.block_ids
            stream.req.block_ids = ids[:1] + ids[:-1]
        try:
            return copy(streams, stream, first, end, source)
        finally:
            if is_moved:
                stream.req.block_ids = ids

    plant.setattr(Streams, "_copy", shifted)


@fault(DELIVERED, OWN)
def what_lies_behind_a_failed_copy_counts(plant: pytest.MonkeyPatch) -> None:
    settle = Stream._settle

    def forgives(stream: Any) -> None:
        settle(stream)
        stream._is_torn = False

    plant.setattr(Stream, "_settle", forgives)


@fault(OVER, DELIVERED, OWN)
def a_stream_that_nobody_wants_is_over_while_it_copies(plant: pytest.MonkeyPatch) -> None:
    def stop(streams: Any, req_id: str) -> None:
        for stream in streams._all():
            if stream.req.req_id == req_id:
                stream._has_ended = True
                stream._over.set()

    plant.setattr(Streams, "stop", stop)


@pytest.mark.parametrize("name", FAULTS)
def test_the_search_finds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS.require_found(name, monkeypatch, LossyShelf)
