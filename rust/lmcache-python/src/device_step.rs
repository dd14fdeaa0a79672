//! A step's loads and saves on a GPU, layer by layer, as Python sees them. Naming the engine's blocks and stream is
//! the only unsafe code.

use std::sync::Mutex;

use lmcache_memory::local_cpu;
use lmcache_transfer::cuda::flow::{DeviceLoad, DeviceStore};
use lmcache_transfer::cuda::handles::StreamId;
use pyo3::prelude::*;

use crate::device::{Cache, CudaCache, publish};
use crate::errors::NativeError;
use crate::gate::{Owned, enter, lock};
use crate::layerwise::Copier;
use crate::memory::LocalCpu;
use crate::transfer::{Place, loaded, require_layer, stored};

/// Loads and saves of any number of requests that share a forward pass on a GPU.
///
/// `stream` is the engine's for all of it. Closed or dropped before its end, it writes and publishes nothing more
/// and gives everything back.
#[pyclass(frozen, module = "lmcache_rs._native")]
pub(crate) struct CudaLayerwiseStep(Owned<Step>);

struct Step {
    local_cpu: local_cpu::LocalCpu,
    here: Cache,
    chunk_size: usize,
    stream: StreamId,
    /// Whether a commit waits for the copies.
    wait: bool,
    /// `None` once they have ended.
    loads: Mutex<Option<Loads>>,
    saves: Mutex<Vec<DeviceStore>>,
}

#[derive(Default)]
struct Loads {
    jobs: Vec<DeviceLoad>,
    is_begun: bool,
    /// Layers that were given to the device, from the first on.
    num_given: usize,
}

#[pymethods]
impl CudaLayerwiseStep {
    #[new]
    #[pyo3(signature = (local_cpu, paged, *, chunk_size, stream, wait=true))]
    fn new(
        local_cpu: &LocalCpu,
        paged: &CudaCache,
        chunk_size: usize,
        stream: usize,
        wait: bool,
    ) -> PyResult<Self> {
        Ok(Self(Owned::new(Step {
            local_cpu: local_cpu.store()?.clone(),
            here: paged.cache()?.clone(),
            chunk_size,
            stream: StreamId(stream),
            wait,
            loads: Mutex::new(Some(Loads::default())),
            saves: Mutex::default(),
        })))
    }

    /// Layers of the engine's cache.
    #[getter]
    fn num_layers(&self) -> PyResult<usize> {
        Ok(self.0.get()?.here.cache.num_layers())
    }

    /// Adds a load of the tokens from `skip` on: `(end, tokens, bytes)` that it will have written.
    ///
    /// What shares a chunk with tokens from `computed_from` on, which the engine computes itself, is written
    /// before anything that the engine's stream is given from now on.
    #[pyo3(signature = (lookup_id, namespace, hashes, *, num_tokens, blocks=None, slots=None, skip=0,
        computed_from=None))]
    #[expect(clippy::too_many_arguments, reason = "one batched call a request")]
    fn add_load(
        &self,
        py: Python<'_>,
        lookup_id: &str,
        namespace: &str,
        hashes: &[u8],
        num_tokens: usize,
        blocks: Option<Vec<u32>>,
        slots: Option<&Bound<'_, PyAny>>,
        skip: usize,
        computed_from: Option<usize>,
    ) -> PyResult<(usize, usize, usize)> {
        let step = self.0.get()?;
        let place = Place::read(py, blocks, slots)?;
        place.with_chunks(
            py,
            namespace,
            hashes,
            step.chunk_size,
            num_tokens,
            |chunks| {
                let (device, cache) = (&step.here.device, &step.here.cache);
                let (store, stream) = (&step.local_cpu, step.stream);
                // SAFETY: the stream is the engine's, by the word of whoever made the step, and orders what it does
                // with its blocks.
                let job = unsafe {
                    match computed_from {
                        None => {
                            DeviceLoad::begin(device, cache, store, stream, lookup_id, chunks, skip)
                        }
                        Some(from) => DeviceLoad::begin_beside(
                            device, cache, store, stream, lookup_id, chunks, skip, from,
                        ),
                    }
                }?;
                match &mut *lock(&step.loads) {
                    Some(loads) if !loads.is_begun => {
                        let planned = job.planned();
                        loads.jobs.push(job);
                        Ok(loaded(planned))
                    }
                    _ => Err(NativeError::Spent(
                        "the step's loads have begun; add them before",
                    )),
                }
            },
        )
    }

    /// Begins the loads. With a copier, which has nothing to do here, all layers are given to the device at once;
    /// without, each one when it is waited for.
    #[pyo3(signature = (copier=None))]
    fn start_loads(&self, py: Python<'_>, copier: Option<&Copier>) -> PyResult<()> {
        let step = self.0.get()?;
        let num_layers = step.here.cache.num_layers();
        let up_to = copier.map_or(0, |_| num_layers);
        enter(py, || match &mut *lock(&step.loads) {
            Some(loads) => {
                loads.is_begun = true;
                loads.give(up_to)
            }
            None => Ok(()),
        })
    }

    /// Lets the engine's stream wait until one layer of every load has arrived.
    fn wait(&self, py: Python<'_>, layer: usize) -> PyResult<()> {
        let step = self.0.get()?;
        enter(py, || {
            if let Some(loads) = &mut *lock(&step.loads)
                && loads.is_begun
            {
                loads.give(layer + 1)?;
                for job in &loads.jobs {
                    job.wait_for_layer(layer)?;
                }
            }
            Ok::<_, NativeError>(())
        })
    }

    /// Gives what is left of the loads to the device and lets the engine's stream wait for all: `(end, tokens,
    /// bytes)` of each, in the order they were added in.
    fn finish_loads(&self, py: Python<'_>) -> PyResult<Vec<(usize, usize, usize)>> {
        let step = self.0.get()?;
        enter(py, || {
            let Some(mut loads) = lock(&step.loads).take() else {
                return Ok(Vec::new());
            };
            loads.give(step.here.cache.num_layers())?;
            let outcomes = loads.jobs.into_iter().map(|job| Ok(loaded(job.finish()?)));
            outcomes.collect::<Result<Vec<_>, NativeError>>()
        })
    }

    /// Adds a save of what is new: `(chunks, tokens, bytes, refused_chunks)` that it will have stored.
    #[pyo3(signature = (namespace, hashes, *, num_tokens, blocks=None, slots=None, first=0))]
    #[expect(clippy::too_many_arguments, reason = "one batched call a request")]
    fn add_save(
        &self,
        py: Python<'_>,
        namespace: &str,
        hashes: &[u8],
        num_tokens: usize,
        blocks: Option<Vec<u32>>,
        slots: Option<&Bound<'_, PyAny>>,
        first: usize,
    ) -> PyResult<(usize, usize, usize, usize)> {
        let step = self.0.get()?;
        let place = Place::read(py, blocks, slots)?;
        place.with_chunks(
            py,
            namespace,
            hashes,
            step.chunk_size,
            num_tokens,
            |chunks| {
                let (device, cache) = (&step.here.device, &step.here.cache);
                let (store, stream) = (&step.local_cpu, step.stream);
                // SAFETY: as in `add_load`.
                let job =
                    unsafe { DeviceStore::begin(device, cache, store, stream, chunks, first) }?;
                let planned = job.planned();
                lock(&step.saves).push(job);
                Ok::<_, NativeError>(stored(planned))
            },
        )
    }

    /// Has one layer of every save copied, behind what the engine's stream has been given.
    fn save(&self, py: Python<'_>, layer: usize) -> PyResult<()> {
        let step = self.0.get()?;
        require_layer(layer, step.here.cache.num_layers())?;
        enter(py, || {
            let mut jobs = lock(&step.saves);
            let mut jobs = jobs.iter_mut();
            jobs.try_for_each(|job| job.layer(layer).map_err(NativeError::from))
        })
    }

    /// Publishes the saves of which every layer was copied, drops the others: `(chunks, tokens, bytes,
    /// refused_chunks)` of each. The engine's stream waits for the copies; a step made without `wait` does not, and
    /// the chunks are visible once they are done.
    fn commit(&self, py: Python<'_>) -> PyResult<Vec<(usize, usize, usize, usize)>> {
        let step = self.0.get()?;
        enter(py, || {
            let jobs = std::mem::take(&mut *lock(&step.saves));
            let ended: Result<Vec<_>, _> = jobs.into_iter().map(DeviceStore::finish).collect();
            let outcomes = ended?
                .into_iter()
                .map(|ended| Ok(stored(publish(&step.here.device, ended, step.wait)?)));
            outcomes.collect::<Result<Vec<_>, NativeError>>()
        })
    }

    /// Ends the step: no byte is written any more, nothing unpublished is left. Idempotent.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let step = self.0.get()?;
        enter(py, || {
            let loads = lock(&step.loads).take();
            let saves = std::mem::take(&mut *lock(&step.saves));
            // Their drops wait for what is under way.
            drop((loads, saves));
            Ok::<_, NativeError>(())
        })
    }
}

impl Loads {
    /// Gives the layers below `up_to` to the device: all loads' first before anybody's second.
    fn give(&mut self, up_to: usize) -> Result<(), NativeError> {
        for layer in self.num_given..up_to {
            for job in &mut self.jobs {
                if layer < job.num_layers() {
                    job.layer(layer)?;
                }
            }
            self.num_given = layer + 1;
        }
        Ok(())
    }
}
