//! Errors of this crate: what was asked, what was found, what to change.

use std::io;

use thiserror::Error;

/// Why host memory could not be had.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum MemoryError {
    /// Less memory is available than the region needs.
    #[error(
        "{asked} bytes of host memory asked for, {available} available; lower max_local_cpu_size or free memory"
    )]
    NotEnough {
        /// Bytes asked for.
        asked: u64,
        /// Bytes the system, or the control group, can still give.
        available: u64,
    },
    /// The size is zero once rounded down to whole pages.
    #[error("a region of {asked} bytes is smaller than one page; raise max_local_cpu_size")]
    TooSmall {
        /// Bytes asked for.
        asked: u64,
    },
    /// Memory is put into a pool that did not give it.
    #[error(
        "this memory was allocated by another pool; put it there, or allocate it from this one"
    )]
    ForeignMemory,
    /// What another process gave to be read is none of its pools.
    #[error(
        "what came as another process's pool is no sealed memory; run one lmcache_rs release in all processes"
    )]
    NotAPool,
    /// The kernel refused.
    #[error("{call} of {asked} bytes failed: {source}")]
    System {
        /// The system call.
        call: &'static str,
        /// Bytes asked for.
        asked: u64,
        /// What the kernel said.
        source: io::Error,
    },
}
