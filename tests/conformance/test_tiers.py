"""What every tier promises, whatever it is made of."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
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


def test_a_byte_a_page_but_one_and_32_mib_come_back(big_subject: Subject) -> None:
    subject = big_subject
    for number, size in enumerate([1, PAGE - 1, 32 << 20]):
        payload = random.Random(size).randbytes(size)
        assert subject.put([key(number)], payload) == 1
        assert subject.tier.contains(key(number))
        # Compared by hand: nobody reads 32 MiB of differences.
        came = subject.got(key(number))[0]
        is_same = came == payload
        del came
        assert is_same, f"of {size} bytes"
        assert subject.tier.remove(key(number))


def test_a_thousand_chunks_come_back(subject: Subject) -> None:
    keys = chain(*range(1000))
    assert subject.put(keys, *(b"%d" % number for number in range(1000))) == 1000
    assert subject.tier.batched_contains(keys) == 1000
    assert subject.got(*keys) == [b"%d" % number for number in range(1000)]


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


def test_an_answer_that_is_called_off_leaves_nothing_behind(subject: Subject) -> None:
    payloads = [random.Random(number).randbytes(10 * PAGE) for number in range(20)]
    keys = chain(*range(20))
    subject.put(keys, *payloads)
    for _ in range(20):
        objects = subject.tier.batched_get_non_blocking(keys)
        contains = subject.tier.batched_async_contains(keys)
        objects.cancel()
        contains.cancel()
        del objects, contains
    assert subject.got(*keys) == payloads, "and others have theirs"


def test_a_chunk_is_whole_or_not_there_while_it_is_put(subject: Subject) -> None:
    payload = random.Random(0).randbytes(300 * PAGE)
    for number in range(5):
        objects = subject.objects(payload)
        with ThreadPoolExecutor(1) as threads:
            putting = threads.submit(subject.tier.batched_submit_put_task, [key(number)], objects)
            del objects
            due = time.monotonic() + DEADLINE_S
            while (came := subject.got(key(number))) == [None]:
                assert time.monotonic() < due
            assert came[0] == payload
            assert putting.result(DEADLINE_S) == 1
        assert subject.tier.flush(DEADLINE_S)
        assert subject.tier.remove(key(number))


def test_a_chunk_is_whole_or_not_there_while_it_is_removed(subject: Subject) -> None:
    payloads = [random.Random(number).randbytes(100 * PAGE) for number in range(4)]
    keys = chain(*range(4))
    for turn in range(10):
        subject.put(keys, *payloads)
        with ThreadPoolExecutor(2) as threads:
            reading = threads.submit(subject.got, *keys)
            removing = threads.submit(subject.tier.remove, keys[turn % 4])
            came = reading.result(60)
            assert removing.result(60)
        num_came = sum(each is not None for each in came)
        assert came == payloads[:num_came] + [None] * (4 - num_came)
        assert num_came >= turn % 4, "those before it are there"
        assert subject.got(keys[turn % 4]) == [None]


def test_one_of_many_puts_of_a_key_is_stored_whole(subject: Subject) -> None:
    payloads = [bytes([number]) * (50 * PAGE) for number in range(4)]
    for turn in range(5):
        objects = [subject.objects(payload) for payload in payloads]
        barrier = threading.Barrier(4)

        def put(number: int, turn: int = turn, of: object = objects, at: object = barrier) -> None:
            at.wait(60)  # type: ignore[attr-defined]
            subject.tier.batched_submit_put_task([key(turn)], of[number])  # type: ignore[index]

        with ThreadPoolExecutor(4) as threads:
            for done in [threads.submit(put, number) for number in range(4)]:
                done.result(60)
        del objects, put
        assert subject.tier.flush(DEADLINE_S)
        (came,) = subject.got(key(turn))
        assert came in payloads
        assert subject.got(key(turn)) == [came], "and stays"


def test_an_object_of_another_chunk_is_a_miss_and_leaves(subject: Subject) -> None:
    if subject.exchange is None:
        pytest.skip("nobody gets behind it")
    subject.put(chain(1, 2, 3), b"1" * PAGE, b"2" * PAGE, b"3" * PAGE)
    subject.exchange(key(2), key(3))
    assert subject.got(*chain(1, 2, 3)) == [b"1" * PAGE, None, None]
    assert not subject.tier.contains(key(2))
    assert subject.got(key(3)) == [b"3" * PAGE]
    subject.put(chain(2), b"2" * PAGE)
    assert subject.got(*chain(1, 2, 3)) == [b"1" * PAGE, b"2" * PAGE, b"3" * PAGE]


def test_what_was_stored_is_there_when_it_is_opened_again(subject: Subject) -> None:
    if subject.reopen is None:
        pytest.skip("it keeps nothing")
    keys = chain(*range(20))
    payloads = [random.Random(number).randbytes(PAGE + number) for number in range(20)]
    subject.put(keys, *payloads)
    assert subject.tier.remove(keys[7])
    assert subject.tier.close(DEADLINE_S)
    subject.tier = subject.reopen()
    assert subject.tier.batched_contains(keys) == 7
    assert subject.got(*keys[:8]) == [*payloads[:7], None]
    assert subject.got(*keys[8:]) == payloads[8:]
    subject.put(keys[7:8], payloads[7])
    assert subject.got(*keys) == payloads


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
