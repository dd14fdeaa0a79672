//! A job: chunks on their way between a device's cache and page-locked memory, what holds them until their copies
//! are done, and what waits for what.

use std::mem;
use std::sync::Arc;

use lmcache_core::layout::CopyPlan;
use lmcache_memory::object::{ChunkMut, MemoryObj};

use crate::copy_job::ChunkSpan;
use crate::cuda::error::CudaError;
use crate::cuda::executor::{CopyPath, DeviceCache, Executor};
use crate::cuda::handles::{Event, StreamId};
use crate::cuda::kernels::Direction;
use crate::cuda::moves::{Batch, Layer, Moves};
use crate::cuda::planted;
use crate::cuda::tables::Tables;

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

impl<C: ChunkMemory> DeviceJob<C> {
    /// Plans the copies and, for a load, lets our stream wait for what the engine has been given; nothing is
    /// moved yet. `path` is told the runs and bytes of a layer. What cannot go the way it names goes another:
    /// without kernels, or in chunks of different sizes, but for the last, by the copy engines; where the device
    /// has no memory to stage in, by the kernel alone.
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
        let stream = executor.stream(C::DIRECTION);
        let mut held = Held {
            executor: Arc::clone(executor),
            chunks: owned,
            tables: None,
            done: current.event()?,
            state: State::Moving,
        };
        let addresses: Vec<u64> = held.chunks.iter_mut().map(ChunkMemory::address).collect();
        let batch = Batch {
            executor,
            cache,
            direction: C::DIRECTION,
            addresses: &addresses,
            spans: &spans,
            plans: &plans,
            units: None,
        };
        let moves = batch.moves(&current, path, &mut held.tables)?;
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

    /// The same by the way that is cheapest on this GPU, as far as [`Executor::learn`] has learnt it.
    ///
    /// # Safety
    /// As for [`DeviceJob::begin`].
    pub unsafe fn planned<'a>(
        executor: &Arc<Executor>,
        cache: &Arc<DeviceCache>,
        engine: StreamId,
        chunks: impl IntoIterator<Item = (C, ChunkSpan<'a>)>,
    ) -> Result<Self, CudaError> {
        let path = |runs, bytes| executor.choose(C::DIRECTION, runs, bytes);
        // SAFETY: by the caller's promise.
        unsafe { Self::begin(executor, cache, engine, path, chunks) }
    }

    /// How its bytes are moved.
    pub fn path(&self) -> CopyPath {
        self.moves.path()
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
        let layer_of = Layer {
            executor,
            current: &current,
            direction: C::DIRECTION,
            base: self.cache.bases[layer],
            index: layer as u64,
        };
        // SAFETY: both ends were checked by the plan and the size of the chunk; `held` keeps the chunks and tables,
        // `cache` the engine's memory; the engine keeps to its stream by the promise made in `begin`.
        unsafe { self.moves.give(&layer_of) }?;
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

impl<C: ChunkMemory> Drop for Held<C> {
    fn drop(&mut self) {
        let context = &self.executor.context;
        // In a forked child there are no copies of ours, and on a broken device none goes on: nothing to wait for.
        let at_once = planted::left_out("drop after copies");
        let idle = at_once
            || context.at_last(|current| match self.state {
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
