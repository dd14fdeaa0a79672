//! A request's chunks on their walk, a layer at a time.
//!
//! A [`StoreJob`] shows nothing before its commit, and a [`LoadJob`] holds its leases to its end; either may be
//! dropped at any point, and gives everything back.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use lmcache_core::hash::ChunkHash;
use lmcache_core::layout::PagedLayout;
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
        let form = (paged.layout(), paged.num_layers());
        let (parts, mut stored) = reserve(local_cpu, form, chunks, first)?;
        let job = CopyJob::begin(paged, parts)?;
        stored.bytes = job.bytes();
        Ok(Self {
            local_cpu: local_cpu.clone(),
            namespace: chunks.namespace.into(),
            hashes: chunks.hashes[..chunks.num_placed()].into(),
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

    /// Gathers every layer, as one copy.
    pub fn all_layers(&mut self) {
        self.job.all_layers();
        self.copied.fill(true);
    }

    /// Publishes the chunks, if every layer was gathered and the store was neither closed nor cleared meanwhile;
    /// else they are dropped and nothing was stored.
    pub fn commit(self) -> Stored {
        let is_whole = self.copied.iter().all(|&copied| copied);
        let written = self.job.finish();
        let publish = |written| {
            let (namespace, hashes) = (&self.namespace, &self.hashes);
            self.local_cpu.commit(namespace, hashes, written)
        };
        if written.is_empty() || (is_whole && publish(written)) {
            return self.stored;
        }
        Stored {
            refused_chunks: self.stored.refused_chunks,
            ..Stored::default()
        }
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
        let form = (paged.layout(), paged.num_layers());
        let found = Found::take(local_cpu, form, lookup_id, chunks, skip)?;
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
        let form = (paged.layout(), paged.num_layers());
        let mut found = Found::take(local_cpu, form, lookup_id, chunks, skip)?;
        let end = found.end;
        let shared = found.split_off(chunks, computed_from);
        let at_once = Self::plan(paged, chunks, shared, skip, end)?;
        at_once.all_layers();
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
        let job = CopyJob::begin(paged, to_write(paged.layout(), chunks, objects, skip))?;
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

    /// Scatters every layer, as one copy.
    pub fn all_layers(&self) {
        self.job.all_layers();
        for written in &self.written {
            written.store(true, Ordering::Release);
        }
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

/// Layout and number of layers: what decides a chunk's size.
pub(crate) type Form<'a> = (&'a PagedLayout, usize);

/// Bytes of a chunk, over all layers.
pub(crate) fn chunk_bytes(
    (layout, num_layers): Form<'_>,
    num_tokens: usize,
) -> Result<usize, TransferError> {
    let layer_bytes = layout.layer_bytes(num_tokens)?;
    layer_bytes
        .checked_mul(num_layers)
        .ok_or(TransferError::ChunkTooLarge {
            num_tokens,
            layer_bytes,
            num_layers,
        })
}

type Part<'a, C> = (C, ChunkSpan<'a>);

/// Room for those chunks that are not stored yet, and what a store of them will have stored, but for the bytes.
pub(crate) fn reserve<'a>(
    local_cpu: &LocalCpu,
    form: Form<'_>,
    chunks: &'a Chunks<'_>,
    first: usize,
) -> Result<(Vec<Part<'a, ChunkMut>>, Stored), TransferError> {
    chunks.validate(form.0)?;
    let num_placed = chunks.num_placed();
    let hashes = &chunks.hashes[..num_placed];
    let mut stored = Stored::default();
    if first >= num_placed {
        return Ok((Vec::new(), stored));
    }
    let len_of = |chunk| chunk_bytes(form, chunks.tokens_in(chunk));
    // The tail is the only chunk whose size may not suit the layout; asking it first leaves none half-way.
    len_of(num_placed - 1)?;
    len_of(0)?;
    let given = local_cpu.reserve(chunks.namespace, hashes, first, |chunk| {
        len_of(chunk).unwrap_or(0)
    });
    stored.refused_chunks = given
        .stopped_at
        .map_or(0, |stopped_at| num_placed - stopped_at);
    let parts = given.chunks.into_iter().map(|(index, mut chunk)| {
        let num_tokens = chunks.tokens_in(index);
        chunk.set_num_tokens(num_tokens);
        stored.chunks += 1;
        stored.tokens += num_tokens;
        let placement = chunks.placement_of(index, form.0.block_tokens());
        let span = ChunkSpan {
            num_tokens,
            skip: 0,
            placement,
        };
        (chunk, span)
    });
    Ok((parts.collect(), stored))
}

/// What of the objects is to be written: those that hold tokens from `skip` on.
pub(crate) fn to_write<'a, C>(
    layout: &PagedLayout,
    chunks: &'a Chunks<'_>,
    objects: Vec<(usize, C)>,
    skip: usize,
) -> impl Iterator<Item = Part<'a, C>> {
    let block_tokens = layout.block_tokens();
    objects.into_iter().filter_map(move |(index, object)| {
        let start = index * chunks.chunk_size;
        let num_tokens = chunks.tokens_in(index);
        let span = ChunkSpan {
            num_tokens,
            skip: skip.saturating_sub(start),
            placement: chunks.placement_of(index, block_tokens),
        };
        (start + num_tokens > skip).then_some((object, span))
    })
}

/// The chunks of a load that are stored, each with its place in the prompt.
pub(crate) struct Found {
    pub(crate) objects: Vec<(usize, MemoryObj)>,
    /// Every token below this one is stored, or was there before.
    pub(crate) end: usize,
}

impl Found {
    pub(crate) fn take(
        local_cpu: &LocalCpu,
        form: Form<'_>,
        lookup_id: &str,
        chunks: &Chunks<'_>,
        skip: usize,
    ) -> Result<Self, TransferError> {
        chunks.validate(form.0)?;
        // The engine has what lies below `skip`, so it need not be stored.
        let first = skip / chunks.chunk_size;
        let objects = local_cpu.take_from(first, lookup_id, chunks.namespace, chunks.hashes);
        let fits = |(index, object): &(usize, MemoryObj)| {
            chunk_bytes(form, chunks.tokens_in(*index)) == Ok(object.len())
        };
        let objects: Vec<_> = (first..).zip(objects).take_while(fits).collect();
        let end = objects.last().map_or(skip, |&(index, _)| {
            skip.max(index * chunks.chunk_size + chunks.tokens_in(index))
        });
        Ok(Self { objects, end })
    }

    /// Takes the chunks that hold tokens from `computed_from` on.
    pub(crate) fn split_off(
        &mut self,
        chunks: &Chunks<'_>,
        computed_from: usize,
    ) -> Vec<(usize, MemoryObj)> {
        let is_apart = |&&(index, _): &&(usize, MemoryObj)| {
            index * chunks.chunk_size + chunks.tokens_in(index) <= computed_from
        };
        let num_apart = self.objects.iter().take_while(is_apart).count();
        self.objects.split_off(num_apart)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::time::Duration;

    use lmcache_core::layout::{PagedLayout, Placement};
    use proptest::prelude::*;

    use super::*;

    pub(crate) const BLOCK: usize = 4;
    pub(crate) const CHUNK: usize = 8;
    pub(crate) const BLOCKS: usize = 12;
    pub(crate) const LAYERS: usize = 7;
    const LAYER_BYTES: usize = BLOCKS * 20;

    /// An engine's cache of opaque blocks, whose memory the tests own.
    pub(crate) struct Engine {
        memory: Box<[u8]>,
        pub(crate) paged: Arc<PagedCache>,
    }

    impl Engine {
        pub(crate) fn new(seed: u8) -> Self {
            let byte = |at: usize| (at * 7) as u8 ^ (at / 251) as u8 ^ seed;
            let mut memory: Box<[u8]> = (0..LAYERS * LAYER_BYTES).map(byte).collect();
            let base = memory.as_mut_ptr() as usize;
            let table: Vec<_> = (0..LAYERS)
                .map(|layer| (base + layer * LAYER_BYTES, LAYER_BYTES))
                .collect();
            let layout = PagedLayout::Opaque {
                block_tokens: BLOCK,
                block_bytes: 20,
                block_stride: 20,
            };
            // SAFETY: the box lives in `Engine` as long as `paged`; the tests look at it only while nothing
            // is copied.
            let paged = unsafe { PagedCache::new(&table, layout, BLOCKS, Box::new(())) };
            Self {
                memory,
                paged: Arc::new(paged.expect("valid")),
            }
        }

        pub(crate) fn layer(&self, layer: usize) -> &[u8] {
            &self.memory[layer * LAYER_BYTES..][..LAYER_BYTES]
        }
    }

    pub(crate) fn pool() -> LocalCpu {
        LocalCpu::new(16 * 4096, Duration::from_secs(60)).expect("a few pages")
    }

    pub(crate) fn hashes(count: u8) -> Vec<ChunkHash> {
        (1..=count).map(|id| ChunkHash([id; 32])).collect()
    }

    pub(crate) fn chunks<'a>(hashes: &'a [ChunkHash], blocks: &'a [u32]) -> Chunks<'a> {
        Chunks {
            namespace: "ns",
            hashes,
            chunk_size: CHUNK,
            num_tokens: hashes.len() * CHUNK,
            placement: Placement::Blocks(blocks),
        }
    }

    pub(crate) fn assert_idle(cpu: &LocalCpu) {
        let audit = cpu.audit();
        assert_eq!((audit.leased_bytes, audit.reserved_bytes), (0, 0));
        assert_eq!(audit.num_leases, 0);
        assert_eq!(
            audit.free_bytes + audit.cached_bytes,
            audit.capacity_bytes,
            "every byte is free or cached"
        );
    }

    const FROM: [u32; 4] = [5, 2, 9, 3];
    const TO: [u32; 4] = [1, 0, 4, 7];

    #[test]
    fn nothing_is_visible_before_the_commit() {
        let (engine, cpu, hashes) = (Engine::new(0), pool(), hashes(2));
        let mut job =
            StoreJob::begin(&cpu, &engine.paged, &chunks(&hashes, &FROM), 0).expect("begins");
        for layer in (0..LAYERS).rev() {
            job.layer(layer);
            assert_eq!(cpu.longest_prefix("ns", &hashes), 0);
        }
        let planned = job.planned();
        assert_eq!(job.commit(), planned);
        assert_eq!((planned.chunks, planned.tokens), (2, 16));
        assert_eq!(cpu.longest_prefix("ns", &hashes), 2);
        assert_idle(&cpu);
    }

    #[test]
    fn a_store_that_misses_a_layer_or_is_dropped_was_never_there() {
        for missing in 0..LAYERS {
            let (engine, cpu, hashes) = (Engine::new(0), pool(), hashes(2));
            let request = chunks(&hashes, &FROM);
            let mut job = StoreJob::begin(&cpu, &engine.paged, &request, 0).expect("begins");
            for layer in (0..LAYERS).filter(|&layer| layer != missing) {
                job.layer(layer);
            }
            match missing % 2 {
                0 => assert_eq!(job.commit(), Stored::default()),
                _ => drop(job),
            }
            assert_eq!(cpu.longest_prefix("ns", &hashes), 0);
            assert_idle(&cpu);
            // The keys are free again.
            let stored = crate::flow::store(&cpu, &engine.paged, &request, 0).expect("stores");
            assert_eq!(stored.chunks, 2);
        }
    }

    #[test]
    fn a_layer_gathered_again_is_gathered_anew() {
        let (mut engine, cpu, hashes) = (Engine::new(0), pool(), hashes(2));
        let mut job =
            StoreJob::begin(&cpu, &engine.paged, &chunks(&hashes, &FROM), 0).expect("begins");
        job.layer(3);
        engine.memory.iter_mut().for_each(|byte| *byte ^= 0x5a);
        for layer in 0..LAYERS {
            job.layer(layer);
        }
        job.commit();
        let reference = pool();
        crate::flow::store(&reference, &engine.paged, &chunks(&hashes, &FROM), 0).expect("stores");
        for (one, two) in cpu
            .take("t", "ns", &hashes)
            .iter()
            .zip(reference.take("t", "ns", &hashes))
        {
            assert_eq!(one.bytes(), two.bytes());
        }
    }

    #[test]
    fn a_load_holds_its_chunks_to_its_end_and_misses_nothing_unsaid() {
        let (engine, cpu, hashes) = (Engine::new(0), pool(), hashes(2));
        crate::flow::store(&cpu, &engine.paged, &chunks(&hashes, &FROM), 0).expect("stores");
        cpu.lookup("r", "ns", &hashes);
        let target = chunks(&hashes, &TO);
        let begin = || LoadJob::begin(&cpu, &engine.paged, "r", &target, BLOCK).expect("begins");
        let job = begin();
        assert_eq!((job.planned().end, job.planned().tokens), (16, 12));
        assert!(cpu.audit().leased_bytes > 0);
        for layer in 1..LAYERS {
            job.layer(layer);
        }
        let missed = job.finish();
        assert_eq!((missed.end, missed.tokens, missed.bytes), (BLOCK, 0, 0));
        assert_idle(&cpu);
        let job = begin();
        for layer in 0..LAYERS {
            job.layer(layer);
        }
        let planned = job.planned();
        assert_eq!(job.finish(), planned);
        drop(begin());
        assert_idle(&cpu);
    }

    #[test]
    fn a_chunk_beside_computed_tokens_is_written_at_once_and_the_others_are_not() {
        for computed_from in [15, 9, 16, 24] {
            let (engine, cpu, hashes) = (Engine::new(0), pool(), hashes(2));
            crate::flow::store(&cpu, &engine.paged, &chunks(&hashes, &FROM), 0).expect("stores");
            let target = Engine::new(0xa5);
            let request = chunks(&hashes, &TO);
            let job = LoadJob::begin_beside(&cpu, &target.paged, "r", &request, 0, computed_from)
                .expect("begins");
            let is_written = |block: usize, layer: usize| {
                let (from, to) = (FROM[block] as usize * 20, TO[block] as usize * 20);
                target.layer(layer)[to..to + 20] == engine.layer(layer)[from..from + 20]
            };
            for layer in 0..LAYERS {
                let written: Vec<_> = (0..4).map(|block| is_written(block, layer)).collect();
                let shared = computed_from < 16;
                assert_eq!(written, [false, false, shared, shared]);
            }
            for layer in 0..LAYERS {
                job.layer(layer);
            }
            let loaded = job.finish();
            assert_eq!((loaded.end, loaded.tokens), (16, 16));
            assert_eq!(loaded.bytes, 4 * 20 * LAYERS);
            assert!((0..4 * LAYERS).all(|at| is_written(at % 4, at / 4)));
            assert_idle(&cpu);
        }
    }

    #[derive(Debug, Clone)]
    enum Act {
        BeginStore(u8),
        BeginLoad(u8),
        Layer(usize, usize),
        End(usize),
        Drop(usize),
        Evict,
    }

    fn acts() -> impl Strategy<Value = Vec<Act>> {
        let act = prop_oneof![
            (1u8..4).prop_map(Act::BeginStore),
            (1u8..4).prop_map(Act::BeginLoad),
            (0usize..4, 0..LAYERS).prop_map(|(job, layer)| Act::Layer(job, layer)),
            (0usize..4).prop_map(Act::End),
            (0usize..4).prop_map(Act::Drop),
            Just(Act::Evict),
        ];
        prop::collection::vec(act, 0..60)
    }

    enum Job {
        Store(StoreJob),
        Load(LoadJob),
    }

    proptest! {
        #[test]
        fn whatever_is_done_to_jobs_no_lease_and_no_half_chunk_is_left(acts in acts()) {
            let (engine, cpu) = (Engine::new(0), LocalCpu::new(3 * 4096, Duration::from_secs(60)));
            let (cpu, all) = (cpu.expect("three pages"), hashes(3));
            let reference = pool();
            let blocks = [0, 1, 2, 3, 4, 5];
            crate::flow::store(&reference, &engine.paged, &chunks(&all, &blocks), 0).expect("stores");
            let right = reference.take("t", "ns", &all);
            let mut jobs = Vec::new();
            for act in acts {
                match act {
                    Act::BeginStore(count) => {
                        let hashes = hashes(count);
                        let request = chunks(&hashes, &blocks);
                        jobs.push(Job::Store(StoreJob::begin(&cpu, &engine.paged, &request, 0)?));
                    }
                    Act::BeginLoad(count) => {
                        let hashes = hashes(count);
                        // Into the blocks that hold the same already, so that stores stay right.
                        let request = chunks(&hashes, &blocks);
                        jobs.push(Job::Load(LoadJob::begin(&cpu, &engine.paged, "r", &request, 0)?));
                    }
                    Act::Layer(at, layer) => match jobs.get_mut(at) {
                        Some(Job::Store(job)) => job.layer(layer),
                        Some(Job::Load(job)) => job.layer(layer),
                        None => {}
                    },
                    Act::End(at) if at < jobs.len() => match jobs.remove(at) {
                        Job::Store(job) => drop(job.commit()),
                        Job::Load(job) => drop(job.finish()),
                    },
                    Act::Drop(at) if at < jobs.len() => drop(jobs.remove(at)),
                    Act::Evict => drop(cpu.clear()),
                    Act::End(_) | Act::Drop(_) => {}
                }
                for (found, right) in cpu.get("ns", &all).iter().zip(&right) {
                    prop_assert_eq!(found.bytes(), right.bytes(), "what is visible is whole");
                }
            }
            drop(jobs);
            assert_idle(&cpu);
            cpu.clear();
            let audit = cpu.audit();
            prop_assert_eq!(audit.free_bytes, audit.capacity_bytes);
        }
    }
}
