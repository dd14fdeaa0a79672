//! A GPU as Python sees it: the device, and an engine's cache on it. Taking in addresses and streams is the only
//! unsafe code.

use std::sync::Arc;

use lmcache_core::layout::PagedLayout;
use lmcache_transfer::cuda::device::{Device, PoolLock, Reach};
use lmcache_transfer::cuda::executor::{self, CopyPath};
use lmcache_transfer::cuda::flow::{DeviceLoad, DeviceStore, Publication};
use lmcache_transfer::cuda::handles::StreamId;
use lmcache_transfer::cuda::kernels::Direction;
use lmcache_transfer::cuda::layer_copy::{DeviceLayerCopy, Piece};
use lmcache_transfer::error::TransferError;
use lmcache_transfer::flow::Stored;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::errors::NativeError;
use crate::gate::{Owned, enter};
use crate::memory::{Keep, LENT, Lasting, LocalCpu, MemoryObj};
use crate::transfer::{Place, int64s, loaded, spans, stored};

/// A GPU of this process, opened through the driver's library; the same one for all who ask for its number.
#[pyclass(frozen, module = "lmcache_rs._native")]
pub(crate) struct CudaDevice(Owned<Arc<Device>>);

impl CudaDevice {
    pub(crate) fn device(&self) -> Result<&Arc<Device>, NativeError> {
        self.0.get()
    }
}

#[pymethods]
impl CudaDevice {
    #[new]
    #[pyo3(signature = (ordinal=0))]
    fn new(py: Python<'_>, ordinal: i32) -> PyResult<Self> {
        let device = enter(py, || Device::open(ordinal))?;
        Ok(Self(Owned::new(device)))
    }

    /// Its number.
    #[getter]
    fn ordinal(&self) -> PyResult<i32> {
        Ok(self.device()?.ordinal())
    }

    /// The vendor's name of the model.
    #[getter]
    fn name(&self) -> PyResult<String> {
        Ok(self.device()?.facts().name.clone())
    }

    /// Compute capability × 10.
    #[getter]
    fn capability(&self) -> PyResult<i32> {
        Ok(self.device()?.facts().capability)
    }

    /// The newest CUDA that the driver serves, 1000 × major + 10 × minor.
    #[getter]
    fn driver_version(&self) -> PyResult<i32> {
        Ok(self.device()?.driver_version())
    }

    /// Page-locks a pool, once for all GPUs: `(bytes, why not)`, of which one is 0 or None.
    fn lock_pool(&self, py: Python<'_>, local_cpu: &LocalCpu) -> PyResult<(usize, Option<String>)> {
        let (device, store) = (self.device()?, local_cpu.store()?);
        enter(py, || {
            let Some(pool) = store.mapped() else {
                return Ok((0, Some("the pool is closed".into())));
            };
            Ok::<_, NativeError>(match device.lock_pool(&pool) {
                PoolLock::Locked(_) => (pool.len(), None),
                PoolLock::Pageable(fault) => (0, Some(fault.to_string())),
            })
        })
    }

    /// Makes copies take this way where they can, by its name; None chooses by cost again. For measurements and
    /// tests.
    #[pyo3(signature = (path=None))]
    fn force_path(&self, path: Option<&str>) -> PyResult<()> {
        let known = |name: &str| CopyPath::ALL.into_iter().find(|path| path.name() == name);
        let forced = path.map(|name| {
            known(name).ok_or_else(|| {
                let names = CopyPath::ALL.map(CopyPath::name).join(", ");
                NativeError::Argument(format!("path {name:?} is unknown; name one of {names}"))
            })
        });
        self.device()?.force_path(forced.transpose()?);
        Ok(())
    }

    /// The way that a copy of so many runs and bytes would take.
    fn path(&self, storing: bool, runs: usize, nbytes: usize) -> PyResult<&'static str> {
        let device = self.device()?;
        Ok(device
            .choose(direction(storing), Reach::PageLocked, runs, nbytes)
            .name())
    }

    /// What an operator should read about it, each text once for whoever asks first: kernels that the driver refuses,
    /// or costs of copies that could not be measured or remembered.
    fn take_notices(&self) -> PyResult<Vec<String>> {
        Ok(self.device()?.take_notices())
    }

    /// Copies begun so far, by the way they took; every way is named.
    fn copies<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let copies = PyDict::new(py);
        for (path, count) in self.device()?.counts() {
            copies.set_item(path, count)?;
        }
        Ok(copies)
    }

    /// Copies under way that hold chunks.
    #[getter]
    fn num_under_way(&self) -> PyResult<usize> {
        Ok(self.device()?.num_under_way())
    }

    /// Returns once what is under way is done: leases and memory are back, stores are visible.
    fn settle(&self, py: Python<'_>) -> PyResult<()> {
        let device = self.device()?;
        enter(py, || {
            device.settle();
            Ok::<_, NativeError>(())
        })
    }
}

pub(crate) fn direction(storing: bool) -> Direction {
    if storing {
        Direction::Gather
    } else {
        Direction::Scatter
    }
}

/// An engine's paged KV cache in a GPU's memory.
#[pyclass(frozen, module = "lmcache_rs._native")]
pub(crate) struct CudaCache(Owned<Cache>);

#[derive(Clone)]
pub(crate) struct Cache {
    pub(crate) device: Arc<Device>,
    pub(crate) cache: Arc<executor::DeviceCache>,
}

impl CudaCache {
    fn register(
        device: &CudaDevice,
        layers: Vec<(usize, usize)>,
        layout: PagedLayout,
        num_blocks: usize,
        keep_alive: Py<PyAny>,
    ) -> PyResult<Self> {
        let refused = match layers.iter().position(|&(address, _)| address == 0) {
            Some(layer) => Some(TransferError::NullLayer { layer }),
            None => layers.is_empty().then_some(TransferError::NoLayers),
        };
        if let Some(refused) = refused {
            return Err(NativeError::Transfer(refused).into());
        }
        let layers: Vec<_> = layers
            .into_iter()
            .map(|(address, nbytes)| (address as u64, nbytes))
            .collect();
        // SAFETY: the caller vouches for the addresses (they are `data_ptr()` of tensors on this device) and hands
        // over the tensors as `keep_alive`, which is held as long as the value, and by every copy under way.
        let cache = unsafe {
            executor::DeviceCache::new(&layers, layout, num_blocks, Box::new(keep_alive))
        };
        Ok(Self(Owned::new(Cache {
            device: Arc::clone(device.device()?),
            cache: Arc::new(cache.map_err(NativeError::from)?),
        })))
    }

    pub(crate) fn cache(&self) -> Result<&Cache, NativeError> {
        self.0.get()
    }
}

#[pymethods]
impl CudaCache {
    /// A cache of which only whole blocks have a meaning. `layers`: (device address, bytes) each.
    #[staticmethod]
    #[pyo3(signature = (device, layers, num_blocks, *, block_tokens, block_bytes, block_stride, keep_alive))]
    fn opaque(
        device: &CudaDevice,
        layers: Vec<(usize, usize)>,
        num_blocks: usize,
        block_tokens: usize,
        block_bytes: usize,
        block_stride: usize,
        keep_alive: Py<PyAny>,
    ) -> PyResult<Self> {
        let layout = PagedLayout::Opaque {
            block_tokens,
            block_bytes,
            block_stride,
        };
        Self::register(device, layers, layout, num_blocks, keep_alive)
    }

    /// A cache whose tokens have addresses; strides in bytes. `layers`: (device address, bytes) each.
    #[staticmethod]
    #[pyo3(signature = (device, layers, num_blocks, *, block_tokens, block_stride, token_stride, planes,
        plane_stride, heads, head_stride, run_bytes, keep_alive))]
    #[expect(clippy::too_many_arguments, reason = "the layout's numbers, one each")]
    fn tokens(
        device: &CudaDevice,
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
        Self::register(device, layers, layout, num_blocks, keep_alive)
    }

    /// The GPU it is on.
    #[getter]
    fn device(&self) -> PyResult<CudaDevice> {
        Ok(CudaDevice(Owned::new(Arc::clone(&self.cache()?.device))))
    }

    /// Bytes that a chunk of `num_tokens` takes in the stored form, over all layers.
    fn chunk_bytes(&self, num_tokens: usize) -> PyResult<usize> {
        let bytes = self.cache()?.cache.chunk_bytes(num_tokens);
        Ok(bytes.map_err(NativeError::from)?)
    }

    /// Registered layers.
    #[getter]
    fn num_layers(&self) -> PyResult<usize> {
        Ok(self.cache()?.cache.num_layers())
    }

    /// Stores what is new of a prompt's chunks, behind what `stream` has been given, which then waits for the
    /// copies: `(chunks, tokens, bytes, refused_chunks)`. Without `wait` it returns before they are done, and the
    /// chunks are visible once they are.
    #[pyo3(signature = (local_cpu, namespace, hashes, *, stream, chunk_size, num_tokens, blocks=None, slots=None,
        first=0, wait=true))]
    #[expect(clippy::too_many_arguments, reason = "one batched call a request")]
    fn store(
        &self,
        py: Python<'_>,
        local_cpu: &LocalCpu,
        namespace: &str,
        hashes: &[u8],
        stream: usize,
        chunk_size: usize,
        num_tokens: usize,
        blocks: Option<Vec<u32>>,
        slots: Option<&Bound<'_, PyAny>>,
        first: usize,
        wait: bool,
    ) -> PyResult<(usize, usize, usize, usize)> {
        let (store, here) = (local_cpu.store()?, self.cache()?);
        let place = Place::read(py, blocks, slots)?;
        place.with_chunks(py, namespace, hashes, chunk_size, num_tokens, |chunks| {
            let (device, cache) = (&here.device, &here.cache);
            // SAFETY: the stream is the engine's, by the caller's word, and orders what it does with its blocks.
            let job = unsafe {
                DeviceStore::begin(device, cache, store, StreamId(stream), chunks, first)
            };
            let mut job = job?;
            job.all_layers()?;
            Ok::<_, NativeError>(stored(publish(device, job.finish()?, wait)?))
        })
    }

    /// Writes the tokens from `skip` on into the engine's cache, behind what `stream` has been given, which then
    /// waits for them: `(end, tokens, bytes)`. It returns before they are there.
    #[pyo3(signature = (local_cpu, lookup_id, namespace, hashes, *, stream, chunk_size, num_tokens, blocks=None,
        slots=None, skip=0))]
    #[expect(clippy::too_many_arguments, reason = "one batched call a request")]
    fn load(
        &self,
        py: Python<'_>,
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
    ) -> PyResult<(usize, usize, usize)> {
        let (store, here) = (local_cpu.store()?, self.cache()?);
        let place = Place::read(py, blocks, slots)?;
        place.with_chunks(py, namespace, hashes, chunk_size, num_tokens, |chunks| {
            let (device, cache, stream) = (&here.device, &here.cache, StreamId(stream));
            // SAFETY: as in `store`.
            let job =
                unsafe { DeviceLoad::begin(device, cache, store, stream, lookup_id, chunks, skip) };
            let mut job = job?;
            job.all_layers()?;
            Ok::<_, NativeError>(loaded(job.finish()?))
        })
    }

    /// Copies the tokens `starts[i]..ends[i]` of `slots` into the i-th object, behind what `stream` has been given:
    /// bytes moved. The objects are filled when it returns.
    fn gather(
        &self,
        py: Python<'_>,
        memory_objs: Vec<Py<MemoryObj>>,
        starts: Vec<usize>,
        ends: Vec<usize>,
        slots: &Bound<'_, PyAny>,
        stream: usize,
    ) -> PyResult<usize> {
        let objects = memory_objs.iter().map(|object| object.get().lend_lasting());
        let objects = objects.collect::<PyResult<Vec<_>>>()?;
        require_once(&memory_objs, &objects)?;
        self.move_objects(py, true, objects, &starts, &ends, slots, stream)
    }

    /// Copies the i-th object into the slots of the tokens `starts[i]..ends[i]`, behind what `stream` has been
    /// given, which then waits: bytes moved. It returns before they are there.
    fn scatter(
        &self,
        py: Python<'_>,
        memory_objs: Vec<Py<MemoryObj>>,
        starts: Vec<usize>,
        ends: Vec<usize>,
        slots: &Bound<'_, PyAny>,
        stream: usize,
    ) -> PyResult<usize> {
        let objects = memory_objs
            .iter()
            .map(|object| object.get().source_lasting());
        let objects = objects.collect::<PyResult<Vec<_>>>()?;
        require_once(&memory_objs, &objects)?;
        self.move_objects(py, false, objects, &starts, &ends, slots, stream)
    }
}

/// A writable object is named once in a call.
fn require_once(memory_objs: &[Py<MemoryObj>], taken: &[Lasting]) -> PyResult<()> {
    for (at, object) in memory_objs.iter().enumerate() {
        let same = |other: &Py<MemoryObj>| other.get().is_same_memory(object.get());
        if matches!(taken[at].keep, Keep::Loan(_)) && memory_objs[..at].iter().any(same) {
            return Err(NativeError::Spent(LENT).into());
        }
    }
    Ok(())
}

impl CudaCache {
    #[expect(clippy::too_many_arguments, reason = "what both directions take")]
    fn move_objects(
        &self,
        py: Python<'_>,
        storing: bool,
        objects: Vec<Lasting>,
        starts: &[usize],
        ends: &[usize],
        slots: &Bound<'_, PyAny>,
        stream: usize,
    ) -> PyResult<usize> {
        let here = self.cache()?;
        let slots = int64s(py, slots, "slot_mapping")?;
        let spans = spans(objects.len(), starts, ends, &slots)?;
        enter(py, || {
            let (device, cache) = (&here.device, &here.cache);
            for (span, object) in spans.iter().zip(&objects) {
                let expected = cache.chunk_bytes(span.num_tokens)?;
                if object.len != expected {
                    return Err(NativeError::Transfer(TransferError::ObjectSize {
                        num_tokens: span.num_tokens,
                        expected,
                        found: object.len,
                    }));
                }
            }
            let num_layers = cache.num_layers();
            let copy =
                DeviceLayerCopy::plan(device, cache, StreamId(stream), direction(storing), spans)?;
            let layer_bytes: Vec<_> = copy.layer_bytes().collect();
            let keeps: Vec<_> = objects.iter().map(|object| object.keep.clone()).collect();
            let mut moved = 0;
            for layer in 0..num_layers {
                let pieces = objects.iter().zip(&layer_bytes);
                let pieces: Vec<_> = pieces
                    .map(|(object, &len)| piece(device, object, layer * len, len))
                    .collect();
                // SAFETY: parts of pools' memory that `keeps` holds; written objects are lent to these copies
                // alone, and read ones are sealed or lent.
                moved += unsafe { copy.layer(layer, &pieces, Box::new(keeps.clone())) }?;
            }
            if storing {
                copy.fence()?;
                device.drain(Direction::Gather)?;
            }
            drop((keeps, objects));
            if storing {
                // The loans are back.
                device.settle();
            }
            Ok(moved)
        })
    }
}

/// `len` bytes from `offset` on of a pool's object.
pub(crate) fn piece(device: &Device, object: &Lasting, offset: usize, len: usize) -> Piece {
    Piece {
        address: (object.address + offset) as u64,
        len,
        reach: device.reach(&object.pool),
    }
}

/// Publishes here, or when its turn comes.
pub(crate) fn publish(
    device: &Device,
    publication: Publication,
    wait: bool,
) -> Result<Stored, NativeError> {
    if wait {
        return Ok(publication.wait()?);
    }
    let planned = publication.planned();
    device.land(Direction::Gather, move || {
        // A failure is told by the next call that enters the device; the chunks go back unpublished.
        let _ = publication.wait();
    });
    Ok(planned)
}
