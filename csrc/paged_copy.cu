// Moves KV between an engine's paged cache and stored chunks. Byte movers: no shared memory, no barrier and no warp
// intrinsic, so that the same source also runs on a host as plain loops (emulation/).
//
// A launch's threads: y counts (token, plane, head), x the vectors of a run. Blocks: x carries y on, y counts
// layers, z carries x on where runs are long. Every axis strides over its range, so any shape of launch is right.

#include "paged_copy.h"

// Threads in a block, at most; `LaunchShape` keeps to it.
#define LMC_MAX_THREADS 256

namespace {

template <typename Vec>
__device__ __forceinline__ void copy_run(const char *from, char *to, uint64_t bytes) {
    const Vec *source = reinterpret_cast<const Vec *>(from);
    Vec *target = reinterpret_cast<Vec *>(to);
    const uint64_t count = bytes / sizeof(Vec);
    const uint64_t step = static_cast<uint64_t>(blockDim.x) * gridDim.z;
    uint64_t at = threadIdx.x + static_cast<uint64_t>(blockIdx.z) * blockDim.x;
    // Four reads under way at once: over PCIe a read takes a microsecond.
    for (; at + 3 * step < count; at += 4 * step) {
        const Vec first = source[at], second = source[at + step];
        const Vec third = source[at + 2 * step], fourth = source[at + 3 * step];
        target[at] = first;
        target[at + step] = second;
        target[at + 2 * step] = third;
        target[at + 3 * step] = fourth;
    }
#pragma unroll 1
    for (; at < count; at += step) {
        target[at] = source[at];
    }
}

// The block of a slot, and what is left. A 64-bit division costs a GPU several times a 32-bit one.
__device__ __forceinline__ uint64_t block_of(uint64_t slot, uint32_t block_tokens, uint32_t &offset) {
    if (slot >> 32 == 0) {
        const uint32_t block = static_cast<uint32_t>(slot) / block_tokens;
        offset = static_cast<uint32_t>(slot) - block * block_tokens;
        return block;
    }
    const uint64_t block = slot / block_tokens;
    offset = static_cast<uint32_t>(slot - block * block_tokens);
    return block;
}

template <typename Vec, bool GATHER, bool TABLE>
__device__ __forceinline__ void move_layers(const lmc_paged_copy &copy) {
    const uint64_t *layers = reinterpret_cast<const uint64_t *>(copy.layers);
    const uint64_t *chunks = reinterpret_cast<const uint64_t *>(copy.chunks);
    const int64_t *slots = reinterpret_cast<const int64_t *>(copy.slots);
    const uint32_t runs = copy.planes * copy.heads;
    const uint64_t items = static_cast<uint64_t>(copy.num_tokens) * runs;
    const uint64_t row_bytes = copy.run_bytes * runs;
    const uint64_t step = static_cast<uint64_t>(gridDim.x) * blockDim.y;
    uint64_t item = static_cast<uint64_t>(copy.skip) * runs + threadIdx.y;
    item += static_cast<uint64_t>(blockIdx.x) * blockDim.y;
    for (; item < items; item += step) {
        const uint32_t token = static_cast<uint32_t>(item) / runs;
        const uint32_t run = static_cast<uint32_t>(item) - token * runs;
        const int64_t slot = slots[token];
        const uint32_t chunk = token / copy.chunk_tokens;
        const uint64_t base = chunks[chunk];
        if (slot < 0 || base == 0) {
            continue;
        }
        const uint32_t first = chunk * copy.chunk_tokens;
        const uint32_t left = copy.num_tokens - first;
        const uint32_t chunk_tokens = left < copy.chunk_tokens ? left : copy.chunk_tokens;
        const uint64_t layer_bytes = chunk_tokens * row_bytes;
        const uint64_t stored = base + (token - first) * row_bytes + run * copy.run_bytes;

        const uint32_t plane = run / copy.heads;
        const uint32_t head = run - plane * copy.heads;
        uint32_t offset;
        uint64_t paged = block_of(static_cast<uint64_t>(slot), copy.block_tokens, offset) * copy.block_stride;
        paged += offset * copy.token_stride + plane * copy.plane_stride + head * copy.head_stride;

#pragma unroll 1
        for (uint32_t layer = blockIdx.y; layer < copy.num_layers; layer += gridDim.y) {
            const uint64_t cache = TABLE ? layers[copy.first_layer + layer] : copy.layers;
            char *in_cache = reinterpret_cast<char *>(cache + paged);
            const uint64_t in_layer = (static_cast<uint64_t>(copy.chunk_layer) + layer) * layer_bytes;
            char *in_chunk = reinterpret_cast<char *>(stored + in_layer);
            if (GATHER) {
                copy_run<Vec>(in_cache, in_chunk, copy.run_bytes);
            } else {
                copy_run<Vec>(in_chunk, in_cache, copy.run_bytes);
            }
        }
    }
}

}  // namespace

// Every kernel of this file: name, vector, gather, table of layers. The host emulation reads the list too.
#define LMC_PAGED_COPY_WIDTHS(X, stem, gather, table) \
    X(stem##_16, uint4, gather, table)                \
    X(stem##_8, uint2, gather, table)                 \
    X(stem##_4, uint32_t, gather, table)              \
    X(stem##_2, uint16_t, gather, table)              \
    X(stem##_1, uint8_t, gather, table)
#define LMC_PAGED_COPY_KERNELS(X)                                               \
    LMC_PAGED_COPY_WIDTHS(X, multi_layer_kv_transfer_gather, true, true)        \
    LMC_PAGED_COPY_WIDTHS(X, multi_layer_kv_transfer_scatter, false, true)      \
    LMC_PAGED_COPY_WIDTHS(X, single_layer_kv_transfer_gather, true, false)      \
    LMC_PAGED_COPY_WIDTHS(X, single_layer_kv_transfer_scatter, false, false)

// Three blocks to a multiprocessor leave the registers (80) that keep every architecture from spilling.
#define LMC_DEFINE(name, vec, gather, table)                                                          \
    extern "C" __global__ void __launch_bounds__(LMC_MAX_THREADS, 3) name(const lmc_paged_copy copy) {   \
        move_layers<vec, gather, table>(copy);                                                        \
    }
LMC_PAGED_COPY_KERNELS(LMC_DEFINE)
#undef LMC_DEFINE
