//! A request's chunks on their walk, a layer at a time.
//!
//! A [`StoreJob`] shows nothing before its commit, and a [`LoadJob`] holds its leases to its end; either may be
//! dropped at any point, and gives everything back.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use lmcache_core::hash::ChunkHash;
use lmcache_memory::local_cpu::LocalCpu;
use lmcache_memory::object::{ChunkMut, MemoryObj};

use crate::copy_job::{ChunkSpan, CopyJob};
use crate::error::TransferError;
use crate::flow::{Chunks, Loaded, Stored};
use crate::host::PagedCache;

/// Chunks on their way into the store.
#[derive(Debug)]
pub struct StoreJob {
    local_cpu: LocalCpu,
    namespace: Box<str>,
    hashes: Box<[ChunkHash]>,
    job: CopyJob<ChunkMut>,
    copied: Box<[bool]>,
    stored: Stored,
}

impl StoreJob {
    /// Reserves room for those chunks that are not stored yet, and plans their copies.
    ///
    /// `first` chunks at the front are only counted as used, not stored. A chunk with a token that has no slot
    /// (-1) ends the store, since what follows could not be reached. Memory ending is a success.
    pub fn begin(
        local_cpu: &LocalCpu,
        paged: &Arc<PagedCache>,
        chunks: &Chunks<'_>,
        first: usize,
    ) -> Result<Self, TransferError> {
        chunks.validate(paged.layout())?;
        let num_placed = chunks.num_placed();
        let hashes = &chunks.hashes[..num_placed];
        let layout = paged.layout();
        let mut stored = Stored::default();
        let mut reserved = Vec::new();
        if first < num_placed {
            let chunk_bytes = |chunk| paged.chunk_bytes(chunks.tokens_in(chunk));
            // The tail is the only chunk whose size may not suit the layout; asking it first leaves none half-way.
            chunk_bytes(num_placed - 1)?;
            chunk_bytes(0)?;
            let len_of = |chunk| chunk_bytes(chunk).unwrap_or(0);
            let given = local_cpu.reserve(chunks.namespace, hashes, first, len_of);
            stored.refused_chunks = given
                .stopped_at
                .map_or(0, |stopped_at| num_placed - stopped_at);
            reserved = given.chunks;
        }
        let parts = reserved.into_iter().map(|(index, chunk)| {
            let num_tokens = chunks.tokens_in(index);
            stored.chunks += 1;
            stored.tokens += num_tokens;
            let placement = chunks.placement_of(index, layout.block_tokens());
            (
                chunk,
                ChunkSpan {
                    num_tokens,
                    skip: 0,
                    placement,
                },
            )
        });
        let job = CopyJob::begin(paged, parts)?;
        stored.bytes = job.bytes();
        Ok(Self {
            local_cpu: local_cpu.clone(),
            namespace: chunks.namespace.into(),
            hashes: hashes.into(),
            copied: vec![false; job.num_layers()].into(),
            job,
            stored,
        })
    }

    /// Layers of a chunk.
    pub fn num_layers(&self) -> usize {
        self.copied.len()
    }

    /// What a commit will have stored.
    pub fn planned(&self) -> Stored {
        self.stored
    }

    /// Gathers one layer of every chunk. Once more replaces what was gathered before: an engine that computes
    /// a layer in several pieces says so after each of them.
    pub fn layer(&mut self, layer: usize) {
        self.job.layer(layer);
        self.copied[layer] = true;
    }

    /// Publishes the chunks, if every layer was gathered; else they are dropped and nothing was stored.
    pub fn commit(self) -> Stored {
        let is_whole = self.copied.iter().all(|&copied| copied);
        let written = self.job.finish();
        if !is_whole && !written.is_empty() {
            return Stored {
                refused_chunks: self.stored.refused_chunks,
                ..Stored::default()
            };
        }
        if !written.is_empty() {
            self.local_cpu
                .commit(&self.namespace, &self.hashes, written);
        }
        self.stored
    }
}

/// Chunks on their way out of the store.
#[derive(Debug)]
pub struct LoadJob {
    job: CopyJob<MemoryObj>,
    /// What is in the engine's cache once every layer is written.
    loaded: Loaded,
    skip: usize,
    written: Box<[AtomicBool]>,
}

impl LoadJob {
    /// Plans to write the tokens `skip..` of the chunks, from what `lookup_id` leases. That lease ends: the job
    /// holds the chunks.
    ///
    /// Ends at the first chunk that is not stored; those wholly below `skip` need not be.
    pub fn begin(
        local_cpu: &LocalCpu,
        paged: &Arc<PagedCache>,
        lookup_id: &str,
        chunks: &Chunks<'_>,
        skip: usize,
    ) -> Result<Self, TransferError> {
        let found = Found::take(local_cpu, paged, lookup_id, chunks, skip)?;
        let end = found.end;
        Self::plan(paged, chunks, found.objects, skip, end)
    }

    /// As [`LoadJob::begin`], for an engine that will compute the tokens from `computed_from` on while the job
    /// runs. A chunk that holds such tokens besides others is written before this returns, all its layers: an
    /// engine writes the keys and values of a layer's new tokens before it asks for the layer, and whole blocks
    /// written later would overwrite them.
    pub fn begin_beside(
        local_cpu: &LocalCpu,
        paged: &Arc<PagedCache>,
        lookup_id: &str,
        chunks: &Chunks<'_>,
        skip: usize,
        computed_from: usize,
    ) -> Result<Self, TransferError> {
        let mut found = Found::take(local_cpu, paged, lookup_id, chunks, skip)?;
        let end = found.end;
        let is_apart = |&(index, _): &(usize, MemoryObj)| {
            index * chunks.chunk_size + chunks.tokens_in(index) <= computed_from
        };
        let num_apart = found
            .objects
            .iter()
            .take_while(|&part| is_apart(part))
            .count();
        let shared = found.objects.split_off(num_apart);
        let at_once = Self::plan(paged, chunks, shared, skip, end)?;
        for layer in 0..at_once.num_layers() {
            at_once.layer(layer);
        }
        let mut job = Self::plan(paged, chunks, found.objects, skip, end)?;
        job.loaded.bytes += at_once.loaded.bytes;
        Ok(job)
    }

    fn plan(
        paged: &Arc<PagedCache>,
        chunks: &Chunks<'_>,
        objects: Vec<(usize, MemoryObj)>,
        skip: usize,
        end: usize,
    ) -> Result<Self, TransferError> {
        let block_tokens = paged.layout().block_tokens();
        let parts = objects.into_iter().filter_map(|(index, object)| {
            let start = index * chunks.chunk_size;
            let num_tokens = chunks.tokens_in(index);
            let span = ChunkSpan {
                num_tokens,
                skip: skip.saturating_sub(start),
                placement: chunks.placement_of(index, block_tokens),
            };
            (start + num_tokens > skip).then_some((object, span))
        });
        let job = CopyJob::begin(paged, parts)?;
        let loaded = Loaded {
            end,
            tokens: end - skip,
            bytes: job.bytes(),
        };
        let written = (0..job.num_layers()).map(|_| AtomicBool::new(false));
        Ok(Self {
            written: written.collect(),
            job,
            loaded,
            skip,
        })
    }

    /// Layers of a chunk.
    pub fn num_layers(&self) -> usize {
        self.written.len()
    }

    /// What will have been loaded once every layer is written.
    pub fn planned(&self) -> Loaded {
        self.loaded
    }

    /// Scatters one layer of every chunk.
    pub fn layer(&self, layer: usize) {
        self.job.layer(layer);
        self.written[layer].store(true, Ordering::Release);
    }

    /// Bytes that one layer moves.
    pub(crate) fn layer_bytes(&self) -> usize {
        self.job.bytes() / self.num_layers().max(1)
    }

    /// What was loaded: nothing, if a layer is missing. The chunks are given back.
    pub fn finish(self) -> Loaded {
        let is_written = |layer: &AtomicBool| layer.load(Ordering::Acquire);
        if self.job.bytes() == 0 || self.written.iter().all(is_written) {
            return self.loaded;
        }
        Loaded {
            end: self.skip,
            ..Loaded::default()
        }
    }
}

/// The chunks of a load that are stored, each with its place in the prompt.
struct Found {
    objects: Vec<(usize, MemoryObj)>,
    /// Every token below this one is stored, or was there before.
    end: usize,
}

impl Found {
    fn take(
        local_cpu: &LocalCpu,
        paged: &PagedCache,
        lookup_id: &str,
        chunks: &Chunks<'_>,
        skip: usize,
    ) -> Result<Self, TransferError> {
        chunks.validate(paged.layout())?;
        // The engine has what lies below `skip`, so it need not be stored.
        let first = skip / chunks.chunk_size;
        let objects = local_cpu.take_from(first, lookup_id, chunks.namespace, chunks.hashes);
        let fits = |(index, object): &(usize, MemoryObj)| {
            paged.chunk_bytes(chunks.tokens_in(*index)) == Ok(object.len())
        };
        let objects: Vec<_> = (first..).zip(objects).take_while(fits).collect();
        let end = objects.last().map_or(skip, |&(index, _)| {
            skip.max(index * chunks.chunk_size + chunks.tokens_in(index))
        });
        Ok(Self { objects, end })
    }
}
