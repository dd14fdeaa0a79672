//! Transfers that go on behind the engine's back, and their handles.

use std::time::Duration;

use lmcache_transfer::background::{self, Outcome};
use lmcache_transfer::layerwise::{LoadJob, StoreJob};
use pyo3::prelude::*;

use crate::errors::NativeError;
use crate::gate::{Owned, enter};
use crate::memory::LocalCpu;
use crate::transfer::{PagedCache, Place, loaded, stored};

/// What whoever asks for an outcome too early is told.
pub(crate) const NOT_ENDED: NativeError =
    NativeError::Spent("the transfer has not ended; wait for it before you ask for its outcome");

/// Whole stores and loads, and the thread that does them.
///
/// The thread starts with the first one. `bytes_per_second` is for measurements and tests.
#[pyclass(frozen, module = "lmcache_rs._native")]
pub(crate) struct TransferQueue(Owned<background::Queue>);

impl TransferQueue {
    pub(crate) fn queue(&self) -> Result<&background::Queue, NativeError> {
        self.0.get()
    }
}

/// A store or load that was handed over. Dropping the handle changes nothing.
#[pyclass(frozen, module = "lmcache_rs._native")]
pub(crate) struct Transfer(Owned<background::Transfer>);

impl From<background::Transfer> for Transfer {
    fn from(transfer: background::Transfer) -> Self {
        Self(Owned::new(transfer))
    }
}

#[pymethods]
impl TransferQueue {
    #[new]
    #[pyo3(signature = (bytes_per_second = None))]
    fn new(bytes_per_second: Option<u64>) -> PyResult<Self> {
        if bytes_per_second == Some(0) {
            let error = "bytes_per_second is 0; give at least 1, or None for no limit";
            return Err(NativeError::Argument(error.into()).into());
        }
        Ok(Self(Owned::new(background::Queue::new(bytes_per_second))))
    }

    /// As `store`: memory is reserved when this returns, and the copy is somebody else's.
    #[pyo3(signature = (local_cpu, paged, namespace, hashes, *, chunk_size, num_tokens, blocks=None, slots=None, first=0))]
    #[expect(clippy::too_many_arguments, reason = "one batched call a request")]
    fn begin_store(
        &self,
        py: Python<'_>,
        local_cpu: &LocalCpu,
        paged: &PagedCache,
        namespace: &str,
        hashes: &[u8],
        chunk_size: usize,
        num_tokens: usize,
        blocks: Option<Vec<u32>>,
        slots: Option<&Bound<'_, PyAny>>,
        first: usize,
    ) -> PyResult<Transfer> {
        let queue = self.0.get()?;
        let (local_cpu, paged) = (local_cpu.store()?, paged.cache()?);
        let place = Place::read(py, blocks, slots)?;
        let transfer =
            place.with_chunks(py, namespace, hashes, chunk_size, num_tokens, |chunks| {
                let job = StoreJob::begin(local_cpu, paged, chunks, first)?;
                Ok::<_, NativeError>(queue.begin(job))
            })?;
        Ok(Transfer(Owned::new(transfer)))
    }

    /// As `load`: the chunks are held when this returns, and the copy is somebody else's.
    #[pyo3(signature = (local_cpu, paged, lookup_id, namespace, hashes, *, chunk_size, num_tokens, blocks=None, slots=None, skip=0))]
    #[expect(clippy::too_many_arguments, reason = "one batched call a request")]
    fn begin_load(
        &self,
        py: Python<'_>,
        local_cpu: &LocalCpu,
        paged: &PagedCache,
        lookup_id: &str,
        namespace: &str,
        hashes: &[u8],
        chunk_size: usize,
        num_tokens: usize,
        blocks: Option<Vec<u32>>,
        slots: Option<&Bound<'_, PyAny>>,
        skip: usize,
    ) -> PyResult<Transfer> {
        let queue = self.0.get()?;
        let (local_cpu, paged) = (local_cpu.store()?, paged.cache()?);
        let place = Place::read(py, blocks, slots)?;
        let transfer =
            place.with_chunks(py, namespace, hashes, chunk_size, num_tokens, |chunks| {
                let job = LoadJob::begin(local_cpu, paged, lookup_id, chunks, skip)?;
                Ok::<_, NativeError>(queue.begin(job))
            })?;
        Ok(Transfer(Owned::new(transfer)))
    }

    /// Calls off what nobody has begun, waits for what is under way, and ends the thread. Idempotent.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let queue = self.0.get()?;
        enter(py, || {
            queue.close();
            Ok::<_, NativeError>(())
        })
    }
}

#[pymethods]
impl Transfer {
    /// Whether it has ended: its blocks are the engine's again.
    fn is_done(&self) -> PyResult<bool> {
        Ok(self.0.get()?.is_done())
    }

    /// Returns once it has ended, or after `timeout_ms`; whether it has.
    #[pyo3(signature = (timeout_ms = None))]
    fn wait(&self, py: Python<'_>, timeout_ms: Option<u64>) -> PyResult<bool> {
        let transfer = self.0.get()?;
        enter(py, || {
            Ok::<_, NativeError>(transfer.wait(timeout_ms.map(Duration::from_millis)))
        })
    }

    /// What it did: `(chunks, tokens, bytes, refused_chunks)` of a store, `(end, tokens, bytes)` of a load.
    fn outcome(&self) -> PyResult<Vec<usize>> {
        match self.0.get()?.outcome() {
            Some(Ok(Outcome::Stored(done))) => Ok(<[usize; 4]>::from(stored(done)).into()),
            Some(Ok(Outcome::Loaded(done))) => Ok(<[usize; 3]>::from(loaded(done)).into()),
            Some(Err(text)) => Err(NativeError::Panicked(text).into()),
            None => Err(NOT_ENDED.into()),
        }
    }
}
