//! How a job's bytes are moved: what is made when it begins, and what a layer gives to the stream.

use lmcache_core::layout::{CopyPlan, PagedLayout};

use crate::copy_job::ChunkSpan;
use crate::cuda::current::Current;
use crate::cuda::descriptors::{self, Descriptor};
use crate::cuda::error::CudaError;
use crate::cuda::executor::{CopyPath, DeviceCache, Executor};
use crate::cuda::kernels::{CopyKernel, Direction, LaunchShape, Layers, PagedCopy, unit_slots};
use crate::cuda::staged::Staged;
use crate::cuda::tables::Tables;

/// The copies of one layer, by the way chosen.
#[derive(Debug)]
pub(super) enum Moves {
    /// By the copy engines: in one call, or where `single`, in one call each.
    Engine { list: CopyList, single: bool },
    /// By a kernel that reaches page-locked memory itself.
    Kernel {
        kernel: CopyKernel,
        copy: PagedCopy,
        shape: Option<LaunchShape>,
    },
    /// By a kernel and the copy engines.
    Staged(Staged),
}

/// What a layer's copies are given to.
pub(super) struct Layer<'a> {
    pub(super) executor: &'a Executor,
    pub(super) current: &'a Current,
    pub(super) direction: Direction,
    /// The engine's layer.
    pub(super) base: u64,
    /// Its number, in the chunks too.
    pub(super) index: u64,
}

/// Descriptors, and the three lists that a driver takes; filled for each layer, never grown.
#[derive(Debug)]
pub(super) struct CopyList {
    descriptors: Vec<Descriptor>,
    to: Vec<u64>,
    from: Vec<u64>,
    lens: Vec<usize>,
}

impl CopyList {
    pub(super) fn new(descriptors: Vec<Descriptor>) -> Self {
        Self {
            to: vec![0; descriptors.len()],
            from: vec![0; descriptors.len()],
            lens: descriptors.iter().map(|one| one.len).collect(),
            descriptors,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.descriptors.len()
    }

    /// Has descriptors `range` copied; `base` is what their `paged` counts from.
    ///
    /// # Safety
    /// As for [`Current::copy_batch`].
    pub(super) unsafe fn give(
        &mut self,
        range: std::ops::Range<usize>,
        layer: &Layer<'_>,
        base: u64,
        single: bool,
    ) -> Result<(), CudaError> {
        let (to, from) = (&mut self.to[range.clone()], &mut self.from[range.clone()]);
        let lens = &self.lens[range.clone()];
        let ends = to.iter_mut().zip(from.iter_mut());
        for (one, (to, from)) in self.descriptors[range].iter().zip(ends) {
            let paged = base + one.paged;
            let stored = one.stored + layer.index * one.layer_bytes;
            (*to, *from) = match layer.direction {
                Direction::Gather => (stored, paged),
                Direction::Scatter => (paged, stored),
            };
        }
        let stream = layer.executor.stream(layer.direction);
        let batched = layer.current.context().driver().has_batched_copies();
        // SAFETY: by the caller's promise.
        unsafe {
            if batched && !single {
                return layer.current.copy_batch(to, from, lens, stream);
            }
            for ((&to, &from), &len) in to.iter().zip(&*from).zip(lens) {
                layer.current.copy(to, from, len, stream)?;
            }
        }
        Ok(())
    }
}

impl Moves {
    pub(super) fn path(&self) -> CopyPath {
        match self {
            Self::Engine { single: false, .. } => CopyPath::Engine,
            Self::Engine { single: true, .. } => CopyPath::Single,
            Self::Kernel { .. } => CopyPath::Kernel,
            Self::Staged(_) => CopyPath::Staged,
        }
    }

    /// Gives one layer's copies to the direction's stream, without allocating and without waiting for the device.
    ///
    /// # Safety
    /// The chunks, the engine's layer and the tables must stay until the copies are done, and be left alone but for
    /// work ordered by events.
    pub(super) unsafe fn give(&mut self, layer: &Layer<'_>) -> Result<(), CudaError> {
        match self {
            // SAFETY: by the caller's promise; the plan keeps both ends inside.
            Self::Engine { list, single } => unsafe {
                list.give(0..list.len(), layer, layer.base, *single)
            },
            Self::Kernel {
                kernel,
                copy,
                shape,
            } => {
                copy.layers = layer.base;
                copy.chunk_layer = layer.index as u32;
                let (Some(shape), Some(kernels)) = (shape, &layer.executor.kernels) else {
                    return Ok(());
                };
                let stream = layer.executor.stream(layer.direction);
                // SAFETY: by the caller's promise; slots were checked as the tables were made.
                unsafe { layer.current.launch(kernels, *kernel, *shape, copy, stream) }
            }
            // SAFETY: by the caller's promise.
            Self::Staged(staged) => unsafe { staged.give(layer) },
        }
    }
}

/// The chunks of a job that begins.
pub(super) struct Batch<'a> {
    pub(super) executor: &'a Executor,
    pub(super) cache: &'a DeviceCache,
    pub(super) direction: Direction,
    pub(super) addresses: &'a [u64],
    pub(super) spans: &'a [ChunkSpan<'a>],
    pub(super) plans: &'a [CopyPlan],
    /// What [`units`] answers for all spans together, where it is known already.
    pub(super) units: Option<&'a [u64]>,
}

/// A slot for each of a span's units, for kernels: -1 for those that are skipped.
pub(super) fn units(
    cache: &DeviceCache,
    span: &ChunkSpan<'_>,
) -> Result<impl Iterator<Item = u64>, CudaError> {
    let layout = &cache.layout;
    let slots = unit_slots(layout, cache.num_blocks, span.num_tokens, span.placement)?;
    let skip = span.skip / unit_tokens(layout);
    Ok(slots.into_iter().enumerate().map(move |(unit, slot)| {
        let moved = if unit < skip { -1 } else { slot };
        moved as u64
    }))
}

/// Tokens that the kernels count as one: a whole block where only that has a meaning.
pub(super) fn unit_tokens(layout: &PagedLayout) -> usize {
    match *layout {
        PagedLayout::Opaque { block_tokens, .. } => block_tokens,
        PagedLayout::Tokens { .. } => 1,
    }
}

impl Batch<'_> {
    /// What is made once: the lists of the copy engines, or what kernels are told. Tables go to `tables`.
    pub(super) fn moves(
        &self,
        current: &Current,
        path: impl FnOnce(usize, usize) -> CopyPath,
        tables: &mut Option<Tables>,
    ) -> Result<Moves, CudaError> {
        let mut descriptors = Vec::new();
        for ((&address, span), plan) in self.addresses.iter().zip(self.spans).zip(self.plans) {
            let layer_bytes = self.cache.layout.layer_bytes(span.num_tokens)? as u64;
            descriptors::append(&mut descriptors, address, layer_bytes, plan.runs());
        }
        let num_bytes = self.plans.iter().map(CopyPlan::bytes).sum();
        let wanted = path(descriptors.len(), num_bytes);
        let chunk_tokens = self.even_chunk_tokens();
        let by_kernel =
            wanted.needs_kernels() && self.executor.kernels.is_some() && !descriptors.is_empty();
        let (true, Some(chunk_tokens)) = (by_kernel, chunk_tokens) else {
            return Ok(Moves::Engine {
                list: CopyList::new(descriptors),
                single: wanted == CopyPath::Single,
            });
        };
        if wanted == CopyPath::Staged
            && let Some(staged) = Staged::begin(self, current, chunk_tokens, tables)?
        {
            return Ok(Moves::Staged(staged));
        }
        self.by_kernel(current, chunk_tokens, tables)
    }

    /// Tokens of every chunk but the last, which may have fewer; `None` where they differ.
    fn even_chunk_tokens(&self) -> Option<usize> {
        let (last, full) = self.spans.split_last()?;
        let chunk_tokens = full.first().unwrap_or(last).num_tokens;
        let even = full.iter().all(|span| span.num_tokens == chunk_tokens);
        (even && last.num_tokens <= chunk_tokens).then_some(chunk_tokens)
    }

    fn by_kernel(
        &self,
        current: &Current,
        chunk_tokens: usize,
        tables: &mut Option<Tables>,
    ) -> Result<Moves, CudaError> {
        let num_tokens = self.spans.iter().map(|span| span.num_tokens).sum();
        let mut copy = PagedCopy::new(&self.cache.layout, num_tokens, chunk_tokens, 0)?;
        copy.num_layers = 1;
        let kernel = self.kernel(&copy, self.addresses);
        let tables = tables.insert(self.tables(current, self.addresses)?);
        copy.chunks = tables.word(0);
        copy.slots = tables.word(self.addresses.len());
        Ok(Moves::Kernel {
            kernel,
            shape: LaunchShape::of(&copy, kernel.width),
            copy,
        })
    }

    /// The kernel for the widest vector that all addresses allow; `chunks` are those it is told.
    pub(super) fn kernel(&self, copy: &PagedCopy, chunks: &[u64]) -> CopyKernel {
        CopyKernel {
            layers: Layers::One,
            direction: self.direction,
            width: copy.vector_width(chunks.iter().chain(&self.cache.bases).copied()),
        }
    }

    /// Tables on the device: an address for each chunk, then a slot for each unit, -1 for those that are skipped.
    pub(super) fn tables(&self, current: &Current, chunks: &[u64]) -> Result<Tables, CudaError> {
        let mut words = chunks.to_vec();
        match self.units {
            Some(units) => words.extend(units),
            None => {
                for span in self.spans {
                    words.extend(units(self.cache, span)?);
                }
            }
        }
        let tables = self.executor.tables(current, words.len())?;
        tables.fill(current, &words, self.executor.stream(self.direction))?;
        Ok(tables)
    }
}
