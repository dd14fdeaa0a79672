//! The one gate between Python and the crates: whose process is it, give up the interpreter, map the error.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process;
use std::sync::{Mutex, MutexGuard, PoisonError};

use lmcache_transfer::background::panic_text;
use lmcache_transfer::cuda::kernels::{KERNEL_BUILD, image_bytes};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::errors::NativeError;

/// A native value that belongs to the process that made it.
///
/// In a forked child its locks may be held by threads that do not exist there, so it is neither used nor
/// dropped: use raises, dropping does nothing.
pub(crate) struct Owned<T> {
    /// There until the drop.
    value: Option<T>,
    pid: u32,
}

impl<T> Owned<T> {
    pub(crate) fn new(value: T) -> Self {
        Self {
            value: Some(value),
            pid: process::id(),
        }
    }

    /// The value, in the process that made it.
    pub(crate) fn get(&self) -> Result<&T, NativeError> {
        match process::id() {
            pid if pid == self.pid => Ok(self.value.as_ref().expect("only the drop takes it")),
            used_in => Err(NativeError::Forked {
                made_in: self.pid,
                used_in,
            }),
        }
    }
}

impl<T> Drop for Owned<T> {
    #[expect(
        clippy::disallowed_methods,
        reason = "the parent still owns what a fork only copied"
    )]
    fn drop(&mut self) {
        if process::id() != self.pid {
            std::mem::forget(self.value.take());
        }
    }
}

/// Runs `work` without the interpreter lock and maps its error.
pub(crate) fn enter<T: Send, E: Into<NativeError> + Send>(
    py: Python<'_>,
    work: impl FnOnce() -> Result<T, E> + Send,
) -> PyResult<T> {
    py.detach(|| caught(work)).map_err(PyErr::from)
}

/// A panic of another holder leaves nothing half-done: a job that misses a layer is not published, and all else that
/// is locked here is whole at any moment.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs `work`; a panic in it is an error like any other.
///
/// PyO3 would make it an exception that `except Exception` lets through, into the engine's loop.
pub(crate) fn caught<T, E: Into<NativeError>>(
    work: impl FnOnce() -> Result<T, E>,
) -> Result<T, NativeError> {
    // Unwind safety: what a panic can leave half-done lies behind locks. L1 closes itself when one passes
    // through its lock, so what follows are misses; chunks not yet committed were never visible, and go
    // back as they are dropped. Anything else that `work` borrows is only read by it, or its own.
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(outcome) => outcome.map_err(Into::into),
        Err(panic) => Err(NativeError::Panicked(panic_text(&*panic))),
    }
}

/// What this build is; for which GPUs it has kernels, or why it has none.
#[pyfunction]
pub(crate) fn build_info(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let info = PyDict::new(py);
    info.set_item("version", env!("CARGO_PKG_VERSION"))?;
    info.set_item("debug_assertions", cfg!(debug_assertions))?;
    info.set_item(
        "target",
        format!("{}-{}", std::env::consts::ARCH, std::env::consts::OS),
    )?;
    info.set_item("cuda_kernels", !KERNEL_BUILD.nvcc.is_empty())?;
    if KERNEL_BUILD.nvcc.is_empty() {
        info.set_item("cuda_absent_because", KERNEL_BUILD.absent_because)?;
    } else {
        info.set_item("nvcc", KERNEL_BUILD.nvcc)?;
        info.set_item("cuda_architectures", numbers(KERNEL_BUILD.architectures))?;
        info.set_item("cuda_kernel_bytes", image_bytes())?;
        info.set_item("cuda_ptx", numbers(KERNEL_BUILD.ptx))?;
    }
    Ok(info)
}

fn numbers(of: &[u32]) -> String {
    let words: Vec<String> = of.iter().map(u32::to_string).collect();
    words.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_an_error_with_its_text() {
        let formatted: fn() = || panic!("at {}", 7);
        let plain: fn() = || panic!("plain");
        for (work, text) in [(formatted, "at 7"), (plain, "plain")] {
            let outcome = caught(|| {
                work();
                Ok::<_, NativeError>(())
            });
            assert!(matches!(outcome, Err(NativeError::Panicked(said)) if said == text));
        }
    }
}
