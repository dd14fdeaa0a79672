"""The tier on local disks in real engines: warm after a restart, and never wrong.

As in test_hits, the engine's memory is overwritten with noise before a hit, and host memory is
emptied, so that what is loaded was on disk.
"""

from __future__ import annotations

import functools
import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from checks import Baseline, Prompts, check, chunk_bytes
from harness import Engine, EngineSpec, Prompt
from test_parallel import MAX_TOKENS, TENSOR, ask

CHUNK = 64
SPEC = EngineSpec()
LENGTHS = (199, 300, 129, 900)
# Less than one of the prompts has.
SMALL_POOL = 12 * chunk_bytes(SPEC)


def over(folder: Path, spec: EngineSpec = SPEC, *extra: tuple[str, object]) -> EngineSpec:
    """An engine over a folder."""
    disk = (("lmcache.local_disk", str(folder)), ("lmcache.max_local_disk_size", 0.25))
    return replace(spec, extra=(*spec.extra, *disk, *extra))


def stored(prompt: Prompt) -> int:
    return len(prompt) // CHUNK * CHUNK


def forget(engine: Engine) -> None:
    """Nobody but the disk has a chunk."""
    engine.cool()
    engine.worker("probe_forget")


def store(
    engine: Engine, baseline: Baseline, prompts: Sequence[Prompt], *, may_fail: bool = False
) -> None:
    """Asks until the disk has all of them: a chunk that was lost is missed by a read, and stored
    after it; in a small pool few puts may wait."""
    for prompt in prompts:
        for _ in range(8):
            forget(engine)
            reply, _ = check(engine, baseline, [prompt], may_fail=may_fail)
            if reply.external_tokens == stored(prompt):
                break
        else:
            raise AssertionError(f"{reply.external_tokens} of {stored(prompt)} tokens are stored")
    forget(engine)


def files(folder: Path) -> list[Path]:
    """The chunks' files."""
    return sorted((folder / "lmcache_rs.v1").glob("[0-3][0-9a-f]/*"))


def misses(engine: Engine) -> dict[str, int]:
    """Faults of the tier since the start, by reason."""
    counters, prefix = engine.report().counters, "LocalDiskBackend_faults_"
    return {
        name.removeprefix(prefix): count
        for name, count in counters.items()
        if name.startswith(prefix) and count
    }


class Filled:
    """A folder that an engine has filled and left, its prompts, and what it was seen to store."""

    def __init__(self, folder: Path, baseline: Baseline) -> None:
        self.folder, self.seen = folder / "disk", str(folder / "seen")
        source = Prompts("disk")
        self.prompts = [source.fresh(n) for n in LENGTHS]
        self.others = [source.fresh(n) for n in (260, 135, 420, 200, 330, 150)]
        # Saves are behind their step, and puts behind them: the shutdown waits for both.
        with Engine(over(self.folder, replace(SPEC, layout="mp"))) as engine:
            check(engine, baseline, self.prompts)
            engine.worker("probe_keep_seen", self.seen)

    def reopened(self, spec: EngineSpec = SPEC, *extra: tuple[str, object]) -> Engine:
        """Another engine over the folder."""
        engine = Engine(over(self.folder, spec, *extra))
        engine.worker("probe_take_seen", self.seen)
        return engine


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory, baseline: Baseline) -> Filled:
    """The folder of this file."""
    return Filled(tmp_path_factory.mktemp("disk"), baseline)


@pytest.fixture(scope="module")
def engine(filled: Filled) -> Iterator[Engine]:
    """An engine of another process than the one that has stored, with little host memory."""
    with filled.reopened(replace(SPEC, pool_bytes=SMALL_POOL)) as engine:
        yield engine


def test_the_first_request_after_a_restart_is_served_from_disk(
    filled: Filled, engine: Engine, baseline: Baseline
) -> None:
    assert len(files(filled.folder)) == sum(stored(prompt) // CHUNK for prompt in filled.prompts)
    for prompt in filled.prompts[:3]:
        check(engine, baseline, [prompt], [(0, stored(prompt))])
    assert "LocalDiskBackend healthy" in engine.log()


def counted(engine: Engine, name: str) -> int:
    """One of the connector's counters."""
    return int(engine.report().counters[name])


def test_a_hit_larger_than_the_pool_comes_whole(
    filled: Filled, engine: Engine, baseline: Baseline
) -> None:
    forget(engine)
    large = filled.prompts[3]
    assert stored(large) // CHUNK * chunk_bytes(SPEC) > SMALL_POOL
    names = ("loaded_tokens", "streamed_loads", "streamed_chunks", "LocalDiskBackend_got_chunks")
    before = [counted(engine, name) for name in names]
    check(engine, baseline, [large], [(0, stored(large))])
    after = [counted(engine, name) - old for name, old in zip(names, before, strict=True)]
    assert after == [stored(large), 1, stored(large) // CHUNK, stored(large) // CHUNK]


def test_a_prompt_larger_than_the_pool_is_stored_whole(baseline: Baseline, tmp_path: Path) -> None:
    # It is computed piece by piece, and its beginning leaves host memory for its end.
    spec = replace(SPEC, pool_bytes=SMALL_POOL, max_num_batched_tokens=2 * CHUNK)
    prompt = Prompts("outgrown").fresh(1000)
    with Engine(over(tmp_path / "disk", spec)) as engine:
        store(engine, baseline, [prompt])
        check(engine, baseline, [prompt], [(0, stored(prompt))])


def test_each_rank_streams_its_part(baseline: Baseline, tmp_path: Path) -> None:
    # Half of a chunk is a rank's.
    spec = replace(TENSOR, pool_bytes=SMALL_POOL // 2, max_num_batched_tokens=2 * CHUNK)
    prompt = Prompts("ranks").fresh(1000)
    with Engine(over(tmp_path / "disk", spec)) as engine:
        for _ in range(8):
            reply = engine.ask([prompt])
            assert [a.tokens for a in reply.answers] == [
                a.tokens for a in baseline.ask([prompt], MAX_TOKENS)
            ]
            forget(engine)
            if reply.external_tokens == stored(prompt):
                break
        reports = ask(engine, baseline, [prompt], stored(prompt))
        assert [report.counters["streamed_loads"] > 0 for report in reports] == [True, True]


def test_what_the_engine_holds_of_a_hit_is_not_read(
    filled: Filled, engine: Engine, baseline: Baseline
) -> None:
    large = filled.prompts[3]
    held = 5 * CHUNK
    forget(engine)
    # The engine's own prefix cache has five chunks from now on, and host memory none.
    check(engine, baseline, [replace(large, tokens=large.tokens[: held + 1])])
    engine.worker("probe_forget")
    before = counted(engine, "LocalDiskBackend_got_bytes")
    check(engine, baseline, [large], [(held, stored(large) - held)])
    read = counted(engine, "LocalDiskBackend_got_bytes") - before
    assert read == (stored(large) - held) // CHUNK * chunk_bytes(SPEC)


def test_files_that_are_deleted_under_load_are_misses_and_nothing_else(
    filled: Filled, baseline: Baseline
) -> None:
    # Of what is streamed a part may fail, which the engine of the other tests is not to count.
    with filled.reopened(replace(SPEC, pool_bytes=SMALL_POOL)) as engine:
        delete_under_load(filled, engine, functools.partial(check, engine, baseline, may_fail=True))
        assert not engine.report().counters["faults"]
        # What is computed anew is kept again.
        store(engine, baseline, filled.prompts[:3], may_fail=True)


def delete_under_load(filled: Filled, engine: Engine, ask: Callable[..., object]) -> None:
    for other in filled.others:
        ask([other])
    forget(engine)
    lost = files(filled.folder)
    random.Random(1).shuffle(lost)
    ending = threading.Event()

    def delete() -> None:
        for file in lost:
            file.unlink(missing_ok=True)
            if ending.wait(0.01):
                return

    deleting = threading.Thread(target=delete)
    deleting.start()
    try:
        for prompt in (*filled.others, *filled.prompts):
            engine.cool()
            ask([prompt])
        deleting.join(60)
    finally:
        ending.set()
        deleting.join()
    for file in lost:
        file.unlink(missing_ok=True)
    forget(engine)
    for file in files(filled.folder):
        file.unlink()
    for prompt in filled.prompts[:3]:
        engine.cool()
        ask([prompt], [(0, 0)])
    # What the small pool has no room for is a miss, too.
    assert misses(engine).keys() - {"no_memory"} == {"gone"}


def test_a_flipped_bit_in_every_file_is_a_miss_with_its_reason(
    filled: Filled, engine: Engine, baseline: Baseline
) -> None:
    store(engine, baseline, filled.prompts[:3])
    before = misses(engine)
    flips = random.Random(2)
    for file in files(filled.folder):
        at = flips.randrange(file.stat().st_size)
        with file.open("r+b") as opened:
            opened.seek(at)
            (byte,) = opened.read(1)
            opened.seek(at)
            opened.write(bytes([byte ^ 1 << flips.randrange(8)]))
            os.fsync(opened.fileno())
    for prompt in filled.prompts[:3]:
        engine.cool()
        check(engine, baseline, [prompt], [(0, 0)])
    after = misses(engine)
    new = {name: after[name] - before.get(name, 0) for name in after}
    # One for each prompt at least: behind its first chunk it may be that nothing is looked at.
    assert sum(new.values()) - new.get("no_memory", 0) >= 3, new
    assert new.get("gone", 0) == 0


def test_without_host_memory_as_a_tier_it_stages_for_the_disk(
    filled: Filled, engine: Engine, baseline: Baseline
) -> None:
    store(engine, baseline, filled.prompts[:3])
    engine.worker("probe_keep_seen", filled.seen)
    with filled.reopened(SPEC, ("lmcache.local_cpu", False)) as other:
        assert "tiers: local_cpu staging, LocalDiskBackend healthy" in other.log()
        for prompt in filled.prompts[:3]:
            check(other, baseline, [prompt], [(0, stored(prompt))])
        # What is computed anew gets to the disk, too, piece by piece.
        fresh = Prompts("staged").fresh(330)
        for hits in (0, stored(fresh)):
            other.worker("probe_settle")
            other.cool()
            check(other, baseline, [fresh], [(0, hits)])
        # And nothing stays behind on the way, in either direction.
        other.worker("probe_settle")
        books = other.report().memory
        assert books["free_bytes"] == books["capacity_bytes"]
        assert books["chunks"] == books["leased_bytes"] == books["reserved_bytes"] == 0


@pytest.mark.parametrize(
    "spec",
    [
        replace(SPEC, dtype="bfloat16"),
        replace(SPEC, options='{"served_model_name": "another"}'),
    ],
    ids=["bfloat16", "another name"],
)
def test_two_identities_over_one_folder_never_meet(
    filled: Filled, engine: Engine, baseline: Baseline, spec: EngineSpec
) -> None:
    prompts = filled.prompts[:2]
    store(engine, baseline, prompts)
    with Engine(over(filled.folder, spec)) as stranger:
        for hits in ([0, 0], [stored(prompt) for prompt in prompts]):
            forget(stranger)
            reply = stranger.ask(prompts)
            report = stranger.idle_report()
            report.assert_bytes_right()
            report.assert_no_faults()
            assert [answer.cached_tokens for answer in reply.answers] == hits
            if spec.dtype == "float32":
                wanted = baseline.ask(prompts, 4)
                assert [a.tokens for a in reply.answers] == [w.tokens for w in wanted]
    # And what was there before is there still.
    for prompt in prompts:
        engine.cool()
        check(engine, baseline, [prompt], [(0, stored(prompt))])


def test_a_folder_that_cannot_be_used_costs_the_tier_and_no_more(
    baseline: Baseline, tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(b"")
    prompt = Prompts("no disk").fresh(199)
    with Engine(over(tmp_path / "file")) as engine:
        assert "SERVING WITHOUT THE LOCAL DISK TIER" in engine.log()
        assert "LocalDiskBackend off (" in engine.log()
        wanted = baseline.ask([prompt], 4)
        for hits in (0, stored(prompt)):
            engine.cool()
            reply = engine.ask([prompt])
            engine.idle_report().assert_bytes_right()
            assert reply.external_tokens == hits
            assert [a.tokens for a in reply.answers] == [w.tokens for w in wanted]
