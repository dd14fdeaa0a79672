//! A request's chunks on their walk into the store and out of it, all layers in one call.
//!
//! [`crate::layerwise`] has the same walk a layer at a time.

use std::sync::Arc;

use lmcache_core::error::CoreError;
use lmcache_core::hash::ChunkHash;
use lmcache_core::layout::{PagedLayout, Placement};
use lmcache_memory::local_cpu::LocalCpu;

use crate::copy_job::{ChunkSpan, CopyJob};
use crate::error::TransferError;
use crate::host::PagedCache;
use crate::layerwise::{LoadJob, StoreJob};

/// A prompt's chunks and where its tokens lie.
#[derive(Debug, Clone, Copy)]
pub struct Chunks<'a> {
    /// Everything but the tokens that decides the bytes.
    pub namespace: &'a str,
    /// The chain from the first chunk on; the last chunk may be short.
    pub hashes: &'a [ChunkHash],
    /// Tokens in a full chunk.
    pub chunk_size: usize,
    /// Tokens that the hashes cover.
    pub num_tokens: usize,
    /// Where the tokens lie, from token 0 on.
    pub placement: Placement<'a>,
}

/// What [`store`] did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Stored {
    /// Chunks newly stored.
    pub chunks: usize,
    /// Their tokens.
    pub tokens: usize,
    /// Their bytes.
    pub bytes: usize,
    /// Chunks that got no place because memory ended.
    pub refused_chunks: usize,
}

/// What [`load`] did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Loaded {
    /// Every token below this one is in the engine's cache now.
    pub end: usize,
    /// Tokens written.
    pub tokens: usize,
    /// Bytes written.
    pub bytes: usize,
}

impl Chunks<'_> {
    pub(crate) fn validate(&self, layout: &PagedLayout) -> Result<(), TransferError> {
        if self.chunk_size == 0 {
            return Err(TransferError::Plan(CoreError::ZeroChunkSize));
        }
        let block_tokens = layout.block_tokens();
        let blocks_start_chunks = self.chunk_size.is_multiple_of(block_tokens);
        if matches!(self.placement, Placement::Blocks(_)) && !blocks_start_chunks {
            return Err(TransferError::Plan(CoreError::PartialBlock {
                block_tokens,
                what: "the chunk size, where a block table says where chunks lie,",
                found: self.chunk_size,
            }));
        }
        let chunks = self.num_tokens.div_ceil(self.chunk_size.max(1));
        if chunks != self.hashes.len() {
            return Err(TransferError::HashCount {
                hashes: self.hashes.len(),
                chunks,
            });
        }
        Ok(())
    }

    pub(crate) fn tokens_in(&self, chunk: usize) -> usize {
        self.chunk_size
            .min(self.num_tokens - chunk * self.chunk_size)
    }

    pub(crate) fn placement_of(&self, chunk: usize, block_tokens: usize) -> Placement<'_> {
        let start = chunk * self.chunk_size;
        match self.placement {
            // `validate` saw to it that a block begins here.
            Placement::Blocks(blocks) => {
                Placement::Blocks(blocks.get(start / block_tokens..).unwrap_or(&[]))
            }
            Placement::Slots(slots) => {
                let end = (start + self.tokens_in(chunk)).min(slots.len());
                Placement::Slots(slots.get(start..end).unwrap_or(&[]))
            }
        }
    }

    /// Chunks all of whose tokens have a place: one without would be stored with bytes nobody wrote.
    pub(crate) fn num_placed(&self) -> usize {
        match self.placement {
            Placement::Blocks(_) => self.hashes.len(),
            Placement::Slots(slots) => {
                let hole = slots.iter().position(|&slot| slot == -1);
                hole.map_or(self.hashes.len(), |token| {
                    (token / self.chunk_size).min(self.hashes.len())
                })
            }
        }
    }
}

/// Stores those chunks that are not stored yet; they are visible once this returns. See [`StoreJob`].
pub fn store(
    local_cpu: &LocalCpu,
    paged: &Arc<PagedCache>,
    chunks: &Chunks<'_>,
    first: usize,
) -> Result<Stored, TransferError> {
    let mut job = StoreJob::begin(local_cpu, paged, chunks, first)?;
    job.all_layers();
    Ok(job.commit())
}

/// Writes the tokens `skip..` of the chunks into the engine's cache, from what `lookup_id` leases. See
/// [`LoadJob`].
pub fn load(
    local_cpu: &LocalCpu,
    paged: &Arc<PagedCache>,
    lookup_id: &str,
    chunks: &Chunks<'_>,
    skip: usize,
) -> Result<Loaded, TransferError> {
    let job = LoadJob::begin(local_cpu, paged, lookup_id, chunks, skip)?;
    job.all_layers();
    Ok(job.finish())
}

/// Copies chunks out of the engine's cache into memory of the caller's, all layers: bytes moved.
///
/// All plans are made before the first byte moves. Rows of tokens without a slot (-1) are left as they are.
pub fn gather<'a>(
    paged: &Arc<PagedCache>,
    parts: impl IntoIterator<Item = (&'a mut [u8], ChunkSpan<'a>)>,
) -> Result<usize, TransferError> {
    let mut sized = Vec::new();
    for (target, span) in parts {
        require_size(paged, &span, target.len())?;
        sized.push((target, span));
    }
    let mut job = CopyJob::begin(paged, sized)?;
    job.all_layers();
    Ok(job.bytes())
}

/// Copies chunks of the caller's into the engine's cache, all layers: bytes moved.
///
/// All plans are made before the first byte moves. Tokens without a slot (-1) are skipped.
pub fn scatter<'a>(
    paged: &Arc<PagedCache>,
    parts: impl IntoIterator<Item = (&'a [u8], ChunkSpan<'a>)>,
) -> Result<usize, TransferError> {
    let mut sized = Vec::new();
    for (source, span) in parts {
        require_size(paged, &span, source.len())?;
        sized.push((source, span));
    }
    let job = CopyJob::begin(paged, sized)?;
    job.all_layers();
    Ok(job.bytes())
}

fn require_size(
    paged: &PagedCache,
    span: &ChunkSpan<'_>,
    found: usize,
) -> Result<(), TransferError> {
    let num_tokens = span.num_tokens;
    let expected = paged.chunk_bytes(num_tokens)?;
    if found == expected {
        return Ok(());
    }
    Err(TransferError::ObjectSize {
        num_tokens,
        expected,
        found,
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const BLOCK: usize = 4;
    const CHUNK: usize = 8;
    const BLOCKS: usize = 10;

    struct Engine {
        layers: Vec<Box<[u8]>>,
        paged: Arc<PagedCache>,
    }

    fn engine(layout: PagedLayout, layer_len: usize) -> Engine {
        let mut layers: Vec<Box<[u8]>> = (0..3)
            .map(|layer| {
                (0..layer_len)
                    .map(|at| (at * 7 + layer * 31) as u8)
                    .collect()
            })
            .collect();
        let table: Vec<_> = layers
            .iter_mut()
            .map(|layer| (layer.as_mut_ptr() as usize, layer.len()))
            .collect();
        // SAFETY: the boxes live in `Engine` as long as `paged`, and only the tests touch them.
        let paged =
            unsafe { PagedCache::new(&table, layout, BLOCKS, Box::new(())) }.expect("valid");
        Engine {
            layers,
            paged: Arc::new(paged),
        }
    }

    fn opaque() -> Engine {
        engine(
            PagedLayout::Opaque {
                block_tokens: BLOCK,
                block_bytes: 20,
                block_stride: 20,
            },
            200,
        )
    }

    fn tokens() -> Engine {
        let layout = PagedLayout::Tokens {
            block_tokens: BLOCK,
            block_stride: 24,
            token_stride: 6,
            planes: 2,
            plane_stride: 240,
            heads: 2,
            head_stride: 3,
            run_bytes: 3,
        };
        engine(layout, 480)
    }

    fn hashes(count: u8) -> Vec<ChunkHash> {
        (1..=count).map(|id| ChunkHash([id; 32])).collect()
    }

    fn chunks<'a>(
        hashes: &'a [ChunkHash],
        num_tokens: usize,
        placement: Placement<'a>,
    ) -> Chunks<'a> {
        Chunks {
            namespace: "ns",
            hashes,
            chunk_size: CHUNK,
            num_tokens,
            placement,
        }
    }

    fn pool() -> LocalCpu {
        LocalCpu::new(16 * 4096, Duration::from_secs(60)).expect("a few pages")
    }

    fn slots(blocks: &[u32]) -> Vec<i64> {
        let of_block =
            |block: u32| (0..BLOCK as i64).map(move |at| i64::from(block) * BLOCK as i64 + at);
        blocks.iter().copied().flat_map(of_block).collect()
    }

    #[test]
    fn what_is_stored_from_some_blocks_is_loaded_into_others() {
        for mut engine in [opaque(), tokens()] {
            let (from, to) = ([5, 2, 9, 3], [1, 0, 4, 7]);
            let cpu = pool();
            let hashes = hashes(2);
            let stored = store(
                &cpu,
                &engine.paged,
                &chunks(&hashes, 16, Placement::Blocks(&from)),
                0,
            );
            assert_eq!(
                stored.map(|stored| (stored.chunks, stored.tokens)),
                Ok((2, 16))
            );
            let before = engine.layers.clone();
            let noise = |layer: &mut Box<[u8]>| layer.iter_mut().for_each(|byte| *byte ^= 0xa5);
            engine.layers.iter_mut().for_each(noise);
            let target = chunks(&hashes, 16, Placement::Blocks(&to));
            let loaded = load(&cpu, &engine.paged, "r", &target, BLOCK).expect("loads");
            assert_eq!((loaded.end, loaded.tokens), (16, 12));
            // Storing again from the target, under another name, gives the bytes that were there before.
            let again = pool();
            let other = chunks(&hashes[..1], 8, Placement::Blocks(&to[2..]));
            store(&again, &engine.paged, &other, 0).expect("stores");
            let reference = pool();
            let mut fresh = before;
            std::mem::swap(&mut fresh, &mut engine.layers);
            let bytes_of = |cpu: &LocalCpu| cpu.take("t", "ns", &hashes[..1])[0].bytes().to_vec();
            let table: Vec<_> = engine
                .layers
                .iter_mut()
                .map(|layer| (layer.as_mut_ptr() as usize, layer.len()))
                .collect();
            // SAFETY: the boxes outlive the call.
            let original =
                unsafe { PagedCache::new(&table, *engine.paged.layout(), BLOCKS, Box::new(())) }
                    .expect("valid");
            let source = chunks(&hashes[..1], 8, Placement::Blocks(&from[2..]));
            store(&reference, &Arc::new(original), &source, 0).expect("stores");
            assert_eq!(bytes_of(&again), bytes_of(&reference));
        }
    }

    #[test]
    fn a_second_store_moves_nothing() {
        let engine = opaque();
        let (cpu, hashes) = (pool(), hashes(2));
        let request = chunks(&hashes, 16, Placement::Blocks(&[0, 1, 2, 3]));
        assert_eq!(
            store(&cpu, &engine.paged, &request, 0).map(|stored| stored.bytes),
            Ok(16 / BLOCK * 20 * 3)
        );
        assert_eq!(
            store(&cpu, &engine.paged, &request, 0),
            Ok(Stored::default())
        );
    }

    #[test]
    fn chunks_before_the_first_are_not_stored() {
        let engine = opaque();
        let (cpu, hashes) = (pool(), hashes(3));
        let request = chunks(&hashes, 24, Placement::Blocks(&[0, 1, 2, 3, 4, 5]));
        assert_eq!(
            store(&cpu, &engine.paged, &request, 1).map(|stored| stored.chunks),
            Ok(2)
        );
        assert_eq!(cpu.longest_prefix("ns", &hashes), 0);
        assert_eq!(cpu.longest_prefix("ns", &hashes[1..]), 2);
    }

    #[test]
    fn a_gap_ends_the_load() {
        let engine = opaque();
        let (cpu, hashes) = (pool(), hashes(3));
        let request = chunks(&hashes, 24, Placement::Blocks(&[0, 1, 2, 3, 4, 5]));
        store(&cpu, &engine.paged, &request, 0).expect("stores");
        cpu.remove("ns", hashes[1]);
        let loaded = load(&cpu, &engine.paged, "r", &request, 0).expect("loads");
        assert_eq!((loaded.end, loaded.tokens), (8, 8));
    }

    #[test]
    fn what_the_engine_has_need_not_be_stored() {
        let engine = opaque();
        let (cpu, hashes) = (pool(), hashes(3));
        let request = chunks(&hashes, 24, Placement::Blocks(&[0, 1, 2, 3, 4, 5]));
        store(&cpu, &engine.paged, &request, 1).expect("stores");
        let loaded = |skip| load(&cpu, &engine.paged, "r", &request, skip).expect("loads");
        assert_eq!((loaded(0).end, loaded(0).tokens), (0, 0));
        assert_eq!((loaded(CHUNK).end, loaded(CHUNK).tokens), (24, 16));
        let inside = CHUNK + BLOCK;
        assert_eq!((loaded(inside).end, loaded(inside).tokens), (24, 12));
        assert_eq!((loaded(24).end, loaded(24).tokens), (24, 0));
        assert_eq!((loaded(99).end, loaded(99).tokens), (99, 0));
    }

    #[test]
    fn tails_are_stored_where_tokens_have_addresses_and_refused_elsewhere() {
        let (cpu, hashes) = (pool(), hashes(2));
        let slots = slots(&[1, 2, 3, 4]);
        let tail = chunks(&hashes, 11, Placement::Slots(&slots[..11]));
        assert_eq!(
            store(&cpu, &tokens().paged, &tail, 0).map(|stored| stored.tokens),
            Ok(11)
        );
        let refused = store(&pool(), &opaque().paged, &tail, 0);
        assert!(
            matches!(refused, Err(TransferError::Plan(_))),
            "{refused:?}"
        );
    }

    #[test]
    fn a_chunk_with_a_token_that_was_never_written_is_not_stored() {
        let (cpu, hashes) = (pool(), hashes(2));
        let mut slots = slots(&[1, 2, 3, 4]);
        slots[9] = -1;
        let request = chunks(&hashes, 16, Placement::Slots(&slots));
        assert_eq!(
            store(&cpu, &tokens().paged, &request, 0).map(|stored| stored.chunks),
            Ok(1)
        );
    }

    #[test]
    fn a_block_outside_the_cache_moves_and_leaves_nothing() {
        let engine = opaque();
        let (cpu, hashes) = (pool(), hashes(2));
        let request = chunks(&hashes, 16, Placement::Blocks(&[0, 1, 2, BLOCKS as u32]));
        assert!(store(&cpu, &engine.paged, &request, 0).is_err());
        let audit = cpu.audit();
        assert_eq!(
            (audit.num_chunks, audit.free_bytes),
            (0, audit.capacity_bytes)
        );
    }

    #[test]
    fn an_object_of_another_size_is_a_miss() {
        let (cpu, hashes) = (pool(), hashes(1));
        let request = chunks(&hashes, 8, Placement::Blocks(&[0, 1]));
        store(&cpu, &opaque().paged, &request, 0).expect("stores");
        let loaded = load(&cpu, &tokens().paged, "r", &request, 0).expect("no error");
        assert_eq!(loaded, Loaded::default());
    }

    #[test]
    fn a_block_table_refuses_chunks_that_begin_inside_a_block() {
        for engine in [opaque(), tokens()] {
            let (cpu, hashes) = (pool(), hashes(2));
            let request = Chunks {
                chunk_size: BLOCK + 2,
                num_tokens: 2 * (BLOCK + 2),
                ..chunks(&hashes, 0, Placement::Blocks(&[0, 1, 2]))
            };
            let stored = store(&cpu, &engine.paged, &request, 0);
            let loaded = load(&cpu, &engine.paged, "r", &request, 0).map(|_| Stored::default());
            for refused in [stored, loaded] {
                let error = refused.expect_err("a chunk begins inside a block");
                assert!(error.to_string().contains("chunk size"), "{error}");
            }
        }
    }

    #[test]
    fn memory_of_the_caller_is_filled_and_read_and_its_size_is_checked() {
        for engine in [opaque(), tokens()] {
            let (from, to) = (slots(&[5, 2]), slots(&[1, 7]));
            let span = |slots| ChunkSpan {
                num_tokens: 2 * BLOCK,
                skip: 0,
                placement: Placement::Slots(slots),
            };
            let layout = engine.paged.layout();
            let len =
                layout.layer_bytes(2 * BLOCK).expect("whole blocks") * engine.paged.num_layers();
            let (mut one, mut two) = (vec![0xee; len], vec![0xdd; len]);
            assert_eq!(
                gather(&engine.paged, [(&mut one[..], span(&from))]),
                Ok(len)
            );
            assert_eq!(scatter(&engine.paged, [(&one[..], span(&to))]), Ok(len));
            assert_eq!(gather(&engine.paged, [(&mut two[..], span(&to))]), Ok(len));
            assert_eq!(one, two);
            let short = gather(&engine.paged, [(&mut one[1..], span(&from))]);
            assert!(
                matches!(short, Err(TransferError::ObjectSize { .. })),
                "{short:?}"
            );
        }
    }
}
