"""What keys are made of: nothing is forgotten, and nothing that says no more than where or when."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_rs import (
    ChunkedTokenDatabase,
    LMCacheEngineConfig,
    LMCacheMetadata,
    SegmentTokenDatabase,
)
from lmcache_rs.identity import Identity, file_name
from lmcache_rs.key import Namespaces

words = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12).filter(
    lambda text: bool(text.strip()) and text != "unstated" and text.lower().strip() != "auto"
)
names = words.filter(lambda text: not text.startswith("torch."))
counts = st.integers(1, 2**20)
metadatas = st.builds(
    LMCacheMetadata,
    names,
    st.just(8),
    st.integers(0, 7),
    names,
    model_fingerprint=words,
    stored_form=st.sampled_from(["OPAQUE", "KV_T2D", "KV_MLA_FMT"]),
    layout_id=words,
    block_size=counts,
    num_layers=counts,
    num_kv_heads=counts,
    head_size=counts,
    tensor_parallel_rank=st.integers(0, 3),
    tensor_parallel_size=st.just(4),
    pipeline_parallel_rank=st.integers(0, 1),
    pipeline_parallel_size=st.just(2),
)
identities = st.builds(
    Identity,
    metadata=metadatas,
    chunk_size=counts,
    chain=words,
    hash_algorithm=words,
    hash_block=counts,
    none_hash=words,
    adapter=words,
    epoch=words,
    registered=st.just({}),
)
TOKEN_FORMS = {"KV_T2D", "KV_MLA_FMT"}


def text(identity: Identity, tags: dict[str, Any] | None = None) -> str:
    return Namespaces(identity).text(tags)


@settings(deadline=None)
@given(identities, identities)
def test_identities_that_differ_in_any_one_field_share_no_key(
    one: Identity, other: Identity
) -> None:
    assert text(one) == text(dataclasses.replace(one))
    for field in dataclasses.fields(Identity):
        theirs = getattr(other, field.name)
        if field.name != "metadata" and theirs != getattr(one, field.name):
            assert text(dataclasses.replace(one, **{field.name: theirs})) != text(one), field.name
    for fact in dataclasses.fields(LMCacheMetadata):
        theirs = getattr(other.metadata, fact.name)
        if theirs == getattr(one.metadata, fact.name):
            continue
        metadata = dataclasses.replace(one.metadata, **{fact.name: theirs})
        does_not_show = fact.name == "block_size" and one.metadata.stored_form in TOKEN_FORMS
        changed = text(dataclasses.replace(one, metadata=metadata))
        assert (changed == text(one)) == does_not_show, fact.name


@settings(deadline=None)
@given(identities, st.dictionaries(words, words, min_size=1, max_size=3), words, words)
def test_tags_are_part_of_it_whatever_their_order(
    identity: Identity, tags: dict[str, str], name: str, value: str
) -> None:
    given_tags = {f"lmcache.tag.{name}": value for name, value in tags.items()}
    shuffled = dict(reversed(given_tags.items()))
    assert text(identity, given_tags) == text(identity, shuffled)
    assert text(identity, given_tags) != text(identity)
    more = {**given_tags, f"lmcache.tag.{name}": value}
    assert (text(identity, more) == text(identity, given_tags)) == (more == given_tags)


def test_no_field_has_a_default() -> None:
    for field in dataclasses.fields(Identity):
        assert field.default is dataclasses.MISSING, field.name
        assert field.default_factory is dataclasses.MISSING, field.name
    with pytest.raises(TypeError, match="epoch"):
        Identity(  # type: ignore[call-arg]
            metadata=LMCacheMetadata("m", 1, 0, "float32"),
            chunk_size=1,
            chain="own",
            hash_algorithm="h",
            hash_block=1,
            none_hash="",
            adapter="",
            registered={},
        )


NAMES = [
    "org/model",
    "org-model",
    "org_model",
    "org--model",
    "org%2Fmodel",
    "org@model",
    "Org/Model",
    "é",
    "e\u0301",
    "m" * 300,
    "m" * 299 + "n",
    "\U0010ffff" * 300,
]


def test_model_names_stay_apart_and_can_be_read_back() -> None:
    def keys(name: str) -> list[Any]:
        config = LMCacheEngineConfig.from_defaults(chunk_size=4)
        database = ChunkedTokenDatabase(config, LMCacheMetadata(name, 1, 0, "float32"))
        return [key for _, _, key in database.process_tokens(list(range(8)))]

    seen: set[str] = set()
    files: set[str] = set()
    for name in NAMES:
        for key in keys(name):
            again = type(key).from_string(key.to_string())
            assert again == key
            assert again.model_name == name
            seen.add(key.to_string())
            files.add(file_name(key))
    assert len(seen) == len(files) == 2 * len(NAMES)
    assert {len(name) for name in files} == {64}


def test_a_name_that_is_too_long_is_refused_with_the_reason() -> None:
    config = LMCacheEngineConfig.from_defaults()
    with pytest.raises(ValueError, match=r"takes \d+ bytes, most of them in model.* 16384"):
        ChunkedTokenDatabase(config, LMCacheMetadata("x" * 20_000, 1, 0, "float32"))
    database = ChunkedTokenDatabase(config, LMCacheMetadata("m", 1, 0, "float32"))
    tags = {"lmcache.tag.team": "é" * 3000}
    with pytest.raises(ValueError, match=r"most of them in tag\.team"):
        database.namespaces.text(tags)


def test_segments_and_prefixes_of_the_same_tokens_are_not_the_same_chunks() -> None:
    config = LMCacheEngineConfig.from_defaults(chunk_size=4)
    metadata = LMCacheMetadata("m", 1, 0, "float32")
    chunked = ChunkedTokenDatabase(config, metadata)
    segmented = SegmentTokenDatabase(config, metadata, separator=[99])
    ((_, _, prefix),) = chunked.process_tokens([1, 2, 3, 4])
    ((_, _, segment),) = segmented.process_tokens([1, 2, 3, 4])
    assert prefix != segment


def test_another_start_of_the_chain_is_another_namespace() -> None:
    config = LMCacheEngineConfig.from_defaults(chunk_size=4)
    metadata = LMCacheMetadata("m", 1, 0, "float32")
    spaces = {
        ChunkedTokenDatabase(config, metadata, none_hash=none_hash).namespaces.text()
        for none_hash in (None, bytes(32), bytes([1]) * 32)
    }
    assert len(spaces) == 3


def test_an_engines_hashes_are_taken_and_tokens_refused() -> None:
    config = LMCacheEngineConfig.from_defaults(chunk_size=4, chain="engine")
    database = ChunkedTokenDatabase(config, LMCacheMetadata("m", 1, 0, "float32"))
    with pytest.raises(ValueError, match="'engine'.*give these, not tokens"):
        database.process_tokens([1, 2, 3, 4])
    ((start, end, key),) = database.process_tokens(hashes=[bytes(32)], offsets=[4])
    assert (start, end) == (0, 4)
    own = LMCacheEngineConfig.from_defaults(chunk_size=4)
    theirs = ChunkedTokenDatabase(own, LMCacheMetadata("m", 1, 0, "float32"))
    ((_, _, other),) = theirs.process_tokens(hashes=[bytes(32)], offsets=[4])
    assert key != other


PATHS: list[Callable[[Any, Any], object]] = [
    lambda database, tags: database.namespaces.text(tags),
    lambda database, tags: [
        str(key) for *_, key in database.process_tokens([1] * 8, request_configs=tags)
    ],
    lambda database, tags: [
        str(key)
        for *_, key in database.process_tokens(
            hashes=[bytes(32)], offsets=[4], request_configs=tags
        )
    ],
]


@pytest.mark.parametrize("path", PATHS)
def test_tags_reach_every_path(path: Callable[[Any, Any], object]) -> None:
    config = LMCacheEngineConfig.from_defaults(chunk_size=4)
    database = ChunkedTokenDatabase(config, LMCacheMetadata("m", 1, 0, "float32"))
    tags = [None, {"lmcache.tag.a": "1"}, {"lmcache.tag.a": "2"}, {"lmcache.tag.b": "1"}]
    for one, other in itertools.combinations(tags, 2):
        assert path(database, one) != path(database, other)
    assert path(database, {"lmcache.skip_save": True}) == path(database, None)
