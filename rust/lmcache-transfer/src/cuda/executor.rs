//! Copies between an engine's cache on a GPU and stored chunks in page-locked memory, a layer at a time.
//!
//! Two streams of ours, one for stores and one for loads, are ordered against the engine's by events alone: a
//! store's layer waits for what the engine has been given so far, the engine waits for a load's layer before it
//! reads it, and blocks go back to the engine behind the event that ends the job ([`Ticket::fence`]). A job owns
//! its chunks until that event: nothing is evicted, published or reused under a copy.
//!
//! [`DeviceJob::layer`] neither allocates nor waits: all that can be known before is made in `begin`.

use std::any::Any;
use std::fmt;
use std::mem;
use std::sync::{Arc, Mutex, PoisonError};

use lmcache_core::layout::{CopyPlan, PagedLayout, Placement};
use lmcache_memory::object::{ChunkMut, MemoryObj};

use crate::copy_job::ChunkSpan;
use crate::cuda::current::Current;
use crate::cuda::driver::Context;
use crate::cuda::error::CudaError;
use crate::cuda::handles::{Event, Kernels, Stream, StreamId};
use crate::cuda::kernels::{CopyKernel, Direction, LaunchShape, Layers, PagedCopy, unit_slots};
use crate::cuda::planted;
use crate::cuda::tables::Tables;

/// How bytes are moved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CopyPath {
    /// By the copy engines, a descriptor a run; for long runs.
    Engine,
    /// By a kernel that reads or writes page-locked memory itself; for many short ones.
    Kernel,
}

impl CopyPath {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::Engine, Self::Kernel];

    /// Its name in banners and statistics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Engine => "engine",
            Self::Kernel => "kernel",
        }
    }

    /// Whether it launches a kernel.
    pub fn needs_kernels(self) -> bool {
        self == Self::Kernel
    }

    /// Where nothing has been measured: a kernel from 64 runs of less than 28 KiB on.
    pub fn unmeasured(runs: usize, bytes: usize) -> Self {
        if runs >= 64 && bytes / runs < 28 << 10 {
            Self::Kernel
        } else {
            Self::Engine
        }
    }
}

/// The streams, kernels and tables of one GPU.
#[derive(Debug)]
pub struct Executor {
    store: Stream,
    load: Stream,
    pub(super) kernels: Option<Kernels>,
    /// Tables that no job uses at present.
    idle: Mutex<Vec<Tables>>,
    pub(super) context: Arc<Context>,
}

impl Executor {
    /// Streams of its own, and the kernels of this build; without kernels everything goes by the copy engines.
    pub fn new(context: &Arc<Context>) -> Result<Arc<Self>, CudaError> {
        let current = context.enter()?;
        let kernels = match current.kernels() {
            Ok(kernels) => Some(kernels),
            Err(CudaError::NoKernels { .. }) => None,
            Err(fault) => return Err(fault),
        };
        Self::with_kernels(&current, kernels)
    }

    /// The same with kernels that are already loaded, or with none.
    pub fn with_kernels(
        current: &Current,
        kernels: Option<Kernels>,
    ) -> Result<Arc<Self>, CudaError> {
        Ok(Arc::new(Self {
            store: current.stream()?,
            load: current.stream()?,
            kernels,
            idle: Mutex::new(Vec::new()),
            context: Arc::clone(current.context()),
        }))
    }

    /// The stream that a direction's copies are given to.
    pub fn stream(&self, direction: Direction) -> StreamId {
        match direction {
            Direction::Gather => self.store.id(),
            Direction::Scatter => self.load.id(),
        }
    }

    /// The way for `runs` runs of `bytes` bytes together.
    pub fn choose(&self, _direction: Direction, runs: usize, bytes: usize) -> CopyPath {
        CopyPath::unmeasured(runs, bytes)
    }

    /// Tables with room for `words`, used before or new.
    pub(super) fn tables(&self, current: &Current, words: usize) -> Result<Tables, CudaError> {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        let fitting = idle.iter().position(|tables| tables.len() >= words);
        if let Some(found) = fitting {
            return Ok(idle.swap_remove(found));
        }
        drop(idle);
        Tables::new(current, words)
    }

    pub(super) fn give_back(&self, tables: Option<Tables>) {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        idle.extend(tables);
    }
}

/// An engine's paged KV cache in device memory: one base address a layer, one layout for all.
pub struct DeviceCache {
    pub(super) bases: Vec<u64>,
    pub(super) layout: PagedLayout,
    pub(super) num_blocks: usize,
    _keep_alive: Box<dyn Any + Send + Sync>,
}

impl DeviceCache {
    /// Registers `layers` (device address, bytes) of `num_blocks` blocks each.
    ///
    /// # Safety
    /// Each address must be valid device memory of its bytes until `keep_alive` is dropped.
    pub unsafe fn new(
        layers: &[(u64, usize)],
        layout: PagedLayout,
        num_blocks: usize,
        keep_alive: Box<dyn Any + Send + Sync>,
    ) -> Result<Self, CudaError> {
        for &(_, len) in layers {
            layout.validate(num_blocks, len)?;
        }
        Ok(Self {
            bases: layers.iter().map(|&(address, _)| address).collect(),
            layout,
            num_blocks,
            _keep_alive: keep_alive,
        })
    }

    /// Registered layers.
    pub fn num_layers(&self) -> usize {
        self.bases.len()
    }
}

impl fmt::Debug for DeviceCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceCache")
            .field("num_layers", &self.bases.len())
            .field("num_blocks", &self.num_blocks)
            .field("layout", &self.layout)
            .finish_non_exhaustive()
    }
}

/// A chunk's bytes in page-locked memory; its type says which way they go.
pub trait ChunkMemory {
    /// Writable chunks are gathered into, sealed ones are scattered from.
    const DIRECTION: Direction;

    /// Where the bytes are, for host and device alike.
    fn address(&mut self) -> u64;

    /// How many there are.
    fn num_bytes(&self) -> usize;
}

impl ChunkMemory for ChunkMut {
    const DIRECTION: Direction = Direction::Gather;

    fn address(&mut self) -> u64 {
        self.bytes_mut().as_mut_ptr() as u64
    }

    fn num_bytes(&self) -> usize {
        self.len()
    }
}

impl ChunkMemory for MemoryObj {
    const DIRECTION: Direction = Direction::Scatter;

    fn address(&mut self) -> u64 {
        self.bytes().as_ptr() as u64
    }

    fn num_bytes(&self) -> usize {
        self.len()
    }
}

/// Chunks on their way between a device's cache and page-locked memory.
#[derive(Debug)]
pub struct DeviceJob<C: ChunkMemory> {
    cache: Arc<DeviceCache>,
    engine: StreamId,
    moves: Moves,
    /// Marks what the engine had been given, each time we wait for it.
    engine_done: Event,
    /// Loads: marks the end of each layer.
    layer_done: Vec<Event>,
    /// What must outlive the copies; taken by `finish`.
    held: Option<Held<C>>,
}

/// What copies that are under way need; dropping it waits for them.
#[derive(Debug)]
struct Held<C: ChunkMemory> {
    executor: Arc<Executor>,
    chunks: Vec<C>,
    tables: Option<Tables>,
    done: Event,
    state: State,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// More copies may be given to the stream.
    Moving,
    /// All are given, and `done` marks their end.
    Marked,
    /// All are done.
    Done,
}

#[derive(Debug)]
enum Moves {
    /// One entry a run; the addresses are those of layer 0 and are shifted for each layer.
    Engine {
        runs: Vec<EngineRun>,
        to: Vec<u64>,
        from: Vec<u64>,
        lens: Vec<usize>,
    },
    Kernel {
        kernel: CopyKernel,
        copy: PagedCopy,
        shape: Option<LaunchShape>,
    },
}

#[derive(Debug)]
struct EngineRun {
    paged: u64,
    stored: u64,
    layer_bytes: u64,
}

impl<C: ChunkMemory> DeviceJob<C> {
    /// Plans the copies and, for a load, lets our stream wait for what the engine has been given; nothing is
    /// moved yet. Chunks of different sizes, but for the last, go by the copy engines.
    ///
    /// # Safety
    /// The chunks' bytes must be page-locked. The engine must order what it does with the blocks named by its
    /// stream `engine`: written before a layer is stored, and read after it was waited for; and it must leave
    /// them alone until then, and reuse them only behind [`Ticket::fence`].
    pub unsafe fn begin<'a>(
        executor: &Arc<Executor>,
        cache: &Arc<DeviceCache>,
        engine: StreamId,
        path: impl FnOnce(usize, usize) -> CopyPath,
        chunks: impl IntoIterator<Item = (C, ChunkSpan<'a>)>,
    ) -> Result<Self, CudaError> {
        let current = executor.context.enter()?;
        let (mut owned, mut spans, mut plans) = (Vec::new(), Vec::new(), Vec::new());
        for (chunk, span) in chunks {
            let ChunkSpan {
                num_tokens,
                skip,
                placement,
            } = span;
            let expected = cache
                .layout
                .layer_bytes(num_tokens)?
                .checked_mul(cache.num_layers());
            if expected != Some(chunk.num_bytes()) {
                return Err(CudaError::ChunkSize {
                    num_tokens,
                    found: chunk.num_bytes(),
                });
            }
            plans.push(CopyPlan::build(
                &cache.layout,
                cache.num_blocks,
                num_tokens,
                skip,
                placement,
            )?);
            owned.push(chunk);
            spans.push(span);
        }
        let num_runs = plans.iter().map(|plan| plan.runs().count()).sum();
        let num_bytes = plans.iter().map(CopyPlan::bytes).sum();
        let (short, full) = match spans.split_last() {
            Some((last, full)) => (last.num_tokens, full),
            None => (0, &[][..]),
        };
        let chunk_tokens = full.first().map_or(short, |span| span.num_tokens);
        let even = short <= chunk_tokens && full.iter().all(|span| span.num_tokens == chunk_tokens);
        let by_kernel = executor.kernels.is_some()
            && even
            && num_runs > 0
            && path(num_runs, num_bytes) == CopyPath::Kernel;

        let stream = executor.stream(C::DIRECTION);
        let mut held = Held {
            executor: Arc::clone(executor),
            chunks: owned,
            tables: None,
            done: current.event()?,
            state: State::Moving,
        };
        let moves = if by_kernel {
            held.by_kernel(&current, cache, &spans, chunk_tokens, stream)?
        } else {
            held.by_engine(cache, &spans, &plans)?
        };
        let num_marks = match C::DIRECTION {
            Direction::Gather => 0,
            Direction::Scatter => cache.num_layers(),
        };
        let job = Self {
            cache: Arc::clone(cache),
            engine,
            moves,
            engine_done: current.event()?,
            layer_done: (0..num_marks)
                .map(|_| current.event())
                .collect::<Result<_, _>>()?,
            held: Some(held),
        };
        if C::DIRECTION == Direction::Scatter && !planted::left_out("load after engine") {
            // Earlier steps may still read the blocks that were granted.
            current.record(&job.engine_done, engine)?;
            current.wait(stream, &job.engine_done)?;
        }
        Ok(job)
    }

    /// How its bytes are moved.
    pub fn path(&self) -> CopyPath {
        match self.moves {
            Moves::Engine { .. } => CopyPath::Engine,
            Moves::Kernel { .. } => CopyPath::Kernel,
        }
    }

    /// Has one layer of every chunk copied: a store's behind what the engine has been given so far.
    pub fn layer(&mut self, layer: usize) -> Result<(), CudaError> {
        assert!(
            layer < self.cache.num_layers(),
            "a layer that was registered"
        );
        let Some(held) = &self.held else {
            return Ok(());
        };
        let executor = &held.executor;
        let current = executor.context.enter()?;
        let stream = executor.stream(C::DIRECTION);
        if C::DIRECTION == Direction::Gather && !planted::left_out("store after engine") {
            current.record(&self.engine_done, self.engine)?;
            current.wait(stream, &self.engine_done)?;
        }
        let base = self.cache.bases[layer];
        match &mut self.moves {
            Moves::Engine {
                runs,
                to,
                from,
                lens,
            } => {
                for (at, run) in runs.iter().enumerate() {
                    let paged = base + run.paged;
                    let stored = run.stored + layer as u64 * run.layer_bytes;
                    (to[at], from[at]) = match C::DIRECTION {
                        Direction::Gather => (stored, paged),
                        Direction::Scatter => (paged, stored),
                    };
                }
                // SAFETY: both ends were checked by the plan and the size of the chunk; `held` keeps the chunks,
                // `cache` the engine's memory; the engine keeps to its stream by the promise made in `begin`.
                unsafe {
                    if executor.context.driver().has_batched_copies() {
                        current.copy_batch(to, from, lens, stream)?;
                    } else {
                        for ((&to, &from), &len) in to.iter().zip(&*from).zip(&*lens) {
                            current.copy(to, from, len, stream)?;
                        }
                    }
                }
            }
            Moves::Kernel {
                kernel,
                copy,
                shape,
            } => {
                copy.layers = base;
                copy.chunk_layer = layer as u32;
                if let (Some(shape), Some(kernels)) = (shape, &executor.kernels) {
                    // SAFETY: as above; the tables that `copy` names are `held`'s too.
                    unsafe { current.launch(kernels, *kernel, *shape, copy, stream) }?;
                }
            }
        }
        if let Some(event) = self.layer_done.get(layer) {
            current.record(event, stream)?;
        }
        Ok(())
    }

    /// Lets the engine's stream wait until a load's layer has arrived.
    pub fn wait_for_layer(&self, layer: usize) -> Result<(), CudaError> {
        let (Some(event), Some(held)) = (self.layer_done.get(layer), &self.held) else {
            return Ok(());
        };
        if planted::left_out("engine after load") {
            return Ok(());
        }
        held.executor.context.enter()?.wait(self.engine, event)
    }

    /// No more layers will follow: the ticket holds the chunks until the copies are done.
    pub fn finish(mut self) -> Result<Ticket<C>, CudaError> {
        let mut held = self.held.take().expect("only `finish` takes it");
        let current = held.executor.context.enter()?;
        current.record(&held.done, held.executor.stream(C::DIRECTION))?;
        held.state = State::Marked;
        Ok(Ticket {
            held,
            cache: Arc::clone(&self.cache),
        })
    }
}

impl<C: ChunkMemory> Held<C> {
    fn by_engine(
        &mut self,
        cache: &DeviceCache,
        spans: &[ChunkSpan<'_>],
        plans: &[CopyPlan],
    ) -> Result<Moves, CudaError> {
        let (mut runs, mut lens) = (Vec::new(), Vec::new());
        for ((chunk, span), plan) in self.chunks.iter_mut().zip(spans).zip(plans) {
            let address = chunk.address();
            let layer_bytes = cache.layout.layer_bytes(span.num_tokens)? as u64;
            for run in plan.runs() {
                lens.push(run.len);
                runs.push(EngineRun {
                    paged: run.paged as u64,
                    stored: address + run.chunk as u64,
                    layer_bytes,
                });
            }
        }
        Ok(Moves::Engine {
            to: vec![0; runs.len()],
            from: vec![0; runs.len()],
            runs,
            lens,
        })
    }

    /// Tables: an address for each chunk, then a slot for each unit.
    fn by_kernel(
        &mut self,
        current: &Current,
        cache: &DeviceCache,
        spans: &[ChunkSpan<'_>],
        chunk_tokens: usize,
        stream: StreamId,
    ) -> Result<Moves, CudaError> {
        let num_tokens = spans.iter().map(|span| span.num_tokens).sum();
        let mut copy = PagedCopy::new(&cache.layout, num_tokens, chunk_tokens, 0)?;
        let mut words: Vec<u64> = self.chunks.iter_mut().map(ChunkMemory::address).collect();
        let num_chunks = words.len();
        let unit_tokens = match cache.layout {
            PagedLayout::Opaque { block_tokens, .. } => block_tokens,
            PagedLayout::Tokens { .. } => 1,
        };
        for span in spans {
            let placement: Placement<'_> = span.placement;
            let slots = unit_slots(&cache.layout, cache.num_blocks, span.num_tokens, placement)?;
            let skip = span.skip / unit_tokens;
            words.extend(slots.iter().enumerate().map(|(unit, &slot)| {
                let moved = if unit < skip { -1 } else { slot };
                moved as u64
            }));
        }
        copy.num_layers = 1;
        let width = copy.vector_width(words[..num_chunks].iter().chain(&cache.bases).copied());
        let kernel = CopyKernel {
            layers: Layers::One,
            direction: C::DIRECTION,
            width,
        };
        let tables = self.executor.tables(current, words.len())?;
        tables.fill(current, &words, stream)?;
        copy.chunks = tables.word(0);
        copy.slots = tables.word(num_chunks);
        self.tables = Some(tables);
        Ok(Moves::Kernel {
            kernel,
            shape: LaunchShape::of(&copy, width),
            copy,
        })
    }
}

impl<C: ChunkMemory> Drop for Held<C> {
    fn drop(&mut self) {
        let context = &self.executor.context;
        // In a forked child there are no copies of ours, and on a broken device none goes on: nothing to wait for.
        let idle = context.at_last(|current| match self.state {
            State::Moving => current.drain(self.executor.stream(C::DIRECTION)),
            State::Marked => current.synchronize(&self.done),
            State::Done => Ok(()),
        });
        if idle {
            self.executor.give_back(self.tables.take());
        }
    }
}

/// Copies that have all been given to the device, and what they need until they are done.
///
/// Dropping it waits for them.
#[derive(Debug)]
pub struct Ticket<C: ChunkMemory> {
    held: Held<C>,
    cache: Arc<DeviceCache>,
}

impl<C: ChunkMemory> Ticket<C> {
    /// Whether all copies are done; a failure of the device is an error.
    pub fn is_done(&self) -> Result<bool, CudaError> {
        self.held.executor.context.enter()?.is_done(&self.held.done)
    }

    /// Lets `stream` wait for the copies: behind this the engine may reuse the blocks.
    pub fn fence(&self, stream: StreamId) -> Result<(), CudaError> {
        if planted::left_out("engine after store") {
            return Ok(());
        }
        self.held
            .executor
            .context
            .enter()?
            .wait(stream, &self.held.done)
    }

    /// Waits here for the copies and gives the chunks back; after a failure they are dropped unpublished.
    pub fn wait(mut self) -> Result<Vec<C>, CudaError> {
        if !planted::left_out("host after copies") {
            let current = self.held.executor.context.enter()?;
            current.synchronize(&self.held.done)?;
        }
        self.held.state = State::Done;
        Ok(mem::take(&mut self.held.chunks))
    }

    /// The cache that the copies read or write.
    pub fn cache(&self) -> &Arc<DeviceCache> {
        &self.cache
    }
}
