// Launches of the kernels on a host.
#ifndef LMC_EMULATE_H
#define LMC_EMULATE_H

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

// Bytes of a kernel's one parameter; 0 where there is no kernel of that name.
size_t lmc_param_bytes(const char *name);

// Runs a kernel to its end; `params` is as cuLaunchKernel takes it. Not 0 where a device would refuse the launch.
int lmc_emulate(const char *name, const unsigned grid[3], const unsigned block[3], void **params);

#ifdef __cplusplus
}
#endif

#endif
