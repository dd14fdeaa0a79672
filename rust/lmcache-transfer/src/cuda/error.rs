//! What can go wrong between us and a CUDA driver.

use lmcache_core::error::CoreError;
use thiserror::Error;

use crate::error::TransferError;

/// Why the CUDA side could not do what it was asked.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum CudaError {
    /// There is no driver to open.
    #[error(
        "no CUDA driver: {path} does not open ({reason}); copies stay on the CPU, install NVIDIA's driver to use a GPU"
    )]
    NoDriver {
        /// What was to be opened.
        path: String,
        /// The loader's words.
        reason: String,
    },
    /// The driver has no `cuGetProcAddress` of the kind that came with CUDA 12.0.
    #[error("the CUDA driver {path} is too old: it has no {symbol}; install 580 or newer")]
    DriverTooOld {
        /// What was opened.
        path: String,
        /// What it lacks.
        symbol: &'static str,
    },
    /// The driver lacks a function that every release has had.
    #[error("the CUDA driver {path} has no {symbol}; install 580 or newer")]
    MissingSymbol {
        /// What was opened.
        path: String,
        /// What it lacks.
        symbol: &'static str,
    },
    /// The driver lacks a function that only newer ones have.
    #[error("{symbol} needs a newer CUDA driver; ask `has_batched_copies` first")]
    Unsupported {
        /// The function.
        symbol: &'static str,
    },
    /// The driver refused a call, or reports the failure of an earlier one.
    #[error("{call} failed: {name} ({code}), {text}")]
    Call {
        /// The function.
        call: &'static str,
        /// The driver's number.
        code: i32,
        /// The driver's name for it.
        name: String,
        /// The driver's words.
        text: String,
    },
    /// No such GPU.
    #[error("GPU {asked} asked for, the driver shows {found}")]
    NoDevice {
        /// Its number.
        asked: i32,
        /// How many there are.
        found: i32,
    },
    /// Registered host memory has another address for the device, which our tables do not foresee.
    #[error(
        "host memory at {host:#x} is at {device:#x} for the GPU; a platform with one address space is needed"
    )]
    HostAddress {
        /// Where the host sees it.
        host: u64,
        /// Where the device sees it.
        device: u64,
    },
    /// This build was made without an nvcc.
    #[error(
        "this build has no CUDA kernels ({reason}); install a wheel that has, see lmcache_rs.build_info()"
    )]
    NoKernels {
        /// Why there are none.
        reason: &'static str,
    },
    /// The driver cannot load this build's kernels.
    #[error(
        "the CUDA driver {path} serves CUDA {found} and refuses this build's kernels, which need {needed} ({reason}); all copies go by the copy engines, install driver 580 or newer"
    )]
    KernelsRefused {
        /// What was opened.
        path: String,
        /// The newest CUDA it serves.
        found: String,
        /// The CUDA that the kernels were compiled by.
        needed: String,
        /// The driver's name for its refusal.
        reason: String,
    },
    /// The handle belongs to the process that opened it.
    #[error("a CUDA handle of process {made_in} is used in its fork {used_in}; open one there")]
    Forked {
        /// Who opened it.
        made_in: u32,
        /// Who used it.
        used_in: u32,
    },
    /// More than a launch can count.
    #[error(
        "{num_tokens} tokens of {runs} runs each are more than one launch moves (2^32 runs); split the request"
    )]
    TooManyRuns {
        /// Tokens asked for.
        num_tokens: usize,
        /// Runs of a token.
        runs: usize,
    },
    /// A chunk is of another size than its tokens take.
    #[error(
        "a chunk of {found} bytes for {num_tokens} tokens, which take another size; allocate that of the cache"
    )]
    ChunkSize {
        /// Tokens it is to hold.
        num_tokens: usize,
        /// Its bytes.
        found: usize,
    },
    /// Host memory for tables was refused.
    #[error("no {bytes} bytes of host memory for a copy's tables: {reason}")]
    HostMemory {
        /// Asked for.
        bytes: usize,
        /// The system's words.
        reason: String,
    },
    /// The layout or placement is impossible.
    #[error(transparent)]
    Plan(#[from] CoreError),
    /// A transfer whose end nobody saw.
    #[error(
        "a copy of a GPU was given up before its end; nothing is known of its bytes, ask for it anew"
    )]
    Abandoned,
    /// What was asked contradicts itself, with or without a GPU.
    #[error(transparent)]
    Asked(#[from] TransferError),
}
