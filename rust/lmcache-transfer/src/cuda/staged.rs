//! Copies that go through a buffer on the device: a kernel packs what lies scattered in the cache, the copy engines
//! move it in pieces as long as a chunk's layer, or the other way round. For links over which a kernel's own reads
//! and writes of page-locked memory are slow.
//!
//! A direction has one buffer, of one size, whatever the jobs: all that touches it is given to that direction's
//! stream, which keeps it in order. A layer that does not fit goes through it in groups of chunks.

use std::ops::Range;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use crate::cuda::current::Current;
use crate::cuda::descriptors::Descriptor;
use crate::cuda::error::CudaError;
use crate::cuda::handles::DeviceMemory;
use crate::cuda::kernels::{CopyKernel, Direction, LaunchShape, PagedCopy};
use crate::cuda::moves::{Batch, CopyList, Layer, unit_tokens};
use crate::cuda::tables::Tables;

/// Device memory that a direction stages in, once anything is staged at all: chunks' layers of some hundred KiB to
/// a MiB by the dozen, so that the kernel's part is small beside the link's.
pub(super) const STAGING_BYTES: usize = 32 << 20;
/// Chunks begin at multiples of it, so that the widest vectors fit.
const ALIGNMENT: usize = 256;

/// The buffer of one direction.
#[derive(Debug)]
pub(super) struct Staging {
    bytes: usize,
    /// `None` where the device had no room for it.
    memory: OnceLock<Option<DeviceMemory>>,
    /// Held while the kernel and the copies of a group are given to the stream: another thread's between them would
    /// use the same bytes.
    turn: Mutex<()>,
}

impl Staging {
    /// Of `bytes` bytes, 0 for none.
    pub(super) fn new(bytes: usize) -> Self {
        Self {
            bytes,
            memory: OnceLock::new(),
            turn: Mutex::new(()),
        }
    }

    /// Its size, had or not.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// The buffer, allocated when it is first asked for; a device without room is asked once.
    pub(super) fn memory(&self, current: &Current) -> Option<&DeviceMemory> {
        let allocate = || current.device_memory(self.bytes).ok();
        self.memory.get_or_init(allocate).as_ref()
    }

    /// Whether the device was asked for it and had no room.
    pub(super) fn is_refused(&self) -> bool {
        matches!(self.memory.get(), Some(None))
    }

    pub(super) fn turn(&self) -> MutexGuard<'_, ()> {
        self.turn.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The copies of one layer.
#[derive(Debug)]
pub(super) struct Staged {
    /// Where the buffer begins; the executor's, for as long as the executor lives.
    buffer: u64,
    kernel: CopyKernel,
    groups: Vec<Group>,
    /// Between page-locked memory and the buffer.
    list: CopyList,
}

/// Chunks that lie in the buffer at the same time.
#[derive(Debug)]
struct Group {
    copy: PagedCopy,
    shape: LaunchShape,
    /// Its copies in `list`.
    copies: Range<usize>,
}

impl Staged {
    /// What is made once, or `None` where the buffer is not to be had or holds no chunk's layer. Chunks have
    /// `chunk_tokens` tokens, but for the last.
    pub(super) fn begin(
        batch: &Batch<'_>,
        current: &Current,
        chunk_tokens: usize,
        tables: &mut Option<Tables>,
    ) -> Result<Option<Self>, CudaError> {
        let layout = &batch.cache.layout;
        let room = layout
            .layer_bytes(chunk_tokens)?
            .next_multiple_of(ALIGNMENT);
        let staging = batch.executor.staging(batch.direction);
        let chunks_a_group = staging.bytes() / room.max(1);
        let Some(memory) = (chunks_a_group > 0)
            .then(|| staging.memory(current))
            .flatten()
        else {
            return Ok(None);
        };
        let place = |chunk: usize| memory.address() + (chunk % chunks_a_group * room) as u64;
        let places: Vec<u64> = (0..batch.spans.len()).map(place).collect();
        let made = tables.insert(batch.tables(current, &places)?);

        let units_a_chunk = chunk_tokens / unit_tokens(layout);
        let (mut groups, mut pieces) = (Vec::new(), Vec::new());
        let mut kernel = None;
        for (number, spans) in batch.spans.chunks(chunks_a_group).enumerate() {
            let first = number * chunks_a_group;
            let begin = pieces.len();
            for (at, &place) in places.iter().enumerate().skip(first).take(spans.len()) {
                batch.pieces(at, place, memory.address(), &mut pieces)?;
            }
            let num_tokens = spans.iter().map(|span| span.num_tokens).sum();
            let mut copy = PagedCopy::new(layout, num_tokens, chunk_tokens, 0)?;
            copy.num_layers = 1;
            copy.chunks = made.word(first);
            copy.slots = made.word(places.len() + first * units_a_chunk);
            let kernel = *kernel.get_or_insert_with(|| batch.kernel(&copy, &places));
            if let Some(shape) = LaunchShape::of(&copy, kernel.width)
                && pieces.len() > begin
            {
                groups.push(Group {
                    copy,
                    shape,
                    copies: begin..pieces.len(),
                });
            }
        }
        Ok(kernel.map(|kernel| Self {
            buffer: memory.address(),
            kernel,
            groups,
            list: CopyList::new(pieces),
        }))
    }

    /// Gives one layer to the stream.
    ///
    /// # Safety
    /// As for [`crate::cuda::moves::Moves::give`].
    pub(super) unsafe fn give(&mut self, layer: &Layer<'_>) -> Result<(), CudaError> {
        let (executor, stream) = (layer.executor, layer.executor.stream(layer.direction));
        let staging = executor.staging(layer.direction);
        let kernels = executor.kernels.as_ref();
        let kernels = kernels.expect("begun because there are kernels");
        for group in &mut self.groups {
            let _turn = staging.turn();
            let (list, copies) = (&mut self.list, group.copies.clone());
            // A single long one is no batch.
            let single = copies.len() == 1;
            group.copy.layers = layer.base;
            // SAFETY: by the caller's promise; the buffer is the executor's, which the job holds, and all that
            // touches it is on this stream, in the order that `turn` keeps.
            unsafe {
                let launch = || {
                    let copy = &group.copy;
                    layer
                        .current
                        .launch(kernels, self.kernel, group.shape, copy, stream)
                };
                match layer.direction {
                    Direction::Gather => {
                        launch()?;
                        list.give(copies, layer, self.buffer, single)?;
                    }
                    Direction::Scatter => {
                        list.give(copies, layer, self.buffer, single)?;
                        launch()?;
                    }
                }
            }
        }
        Ok(())
    }
}

impl Batch<'_> {
    /// What the job moves of chunk `at`, in pieces that are whole in the chunk: those tokens that have no slot, or
    /// are skipped, are in none. `place` is the chunk's in the buffer that begins at `buffer`.
    fn pieces(
        &self,
        at: usize,
        place: u64,
        buffer: u64,
        pieces: &mut Vec<Descriptor>,
    ) -> Result<(), CudaError> {
        let layer_bytes = self.cache.layout.layer_bytes(self.spans[at].num_tokens)? as u64;
        let plan = &self.plans[at];
        let first = pieces.len();
        for stretch in plan.stretches() {
            let len = stretch.rows * plan.grid().row_bytes();
            let stored = self.addresses[at] + stretch.chunk as u64;
            if let Some(last) = pieces[first..].last_mut()
                && last.stored + last.len as u64 == stored
            {
                last.len += len;
                continue;
            }
            pieces.push(Descriptor {
                paged: place - buffer + stretch.chunk as u64,
                stored,
                len,
                layer_bytes,
            });
        }
        Ok(())
    }
}
