/* What a launch of the paged copy kernels is told. Its twin is `PagedCopy` in rust/lmcache-transfer/src/cuda/kernels.rs;
 * both sides assert size and offsets, so neither can change alone. Plain C, passed by value. */
#ifndef LMC_PAGED_COPY_H
#define LMC_PAGED_COPY_H

#include <stddef.h>
#include <stdint.h>

/* Tokens of a request and where they lie, in an engine's paged cache and in stored chunks.
 *
 * A run is what is contiguous of one head of one token in one plane (K, V, or the one vector of MLA). A cache of
 * whole blocks is told as blocks of one token, one plane and one head, whose run is the block; its slots are
 * block numbers.
 *
 * A stored chunk is [layers][tokens][planes][heads][run_bytes]. The last chunk may be short: its layers are then
 * shorter too. Addresses are as the kernel sees them; distances are in bytes. */
struct lmc_paged_copy {
    /* multi_layer: address of uint64_t[first_layer + num_layers], the first byte of each layer of the cache.
     * single_layer: the first byte of the layer itself. */
    uint64_t layers;
    /* Address of uint64_t[chunks]: the first byte of each chunk's layer 0; 0 leaves the chunk alone. */
    uint64_t chunks;
    /* Address of int64_t[num_tokens]: block * block_tokens + offset; a negative one is skipped. */
    uint64_t slots;
    uint64_t block_stride;
    uint64_t token_stride;
    uint64_t plane_stride;
    uint64_t head_stride;
    /* A multiple of the kernel's vector width, as are all strides and addresses. */
    uint64_t run_bytes;
    /* Tokens of all chunks; num_tokens * planes * heads < 2^32. */
    uint32_t num_tokens;
    /* Tokens of every chunk but the last. */
    uint32_t chunk_tokens;
    /* Leading tokens that are not moved. */
    uint32_t skip;
    uint32_t block_tokens;
    uint32_t planes;
    uint32_t heads;
    /* Layers of the cache to move, single_layer: 0 and 1. */
    uint32_t first_layer;
    uint32_t num_layers;
    /* The chunk's layer that belongs to `first_layer`. */
    uint32_t chunk_layer;
    uint32_t reserved;
};

/* Keys in a buffer [num_tokens][heads][...] that are to be rotated from the positions they were made for to those
 * they are wanted at. Its twin is `RopeShift`. */
struct lmc_rope_shift {
    /* Address of the first rotated element of token 0, head 0. */
    uint64_t keys;
    /* Address of int64_t[num_tokens]: the position a key was rotated for; negative: a gap, no key is stored here. */
    uint64_t stored;
    /* Address of int64_t[num_tokens]: the position it is wanted at. */
    uint64_t wanted;
    /* Address of double[rotary_dim / 2]: inverse frequency / pi. */
    uint64_t half_turns;
    uint64_t token_stride;
    uint64_t head_stride;
    /* zero_gaps only: address of row 0, of which row_bytes are zeroed where `stored` is negative; the rows are
     * token_stride apart. Multiples of the kernel's vector width. */
    uint64_t rows;
    uint64_t row_bytes;
    uint32_t num_tokens;
    uint32_t heads;
    /* Leading elements of a head that are rotated; even. */
    uint32_t rotary_dim;
    /* 0: element i is paired with i + rotary_dim / 2 (NeoX); 1: 2 i with 2 i + 1 (GPT-J). */
    uint32_t interleaved;
};

#ifdef __cplusplus
#define LMC_ASSERT(fact) static_assert(fact, #fact)
#else
#define LMC_ASSERT(fact) _Static_assert(fact, #fact)
#endif

LMC_ASSERT(sizeof(struct lmc_paged_copy) == 104);
LMC_ASSERT(offsetof(struct lmc_paged_copy, layers) == 0);
LMC_ASSERT(offsetof(struct lmc_paged_copy, chunks) == 8);
LMC_ASSERT(offsetof(struct lmc_paged_copy, slots) == 16);
LMC_ASSERT(offsetof(struct lmc_paged_copy, block_stride) == 24);
LMC_ASSERT(offsetof(struct lmc_paged_copy, token_stride) == 32);
LMC_ASSERT(offsetof(struct lmc_paged_copy, plane_stride) == 40);
LMC_ASSERT(offsetof(struct lmc_paged_copy, head_stride) == 48);
LMC_ASSERT(offsetof(struct lmc_paged_copy, run_bytes) == 56);
LMC_ASSERT(offsetof(struct lmc_paged_copy, num_tokens) == 64);
LMC_ASSERT(offsetof(struct lmc_paged_copy, chunk_tokens) == 68);
LMC_ASSERT(offsetof(struct lmc_paged_copy, skip) == 72);
LMC_ASSERT(offsetof(struct lmc_paged_copy, block_tokens) == 76);
LMC_ASSERT(offsetof(struct lmc_paged_copy, planes) == 80);
LMC_ASSERT(offsetof(struct lmc_paged_copy, heads) == 84);
LMC_ASSERT(offsetof(struct lmc_paged_copy, first_layer) == 88);
LMC_ASSERT(offsetof(struct lmc_paged_copy, num_layers) == 92);
LMC_ASSERT(offsetof(struct lmc_paged_copy, chunk_layer) == 96);
LMC_ASSERT(offsetof(struct lmc_paged_copy, reserved) == 100);

LMC_ASSERT(sizeof(struct lmc_rope_shift) == 80);
LMC_ASSERT(offsetof(struct lmc_rope_shift, keys) == 0);
LMC_ASSERT(offsetof(struct lmc_rope_shift, stored) == 8);
LMC_ASSERT(offsetof(struct lmc_rope_shift, wanted) == 16);
LMC_ASSERT(offsetof(struct lmc_rope_shift, half_turns) == 24);
LMC_ASSERT(offsetof(struct lmc_rope_shift, token_stride) == 32);
LMC_ASSERT(offsetof(struct lmc_rope_shift, head_stride) == 40);
LMC_ASSERT(offsetof(struct lmc_rope_shift, rows) == 48);
LMC_ASSERT(offsetof(struct lmc_rope_shift, row_bytes) == 56);
LMC_ASSERT(offsetof(struct lmc_rope_shift, num_tokens) == 64);
LMC_ASSERT(offsetof(struct lmc_rope_shift, heads) == 68);
LMC_ASSERT(offsetof(struct lmc_rope_shift, rotary_dim) == 72);
LMC_ASSERT(offsetof(struct lmc_rope_shift, interleaved) == 76);

#endif
