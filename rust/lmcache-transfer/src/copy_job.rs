//! A set of chunks on their way, a layer at a time.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use lmcache_core::layout::{CopyPlan, Placement};
use lmcache_memory::object::{ChunkMut, MemoryObj};
use lmcache_memory::region::ForeignChunk;

use crate::error::TransferError;
use crate::host::PagedCache;

/// One chunk of a job: how many tokens it holds, which of them to leave alone, and where they lie.
#[derive(Debug, Clone, Copy)]
pub struct ChunkSpan<'a> {
    /// Tokens in the chunk.
    pub num_tokens: usize,
    /// Leading tokens that are not to be moved.
    pub skip: usize,
    /// Where the chunk's tokens lie in the paged cache, from its first token on.
    pub placement: Placement<'a>,
}

impl ChunkSpan<'_> {
    /// The copies of one layer, and the bytes that the whole chunk takes in it.
    pub(crate) fn plan(&self, paged: &PagedCache) -> Result<(CopyPlan, usize), TransferError> {
        let &Self {
            num_tokens,
            skip,
            placement,
        } = self;
        let layout = paged.layout();
        let plan = CopyPlan::build(layout, paged.num_blocks(), num_tokens, skip, placement)?;
        Ok((plan, layout.layer_bytes(num_tokens)?))
    }
}

/// Chunks that are being moved between an engine's cache and the store.
///
/// `C` is [`ChunkMut`] on the way in (a store) and [`MemoryObj`] on the way out (a load), or [`ForeignChunk`] there, or
/// a borrowed slice of either kind; the job owns them, so nothing can be evicted or published under a copy. Layers may be stepped in any order, more than
/// once, or not at all.
#[derive(Debug)]
pub struct CopyJob<C> {
    paged: Arc<PagedCache>,
    parts: Vec<Part<C>>,
}

#[derive(Debug)]
struct Part<C> {
    chunk: C,
    plan: CopyPlan,
    layer_bytes: usize,
}

impl<C> CopyJob<C> {
    /// Plans the copies; nothing is moved yet.
    pub fn begin<'a>(
        paged: &Arc<PagedCache>,
        chunks: impl IntoIterator<Item = (C, ChunkSpan<'a>)>,
    ) -> Result<Self, TransferError> {
        let planned = chunks.into_iter().map(|(chunk, span)| {
            let (plan, layer_bytes) = span.plan(paged)?;
            Ok(Part {
                chunk,
                plan,
                layer_bytes,
            })
        });
        let parts = planned.collect::<Result<_, TransferError>>()?;
        Ok(Self {
            paged: Arc::clone(paged),
            parts,
        })
    }

    /// Bytes the job moves over all layers.
    pub fn bytes(&self) -> usize {
        self.layer_bytes() * self.num_layers()
    }

    /// Layers of the cache.
    pub fn num_layers(&self) -> usize {
        self.paged.num_layers()
    }

    /// Bytes the job moves in one layer.
    fn layer_bytes(&self) -> usize {
        self.parts.iter().map(|part| part.plan.bytes()).sum()
    }

    /// Gives the chunks back, in order.
    pub fn finish(self) -> Vec<C> {
        self.parts.into_iter().map(|part| part.chunk).collect()
    }
}

/// The faces of both directions: one layer, or all of them in one call. `$bytes` gives a chunk's. Chunks that
/// are only read may have several layers on their way at a time.
macro_rules! layers {
    ($chunk:ty, $this:ty, $does:literal, $move:ident, $bytes:expr) => {
        impl CopyJob<$chunk> {
            #[doc = concat!($does, " one layer of every chunk.")]
            pub fn layer(self: $this, layer: usize) {
                self.$move(layer..layer + 1, $bytes);
            }

            #[doc = concat!($does, " all layers of every chunk; threads share a large copy.")]
            pub fn all_layers(self: $this) {
                self.$move(0..self.num_layers(), $bytes);
            }
        }
    };
}

layers!(ChunkMut, &mut Self, "Gathers", gather, ChunkMut::bytes_mut);
layers!(&mut [u8], &mut Self, "Gathers", gather, |chunk| chunk);
layers!(MemoryObj, &Self, "Scatters", scatter, MemoryObj::bytes);
layers!(
    ForeignChunk,
    &Self,
    "Scatters",
    scatter,
    ForeignChunk::bytes
);
layers!(&[u8], &Self, "Scatters", scatter, |chunk| chunk);

impl<C> CopyJob<C> {
    fn gather(&mut self, layers: Range<usize>, bytes: fn(&mut C) -> &mut [u8])
    where
        C: Send,
    {
        let _timed = Timed::begin(&GATHER_NS);
        let call_bytes = self.layer_bytes() * layers.len();
        let steps = self.parts.iter_mut().flat_map(|part| {
            let range = part.range(&layers);
            // A chunk without tokens has no bytes.
            let targets = bytes(&mut part.chunk)[range].chunks_exact_mut(part.layer_bytes.max(1));
            let plan = &part.plan;
            let steps = layers.clone().zip(targets);
            steps.map(move |(layer, target)| (layer, plan, target))
        });
        self.paged.each(steps, call_bytes, |(layer, plan, target)| {
            self.paged.gather(layer, plan, target, call_bytes);
        });
    }

    fn scatter(&self, layers: Range<usize>, bytes: fn(&C) -> &[u8])
    where
        C: Sync,
    {
        let _timed = Timed::begin(&SCATTER_NS);
        let call_bytes = self.layer_bytes() * layers.len();
        let steps = self.parts.iter().flat_map(|part| {
            let range = part.range(&layers);
            let sources = bytes(&part.chunk)[range].chunks_exact(part.layer_bytes.max(1));
            let plan = &part.plan;
            let steps = layers.clone().zip(sources);
            steps.map(move |(layer, source)| (layer, plan, source))
        });
        self.paged.each(steps, call_bytes, |(layer, plan, source)| {
            self.paged.scatter(layer, plan, source, call_bytes);
        });
    }
}

static GATHER_NS: AtomicU64 = AtomicU64::new(0);
static SCATTER_NS: AtomicU64 = AtomicU64::new(0);

/// Nanoseconds that this process has spent in copies out of engines' caches and into them. A copy that several
/// threads share counts once; copies that run at the same time count each.
pub fn copy_nanoseconds() -> (u64, u64) {
    let [gather, scatter] = [&GATHER_NS, &SCATTER_NS].map(|spent| spent.load(Ordering::Relaxed));
    (gather, scatter)
}

/// Adds the time until it is dropped.
struct Timed {
    into: &'static AtomicU64,
    began: Instant,
}

impl Timed {
    fn begin(into: &'static AtomicU64) -> Self {
        let began = Instant::now();
        Self { into, began }
    }
}

impl Drop for Timed {
    fn drop(&mut self) {
        let spent = self.began.elapsed().as_nanos() as u64;
        self.into.fetch_add(spent, Ordering::Relaxed);
    }
}

impl<C> Part<C> {
    /// Where the bytes of `layers` lie in the chunk.
    fn range(&self, layers: &Range<usize>) -> Range<usize> {
        layers.start * self.layer_bytes..layers.end * self.layer_bytes
    }
}
