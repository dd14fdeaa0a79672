//! A request's chunks on their walk between a GPU and the store: what [`crate::layerwise`] is for host memory.

use std::sync::Arc;

use lmcache_core::hash::ChunkHash;
use lmcache_core::layout::CopyPlan;
use lmcache_memory::local_cpu::LocalCpu;
use lmcache_memory::mapped::Mapped;
use lmcache_memory::object::{ChunkMut, MemoryObj};

use crate::copy_job::ChunkSpan;
use crate::cuda::device::Device;
use crate::cuda::error::CudaError;
use crate::cuda::executor::{ChunkMemory, DeviceCache, DeviceJob, Ticket};
use crate::cuda::handles::StreamId;
use crate::cuda::kernels::Direction;
use crate::cuda::planted;
use crate::error::TransferError;
use crate::flow::{Chunks, Loaded, Stored};
use crate::layerwise::{self, Found};

impl DeviceCache {
    /// Bytes that a chunk of `num_tokens` takes in the stored form, over all layers.
    pub fn chunk_bytes(&self, num_tokens: usize) -> Result<usize, TransferError> {
        layerwise::chunk_bytes((&self.layout, self.num_layers()), num_tokens)
    }

    pub(super) fn plan(&self, span: &ChunkSpan<'_>) -> Result<CopyPlan, CudaError> {
        let ChunkSpan {
            num_tokens,
            skip,
            placement,
        } = *span;
        let plan = CopyPlan::build(&self.layout, self.num_blocks, num_tokens, skip, placement);
        Ok(plan?)
    }
}

/// Chunks that say which pool they are of.
trait OfPool: ChunkMemory {
    fn pool(&self) -> Mapped;
}

impl OfPool for ChunkMut {
    fn pool(&self) -> Mapped {
        self.mapped()
    }
}

impl OfPool for MemoryObj {
    fn pool(&self) -> Mapped {
        self.mapped()
    }
}

/// A job over chunks of one pool, and the bytes it moves; `None` for no chunks.
///
/// # Safety
/// As for [`DeviceJob::begin`], but for page-locking: a pool that is not is left to the copy engines.
unsafe fn begin<C: OfPool>(
    device: &Device,
    cache: &Arc<DeviceCache>,
    engine: StreamId,
    parts: Vec<(C, ChunkSpan<'_>)>,
) -> Result<(Option<DeviceJob<C>>, usize), CudaError> {
    let Some((first, _)) = parts.first() else {
        return Ok((None, 0));
    };
    let reach = device.reach(&first.pool());
    let mut bytes = 0;
    for (_, span) in &parts {
        bytes += cache.plan(span)?.bytes() * cache.num_layers();
    }
    let choose = |runs, bytes| device.choose(C::DIRECTION, reach, runs, bytes);
    // SAFETY: page-locked, or only copied by the engines; the rest is the caller's promise.
    let job = unsafe { DeviceJob::begin(device.executor(), cache, engine, choose, parts) }?;
    device.count(job.path());
    Ok((Some(job), bytes))
}

/// Chunks on their way from a GPU into the store.
#[derive(Debug)]
pub struct DeviceStore {
    local_cpu: LocalCpu,
    namespace: Box<str>,
    hashes: Box<[ChunkHash]>,
    engine: StreamId,
    job: Option<DeviceJob<ChunkMut>>,
    given: Box<[bool]>,
    stored: Stored,
}

impl DeviceStore {
    /// Reserves room for those chunks that are not stored yet and plans their copies, as
    /// [`crate::layerwise::StoreJob::begin`] does.
    ///
    /// # Safety
    /// The engine must order what it does with the blocks by its stream `engine`: written before the store is given
    /// their layer, and written again only behind the end of the job, which its stream then waits for.
    pub unsafe fn begin(
        device: &Device,
        cache: &Arc<DeviceCache>,
        local_cpu: &LocalCpu,
        engine: StreamId,
        chunks: &Chunks<'_>,
        first: usize,
    ) -> Result<Self, CudaError> {
        let form = (&cache.layout, cache.num_layers());
        let (parts, mut stored) = layerwise::reserve(local_cpu, form, chunks, first)?;
        // SAFETY: by the caller's promise.
        let (job, bytes) = unsafe { begin(device, cache, engine, parts) }?;
        stored.bytes = bytes;
        Ok(Self {
            local_cpu: local_cpu.clone(),
            namespace: chunks.namespace.into(),
            hashes: chunks.hashes[..chunks.num_placed()].into(),
            engine,
            job,
            given: vec![false; cache.num_layers()].into(),
            stored,
        })
    }

    /// What a commit will have stored.
    pub fn planned(&self) -> Stored {
        self.stored
    }

    /// Has one layer of every chunk copied, behind what the engine has been given so far.
    pub fn layer(&mut self, layer: usize) -> Result<(), CudaError> {
        if let Some(job) = &mut self.job {
            job.layer(layer)?;
        }
        self.given[layer] = true;
        Ok(())
    }

    /// Has every layer copied.
    pub fn all_layers(&mut self) -> Result<(), CudaError> {
        (0..self.given.len()).try_for_each(|layer| self.layer(layer))
    }

    /// Ends the copies, if every layer was given: [`Publication::wait`] makes the chunks visible. Else nothing is
    /// stored. From here on the engine's stream waits for them before it does anything else.
    pub fn finish(self) -> Result<Publication, CudaError> {
        let engine = self.engine;
        let publication = self.finish_aside()?;
        if let Some(ticket) = &publication.ticket
            && !planted::left_out("engine after whole store")
        {
            ticket.fence(engine)?;
        }
        Ok(publication)
    }

    /// As [`DeviceStore::finish`], for an engine that leaves the blocks alone until the publication is done: its
    /// stream does not wait.
    pub fn finish_aside(mut self) -> Result<Publication, CudaError> {
        let is_whole = self.given.iter().all(|&given| given);
        let ticket = match self.job.take().filter(|_| is_whole) {
            Some(job) => Some(job.finish()?),
            None => {
                self.forget();
                None
            }
        };
        Ok(Publication {
            ticket,
            store: self,
        })
    }

    /// Nothing will have been stored.
    fn forget(&mut self) {
        self.stored = Stored {
            refused_chunks: self.stored.refused_chunks,
            ..Stored::default()
        };
    }
}

/// Chunks whose copies were all given to the device, and that are visible once those are done.
#[derive(Debug)]
pub struct Publication {
    ticket: Option<Ticket<ChunkMut>>,
    store: DeviceStore,
}

impl Publication {
    /// What will have been stored.
    pub fn planned(&self) -> Stored {
        self.store.stored
    }

    /// Whether the copies are done.
    pub fn is_done(&self) -> Result<bool, CudaError> {
        self.ticket.as_ref().map_or(Ok(true), Ticket::is_done)
    }

    /// Waits here for the copies and publishes the chunks, unless the store was closed or cleared meanwhile.
    pub fn wait(mut self) -> Result<Stored, CudaError> {
        let Some(ticket) = self.ticket.take() else {
            return Ok(self.store.stored);
        };
        let written = ticket.wait()?;
        let DeviceStore {
            local_cpu,
            namespace,
            hashes,
            ..
        } = &self.store;
        if !written.is_empty() && !local_cpu.commit(namespace, hashes, written) {
            self.store.forget();
        }
        Ok(self.store.stored)
    }
}

/// Chunks on their way out of the store to a GPU.
#[derive(Debug)]
pub struct DeviceLoad {
    device: Arc<Device>,
    job: Option<DeviceJob<MemoryObj>>,
    given: Box<[bool]>,
    last_given: Option<usize>,
    loaded: Loaded,
    skip: usize,
}

impl DeviceLoad {
    /// Plans to write the tokens `skip..` of the chunks, as [`crate::layerwise::LoadJob::begin`] does.
    ///
    /// # Safety
    /// The engine must order what it does with the blocks by its stream `engine`: read before it was given the
    /// load, and again only behind [`DeviceLoad::wait_for_layer`].
    pub unsafe fn begin(
        device: &Arc<Device>,
        cache: &Arc<DeviceCache>,
        local_cpu: &LocalCpu,
        engine: StreamId,
        lookup_id: &str,
        chunks: &Chunks<'_>,
        skip: usize,
    ) -> Result<Self, CudaError> {
        let form = (&cache.layout, cache.num_layers());
        let found = Found::take(local_cpu, form, lookup_id, chunks, skip)?;
        let to = Target {
            device,
            cache,
            engine,
        };
        // SAFETY: by the caller's promise.
        unsafe { to.plan(chunks, found.objects, skip, found.end) }
    }

    /// As [`DeviceLoad::begin`], for an engine that will compute the tokens from `computed_from` on while the load
    /// runs. A chunk that holds such tokens besides others is written first, and the engine's stream waits for it
    /// at once: it writes a layer's new tokens before it asks for the layer.
    ///
    /// # Safety
    /// As for [`DeviceLoad::begin`].
    #[expect(clippy::too_many_arguments, reason = "as `begin`, and one more")]
    pub unsafe fn begin_beside(
        device: &Arc<Device>,
        cache: &Arc<DeviceCache>,
        local_cpu: &LocalCpu,
        engine: StreamId,
        lookup_id: &str,
        chunks: &Chunks<'_>,
        skip: usize,
        computed_from: usize,
    ) -> Result<Self, CudaError> {
        let form = (&cache.layout, cache.num_layers());
        let mut found = Found::take(local_cpu, form, lookup_id, chunks, skip)?;
        let shared = found.split_off(chunks, computed_from);
        let to = Target {
            device,
            cache,
            engine,
        };
        // SAFETY: by the caller's promise.
        let mut at_once = unsafe { to.plan(chunks, shared, skip, found.end) }?;
        at_once.all_layers()?;
        let bytes = at_once.finish()?.bytes;
        // SAFETY: so too.
        let mut load = unsafe { to.plan(chunks, found.objects, skip, found.end) }?;
        load.loaded.bytes += bytes;
        Ok(load)
    }

    /// Layers of the cache.
    pub fn num_layers(&self) -> usize {
        self.given.len()
    }

    /// What will have been loaded once every layer is given.
    pub fn planned(&self) -> Loaded {
        self.loaded
    }

    /// Has one layer of every chunk written.
    pub fn layer(&mut self, layer: usize) -> Result<(), CudaError> {
        if let Some(job) = &mut self.job {
            job.layer(layer)?;
            self.last_given = Some(layer);
        }
        self.given[layer] = true;
        Ok(())
    }

    /// Has every layer written that was not given yet.
    pub fn all_layers(&mut self) -> Result<(), CudaError> {
        for layer in 0..self.given.len() {
            if !self.given[layer] {
                self.layer(layer)?;
            }
        }
        Ok(())
    }

    /// Lets the engine's stream wait until a layer that was given has arrived.
    pub fn wait_for_layer(&self, layer: usize) -> Result<(), CudaError> {
        match &self.job {
            Some(job) if self.given.get(layer) == Some(&true) => job.wait_for_layer(layer),
            _ => Ok(()),
        }
    }

    /// Lets the engine's stream wait for all layers, and says what was loaded; nothing, if a layer was not given.
    /// The chunks are held until they have arrived.
    pub fn finish(mut self) -> Result<Loaded, CudaError> {
        let Some(job) = self.job.take() else {
            return Ok(self.loaded);
        };
        if !self.given.iter().all(|&given| given) {
            // Its drop waits for what is under way.
            drop(job);
            return Ok(Loaded {
                end: self.skip,
                ..Loaded::default()
            });
        }
        if let Some(last) = self.last_given
            && !planted::left_out("engine after whole load")
        {
            // What is given to a stream is done in order.
            job.wait_for_layer(last)?;
        }
        let ticket = job.finish()?;
        self.device.land(Direction::Scatter, move || {
            // A failure is told by the next call that enters the device.
            drop(ticket.wait());
        });
        Ok(self.loaded)
    }

    /// Ends the load for an engine that leaves the blocks alone until `landed` is called with what came of it; all
    /// its layers were given.
    pub fn finish_aside(
        mut self,
        landed: impl FnOnce(Result<Loaded, CudaError>) + Send + 'static,
    ) -> Result<(), CudaError> {
        let loaded = self.loaded;
        let Some(job) = self.job.take() else {
            landed(Ok(loaded));
            return Ok(());
        };
        let ticket = job.finish()?;
        self.device.land(Direction::Scatter, move || {
            landed(ticket.wait().map(|_| loaded));
        });
        Ok(())
    }
}

/// Where a load goes.
struct Target<'a> {
    device: &'a Arc<Device>,
    cache: &'a Arc<DeviceCache>,
    engine: StreamId,
}

impl Target<'_> {
    /// # Safety
    /// As for [`DeviceLoad::begin`].
    unsafe fn plan(
        &self,
        chunks: &Chunks<'_>,
        objects: Vec<(usize, MemoryObj)>,
        skip: usize,
        end: usize,
    ) -> Result<DeviceLoad, CudaError> {
        let parts = layerwise::to_write(&self.cache.layout, chunks, objects, skip).collect();
        let (device, cache, engine) = (self.device, self.cache, self.engine);
        // SAFETY: by the caller's promise.
        let (job, bytes) = unsafe { begin(device, cache, engine, parts) }?;
        Ok(DeviceLoad {
            device: Arc::clone(device),
            job,
            given: vec![false; cache.num_layers()].into(),
            last_given: None,
            loaded: Loaded {
                end,
                tokens: end - skip,
                bytes,
            },
            skip,
        })
    }
}
