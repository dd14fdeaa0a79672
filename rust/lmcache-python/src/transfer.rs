//! Registration of an engine's cache and the batched calls of a step. Taking in pointers is the only unsafe code.

use std::sync::Arc;

use lmcache_core::layout::{PagedLayout, Placement};
use lmcache_transfer::copy_job::ChunkSpan;
use lmcache_transfer::flow::{self, Chunks, Loaded, Stored};
use lmcache_transfer::host;
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;

use crate::errors::NativeError;
use crate::gate::{Owned, enter};
use crate::memory::{LocalCpu, MemoryObj};
use crate::token::{packed_hashes, require_native_order};

/// An engine's paged KV cache in host memory.
#[pyclass(frozen, module = "lmcache_rs._native")]
pub(crate) struct PagedCache(Owned<Arc<host::PagedCache>>);

impl PagedCache {
    fn register(
        layers: &[(usize, usize)],
        layout: PagedLayout,
        num_blocks: usize,
        copy_threads: Option<usize>,
        keep_alive: Py<PyAny>,
    ) -> PyResult<Self> {
        // SAFETY: the caller vouches for the addresses (they are `data_ptr()` of tensors) and hands over the
        // tensors as `keep_alive`, which is held as long as the value; the engine leaves the blocks of a
        // copy alone while the copy runs, as vLLM's connector hooks promise: a call; for a load that
        // runs ahead, the time until the engine has waited for the layer; for a transfer in the background, the
        // time until its handle says that it has ended.
        let paged =
            unsafe { host::PagedCache::new(layers, layout, num_blocks, Box::new(keep_alive)) };
        let paged = paged.map_err(NativeError::from)?;
        let paged = match copy_threads {
            Some(copy_threads) => paged.with_max_threads(copy_threads),
            None => paged,
        };
        Ok(Self(Owned::new(Arc::new(paged))))
    }

    pub(crate) fn cache(&self) -> Result<&Arc<host::PagedCache>, NativeError> {
        self.0.get()
    }
}

#[pymethods]
impl PagedCache {
    /// A cache of which only whole blocks have a meaning. `layers`: (address, bytes) each; `copy_threads`: how
    /// many a copy may use at most, the caller's own included.
    #[staticmethod]
    #[pyo3(signature = (layers, num_blocks, *, block_tokens, block_bytes, block_stride, keep_alive,
        copy_threads=None))]
    fn opaque(
        layers: Vec<(usize, usize)>,
        num_blocks: usize,
        block_tokens: usize,
        block_bytes: usize,
        block_stride: usize,
        keep_alive: Py<PyAny>,
        copy_threads: Option<usize>,
    ) -> PyResult<Self> {
        let layout = PagedLayout::Opaque {
            block_tokens,
            block_bytes,
            block_stride,
        };
        Self::register(&layers, layout, num_blocks, copy_threads, keep_alive)
    }

    /// A cache whose tokens have addresses; strides in bytes. `layers`: (address, bytes) each.
    #[staticmethod]
    #[pyo3(signature = (layers, num_blocks, *, block_tokens, block_stride, token_stride, planes, plane_stride,
        heads, head_stride, run_bytes, keep_alive, copy_threads=None))]
    #[expect(clippy::too_many_arguments, reason = "the layout's numbers, one each")]
    fn tokens(
        layers: Vec<(usize, usize)>,
        num_blocks: usize,
        block_tokens: usize,
        block_stride: usize,
        token_stride: usize,
        planes: usize,
        plane_stride: usize,
        heads: usize,
        head_stride: usize,
        run_bytes: usize,
        keep_alive: Py<PyAny>,
        copy_threads: Option<usize>,
    ) -> PyResult<Self> {
        let layout = PagedLayout::Tokens {
            block_tokens,
            block_stride,
            token_stride,
            planes,
            plane_stride,
            heads,
            head_stride,
            run_bytes,
        };
        Self::register(&layers, layout, num_blocks, copy_threads, keep_alive)
    }

    /// Bytes that a chunk of `num_tokens` takes in the stored form, over all layers.
    fn chunk_bytes(&self, num_tokens: usize) -> PyResult<usize> {
        let paged = self.0.get()?;
        Ok(paged.chunk_bytes(num_tokens).map_err(NativeError::from)?)
    }

    /// Threads that a copy may use, the caller's own included.
    #[getter]
    fn copy_threads(&self) -> PyResult<usize> {
        Ok(self.0.get()?.max_threads())
    }

    /// Registered layers.
    #[getter]
    fn num_layers(&self) -> PyResult<usize> {
        Ok(self.0.get()?.num_layers())
    }
}

/// Where tokens lie: a block table (list of int) or a slot mapping (buffer or list of int, -1 skipped).
pub(crate) enum Place {
    Blocks(Vec<u32>),
    Slots(Vec<i64>),
}

impl Place {
    pub(crate) fn read(
        py: Python<'_>,
        blocks: Option<Vec<u32>>,
        slots: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        match (blocks, slots) {
            (Some(blocks), None) => Ok(Self::Blocks(blocks)),
            (None, Some(slots)) => int64s(py, slots, "slot_mapping").map(Self::Slots),
            _ => Err(PyValueError::new_err("give either blocks or slots")),
        }
    }

    /// Runs `work` on a request's chunks, without the interpreter lock.
    pub(crate) fn with_chunks<T: Send>(
        &self,
        py: Python<'_>,
        namespace: &str,
        hashes: &[u8],
        chunk_size: usize,
        num_tokens: usize,
        work: impl FnOnce(&Chunks<'_>) -> Result<T, NativeError> + Send,
    ) -> PyResult<T> {
        enter(py, || {
            let hashes = packed_hashes(hashes)?;
            work(&Chunks {
                namespace,
                hashes: &hashes,
                chunk_size,
                num_tokens,
                placement: self.placement(),
            })
        })
    }

    fn placement(&self) -> Placement<'_> {
        match self {
            Self::Blocks(blocks) => Placement::Blocks(blocks),
            Self::Slots(slots) => Placement::Slots(slots),
        }
    }
}

/// One int64 a token, from a buffer or a list.
pub(crate) fn int64s(py: Python<'_>, values: &Bound<'_, PyAny>, what: &str) -> PyResult<Vec<i64>> {
    require_native_order(values, what)?;
    match PyBuffer::<i64>::get(values) {
        Ok(buffer) if buffer.dimensions() == 1 => buffer.to_vec(py),
        Ok(buffer) => {
            let dimensions = buffer.dimensions();
            Err(PyValueError::new_err(format!(
                "{what} must have one dimension, got {dimensions}"
            )))
        }
        Err(_) => values.extract().map_err(|error| {
            PyTypeError::new_err(format!("{what} must hold int64, one a token: {error}"))
        }),
    }
}

pub(crate) fn require_layer(layer: usize, num_layers: usize) -> Result<(), NativeError> {
    if layer < num_layers {
        return Ok(());
    }
    Err(NativeError::Argument(format!(
        "layer {layer} of a cache of {num_layers} layers; count from 0"
    )))
}

/// A store's outcome in numbers: `(chunks, tokens, bytes, refused_chunks)`.
pub(crate) fn stored(stored: Stored) -> (usize, usize, usize, usize) {
    (
        stored.chunks,
        stored.tokens,
        stored.bytes,
        stored.refused_chunks,
    )
}

/// A load's outcome in numbers: `(end, tokens, bytes)`.
pub(crate) fn loaded(loaded: Loaded) -> (usize, usize, usize) {
    (loaded.end, loaded.tokens, loaded.bytes)
}

/// Stores what is new of a prompt's chunks: `(chunks, tokens, bytes, refused_chunks)`.
#[pyfunction]
#[pyo3(signature = (local_cpu, paged, namespace, hashes, *, chunk_size, num_tokens, blocks=None, slots=None, first=0))]
#[expect(clippy::too_many_arguments, reason = "one batched call a request")]
pub(crate) fn store(
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
) -> PyResult<(usize, usize, usize, usize)> {
    let (local_cpu, paged) = (local_cpu.store()?, paged.0.get()?);
    let place = Place::read(py, blocks, slots)?;
    place.with_chunks(py, namespace, hashes, chunk_size, num_tokens, |chunks| {
        Ok(stored(flow::store(local_cpu, paged, chunks, first)?))
    })
}

/// Writes the tokens from `skip` on into the engine's cache: `(end, tokens, bytes)`.
#[pyfunction]
#[pyo3(signature = (local_cpu, paged, lookup_id, namespace, hashes, *, chunk_size, num_tokens, blocks=None, slots=None, skip=0))]
#[expect(clippy::too_many_arguments, reason = "one batched call a request")]
pub(crate) fn load(
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
) -> PyResult<(usize, usize, usize)> {
    let (local_cpu, paged) = (local_cpu.store()?, paged.0.get()?);
    let place = Place::read(py, blocks, slots)?;
    place.with_chunks(py, namespace, hashes, chunk_size, num_tokens, |chunks| {
        let done = flow::load(local_cpu, paged, lookup_id, chunks, skip)?;
        Ok(loaded(done))
    })
}

/// Copies the tokens `starts[i]..ends[i]` of `slots` out of the engine's cache into the i-th object: bytes moved.
#[pyfunction]
pub(crate) fn gather(
    py: Python<'_>,
    paged: &PagedCache,
    memory_objs: Vec<Py<MemoryObj>>,
    starts: Vec<usize>,
    ends: Vec<usize>,
    slots: &Bound<'_, PyAny>,
) -> PyResult<usize> {
    let paged = paged.0.get()?;
    let slots = int64s(py, slots, "slot_mapping")?;
    let spans = spans(memory_objs.len(), &starts, &ends, &slots)?;
    let loans = memory_objs.iter().map(|object| object.get().lend());
    let mut loans = loans.collect::<PyResult<Vec<_>>>()?;
    enter(py, || {
        let targets = loans.iter_mut().map(|loan| loan.bytes_mut());
        flow::gather(paged, targets.zip(spans))
    })
}

/// Copies the i-th object into the slots of the tokens `starts[i]..ends[i]`: bytes moved.
#[pyfunction]
pub(crate) fn scatter(
    py: Python<'_>,
    paged: &PagedCache,
    memory_objs: Vec<Py<MemoryObj>>,
    starts: Vec<usize>,
    ends: Vec<usize>,
    slots: &Bound<'_, PyAny>,
) -> PyResult<usize> {
    let paged = paged.0.get()?;
    let slots = int64s(py, slots, "slot_mapping")?;
    let spans = spans(memory_objs.len(), &starts, &ends, &slots)?;
    let sources = memory_objs.iter().map(|object| object.get().source());
    let mut sources = sources.collect::<PyResult<Vec<_>>>()?;
    enter(py, || {
        let sources = sources.iter_mut().map(|source| source.bytes());
        flow::scatter(paged, sources.zip(spans))
    })
}

/// One span an object, each within `slots`.
pub(crate) fn spans<'a>(
    num_objects: usize,
    starts: &[usize],
    ends: &[usize],
    slots: &'a [i64],
) -> PyResult<Vec<ChunkSpan<'a>>> {
    if starts.len() != num_objects || ends.len() != num_objects {
        return Err(PyValueError::new_err(format!(
            "{num_objects} memory objects, {} starts and {} ends; give one of each a chunk",
            starts.len(),
            ends.len()
        )));
    }
    let bounds = starts.iter().zip(ends);
    bounds
        .map(|(&start, &end)| {
            let of_chunk = slots.get(start..end).ok_or_else(|| {
                PyValueError::new_err(format!(
                    "tokens {start} to {end} are not within a slot_mapping of {} tokens",
                    slots.len()
                ))
            })?;
            Ok(ChunkSpan {
                num_tokens: of_chunk.len(),
                skip: 0,
                placement: Placement::Slots(of_chunk),
            })
        })
        .collect()
}

/// Seconds that this process has spent in copies out of engines' caches and into them.
#[pyfunction]
pub(crate) fn copy_seconds() -> (f64, f64) {
    let (gather, scatter) = lmcache_transfer::copy_job::copy_nanoseconds();
    (gather as f64 / 1e9, scatter as f64 / 1e9)
}
