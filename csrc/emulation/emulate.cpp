// The kernels as plain loops on a host: grid and block are walked one thread after the other.
#include "cuda_builtins.h"

#include "../paged_copy.cu"
#include "../rope_shift.cu"

#include "emulate.h"

namespace {

struct Kernel {
    const char *name;
    void (*run)(void **params);
    size_t param_bytes;
};

template <typename Params, void (*KERNEL)(const Params)>
void with(void **params) {
    KERNEL(*static_cast<const Params *>(params[0]));
}

#define LMC_COPY_ENTRY(name, vec, gather, table) {#name, with<lmc_paged_copy, name>, sizeof(lmc_paged_copy)},
#define LMC_SHIFT_ENTRY(name, body) {#name, with<lmc_rope_shift, name>, sizeof(lmc_rope_shift)},
const Kernel KERNELS[] = {LMC_PAGED_COPY_KERNELS(LMC_COPY_ENTRY)  //
                          LMC_ROPE_SHIFT_KERNELS(LMC_SHIFT_ENTRY)};

const Kernel *find(const char *name) {
    for (const Kernel &kernel : KERNELS) {
        if (std::strcmp(kernel.name, name) == 0) {
            return &kernel;
        }
    }
    return nullptr;
}

}  // namespace

extern "C" size_t lmc_param_bytes(const char *name) {
    const Kernel *kernel = find(name);
    return kernel ? kernel->param_bytes : 0;
}

extern "C" int lmc_emulate(const char *name, const unsigned grid[3], const unsigned block[3], void **params) {
    const Kernel *kernel = find(name);
    const unsigned long threads = static_cast<unsigned long>(block[0]) * block[1] * block[2];
    const bool any = grid[0] && grid[1] && grid[2] && threads;
    // The limits of every device since compute capability 3.0, and the kernels' own launch bounds.
    if (!kernel || !any || threads > LMC_MAX_THREADS || block[2] > 64 || grid[1] > 65535 || grid[2] > 65535) {
        return 1;
    }
    gridDim = {grid[0], grid[1], grid[2]};
    blockDim = {block[0], block[1], block[2]};
    for (blockIdx.z = 0; blockIdx.z < grid[2]; ++blockIdx.z)
    for (blockIdx.y = 0; blockIdx.y < grid[1]; ++blockIdx.y)
    for (blockIdx.x = 0; blockIdx.x < grid[0]; ++blockIdx.x)
    for (threadIdx.z = 0; threadIdx.z < block[2]; ++threadIdx.z)
    for (threadIdx.y = 0; threadIdx.y < block[1]; ++threadIdx.y)
    for (threadIdx.x = 0; threadIdx.x < block[0]; ++threadIdx.x) {
        kernel->run(params);
    }
    return 0;
}
