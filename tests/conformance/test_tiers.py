"""What every tier promises, whatever it is made of."""

from __future__ import annotations

import asyncio
import random
import threading
from concurrent.futures import ThreadPoolExecutor

from tiers import DEADLINE_S, PAGE, Subject, chain, key

from lmcache_rs import MemoryObj


def test_what_is_put_comes_back_byte_for_byte(subject: Subject) -> None:
    payloads = [random.Random(number).randbytes(PAGE) for number in range(4)]
    keys = chain(0, 1, 2, 3)
    assert subject.put(keys, *payloads) == 4
    assert subject.got(*keys) == payloads
    assert subject.got(keys[2]) == [payloads[2]]


def test_what_is_put_is_there(subject: Subject) -> None:
    assert not subject.tier.contains(key(1))
    subject.put(chain(1), b"x")
    assert subject.tier.contains(key(1))
    assert subject.tier.batched_contains(chain(1)) == 1


def test_what_nobody_put_is_a_miss(subject: Subject) -> None:
    subject.put(chain(1), b"x")
    for stranger in (
        key(2),
        key(1, facts={"layout": "x"}),
        key(1, request_configs={"lmcache.tag.t": 1}),
    ):
        assert not subject.tier.contains(stranger)
        assert subject.got(stranger) == [None]
        assert not subject.tier.remove(stranger)
    assert subject.tier.batched_contains([]) == 0
    assert subject.got() == []


def test_a_gap_ends_every_answer(subject: Subject) -> None:
    subject.put(chain(1, 2, 4), b"1", b"2", b"4")
    keys = chain(1, 2, 3, 4)
    assert subject.tier.batched_contains(keys) == 2
    assert subject.got(*keys) == [b"1", b"2", None, None]
    assert subject.tier.batched_contains(keys[2:]) == 0
    assert subject.got(*keys[2:]) == [None, None]
    assert subject.tier.contains(key(4))


def test_a_removed_chunk_is_a_miss_and_may_come_again(subject: Subject) -> None:
    subject.put(chain(1, 2), b"1", b"2")
    assert subject.tier.remove(key(1))
    assert not subject.tier.remove(key(1))
    assert subject.tier.batched_contains(chain(1, 2)) == 0
    assert subject.got(*chain(1, 2)) == [None, None]
    assert subject.got(key(2)) == [b"2"]
    subject.put(chain(1), b"1")
    assert subject.got(*chain(1, 2)) == [b"1", b"2"]


def test_a_put_of_a_known_key_only_refreshes(subject: Subject) -> None:
    subject.put(chain(1), b"first")
    subject.put(chain(1), b"other")
    assert subject.got(key(1)) == [b"first"]


def test_what_is_got_is_sealed_and_outlives_its_chunk(subject: Subject) -> None:
    subject.put(chain(1), b"kept")
    (held,) = subject.tier.batched_get_blocking(chain(1))
    assert isinstance(held, MemoryObj)
    assert held.sealed
    assert subject.tier.remove(key(1))
    assert held.to_bytes() == b"kept"


def test_a_chunk_that_was_lost_behind_the_tier_is_a_miss(subject: Subject) -> None:
    subject.put(chain(1, 2), b"1", b"2")
    assert subject.tier.batched_contains(chain(1, 2)) == 2
    subject.lose(key(2))
    assert subject.got(*chain(1, 2)) == [b"1", None]
    assert not subject.tier.contains(key(2))


def test_empty_tiny_and_big_chunks_come_back(subject: Subject) -> None:
    sizes = [0, 1, 255, PAGE - 1, PAGE, PAGE + 1, 700_001]
    payloads = [random.Random(size).randbytes(size) for size in sizes]
    keys = chain(*range(len(sizes)))
    assert subject.put(keys, *payloads) == len(sizes)
    assert subject.tier.batched_contains(keys) == len(sizes)
    assert subject.got(*keys) == payloads


def test_many_chunks_come_back(subject: Subject) -> None:
    keys = chain(*range(500))
    assert subject.put(keys, *(b"%d" % number for number in range(500))) == 500
    assert subject.tier.batched_contains(keys) == 500
    assert subject.got(*keys) == [b"%d" % number for number in range(500)]


def test_answers_may_be_waited_for_elsewhere(subject: Subject) -> None:
    subject.put(chain(1, 2), b"1", b"2")
    keys = chain(1, 2, 3)
    contains = subject.tier.batched_async_contains(keys)
    objects = subject.tier.batched_get_non_blocking(keys)
    assert contains.result(DEADLINE_S) == 2
    found = objects.result(DEADLINE_S)
    assert [each and each.to_bytes() for each in found] == [b"1", b"2", None]

    async def awaited() -> int:
        return await asyncio.wrap_future(subject.tier.batched_async_contains(keys))

    assert asyncio.run(awaited()) == 2


def test_threads_that_put_get_and_remove_see_whole_chunks(subject: Subject) -> None:
    payloads = [random.Random(number).randbytes(3 * PAGE) for number in range(12)]
    stop = threading.Event()

    def put(seed: int) -> None:
        numbers = random.Random(seed)
        for _ in range(40):
            number = numbers.randrange(12)
            objects = subject.objects(payloads[number])
            subject.tier.batched_submit_put_task(chain(number), objects)

    def get(seed: int) -> int:
        numbers, hits = random.Random(seed), 0
        while not stop.is_set():
            number = numbers.randrange(11)
            for at, found in enumerate(subject.got(*chain(number, number + 1))):
                assert found in (None, payloads[number + at])
                hits += found is not None
        return hits

    def remove() -> None:
        for number in range(12):
            subject.tier.remove(key(number))

    with ThreadPoolExecutor(6) as threads:
        readers = [threads.submit(get, seed) for seed in range(2)]
        writers = [threads.submit(put, seed) for seed in range(3)] + [threads.submit(remove)]
        for writer in writers:
            writer.result(60)
        assert subject.tier.flush(DEADLINE_S)
        stop.set()
        for reader in readers:
            reader.result(60)
    subject.put(chain(*range(12)), *payloads)
    assert subject.got(*chain(*range(12))) == payloads


def test_a_prefix_is_cleared_and_the_rest_is_kept(subject: Subject) -> None:
    tenants = [key(1, request_configs={"lmcache.tag.t": name}) for name in ("a", "ab", "b")]
    subject.put(tenants, b"a", b"ab", b"b")
    assert subject.tier.clear(tenants[0].namespace) == 1
    assert [subject.tier.contains(each) for each in tenants] == [False, True, True]
    assert subject.tier.retain(tenants[1].namespace) == 1
    assert [subject.tier.contains(each) for each in tenants] == [False, True, False]
    assert subject.tier.clear("model=m") == 1
    subject.put(tenants, b"a", b"ab", b"b")
    assert subject.tier.clear() == 3
    assert subject.got(tenants[0]) == [None]


def test_pending_puts_are_done_before_a_close(subject: Subject) -> None:
    keys = chain(*range(50))
    subject.tier.batched_submit_put_task(keys, subject.objects(*[b"x" * PAGE] * 50))
    assert subject.tier.close(DEADLINE_S)
    # L1 is emptied by a close; of the others all were made.
    assert subject.tier.stats().get("put_chunks", 50) == 50


def test_a_closed_tier_is_empty_and_stays_so(subject: Subject) -> None:
    subject.put(chain(1), b"x")
    assert subject.tier.close(DEADLINE_S)
    assert subject.tier.close(DEADLINE_S)
    assert not subject.tier.contains(key(1))
    assert subject.tier.batched_contains(chain(1)) == 0
    assert subject.got(key(1)) == [None]
    assert not subject.tier.remove(key(1))
    assert subject.tier.clear() == 0
    assert subject.tier.flush(DEADLINE_S)
