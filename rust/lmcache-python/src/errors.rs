//! The one table from Rust errors to Python exceptions.

use lmcache_core::error::CoreError;
use lmcache_memory::error::MemoryError;
use lmcache_transfer::cuda;
use lmcache_transfer::error::TransferError;
use pyo3::exceptions::{PyMemoryError, PyOSError, PyRuntimeError, PyValueError};
use pyo3::{PyErr, create_exception};

create_exception!(
    lmcache_rs._native,
    CudaError,
    PyRuntimeError,
    "The CUDA driver is missing, too old or without a kernel of ours, or refused a call, or reports a failure."
);

/// An error of any of our crates on its way to Python.
#[derive(Debug)]
pub(crate) enum NativeError {
    Core(CoreError),
    Memory(MemoryError),
    Transfer(TransferError),
    Cuda(cuda::error::CudaError),
    Lookup(String),
    Disk(String),
    /// A handle is used in a process that did not make it.
    Forked {
        made_in: u32,
        used_in: u32,
    },
    /// A panic, with its text.
    Panicked(String),
    /// A chunk handle was given away and is used again.
    Spent(&'static str),
    /// An argument has the right type and a wrong value.
    Argument(String),
}

impl From<NativeError> for PyErr {
    fn from(error: NativeError) -> Self {
        match error {
            NativeError::Core(error) => PyValueError::new_err(error.to_string()),
            NativeError::Transfer(error) => PyValueError::new_err(error.to_string()),
            NativeError::Cuda(error) => match error {
                cuda::error::CudaError::Plan(_)
                | cuda::error::CudaError::Asked(_)
                | cuda::error::CudaError::ChunkSize { .. }
                | cuda::error::CudaError::TooManyRuns { .. } => {
                    PyValueError::new_err(error.to_string())
                }
                cuda::error::CudaError::HostMemory { .. } => {
                    PyMemoryError::new_err(error.to_string())
                }
                _ => CudaError::new_err(error.to_string()),
            },
            NativeError::Memory(
                error @ (MemoryError::TooSmall { .. } | MemoryError::ForeignMemory),
            ) => PyValueError::new_err(error.to_string()),
            NativeError::Memory(error) => PyMemoryError::new_err(error.to_string()),
            NativeError::Lookup(error) | NativeError::Disk(error) => PyOSError::new_err(error),
            NativeError::Forked { made_in, used_in } => PyRuntimeError::new_err(format!(
                "this handle was made in process {made_in} and is used in its fork {used_in}; make a new one here, \
                 or start the process with the spawn method"
            )),
            NativeError::Panicked(text) => PyRuntimeError::new_err(format!(
                "internal error of lmcache_rs, please report it: {text}"
            )),
            NativeError::Spent(what) => PyRuntimeError::new_err(what),
            NativeError::Argument(error) => PyValueError::new_err(error),
        }
    }
}

macro_rules! from_crate_error {
    ($($error:ty => $variant:ident),*) => {$(
        impl From<$error> for NativeError {
            fn from(error: $error) -> Self {
                Self::$variant(error)
            }
        }
    )*};
}

from_crate_error!(CoreError => Core, MemoryError => Memory, TransferError => Transfer,
    cuda::error::CudaError => Cuda);
