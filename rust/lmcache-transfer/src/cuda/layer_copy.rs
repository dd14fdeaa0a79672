//! One layer at a time between an engine's cache on a GPU and memory of the caller's: what
//! [`crate::layer_copy`] is for host memory.

use std::any::Any;
use std::sync::Arc;

use lmcache_core::layout::{CopyPlan, Placement};

use crate::copy_job::ChunkSpan;
use crate::cuda::current::Current;
use crate::cuda::device::{Device, Reach};
use crate::cuda::error::CudaError;
use crate::cuda::executor::{DeviceCache, Executor};
use crate::cuda::handles::{Event, StreamId};
use crate::cuda::kernels::Direction;
use crate::cuda::moves::{self, Batch, Layer};
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
    /// How it lies for the device.
    pub reach: Reach,
}

/// Tables out of the executor's pool; they go back when nothing needs them any more.
#[derive(Debug)]
pub(super) struct LentTables {
    executor: Arc<Executor>,
    tables: Option<Tables>,
}

impl LentTables {
    /// None yet.
    fn none(executor: &Arc<Executor>) -> Self {
        Self {
            executor: Arc::clone(executor),
            tables: None,
        }
    }

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
    plans: Vec<CopyPlan>,
    num_bytes: usize,
    /// A slot for each unit of all spans.
    units: Vec<u64>,
    engine_done: Event,
    copied: Event,
}

#[derive(Debug)]
struct Planned {
    num_tokens: usize,
    skip: usize,
    place: Place,
    layer_bytes: usize,
}

/// A [`Placement`] of its own.
#[derive(Debug)]
enum Place {
    Blocks(Vec<u32>),
    Slots(Vec<i64>),
}

impl Planned {
    fn span(&self) -> ChunkSpan<'_> {
        ChunkSpan {
            num_tokens: self.num_tokens,
            skip: self.skip,
            placement: match &self.place {
                Place::Blocks(blocks) => Placement::Blocks(blocks),
                Place::Slots(slots) => Placement::Slots(slots),
            },
        }
    }
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
        let (mut planned, mut plans, mut units) = (Vec::new(), Vec::new(), Vec::new());
        for span in spans {
            plans.push(cache.plan(&span)?);
            units.extend(moves::units(cache, &span)?);
            planned.push(Planned {
                num_tokens: span.num_tokens,
                skip: span.skip,
                place: match span.placement {
                    Placement::Blocks(blocks) => Place::Blocks(blocks.to_vec()),
                    Placement::Slots(slots) => Place::Slots(slots.to_vec()),
                },
                layer_bytes: cache.layout.layer_bytes(span.num_tokens)?,
            });
        }
        Ok(Self {
            device: Arc::clone(device),
            cache: Arc::clone(cache),
            engine,
            direction,
            num_bytes: plans.iter().map(CopyPlan::bytes).sum(),
            spans: planned,
            plans,
            units,
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
        if self.num_bytes == 0 {
            return Ok(0);
        }
        let executor = self.device.executor();
        let stream = executor.stream(self.direction);
        let current = self.device.enter()?;
        self.wait_for_engine(&current)?;
        let mut tables = LentTables::none(executor);
        // SAFETY: by the caller's promise; the tables are held with the rest.
        let given = unsafe { self.give(&current, layer, pieces, &mut tables) };
        drop(current);
        // Whatever came of it, a part may be under way.
        let held = (held, tables, Arc::clone(&self.cache));
        self.device.hold(self.direction, Box::new(held))?;
        given?;
        if self.direction == Direction::Scatter {
            let current = self.device.enter()?;
            current.record(&self.copied, stream)?;
            if !planted::left_out("engine after loaded layer") {
                current.wait(self.engine, &self.copied)?;
            }
        }
        Ok(self.num_bytes)
    }

    /// Lets the engine's stream wait for all that was given so far: behind this it may write the blocks again.
    pub fn fence(&self) -> Result<(), CudaError> {
        let current = self.device.enter()?;
        current.record(&self.copied, self.device.executor().stream(self.direction))?;
        if planted::left_out("engine after stored layers") {
            return Ok(());
        }
        current.wait(self.engine, &self.copied)
    }

    /// Our stream begins nothing more before what the engine has been given is done.
    pub fn wait_for_engine(&self, current: &Current) -> Result<(), CudaError> {
        if planted::left_out("layer copy after engine") {
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
        used: &mut LentTables,
    ) -> Result<(), CudaError> {
        let executor = self.device.executor();
        let addresses: Vec<u64> = pieces.iter().map(|piece| piece.address).collect();
        let spans: Vec<_> = self.spans.iter().map(Planned::span).collect();
        let batch = Batch {
            executor,
            cache: &self.cache,
            direction: self.direction,
            addresses: &addresses,
            spans: &spans,
            plans: &self.plans,
            units: Some(&self.units),
        };
        let reach = reach_of(pieces);
        let path = |runs, bytes| self.device.choose(self.direction, reach, runs, bytes);
        let mut moves = batch.moves(current, path, &mut used.tables)?;
        self.device.count(moves.path());
        let layer = Layer {
            executor,
            current,
            direction: self.direction,
            base: self.cache.bases[layer],
            // A piece has one layer.
            index: 0,
        };
        // SAFETY: slots and sizes were checked by the plan, and pieces by `require`; the rest is the caller's promise.
        unsafe { moves.give(&layer) }
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

/// Of memory of several kinds, that which the fewest ways reach.
fn reach_of(pieces: &[Piece]) -> Reach {
    let all = |reach| pieces.iter().all(|piece| piece.reach == reach);
    let any = |reach| pieces.iter().any(|piece| piece.reach == reach);
    if any(Reach::Pageable) {
        Reach::Pageable
    } else if all(Reach::OnDevice) {
        Reach::OnDevice
    } else {
        Reach::PageLocked
    }
}
