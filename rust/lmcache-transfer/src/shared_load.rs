//! A load out of another process's pool, which this one has mapped.
//!
//! Whoever keeps the pool is asked when the copy begins, and told when it is over. A copy counts only if the
//! chunks were held to its end: until then its bytes may be anything, and so may those of the blocks.

use std::sync::Arc;

use lmcache_core::hash::ChunkHash;
use lmcache_core::layout::Placement;
use lmcache_memory::mapped::Keeper;
use lmcache_memory::region::ForeignChunk;

use crate::background::{Outcome, Work};
use crate::copy_job::CopyJob;
use crate::error::TransferError;
use crate::flow::{Chunks, Loaded};
use crate::host::PagedCache;
use crate::layerwise::{chunk_bytes, to_write};

/// Chunks that somebody else keeps, on their way into an engine's cache.
#[derive(Debug)]
pub struct SharedLoad {
    keeper: Arc<dyn Keeper>,
    paged: Arc<PagedCache>,
    lookup_id: Box<str>,
    namespace: Box<str>,
    hashes: Box<[ChunkHash]>,
    blocks: Box<[u32]>,
    chunk_size: usize,
    num_tokens: usize,
    skip: usize,
    bytes: usize,
}

impl SharedLoad {
    /// Plans to write the tokens `skip..` of the chunks, which lie in `blocks`; nobody is asked yet.
    pub fn begin(
        keeper: Arc<dyn Keeper>,
        paged: &Arc<PagedCache>,
        lookup_id: &str,
        chunks: &Chunks<'_>,
        skip: usize,
    ) -> Result<Self, TransferError> {
        let form = (paged.layout(), paged.num_layers());
        chunks.validate(form.0)?;
        let Placement::Blocks(blocks) = chunks.placement else {
            return Err(TransferError::NoBlockTable);
        };
        // In case that all of them are there; of the last one all is counted.
        let first = skip / chunks.chunk_size;
        let bytes =
            (first..chunks.hashes.len()).map(|chunk| chunk_bytes(form, chunks.tokens_in(chunk)));
        let bytes = bytes.sum::<Result<usize, _>>()?;
        Ok(Self {
            keeper,
            paged: Arc::clone(paged),
            lookup_id: lookup_id.into(),
            namespace: chunks.namespace.into(),
            hashes: chunks.hashes.into(),
            blocks: blocks.into(),
            chunk_size: chunks.chunk_size,
            num_tokens: chunks.num_tokens,
            skip,
            bytes,
        })
    }

    fn chunks(&self) -> Chunks<'_> {
        Chunks {
            namespace: &self.namespace,
            hashes: &self.hashes,
            chunk_size: self.chunk_size,
            num_tokens: self.num_tokens,
            placement: Placement::Blocks(&self.blocks),
        }
    }

    fn nothing(&self) -> Loaded {
        Loaded {
            end: self.skip,
            ..Loaded::default()
        }
    }

    fn run(&self, pay: Option<&dyn Fn(usize)>) -> Loaded {
        let chunks = self.chunks();
        let first = self.skip / self.chunk_size;
        let Some(hashes) = self.hashes.get(first..).filter(|hashes| !hashes.is_empty()) else {
            return self.nothing();
        };
        let found = self.keeper.hold(&self.lookup_id, &self.namespace, hashes);
        if found.is_empty() {
            return self.nothing();
        }
        let held = Held {
            keeper: &*self.keeper,
            lookup_id: &self.lookup_id,
            num_chunks: found.len(),
        };
        let form = (self.paged.layout(), self.paged.num_layers());
        let fits = |(index, chunk): &(usize, ForeignChunk)| {
            chunk_bytes(form, chunks.tokens_in(*index)) == Ok(chunk.len())
        };
        let found: Vec<_> = (first..).zip(found).take_while(fits).collect();
        let end = found.last().map_or(self.skip, |&(index, _)| {
            let end = index * self.chunk_size + chunks.tokens_in(index);
            end.max(self.skip)
        });
        let parts = to_write(form.0, &chunks, found, self.skip);
        let Ok(job) = CopyJob::begin(&self.paged, parts) else {
            return self.nothing();
        };
        if let Some(pay) = pay {
            pay(job.bytes());
        }
        job.all_layers();
        if !held.end() {
            return self.nothing();
        }
        Loaded {
            end,
            tokens: end - self.skip,
            bytes: job.bytes(),
        }
    }
}

/// Given back in any case.
struct Held<'a> {
    keeper: &'a dyn Keeper,
    lookup_id: &'a str,
    num_chunks: usize,
}

impl Held<'_> {
    /// Whether it was held until now.
    fn end(mut self) -> bool {
        let num_chunks = std::mem::take(&mut self.num_chunks);
        self.keeper.let_go(self.lookup_id, num_chunks)
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        if self.num_chunks > 0 {
            self.keeper.let_go(self.lookup_id, self.num_chunks);
        }
    }
}

impl Work for SharedLoad {
    fn bytes(&self) -> usize {
        self.bytes
    }

    fn is_awaited(&self) -> bool {
        true
    }

    fn carry_out(self: Box<Self>, pay: Option<&dyn Fn(usize)>) -> Outcome {
        Outcome::Loaded(self.run(pay))
    }

    fn call_off(self: Box<Self>) -> Outcome {
        Outcome::Loaded(self.nothing())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::Duration;

    use lmcache_core::hot_cache::Policy;
    use lmcache_memory::local_cpu::LocalCpu;
    use lmcache_memory::object::MemoryObj;
    use lmcache_memory::region::ForeignRegion;
    use std::os::fd::AsFd;

    use super::*;
    use crate::background::Queue;
    use crate::flow;
    use crate::layerwise::tests::{BLOCK, CHUNK, Engine, LAYERS, assert_idle, chunks, hashes};

    /// Another process's store, in this one.
    #[derive(Debug)]
    struct Double {
        cpu: LocalCpu,
        region: Arc<ForeignRegion>,
        held: Mutex<Vec<MemoryObj>>,
        /// As when the connection breaks under a copy.
        loses: AtomicBool,
    }

    impl Keeper for Double {
        fn hold(
            &self,
            lookup_id: &str,
            namespace: &str,
            hashes: &[ChunkHash],
        ) -> Vec<ForeignChunk> {
            let found = self.cpu.take_part(hashes, lookup_id, namespace);
            let chunk = |object: &MemoryObj| self.region.chunk(object.place()).expect("within");
            let chunks = found.iter().map(chunk).collect();
            self.held.lock().expect("no panic inside").extend(found);
            chunks
        }

        fn let_go(&self, _: &str, num_chunks: usize) -> bool {
            let mut held = self.held.lock().expect("no panic inside");
            let is_whole = held.len() == num_chunks;
            held.clear();
            is_whole && !self.loses.load(Ordering::Relaxed)
        }
    }

    fn keeper() -> Arc<Double> {
        let lease = Duration::from_secs(60);
        let cpu = LocalCpu::shared(16 * 4096, lease, Policy::default(), 1).expect("a few pages");
        let descriptor = cpu.descriptor().expect("it is shared");
        let region = ForeignRegion::map(descriptor.as_fd()).expect("a pool");
        Arc::new(Double {
            cpu,
            region: Arc::new(region),
            held: Mutex::default(),
            loses: AtomicBool::new(false),
        })
    }

    const FROM: [u32; 6] = [5, 2, 9, 3, 11, 6];
    const TO: [u32; 6] = [1, 0, 4, 7, 10, 8];

    /// Loads by way of a queue, as the engine does.
    fn load(
        keeper: &Arc<Double>,
        engine: &Engine,
        hashes: &[ChunkHash],
        blocks: &[u32],
        skip: usize,
    ) -> Loaded {
        let shared: Arc<dyn Keeper> = Arc::<Double>::clone(keeper);
        let request = chunks(hashes, blocks);
        let load = SharedLoad::begin(shared, &engine.paged, "r", &request, skip).expect("begins");
        let queue = Queue::new(None);
        let transfer = queue.begin(load);
        assert!(transfer.wait(None));
        match transfer.outcome() {
            Some(Ok(Outcome::Loaded(loaded))) => loaded,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn what_another_process_stored_is_loaded_and_given_back() {
        let (keeper, hashes) = (keeper(), hashes(3));
        let (owner, reader) = (Engine::new(0), Engine::new(0x5a));
        let request = chunks(&hashes, &FROM);
        flow::store(&keeper.cpu, &owner.paged, &request, 0).expect("stores");
        keeper.cpu.lookup("r", "ns", &hashes);
        // The owner loads its own share, as on every rank.
        flow::load(&keeper.cpu, &owner.paged, "r", &request, 0).expect("loads");
        let skip = CHUNK + BLOCK;
        let loaded = load(&keeper, &reader, &hashes, &TO, skip);
        assert_eq!((loaded.end, loaded.tokens), (3 * CHUNK, 3 * CHUNK - skip));
        assert_eq!(loaded.bytes, 3 * 20 * LAYERS);
        let untouched = Engine::new(0x5a);
        for layer in 0..LAYERS {
            for (at, (&from, &to)) in FROM.iter().zip(&TO).enumerate() {
                let block = |engine: &Engine, id: u32| {
                    engine.layer(layer)[id as usize * 20..][..20].to_vec()
                };
                let wanted = match at * BLOCK < skip {
                    true => block(&untouched, to),
                    false => block(&owner, from),
                };
                assert_eq!(block(&reader, to), wanted, "layer {layer}, block {at}");
            }
        }
        assert_idle(&keeper.cpu);
    }

    #[test]
    fn a_chunk_that_is_not_there_ends_the_load() {
        let (keeper, hashes) = (keeper(), hashes(3));
        let (owner, reader) = (Engine::new(0), Engine::new(1));
        flow::store(&keeper.cpu, &owner.paged, &chunks(&hashes, &FROM), 0).expect("stores");
        keeper.cpu.remove("ns", hashes[1]);
        let loaded = load(&keeper, &reader, &hashes, &TO, 0);
        assert_eq!((loaded.end, loaded.tokens), (CHUNK, CHUNK));
        keeper.cpu.clear();
        assert_eq!(load(&keeper, &reader, &hashes, &TO, BLOCK).end, BLOCK);
        assert_eq!(load(&keeper, &reader, &hashes, &TO, 99).end, 99);
        assert_idle(&keeper.cpu);
    }

    #[test]
    fn what_was_not_held_to_the_end_was_not_loaded() {
        let (keeper, hashes) = (keeper(), hashes(2));
        let (owner, reader) = (Engine::new(0), Engine::new(1));
        flow::store(&keeper.cpu, &owner.paged, &chunks(&hashes, &FROM[..4]), 0).expect("stores");
        keeper.loses.store(true, Ordering::Relaxed);
        let loaded = load(&keeper, &reader, &hashes, &TO[..4], 0);
        assert_eq!(loaded, Loaded::default());
        assert_idle(&keeper.cpu);
    }

    #[test]
    fn a_block_outside_the_cache_is_no_load_and_everything_is_given_back() {
        let (keeper, hashes) = (keeper(), hashes(2));
        let (owner, reader) = (Engine::new(0), Engine::new(1));
        flow::store(&keeper.cpu, &owner.paged, &chunks(&hashes, &FROM[..4]), 0).expect("stores");
        let loaded = load(&keeper, &reader, &hashes, &[0, 1, 2, 999], 0);
        assert_eq!(loaded, Loaded::default());
        assert_idle(&keeper.cpu);
    }

    #[test]
    fn memory_of_another_size_ends_the_load() {
        let (keeper, hashes) = (keeper(), hashes(2));
        let reader = Engine::new(1);
        let chunk = keeper.cpu.allocate(&[77]).expect("room").remove(0);
        keeper.cpu.put("ns", hashes[0], chunk).expect("its own");
        assert_eq!(
            load(&keeper, &reader, &hashes, &TO[..4], 0),
            Loaded::default()
        );
        assert_idle(&keeper.cpu);
    }

    #[test]
    fn slots_are_refused() {
        let (keeper, hashes) = (keeper(), hashes(1));
        let request = Chunks {
            placement: Placement::Slots(&[0; CHUNK]),
            ..chunks(&hashes, &[])
        };
        let refused = SharedLoad::begin(keeper, &Engine::new(0).paged, "r", &request, 0);
        assert_eq!(refused.err(), Some(TransferError::NoBlockTable));
    }
}
