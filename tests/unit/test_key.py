"""Keys: injective, and readable again."""

from __future__ import annotations

import copy
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_rs import CacheEngineKey, LayerCacheEngineKey

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
tags = st.dictionaries(
    texts.map(lambda name: "lmcache.tag." + name),
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | texts,
    max_size=3,
)
keys = st.builds(
    CacheEngineKey,
    texts,
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**32 - 1),
    st.binary(min_size=32, max_size=32),
    texts,
    tags,
    st.dictionaries(texts, texts, max_size=3),
)


@given(keys)
def test_keys_round_trip(key: CacheEngineKey) -> None:
    again = CacheEngineKey.from_string(key.to_string())
    assert again == key
    assert hash(again) == hash(key)
    assert (again.model_name, again.chunk_hash, again.tags) == (
        key.model_name,
        key.chunk_hash,
        key.tags,
    )


@given(keys, keys)
def test_keys_are_equal_exactly_if_their_texts_are(a: CacheEngineKey, b: CacheEngineKey) -> None:
    assert (a == b) == (a.to_string() == b.to_string())


@given(st.text(max_size=200))
def test_reading_any_text_gives_a_key_or_a_value_error(text: str) -> None:
    try:
        key = CacheEngineKey.from_string(text)
    except ValueError:
        return
    assert key.to_string() == text


def key(**changes: object) -> CacheEngineKey:
    parts = {
        "model_name": "a/b",
        "world_size": 1,
        "worker_id": 0,
        "chunk_hash": bytes(32),
        "kv_dtype": "bfloat16",
    }
    return CacheEngineKey(**{**parts, **changes})  # type: ignore[arg-type]


def test_tags_do_not_depend_on_their_order_and_kinds_are_apart() -> None:
    one = {"lmcache.tag.a": 1, "lmcache.tag.b": "x"}
    other = dict(reversed(one.items()))
    assert key(request_configs=one) == key(request_configs=other)
    values = [None, True, 1, 1.0, "1", "True"]
    assert len({key(request_configs={"lmcache.tag.a": value}) for value in values}) == len(values)


def test_configs_that_are_no_tags_leave_the_key_alone() -> None:
    assert key(request_configs={"lmcache.skip_save": True}) == key()


@pytest.mark.parametrize("value", [b"x", (), 2**64, float("nan")])
def test_tags_that_cannot_be_part_of_a_key_are_refused_by_name(value: object) -> None:
    with pytest.raises((TypeError, ValueError), match="tenant"):
        key(request_configs={"lmcache.tag.tenant": value})


def test_layers_are_addresses_into_the_chunk() -> None:
    chunk = key(request_configs={"lmcache.tag.a": 1})
    layers = chunk.split_layers(3)
    assert [layer.layer_id for layer in layers] == [0, 1, 2]
    assert layers[0] == chunk.get_first_layer() != layers[1]
    assert len({layer.to_string() for layer in layers} | {chunk.to_string()}) == 4
    for layer in layers:
        assert layer.to_chunk_key() == chunk
        assert CacheEngineKey.from_string(layer.to_string()) == layer
        assert isinstance(CacheEngineKey.from_string(layer.to_string()), LayerCacheEngineKey)


def test_a_hash_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        key(chunk_hash=b"short")


@pytest.mark.parametrize("layer_id", [-1, 2**32, "0"])
def test_a_layer_of_no_number_is_refused(layer_id: object) -> None:
    with pytest.raises((TypeError, ValueError, OverflowError)):
        LayerCacheEngineKey("m", 1, 0, bytes(32), "bfloat16", layer_id=layer_id)  # type: ignore[arg-type]


def test_keys_do_not_change() -> None:
    chunk = key(request_configs={"lmcache.tag.a": 1})
    for one in (chunk, chunk.get_first_layer()):
        text = one.to_string()
        for name in ("model_name", "chunk_hash", "_space", "layer_id", "other"):
            with pytest.raises(AttributeError):
                setattr(one, name, "x")
            with pytest.raises(AttributeError):
                delattr(one, name)
        one.tags["a"] = 2
        assert (one.to_string(), one.tags) == (text, {"a": 1})


def test_what_is_done_to_the_configs_later_changes_no_key() -> None:
    configs: dict[str, object] = {"lmcache.tag.a": 1}
    one = key(request_configs=configs)
    text = one.to_string()
    configs["lmcache.tag.a"] = 2
    assert (one.to_string(), one.tags) == (text, {"a": 1})


@given(keys)
def test_copies_are_equal(key: CacheEngineKey) -> None:
    layer = key.split_layers(3)[2]
    for one in (key, layer):
        for again in (copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
            assert again == one
            assert type(again) is type(one)
    assert key != layer
    assert layer.to_chunk_key() == key
