//! The store: what a chunk costs from reservation to eviction, and a lookup from first probe to lease.
//!
//! `cargo bench -p lmcache-memory --bench local_cpu`; the figures are printed, nothing is asserted.
#![allow(missing_docs, clippy::print_stdout)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use criterion::{BatchSize, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use lmcache_core::hash::ChunkHash;
use lmcache_core::hot_cache::Policy;
use lmcache_memory::local_cpu::LocalCpu;
use lmcache_memory::object::{ChunkMut, MemoryObj};
use lmcache_memory::region::PAGE_BYTES;

/// Counts what the heap holds, as the system rounds it: to 16 bytes, with a word of its own.
struct Counting;

static HEAP_BYTES: AtomicUsize = AtomicUsize::new(0);

fn rounded(size: usize) -> usize {
    (size + 8).next_multiple_of(16).max(32)
}

// SAFETY: everything is left to the system's allocator; only sizes are summed on the way.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        HEAP_BYTES.fetch_add(rounded(layout.size()), Ordering::Relaxed);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        HEAP_BYTES.fetch_sub(rounded(layout.size()), Ordering::Relaxed);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        HEAP_BYTES.fetch_add(rounded(size), Ordering::Relaxed);
        HEAP_BYTES.fetch_sub(rounded(layout.size()), Ordering::Relaxed);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.realloc(at, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const NUM_ENTRIES: [u64; 3] = [1_000, 100_000, 1_000_000];
const NUM_LEASED: u64 = 5_000;
const CHAIN_LEN: u64 = 512;
/// Chunks that one call stores.
const BATCH_LEN: u64 = 16;
const LEASE: Duration = Duration::from_secs(3600);

fn spread(number: u64) -> u64 {
    let mut bits = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    bits = (bits ^ bits >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ bits >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ bits >> 31
}

fn chain(first: u64, len: u64) -> Vec<ChunkHash> {
    let hash = |number: u64| {
        let mut bytes = [0; 32];
        bytes[..8].copy_from_slice(&spread(number).to_le_bytes());
        bytes[8..16].copy_from_slice(&number.to_le_bytes());
        ChunkHash(bytes)
    };
    (first..first + len).map(hash).collect()
}

fn store(cpu: &LocalCpu, chain: &[ChunkHash]) {
    let reserved = cpu.reserve("ns", chain, 0, |_| PAGE_BYTES);
    assert_eq!(reserved.chunks.len(), chain.len());
    let chunks = reserved.chunks.into_iter().map(|(_, chunk)| chunk);
    let chunks: Vec<ChunkMut> = chunks.collect();
    cpu.commit("ns", chain, chunks);
}

/// A full pool of chunks of one page; the first `num_leased` of them are held.
fn filled(policy: Policy, num_entries: u64, num_leased: u64) -> (LocalCpu, Vec<MemoryObj>) {
    let capacity = num_entries * PAGE_BYTES as u64;
    let cpu = LocalCpu::with_policy(capacity, LEASE, policy).expect("as much memory");
    let mut held = Vec::new();
    for first in (0..num_entries).step_by(CHAIN_LEN as usize) {
        let chain = chain(first, CHAIN_LEN.min(num_entries - first));
        store(&cpu, &chain);
        let leased = num_leased.saturating_sub(first).min(chain.len() as u64);
        held.extend(cpu.get("ns", &chain[..leased as usize]));
    }
    (cpu, held)
}

fn chunk_walks_through(c: &mut Criterion) {
    let mut group = c.benchmark_group("reserve_commit_evict");
    group.throughput(Throughput::Elements(BATCH_LEN));
    let leased = [100_000, 1_000_000].map(|num_entries| (num_entries, NUM_LEASED));
    let cases = NUM_ENTRIES.map(|num_entries| (num_entries, 0));
    for (num_entries, num_leased) in cases.into_iter().chain(leased) {
        // The index's own bench has them all; ARC keeps the most books.
        for policy in [Policy::Lru, Policy::Arc] {
            let before = HEAP_BYTES.load(Ordering::Relaxed);
            let (cpu, held) = filled(policy, num_entries, num_leased);
            let mut first = num_entries;
            let name = format!("entries={num_entries}/leased={num_leased}");
            group.bench_function(BenchmarkId::new(policy.name(), name), |b| {
                b.iter_batched(
                    || {
                        first += BATCH_LEN;
                        chain(first, BATCH_LEN)
                    },
                    |chain| store(&cpu, &chain),
                    BatchSize::SmallInput,
                );
            });
            drop(held);
            let heap = HEAP_BYTES.load(Ordering::Relaxed) - before;
            let bytes = heap as f64 / num_entries as f64;
            println!(
                "heap_bytes_per_chunk/{}/entries={num_entries}: {bytes:.1}",
                policy.name()
            );
        }
    }
    group.finish();
}

fn prefix_is_leased(c: &mut Criterion) {
    let mut group = c.benchmark_group("lookup_of_512");
    for num_entries in NUM_ENTRIES {
        let (cpu, _) = filled(Policy::Lru, num_entries, 0);
        let num_chains = num_entries / CHAIN_LEN;
        let mut round = 0;
        group.bench_function(format!("entries={num_entries}"), |b| {
            b.iter_custom(|iters| {
                let mut spent = Duration::ZERO;
                for _ in 0..iters {
                    round += 1;
                    let chain = chain(spread(round) % num_chains * CHAIN_LEN, CHAIN_LEN);
                    let before = Instant::now();
                    let hit = cpu.lookup("r", "ns", &chain);
                    spent += before.elapsed();
                    assert!(hit.num_chunks as u64 >= CHAIN_LEN.min(num_entries / 2));
                    cpu.release("r");
                }
                spent
            });
        });
    }
    group.finish();
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .sample_size(10)
        .warm_up_time(Duration::from_millis(200))
        .measurement_time(Duration::from_millis(600));
    targets = chunk_walks_through, prefix_is_leased
}
criterion_main!(benches);
