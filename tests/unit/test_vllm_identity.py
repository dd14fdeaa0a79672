"""Whose chunks a request may find: images, embeddings, adapters, tags, resets, engine's hashes.

vLLM's own `Request` objects in the scheduler half. Of each pair both halves are shown: another
identity finds nothing, and the same one again finds all.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from test_vllm_halves import BLOCK, CHUNK, META, Pair, new_request
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.request import Request

from lmcache_rs import ConfigError, LMCacheEngineConfig, _native
from lmcache_rs.vllm_v1 import compat
from lmcache_rs.vllm_v1.identity import (
    EngineHashes,
    Identities,
    chain_notice,
    engine_hashes_of,
    identities_of,
    items_bypass_reason,
)


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the operator is told."""
    told: list[str] = []

    def keep(message: str, *values: object) -> None:
        told.append(message % values)

    for level in ("warning", "info"):
        monkeypatch.setattr(compat.logger, level, keep)
    return told


Maker = Callable[[], Request]


def ask(pair: Pair, make: Maker) -> int:
    request = make()
    hits = pair.ask(request)
    pair.finish(request)
    assert hits is not None
    return hits


def store(pair: Pair, make: Maker) -> int:
    request = make()
    hits = pair.prefill(request)
    pair.finish(request)
    return hits


# Images.

LENGTH = 4 * CHUNK + 1


def with_images(*images: tuple[str, int, int], **changes: Any) -> Maker:
    """A prompt of one text with images: (identifier, first token, tokens)."""
    features = [
        MultiModalFeatureSpec(None, "image", identifier, PlaceholderRange(offset, length))
        for identifier, offset, length in images
    ]
    return lambda: new_request(LENGTH, mm_features=features, **changes)


IMAGE = hashlib.sha256(b"image").hexdigest()
OTHERS = {
    "another": hashlib.sha256(b"other").hexdigest(),
    "shares its prefix": IMAGE[:-4] + "0000",
    "shares its suffix": "0000" + IMAGE[4:],
    "shares 4 digits": "0" * 60 + IMAGE[-4:],
}


@pytest.mark.parametrize("what", OTHERS)
@pytest.mark.parametrize(
    ("offset", "length"),
    [(0, CHUNK), (CHUNK, CHUNK), (CHUNK + 3, 2), (CHUNK - 1, 2), (CHUNK + 2, 2 * CHUNK)],
)
def test_another_image_shares_no_chunk_from_its_first_token_on(
    pair: Pair, what: str, offset: int, length: int
) -> None:
    one, other = (with_images((name, offset, length)) for name in (IMAGE, OTHERS[what]))
    before = offset // CHUNK * CHUNK
    assert store(pair, one) == 0
    assert ask(pair, one) == LENGTH - 1
    assert ask(pair, other) == before
    store(pair, other)
    assert ask(pair, one) == ask(pair, other) == LENGTH - 1
    assert ask(pair, with_images()) == before, "the same text without an image"
    pair.assert_idle()


@pytest.mark.parametrize("offset", [1, CHUNK - 1, CHUNK, CHUNK + 3])
def test_an_image_moved_by_one_token_is_another_prompt(pair: Pair, offset: int) -> None:
    here, there = (with_images((IMAGE, at, CHUNK)) for at in (offset, offset + 1))
    store(pair, here)
    assert ask(pair, there) == offset // CHUNK * CHUNK
    assert ask(pair, here) == LENGTH - 1


def test_the_second_of_two_images_counts_too(pair: Pair) -> None:
    one = with_images((IMAGE, 1, 3), (IMAGE, CHUNK + 1, 3))
    other = with_images((IMAGE, 1, 3), (OTHERS["another"], CHUNK + 1, 3))
    swapped = with_images((OTHERS["another"], 1, 3), (IMAGE, CHUNK + 1, 3))
    store(pair, one)
    assert ask(pair, other) == CHUNK
    assert ask(pair, swapped) == 0
    assert ask(pair, one) == LENGTH - 1


def test_images_are_found_again_however_the_prompt_is_computed(pair: Pair) -> None:
    make = with_images((IMAGE, CHUNK - 2, 2 * CHUNK), (OTHERS["another"], 3 * CHUNK + 1, 2))
    request = make()
    assert pair.ask(request) == 0
    pair.grant(request, 0)
    for num_tokens in (3, CHUNK, 1, LENGTH - CHUNK - 4):
        pair.step({request: num_tokens})
    pair.finish(request)
    assert ask(pair, make) == LENGTH - 1


def items_config(*, prefix_caching: bool, cache_gb: float, is_multimodal: bool = True) -> Any:
    settings = SimpleNamespace(mm_processor_cache_gb=cache_gb) if is_multimodal else None
    return SimpleNamespace(
        model_config=SimpleNamespace(multimodal_config=settings),
        cache_config=SimpleNamespace(enable_prefix_caching=prefix_caching),
    )


def test_identifiers_that_repeat_keep_their_requests_out_of_the_cache(pair: Pair) -> None:
    assert items_bypass_reason(items_config(prefix_caching=True, cache_gb=0)) is None
    assert items_bypass_reason(items_config(prefix_caching=False, cache_gb=4)) is None
    text_only = items_config(prefix_caching=False, cache_gb=0, is_multimodal=False)
    assert items_bypass_reason(text_only) is None
    reason = items_bypass_reason(items_config(prefix_caching=False, cache_gb=0))
    assert reason
    assert "by request, not by content" in reason

    pair.scheduler._identities = Identities(pair.scheduler._config, META, None, reason)
    pair.scheduler._steps._identities = pair.scheduler._identities
    make = with_images(("chatcmpl-1-image-0", 2, 3))
    assert [store(pair, make), store(pair, make)] == [0, 0]
    assert pair.worker.counters()["stored_chunks"] == 0
    assert pair.scheduler.counters()["bypassed_requests"] == 2
    store(pair, with_images())
    assert ask(pair, with_images()) == LENGTH - 1, "requests without items are served"
    pair.assert_idle()


# Embeddings.


def embedded(seed: int, **changes: Any) -> Maker:
    embeds = torch.randn(LENGTH, 16, generator=torch.Generator().manual_seed(seed))
    return lambda: new_request(0, prompt_token_ids=None, prompt_embeds=embeds, **changes)


def test_embeddings_of_equal_length_are_told_apart_by_content(pair: Pair) -> None:
    one, other = embedded(1), embedded(2)
    assert store(pair, one) == 0
    assert ask(pair, other) == 0
    assert ask(pair, one) == LENGTH - 1
    zeros = [0] * LENGTH
    assert ask(pair, lambda: new_request(0, prompt_token_ids=zeros)) == 0
    pair.assert_idle()


def test_embeddings_that_differ_late_share_what_is_before(pair: Pair) -> None:
    base = torch.randn(LENGTH, 16, generator=torch.Generator().manual_seed(1))
    late = base.clone()
    late[2 * CHUNK + 1, 3] += 1e-3
    one, other = (
        lambda embeds=embeds: new_request(0, prompt_token_ids=None, prompt_embeds=embeds)
        for embeds in (base, late)
    )
    store(pair, one)
    assert ask(pair, other) == 2 * CHUNK


def test_prompts_that_mix_tokens_and_embeddings_stay_out(pair: Pair) -> None:
    embeds = torch.randn(LENGTH, 16, generator=torch.Generator().manual_seed(1))

    def mixed(*at_tokens: int) -> Maker:
        # Token 0 is what vLLM puts in the place of an embedding.
        mask = [at in at_tokens for at in range(LENGTH)]
        return lambda: new_request(
            0, prompt_token_ids=[0] * LENGTH, prompt_embeds=embeds, prompt_is_token_ids=mask
        )

    assert [store(pair, make) for make in (mixed(1), mixed(1), mixed(2), mixed())] == [0] * 4
    unmasked = lambda: new_request(0, prompt_token_ids=[0] * LENGTH, prompt_embeds=embeds)  # noqa: E731
    assert store(pair, unmasked) == 0
    assert pair.worker.counters()["stored_chunks"] == 0
    pair.assert_idle()


# Adapters.


def write_adapter(folder: Path, scale: float) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({"a": torch.full((8, 64), scale)}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"r": 8}))
    return folder


def adapted(name: str, number: int, folder: Path) -> Maker:
    return lambda: new_request(LENGTH, lora_request=LoRARequest(name, number, str(folder)))


def test_adapters_are_told_apart_by_name_path_and_weights(pair: Pair, tmp_path: Path) -> None:
    one, two = write_adapter(tmp_path / "one", 1.0), write_adapter(tmp_path / "two", 2.0)
    kin = [
        lambda: new_request(LENGTH),
        adapted("a", 1, one),
        adapted("b", 2, one),
        adapted("a", 3, two),
    ]
    for number, make in enumerate(kin):
        assert store(pair, make) == 0
        for earlier in kin[: number + 1]:
            assert ask(pair, earlier) == LENGTH - 1
    assert ask(pair, adapted("a", 77, one)) == LENGTH - 1, "an id is a process's own"
    pair.assert_idle()


def test_other_weights_at_the_same_name_and_path_find_nothing_old(
    pair: Pair, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path / "one", 1.0)
    store(pair, adapted("a", 1, folder))
    write_adapter(folder, 2.0)
    assert ask(pair, adapted("a", 2, folder)) == 0
    store(pair, adapted("a", 2, folder))
    assert ask(pair, adapted("a", 2, folder)) == LENGTH - 1
    write_adapter(folder, 1.0)
    assert ask(pair, adapted("a", 3, folder)) == LENGTH - 1, "the first weights again"


def test_files_that_change_under_a_loaded_adapter_keep_its_requests_out(
    pair: Pair, tmp_path: Path, warnings: list[str]
) -> None:
    folder = write_adapter(tmp_path / "one", 1.0)
    make = adapted("a", 1, folder)
    store(pair, make)
    write_adapter(folder, 2.0)
    # The engine may hold either: it loads anew when it runs out of room for adapters.
    stored = pair.worker.counters()["stored_chunks"]
    assert [store(pair, make), ask(pair, make)] == [0, 0]
    assert pair.worker.counters()["stored_chunks"] == stored
    assert any("have changed" in line for line in warnings)
    # What the engine may have read in the meantime it keeps, whatever becomes of the files.
    write_adapter(folder, 1.0)
    assert [store(pair, make), ask(pair, make)] == [0, 0]
    assert pair.scheduler.reset_cache()
    assert [store(pair, make), ask(pair, make)] == [0, 0]
    store(pair, adapted("a", 2, folder))
    assert ask(pair, adapted("a", 2, folder)) == LENGTH - 1
    pair.assert_idle()


def test_an_adapter_that_is_loaded_in_place_is_what_its_files_are(
    pair: Pair, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path / "one", 1.0)
    store(pair, adapted("a", 1, folder))
    write_adapter(folder, 2.0)
    assert ask(pair, adapted("a", 1, folder)) == 0
    again = LoRARequest("a", 1, str(folder), load_inplace=True)
    make = lambda: new_request(LENGTH, lora_request=again)  # noqa: E731
    assert store(pair, make) == 0
    assert ask(pair, make) == LENGTH - 1
    assert ask(pair, adapted("a", 1, folder)) == LENGTH - 1


@pytest.mark.parametrize("is_told", [False, True], ids=["files alone", "a request of the new"])
@pytest.mark.parametrize("comes_back", [False, True], ids=["stays", "comes back"])
def test_a_request_whose_adapter_is_replaced_while_it_runs_saves_nothing_more(
    pair: Pair, tmp_path: Path, is_told: bool, comes_back: bool
) -> None:
    folder = write_adapter(tmp_path / "one", 1.0)
    make = adapted("a", 1, folder)
    running = make()
    pair.ask(running)
    pair.grant(running, 0)
    pair.step({running: CHUNK})
    stored = pair.worker.counters()["stored_chunks"]
    assert stored == 1

    def replace(scale: float) -> None:
        # vLLM loads in place at once; the next request that says so may come at any time.
        write_adapter(folder, scale)
        if is_told:
            again = LoRARequest("a", 1, str(folder), load_inplace=True)
            ask(pair, lambda: new_request(LENGTH, lora_request=again))

    replace(2.0)
    if not comes_back or not is_told:
        pair.step({running: CHUNK})
    if comes_back:
        replace(1.0)
    pair.step({running: CHUNK})
    assert pair.worker.counters()["stored_chunks"] == stored
    pair.finish(running)
    write_adapter(folder, 1.0)
    assert ask(pair, adapted("a", 2, folder)) == CHUNK, "what was saved before is right"
    pair.assert_idle()


def test_a_request_that_starts_anew_with_a_replaced_adapter_finds_the_new_ones(
    pair: Pair, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path / "one", 1.0)
    make = adapted("a", 1, folder)
    store(pair, make)
    waiting = make()
    assert pair.ask(waiting) == LENGTH - 1
    write_adapter(folder, 2.0)
    again = LoRARequest("a", 1, str(folder), load_inplace=True)
    store(pair, lambda: new_request(2 * CHUNK, lora_request=again))
    assert pair.ask(waiting) == 2 * CHUNK
    pair.finish(waiting)
    pair.assert_idle()


def test_an_id_that_stood_for_another_adapter_is_believed_no_more(
    pair: Pair, tmp_path: Path
) -> None:
    one, two = write_adapter(tmp_path / "one", 1.0), write_adapter(tmp_path / "two", 2.0)
    store(pair, adapted("a", 1, one))
    # vLLM asks neither name nor path of an id it has loaded: it computes with the first one.
    assert store(pair, adapted("b", 1, two)) == 0
    assert ask(pair, adapted("b", 2, two)) == 0
    store(pair, adapted("b", 2, two))
    assert ask(pair, adapted("b", 2, two)) == LENGTH - 1


def test_what_the_engine_makes_of_an_adapters_files_is_part_of_its_name(
    pair: Pair, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path / "one", 1.0)
    flat, solid = (
        LoRARequest("a", number, str(folder), is_3d_lora_weight=number == 2) for number in (1, 2)
    )
    store(pair, lambda: new_request(LENGTH, lora_request=flat))
    assert ask(pair, lambda: new_request(LENGTH, lora_request=solid)) == 0
    assert ask(pair, lambda: new_request(LENGTH, lora_request=flat)) == LENGTH - 1
    halves: list[str | None] = []
    for settings in ("none", "x", "x"):
        identities = Identities(pair.scheduler._config, META, adapter_settings=settings)
        halves.append(identities.of(new_request(LENGTH, lora_request=flat)).namespace)
    assert halves[0] != halves[1] == halves[2]


def test_files_that_are_touched_or_copied_anew_are_the_same_adapter(
    pair: Pair, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path / "one", 1.0)
    make = adapted("a", 1, folder)
    store(pair, make)
    write_adapter(folder, 1.0)
    os.utime(folder / "adapter_config.json", (1, 1))
    assert ask(pair, make) == LENGTH - 1


def test_an_adapter_that_cannot_be_read_keeps_its_requests_out(
    pair: Pair, tmp_path: Path, warnings: list[str]
) -> None:
    make = adapted("a", 1, tmp_path / "nowhere")
    assert [store(pair, make), store(pair, make)] == [0, 0]
    assert any("'a' cannot be read" in line for line in warnings)


def test_an_adapters_files_are_read_once(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lmcache_rs.vllm_v1 import identity

    reads: list[Path] = []

    def count(folder: Path) -> str:
        reads.append(folder)
        return "digest"

    monkeypatch.setattr(identity, "adapter_digest", count)
    folder = write_adapter(tmp_path / "one", 1.0)
    for number in (1, 1, 2, 1):
        store(pair, adapted("a", number, folder))
    assert reads == [folder]


# Settings of a request.


def configured(**configs: Any) -> Maker:
    params = SamplingParams(max_tokens=5, extra_args={"kv_transfer_params": configs})
    return lambda: new_request(LENGTH, sampling_params=params)


def test_tags_keep_requests_apart_in_any_order(pair: Pair) -> None:
    one = configured(**{"lmcache.tag.team": "a", "lmcache.tag.tier": 1})
    again = configured(**{"lmcache.tag.tier": 1, "lmcache.tag.team": "a"})
    other = configured(**{"lmcache.tag.team": "b", "lmcache.tag.tier": 1})
    assert store(pair, one) == 0
    assert ask(pair, again) == LENGTH - 1
    assert ask(pair, other) == 0
    assert ask(pair, lambda: new_request(LENGTH)) == 0
    pair.assert_idle()


@pytest.mark.parametrize(
    ("value", "saved"), [(True, 0), ("true", 0), (1, 0), (["?"], 0), (False, 4), ("false", 4)]
)
def test_skip_save_takes_what_people_write(
    pair: Pair, value: object, saved: int, warnings: list[str]
) -> None:
    for _ in range(2):
        store(pair, configured(**{"lmcache.skip_save": value}))
    assert pair.worker.counters()["stored_chunks"] == saved
    assert len(warnings) == (value == ["?"]), warnings


@pytest.mark.parametrize("params", [{3: "x"}, "text", ["lmcache.tag.a"]])
def test_settings_that_are_none_keep_their_request_out(pair: Pair, params: object) -> None:
    sampling = SamplingParams(max_tokens=5, extra_args={"kv_transfer_params": params})
    assert store(pair, lambda: new_request(LENGTH, sampling_params=sampling)) == 0
    assert pair.worker.counters()["stored_chunks"] == 0
    assert not pair.faults.counts


@pytest.mark.parametrize("what", ["salt", "image"])
def test_a_text_that_no_hash_takes_keeps_its_request_out_and_is_not_shown(
    pair: Pair, warnings: list[str], what: str
) -> None:
    text = "secret\ud800"
    make = with_images((text, 0, 2))
    if what == "salt":
        make = lambda: new_request(LENGTH, cache_salt=text)  # noqa: E731
    assert store(pair, make) == 0
    assert pair.worker.counters()["stored_chunks"] == 0
    assert not pair.faults.counts
    assert pair.scheduler.counters()["bypassed_requests"] == 1
    assert not any("secret" in line or "ud800" in line for line in warnings)


def test_settings_that_nobody_knows_are_told_once_and_change_nothing(
    pair: Pair, warnings: list[str]
) -> None:
    for _ in range(3):
        store(pair, configured(**{"lmcache.tags.team": "secret", "lmcache.skip_sav": True}))
    assert len(warnings) == 2
    assert not any("secret" in line for line in warnings)
    assert ask(pair, lambda: new_request(LENGTH)) == LENGTH - 1
    for number in range(500):
        ask(pair, configured(**{f"lmcache.{number}": 1}))
    assert len(warnings) == 100


def test_a_salt_is_written_nowhere(
    pair: Pair, caplog: pytest.LogCaptureFixture, warnings: list[str], tmp_path: Path
) -> None:
    salt = "a-salt-nobody-may-read"
    caplog.set_level(logging.DEBUG)
    adapter = LoRARequest("a", 1, str(tmp_path))
    request = new_request(LENGTH, cache_salt=salt)
    pair.ask(request)
    pair.grant(request, 0)
    metadata = pair.step({request: LENGTH})
    pair.finish(request)
    store(pair, lambda: new_request(LENGTH, cache_salt=salt, lora_request=adapter))
    store(pair, lambda: new_request(LENGTH, cache_salt=salt, resumable=True))
    assert metadata.requests
    assert warnings
    books = [pair.scheduler.counters(), pair.worker.counters(), pair.worker.memory_stats()]
    # A hash that holds it does not show it; neither may anything else.
    for told in (*warnings, caplog.text, repr(metadata), repr(pair.outcome), *map(repr, books)):
        assert salt not in told
    assert ask(pair, lambda: new_request(LENGTH, cache_salt=salt)) == LENGTH - 1


# Reset.


def test_after_a_reset_nothing_old_is_found_and_memory_is_empty(pair: Pair) -> None:
    make = lambda: new_request(LENGTH)  # noqa: E731
    store(pair, make)
    namespaces = {pair.scheduler._identities.namespace()}
    for _ in range(3):
        assert pair.scheduler.reset_cache()
        books = pair.worker.memory_stats()
        assert (books["cached_bytes"], books["leased_bytes"]) == (0, 0)
        assert ask(pair, make) == 0
        store(pair, make)
        assert ask(pair, make) == LENGTH - 1
        namespaces.add(pair.scheduler._identities.namespace())
    assert len(namespaces) == 4
    pair.assert_idle()


def test_two_servers_that_were_reset_do_not_meet_and_two_that_were_not_do() -> None:
    config = LMCacheEngineConfig.from_defaults(chunk_size=CHUNK)
    one, other = Identities(config, META), Identities(config, META)
    assert one.namespace() == other.namespace()
    assert "@fact.epoch=none" in one.namespace()
    one.new_epoch()
    other.new_epoch()
    assert one.namespace() != other.namespace()


def test_requests_under_way_save_nothing_more_after_a_reset(pair: Pair) -> None:
    request = new_request(LENGTH)
    pair.ask(request)
    pair.grant(request, 0)
    pair.step({request: 2 * CHUNK})
    old = pair.scheduler._identities.namespace()
    hashes = pair.scheduler._trackers[request.request_id].chain.hashes()
    assert pair.scheduler.reset_cache()
    pair.step({request: LENGTH - 2 * CHUNK})
    assert pair.worker.counters()["stored_chunks"] == 2, "those before the reset"
    for namespace in (old, pair.scheduler._identities.namespace()):
        assert pair.pool.longest_prefix(namespace, hashes) == 0
    pair.finish(request)
    assert ask(pair, lambda: new_request(LENGTH)) == 0
    pair.assert_idle()


def test_a_request_that_starts_anew_after_a_reset_is_a_new_one(pair: Pair) -> None:
    request = new_request(LENGTH)
    pair.ask(request)
    pair.grant(request, 0)
    pair.step({request: 2 * CHUNK})
    assert pair.scheduler.reset_cache()
    # vLLM takes it back and computes it again, now with the new weights.
    request.num_computed_tokens = 0
    request.num_preemptions += 1
    pair.tables.pop(request.request_id)
    assert pair.prefill(request) == 0
    pair.finish(request)
    assert ask(pair, lambda: new_request(LENGTH)) == LENGTH - 1
    pair.assert_idle()


def test_a_waiting_request_gives_its_lease_back_at_a_reset(pair: Pair) -> None:
    store(pair, lambda: new_request(LENGTH))
    waiting = new_request(LENGTH)
    assert pair.ask(waiting) == LENGTH - 1
    assert pair.worker.memory_stats()["leases"] == 1
    assert pair.scheduler.reset_cache()
    assert pair.worker.memory_stats()["leases"] == 0
    assert pair.ask(waiting) == 0
    pair.finish(waiting)
    pair.assert_idle()


def test_a_load_that_was_granted_before_a_reset_is_still_delivered(pair: Pair) -> None:
    store(pair, lambda: new_request(LENGTH))
    request = new_request(LENGTH)
    external = pair.ask(request)
    assert external
    pair.grant(request, external)
    request.num_computed_tokens = external
    assert pair.scheduler.reset_cache()
    pair.step({request: LENGTH - external})
    assert pair.failed == set()
    assert pair.worker.counters()["loaded_tokens"] == external
    pair.finish(request)
    assert ask(pair, lambda: new_request(LENGTH)) == 0
    pair.assert_idle()


def test_a_reset_before_the_worker_is_known_needs_none() -> None:
    config = LMCacheEngineConfig.from_defaults(chunk_size=CHUNK)
    pair = Pair()
    half = type(pair.scheduler)(config, META, "nobody", "kv_both", pair.faults)
    assert half.reset_cache()
    pair.close()


# The engine's own hashes.


@pytest.fixture
def none_hash(monkeypatch: pytest.MonkeyPatch) -> bytes:
    monkeypatch.setattr(kv_cache_utils, "NONE_HASH", bytes(range(32)), raising=False)
    return bytes(range(32))


def hashed_by_engine(algorithm: Callable[[Any], bytes], hash_block: int, **changes: Any) -> Maker:
    hasher = kv_cache_utils.get_request_block_hasher(hash_block, algorithm)
    return lambda: new_request(LENGTH, block_hasher=hasher, **changes)


ENGINE_CHAIN = LMCacheEngineConfig.from_defaults(chunk_size=CHUNK, chain="engine")


def engine_pair(algorithm: str = "sha256_cbor", hash_block: int = BLOCK) -> Pair:
    pair = Pair()
    engine = EngineHashes(algorithm, hash_block)
    pair.scheduler._identities = Identities(ENGINE_CHAIN, META, engine)
    pair.scheduler._steps._identities = pair.scheduler._identities
    return pair


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor"])
@pytest.mark.parametrize("hash_block", [1, BLOCK, CHUNK])
def test_the_engines_keys_are_its_hashes_at_the_ends_of_chunks(
    algorithm: str, hash_block: int, none_hash: bytes
) -> None:
    pair = engine_pair(algorithm, hash_block)
    request = hashed_by_engine(get_hash_fn_by_name(algorithm), hash_block)()
    before = _native.hashed_bytes()
    pair.ask(request)
    pair.grant(request, 0)
    metadata = pair.step({request: LENGTH})
    links = CHUNK // hash_block
    ends = [request.block_hashes[(chunk + 1) * links - 1] for chunk in range(4)]
    assert metadata.requests[0].hashes == b"".join(ends)
    assert _native.hashed_bytes() == before, "nothing is hashed twice"
    pair.finish(request)
    again = hashed_by_engine(get_hash_fn_by_name(algorithm), hash_block)
    assert ask(pair, again) == LENGTH - 1
    pair.assert_idle()
    pair.close()


def test_both_chains_are_one_where_vllm_hashes_as_we_do(none_hash: bytes) -> None:
    hash_fn = get_hash_fn_by_name("sha256_cbor")
    request = hashed_by_engine(hash_fn, CHUNK, cache_salt="s")()
    own = _native.Chain(CHUNK, none_hash)
    keys, _ = compat.ExtraKeys(request).of_chunks(0, 4, CHUNK)
    own.extend(request.all_token_ids[:LENGTH], keys)
    hashes = EngineHashes("sha256_cbor", CHUNK)
    engine, _ = Identities(ENGINE_CHAIN, META, hashes).chain(request)
    engine.extend(request.all_token_ids[:LENGTH])
    assert engine.hashes() == own.hashes()


def test_the_engines_chain_isolates(none_hash: bytes, tmp_path: Path) -> None:
    pair = engine_pair()
    hash_fn = get_hash_fn_by_name("sha256_cbor")
    one, two = write_adapter(tmp_path / "one", 1.0), write_adapter(tmp_path / "two", 2.0)
    image = MultiModalFeatureSpec(None, "image", IMAGE, PlaceholderRange(1, 3))
    tagged = SamplingParams(extra_args={"kv_transfer_params": {"lmcache.tag.a": "1"}})
    kin = [
        hashed_by_engine(hash_fn, BLOCK, **changes)
        for changes in (
            {},
            {"cache_salt": "a"},
            {"cache_salt": "b"},
            {"lora_request": LoRARequest("a", 1, str(one))},
            {"lora_request": LoRARequest("a", 2, str(two))},
            {"mm_features": [image]},
            {"sampling_params": tagged},
        )
    ]
    for number, make in enumerate(kin):
        assert store(pair, make) == 0
        for earlier in kin[: number + 1]:
            assert ask(pair, earlier) == LENGTH - 1
    assert ask(pair, hashed_by_engine(hash_fn, BLOCK, cache_salt="")) == LENGTH - 1
    write_adapter(one, 3.0)
    again = {"lora_request": LoRARequest("a", 3, str(one))}
    assert ask(pair, hashed_by_engine(hash_fn, BLOCK, **again)) == 0
    pair.assert_idle()
    pair.close()


def test_generated_tokens_follow_the_engines_chain(none_hash: bytes) -> None:
    pair = Pair(settings={"save_decode_cache": True})
    engine = EngineHashes("sha256_cbor", BLOCK)
    pair.scheduler._identities = Identities(ENGINE_CHAIN, META, engine)
    pair.scheduler._steps._identities = pair.scheduler._identities
    hasher = kv_cache_utils.get_request_block_hasher(BLOCK, get_hash_fn_by_name("sha256_cbor"))
    request = new_request(CHUNK + 1, block_hasher=hasher)
    pair.prefill(request)
    for token in range(CHUNK):
        request.append_output_token_ids(token)
        pair.step({request: 1})
    whole = new_request(0, prompt_token_ids=[*request.all_token_ids, 7], block_hasher=hasher)
    assert pair.ask(whole) == 2 * CHUNK
    for done in (request, whole):
        pair.finish(done)
    pair.assert_idle()
    pair.close()


def test_shorter_hashes_are_padded_and_all_that_makes_them_is_in_the_key(
    none_hash: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def short(value: Any) -> bytes:
        return hashlib.md5(repr(value).encode()).digest()

    request = hashed_by_engine(short, BLOCK)()
    chain, _ = Identities(ENGINE_CHAIN, META, EngineHashes("xxhash", BLOCK)).chain(request)
    chain.extend(request.all_token_ids[:LENGTH])
    assert chain.hashes()[:32] == request.block_hashes[1] + bytes(16)

    def namespace(algorithm: str = "sha256", hash_block: int = BLOCK) -> str:
        return Identities(ENGINE_CHAIN, META, EngineHashes(algorithm, hash_block)).namespace()

    own = Identities(LMCacheEngineConfig.from_defaults(chunk_size=CHUNK), META).namespace()
    others = [own, namespace(), namespace("sha256_cbor"), namespace(hash_block=CHUNK)]
    monkeypatch.setattr(kv_cache_utils, "NONE_HASH", bytes(32))
    assert len({*others, namespace()}) == 5


def cache_config(algorithm: str) -> Any:
    return SimpleNamespace(
        cache_config=SimpleNamespace(
            prefix_caching_hash_algo=algorithm, enable_prefix_caching=True
        ),
        model_config=SimpleNamespace(multimodal_config=None),
    )


def test_chunks_that_do_not_end_where_the_engine_hashes_stop_the_start() -> None:
    config = LMCacheEngineConfig.from_defaults(chunk_size=24, chain="engine")
    kv_cache: Any = SimpleNamespace(hash_block_size=16)
    with pytest.raises(ConfigError, match=r"24 is no multiple.*16 or 32.*chain to own"):
        engine_hashes_of(config, cache_config("sha256"), kv_cache)
    kv_cache.hash_block_size = 8
    assert engine_hashes_of(config, cache_config("sha256"), kv_cache).hash_block == 8


def test_the_choice_of_chain_is_told_with_what_follows() -> None:
    own = LMCacheEngineConfig.from_defaults()
    engine = LMCacheEngineConfig.from_defaults(chain="engine")
    assert "the same in every process" in chain_notice(own, cache_config("sha256"))
    assert "PYTHONHASHSEED" in chain_notice(engine, cache_config("sha256_cbor"))
    assert "this process's own" in chain_notice(engine, cache_config("xxhash"))


def test_a_model_name_that_is_too_long_stops_the_start() -> None:
    metadata = dataclasses.replace(META, model_name="é" * 4000)
    config = LMCacheEngineConfig.from_defaults(chunk_size=CHUNK)
    with pytest.raises(compat.UnsupportedEngineError, match="--served-model-name"):
        identities_of(config, metadata, cache_config("sha256"), None)  # type: ignore[arg-type]
