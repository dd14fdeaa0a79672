// The few words of CUDA that the kernels use, for a host compiler. A thread's place in its launch is thread-local,
// so launches may run side by side, as they do on the streams of tests/fake_cuda.
#ifndef LMC_CUDA_BUILTINS_H
#define LMC_CUDA_BUILTINS_H

#include <cmath>
#include <cstdint>
#include <cstring>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)

struct Dim3 {
    unsigned x, y, z;
};
struct alignas(8) uint2 {
    uint32_t x, y;
};
struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};

inline thread_local Dim3 threadIdx, blockIdx, blockDim, gridDim;

inline float __uint_as_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline uint32_t __float_as_uint(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline void lmc_sincospif(float half_turns, float *sine, float *cosine) {
    const double angle = 3.14159265358979323846 * half_turns;
    *sine = static_cast<float>(std::sin(angle));
    *cosine = static_cast<float>(std::cos(angle));
}
// Some C libraries have one of their own.
#define sincospif lmc_sincospif

#endif
