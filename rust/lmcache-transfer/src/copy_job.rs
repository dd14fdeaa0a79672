//! A set of chunks on their way, a layer at a time.

use std::sync::Arc;

use lmcache_core::layout::{CopyPlan, Placement};
use lmcache_memory::object::{ChunkMut, MemoryObj};

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

/// Chunks that are being moved between an engine's cache and the store.
///
/// `C` is [`ChunkMut`] on the way in (a store) and [`MemoryObj`] on the way out (a load), or a borrowed slice
/// of either kind; the job owns them, so nothing can be evicted or published under a copy. Layers may be stepped in any order, more than
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
            let layout = paged.layout();
            let ChunkSpan {
                num_tokens,
                skip,
                placement,
            } = span;
            let plan = CopyPlan::build(layout, paged.num_blocks(), num_tokens, skip, placement)?;
            Ok(Part {
                chunk,
                plan,
                layer_bytes: layout.layer_bytes(num_tokens)?,
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
        let per_layer: usize = self.parts.iter().map(|part| part.plan.bytes()).sum();
        per_layer * self.paged.num_layers()
    }

    /// Layers of the cache.
    pub fn num_layers(&self) -> usize {
        self.paged.num_layers()
    }

    /// Gives the chunks back, in order.
    pub fn finish(self) -> Vec<C> {
        self.parts.into_iter().map(|part| part.chunk).collect()
    }
}

impl CopyJob<ChunkMut> {
    /// Gathers one layer of every chunk.
    pub fn layer(&mut self, layer: usize) {
        for part in &mut self.parts {
            let range = layer * part.layer_bytes..(layer + 1) * part.layer_bytes;
            self.paged
                .gather(layer, &part.plan, &mut part.chunk.bytes_mut()[range]);
        }
    }
}

impl CopyJob<MemoryObj> {
    /// Scatters one layer of every chunk. Sealed chunks are only read, so several layers may go at a time.
    pub fn layer(&self, layer: usize) {
        for part in &self.parts {
            let range = layer * part.layer_bytes..(layer + 1) * part.layer_bytes;
            self.paged
                .scatter(layer, &part.plan, &part.chunk.bytes()[range]);
        }
    }
}

impl CopyJob<&mut [u8]> {
    /// Gathers one layer of every chunk into memory of the caller's.
    pub fn layer(&mut self, layer: usize) {
        for part in &mut self.parts {
            let range = layer * part.layer_bytes..(layer + 1) * part.layer_bytes;
            self.paged.gather(layer, &part.plan, &mut part.chunk[range]);
        }
    }
}

impl CopyJob<&[u8]> {
    /// Scatters one layer of every chunk out of memory of the caller's.
    pub fn layer(&mut self, layer: usize) {
        for part in &self.parts {
            let range = layer * part.layer_bytes..(layer + 1) * part.layer_bytes;
            self.paged.scatter(layer, &part.plan, &part.chunk[range]);
        }
    }
}
