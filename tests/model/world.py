"""What the KV of a prefix is, and a paged memory that holds it.

The KV of a token is a pure function of everything that decides it: the request's identity (salt,
adapter), the whole prefix up to the token, and the layer. So whatever lies in a slot can be judged
without knowing where it came from.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

BLOCK, CHUNK, LAYERS = 4, 8, 2
"""Tokens of a block and of a chunk; layers of the model."""
MAX_TOKENS = 72
"""The longest request, in tokens."""
VOCAB = 3
"""Few, so that requests that were not made alike become so."""
GARBAGE_TOKEN = 1_000_000
"""What is sampled after reading anything but one's own prefix."""
LAYER_NAMES = [f"layer.{layer}" for layer in range(LAYERS)]
CELL_BYTES = 8
"""KV of a token in one layer: K and V of one float32 each."""
CHUNK_BYTES = 4096
"""What a stored chunk takes of the pool: one page."""

Cells = npt.NDArray[np.int64]
_LAYER_MARKS = np.array([(layer + 1) * 0x5DEECE66D for layer in range(LAYERS)], dtype=np.int64)
_POISON = np.int64(-0x5A5A5A5A5A5A5A5B)
_NOISE = np.int64(0x1B873593CC9E2D51)


class Prefix:
    """The tokens of one request as they grow, and the KV that each of them has."""

    def __init__(self, identity: str, tokens: Sequence[int]) -> None:
        digest = hashlib.sha256(identity.encode()).digest()
        self._root = int.from_bytes(digest[:7])
        self._states: Cells = np.zeros(MAX_TOKENS + 2 * CHUNK, dtype=np.int64)
        self._known = 0
        self.tokens = list(tokens)

    def replace(self, tokens: Sequence[int]) -> None:
        """The tokens are these now."""
        known = min(self._known, len(tokens))
        self._known = known if self.tokens[:known] == list(tokens[:known]) else 0
        self.tokens = list(tokens)

    def truncate(self, num_tokens: int) -> None:
        """Forgets what is behind so many tokens."""
        del self.tokens[num_tokens:]
        self._known = min(self._known, len(self.tokens))

    def next_token(self, num_tokens: int) -> int:
        """What the model says after so many tokens."""
        return int(self._upto(num_tokens)[-1] >> 5) % VOCAB

    def kv(self, start: int, end: int) -> Cells:
        """`[layers, end - start]`: the KV of the tokens from `start` to `end`."""
        return self._upto(end)[start:] ^ _LAYER_MARKS[:, None]

    def _upto(self, end: int) -> Cells:
        if end > self._known:
            state = int(self._states[self._known - 1]) if self._known else self._root
            for at in range(self._known, end):
                # Python's hash of integers is the same in every process.
                state = hash((state, self.tokens[at]))
                self._states[at] = state
            self._known = end
        return self._states[:end]


class PagedMemory:
    """The engine's KV memory: one cell a slot and layer, full of noise at first.

    `cells` is `[layers, slots]`; `tensors` are the same bytes as the engine's layers see them,
    `[blocks, heads, tokens, K and V]`.
    """

    def __init__(self, num_blocks: int) -> None:
        slots = np.arange(LAYERS * num_blocks * BLOCK, dtype=np.int64)
        self.cells: Cells = (slots * _NOISE).reshape(LAYERS, num_blocks * BLOCK)
        floats = torch.from_numpy(self.cells.view(np.float32))
        shaped = floats.view(LAYERS, num_blocks, 1, BLOCK, 2)
        self.tensors = dict(zip(LAYER_NAMES, shaped.unbind(), strict=True))
        self._before: Cells | None = None

    def slots(self, table: Sequence[int], start: int, end: int) -> Cells:
        """The slots of the tokens from `start` to `end`."""
        positions = np.arange(start, end)
        blocks = np.asarray(table, dtype=np.int64)
        return blocks[positions // BLOCK] * BLOCK + positions % BLOCK

    def watch_writes(self) -> None:
        """Hides all KV until `written` is asked, so that a write of what is there is seen too."""
        self._before = self.cells.copy()
        self.cells[:] = _POISON

    def written(self, layer: int) -> npt.NDArray[np.bool_]:
        """Which slots of the layer were written since `watch_writes`; the others are as before."""
        assert self._before is not None, "watch_writes comes first"
        written: npt.NDArray[np.bool_] = self.cells[layer] != _POISON
        np.copyto(self.cells[layer], self._before[layer], where=~written)
        return written

    def written_slots(self, layer: int) -> set[int]:
        """As `written`, by number."""
        return set(np.flatnonzero(self.written(layer)).tolist())


def garbage(kv: Cells) -> Cells:
    """What comes out of attention over something else than the prefix."""
    return kv ^ _NOISE


def stored_form(kv: Cells) -> bytes:
    """The bytes of a stored chunk whose KV is `[layers, tokens]`: layer by layer."""
    return np.ascontiguousarray(kv).tobytes()
