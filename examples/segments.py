"""Documents that are computed once and reused at any place in a prompt, in any order.

A prompt here is some documents and a question, with a separator between them, as in retrieval. The
engine lets each document attend to itself alone, and the question to everything. A document's KV
then depends on where it stands in one way only: its keys are rotated to their positions. lmcache_rs
keeps each document under its own tokens' hash, and turns the keys when it puts them elsewhere.

    python examples/segments.py

What an engine has to do is in `Library`: `store` and `restore`, their calls marked 1 to 6. Every
restored key and value, and every answer, is compared with one computed from nothing.
"""

from __future__ import annotations

import torch

from lmcache_rs import (
    LMCacheEngineConfig,
    LMCacheMetadata,
    MemoryFormat,
    SegmentTokenDatabase,
    StorageManager,
)
from lmcache_rs.gpu_connector import Rope, VLLMBufferLayerwiseGPUConnector, by_layer

LAYERS, HEADS, HEAD = 3, 4, 16
WIDTH = HEADS * HEAD
VOCABULARY, SEPARATOR = 1000, [998, 999]
BLOCK, BLOCKS = 16, 64
ROPE = Rope.of_base(10_000.0, HEAD)


class Model:
    """A decoder with random weights, which suits a comparison as well as any."""

    def __init__(self, seed: int = 0) -> None:
        made = torch.Generator().manual_seed(seed)

        def weight(*sizes: int) -> torch.Tensor:
            return torch.randn(*sizes, generator=made) / sizes[0] ** 0.5

        self.embedding = weight(VOCABULARY, WIDTH) * VOCABULARY**0.5
        self.layers = [(weight(WIDTH, 3 * WIDTH), weight(WIDTH, WIDTH)) for _ in range(LAYERS)]

    def rotate(self, vectors: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotary embedding of `[tokens, heads, head]` at `positions`."""
        angle = positions[:, None, None] * torch.tensor(ROPE.inv_freq)
        first, second = vectors.chunk(2, dim=-1)
        turned = (
            first * angle.cos() - second * angle.sin(),
            second * angle.cos() + first * angle.sin(),
        )
        return torch.cat(turned, dim=-1)

    def run(
        self, tokens: torch.Tensor, start: int, context: Pages | None, slots: torch.Tensor
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """KV of the tokens from position `start` on, `[2, tokens, heads, head]` a layer; and their
        last hidden state. They attend to themselves, and to all before them in `context`.
        """
        positions = torch.arange(start, start + len(tokens))
        hidden, kv = self.embedding[tokens], []
        for layer, (into, out) in enumerate(self.layers):
            rows = hidden / hidden.norm(dim=-1, keepdim=True) * WIDTH**0.5
            query, key, value = (rows @ into).view(-1, 3, HEADS, HEAD).unbind(1)
            query, key = self.rotate(query, positions), self.rotate(key, positions)
            kv.append(torch.stack([key, value]))
            if context is not None:
                before = context.read(layer, slots[:start])
                key, value = (torch.cat(pair) for pair in zip(before, kv[-1], strict=True))
            scores = torch.einsum("qhd,khd->hqk", query, key) / HEAD**0.5
            visible = torch.arange(len(key)) <= torch.arange(len(query))[:, None] + len(key) - len(
                query
            )
            weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
            hidden = hidden + torch.einsum("hqk,khd->qhd", weights, value).flatten(1) @ out
        return kv, hidden[-1]


class Pages:
    """The engine's KV: a tensor a layer, `[2, blocks, tokens of a block, heads, head]`."""

    def __init__(self) -> None:
        self.layers = [torch.zeros(2, BLOCKS, BLOCK, HEADS, HEAD) for _ in range(LAYERS)]

    def read(self, layer: int, slots: torch.Tensor) -> torch.Tensor:
        return self.layers[layer][:, slots // BLOCK, slots % BLOCK]

    def write(self, layer: int, slots: torch.Tensor, kv: torch.Tensor) -> None:
        self.layers[layer][:, slots // BLOCK, slots % BLOCK] = kv


class Library:
    """Documents by their tokens, whatever stands before them."""

    def __init__(self) -> None:
        config = LMCacheEngineConfig.from_defaults(max_local_cpu_size=0.01)
        metadata = LMCacheMetadata("segments-example", 1, 0, "float32")
        # 1. A database that splits at the separator, a store, and a connector that knows the
        #    model's rotary embedding.
        self.segments = SegmentTokenDatabase(config, metadata, separator=SEPARATOR)
        self.storage = StorageManager(config)
        self.connector = VLLMBufferLayerwiseGPUConnector(WIDTH, LAYERS, rope=ROPE)

    def store(self, prompt: list[int], pages: Pages, slots: torch.Tensor) -> None:
        """Stores the documents of a prompt that are not stored yet; the question is not reused."""
        *documents, _question = self.segments.process_tokens(prompt)
        new = [segment for segment in documents if not self.storage.contains(segment[2])]
        starts, ends = [start for start, _, _ in new], [end for _, end, _ in new]
        objects = []
        for start, end in zip(starts, ends, strict=True):
            # 2. Memory for each, which remembers the positions that the keys are rotated to.
            allocated = self.storage.batched_allocate(
                (LAYERS, end - start, 2, WIDTH),
                torch.float32,
                MemoryFormat.KV_T2D,
                cached_positions=[torch.arange(start, end)],
            )
            if allocated is None:
                return
            objects += allocated
        # 3. Layer by layer out of the pages: here all at once, in an engine after each layer.
        for _ in self.connector.batched_from_gpu(
            list(by_layer(objects)), starts, ends, slot_mapping=slots, kvcaches=pages.layers
        ):
            pass
        # 4. From here on others find it.
        self.storage.batched_put([key for _, _, key in new], objects)

    def restore(
        self, prompt: list[int], pages: Pages, slots: torch.Tensor
    ) -> list[tuple[int, int]]:
        """Puts the documents that are stored into the pages; which tokens that were."""
        *documents, _question = self.segments.process_tokens(prompt)
        # 5. Each document by itself: unlike a prefix, one that is missing voids none behind it.
        found = [(start, end, self.storage.batched_get([key])[0]) for start, end, key in documents]
        spans = [(start, end) for start, end, memory_obj in found if memory_obj is not None]
        objects = [memory_obj for _, _, memory_obj in found if memory_obj is not None]
        if not spans:
            return []
        # 6. Into the pages at its new place, keys turned; what lies between becomes zero.
        steps = self.connector.batched_to_gpu(
            [start for start, _ in spans],
            [end for _, end in spans],
            slot_mapping=slots,
            kvcaches=pages.layers,
        )
        next(steps)
        for views in by_layer(objects):
            steps.send(views)
        next(steps)
        return spans


def answer(
    model: Model, prompt: list[int], library: Library | None, slots: torch.Tensor
) -> tuple[torch.Tensor, Pages, int]:
    """The last hidden state of a prompt, its KV, and how many documents were reused."""
    pages, tokens = Pages(), torch.tensor(prompt)
    have = library.restore(prompt, pages, slots) if library else []
    splitter = (library or Library()).segments
    *documents, question = splitter.process_tokens(prompt)
    for start, end, _ in documents:
        if (start, end) not in have:
            kv, _ = model.run(tokens[start:end], start, None, slots)
            for layer, of_layer in enumerate(kv):
                pages.write(layer, slots[start:end], of_layer)
    # Separators are computed like documents of their own: they are in no segment.
    for (_, start, _), (end, _, _) in zip(documents, [*documents[1:], question], strict=True):
        kv, _ = model.run(tokens[start:end], start, None, slots)
        for layer, of_layer in enumerate(kv):
            pages.write(layer, slots[start:end], of_layer)
    _, state = model.run(tokens[question[0] :], question[0], pages, slots)
    if library:
        library.store(prompt, pages, slots)
    return state, pages, len(have)


def main() -> None:
    """Three prompts over five documents, in other orders and with others between."""
    made = torch.Generator().manual_seed(1)
    sizes = [61, 130, 40, 88, 17]
    documents = [torch.randint(0, 998, (size,), generator=made).tolist() for size in sizes]
    question = torch.randint(0, 998, (12,), generator=made).tolist()
    model, library = Model(), Library()
    for number, order in enumerate(([0, 1, 2], [2, 0, 3, 1], [4, 3, 2, 1, 0]), start=1):
        prompt = [token for place in order for token in [*documents[place], *SEPARATOR]] + question
        slots = torch.randperm(BLOCK * BLOCKS, generator=made)[: len(prompt)]
        state, pages, reused = answer(model, prompt, library, slots)
        wanted, computed, _ = answer(model, prompt, None, slots)
        off = max(
            float((found - right).abs().max())
            for found, right in zip(pages.layers, computed.layers, strict=True)
        )
        assert off < 1e-4, f"the KV differs by {off}"
        assert torch.allclose(state, wanted, rtol=1e-4, atol=1e-4), "another answer"
        print(
            f"prompt {number}: {reused} of {len(order)} documents from the cache; "
            f"KV within {off:.0e} of that computed from nothing"
        )
    library.storage.close()


if __name__ == "__main__":
    main()
