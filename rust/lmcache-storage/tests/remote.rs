//! The remote tier over a client in memory that fails as it is told: bounds, deadlines, the breaker, sweeps.
#![cfg(test)]

mod remote_memory;

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use lmcache_core::hash::ChunkHash;
use lmcache_memory::local_cpu::LocalCpu;
use lmcache_storage::backend::{Backend, Chunk};
use lmcache_storage::remote::client::Refusal;
use lmcache_storage::remote::{Options, RemoteTier, Serde};

use remote_memory::{CHUNK_BYTES, Mood, Store, chain, chunks, filled, pool, wait_until};

const NS: &str = "model=m@world=1@worker=0";
const WITHIN: Duration = Duration::from_secs(20);

fn options() -> Options {
    Options {
        deadline: Duration::from_secs(5),
        ..Options::default()
    }
}

fn tier(options: Options) -> (RemoteTier, Arc<Store>, LocalCpu) {
    let (store, pool) = (Arc::new(Store::default()), pool(256));
    let tier = RemoteTier::open(Arc::clone(&store) as _, options, pool.clone());
    (tier.expect("two threads"), store, pool)
}

fn stat(tier: &RemoteTier, name: &str) -> u64 {
    tier.stats().get(name).copied().unwrap_or(0)
}

fn put(tier: &RemoteTier, namespace: &str, hashes: &[ChunkHash]) {
    tier.put(namespace, hashes, chunks(hashes));
    assert!(tier.flush(WITHIN));
}

#[test]
fn what_is_put_comes_back_up_to_the_first_gap() {
    let (tier, _, pool) = tier(options());
    let stored = chain([1, 2, 4]);
    assert_eq!(tier.put(NS, &stored, chunks(&stored)), 3);
    assert!(tier.flush(WITHIN));
    let asked = chain([1, 2, 3, 4]);
    assert_eq!(tier.contains_prefix(NS, &asked), 2);
    let arrivals = tier.get(NS, &asked, WITHIN);
    assert_eq!(filled(arrivals), [1, 2]);
    assert_eq!(tier.contains_prefix("model=m@world=1", &asked), 0);
    assert!(tier.get("model=m@world=1", &asked, WITHIN).is_empty());
    let usage = pool.usage();
    assert_eq!(usage.held_bytes, 0);
    assert!(tier.close(WITHIN));
    assert!(tier.get(NS, &asked, WITHIN).is_empty());
}

#[test]
fn known_chunks_are_not_sent_again() {
    let (tier, store, _) = tier(options());
    put(&tier, NS, &chain([1, 2]));
    put(&tier, NS, &chain([1, 2, 3]));
    assert_eq!(store.num_puts(), 3);
    assert_eq!(stat(&tier, "refreshed_chunks"), 2);
}

#[test]
fn order_is_kept_when_the_first_is_the_slowest() {
    let (tier, store, _) = tier(options());
    let hashes = chain(1..40);
    put(&tier, NS, &hashes);
    store.delay_gets(|nth, _| Duration::from_millis(if nth % 7 == 0 { 30 } else { 0 }));
    let ids: Vec<u8> = (1..40).collect();
    assert_eq!(filled(tier.get(NS, &hashes, WITHIN)), ids);
    assert!(store.most_gets_at_once() > 1);
    assert!(store.most_gets_at_once() <= options().operations);
}

#[test]
fn what_came_by_the_deadline_is_there() {
    let (tier, store, pool) = tier(options());
    let hashes = chain(1..20);
    put(&tier, NS, &hashes);
    let soon: Vec<String> = hashes[..5]
        .iter()
        .map(|hash| tier.name_of(NS, *hash))
        .collect();
    store.delay_gets(move |_, name| match soon.iter().any(|each| each == name) {
        true => Duration::ZERO,
        false => WITHIN * 10,
    });
    let began = Instant::now();
    let arrivals = tier.get(NS, &hashes, Duration::from_millis(500));
    assert!(
        began.elapsed() < Duration::from_secs(15),
        "the deadline is kept"
    );
    assert_eq!(filled(arrivals), [1, 2, 3, 4, 5]);
    assert_eq!(stat(&tier, "faults_deadline"), 1);
    // It answered: it is not out of reach.
    assert_eq!(stat(&tier, "out_of_reach"), 0);
    wait_until("all memory is back", || pool.usage().held_bytes == 0);
}

#[test]
fn puts_that_wait_are_bounded_in_bytes() {
    let options = Options {
        max_queued_bytes: 4 * CHUNK_BYTES as u64,
        ..options()
    };
    let (tier, store, _) = tier(options);
    store.set_mood(Mood::Mute);
    let hashes = chain(1..11);
    assert_eq!(tier.put(NS, &hashes, chunks(&hashes)), 4);
    assert_eq!(stat(&tier, "dropped_chunks"), 6);
    assert_eq!(stat(&tier, "queued_bytes"), 4 * CHUNK_BYTES as u64);
    assert_eq!(tier.put(NS, &hashes[..4], chunks(&hashes[..4])), 0);
    store.set_mood(Mood::Well);
    store.wake();
    assert!(tier.flush(WITHIN));
    assert_eq!(tier.contains_prefix(NS, &hashes), 4);
    assert_eq!(stat(&tier, "queued_bytes"), 0);
}

#[test]
fn a_server_out_of_reach_is_asked_by_one_probe_and_used_again() {
    let (tier, store, _) = tier(options());
    let hashes = chain([1, 2]);
    put(&tier, NS, &hashes);
    store.set_mood(Mood::Refusing(Refusal::Unreachable("refused".into())));
    for _ in 0..3 {
        assert_eq!(tier.contains_prefix(NS, &hashes), 0);
    }
    assert_eq!(stat(&tier, "out_of_reach"), 1);
    let asked = store.num_calls();
    for _ in 0..200 {
        assert!(tier.get(NS, &hashes, WITHIN).is_empty());
        assert_eq!(tier.put(NS, &chain([9]), chunks(&chain([9]))), 0);
    }
    assert!(store.num_calls() <= asked + 5, "a probe now and then");
    assert!(stat(&tier, "skipped_operations") >= 200);
    assert!(stat(&tier, "dropped_chunks") >= 200);
    store.set_mood(Mood::Well);
    wait_until("it is used again", || stat(&tier, "out_of_reach") == 0);
    assert_eq!(filled(tier.get(NS, &hashes, WITHIN)), [1, 2]);
    assert_eq!(stat(&tier, "outages"), 1);
}

#[test]
fn a_server_that_says_nothing_costs_one_deadline() {
    let options = Options {
        deadline: Duration::from_millis(300),
        ..options()
    };
    let (tier, store, _) = tier(options);
    put(&tier, NS, &chain([1]));
    store.set_mood(Mood::Mute);
    let began = Instant::now();
    for _ in 0..50 {
        assert_eq!(tier.contains_prefix(NS, &chain([1])), 0);
    }
    assert!(began.elapsed() < Duration::from_secs(10), "one, not fifty");
    assert_eq!(stat(&tier, "faults_timeout"), 1);
    store.set_mood(Mood::Well);
    wait_until("it is used again", || stat(&tier, "out_of_reach") == 0);
    assert_eq!(tier.contains_prefix(NS, &chain([1])), 1);
}

#[test]
fn a_full_server_is_read_from_and_left_alone_with_puts() {
    let (tier, store, _) = tier(options());
    put(&tier, NS, &chain([1]));
    store.set_mood(Mood::Full);
    put(&tier, NS, &chain([1, 2]));
    assert_eq!(stat(&tier, "faults_full"), 1);
    let puts = store.num_puts();
    for _ in 0..20 {
        put(&tier, NS, &chain([1, 2]));
    }
    assert_eq!(store.num_puts(), puts, "nothing is offered for a while");
    assert_eq!(filled(tier.get(NS, &chain([1]), WITHIN)), [1]);
    store.set_mood(Mood::Well);
    wait_until("puts are taken again", || {
        put(&tier, NS, &chain([1, 2]));
        tier.contains_prefix(NS, &chain([1, 2])) == 2
    });
}

#[test]
fn a_value_that_was_changed_is_never_used() {
    let (tier, store, pool) = tier(options());
    let hash = chain([1]);
    put(&tier, NS, &hash);
    let name = tier.name_of(NS, hash[0]);
    let whole = store.value(&name).expect("stored");
    let mut seen = 0;
    for at in (0..whole.len()).step_by(97) {
        for change in 0..3 {
            let mut value = whole.to_vec();
            match change {
                0 => value[at] ^= 1 << (at % 8),
                1 => value.truncate(at),
                _ => value.insert(at, 7),
            }
            store.plant(&name, Bytes::from(value));
            assert!(tier.get(NS, &hash, WITHIN).is_empty(), "{change} at {at}");
            seen += 1;
            wait_until("it is removed", || store.value(&name).is_none());
        }
    }
    let by_reason = tier.stats();
    let reasons = [
        "truncated",
        "magic",
        "version",
        "foreign",
        "checksum",
        "length",
        "malformed",
    ];
    let counted = reasons.map(|reason| by_reason.get(&format!("faults_{reason}")).copied());
    assert_eq!(counted.into_iter().flatten().sum::<u64>(), seen);
    // The chunk of another key under this name.
    let other = chain([2]);
    put(&tier, NS, &other);
    let foreign = store.value(&tier.name_of(NS, other[0])).expect("stored");
    store.plant(&name, foreign);
    assert!(tier.get(NS, &hash, WITHIN).is_empty());
    assert_eq!(pool.usage().held_bytes, 0);
}

#[test]
fn a_value_larger_than_the_pool_is_left_where_it_is() {
    let store = Arc::new(Store::default());
    let small = pool(1);
    let tier = RemoteTier::open(Arc::clone(&store) as _, options(), small).expect("two threads");
    let hash = chain([1]);
    let name = tier.name_of(NS, hash[0]);
    store.plant(&name, Bytes::from(vec![0; 32 << 20]));
    assert!(tier.get(NS, &hash, WITHIN).is_empty());
    assert_eq!(stat(&tier, "faults_too_large"), 1);
    assert!(store.value(&name).is_some());
}

#[test]
fn values_beyond_the_limit_are_not_sent() {
    let options = Options {
        max_value_bytes: CHUNK_BYTES as u64,
        ..options()
    };
    let (tier, store, _) = tier(options);
    put(&tier, NS, &chain([1]));
    assert_eq!(store.num_puts(), 0);
    assert_eq!(stat(&tier, "faults_too_large"), 1);
    assert_eq!(stat(&tier, "dropped_chunks"), 1);
}

#[test]
fn prefixes_are_cleared_across_handles_and_processes() {
    let (tier, store, pool) = tier(options());
    let (a, ab) = ("model=a@world=1", "model=ab@world=1");
    put(&tier, a, &chain([1, 2]));
    put(&tier, ab, &chain([1]));
    store.plant("others:key", Bytes::from_static(b"x"));
    // Another process, which has used none of them.
    let other = RemoteTier::open(Arc::clone(&store) as _, options(), pool).expect("two threads");
    assert_eq!(other.clear(Some("model=a")), 2);
    assert_eq!(tier.contains_prefix(a, &chain([1])), 0);
    assert_eq!(tier.contains_prefix(ab, &chain([1])), 1);
    put(&tier, a, &chain([1]));
    assert_eq!(other.retain("model=a"), 1);
    assert_eq!(tier.contains_prefix(ab, &chain([1])), 0);
    assert_eq!(other.clear(None), 1);
    assert!(store.value("others:key").is_some());
}

#[test]
fn a_clear_that_could_not_be_done_is_done_before_the_next_read() {
    let options = Options {
        deadline: Duration::from_millis(300),
        ..options()
    };
    let (tier, store, _) = tier(options);
    put(&tier, NS, &chain([1]));
    for mood in [
        Mood::Mute,
        Mood::Refusing(Refusal::Unreachable("refused".into())),
    ] {
        put(&tier, NS, &chain([1]));
        wait_until("it is there", || tier.contains_prefix(NS, &chain([1])) == 1);
        store.set_mood(mood);
        assert_eq!(tier.clear(Some("model=m")), 0);
        store.set_mood(Mood::Well);
        // Never once a hit, however early it is asked.
        wait_until("it is cleared", || {
            assert_eq!(tier.contains_prefix(NS, &chain([1])), 0);
            assert!(tier.get(NS, &chain([1]), WITHIN).is_empty());
            store.is_empty()
        });
        wait_until("it is used again", || {
            put(&tier, NS, &chain([1]));
            !store.is_empty()
        });
    }
}

#[test]
fn a_clear_that_the_server_refuses_leaves_the_tier_in_use() {
    let (tier, store, _) = tier(options());
    put(&tier, NS, &chain([1]));
    for prefix in [None, Some("model=m"), Some("model=m")] {
        store.set_mood(Mood::Refusing(Refusal::Denied("no SCAN".into())));
        assert_eq!(tier.clear(prefix), 0);
        store.set_mood(Mood::Well);
        assert_eq!(tier.contains_prefix(NS, &chain([1])), 1);
        assert_eq!(filled(tier.get(NS, &chain([1]), WITHIN)), [1]);
    }
    assert_eq!(stat(&tier, "faults_not_cleared"), 3);
    assert_eq!(stat(&tier, "outages"), 0);
    put(&tier, NS, &chain([2]));
    assert_eq!(store.num_puts(), 2);
}

#[test]
fn a_value_that_cannot_be_read_keeps_no_other_from_being_cleared() {
    let (tier, store, pool) = tier(options());
    put(&tier, "model=a@world=1", &chain([1, 2, 3]));
    put(&tier, "model=b@world=1", &chain([4]));
    store.spoil(&tier.name_of("model=b@world=1", chain([4])[0]));
    let other = RemoteTier::open(Arc::clone(&store) as _, options(), pool).expect("two threads");
    assert_eq!(other.clear(Some("model=a")), 3);
    assert_eq!(stat(&other, "faults_server"), 1);
}

#[test]
fn what_is_too_large_unpacked_is_not_sent_packed() {
    const LIMIT: usize = 32 << 10;
    let options = Options {
        max_value_bytes: LIMIT as u64,
        serde: Serde::Lossless,
        ..options()
    };
    let (tier, store, pool) = tier(options);
    // Of zeros: packed, they are a header and little more.
    for (id, bytes) in [(1, LIMIT), (2, LIMIT + CHUNK_BYTES)] {
        let allocated = pool.allocate(&[bytes]).expect("room");
        let chunk = allocated.into_iter().map(|mut chunk| {
            chunk.bytes_mut().fill(0);
            Chunk {
                object: chunk.seal_unpublished(),
                form: None,
                num_tokens: 256,
            }
        });
        tier.put(NS, &chain([id]), chunk.collect());
        assert!(tier.flush(WITHIN));
        assert_eq!(store.num_puts(), 1);
        assert_eq!(stat(&tier, "faults_too_large"), u64::from(bytes > LIMIT));
    }
}

#[test]
fn a_put_that_is_under_way_does_not_survive_a_clear_or_a_remove() {
    let (tier, store, _) = tier(options());
    store.set_mood(Mood::MutePuts);
    tier.put(NS, &chain([1, 2]), chunks(&chain([1, 2])));
    wait_until("it has begun", || store.num_puts() > 0);
    let waking = Arc::clone(&store);
    let waker = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(100));
        waking.set_mood(Mood::Well);
        waking.wake();
    });
    tier.clear(None);
    waker.join().expect("no panic");
    assert!(tier.flush(WITHIN));
    wait_until("nothing is left", || store.is_empty());
    assert_eq!(tier.contains_prefix(NS, &chain([1])), 0);
}

#[test]
fn it_is_a_backend_like_any_other() {
    let (tier, _, _) = tier(options());
    let backend: &dyn Backend = &tier;
    let hashes = chain([1, 2]);
    let objects: Vec<_> = chunks(&hashes)
        .into_iter()
        .map(|chunk| chunk.object)
        .collect();
    backend.submit_put(NS, &hashes, &objects);
    assert!(tier.flush(WITHIN));
    assert!(backend.contains(NS, hashes[1]));
    let read = backend.get_blocking(NS, &hashes);
    assert_eq!(read.len(), 2);
    assert_eq!(read[1].bytes(), objects[1].bytes());
    assert!(backend.remove(NS, hashes[0]));
    assert!(!backend.remove(NS, hashes[0]));
}
