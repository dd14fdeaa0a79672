//! The index alone: what a chunk costs, and what a lookup costs beside bare touches of as much memory.
//!
//! `cargo bench -p lmcache-core --bench hot_cache`; the figures are printed, nothing is asserted.
#![allow(missing_docs, clippy::print_stdout)]

use std::hint::black_box;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use lmcache_core::hash::ChunkHash;
use lmcache_core::hot_cache::{Access, HotCache, IndexKey, Policy, Reserve};
use lmcache_core::key::NamespaceId;

const NS: NamespaceId = NamespaceId(0);
const NUM_ENTRIES: [u64; 3] = [1_000, 100_000, 1_000_000];
const CHAIN_LEN: u64 = 512;

/// As large as the object that the store keeps for a chunk.
struct Object {
    count: AtomicUsize,
    rest: [u64; 11],
}

fn object() -> Arc<Object> {
    Arc::new(Object {
        count: AtomicUsize::new(0),
        rest: [0; 11],
    })
}

/// splitmix64: chain hashes are uniform, and so are these.
fn spread(number: u64) -> u64 {
    let mut bits = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    bits = (bits ^ bits >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ bits >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ bits >> 31
}

fn hash(number: u64) -> ChunkHash {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&spread(number).to_le_bytes());
    bytes[8..16].copy_from_slice(&number.to_le_bytes());
    ChunkHash(bytes)
}

fn publish(cache: &mut HotCache<Arc<Object>>, hash: ChunkHash, value: Arc<Object>) {
    let namespace = NS;
    if let Reserve::New(reservation) = cache.reserve(IndexKey { namespace, hash }) {
        cache.publish(reservation, value);
    }
}

/// Chains as prompts leave them, in a pool so old that a chain's entries and objects lie anywhere.
fn filled(policy: Policy, num_entries: u64) -> HotCache<Arc<Object>> {
    let mut objects: Vec<Arc<Object>> = (0..num_entries).map(|_| object()).collect();
    shuffle(&mut objects, 1 << 40);
    let mut order: Vec<u64> = (0..num_entries).collect();
    shuffle(&mut order, 1 << 41);
    let mut cache = HotCache::new(policy);
    for (number, object) in order.into_iter().zip(objects) {
        publish(&mut cache, hash(number), object);
    }
    for round in 0..num_entries / CHAIN_LEN {
        cache.touch(NS, &chain(round));
    }
    cache
}

fn shuffle<T>(items: &mut [T], seed: u64) {
    for at in (1..items.len()).rev() {
        items.swap(at, spread(at as u64 ^ seed) as usize % (at + 1));
    }
}

/// The chain with this number.
fn chain(number: u64) -> Vec<ChunkHash> {
    let first = number * CHAIN_LEN;
    (first..first + CHAIN_LEN).map(hash).collect()
}

fn chunk_walks_through(c: &mut Criterion) {
    let mut group = c.benchmark_group("reserve_publish_evict");
    group.throughput(Throughput::Elements(1));
    for policy in Policy::ALL {
        for num_entries in NUM_ENTRIES {
            let mut cache = filled(policy, num_entries);
            let mut number = num_entries;
            let id = BenchmarkId::new(policy.name(), format!("entries={num_entries}"));
            group.bench_function(id, |b| {
                b.iter(|| {
                    number += 1;
                    cache.begin_batch();
                    let victim = cache.evict(|object| Arc::get_mut(object).is_some());
                    publish(
                        &mut cache,
                        hash(number),
                        victim.map_or_else(object, |v| v.value),
                    );
                });
            });
        }
    }
    group.finish();
}

/// What the lookup of a chain cannot do without: for each chunk a random slot of the table, the entry it
/// names, and the count of the object there.
struct BareMemory {
    slots: Vec<u32>,
    entries: Vec<[u64; 8]>,
    objects: Vec<Arc<Object>>,
}

impl BareMemory {
    fn new(num_entries: u64) -> Self {
        let num_slots = (num_entries * 8 / 7).next_power_of_two();
        let slot = |at: u64| (spread(at) % num_entries) as u32;
        let mut objects: Vec<Arc<Object>> = (0..num_entries).map(|_| object()).collect();
        shuffle(&mut objects, 1 << 40);
        Self {
            slots: (0..num_slots).map(slot).collect(),
            entries: (0..num_entries).map(|at| [at; 8]).collect(),
            objects,
        }
    }

    fn touch(&self, hashes: &[ChunkHash]) -> u64 {
        let mut sum = 0;
        for hash in hashes {
            let head = hash.0.first_chunk::<8>().expect("32 bytes");
            let slot = u64::from_le_bytes(*head) as usize & (self.slots.len() - 1);
            let entry = self.slots[slot] as usize;
            sum += self.entries[entry][3];
            sum += self.objects[entry].count.fetch_add(1, Ordering::Relaxed) as u64;
        }
        sum
    }
}

fn prefix_is_found(c: &mut Criterion) {
    let mut group = c.benchmark_group("longest_prefix_of_512");
    for num_entries in NUM_ENTRIES {
        let bare = BareMemory::new(num_entries);
        // Another chain each time: the caches hold what other lookups and copies left there.
        let numbers = (0..512).map(|round| spread(round) % (num_entries / CHAIN_LEN));
        let chains: Vec<Vec<ChunkHash>> = numbers.map(chain).collect();
        let timed = |iters: u64, work: &mut dyn FnMut(&[ChunkHash])| {
            let mut spent = Duration::ZERO;
            for round in 0..iters {
                let chain = &chains[(round % 512) as usize];
                let before = Instant::now();
                work(chain);
                spent += before.elapsed();
            }
            spent
        };
        group.bench_function(format!("bare_touches/entries={num_entries}"), |b| {
            b.iter_custom(|iters| {
                timed(iters, &mut |chain| {
                    black_box(bare.touch(chain));
                })
            });
        });
        for policy in Policy::ALL {
            let mut cache = filled(policy, num_entries);
            let mut leased = Vec::with_capacity(CHAIN_LEN as usize);
            let name = policy.name();
            group.bench_function(format!("{name}/entries={num_entries}"), |b| {
                b.iter_custom(|iters| {
                    timed(iters, &mut |chain| {
                        leased.clear();
                        let found = cache.longest_prefix(NS, chain, Access::Use, |objects| {
                            let glance = |object: &Arc<Object>| object.rest[0];
                            black_box(objects.clone().map(glance).sum::<u64>());
                            leased.extend(objects.cloned());
                            leased.len()
                        });
                        assert_eq!(found, chain.len());
                    })
                });
            });
        }
    }
    group.finish();
}

fn bytes_per_chunk(_: &mut Criterion) {
    static ONCE: OnceLock<()> = OnceLock::new();
    ONCE.get_or_init(|| {
        for policy in Policy::ALL {
            for num_entries in NUM_ENTRIES {
                let mut cache = filled(policy, num_entries);
                for number in 0..num_entries {
                    cache.begin_batch();
                    let victim = cache.evict(|_| true).expect("full");
                    publish(&mut cache, hash(num_entries + number), victim.value);
                }
                let bytes = cache.heap_bytes() as f64 / num_entries as f64;
                println!(
                    "index_bytes_per_chunk/{}/entries={num_entries}: {bytes:.1}",
                    policy.name()
                );
            }
        }
    });
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .sample_size(10)
        .warm_up_time(Duration::from_millis(200))
        .measurement_time(Duration::from_millis(600));
    targets = bytes_per_chunk, chunk_walks_through, prefix_is_found
}
criterion_main!(benches);
