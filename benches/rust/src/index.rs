//! The store's index under load: lookups, and chunks that come and go in a full pool.

use std::hint::black_box;
use std::time::Duration;

use lmcache_core::hash::ChunkHash;
use lmcache_memory::events::DEFAULT_CAPACITY;
use lmcache_memory::local_cpu::LocalCpu;
use lmcache_memory::object::{ChunkMut, MemoryObj};

use crate::heap;
use crate::sample::{Case, Numbers, timed};

const PAGE: usize = 4096;
const PROMPT: usize = 512;
const BATCH: usize = 64;
const LEASED: usize = 5_000;
const NAMESPACE: &str = "model=m@world=1@worker=0@dtype=bfloat16";
const HOUR: Duration = Duration::from_secs(3600);

fn hash(number: u64) -> ChunkHash {
    let mut numbers = Numbers(number.wrapping_mul(0x2545_f491_4f6c_dd1d));
    let mut bytes = [0; 32];
    for part in bytes.chunks_exact_mut(8) {
        part.copy_from_slice(&numbers.next().to_le_bytes());
    }
    ChunkHash(bytes)
}

fn hashes(numbers: impl IntoIterator<Item = u64>) -> Vec<ChunkHash> {
    numbers.into_iter().map(hash).collect()
}

fn pool(pages: usize) -> LocalCpu {
    LocalCpu::new((pages * PAGE) as u64, HOUR).expect("memory for one page a chunk")
}

fn put(cpu: &LocalCpu, chain: &[ChunkHash]) -> usize {
    let reserved = cpu.reserve(NAMESPACE, chain, 0, |_| PAGE);
    let chunks: Vec<ChunkMut> = reserved
        .chunks
        .into_iter()
        .map(|(_, chunk)| chunk)
        .collect();
    let count = chunks.len();
    cpu.commit(NAMESPACE, chain, chunks);
    count
}

/// A store of `entries` chunks, put one by one in random order: the worst placement for a lookup.
fn scattered(entries: usize, pages: usize) -> LocalCpu {
    let cpu = pool(pages);
    for at in Numbers(3).shuffled(entries) {
        put(&cpu, &[hash(u64::from(at))]);
    }
    cpu
}

/// A store of `entries` chunks, put a prompt at a time, as an engine does.
fn by_prompt(entries: usize, pages: usize) -> LocalCpu {
    let cpu = pool(pages);
    for first in (0..entries as u64).step_by(PROMPT) {
        let end = (first + PROMPT as u64).min(entries as u64);
        put(&cpu, &hashes(first..end));
    }
    cpu
}

/// What a lookup cannot do without: a slot of the hash table, the entry it names, the entry's count.
struct Touches {
    slots: Vec<u32>,
    entries: Vec<[u64; 9]>,
    // Each lies somewhere of its own, as counts of shared objects do.
    #[expect(clippy::vec_box)]
    counts: Vec<Box<[u64; 10]>>,
}

impl Touches {
    fn new(entries: usize) -> Self {
        let mut numbers = Numbers(5);
        let num_slots = (entries * 8 / 7).next_power_of_two();
        let mut slots = vec![u32::MAX; num_slots];
        for (at, place) in numbers
            .shuffled(num_slots)
            .into_iter()
            .take(entries)
            .enumerate()
        {
            slots[place as usize] = at as u32;
        }
        let mut counts: Vec<_> = (0..entries).map(|_| Box::new([0u64; 10])).collect();
        let order = numbers.shuffled(entries);
        for (at, &other) in order.iter().enumerate() {
            counts.swap(at, other as usize);
        }
        let entries = (0..entries).map(|at| [at as u64; 9]).collect();
        Self {
            slots,
            entries,
            counts,
        }
    }

    fn places(&self, numbers: &mut Numbers) -> Vec<usize> {
        let mut places = Vec::with_capacity(PROMPT);
        while places.len() < PROMPT {
            let place = numbers.below(self.slots.len());
            if self.slots[place] != u32::MAX {
                places.push(place);
            }
        }
        places
    }

    fn touch(&mut self, places: &[usize]) {
        for &place in places {
            let entry = &mut self.entries[self.slots[place] as usize];
            entry[6] += 1;
            self.counts[entry[0] as usize][0] += 1;
        }
    }
}

pub(crate) fn lookup(quick: bool) {
    let sizes: &[usize] = if quick {
        &[1_000, 100_000]
    } else {
        &[1_000, 100_000, 1_000_000]
    };
    let rounds = if quick { 60 } else { 400 };
    for &entries in sizes {
        for (placement, filled) in [("scattered", scattered as Filled), ("by_prompt", by_prompt)] {
            lookup_among(entries, placement, filled, rounds);
        }
    }
}

type Filled = fn(usize, usize) -> LocalCpu;

fn lookup_among(entries: usize, placement: &str, filled: Filled, rounds: usize) {
    // Leases may hold half of the pool, and a prompt must fit.
    let cpu = filled(entries, entries.max(4 * PROMPT));
    let mut limit = Touches::new(entries);
    let mut numbers = Numbers(7);
    let num_prompts = entries / PROMPT;
    let (mut ours, mut touches, mut releases) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..rounds {
        let first = (numbers.below(num_prompts) * PROMPT) as u64;
        let chain = hashes(first..first + PROMPT as u64);
        let places = limit.places(&mut numbers);
        let (time, hit) = timed(|| cpu.lookup("request", NAMESPACE, black_box(&chain)));
        assert_eq!(hit.num_chunks, PROMPT, "every chunk is stored");
        let (touch, ()) = timed(|| limit.touch(black_box(&places)));
        let (release, _) = timed(|| cpu.release("request"));
        if round >= rounds / 10 {
            ours.push(time);
            touches.push(touch);
            releases.push(release);
        }
    }
    Case::new(&format!("lookup/{placement}/entries={entries}"))
        .samples("ours", &ours)
        .samples("touches", &touches)
        .samples("release", &releases)
        .fact("entries", entries as f64)
        .print();
}

struct Full {
    name: String,
    entries: usize,
    cpu: LocalCpu,
    _leased: Vec<MemoryObj>,
    has_listener: bool,
    batched: Vec<u64>,
    single: Vec<u64>,
}

impl Full {
    /// A full pool, of whose oldest entries `leased` are held.
    fn new(entries: usize, leased: usize) -> Self {
        let cpu = pool(entries);
        let order = Numbers(11).shuffled(entries);
        let chain: Vec<ChunkHash> = order.iter().map(|&at| hash(u64::from(at))).collect();
        for part in chain.chunks(BATCH) {
            put(&cpu, part);
        }
        // A batch is refreshed as a whole: what is oldest of all is still the first batches.
        let held = chain[..leased]
            .chunks(BATCH)
            .flat_map(|part| cpu.get(NAMESPACE, part))
            .collect();
        Self {
            name: format!("churn/entries={entries}/leased={leased}"),
            entries,
            cpu,
            _leased: held,
            has_listener: false,
            batched: Vec::new(),
            single: Vec::new(),
        }
    }

    /// As [`Full::new`], with a listener who is told what comes and goes.
    fn heard(entries: usize) -> Self {
        let mut full = Self::new(entries, 0);
        full.cpu.listen(DEFAULT_CAPACITY);
        full.cpu.drain_events();
        full.name += "/listening=1";
        full.has_listener = true;
        full
    }
}

pub(crate) fn churn(quick: bool) {
    let (sizes, rounds): (&[usize], _) = if quick {
        (&[1_000, 100_000], 100)
    } else {
        (&[1_000, 10_000, 100_000, 1_000_000], 400)
    };
    let mut stores: Vec<Full> = sizes.iter().map(|&entries| Full::new(entries, 0)).collect();
    stores.push(Full::new(20_000, LEASED));
    stores.push(Full::new(100_000, LEASED));
    stores.push(Full::heard(100_000));
    let mut next = 1 << 40;
    for round in 0..rounds {
        for store in &mut stores {
            let chain = hashes(next..next + 2 * BATCH as u64);
            next += 2 * BATCH as u64;
            let (batch, singles) = chain.split_at(BATCH);
            let (batched, count) = timed(|| put(&store.cpu, batch));
            assert_eq!(count, BATCH, "the pool has room after evictions");
            let (single, ()) = timed(|| {
                for hash in singles {
                    put(&store.cpu, std::slice::from_ref(hash));
                }
            });
            if store.has_listener {
                let told = store.cpu.drain_events().events.len();
                assert_eq!(told, 4 * BATCH, "each chunk that came drove one out");
            }
            if round >= rounds / 10 {
                store.batched.push(batched);
                store.single.push(single);
            }
        }
    }
    for store in &stores {
        Case::new(&store.name)
            .samples("batched", &store.batched)
            .samples("single", &store.single)
            .fact("entries", store.entries as f64)
            .fact("chunks", BATCH as f64)
            .print();
    }
}

/// Heap bytes an entry, walked up to a full pool: the tables double on the way.
pub(crate) fn bytes(quick: bool) {
    let entries = if quick { 100_000 } else { 1_000_000 };
    let step = 1_000;
    heap::count();
    let cpu = pool(entries);
    let mut worst: f64 = 0.0;
    let mut last = 0.0;
    let mut chain = Vec::with_capacity(step);
    for first in (0..entries as u64).step_by(step) {
        chain.clear();
        chain.extend((first..first + step as u64).map(hash));
        // What one call hands out and back is not the index's.
        let before = (chain.capacity() * 32) as i64;
        put(&cpu, &chain);
        last = (heap::bytes() - before) as f64 / (first + step as u64) as f64;
        if first as usize + step >= entries / 10 {
            worst = worst.max(last);
        }
    }
    Case::new("index_bytes")
        .fact("entries", entries as f64)
        .fact("at_the_end", last)
        .fact("worst", worst)
        .print();
}
