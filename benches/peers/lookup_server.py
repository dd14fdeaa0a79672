"""A worker's process: a store, a lookup server, and Python threads that burn its GIL."""

from __future__ import annotations

import hashlib
import sys
import threading

from answering import Answers

from lmcache_rs import _native

PAGE = 4096
LEASE_MS = 10_000


def burn() -> None:
    while True:
        sum(range(1000))


def main() -> None:
    path, namespace, num_chunks, num_burners = sys.argv[1:]
    answers = Answers()
    # Leases may hold half of the pool.
    cpu = _native.LocalCpu(PAGE * (int(num_chunks) + 4) * 2, LEASE_MS)
    for index in range(int(num_chunks)):
        objects = cpu.allocate([64])
        assert objects, "the pool holds every chunk"
        cpu.put(namespace, hashlib.sha256(b"%d" % index).digest(), objects[0])
    server = _native.LookupServer(path, cpu)
    for _ in range(int(num_burners)):
        threading.Thread(target=burn, daemon=True).start()

    def put(namespace: str, hashes: str) -> int:
        """Stores chunks of these hashes, given in hexadecimal; how many fit."""
        packed = bytes.fromhex(hashes)
        for at in range(0, len(packed), 32):
            objects = cpu.allocate([64])
            if not objects:
                return at // 32
            cpu.put(namespace, packed[at : at + 32], objects[0])
        return len(packed) // 32

    answers.serve({"stats": server.stats, "put": put})


if __name__ == "__main__":
    main()
