//! The one gate between Python and the crates: whose process is it, give up the interpreter, map the error.

use std::process;

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
    py.detach(work).map_err(|error| PyErr::from(error.into()))
}

/// What this build is.
#[pyfunction]
pub(crate) fn build_info(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let info = PyDict::new(py);
    info.set_item("version", env!("CARGO_PKG_VERSION"))?;
    info.set_item("debug_assertions", cfg!(debug_assertions))?;
    info.set_item(
        "target",
        format!("{}-{}", std::env::consts::ARCH, std::env::consts::OS),
    )?;
    Ok(info)
}
