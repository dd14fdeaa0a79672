// Turns stored keys from the positions they were rotated for to those they are wanted at, and zeroes gaps.
//
// Rotary embedding rotates the pair i of a key at position p by p * inv_freq[i] (Su et al., arXiv 2104.09864, eq. 15).
// Rotations add up, so a key made for position a serves position b once it is rotated by (b - a) * inv_freq[i]; a
// factor on the whole key (YaRN's) stays as it is.

#include "paged_copy.h"

namespace {

struct Float32 {
    using Bits = uint32_t;
    static __device__ __forceinline__ float widen(Bits bits) { return __uint_as_float(bits); }
    static __device__ __forceinline__ Bits narrow(float value) { return __float_as_uint(value); }
};

struct BFloat16 {
    using Bits = uint16_t;
    static __device__ __forceinline__ float widen(Bits bits) {
        return __uint_as_float(static_cast<uint32_t>(bits) << 16);
    }
    // To the nearest, ties to even.
    static __device__ __forceinline__ Bits narrow(float value) {
        const uint32_t bits = __float_as_uint(value);
        if ((bits & 0x7fffffffu) > 0x7f800000u) {
            return static_cast<Bits>(bits >> 16 | 0x40u);
        }
        return static_cast<Bits>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
    }
};

struct Float16 {
    using Bits = uint16_t;
    static __device__ __forceinline__ float widen(Bits bits) {
        const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
        const uint32_t rest = bits & 0x7fffu;
        if (rest >= 0x7c00u) {
            return __uint_as_float(sign | 0x7f800000u | (rest & 0x3ffu) << 13);
        }
        if (rest < 0x400u) {
            // Below the smallest normal one: a multiple of 2^-24, exact in 32 bits.
            const float value = static_cast<float>(rest) * 5.9604644775390625e-08f;
            return __uint_as_float(sign | __float_as_uint(value));
        }
        return __uint_as_float(sign | ((rest << 13) + 0x38000000u));
    }
    // To the nearest, ties to even.
    static __device__ __forceinline__ Bits narrow(float value) {
        const uint32_t bits = __float_as_uint(value);
        const uint32_t sign = bits >> 16 & 0x8000u;
        const uint32_t rest = bits & 0x7fffffffu;
        if (rest > 0x7f800000u) {
            return static_cast<Bits>(sign | 0x7e00u);
        }
        // 65520 is half-way to the next power of two.
        if (rest >= 0x477ff000u) {
            return static_cast<Bits>(sign | 0x7c00u);
        }
        if (rest < 0x38800000u) {
            // One half has a last place of 2^-24, which is this range's own.
            const float shifted = __uint_as_float(rest) + 0.5f;
            return static_cast<Bits>(sign | (__float_as_uint(shifted) - 0x3f000000u));
        }
        const uint32_t rounded = rest + 0xfffu + (rest >> 13 & 1u);
        return static_cast<Bits>(sign | (rounded - 0x38000000u) >> 13);
    }
};

// Threads: y counts tokens, x the pairs of all heads; blocks carry both on. There is no z.
template <typename Number>
__device__ __forceinline__ void rotate_keys(const lmc_rope_shift &shift) {
    const int64_t *stored = reinterpret_cast<const int64_t *>(shift.stored);
    const int64_t *wanted = reinterpret_cast<const int64_t *>(shift.wanted);
    const double *half_turns = reinterpret_cast<const double *>(shift.half_turns);
    const uint32_t pairs = shift.rotary_dim / 2;
    const uint32_t items = shift.heads * pairs;
    uint64_t token = threadIdx.y + static_cast<uint64_t>(blockIdx.y) * blockDim.y;
    for (; token < shift.num_tokens; token += static_cast<uint64_t>(gridDim.y) * blockDim.y) {
        // A gap has no key to turn, and one that stays where it was keeps every bit.
        if (stored[token] < 0 || stored[token] == wanted[token]) {
            continue;
        }
        const double distance = static_cast<double>(wanted[token] - stored[token]);
        for (uint32_t item = threadIdx.x + blockIdx.x * blockDim.x; item < items;
             item += gridDim.x * blockDim.x) {
            const uint32_t head = item / pairs;
            const uint32_t pair = item - head * pairs;
            // In double up to here: at position 10^6 a 32-bit product is off by a sixteenth of a radian.
            double turn = distance * half_turns[pair];
            turn -= 2.0 * rint(0.5 * turn);
            float sine, cosine;
            sincospif(static_cast<float>(turn), &sine, &cosine);
            const uint64_t at = shift.keys + token * shift.token_stride + head * shift.head_stride;
            typename Number::Bits *key = reinterpret_cast<typename Number::Bits *>(at);
            const uint32_t first = shift.interleaved ? 2 * pair : pair;
            const uint32_t second = shift.interleaved ? 2 * pair + 1 : pair + pairs;
            const float x = Number::widen(key[first]), y = Number::widen(key[second]);
            key[first] = Number::narrow(x * cosine - y * sine);
            key[second] = Number::narrow(y * cosine + x * sine);
        }
    }
}

template <typename Vec>
__device__ __forceinline__ void zero_rows(const lmc_rope_shift &shift) {
    const int64_t *stored = reinterpret_cast<const int64_t *>(shift.stored);
    const uint64_t count = shift.row_bytes / sizeof(Vec);
    uint64_t token = threadIdx.y + static_cast<uint64_t>(blockIdx.y) * blockDim.y;
    for (; token < shift.num_tokens; token += static_cast<uint64_t>(gridDim.y) * blockDim.y) {
        if (stored[token] >= 0) {
            continue;
        }
        Vec *row = reinterpret_cast<Vec *>(shift.rows + token * shift.token_stride);
        uint64_t at = threadIdx.x + static_cast<uint64_t>(blockIdx.x) * blockDim.x;
        for (; at < count; at += static_cast<uint64_t>(gridDim.x) * blockDim.x) {
            row[at] = Vec{};
        }
    }
}

}  // namespace

// Every kernel of this file: name, body. The host emulation reads the list too.
#define LMC_ROPE_SHIFT_KERNELS(X)          \
    X(rope_shift_f32, rotate_keys<Float32>)   \
    X(rope_shift_f16, rotate_keys<Float16>)   \
    X(rope_shift_bf16, rotate_keys<BFloat16>) \
    X(zero_gaps_16, zero_rows<uint4>)      \
    X(zero_gaps_8, zero_rows<uint2>)       \
    X(zero_gaps_4, zero_rows<uint32_t>)    \
    X(zero_gaps_2, zero_rows<uint16_t>)    \
    X(zero_gaps_1, zero_rows<uint8_t>)

#define LMC_DEFINE(name, body) \
    extern "C" __global__ void __launch_bounds__(256) name(const lmc_rope_shift shift) { body(shift); }
LMC_ROPE_SHIFT_KERNELS(LMC_DEFINE)
#undef LMC_DEFINE
