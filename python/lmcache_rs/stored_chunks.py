"""What `lmcache-rs store` prints of the chunks in a folder or on a server."""

from __future__ import annotations

import collections
import time
from collections.abc import Iterable
from dataclasses import dataclass

EXIT_OK = 0
EXIT_FOUND = 1
EXIT_USAGE = 2
HEAD_BYTES = 1 << 16
"""Headers are longer only where positions are kept."""


@dataclass(frozen=True)
class StoredChunk:
    """A chunk's file, or its value on a server.

    Args:
        place: Where it is: a path, or a name on the server.
        name: The last part of it that tells it from others.
        nbytes: Its size.
        modified: When it was written, in seconds since 1970; None where that is not told.
        key: The chunk's key; None if its header does not read right.
        payload_bytes: Bytes of the chunk.
        num_tokens: Tokens of the chunk; 0 if nobody said.
        defect: What is wrong with it, in one word.
    """

    place: str
    name: str
    nbytes: int
    modified: float | None
    key: str | None
    payload_bytes: int
    num_tokens: int
    defect: str | None


def print_each(chunks: Iterable[StoredChunk]) -> int:
    """Prints a line for each chunk."""
    now = time.time()
    for each in chunks:
        age = "-" if each.modified is None else str(max(0, int(now - each.modified)))
        what = each.key or f"({each.defect}: {each.name})"
        print(f"{each.payload_bytes:>12} bytes {each.num_tokens:>6} tokens {age:>8} s  {what}")
    return EXIT_OK


def print_damaged(chunks: Iterable[StoredChunk]) -> int:
    """Prints a line for each damaged chunk, and their number."""
    count, nbytes, damaged = 0, 0, 0
    for each in chunks:
        count += 1
        nbytes += each.nbytes
        if each.defect is not None:
            damaged += 1
            print(f"{each.defect}: {each.place}")
    print(f"{count} chunks, {nbytes} bytes, {damaged} damaged")
    return EXIT_FOUND if damaged else EXIT_OK


def print_by_model(chunks: Iterable[StoredChunk]) -> int:
    """Prints how much is stored, by model."""
    count: collections.Counter[str] = collections.Counter()
    nbytes: collections.Counter[str] = collections.Counter()
    tokens: collections.Counter[str] = collections.Counter()
    for each in chunks:
        model = (each.key or "(unreadable)").split("@")[0]
        count[model] += 1
        nbytes[model] += each.nbytes
        tokens[model] += each.num_tokens
    for model in sorted(count):
        print(f"{model}: {count[model]} chunks, {nbytes[model]} bytes, {tokens[model]} tokens")
    print(f"total: {count.total()} chunks, {nbytes.total()} bytes, {tokens.total()} tokens")
    return EXIT_OK
