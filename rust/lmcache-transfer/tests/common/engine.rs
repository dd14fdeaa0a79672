//! An engine with a paged cache on a GPU, most often a fake one, and a store in page-locked memory beside it.

use std::sync::Arc;
use std::time::Duration;

use lmcache_core::hash::ChunkHash;
use lmcache_core::layout::{PagedLayout, Placement};
use lmcache_memory::local_cpu::LocalCpu;
use lmcache_memory::object::{ChunkMut, MemoryObj};
use lmcache_transfer::copy_job::ChunkSpan;
use lmcache_transfer::cuda::current::Current;
use lmcache_transfer::cuda::driver::{Context, Driver};
use lmcache_transfer::cuda::error::CudaError;
use lmcache_transfer::cuda::executor::{CopyPath, DeviceCache, DeviceJob, Executor};
use lmcache_transfer::cuda::handles::{DeviceMemory, Kernels, PageLock, StreamId};

use super::fake::Fake;

pub(crate) const ENGINE: StreamId = StreamId(0);
pub(crate) const BLOCKS: usize = 12;
pub(crate) const BLOCK: usize = 4;
pub(crate) const CHUNK: usize = 8;
pub(crate) const LAYERS: usize = 3;
const POOL: u64 = 1 << 20;
pub(crate) const NAMESPACE: &str = "fake";

/// Blocks of 96 bytes, apart.
pub(crate) const OPAQUE: PagedLayout = PagedLayout::Opaque {
    block_tokens: BLOCK,
    block_bytes: 96,
    block_stride: 112,
};

/// K and V of two heads of 8 bytes: `[blocks, 2, block, heads, head]`.
pub(crate) const TOKENS: PagedLayout = PagedLayout::Tokens {
    block_tokens: BLOCK,
    block_stride: 128,
    token_stride: 16,
    planes: 2,
    plane_stride: 64,
    heads: 2,
    head_stride: 8,
    run_bytes: 8,
};

pub(crate) struct Engine {
    pub(crate) context: Arc<Context>,
    pub(crate) executor: Arc<Executor>,
    pub(crate) layers: Vec<DeviceMemory>,
    pub(crate) cache: Arc<DeviceCache>,
    pub(crate) layout: PagedLayout,
    pub(crate) store: Arc<LocalCpu>,
    _lock: PageLock,
}

pub(crate) fn hashes(count: usize) -> Vec<ChunkHash> {
    (0..count).map(|at| ChunkHash([at as u8 + 1; 32])).collect()
}

impl Engine {
    pub(crate) fn new(fake: &Fake, layout: PagedLayout) -> Self {
        let driver = Driver::open_at(&fake.path).expect("opens");
        // SAFETY: the fake takes any image.
        Self::on(&driver, layout, |current| unsafe {
            current.kernels_of(b"fake")
        })
    }

    /// The same with so much device memory to stage in.
    pub(crate) fn staging_in(fake: &Fake, layout: PagedLayout, bytes: usize) -> Self {
        let driver = Driver::open_at(&fake.path).expect("opens");
        Self::with(&driver, layout, |current| {
            // SAFETY: the fake takes any image.
            let kernels = unsafe { current.kernels_of(b"fake") }?;
            Executor::with_staging(current, Some(kernels), bytes)
        })
    }

    pub(crate) fn on(
        driver: &Arc<Driver>,
        layout: PagedLayout,
        kernels: impl FnOnce(&Current) -> Result<Kernels, CudaError>,
    ) -> Self {
        Self::with(driver, layout, |current| {
            Executor::with_kernels(current, Some(kernels(current)?))
        })
    }

    pub(crate) fn with(
        driver: &Arc<Driver>,
        layout: PagedLayout,
        executor: impl FnOnce(&Current) -> Result<Arc<Executor>, CudaError>,
    ) -> Self {
        let context = Context::primary(driver, 0).expect("has a GPU");
        let current = context.enter().expect("enters");
        let executor = executor(&current).expect("streams and kernels");
        let layer_bytes = BLOCKS * 128;
        let layers: Vec<_> = (0..LAYERS)
            .map(|_| current.device_memory(layer_bytes).expect("memory"))
            .collect();
        let table: Vec<_> = layers
            .iter()
            .map(|layer| (layer.address(), layer.len()))
            .collect();
        // SAFETY: the memory lives in `Engine` as long as the cache.
        let cache = unsafe { DeviceCache::new(&table, layout, BLOCKS, Box::new(())) };
        let cache = Arc::new(cache.expect("valid"));
        let store = Arc::new(LocalCpu::new(POOL, Duration::from_secs(60)).expect("a pool"));
        // The pool begins where a chunk of all its bytes does.
        let mut all = store
            .allocate(&[POOL as usize])
            .expect("an empty pool")
            .remove(0);
        let keep_alive = Arc::clone(&store);
        // SAFETY: the pool's own pages, which the lock keeps.
        let lock = unsafe {
            current.page_lock(
                all.bytes_mut().as_mut_ptr(),
                POOL as usize,
                1 << 18,
                keep_alive,
            )
        };
        let lock = lock.expect("locks");
        drop(all);
        drop(current);
        Self {
            context,
            executor,
            layers,
            cache,
            layout,
            store,
            _lock: lock,
        }
    }

    pub(crate) fn enter(&self) -> Current {
        self.context.enter().expect("enters")
    }

    /// The bytes of a layer, behind what the engine's stream has been given.
    pub(crate) fn layer(&self, layer: usize) -> Vec<u8> {
        let memory = &self.layers[layer];
        let mut staging = self.staging(memory.len());
        let current = self.enter();
        // SAFETY: both are page-locked or the device's, and nobody else touches the staging.
        unsafe {
            current.copy(
                staging.bytes_mut().as_mut_ptr() as u64,
                memory.address(),
                memory.len(),
                ENGINE,
            )
        }
        .expect("copies");
        current.drain(ENGINE).expect("ends");
        staging.bytes_mut().to_vec()
    }

    /// Writes a layer and waits until it is written.
    pub(crate) fn set_layer(&self, layer: usize, bytes: &[u8]) {
        let memory = &self.layers[layer];
        let mut staging = self.staging(memory.len());
        staging.bytes_mut().copy_from_slice(bytes);
        let current = self.enter();
        // SAFETY: as in `layer`.
        unsafe {
            current.copy(
                memory.address(),
                staging.bytes_mut().as_ptr() as u64,
                memory.len(),
                ENGINE,
            )
        }
        .expect("copies");
        current.drain(ENGINE).expect("ends");
    }

    /// Bytes of the pool, which is page-locked, that are no chunk.
    fn staging(&self, len: usize) -> ChunkMut {
        self.store.allocate(&[len]).expect("room").remove(0)
    }

    /// Chunks to write; `first` is their place in the chain.
    pub(crate) fn reserve(&self, first: usize, lens: &[usize]) -> Vec<ChunkMut> {
        let chain = hashes(first + lens.len());
        let reserved = self
            .store
            .reserve(NAMESPACE, &chain, first, |at| lens[at - first]);
        let chunks: Vec<_> = reserved
            .chunks
            .into_iter()
            .map(|(_, chunk)| chunk)
            .collect();
        assert_eq!(chunks.len(), lens.len());
        chunks
    }

    /// Publishes chunks of the chain's front and answers them.
    pub(crate) fn publish(&self, chunks: Vec<ChunkMut>) -> Vec<MemoryObj> {
        let chain = hashes(chunks.len());
        self.store.commit(NAMESPACE, &chain, chunks);
        self.store.get(NAMESPACE, &chain)
    }

    pub(crate) fn begin<C: lmcache_transfer::cuda::executor::ChunkMemory>(
        &self,
        path: CopyPath,
        chunks: Vec<(C, ChunkSpan<'_>)>,
    ) -> DeviceJob<C> {
        // SAFETY: the pool is locked; the tests order the engine by its stream, or show what happens
        // when they do not.
        let job =
            unsafe { DeviceJob::begin(&self.executor, &self.cache, ENGINE, |_, _| path, chunks) };
        let job = job.expect("begins");
        assert_eq!(job.path(), path);
        job
    }
}

/// A span of slots.
pub(crate) fn at(slots: &[i64], skip: usize) -> ChunkSpan<'_> {
    ChunkSpan {
        num_tokens: slots.len(),
        skip,
        placement: Placement::Slots(slots),
    }
}
