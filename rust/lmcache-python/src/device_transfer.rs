//! Whole stores and loads of a GPU behind the engine's back. Taking in the engine's stream is the only unsafe code.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use lmcache_transfer::cuda::error::CudaError;
use lmcache_transfer::cuda::flow::{DeviceLoad, DeviceStore};
use lmcache_transfer::cuda::handles::StreamId;
use lmcache_transfer::cuda::kernels::Direction;
use pyo3::prelude::*;

use crate::background::NOT_ENDED;
use crate::device::CudaCache;
use crate::errors::NativeError;
use crate::gate::{Owned, enter, lock};
use crate::memory::LocalCpu;
use crate::transfer::{Place, loaded, stored};

/// A store or load that was given to a GPU. Dropping the handle changes nothing.
#[pyclass(frozen, module = "lmcache_rs._native")]
pub(crate) struct CudaTransfer(Owned<Arc<Landing>>);

#[derive(Default)]
struct Landing {
    outcome: Mutex<Option<Result<Vec<usize>, CudaError>>>,
    landed: Condvar,
}

impl Landing {
    fn land(&self, outcome: Result<Vec<usize>, CudaError>) {
        let mut landed = lock(&self.outcome);
        *landed = Some(outcome);
        drop(landed);
        self.landed.notify_all();
    }
}

/// A landing that says so, whatever happens to it: one that is dropped has failed.
struct Promise(Option<Arc<Landing>>);

impl Promise {
    fn keep(mut self, outcome: Result<Vec<usize>, CudaError>) {
        if let Some(landing) = self.0.take() {
            landing.land(outcome);
        }
    }
}

impl Drop for Promise {
    fn drop(&mut self) {
        if let Some(landing) = self.0.take() {
            landing.land(Err(CudaError::Abandoned));
        }
    }
}

/// As `CudaCache.store`: memory is reserved and the copies are given to the device when this returns. The blocks
/// must stay as they are until the transfer is done; `stream` does not wait for it.
#[pyfunction]
#[pyo3(signature = (paged, local_cpu, namespace, hashes, *, stream, chunk_size, num_tokens, blocks=None, slots=None,
    first=0))]
#[expect(clippy::too_many_arguments, reason = "one batched call a request")]
pub(crate) fn begin_cuda_store(
    py: Python<'_>,
    paged: &CudaCache,
    local_cpu: &LocalCpu,
    namespace: &str,
    hashes: &[u8],
    stream: usize,
    chunk_size: usize,
    num_tokens: usize,
    blocks: Option<Vec<u32>>,
    slots: Option<&Bound<'_, PyAny>>,
    first: usize,
) -> PyResult<CudaTransfer> {
    let (store, here) = (local_cpu.store()?, paged.cache()?);
    let place = Place::read(py, blocks, slots)?;
    let landing = place.with_chunks(py, namespace, hashes, chunk_size, num_tokens, |chunks| {
        let (device, cache, stream) = (&here.device, &here.cache, StreamId(stream));
        // SAFETY: the stream is the engine's, by the caller's word; the engine leaves the blocks as they are until
        // it is told that the transfer is done.
        let mut job = unsafe { DeviceStore::begin(device, cache, store, stream, chunks, first) }?;
        job.all_layers()?;
        let publication = job.finish_aside()?;
        let landing = Arc::new(Landing::default());
        let promise = Promise(Some(Arc::clone(&landing)));
        device.land(Direction::Gather, move || {
            let outcome = publication.wait();
            promise.keep(outcome.map(|done| <[usize; 4]>::from(stored(done)).into()));
        });
        Ok::<_, NativeError>(landing)
    })?;
    Ok(CudaTransfer(Owned::new(landing)))
}

/// As `CudaCache.load`: the chunks are held and the copies are given to the device when this returns. The blocks
/// must not be used until the transfer is done; `stream` does not wait for it.
#[pyfunction]
#[pyo3(signature = (paged, local_cpu, lookup_id, namespace, hashes, *, stream, chunk_size, num_tokens, blocks=None,
    slots=None, skip=0))]
#[expect(clippy::too_many_arguments, reason = "one batched call a request")]
pub(crate) fn begin_cuda_load(
    py: Python<'_>,
    paged: &CudaCache,
    local_cpu: &LocalCpu,
    lookup_id: &str,
    namespace: &str,
    hashes: &[u8],
    stream: usize,
    chunk_size: usize,
    num_tokens: usize,
    blocks: Option<Vec<u32>>,
    slots: Option<&Bound<'_, PyAny>>,
    skip: usize,
) -> PyResult<CudaTransfer> {
    let (store, here) = (local_cpu.store()?, paged.cache()?);
    let place = Place::read(py, blocks, slots)?;
    let landing = place.with_chunks(py, namespace, hashes, chunk_size, num_tokens, |chunks| {
        let (device, cache, stream) = (&here.device, &here.cache, StreamId(stream));
        // SAFETY: as in `begin_cuda_store`; it uses them no sooner.
        let job =
            unsafe { DeviceLoad::begin(device, cache, store, stream, lookup_id, chunks, skip) };
        let mut job = job?;
        job.all_layers()?;
        let landing = Arc::new(Landing::default());
        let promise = Promise(Some(Arc::clone(&landing)));
        job.finish_aside(move |outcome| {
            promise.keep(outcome.map(|done| <[usize; 3]>::from(loaded(done)).into()));
        })?;
        Ok::<_, NativeError>(landing)
    })?;
    Ok(CudaTransfer(Owned::new(landing)))
}

#[pymethods]
impl CudaTransfer {
    /// Whether it has ended: its blocks are the engine's again.
    fn is_done(&self) -> PyResult<bool> {
        let landing = self.0.get()?;
        Ok(lock(&landing.outcome).is_some())
    }

    /// Returns once it has ended, or after `timeout_ms`; whether it has.
    #[pyo3(signature = (timeout_ms = None))]
    fn wait(&self, py: Python<'_>, timeout_ms: Option<u64>) -> PyResult<bool> {
        let landing = self.0.get()?;
        enter(py, || {
            let until = timeout_ms.map(|timeout| Instant::now() + Duration::from_millis(timeout));
            let mut outcome = lock(&landing.outcome);
            while outcome.is_none() {
                let left = until.map(|until| until.saturating_duration_since(Instant::now()));
                if left == Some(Duration::ZERO) {
                    return Ok(false);
                }
                let left = left.unwrap_or(Duration::from_secs(3600));
                let waited = landing.landed.wait_timeout(outcome, left);
                outcome = waited.unwrap_or_else(PoisonError::into_inner).0;
            }
            Ok::<_, NativeError>(true)
        })
    }

    /// What it did: `(chunks, tokens, bytes, refused_chunks)` of a store, `(end, tokens, bytes)` of a load.
    fn outcome(&self) -> PyResult<Vec<usize>> {
        let landing = self.0.get()?;
        let outcome = lock(&landing.outcome);
        match &*outcome {
            Some(Ok(numbers)) => Ok(numbers.clone()),
            Some(Err(fault)) => Err(NativeError::Cuda(fault.clone()).into()),
            None => Err(NOT_ENDED.into()),
        }
    }
}
