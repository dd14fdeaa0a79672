//! A step's loads and saves, a layer at a time: one call a layer for all of its requests.

use std::sync::{Arc, Mutex};

use lmcache_memory::local_cpu;
use lmcache_transfer::host;
use lmcache_transfer::layerwise::{LoadJob, StoreJob};
use lmcache_transfer::pipeline::{self, Loads};
use pyo3::prelude::*;

use crate::errors::NativeError;
use crate::gate::{Owned, enter, lock};
use crate::memory::LocalCpu;
use crate::transfer::{PagedCache, Place, loaded, require_layer, stored};

/// The thread that writes loads ahead of the layers an engine asks for.
///
/// It starts with the first load that is given to it. `bytes_per_second` is for measurements.
#[pyclass(frozen, module = "lmcache_rs._native")]
pub(crate) struct Copier(Owned<pipeline::Copier>);

#[pymethods]
impl Copier {
    #[new]
    #[pyo3(signature = (bytes_per_second = None))]
    fn new(bytes_per_second: Option<u64>) -> PyResult<Self> {
        if bytes_per_second == Some(0) {
            let error = "bytes_per_second is 0; give at least 1, or None for no limit";
            return Err(NativeError::Argument(error.into()).into());
        }
        Ok(Self(Owned::new(pipeline::Copier::new(bytes_per_second))))
    }

    /// Ends the thread; loads go on without it. Idempotent.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let copier = self.0.get()?;
        enter(py, || {
            copier.close();
            Ok::<_, NativeError>(())
        })
    }
}

/// Loads and saves of any number of requests that share a forward pass.
///
/// Closed or dropped before its end, it writes and publishes nothing more and gives everything back.
#[pyclass(frozen, module = "lmcache_rs._native")]
pub(crate) struct LayerwiseStep(Owned<Step>);

struct Step {
    local_cpu: local_cpu::LocalCpu,
    paged: Arc<host::PagedCache>,
    chunk_size: usize,
    loads: Mutex<State>,
    saves: Mutex<Vec<StoreJob>>,
}

enum State {
    Planned(Vec<LoadJob>),
    Running(Arc<Loads>),
    Ended,
}

#[pymethods]
impl LayerwiseStep {
    #[new]
    #[pyo3(signature = (local_cpu, paged, *, chunk_size))]
    fn new(local_cpu: &LocalCpu, paged: &PagedCache, chunk_size: usize) -> PyResult<Self> {
        Ok(Self(Owned::new(Step {
            local_cpu: local_cpu.store()?.clone(),
            paged: Arc::clone(paged.cache()?),
            chunk_size,
            loads: Mutex::new(State::Planned(Vec::new())),
            saves: Mutex::default(),
        })))
    }

    /// Layers of the engine's cache.
    #[getter]
    fn num_layers(&self) -> PyResult<usize> {
        Ok(self.0.get()?.paged.num_layers())
    }

    /// Adds a load of the tokens from `skip` on: `(end, tokens, bytes)` that it will have written.
    ///
    /// What shares a chunk with tokens from `computed_from` on, which the engine computes itself, is written
    /// before this returns.
    #[pyo3(signature = (lookup_id, namespace, hashes, *, num_tokens, blocks=None, slots=None, skip=0, computed_from=None))]
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
                let (local_cpu, paged) = (&step.local_cpu, &step.paged);
                let job = match computed_from {
                    None => LoadJob::begin(local_cpu, paged, lookup_id, chunks, skip)?,
                    Some(from) => {
                        LoadJob::begin_beside(local_cpu, paged, lookup_id, chunks, skip, from)?
                    }
                };
                let State::Planned(jobs) = &mut *lock(&step.loads) else {
                    return Err(NativeError::Spent(
                        "the step's loads have begun; add them before",
                    ));
                };
                let planned = job.planned();
                jobs.push(job);
                Ok(loaded(planned))
            },
        )
    }

    /// Begins the loads; without a copier each layer is written when it is waited for.
    #[pyo3(signature = (copier=None))]
    fn start_loads(&self, py: Python<'_>, copier: Option<&Copier>) -> PyResult<()> {
        let step = self.0.get()?;
        let copier = copier.map(|copier| copier.0.get()).transpose()?;
        enter(py, || {
            let mut state = lock(&step.loads);
            if let State::Planned(jobs) = &mut *state {
                let jobs = std::mem::take(jobs);
                *state = State::Running(Arc::new(Loads::begin(jobs, copier)));
            }
            Ok::<_, NativeError>(())
        })
    }

    /// Returns once one layer of every load is written.
    fn wait(&self, py: Python<'_>, layer: usize) -> PyResult<()> {
        let step = self.0.get()?;
        enter(py, || {
            let running = match &*lock(&step.loads) {
                State::Running(loads) => Some(Arc::clone(loads)),
                _ => None,
            };
            if let Some(loads) = running {
                loads.wait(layer);
            }
            Ok::<_, NativeError>(())
        })
    }

    /// Writes what is left of the loads: `(end, tokens, bytes)` of each, in the order they were added in.
    fn finish_loads(&self, py: Python<'_>) -> PyResult<Vec<(usize, usize, usize)>> {
        let step = self.0.get()?;
        enter(py, || {
            let state = std::mem::replace(&mut *lock(&step.loads), State::Ended);
            let outcomes = match state {
                State::Planned(jobs) => Loads::begin(jobs, None).finish(),
                State::Running(loads) => loads.finish(),
                State::Ended => Vec::new(),
            };
            Ok::<_, NativeError>(outcomes.into_iter().map(loaded).collect())
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
                let job = StoreJob::begin(&step.local_cpu, &step.paged, chunks, first)?;
                let planned = job.planned();
                lock(&step.saves).push(job);
                Ok::<_, NativeError>(stored(planned))
            },
        )
    }

    /// Copies one layer of every save.
    fn save(&self, py: Python<'_>, layer: usize) -> PyResult<()> {
        let step = self.0.get()?;
        require_layer(layer, step.paged.num_layers())?;
        enter(py, || {
            for job in lock(&step.saves).iter_mut() {
                job.layer(layer);
            }
            Ok::<_, NativeError>(())
        })
    }

    /// Publishes the saves of which every layer was copied, drops the others:
    /// `(chunks, tokens, bytes, refused_chunks)` of each.
    fn commit(&self, py: Python<'_>) -> PyResult<Vec<(usize, usize, usize, usize)>> {
        let step = self.0.get()?;
        enter(py, || {
            let jobs = std::mem::take(&mut *lock(&step.saves));
            let outcomes = jobs.into_iter().map(|job| stored(job.commit()));
            Ok::<_, NativeError>(outcomes.collect())
        })
    }

    /// Ends the step: no byte is written any more, nothing unpublished is left. Idempotent.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let step = self.0.get()?;
        enter(py, || {
            let loads = std::mem::replace(&mut *lock(&step.loads), State::Ended);
            if let State::Running(loads) = &loads {
                loads.stop();
            }
            let saves = std::mem::take(&mut *lock(&step.saves));
            drop((loads, saves));
            Ok::<_, NativeError>(())
        })
    }
}
