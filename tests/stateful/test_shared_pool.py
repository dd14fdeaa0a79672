"""A pool that several ranks read, in any order of loads, clears, evictions and deaths.

The pool, its server and the readers are the real ones. What is stored, and who has yet to take its
share of which lease, is kept beside them in plain Python.

While a lease holds, whoever has a share of it loads all that was promised, whatever happens to the
cache; what is loaded is what was stored under that name, or nothing; and when all is taken or given
back, nobody holds a byte.
"""

from __future__ import annotations

import pathlib
import shutil
import tempfile
import time

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from lmcache_rs import _native

NUM_READERS = 2
LAYERS, BLOCK, BLOCKS, DIM = 2, 4, 40, 6
CHUNK = 8
CHUNK_BYTES = 4096
POOL_CHUNKS = 8
PROMPTS = 4
MOST_CHUNKS = 3
# Longer than any run: no lease may seem given back because it ran out.
LEASE_MS = 3_600_000
PATIENT_MS = 60_000
SECRET, READERS = "scheduler", "reader"
prompts = st.integers(0, PROMPTS - 1)
readers = st.integers(0, NUM_READERS - 1)


def hashes(prompt: int, num_chunks: int) -> bytes:
    return b"".join(bytes([prompt, chunk]) * 16 for chunk in range(num_chunks))


class Rank:
    """An engine's blocks, and how they are copied."""

    def __init__(self) -> None:
        self.layers = [torch.zeros(BLOCKS, BLOCK, DIM) for _ in range(LAYERS)]
        block_bytes = BLOCK * DIM * 4
        self.paged = _native.PagedCache.opaque(
            [(layer.data_ptr(), layer.numel() * 4) for layer in self.layers],
            BLOCKS,
            block_tokens=BLOCK,
            block_bytes=block_bytes,
            block_stride=block_bytes,
            keep_alive=self.layers,
        )
        self.queue = _native.TransferQueue()

    def write(self, block_ids: list[int], prompt: int) -> None:
        for at, block in enumerate(block_ids):
            for number, layer in enumerate(self.layers):
                layer[block] = content(prompt, at, number)


def content(prompt: int, block: int, layer: int) -> float:
    return float(1 + prompt * 100 + block * 10 + layer)


class SharedPool(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="lmc-"))
        self.folder.chmod(0o700)
        self.pool = _native.LocalCpu(POOL_CHUNKS * CHUNK_BYTES, LEASE_MS, num_readers=NUM_READERS)
        self.ranks = [Rank() for _ in range(1 + NUM_READERS)]
        self.serve()
        self.connections: list[_native.RegionReader | None] = [
            self.connect() for _ in range(NUM_READERS)
        ]
        # Readers that have a connection, and those of them whose has ended without their knowing.
        self.connected = set(range(1, 1 + NUM_READERS))
        self.stale: set[int] = set()
        # Shares not yet taken of each prompt's lease, and the chunks that it covers.
        self.shares: dict[int, set[int]] = {}
        self.leased: dict[int, int] = {}

    def serve(self) -> None:
        self.server = _native.LookupServer(
            self.folder / "s", self.pool, SECRET, {}, reader_secret=READERS
        )

    def connect(self) -> _native.RegionReader:
        return _native.RegionReader(self.folder / "s", READERS, PATIENT_MS)

    # --- the scheduler and the first rank -----------------------------------------------------

    @rule(prompt=prompts, num_chunks=st.integers(1, MOST_CHUNKS))
    def store(self, prompt: int, num_chunks: int) -> None:
        """Evicts what it must: the pool is smaller than what all prompts take."""
        rank = self.ranks[0]
        block_ids = list(range(num_chunks * CHUNK // BLOCK))
        rank.write(block_ids, prompt)
        _native.store(
            self.pool,
            rank.paged,
            "ns",
            hashes(prompt, num_chunks),
            chunk_size=CHUNK,
            num_tokens=num_chunks * CHUNK,
            blocks=block_ids,
        )

    @rule(prompt=prompts)
    def look_up(self, prompt: int) -> None:
        found, _ = self.pool.lookup(f"r{prompt}", "ns", hashes(prompt, MOST_CHUNKS))
        self.end_lease(prompt)
        if found:
            self.shares[prompt] = set(range(1 + NUM_READERS))
            self.leased[prompt] = found

    @rule(prompt=prompts)
    def release(self, prompt: int) -> None:
        assert self.pool.release(f"r{prompt}") == (prompt in self.leased)
        self.end_lease(prompt)

    @rule()
    def clear(self) -> None:
        self.pool.clear()

    def end_lease(self, prompt: int) -> None:
        self.shares.pop(prompt, None)
        self.leased.pop(prompt, None)

    def take_share(self, prompt: int, rank: int) -> int:
        """What a rank is sure to find for a prompt, in chunks."""
        left = self.shares.get(prompt)
        if left is None or rank not in left:
            return 0
        sure = self.leased[prompt]
        left.remove(rank)
        if not left:
            self.end_lease(prompt)
        return sure

    # --- loads --------------------------------------------------------------------------------

    @rule(prompt=prompts, skip=st.sampled_from([0, BLOCK, CHUNK]))
    def the_first_rank_loads(self, prompt: int, skip: int) -> None:
        if 0 in self.shares.get(prompt, {0}):
            self.load(0, prompt, skip)

    @rule(prompt=prompts, reader=readers, skip=st.sampled_from([0, BLOCK, CHUNK]))
    def a_reader_loads(self, prompt: int, reader: int, skip: int) -> None:
        # As vLLM has it, no rank loads a promise twice.
        if 1 + reader in self.shares.get(prompt, {1 + reader}):
            self.load(1 + reader, prompt, skip)

    def load(self, number: int, prompt: int, skip: int) -> None:
        rank = self.ranks[number]
        sure = self.leased.get(prompt, 0)
        num_chunks = sure or MOST_CHUNKS
        if skip >= num_chunks * CHUNK:
            return
        block_ids = list(range(20, 20 + num_chunks * CHUNK // BLOCK))
        for layer in rank.layers:
            layer.fill_(-1.0)
        asked = {
            "chunk_size": CHUNK,
            "num_tokens": num_chunks * CHUNK,
            "blocks": block_ids,
            "skip": skip,
        }
        packed = hashes(prompt, num_chunks)
        lookup_id = f"r{prompt}"
        if number == 0:
            transfer = rank.queue.begin_load(
                self.pool, rank.paged, lookup_id, "ns", packed, **asked
            )
        else:
            reader = self.connections[number - 1]
            if reader is None:
                return
            transfer = _native.begin_shared_load(
                rank.queue, reader, rank.paged, lookup_id, "ns", packed, **asked
            )
        assert transfer.wait()
        end, tokens, _ = transfer.outcome()
        if number in self.stale:
            # It finds out now, and has failed; nobody was asked.
            self.stale.discard(number)
            self.connected.discard(number)
            assert end == skip
            return
        if number:
            # One that knew that it has none has made a new one.
            self.connected.add(number)
        sure = self.take_share(prompt, number)
        assert end >= max(sure * CHUNK, skip), "a promise was not kept"
        assert tokens == end - skip
        first, last = skip // BLOCK, end // BLOCK
        for number_of_layer, layer in enumerate(rank.layers):
            for at in range(first, last):
                wanted = content(prompt, at, number_of_layer)
                assert bool((layer[block_ids[at]] == wanted).all()), "another chunk's bytes"

    @rule(prompt=prompts, order=st.permutations(range(1 + NUM_READERS)))
    def all_load(self, prompt: int, order: list[int]) -> None:
        """As one step has it, in whichever order."""
        for number in order:
            if number in self.shares.get(prompt, set()):
                self.load(number, prompt, 0)

    # --- deaths -------------------------------------------------------------------------------

    @rule(reader=readers)
    def a_reader_dies_or_comes_back(self, reader: int) -> None:
        alive = self.connections[reader]
        if alive is None:
            self.connections[reader] = self.connect()
            self.connected.add(1 + reader)
        else:
            alive.close()
            self.connections[reader] = None
            self.connected.discard(1 + reader)
            self.stale.discard(1 + reader)

    @rule()
    def the_server_starts_anew(self) -> None:
        self.server.close()
        self.serve()
        self.stale = set(self.connected)

    # --- what always holds --------------------------------------------------------------------

    @invariant()
    def only_leases_hold_bytes(self) -> None:
        until = time.monotonic() + 60
        while True:
            books = self.pool.audit()
            assert books["leases"] == len(self.leased)
            # A reader's connection that ended is noticed by the server's thread.
            if self.leased or not books["leased_bytes"]:
                break
            assert time.monotonic() < until, books
            time.sleep(0.001)
        assert books["free_bytes"] + books["cached_bytes"] <= books["capacity_bytes"]

    def teardown(self) -> None:
        for prompt in list(self.leased):
            self.release(prompt)
        self.only_leases_hold_bytes()
        books = self.pool.audit()
        assert books["free_bytes"] + books["cached_bytes"] == books["capacity_bytes"]
        for rank in self.ranks:
            rank.queue.close()
        for connection in self.connections:
            if connection is not None:
                connection.close()
        self.server.close()
        self.pool.close()
        shutil.rmtree(self.folder)


SharedPool.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestSharedPool = SharedPool.TestCase
