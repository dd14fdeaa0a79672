//! Copies between an engine's paged cache and the store, against memcpy and non-temporal stores.

use std::hint::black_box;
use std::ptr;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use lmcache_core::hash::ChunkHash;
use lmcache_core::layout::{PagedLayout, Placement};
use lmcache_memory::local_cpu::LocalCpu;
use lmcache_memory::object::{ChunkMut, MemoryObj};
use lmcache_transfer::copy_job::{ChunkSpan, CopyJob};
use lmcache_transfer::host::PagedCache;

use crate::sample::{Case, Numbers, timed};

const PLANES: usize = 2;
const HEADS: usize = 8;
const BLOCK_TOKENS: usize = 16;
const CHUNK_TOKENS: usize = 256;
const RUN_LAYERS: usize = 8;
const MIB: usize = 1 << 20;
const PAGE: usize = 4096;

/// One piece of a plain copy: from, to, bytes.
#[derive(Clone, Copy)]
struct Piece {
    from: usize,
    to: usize,
    len: usize,
}

/// An engine's cache with a store beside it, and the chunks that go to and fro.
struct Scene {
    _memory: Vec<Vec<u8>>,
    bases: Vec<usize>,
    /// The engine's memory, registered for copies by one thread, and for as many as the executor takes.
    paged: [Arc<PagedCache>; 2],
    cpu: LocalCpu,
    chunk_tokens: usize,
    /// Block table of each chunk.
    tables: Vec<Vec<u32>>,
    chunk_bytes: usize,
}

impl Scene {
    /// Twice as many blocks as are copied, and those that are copied in random order.
    fn new(
        layout: PagedLayout,
        layer_bytes_of: impl Fn(usize) -> usize,
        num_layers: usize,
        chunk_tokens: usize,
        num_chunks: usize,
    ) -> Self {
        let blocks_per_chunk = chunk_tokens / layout.block_tokens();
        let num_blocks = 2 * blocks_per_chunk * num_chunks;
        let layout = with_planes_apart(layout, num_blocks);
        let layer_bytes = layer_bytes_of(num_blocks);
        let mut memory: Vec<Vec<u8>> = (0..num_layers)
            .map(|layer| vec![layer as u8 + 1; layer_bytes + PAGE])
            .collect();
        let bases: Vec<usize> = memory
            .iter_mut()
            .map(|layer| (layer.as_mut_ptr() as usize).next_multiple_of(PAGE))
            .collect();
        let table: Vec<(usize, usize)> = bases.iter().map(|&base| (base, layer_bytes)).collect();
        let register = || {
            // SAFETY: the scene owns the memory and hands it out by address alone; one copy runs at a time.
            let paged = unsafe { PagedCache::new(&table, layout, num_blocks, Box::new(())) };
            paged.expect("blocks lie inside their layer")
        };
        let chunk_bytes = layout.layer_bytes(chunk_tokens).expect("whole blocks") * num_layers;
        let capacity = num_chunks * (chunk_bytes.next_multiple_of(PAGE) + PAGE);
        let cpu = LocalCpu::new(capacity as u64, Duration::from_secs(3600));
        let order = Numbers(17).shuffled(num_blocks);
        Self {
            _memory: memory,
            paged: [
                Arc::new(register().with_max_threads(1)),
                Arc::new(register()),
            ],
            bases,
            cpu: cpu.expect("a pool of some hundred MiB"),
            chunk_tokens,
            tables: order
                .chunks_exact(blocks_per_chunk)
                .take(num_chunks)
                .map(<[u32]>::to_vec)
                .collect(),
            chunk_bytes,
        }
    }

    fn spans(&self) -> impl Iterator<Item = ChunkSpan<'_>> {
        self.tables.iter().map(|table| ChunkSpan {
            num_tokens: self.chunk_tokens,
            skip: 0,
            placement: Placement::Blocks(table),
        })
    }

    fn bytes(&self) -> usize {
        self.chunk_bytes * self.tables.len()
    }

    fn allocate(&self) -> Vec<ChunkMut> {
        self.cpu
            .allocate(&vec![self.chunk_bytes; self.tables.len()])
            .expect("the pool holds all chunks")
    }

    fn gather(&self, by: usize, chunks: Vec<ChunkMut>) -> Vec<ChunkMut> {
        let mut job = CopyJob::begin(&self.paged[by], chunks.into_iter().zip(self.spans()))
            .expect("in range");
        job.all_layers();
        job.finish()
    }

    fn scatter(&self, by: usize, objects: &[MemoryObj]) {
        let parts = objects.iter().cloned().zip(self.spans());
        let mut job = CopyJob::begin(&self.paged[by], parts).expect("in range");
        job.all_layers();
    }

    fn publish(&self, chunks: Vec<ChunkMut>) -> Vec<MemoryObj> {
        let hashes: Vec<ChunkHash> = (0..chunks.len())
            .map(|at| {
                let mut hash = [0; 32];
                hash[..8].copy_from_slice(&(at as u64).to_le_bytes());
                ChunkHash(hash)
            })
            .collect();
        for (hash, chunk) in hashes.iter().zip(chunks) {
            let stored = self.cpu.put("ns", *hash, chunk);
            assert!(stored.expect("the pool's own memory"), "a new key");
        }
        self.cpu.get("ns", &hashes)
    }
}

/// K and V planes one behind the other, as far apart as all blocks of one need.
fn with_planes_apart(layout: PagedLayout, num_blocks: usize) -> PagedLayout {
    match layout {
        PagedLayout::Tokens {
            block_tokens,
            block_stride,
            token_stride,
            planes,
            heads,
            head_stride,
            run_bytes,
            ..
        } => PagedLayout::Tokens {
            block_tokens,
            block_stride,
            token_stride,
            planes,
            plane_stride: num_blocks * block_stride,
            heads,
            head_stride,
            run_bytes,
        },
        opaque => opaque,
    }
}

pub(crate) fn blocks(quick: bool) {
    let (pairs, total) = if quick { (5, 64) } else { (15, 192) };
    for block_kib in [8, 32, 128, 512, 2048] {
        let block_bytes = block_kib << 10;
        let blocks_per_chunk = (2 * MIB / block_bytes).max(1);
        let layout = PagedLayout::Opaque {
            block_tokens: 1,
            block_bytes,
            block_stride: block_bytes,
        };
        let num_chunks = total * MIB / (blocks_per_chunk * block_bytes);
        let scene = Scene::new(
            layout,
            |num_blocks| num_blocks * block_bytes,
            1,
            blocks_per_chunk,
            num_chunks,
        );
        // The same blocks, to the same places.
        let pieces = |stored: &[usize]| -> Vec<Piece> {
            let mut pieces = Vec::new();
            for (table, &chunk) in scene.tables.iter().zip(stored) {
                for (index, &block) in table.iter().enumerate() {
                    pieces.push(Piece {
                        from: scene.bases[0] + block as usize * block_bytes,
                        to: chunk + index * block_bytes,
                        len: block_bytes,
                    });
                }
            }
            pieces
        };
        measure(&scene, &format!("block={block_bytes}"), pairs, pieces);
    }
}

pub(crate) fn runs(quick: bool) {
    let (pairs, total) = if quick { (5, 64) } else { (15, 128) };
    for run_bytes in [128, 256, 512, 1024, 4096] {
        // [planes, blocks, heads, tokens, head]: no two runs of a token are neighbours.
        let layout = PagedLayout::Tokens {
            block_tokens: BLOCK_TOKENS,
            block_stride: HEADS * BLOCK_TOKENS * run_bytes,
            token_stride: run_bytes,
            planes: PLANES,
            plane_stride: 0,
            heads: HEADS,
            head_stride: BLOCK_TOKENS * run_bytes,
            run_bytes,
        };
        let chunk_bytes = RUN_LAYERS * CHUNK_TOKENS * PLANES * HEADS * run_bytes;
        let num_chunks = (total * MIB / chunk_bytes).max(1);
        let scene = Scene::new(
            layout,
            |num_blocks| PLANES * num_blocks * HEADS * BLOCK_TOKENS * run_bytes,
            RUN_LAYERS,
            CHUNK_TOKENS,
            num_chunks,
        );
        // As many bytes, between the same pieces of memory, a layer of a chunk at a time.
        let layer_bytes = scene.chunk_bytes / RUN_LAYERS;
        let pieces = |stored: &[usize]| -> Vec<Piece> {
            let mut pieces = Vec::new();
            for (at, &chunk) in stored.iter().enumerate() {
                for (layer, base) in scene.bases.iter().enumerate() {
                    pieces.push(Piece {
                        from: base + at * layer_bytes,
                        to: chunk + layer * layer_bytes,
                        len: layer_bytes,
                    });
                }
            }
            pieces
        };
        measure(&scene, &format!("run={run_bytes}"), pairs, pieces);
    }
}

fn measure(scene: &Scene, name: &str, pairs: usize, pieces_of: impl Fn(&[usize]) -> Vec<Piece>) {
    let mut chunks = scene.allocate();
    let stored: Vec<usize> = chunks
        .iter_mut()
        .map(|chunk| chunk.bytes_mut().as_mut_ptr() as usize)
        .collect();
    let inwards = pieces_of(&stored);
    let outwards: Vec<Piece> = inwards
        .iter()
        .map(|piece| Piece {
            from: piece.to,
            to: piece.from,
            len: piece.len,
        })
        .collect();
    chunks = scene.gather(0, chunks);
    let mut case = Series::default();
    for pair in 0..pairs {
        case.pair(&inwards, pair, |by| {
            let (time, back) = timed(|| scene.gather(by, std::mem::take(&mut chunks)));
            chunks = back;
            time
        });
    }
    case.print(&format!("gather/{name}"), scene.bytes());
    let objects = scene.publish(chunks);
    let mut case = Series::default();
    scene.scatter(0, &objects);
    for pair in 0..pairs {
        case.pair(&outwards, pair, |by| {
            timed(|| scene.scatter(by, &objects)).0
        });
    }
    case.print(&format!("scatter/{name}"), scene.bytes());
}

/// The arms of a case: ours, memcpy and non-temporal stores, each by one thread and by several.
const ARMS: [&str; 6] = [
    "ours",
    "memcpy",
    "streamed",
    "ours_shared",
    "memcpy_shared",
    "streamed_shared",
];

#[derive(Default)]
struct Series([Vec<u64>; ARMS.len()]);

impl Series {
    /// Every arm once; each pair begins with another one, and every second one goes backwards.
    fn pair(&mut self, pieces: &[Piece], pair: usize, mut ours: impl FnMut(usize) -> u64) {
        for step in 0..ARMS.len() {
            let arm = (pair + step) % ARMS.len();
            let arm = if pair % 2 == 1 {
                ARMS.len() - 1 - arm
            } else {
                arm
            };
            let threads = if arm < 3 { 1 } else { shared_threads() };
            let time = match arm % 3 {
                0 => ours(arm / 3),
                1 => timed(|| copy(pieces, threads, memcpy)).0,
                _ => timed(|| copy(pieces, threads, streamed)).0,
            };
            self.0[arm].push(time);
        }
    }

    fn print(&self, name: &str, bytes: usize) {
        let mut case = Case::new(name);
        for (arm, times) in ARMS.iter().zip(&self.0) {
            case.samples(arm, times);
        }
        case.fact("bytes", bytes as f64)
            .fact("threads", shared_threads() as f64)
            .print();
    }
}

/// Threads that the executor takes for copies as large as these.
fn shared_threads() -> usize {
    thread::available_parallelism()
        .map_or(1, usize::from)
        .min(4)
}

fn copy(pieces: &[Piece], threads: usize, one: fn(Piece)) {
    let pieces = black_box(pieces);
    if threads == 1 {
        return pieces.iter().for_each(|&piece| one(piece));
    }
    thread::scope(|scope| {
        for part in pieces.chunks(pieces.len().div_ceil(threads)) {
            scope.spawn(move || part.iter().for_each(|&piece| one(piece)));
        }
    });
}

fn memcpy(piece: Piece) {
    // SAFETY: both ends lie in memory of the scene, which nobody else touches, and do not overlap.
    unsafe {
        ptr::copy_nonoverlapping(piece.from as *const u8, piece.to as *mut u8, piece.len);
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn streamed(piece: Piece) {
    memcpy(piece);
}

#[cfg(target_arch = "x86_64")]
fn streamed(piece: Piece) {
    if !piece.to.is_multiple_of(64) || !piece.len.is_multiple_of(256) {
        return memcpy(piece);
    }
    if is_x86_feature_detected!("avx512f") {
        // SAFETY: the processor has it; the piece is as in `memcpy`, aligned and a multiple as checked.
        unsafe { streamed_512(piece) }
    } else if is_x86_feature_detected!("avx2") {
        // SAFETY: as above.
        unsafe { streamed_256(piece) }
    } else {
        memcpy(piece);
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn streamed_512(piece: Piece) {
    use std::arch::x86_64::{_mm_sfence, _mm512_loadu_si512, _mm512_stream_si512};
    let (from, to) = (piece.from as *const u8, piece.to as *mut u8);
    for at in (0..piece.len).step_by(256) {
        // SAFETY: inside the piece, whose target is aligned to 64 bytes.
        unsafe {
            let a = _mm512_loadu_si512(from.add(at).cast());
            let b = _mm512_loadu_si512(from.add(at + 64).cast());
            let c = _mm512_loadu_si512(from.add(at + 128).cast());
            let d = _mm512_loadu_si512(from.add(at + 192).cast());
            _mm512_stream_si512(to.add(at).cast(), a);
            _mm512_stream_si512(to.add(at + 64).cast(), b);
            _mm512_stream_si512(to.add(at + 128).cast(), c);
            _mm512_stream_si512(to.add(at + 192).cast(), d);
        }
    }
    _mm_sfence();
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn streamed_256(piece: Piece) {
    use std::arch::x86_64::{_mm_sfence, _mm256_loadu_si256, _mm256_stream_si256};
    let (from, to) = (piece.from as *const u8, piece.to as *mut u8);
    for at in (0..piece.len).step_by(64) {
        // SAFETY: inside the piece, whose target is aligned to 64 bytes.
        unsafe {
            let a = _mm256_loadu_si256(from.add(at).cast());
            let b = _mm256_loadu_si256(from.add(at + 32).cast());
            _mm256_stream_si256(to.add(at).cast(), a);
            _mm256_stream_si256(to.add(at + 32).cast(), b);
        }
    }
    _mm_sfence();
}
