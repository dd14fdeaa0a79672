//! Every interleaving of the shipped store's verbs: lease drop, evict, lookup, commit. And the proof that
//! this would notice: it fails for a store that does not ask who else holds a chunk whose bytes it reuses.
//!
//! Empty unless built for it:
//!
//! ```text
//! RUSTFLAGS="--cfg lmcache_loom" cargo test -p lmcache-memory --test loom --release
//! ```
#![cfg(lmcache_loom)]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use lmcache_core::hash::ChunkHash;
use lmcache_memory::Mutant;
use lmcache_memory::local_cpu::LocalCpu;
use lmcache_memory::object::MemoryObj;
use lmcache_memory::region::PAGE_BYTES;
use loom::thread;

const PAGE: u64 = PAGE_BYTES as u64;

/// Runs the model once for each interleaving, and says how many that were.
fn check(model: impl Fn() + Sync + Send + 'static) {
    let num_runs = Arc::new(AtomicUsize::new(0));
    let mut builder = loom::model::Builder::new();
    builder.max_branches = 100_000;
    builder.check({
        let num_runs = Arc::clone(&num_runs);
        move || {
            num_runs.fetch_add(1, Ordering::Relaxed);
            model();
        }
    });
    println!("{} interleavings", num_runs.load(Ordering::Relaxed));
    assert!(num_runs.load(Ordering::Relaxed) > 1, "nothing raced");
}

fn store_of(pages: u64) -> LocalCpu {
    LocalCpu::new(pages * PAGE, Duration::from_secs(600)).expect("a few pages")
}

fn hashes(ids: impl IntoIterator<Item = u8>) -> Vec<ChunkHash> {
    ids.into_iter().map(|id| ChunkHash([id; 32])).collect()
}

/// Stores the chain and says how many chunks are new; each chunk is one page filled with its id.
fn store(cpu: &LocalCpu, chain: &[ChunkHash]) -> usize {
    let mut reserved = cpu.reserve("ns", chain, 0, |_| PAGE_BYTES);
    for (position, chunk) in &mut reserved.chunks {
        chunk.bytes_mut().fill(chain[*position].0[0]);
    }
    let chunks = reserved.chunks.into_iter().map(|(_, chunk)| chunk);
    let chunks: Vec<_> = chunks.collect();
    let stored = chunks.len();
    cpu.commit("ns", chain, chunks);
    stored
}

fn assert_intact(objects: &[MemoryObj], chain: &[ChunkHash]) {
    for (object, hash) in objects.iter().zip(chain) {
        assert!(object.bytes().iter().all(|&byte| byte == hash.0[0]));
    }
}

fn assert_books_balance(cpu: &LocalCpu) {
    let audit = cpu.audit();
    assert_eq!(
        audit.free_bytes + audit.cached_bytes,
        audit.capacity_bytes,
        "{audit:?}"
    );
    assert_eq!(
        (audit.leased_bytes, audit.reserved_bytes, audit.num_leases),
        (0, 0, 0),
        "{audit:?}"
    );
}

/// A reader ends its lease while a writer wants the bytes.
fn a_reader_lets_go_while_a_writer_wants_the_bytes() {
    let cpu = store_of(1);
    let old = hashes([1]);
    assert_eq!(store(&cpu, &old), 1);
    let held = cpu.take("none", "ns", &old);
    let writer = thread::spawn({
        let cpu = cpu.clone();
        move || store(&cpu, &hashes([2]))
    });
    assert_intact(&held, &old);
    drop(held);
    let stored = writer.join().expect("the writer is well");
    assert_eq!(cpu.longest_prefix("ns", &old), 1 - stored);
    assert_eq!(store(&cpu, &hashes([3])), 1);
    assert_books_balance(&cpu);
}

#[test]
fn bytes_are_reused_only_after_the_last_reader_let_go() {
    check(a_reader_lets_go_while_a_writer_wants_the_bytes);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_store_that_asks_nobody_is_caught() {
    let _mutant = Mutant::begin();
    check(a_reader_lets_go_while_a_writer_wants_the_bytes);
}

/// A lookup and a take race with a store that evicts what they look for.
#[test]
fn a_lookup_that_hits_reads_what_was_stored_whoever_evicts() {
    check(|| {
        let cpu = store_of(1);
        let old = hashes([1]);
        assert_eq!(store(&cpu, &old), 1);
        let writer = thread::spawn({
            let cpu = cpu.clone();
            move || store(&cpu, &hashes([2]))
        });
        let found = cpu.lookup("r", "ns", &old).num_chunks;
        let taken = cpu.take("r", "ns", &old[..found]);
        assert_eq!(
            taken.len(),
            found,
            "a positive lookup holds until it is taken"
        );
        assert_intact(&taken, &old);
        drop(taken);
        writer.join().expect("the writer is well");
        assert_books_balance(&cpu);
    });
}

/// What a commit publishes is whole when a lookup finds it.
#[test]
fn a_commit_is_seen_whole_or_not_at_all() {
    check(|| {
        let cpu = store_of(2);
        let chain = hashes([1, 2]);
        let writer = thread::spawn({
            let (cpu, chain) = (cpu.clone(), chain.clone());
            move || store(&cpu, &chain)
        });
        let found = cpu.lookup("r", "ns", &chain).num_chunks;
        // Half of the pool is the most that a waiting request may hold.
        assert!(found <= 1);
        let taken = cpu.take("r", "ns", &chain[..found]);
        assert_intact(&taken, &chain);
        drop(taken);
        assert_eq!(writer.join().expect("the writer is well"), 2);
        assert_books_balance(&cpu);
    });
}

/// All four at once, in two threads and a pool too small for both.
#[test]
fn lease_drop_evict_lookup_and_commit_keep_the_books() {
    check(|| {
        let cpu = store_of(1);
        let other = thread::spawn({
            let cpu = cpu.clone();
            move || turn(&cpu, "a", 1)
        });
        turn(&cpu, "b", 2);
        turn(&cpu, "b", 1);
        other.join().expect("the other is well");
        assert_books_balance(&cpu);
    });
}

/// A reader of leased bytes, a writer that wants them, and a second reader that may come too late.
#[test]
fn three_threads_lose_no_byte_and_read_no_torn_one() {
    check(|| {
        let cpu = store_of(1);
        let old = hashes([1]);
        assert_eq!(store(&cpu, &old), 1);
        assert_eq!(cpu.lookup("r", "ns", &old).num_chunks, 1);
        let writer = thread::spawn({
            let cpu = cpu.clone();
            move || store(&cpu, &hashes([2]))
        });
        let late = thread::spawn({
            let (cpu, old) = (cpu.clone(), old.clone());
            move || assert_intact(&cpu.get("ns", &old), &old)
        });
        let taken = cpu.take("r", "ns", &old);
        assert_eq!(taken.len(), 1, "a positive lookup holds until it is taken");
        assert_intact(&taken, &old);
        drop(taken);
        writer.join().expect("the writer is well");
        late.join().expect("the late reader is well");
        assert_books_balance(&cpu);
    });
}

fn turn(cpu: &LocalCpu, lookup_id: &str, id: u8) {
    let chain = hashes([id]);
    store(cpu, &chain);
    let found = cpu.lookup(lookup_id, "ns", &chain).num_chunks;
    let taken = cpu.take(lookup_id, "ns", &chain[..found]);
    assert_eq!(taken.len(), found);
    assert_intact(&taken, &chain);
}

/// A handle that outlives its entry gives its bytes back to whoever asks next.
#[test]
fn a_clear_beside_a_reader_loses_no_byte() {
    check(|| {
        let cpu = store_of(1);
        let old = hashes([1]);
        assert_eq!(store(&cpu, &old), 1);
        let held = cpu.take("none", "ns", &old);
        let other = thread::spawn({
            let cpu = cpu.clone();
            move || {
                cpu.clear();
                store(&cpu, &hashes([2]))
            }
        });
        assert_intact(&held, &old);
        drop(held);
        other.join().expect("the other is well");
        assert_eq!(store(&cpu, &hashes([3])), 1);
        assert_books_balance(&cpu);
    });
}
