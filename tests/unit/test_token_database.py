"""Chunks and hashes: vLLM's own chains, and a hundred thousand cases against hashlib and cbor2."""

from __future__ import annotations

import hashlib
import json
import pathlib
import random
import subprocess
import sys
from collections.abc import Iterator

import cbor2
import numpy as np
import pytest

from lmcache_rs import (
    CacheEngineKey,
    ChunkedTokenDatabase,
    LMCacheEngineConfig,
    LMCacheMetadata,
    SegmentTokenDatabase,
    _native,
)

VECTORS = pathlib.Path(__file__).parents[1] / "vectors" / "prefix_hash.json"
META = LMCacheMetadata("m", 1, 0, "bfloat16")


def database(chunk_size: int, none_hash: bytes | None = None, **settings: object):
    config = LMCacheEngineConfig.from_defaults(chunk_size=chunk_size, **settings)
    return ChunkedTokenDatabase(config, META, none_hash=none_hash)


def hashes_of(spans: Iterator[tuple[int, int, object]]) -> list[object]:
    return [item for _, _, item in spans]


# --- the reference, in another language than the subject ---------------------------------------


def reference_chain(
    tokens: list[int], chunk_size: int, none_hash: bytes, extra: object
) -> list[bytes]:
    chain, parent = [], none_hash
    for start in range(0, len(tokens), chunk_size):
        chunk = tuple(tokens[start : start + chunk_size])
        parent = hashlib.sha256(cbor2.dumps((parent, chunk, extra), canonical=True)).digest()
        chain.append(parent)
    return chain


def from_json(value: object) -> object:
    if isinstance(value, dict):
        if "b" in value:
            return bytes.fromhex(value["b"])
        return tuple(from_json(item) for item in value["t"])
    return value


CASES = json.loads(VECTORS.read_text())["cases"]


@pytest.mark.parametrize("number", range(len(CASES)))
def test_chains_made_by_vllm_come_out_byte_for_byte(number: int) -> None:
    case = CASES[number]
    none_hash, extra = bytes.fromhex(case["none_hash"]), from_json(case["extra_keys"])
    db = database(case["chunk_size"], none_hash)
    expected = [bytes.fromhex(text) for text in case["chain"]]
    found = db.process_tokens(case["tokens"], make_key=False, extra_keys=extra)
    assert hashes_of(found) == expected

    # The same in random pieces.
    rng = random.Random(number)
    chain, rest = db.new_chain(), case["tokens"]
    encoded = None if extra is None else _native.encode_extra_keys(extra)
    while rest:
        cut = rng.randint(1, 2 * case["chunk_size"])
        chain.extend(rest[:cut], encoded)
        rest = rest[cut:]
    assert [item for _, _, item in chain.spans(0, True, encoded)] == expected


def test_the_vectors_cover_every_recorded_none_hash() -> None:
    seeds = {case["pythonhashseed"]: case["none_hash"] for case in CASES}
    assert len(seeds) >= 4
    assert seeds[None] == _native.sha256_cbor("vllm-none-hash").hex()
    for seed, none_hash in seeds.items():
        if seed is not None:
            config_seeded = database(16, none_hash_seed=seed)
            assert config_seeded.none_hash.hex() == none_hash


WIDTH_EDGES = [0, 1, 23, 24, 25, 255, 256, 257, 65535, 65536, 65537, 2**32 - 2, 2**32 - 1]


def random_extra(rng: random.Random, depth: int = 0) -> object:
    kind = rng.randrange(9 if depth < 3 else 7)
    if kind == 0:
        return None
    if kind == 1:
        return rng.random() < 0.5
    if kind == 2:
        edge = rng.choice([0, 23, 24, 255, 256, 2**16, 2**32, 2**63, 2**64, 2**70, 2**200])
        return rng.choice([1, -1]) * (edge + rng.randint(-1, 1))
    if kind == 3:
        return rng.choice(
            [
                0.0,
                -0.0,
                1.5,
                1e300,
                65504.0,
                65505.0,
                5.960464477539063e-08,
                float("inf"),
                float("-inf"),
                rng.uniform(-1e9, 1e9),
            ]
        )
    if kind == 4:
        return rng.randbytes(rng.choice([0, 1, 23, 24, 255, 256]))
    if kind in (5, 6):
        alphabet = ["a", "é", "漢", "🦀", "\x00", "ß", "\u2028"]
        return "".join(rng.choice(alphabet) for _ in range(rng.choice([0, 1, 7, 23, 24, 90])))
    items = tuple(random_extra(rng, depth + 1) for _ in range(rng.randrange(4)))
    return items if kind == 7 else list(items)


def test_a_hundred_thousand_cases_equal_hashlib_and_cbor2() -> None:
    rng = random.Random(20)
    pool = WIDTH_EDGES + [rng.randrange(2**32) for _ in range(50)] + list(range(1000, 1100))
    for number in range(100_000):
        chunk_size = rng.choice(
            [1, 2, 3, 7, 16, 23, 24, 25, 48] if number % 50 else [255, 256, 257]
        )
        length = max(0, rng.randrange(4) * chunk_size + rng.choice([-1, 0, 1]))
        tokens = rng.choices(pool, k=length)
        extra = None if rng.random() < 0.3 else random_extra(rng)
        none_hash = rng.randbytes(32)
        encoded = None if extra is None else _native.encode_extra_keys(extra)
        chain = _native.Chain(chunk_size, none_hash)
        cut = rng.randint(0, length)
        chain.extend(tokens[:cut], encoded)
        chain.extend(tokens[cut:], encoded)
        found = [item for _, _, item in chain.spans(0, True, encoded)]
        assert found == reference_chain(tokens, chunk_size, none_hash, extra), (number, extra)


def test_maps_are_sorted_as_canonical_cbor_asks() -> None:
    value = {"bb": 1, "a": 2, 10: 3, 1000: 4, b"x": [5, {"é": None}], -1: True}
    assert _native.encode_extra_keys(value) == cbor2.dumps(value, canonical=True)


# --- what may be passed, and what is said about the rest ----------------------------------------


def test_lists_arrays_and_buffers_are_one() -> None:
    tokens = [3, 70_000, 24, 5, 6]
    db = database(2)
    expected = hashes_of(db.process_tokens(tokens, make_key=False))
    for dtype in (np.int32, np.int64, np.uint32):
        array = np.array(tokens, dtype=dtype)
        assert hashes_of(db.process_tokens(array, make_key=False)) == expected
    spaced = np.arange(10, dtype=np.int64)
    spaced[::2] = tokens
    assert hashes_of(db.process_tokens(spaced[::2], make_key=False)) == expected


@pytest.mark.parametrize(
    "tokens", [[-1, 2], [2**32], np.array([1, -5]), np.zeros((2, 2), np.int64)]
)
def test_ids_out_of_range_are_refused_with_the_range(tokens: object) -> None:
    with pytest.raises((ValueError, OverflowError), match="4294967295|one dimension"):
        list(database(2).process_tokens(tokens))


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("at", [0, 17, 99])
def test_an_id_out_of_range_is_named_with_its_position(dtype: type, at: int) -> None:
    wrong = [-1, -7, *([2**32, 2**40, -(2**40)] if dtype is np.int64 else [])]
    for value in wrong:
        for step in (1, 2):  # the array itself, and a view of every other element
            tokens = np.full(100 * step, 70_000, dtype)[::step]
            tokens[at] = value
            if at < 99:
                tokens[99] = -3
            with pytest.raises(ValueError, match=f"token id {value} at position {at} "):
                list(database(2).process_tokens(tokens))


def test_the_highest_id_is_an_id() -> None:
    tokens = [2**32 - 1, 0]
    expected = hashes_of(database(2).process_tokens(tokens, make_key=False))
    for dtype in (np.int64, np.uint32):
        array = np.array(tokens, dtype)
        assert hashes_of(database(2).process_tokens(array, make_key=False)) == expected


def test_wrong_types_are_refused() -> None:
    with pytest.raises(TypeError, match="ids"):
        list(database(2).process_tokens(["a"]))
    with pytest.raises(TypeError, match="extra_keys may hold"):
        list(database(2).process_tokens([1], extra_keys=object()))
    nested: object = 1
    for _ in range(100):
        nested = (nested,)
    with pytest.raises(ValueError, match="nested"):
        list(database(2).process_tokens([1], extra_keys=nested))


def test_either_tokens_or_hashes() -> None:
    db = database(2)
    with pytest.raises(ValueError, match="neither"):
        db.process_tokens()
    with pytest.raises(ValueError, match="both"):
        db.process_tokens([1], hashes=[b"\0" * 32], offsets=[1])


def test_hashes_with_offsets_are_taken_as_they_are_and_masked_by_span() -> None:
    db = database(4)
    hashes = [bytes([number]) * 32 for number in range(3)]
    spans = list(db.process_tokens(hashes=hashes, offsets=[4, 4, 2], make_key=False))
    assert spans == [(0, 4, hashes[0]), (4, 8, hashes[1]), (8, 10, hashes[2])]
    masked = db.process_tokens(
        hashes=hashes, offsets=[4, 4, 2], mask=[False] * 4 + [True] * 6, make_key=False
    )
    assert list(masked) == spans[1:]
    with pytest.raises(ValueError, match="as many offsets"):
        db.process_tokens(hashes=hashes, offsets=[4])
    with pytest.raises(ValueError, match="32 bytes"):
        db.process_tokens(hashes=[b"short"], offsets=[4])


def test_the_mask_skips_chunks_but_hashes_them() -> None:
    db = database(4)
    tokens = list(range(11))
    spans = list(db.process_tokens(tokens, make_key=False))
    assert [(start, end) for start, end, _ in spans] == [(0, 4), (4, 8), (8, 11)]
    for mask in ([False] * 4 + [True] * 7, np.array([False] * 4 + [True] * 7)):
        assert list(db.process_tokens(tokens, mask=mask, make_key=False)) == spans[1:]


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ([True] + [False] * 10, "False again at 1"),
        ([False] * 3 + [True] * 8, "use 0 or 4"),
        ([True] * 10, "one bool per token"),
    ],
)
def test_a_mask_of_another_form_is_refused_and_told_why(mask: list[bool], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        database(4).process_tokens(list(range(11)), mask=mask)
    with pytest.raises(TypeError, match="bool"):
        database(4).process_tokens(list(range(11)), mask=np.ones(11, np.int64))


def test_the_tail_is_kept_alone_and_dropped_on_request() -> None:
    assert len(list(database(4).process_tokens(list(range(6))))) == 2
    assert len(list(database(4, save_unfull_chunk=False).process_tokens(list(range(6))))) == 1


def test_keys_carry_the_metadata_and_the_tags() -> None:
    (_, _, key), *_ = database(4).process_tokens([1, 2, 3, 4], request_configs={"lmcache.tag.t": 1})
    assert isinstance(key, CacheEngineKey)
    assert (key.model_name, key.kv_dtype, key.tags) == ("m", "bfloat16", {"t": 1})
    assert key.facts["chunk_size"] == "4"


def test_twenty_processes_with_random_hash_seeds_agree() -> None:
    program = (
        "from lmcache_rs import *\n"
        "c = LMCacheEngineConfig.from_defaults(chunk_size=2)\n"
        "d = ChunkedTokenDatabase(c, LMCacheMetadata('m', 1, 0, 'bfloat16'))\n"
        "print([str(k) for *_, k in d.process_tokens([1, 2, 3, 4, 5], extra_keys=('a', 1))])"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for seed in [str(number) for number in range(19)] + ["random"]
    }
    assert len(outputs) == 1


def test_each_token_is_hashed_once_however_it_comes() -> None:
    tokens = list(range(1000, 1000 + 37 * 4))
    bytes_expected = 0
    parent = bytes(32)
    for start in range(0, len(tokens), 4):
        cbor = cbor2.dumps((parent, tuple(tokens[start : start + 4]), None), canonical=True)
        bytes_expected += len(cbor)
        parent = hashlib.sha256(cbor).digest()
    for step in (1, 3, 4, 5, 64, 1000):
        before = _native.hashed_bytes()
        chain = _native.Chain(4, bytes(32))
        for start in range(0, len(tokens), step):
            chain.extend(tokens[start : start + step])
            chain.hashes()
        assert _native.hashed_bytes() - before == bytes_expected
        assert chain.hashes()[-32:] == parent


# --- segments ---------------------------------------------------------------------------------


def segments(tokens: list[int], separator: list[int], **arguments: object):
    config = LMCacheEngineConfig.from_defaults()
    db = SegmentTokenDatabase(config, META, separator=separator)
    return list(db.process_tokens(tokens, make_key=False, **arguments))


def reference_segments(tokens: list[int], separator: list[int]) -> list[tuple[int, int]]:
    found, start, at = [], 0, 0
    while at <= len(tokens):
        if tokens[at : at + len(separator)] == separator:
            found.append((start, at))
            start = at = at + len(separator)
        else:
            at += 1
    return [(a, b) for a, b in [*found, (start, len(tokens))] if a < b]


def test_segments_equal_the_naive_split() -> None:
    rng = random.Random(4)
    for _ in range(3000):
        separator = rng.choice([[9], [9, 9], [9, 256, 9], [0], [256]])
        tokens = rng.choices([9, 256, 0, 7], k=rng.randrange(30))
        spans = segments(tokens, separator)
        assert [(start, end) for start, end, _ in spans] == reference_segments(tokens, separator)


def test_a_document_has_one_hash_at_every_position() -> None:
    document, sep = list(range(100, 150)), [1, 2]
    alone = segments(document, sep)[0][2]
    assert segments([5, 6, *sep, *document, *sep, 8], sep)[1] == (4, 54, alone)
    assert segments([*sep, *sep, *document], sep) == [(4, 54, alone)]
    assert segments(document, sep, extra_keys=("salt",))[0][2] != alone


def test_segments_in_the_masked_run_are_not_yielded() -> None:
    tokens = [5, 9, 6, 9, 7]
    spans = segments(tokens, [9], mask=[False, False, False, True, True])
    assert [(start, end) for start, end, _ in spans] == [(4, 5)]


def test_the_separator_may_be_text() -> None:
    config = LMCacheEngineConfig.from_defaults()
    db = SegmentTokenDatabase(
        config, META, blend_special_str="# #", encode=lambda text: [len(text)]
    )
    assert db.separator == [3]
    for wrong in (
        {},
        {"separator": [1], "blend_special_str": "x"},
        {"blend_special_str": "x"},
        {"separator": []},
    ):
        with pytest.raises(ValueError, match="separator|encode"):
            SegmentTokenDatabase(config, META, **wrong)
