use super::*;

const PAGE: u64 = PAGE_BYTES as u64;
const LEASE: Duration = Duration::from_secs(600);

fn hashes(ids: impl IntoIterator<Item = u8>) -> Vec<ChunkHash> {
    ids.into_iter().map(|id| ChunkHash([id; 32])).collect()
}

fn store_of(pages: u64) -> LocalCpu {
    LocalCpu::new(pages * PAGE, LEASE).expect("a few pages")
}

/// Stores the chain and says how many chunks are new; each chunk is one page filled with its id.
fn store(cpu: &LocalCpu, chain: &[ChunkHash]) -> usize {
    let mut reserved = cpu.reserve("ns", chain, 0, |_| PAGE_BYTES);
    for (position, chunk) in &mut reserved.chunks {
        chunk.bytes_mut().fill(chain[*position].0[0]);
    }
    let chunks: Vec<_> = reserved
        .chunks
        .into_iter()
        .map(|(_, chunk)| chunk)
        .collect();
    let stored = chunks.len();
    cpu.commit("ns", chain, chunks);
    stored
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
        (0, 0, 0)
    );
    assert_eq!(cpu.0.lock().leases.distinct_bytes(), 0);
}

#[test]
fn what_was_stored_comes_back_and_twice_is_once() {
    let cpu = store_of(8);
    let chain = hashes(1..=4);
    assert_eq!(store(&cpu, &chain), 4);
    assert_eq!(store(&cpu, &chain), 0);
    assert_eq!(cpu.lookup("r", "ns", &chain).num_chunks, 4);
    assert_eq!(cpu.lookup("r", "other", &chain).num_chunks, 0);
    cpu.lookup("r", "ns", &chain);
    let objects = cpu.take("r", "ns", &chain);
    assert_eq!(objects.len(), 4);
    for (object, hash) in objects.iter().zip(&chain) {
        assert!(object.bytes().iter().all(|&byte| byte == hash.0[0]));
    }
    drop(objects);
    assert_books_balance(&cpu);
}

#[test]
fn an_entry_is_invisible_until_it_is_committed() {
    let cpu = store_of(8);
    let chain = hashes([1, 2]);
    let reserved = cpu.reserve("ns", &chain, 0, |_| PAGE_BYTES);
    assert_eq!(cpu.longest_prefix("ns", &chain), 0);
    assert_eq!(cpu.reserve("ns", &chain, 0, |_| PAGE_BYTES).num_known, 2);
    assert_eq!(cpu.audit().reserved_bytes, 2 * PAGE);
    drop(reserved);
    assert_eq!(cpu.longest_prefix("ns", &chain), 0);
    assert_books_balance(&cpu);
    assert_eq!(store(&cpu, &chain), 2);
}

#[test]
fn a_prompt_larger_than_the_pool_keeps_its_beginning() {
    let cpu = store_of(4);
    store(&cpu, &hashes(100..104));
    let chain = hashes(1..=9);
    let reserved = cpu.reserve("ns", &chain, 0, |_| PAGE_BYTES);
    assert_eq!(reserved.stopped_at, Some(4));
    drop(reserved);
    assert_eq!(store(&cpu, &chain), 4);
    assert_eq!(cpu.longest_prefix("ns", &chain), 4);
    assert_eq!(
        store(&cpu, &chain),
        0,
        "asking again does not evict its own beginning"
    );
    assert_eq!(cpu.longest_prefix("ns", &chain), 4);
    assert_books_balance(&cpu);
}

#[test]
fn a_suffix_is_evicted_before_its_prefix() {
    let cpu = store_of(6);
    let chain = hashes(1..=4);
    for end in 1..=4 {
        store(&cpu, &chain[..end]);
    }
    store(&cpu, &hashes(50..54));
    assert_eq!(cpu.longest_prefix("ns", &chain), 2);
}

#[test]
fn under_every_policy_a_store_takes_its_room_from_suffixes_and_the_books_balance() {
    for policy in Policy::ALL {
        let cpu = LocalCpu::with_policy(16 * PAGE, LEASE, policy).expect("a few pages");
        for round in 0..200u8 {
            let first = round % 9 * 20;
            let chain = hashes(first..first + 1 + round % 7);
            store(&cpu, &chain);
            if round % 3 == 0 {
                assert!(cpu.lookup("r", "ns", &chain).num_chunks > 0, "{policy:?}");
            }
            for first in (0..180).step_by(20) {
                let chain = hashes(first..first + 7);
                let prefix = cpu.get("ns", &chain).len();
                let anywhere = chain
                    .iter()
                    .filter(|hash| !cpu.get("ns", &[**hash]).is_empty());
                assert_eq!(anywhere.count(), prefix, "{policy:?}, round {round}");
            }
        }
        cpu.release("r");
        assert_books_balance(&cpu);
    }
}

#[test]
fn who_asks_again_while_it_waits_counts_once() {
    let cpu = LocalCpu::with_policy(4 * PAGE, LEASE, Policy::Lfu).expect("a few pages");
    let (often, rarely) = (hashes([1]), hashes([2]));
    store(&cpu, &often);
    store(&cpu, &rarely);
    for request in ["a", "b"] {
        cpu.lookup(request, "ns", &often);
        cpu.release(request);
    }
    for _ in 0..5 {
        cpu.lookup("c", "ns", &rarely);
    }
    cpu.release("c");
    store(&cpu, &hashes([3, 4]));
    cpu.lookup("d", "ns", &hashes([3, 4]));
    cpu.lookup("e", "ns", &hashes([3, 4]));
    cpu.release("d");
    cpu.release("e");
    store(&cpu, &hashes([5]));
    assert_eq!(cpu.longest_prefix("ns", &rarely), 0);
    assert_eq!(cpu.longest_prefix("ns", &often), 1);
}

#[test]
fn evict_skips_leased_chunks() {
    let cpu = store_of(4);
    let old = hashes([1, 2]);
    store(&cpu, &old);
    assert_eq!(cpu.lookup("r", "ns", &old).num_chunks, 2);
    assert_eq!(
        store(&cpu, &hashes(10..14)),
        2,
        "only what is not leased makes room"
    );
    assert_eq!(cpu.longest_prefix("ns", &old), 2);
    let held = cpu.take("r", "ns", &old);
    assert_eq!(store(&cpu, &hashes(20..24)), 2);
    assert!(held[0].bytes().iter().all(|&byte| byte == 1));
    drop(held);
    assert_eq!(store(&cpu, &hashes(30..34)), 4);
    assert_books_balance(&cpu);
}

#[test]
fn a_repeated_lookup_renews_and_never_stacks() {
    let cpu = store_of(8);
    let chain = hashes(1..=3);
    store(&cpu, &chain);
    for _ in 0..5 {
        assert_eq!(cpu.lookup("r", "ns", &chain).num_chunks, 3);
    }
    assert_eq!(cpu.audit().num_leases, 1);
    assert!(cpu.release("r"));
    assert!(!cpu.release("r"));
    assert_books_balance(&cpu);
}

#[test]
fn waiting_requests_hold_at_most_half_of_the_pool() {
    let cpu = store_of(8);
    let (a, b) = (hashes(1..=3), hashes(11..=13));
    store(&cpu, &a);
    store(&cpu, &b);
    assert_eq!(cpu.lookup("a", "ns", &a).num_chunks, 3);
    assert_eq!(
        cpu.lookup("a2", "ns", &a).num_chunks,
        3,
        "what is held already costs nothing"
    );
    assert_eq!(cpu.lookup("b", "ns", &b).num_chunks, 1);
    cpu.release("a");
    assert_eq!(
        cpu.lookup("b", "ns", &b).num_chunks,
        1,
        "a2 holds the same chunks still"
    );
    cpu.release("a2");
    assert_eq!(cpu.lookup("b", "ns", &b).num_chunks, 3);
    cpu.release("b");
    assert_books_balance(&cpu);
}

#[test]
fn a_pool_of_one_chunk_still_answers() {
    let cpu = store_of(1);
    let chain = hashes([1]);
    store(&cpu, &chain);
    assert_eq!(cpu.lookup("r", "ns", &chain).num_chunks, 1);
}

fn shared_store_of(pages: u64, num_readers: u32) -> LocalCpu {
    LocalCpu::shared(pages * PAGE, LEASE, Policy::default(), num_readers).expect("a few pages")
}

#[test]
fn a_lease_that_others_read_is_held_until_the_last_has_taken_its_share() {
    let cpu = shared_store_of(8, 2);
    let chain = hashes(1..=4);
    store(&cpu, &chain);
    assert_eq!(cpu.lookup("r", "ns", &chain).num_chunks, 4);
    for num_leases in [1, 1, 0] {
        assert_eq!(cpu.take("r", "ns", &chain).len(), 4);
        assert_eq!(cpu.audit().num_leases, num_leases);
        // Whatever is not leased makes room.
        let reserved = cpu.reserve("ns", &hashes(100..108), 0, |_| PAGE_BYTES);
        assert_eq!(reserved.chunks.len(), if num_leases > 0 { 4 } else { 8 });
    }
    assert_books_balance(&cpu);
}

#[test]
fn a_released_lease_ends_whoever_has_not_taken_its_share() {
    let cpu = shared_store_of(4, 1);
    let chain = hashes(1..=2);
    store(&cpu, &chain);
    cpu.lookup("r", "ns", &chain);
    drop(cpu.take("r", "ns", &chain));
    assert!(cpu.release("r"));
    assert_books_balance(&cpu);
    // Asked anew, it has all its shares again.
    cpu.lookup("r", "ns", &chain);
    drop(cpu.take("r", "ns", &chain));
    assert_eq!(cpu.audit().num_leases, 1);
    drop(cpu.take("r", "ns", &chain));
    assert_books_balance(&cpu);
}

#[test]
fn a_part_of_a_chain_is_taken_out_of_its_lease_even_when_it_is_found_no_more() {
    let cpu = shared_store_of(8, 1);
    let chain = hashes(1..=4);
    store(&cpu, &chain);
    cpu.lookup("r", "ns", &chain);
    cpu.clear();
    let part = cpu.take_part(&chain[2..], "r", "ns");
    let firsts: Vec<u8> = part.iter().map(|object| object.bytes()[0]).collect();
    assert_eq!(firsts, [3, 4]);
    assert_eq!(
        cpu.take_part(&hashes([9]), "r", "ns").len(),
        0,
        "no part of it"
    );
    assert_eq!(
        cpu.take("r", "ns", &chain).len(),
        0,
        "both shares are taken"
    );
    drop(part);
    assert_books_balance(&cpu);
}

#[test]
fn only_a_pool_that_others_read_can_be_mapped_and_only_while_it_is_open() {
    assert!(store_of(2).descriptor().is_none());
    assert!(shared_store_of(2, 0).descriptor().is_none());
    let cpu = shared_store_of(2, 1);
    assert!(cpu.descriptor().is_some());
    cpu.close();
    assert!(cpu.descriptor().is_none());
}

#[test]
fn leases_end_by_themselves() {
    let cpu = LocalCpu::new(4 * PAGE, Duration::from_millis(20)).expect("pages");
    let chain = hashes([1, 2]);
    store(&cpu, &chain);
    let hit = cpu.lookup("gone", "ns", &chain);
    assert_eq!((hit.num_chunks, hit.lease), (2, Duration::from_millis(20)));
    let deadline = Instant::now() + Duration::from_secs(10);
    while cpu.audit().num_leases > 0 {
        assert!(Instant::now() < deadline, "the lease outlives its deadline");
    }
    assert_eq!(store(&cpu, &hashes(10..14)), 4);
    assert_books_balance(&cpu);
}

#[test]
fn a_large_chunk_evicts_as_many_small_ones_as_it_needs_or_none() {
    let cpu = store_of(8);
    store(&cpu, &hashes(1..=8));
    let held = cpu.take("none", "ns", &hashes([4]));
    let large = hashes([99]);
    let reserved = cpu.reserve("ns", &large, 0, |_| 5 * PAGE_BYTES);
    assert_eq!(
        reserved.stopped_at,
        Some(0),
        "no five pages in a row without the held one"
    );
    assert_eq!(cpu.audit().num_chunks, 8, "nothing was evicted in vain");
    drop((held, reserved));
    let reserved = cpu.reserve("ns", &large, 0, |_| 5 * PAGE_BYTES);
    assert_eq!(reserved.chunks.len(), 1);
    let chunks: Vec<_> = reserved
        .chunks
        .into_iter()
        .map(|(_, chunk)| chunk)
        .collect();
    cpu.commit("ns", &large, chunks);
    assert_books_balance(&cpu);
}

#[test]
fn handles_outlive_a_clear_and_their_bytes_come_back() {
    let cpu = store_of(4);
    let chain = hashes([7]);
    store(&cpu, &chain);
    let held = cpu.take("none", "ns", &chain);
    assert_eq!(cpu.clear(), 1);
    assert_eq!(store(&cpu, &hashes(20..24)), 3);
    assert!(held[0].bytes().iter().all(|&byte| byte == 7));
    drop(held);
    assert_books_balance(&cpu);
}

#[test]
fn a_closed_store_takes_and_gives_nothing() {
    let cpu = store_of(4);
    let chain = hashes([1, 2]);
    store(&cpu, &chain);
    cpu.lookup("r", "ns", &chain);
    let reserved = cpu.reserve("ns", &hashes([5]), 0, |_| PAGE_BYTES);
    cpu.close();
    cpu.close();
    let chunks: Vec<_> = reserved
        .chunks
        .into_iter()
        .map(|(_, chunk)| chunk)
        .collect();
    cpu.commit("ns", &hashes([5]), chunks);
    assert_eq!(store(&cpu, &chain), 0);
    assert_eq!(cpu.lookup("r", "ns", &chain).num_chunks, 0);
    assert!(cpu.allocate(&[1]).is_none());
    assert_books_balance(&cpu);
}

#[test]
fn allocate_is_all_or_none_and_put_of_a_known_key_keeps_the_first() {
    let cpu = store_of(4);
    assert!(cpu.allocate(&[PAGE_BYTES; 5]).is_none());
    let mut chunks = cpu.allocate(&[PAGE_BYTES; 2]).expect("room");
    let hash = hashes([9])[0];
    for (value, mut chunk) in chunks.drain(..).enumerate() {
        chunk.bytes_mut().fill(value as u8);
        let stored = cpu.put("ns", hash, chunk).expect("its own memory");
        assert_eq!(stored, value == 0);
    }
    assert!(
        cpu.take("none", "ns", &[hash])[0]
            .bytes()
            .iter()
            .all(|&byte| byte == 0)
    );
    assert_books_balance(&cpu);
}

#[test]
fn many_namespaces_do_not_pile_up_and_never_mix() {
    let cpu = store_of(4);
    let chain = hashes([1]);
    store(&cpu, &chain);
    for tenant in 0..10_000 {
        let chunk = cpu.allocate(&[1]).expect("evicts");
        let name = format!("tenant{tenant}");
        let chunk = chunk.into_iter().next().expect("one");
        assert!(cpu.put(&name, chain[0], chunk).expect("its own memory"));
        assert_eq!(cpu.longest_prefix(&name, &chain), 1);
    }
    assert_eq!(cpu.longest_prefix("tenant0", &chain), 0);
    assert_books_balance(&cpu);
}

#[test]
fn sixteen_threads_lose_no_byte_and_read_no_torn_one() {
    let cpu = store_of(32);
    std::thread::scope(|scope| {
        for thread in 0..16u8 {
            let cpu = cpu.clone();
            scope.spawn(move || {
                for round in 0..400usize {
                    let first = ((usize::from(thread) * 7 + round * 5) % 60) as u8;
                    let chain = hashes(first..first + 4);
                    let id = format!("{thread}");
                    store(&cpu, &chain);
                    let found = cpu.lookup(&id, "ns", &chain).num_chunks;
                    let objects = cpu.take(&id, "ns", &chain[..found]);
                    assert_eq!(
                        objects.len(),
                        found,
                        "a positive lookup holds until it is taken"
                    );
                    for (object, hash) in objects.iter().zip(&chain) {
                        assert!(object.bytes().iter().all(|&byte| byte == hash.0[0]));
                    }
                }
            });
        }
    });
    assert_books_balance(&cpu);
}

#[test]
fn a_refused_allocation_evicts_nothing() {
    let cpu = store_of(4);
    let chain = hashes(1..=4);
    store(&cpu, &chain);
    assert!(cpu.allocate(&[PAGE_BYTES; 5]).is_none());
    assert!(cpu.allocate(&[PAGE_BYTES, usize::MAX]).is_none());
    let held = cpu.take("none", "ns", &hashes([3]));
    assert!(cpu.allocate(&[PAGE_BYTES; 4]).is_none());
    assert!(cpu.allocate(&[PAGE_BYTES, 3 * PAGE_BYTES]).is_none());
    assert_eq!(cpu.longest_prefix("ns", &chain), 4);
    assert_eq!(cpu.audit().evicted_chunks, 0);
    drop(held);
    for (object, hash) in cpu.get("ns", &chain).iter().zip(&chain) {
        assert!(object.bytes().iter().all(|&byte| byte == hash.0[0]));
    }
    assert_books_balance(&cpu);
    assert_eq!(cpu.allocate(&[PAGE_BYTES; 4]).map(|all| all.len()), Some(4));
    assert_books_balance(&cpu);
}

#[test]
fn chunks_that_are_not_asked_for_need_not_be_there() {
    let cpu = store_of(8);
    let chain = hashes(1..=4);
    store(&cpu, &chain);
    cpu.lookup("r", "ns", &chain);
    cpu.remove("ns", chain[3]);
    let leased = cpu.take_from(2, "r", "ns", &chain);
    let firsts: Vec<u8> = leased.iter().map(|object| object.bytes()[0]).collect();
    assert_eq!(firsts, [3, 4], "the lease holds the last one still");
    cpu.remove("ns", chain[0]);
    assert_eq!(cpu.take_from(1, "r", "ns", &chain).len(), 2);
    assert_eq!(cpu.take("r", "ns", &chain).len(), 0);
}

#[test]
fn strangers_cannot_make_leases_grow_without_end() {
    let cpu = store_of(8);
    let chain = hashes([1, 2]);
    store(&cpu, &chain);
    cpu.lookup("first", "ns", &chain);
    let repeated = vec![chain[0]; 100_000];
    assert!(cpu.lookup("r", "ns", &repeated).num_chunks <= 2);
    for id in 0..20_000 {
        cpu.lookup(&id.to_string(), "ns", &chain);
    }
    assert_eq!(cpu.audit().num_leases, 16_384);
    assert_eq!(cpu.lookup("late", "ns", &chain).num_chunks, 0);
    assert_eq!(cpu.lookup("first", "ns", &chain).num_chunks, 2, "renewed");
    cpu.release("r");
    assert_eq!(cpu.lookup("late", "ns", &chain).num_chunks, 2);
    assert_eq!(cpu.longest_prefix("ns", &repeated), 2);
}

#[test]
fn memory_of_another_pool_is_refused_at_every_door() {
    let (cpu, other) = (store_of(4), store_of(4));
    let chain = hashes([1]);
    let foreign = other.allocate(&[PAGE_BYTES]).expect("room").remove(0);
    let refused = cpu.put("ns", chain[0], foreign);
    assert!(matches!(refused, Err(MemoryError::ForeignMemory)));
    let reserved = other.reserve("ns", &chain, 0, |_| PAGE_BYTES);
    let chunks = reserved.chunks.into_iter().map(|(_, chunk)| chunk);
    cpu.commit("ns", &chain, chunks.collect());
    for pool in [&cpu, &other] {
        assert_eq!(pool.longest_prefix("ns", &chain), 0);
        assert_books_balance(pool);
    }
    assert_eq!(
        store(&cpu, &hashes(1..=4)),
        4,
        "every byte of it is its own"
    );
}

#[test]
fn a_reserved_chunk_may_be_put_under_a_key_of_its_own() {
    let cpu = store_of(4);
    let chain = hashes([1, 2]);
    let mut reserved = cpu.reserve("ns", &chain[..1], 0, |_| PAGE_BYTES);
    let (_, chunk) = reserved.chunks.remove(0);
    assert!(cpu.put("ns", chain[1], chunk).expect("its own memory"));
    assert_eq!(cpu.longest_prefix("ns", &chain[1..]), 1);
    assert_eq!(store(&cpu, &chain), 1);
    assert_books_balance(&cpu);
}

#[test]
fn a_close_gives_the_memory_back_though_handles_of_the_store_live() {
    let cpu = store_of(4);
    let (clone, chain) = (cpu.clone(), hashes([1]));
    store(&cpu, &chain);
    let held = cpu.get("ns", &chain);
    cpu.close();
    assert!(held[0].bytes().iter().all(|&byte| byte == 1), "still read");
    assert!(cpu.0.bank.upgrade().is_some());
    drop(held);
    assert!(cpu.0.bank.upgrade().is_none());
    assert_books_balance(&clone);
}

#[test]
fn a_panic_in_the_books_closes_the_store_and_harms_nobody() {
    let cpu = store_of(4);
    let chain = hashes([1, 2]);
    store(&cpu, &chain);
    cpu.lookup("r", "ns", &chain);
    let held = cpu.get("ns", &chain);
    let reserved = cpu.reserve("ns", &hashes([3]), 0, |_| PAGE_BYTES);
    let panics = || cpu.reserve("ns", &hashes([4]), 0, |_| panic!("in the books"));
    assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(panics)).is_err());
    drop(reserved);
    assert_eq!(cpu.longest_prefix("ns", &chain), 0);
    assert_eq!(cpu.lookup("r", "ns", &chain).num_chunks, 0);
    assert!(cpu.get("ns", &chain).is_empty());
    assert!(cpu.take("r", "ns", &chain).is_empty());
    assert_eq!(store(&cpu, &chain), 0);
    assert!(cpu.allocate(&[1]).is_none());
    assert!(!cpu.remove("ns", chain[0]));
    assert_eq!(cpu.clear(), 0);
    assert!(held[1].bytes().iter().all(|&byte| byte == 2));
    cpu.audit();
    drop(held);
    cpu.close();
    assert!(cpu.0.bank.upgrade().is_none(), "the memory is given back");
}

/// One chunk under each of these namespaces.
fn store_under(cpu: &LocalCpu, namespaces: &[&str]) {
    let hash = hashes([1]);
    for namespace in namespaces {
        let reserved = cpu.reserve(namespace, &hash, 0, |_| PAGE_BYTES);
        let chunks = reserved.chunks.into_iter().map(|(_, chunk)| chunk);
        cpu.commit(namespace, &hash, chunks.collect());
    }
}

fn stored_among<'a>(cpu: &LocalCpu, namespaces: &[&'a str]) -> Vec<&'a str> {
    let hash = hashes([1]);
    let is_stored = |namespace: &&&str| cpu.longest_prefix(namespace, &hash) == 1;
    namespaces.iter().filter(is_stored).copied().collect()
}

const TENANTS: [&str; 5] = [
    "model=a@tag.t=s:x",
    "model=a@tag.t=s:y",
    "model=a",
    "model=ab@tag.t=s:x",
    "model=b",
];

#[test]
fn a_prefix_is_cleared_at_field_boundaries_and_nothing_else() {
    for (prefix, left) in [
        ("model=a", &TENANTS[3..]),
        ("model=a@tag.t=s:x", &TENANTS[1..]),
        ("model=", &TENANTS[..]),
        ("model=c", &TENANTS[..]),
        ("", &[]),
    ] {
        let cpu = store_of(8);
        store_under(&cpu, &TENANTS);
        assert_eq!(cpu.clear_prefix(prefix), 5 - left.len(), "{prefix}");
        assert_eq!(stored_among(&cpu, &TENANTS), left, "{prefix}");
        assert_books_balance(&cpu);
        store_under(&cpu, &TENANTS);
        assert_eq!(stored_among(&cpu, &TENANTS), TENANTS, "and stored again");
    }
}

#[test]
fn all_but_a_prefix_is_removed() {
    for (prefix, left) in [
        ("model=a", &TENANTS[..3]),
        ("model=c", &[]),
        ("", &TENANTS[..]),
    ] {
        let cpu = store_of(8);
        store_under(&cpu, &TENANTS);
        assert_eq!(cpu.retain_prefix(prefix), 5 - left.len(), "{prefix}");
        assert_eq!(stored_among(&cpu, &TENANTS), left, "{prefix}");
        assert_books_balance(&cpu);
    }
}

#[test]
fn what_a_clear_removes_stays_for_its_holders_and_is_found_no_more() {
    let cpu = store_of(8);
    store(&cpu, &hashes(1..=2));
    let held = cpu.get("ns", &hashes([1]));
    assert_eq!(cpu.lookup("r", "ns", &hashes(1..=2)).num_chunks, 2);
    let being_written = cpu.reserve("ns", &hashes([3]), 0, |_| PAGE_BYTES);
    assert_eq!(
        cpu.clear_prefix("ns"),
        2,
        "what is being written is not there yet"
    );
    assert_eq!(cpu.longest_prefix("ns", &hashes([1])), 0);
    assert_eq!(cpu.audit().cached_bytes, 0);
    assert_eq!(cpu.audit().free_bytes, 5 * PAGE, "three are held");
    assert!(held[0].bytes().iter().all(|&byte| byte == 1));
    assert_eq!(
        cpu.take("r", "ns", &hashes(1..=2)).len(),
        2,
        "a promise is kept"
    );
    drop((held, being_written));
    assert_books_balance(&cpu);
}

#[test]
fn what_was_read_before_a_clear_is_not_published_after_it() {
    type Clear = fn(&LocalCpu) -> usize;
    let close: Clear = |cpu| {
        cpu.close();
        0
    };
    let clears: [(Clear, bool); 6] = [
        (close, false),
        (LocalCpu::clear, false),
        (|cpu| cpu.clear_prefix("ns"), false),
        (|cpu| cpu.retain_prefix("other"), false),
        (|cpu| cpu.clear_prefix("other"), true),
        (|cpu| cpu.retain_prefix("ns"), true),
    ];
    for (number, (clear, stays)) in clears.into_iter().enumerate() {
        let cpu = store_of(8);
        let chain = hashes(1..=2);
        let write = |between: &dyn Fn()| {
            let reserved = cpu.reserve("ns", &chain, 0, |_| PAGE_BYTES).chunks;
            between();
            let chunks = reserved.into_iter().map(|(_, chunk)| chunk);
            cpu.commit("ns", &chain, chunks.collect())
        };
        let published = write(&|| assert_eq!(clear(&cpu), 0));
        assert_eq!(published, stays, "{number}");
        assert_eq!(cpu.longest_prefix("ns", &chain), if stays { 2 } else { 0 });
        assert_books_balance(&cpu);
        cpu.clear();
        if number > 0 {
            assert!(write(&|| ()), "what is read after it is");
            assert_eq!(cpu.longest_prefix("ns", &chain), 2);
        }
    }
}

#[test]
fn positions_stay_with_their_chunk() {
    let cpu = store_of(8);
    let (one, two) = (hashes([1])[0], hashes([2])[0]);
    let mut chunks = cpu.allocate(&[PAGE_BYTES, PAGE_BYTES]).expect("room");
    chunks[0].set_positions(vec![7, -1, i64::MAX].into());
    for (hash, chunk) in [one, two].into_iter().zip(chunks) {
        cpu.put("ns", hash, chunk).expect("its own memory");
    }
    let objects = cpu.get("ns", &[one, two]);
    assert_eq!(objects[0].positions(), Some(&[7, -1, i64::MAX][..]));
    assert_eq!(objects[1].positions(), None);
    drop(objects);
    assert_books_balance(&cpu);
}

#[test]
fn a_put_hands_back_what_its_key_holds() {
    let cpu = store_of(8);
    let filled = |byte: u8| {
        let mut chunk = cpu.allocate(&[PAGE_BYTES]).expect("room").remove(0);
        chunk.bytes_mut().fill(byte);
        chunk
    };
    let put = |hash, chunk| cpu.put_and_hold("ns", hash, chunk).expect("its own memory");
    let (one, two) = (hashes([1])[0], hashes([2])[0]);
    let (stored, object) = put(one, filled(1));
    assert!(stored && object.is_some_and(|object| object.bytes()[0] == 1));
    let (stored, object) = put(one, filled(2));
    assert!(!stored && object.is_some_and(|object| object.bytes()[0] == 1));
    let reserved = cpu.reserve("ns", &[two], 0, |_| PAGE_BYTES);
    let (stored, object) = put(two, filled(3));
    assert!(!stored && object.is_some_and(|object| object.bytes()[0] == 3));
    drop(reserved);
    assert_eq!(cpu.longest_prefix("ns", &[two]), 0);
    let chunk = filled(4);
    cpu.close();
    assert!(matches!(put(two, chunk), (false, None)));
}
