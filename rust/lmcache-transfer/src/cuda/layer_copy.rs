//! One layer at a time between an engine's cache on a GPU and memory of the caller's: what
//! [`crate::layer_copy`] is for host memory.

use std::any::Any;
use std::sync::Arc;

use lmcache_core::layout::{CopyPlan, PagedLayout};

use crate::copy_job::ChunkSpan;
use crate::cuda::current::Current;
use crate::cuda::device::Device;
use crate::cuda::error::CudaError;
use crate::cuda::executor::{CopyPath, DeviceCache, Executor};
use crate::cuda::handles::{Event, StreamId};
use crate::cuda::kernels::{CopyKernel, Direction, LaunchShape, Layers, PagedCopy, unit_slots};
use crate::cuda::planted;
use crate::cuda::tables::Tables;
use crate::error::TransferError;

/// Memory that takes or gives one layer of a span.
#[derive(Debug, Clone, Copy)]
pub struct Piece {
    /// Where it is, for the device and, if it is host memory, for the host.
    pub address: u64,
    /// Its bytes.
    pub len: usize,
    /// Whether kernels reach it: on the device, or page-locked.
    pub is_reached: bool,
}

/// Tables out of the executor's pool; they go back when nothing needs them any more.
#[derive(Debug)]
pub(super) struct LentTables {
    executor: Arc<Executor>,
    tables: Option<Tables>,
}

impl LentTables {
    /// Room for `words`.
    pub(super) fn of(
        executor: &Arc<Executor>,
        current: &Current,
        words: usize,
    ) -> Result<Self, CudaError> {
        Ok(Self {
            tables: Some(executor.tables(current, words)?),
            executor: Arc::clone(executor),
        })
    }

    /// Puts `words` there, for what `stream` is given from now on; the tables must live until that is done.
    pub(super) fn fill(
        &self,
        current: &Current,
        words: &[u64],
        stream: StreamId,
    ) -> Result<(), CudaError> {
        match &self.tables {
            Some(tables) => tables.fill(current, words, stream),
            None => Ok(()),
        }
    }

    pub(super) fn word(&self, index: usize) -> u64 {
        self.tables.as_ref().map_or(0, |tables| tables.word(index))
    }
}

impl Drop for LentTables {
    fn drop(&mut self) {
        self.executor.give_back(self.tables.take());
    }
}

/// Spans of tokens, planned once for one direction; any layer of them can then be copied.
#[derive(Debug)]
pub struct DeviceLayerCopy {
    device: Arc<Device>,
    cache: Arc<DeviceCache>,
    engine: StreamId,
    direction: Direction,
    spans: Vec<Planned>,
    num_runs: usize,
    num_bytes: usize,
    /// What a kernel is told, but for addresses; `None` where the spans are of different lengths.
    kernel: Option<PagedCopy>,
    /// A slot for each unit of all spans.
    slots: Vec<u64>,
    engine_done: Event,
    copied: Event,
}

#[derive(Debug)]
struct Planned {
    plan: CopyPlan,
    num_tokens: usize,
    layer_bytes: usize,
}

impl DeviceLayerCopy {
    /// Plans the copies; whatever is wrong with the places of the tokens is found here.
    pub fn plan<'a>(
        device: &Arc<Device>,
        cache: &Arc<DeviceCache>,
        engine: StreamId,
        direction: Direction,
        spans: impl IntoIterator<Item = ChunkSpan<'a>>,
    ) -> Result<Self, CudaError> {
        let current = device.enter()?;
        let layout: &PagedLayout = &cache.layout;
        let (mut planned, mut slots) = (Vec::new(), Vec::new());
        for span in spans {
            let ChunkSpan {
                num_tokens,
                skip,
                placement,
            } = span;
            let plan = CopyPlan::build(layout, cache.num_blocks, num_tokens, skip, placement)?;
            let units = unit_slots(layout, cache.num_blocks, num_tokens, placement)?;
            slots.extend(units.into_iter().map(|slot| slot as u64));
            planned.push(Planned {
                plan,
                num_tokens,
                layer_bytes: layout.layer_bytes(num_tokens)?,
            });
        }
        let (short, full) = match planned.split_last() {
            Some((last, full)) => (last.num_tokens, full),
            None => (0, &[][..]),
        };
        let chunk_tokens = full.first().map_or(short, |span| span.num_tokens);
        let even = short <= chunk_tokens && full.iter().all(|span| span.num_tokens == chunk_tokens);
        let num_tokens = planned.iter().map(|span| span.num_tokens).sum();
        let kernel = if even && num_tokens > 0 {
            let mut copy = PagedCopy::new(layout, num_tokens, chunk_tokens, 0)?;
            copy.num_layers = 1;
            Some(copy)
        } else {
            None
        };
        Ok(Self {
            device: Arc::clone(device),
            cache: Arc::clone(cache),
            engine,
            direction,
            num_runs: planned.iter().map(|span| span.plan.runs().count()).sum(),
            num_bytes: planned.iter().map(|span| span.plan.bytes()).sum(),
            spans: planned,
            kernel,
            slots,
            engine_done: current.event()?,
            copied: current.event()?,
        })
    }

    /// The device it is for.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Which way it copies.
    pub fn direction(&self) -> Direction {
        self.direction
    }

    /// Bytes that each span takes in one layer.
    pub fn layer_bytes(&self) -> impl ExactSizeIterator<Item = usize> {
        self.spans.iter().map(|span| span.layer_bytes)
    }

    /// Has one layer of the spans copied, into or out of one piece a span: bytes that will be moved.
    ///
    /// All is checked before anything is given to the device. A store comes behind what the engine has been given,
    /// so does a load, and the engine's stream waits for it. `held` is kept until the copies are done.
    ///
    /// # Safety
    /// Each piece must be memory of its bytes that the device reaches as it says, as long as `held` lives, and
    /// nobody may touch it meanwhile but by work ordered behind this. The engine keeps to its stream as for
    /// [`crate::cuda::executor::DeviceJob::begin`].
    pub unsafe fn layer(
        &self,
        layer: usize,
        pieces: &[Piece],
        held: Box<dyn Any + Send>,
    ) -> Result<usize, CudaError> {
        self.require(layer, pieces)?;
        if self.num_runs == 0 {
            return Ok(0);
        }
        let executor = self.device.executor();
        let stream = executor.stream(self.direction);
        let current = self.device.enter()?;
        self.wait_for_engine(&current)?;
        let mut tables = None;
        // SAFETY: by the caller's promise; the tables are held with the rest.
        let given = unsafe { self.give(&current, layer, pieces, &mut tables) };
        drop(current);
        // Whatever came of it, a part may be under way.
        self.device.hold(self.direction, Box::new((held, tables)))?;
        given?;
        if self.direction == Direction::Scatter {
            let current = self.device.enter()?;
            current.record(&self.copied, stream)?;
            if !planted::left_out("engine after load") {
                current.wait(self.engine, &self.copied)?;
            }
        }
        Ok(self.num_bytes)
    }

    /// Lets the engine's stream wait for all that was given so far: behind this it may write the blocks again.
    pub fn fence(&self) -> Result<(), CudaError> {
        let current = self.device.enter()?;
        current.record(&self.copied, self.device.executor().stream(self.direction))?;
        if planted::left_out("engine after store") {
            return Ok(());
        }
        current.wait(self.engine, &self.copied)
    }

    /// Our stream begins nothing more before what the engine has been given is done.
    pub fn wait_for_engine(&self, current: &Current) -> Result<(), CudaError> {
        let wait = match self.direction {
            Direction::Gather => "store after engine",
            Direction::Scatter => "load after engine",
        };
        if planted::left_out(wait) {
            return Ok(());
        }
        current.record(&self.engine_done, self.engine)?;
        current.wait(
            self.device.executor().stream(self.direction),
            &self.engine_done,
        )
    }

    /// # Safety
    /// As for [`DeviceLayerCopy::layer`]; `used` must live until the copies are done.
    unsafe fn give(
        &self,
        current: &Current,
        layer: usize,
        pieces: &[Piece],
        used: &mut Option<LentTables>,
    ) -> Result<(), CudaError> {
        let executor = self.device.executor();
        let is_reached = pieces.iter().all(|piece| piece.is_reached);
        let path = self
            .device
            .choose(self.direction, is_reached, self.num_runs, self.num_bytes);
        let stream = executor.stream(self.direction);
        let base = self.cache.bases[layer];
        if let (true, Some(mut copy), Some(kernels)) =
            (path.needs_kernels(), self.kernel, &executor.kernels)
        {
            self.device.count(CopyPath::Kernel);
            let mut words: Vec<u64> = pieces.iter().map(|piece| piece.address).collect();
            let width = copy.vector_width(words.iter().copied().chain([base]));
            let num_chunks = words.len();
            words.extend(&self.slots);
            let tables = used.insert(LentTables::of(executor, current, words.len())?);
            tables.fill(current, &words, stream)?;
            copy.layers = base;
            copy.chunks = tables.word(0);
            copy.slots = tables.word(num_chunks);
            let kernel = CopyKernel {
                layers: Layers::One,
                direction: self.direction,
                width,
            };
            if let Some(shape) = LaunchShape::of(&copy, width) {
                // SAFETY: slots and sizes were checked by the plan; the rest is the caller's promise.
                unsafe { current.launch(kernels, kernel, shape, &copy, stream) }?;
            }
            return Ok(());
        }
        self.device.count(CopyPath::Engine);
        let (mut to, mut from, mut lens) = (Vec::new(), Vec::new(), Vec::new());
        for (span, piece) in self.spans.iter().zip(pieces) {
            for run in span.plan.runs() {
                let (paged, other) = (base + run.paged as u64, piece.address + run.chunk as u64);
                let ends = match self.direction {
                    Direction::Gather => (other, paged),
                    Direction::Scatter => (paged, other),
                };
                to.push(ends.0);
                from.push(ends.1);
                lens.push(run.len);
            }
        }
        // SAFETY: as above.
        unsafe {
            if is_reached && self.device.context().driver().has_batched_copies() {
                current.copy_batch(&to, &from, &lens, stream)?;
            } else {
                for ((&to, &from), &len) in to.iter().zip(&from).zip(&lens) {
                    current.copy(to, from, len, stream)?;
                }
            }
        }
        Ok(())
    }

    fn require(&self, layer: usize, pieces: &[Piece]) -> Result<(), TransferError> {
        let num_layers = self.cache.num_layers();
        if layer >= num_layers {
            return Err(TransferError::NoSuchLayer { layer, num_layers });
        }
        if pieces.len() != self.spans.len() {
            return Err(TransferError::SpanCount {
                found: pieces.len(),
                spans: self.spans.len(),
            });
        }
        for (span, piece) in self.spans.iter().zip(pieces) {
            if piece.len != span.layer_bytes {
                return Err(TransferError::LayerSize {
                    num_tokens: span.num_tokens,
                    expected: span.layer_bytes,
                    found: piece.len,
                });
            }
        }
        Ok(())
    }
}
