// What tests hold the fake driver by.
#ifndef FAKE_CUDA_H
#define FAKE_CUDA_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// From now on there is no such function: an older driver. Before it is opened.
void fake_cuda_hide(const char *symbol);
// The call after `after` more ones answers `code` and does nothing.
void fake_cuda_fail(const char *call, int after, int code);
// The device is broken: whoever waits for work is told so; 0 heals it.
void fake_cuda_break(int code);
// Before each piece of work a stream sleeps up to so long.
void fake_cuda_be_late(unsigned most_us, unsigned long long seed);
// A held stream begins nothing until it is let go.
void fake_cuda_hold(uintptr_t stream, int held);
// No registration may be longer.
void fake_cuda_limit_registration(size_t len);
// From now on work takes `fixed` ns and the longer of `a_piece` ns for each piece and `a_byte` ns for each byte, by
// the clock that events note; other work takes none. `way` is "single" or "batch" for copies, "direct" for copy
// kernels that reach host memory themselves, "device" for those that do not. Before the first price it is the
// host's clock.
void fake_cuda_price(const char *way, double fixed, double a_piece, double a_byte);
// Registered host memory lies so far from where the host sees it: a platform with two address spaces.
void fake_cuda_map_elsewhere(size_t distance);
// Host memory of the test's counts as the device's from now on; what overlapped it before counts no more.
void fake_cuda_adopt(void *base, size_t len);
// None of the test's memory is the device's any more.
void fake_cuda_disown(void);
// Copies, but no kernels, may use memory that was never registered, as a driver lets them.
void fake_cuda_allow_pageable(int allowed);
// Has `len` bytes copied on a stream as the engine would, page-locked or not, `late_us` after their turn has come.
int fake_cuda_engine_copy(void *to, const void *from, size_t len, unsigned late_us, uintptr_t stream);
// Returns once a stream has nothing left to do.
void fake_cuda_drain(uintptr_t stream);
// How often a function was called.
long fake_cuda_calls(const char *call);
// Streams, events, modules, allocations, registrations and retained contexts that were not given back.
long fake_cuda_live(void);
// Contexts on this thread's stack.
long fake_cuda_depth(void);

#ifdef __cplusplus
}
#endif

#endif
