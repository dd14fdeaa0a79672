use std::collections::{HashMap, HashSet};

use super::model::Model;
use super::*;

const NS: NamespaceId = NamespaceId(0);

fn hash(number: u16) -> ChunkHash {
    let mut bytes = [0; 32];
    let spread = (u64::from(number) + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    bytes[..8].copy_from_slice(&spread.to_le_bytes());
    ChunkHash(bytes)
}

fn hashes(ids: &[u16]) -> Vec<ChunkHash> {
    ids.iter().map(|&id| hash(id)).collect()
}

fn key(number: u16) -> IndexKey {
    IndexKey {
        namespace: NS,
        hash: hash(number),
    }
}

fn put(cache: &mut HotCache<u16>, id: u16) {
    if let Reserve::New(reservation) = cache.reserve(key(id)) {
        cache.publish(reservation, id);
    }
}

/// What a store does with a chain, less its evictions.
fn store(cache: &mut HotCache<u16>, chain: &[u16]) {
    cache.touch(NS, &hashes(chain));
    for &id in chain {
        put(cache, id);
    }
    cache.touch(NS, &hashes(chain));
}

fn lookup(cache: &mut HotCache<u16>, chain: &[u16]) -> usize {
    cache.longest_prefix(NS, &hashes(chain), Access::Use, |values| values.len())
}

fn evict(cache: &mut HotCache<u16>) -> Option<u16> {
    cache.evict(|_| true).map(|victim| victim.value)
}

fn drain(cache: &mut HotCache<u16>) -> Vec<u16> {
    cache.begin_batch();
    std::iter::from_fn(|| evict(cache)).collect()
}

fn cache_of(policy: Policy, ids: impl IntoIterator<Item = u16>) -> HotCache<u16> {
    let mut cache = HotCache::new(policy);
    for id in ids {
        put(&mut cache, id);
    }
    cache.begin_batch();
    cache
}

/// xorshift: the same steps on every machine.
struct Dice(u64);

impl Dice {
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as usize % limit
    }
}

#[test]
fn lru_lets_the_oldest_go_first_and_a_put_of_a_known_key_refreshes() {
    let mut cache = cache_of(Policy::Lru, [1, 2, 3]);
    assert_eq!(cache.reserve(key(1)), Reserve::Resident);
    assert_eq!(drain(&mut cache), [2, 3, 1]);
}

#[test]
fn fifo_is_moved_by_no_use_and_no_second_put() {
    let mut cache = cache_of(Policy::Fifo, [1, 2, 3]);
    cache.touch(NS, &hashes(&[1]));
    cache.begin_batch();
    lookup(&mut cache, &[2]);
    assert_eq!(cache.reserve(key(1)), Reserve::Resident);
    store(&mut cache, &[2]);
    // 1 was put alone, so its first touch still gave it its place.
    assert_eq!(drain(&mut cache), [3, 1, 2]);
    let mut cache = cache_of(Policy::Fifo, []);
    store(&mut cache, &[1]);
    store(&mut cache, &[2]);
    lookup(&mut cache, &[1]);
    store(&mut cache, &[1]);
    assert_eq!(drain(&mut cache), [1, 2]);
}

#[test]
fn lfu_lets_the_least_used_go_first_and_a_store_is_no_use() {
    let mut cache = cache_of(Policy::Lfu, [1, 2, 3]);
    lookup(&mut cache, &[1]);
    lookup(&mut cache, &[1]);
    lookup(&mut cache, &[2]);
    for _ in 0..5 {
        store(&mut cache, &[3]);
        cache.longest_prefix(NS, &hashes(&[3]), Access::Refresh, |values| values.len());
    }
    assert_eq!(drain(&mut cache), [3, 2, 1]);
}

#[test]
fn lfu_forgets_what_was_popular_once() {
    let mut cache = cache_of(Policy::Lfu, [1, 2]);
    for _ in 0..1000 {
        lookup(&mut cache, &[1]);
    }
    for id in 100..5000 {
        cache.begin_batch();
        put(&mut cache, id);
        for _ in 0..3 {
            lookup(&mut cache, &[id]);
        }
        cache.begin_batch();
        if cache.num_resident() > 3 {
            evict(&mut cache);
        }
    }
    assert!(cache.peek(&key(1)).is_none());
}

#[test]
fn mru_lets_the_newest_go_first() {
    let mut cache = cache_of(Policy::Mru, [1, 2, 3]);
    lookup(&mut cache, &[2]);
    assert_eq!(drain(&mut cache), [2, 3, 1]);
}

#[test]
fn s3_fifo_and_arc_keep_what_was_used_through_a_scan() {
    for policy in [Policy::S3Fifo, Policy::Arc] {
        let mut cache = cache_of(policy, 0..20);
        for id in 0..20 {
            lookup(&mut cache, &[id]);
        }
        for id in 100..2000 {
            cache.begin_batch();
            put(&mut cache, id);
            cache.begin_batch();
            evict(&mut cache);
        }
        let kept = (0..20).filter(|&id| cache.peek(&key(id)).is_some()).count();
        assert!(kept >= 18, "{policy:?} keeps {kept} of 20");
    }
}

#[test]
fn s3_fifo_and_arc_remember_what_they_evicted() {
    for policy in [Policy::S3Fifo, Policy::Arc] {
        let mut cache = cache_of(policy, 0..10);
        let victim = evict(&mut cache).expect("one of ten");
        cache.begin_batch();
        put(&mut cache, victim);
        for id in 100..105 {
            put(&mut cache, id);
        }
        let order = drain(&mut cache);
        // Behind all others but the one that S3-FIFO's small queue keeps.
        assert!(
            order[order.len() - 2..].contains(&victim),
            "{policy:?}: {order:?}"
        );
    }
}

#[test]
fn a_fresh_entry_is_not_the_next_to_leave() {
    for policy in Policy::ALL {
        let mut dice = Dice(7);
        let mut cache = cache_of(policy, 0..12);
        for id in 100..1100 {
            for _ in 0..dice.below(4) {
                let residents: Vec<u16> = cache.residents().map(|(_, id)| *id).collect();
                lookup(&mut cache, &[residents[dice.below(residents.len())]]);
            }
            cache.begin_batch();
            put(&mut cache, id);
            cache.begin_batch();
            let victim = evict(&mut cache).expect("thirteen entries");
            assert_eq!(
                victim == id,
                policy == Policy::Mru,
                "{policy:?} evicts {victim}"
            );
        }
    }
}

#[test]
fn pending_entries_are_neither_hits_nor_victims() {
    for policy in Policy::ALL {
        let mut cache = cache_of(policy, []);
        let Reserve::New(reservation) = cache.reserve(key(1)) else {
            panic!("new")
        };
        assert_eq!(cache.reserve(key(1)), Reserve::Pending);
        assert_eq!(lookup(&mut cache, &[1]), 0);
        assert_eq!(cache.peek(&key(1)), None);
        cache.begin_batch();
        assert_eq!(evict(&mut cache), None);
        cache.publish(reservation, 1);
        assert_eq!(lookup(&mut cache, &[1]), 1);
    }
}

#[test]
fn an_abandoned_entry_was_never_there() {
    let mut cache = cache_of(Policy::Lru, []);
    let Reserve::New(reservation) = cache.reserve(key(1)) else {
        panic!("new")
    };
    cache.abandon(reservation);
    assert!(cache.is_empty());
    assert!(matches!(cache.reserve(key(1)), Reserve::New(_)));
}

#[test]
fn a_batch_never_evicts_what_it_touched() {
    for policy in Policy::ALL {
        let mut cache = cache_of(policy, [1, 2, 3]);
        cache.touch(NS, &hashes(&[2, 3]));
        assert_eq!(evict(&mut cache), Some(1), "{policy:?}");
        assert_eq!(evict(&mut cache), None, "{policy:?}");
        cache.begin_batch();
        assert_eq!(evict(&mut cache), Some(3), "{policy:?}");
    }
}

#[test]
fn namespaces_are_apart() {
    let mut cache = cache_of(Policy::Lru, [1]);
    let found = cache.longest_prefix(NamespaceId(1), &hashes(&[1]), Access::Use, |values| {
        values.len()
    });
    assert_eq!(found, 0);
}

#[test]
fn a_prefix_ends_at_its_first_gap_however_long_it_is() {
    let chain: Vec<u16> = (0..3 * PROBES as u16 + 1).collect();
    for gap in [0, 1, PROBES - 1, PROBES, PROBES + 1, 2 * PROBES, 3 * PROBES] {
        let mut cache = cache_of(Policy::Lru, chain.clone());
        cache.remove(&key(gap as u16));
        assert_eq!(lookup(&mut cache, &chain), gap);
        let Reserve::New(reservation) = cache.reserve(key(gap as u16)) else {
            panic!("it was removed")
        };
        assert_eq!(lookup(&mut cache, &chain), gap, "Pending is not found");
        cache.publish(reservation, gap as u16);
        assert_eq!(lookup(&mut cache, &chain), chain.len());
    }
}

#[test]
fn keys_that_begin_alike_are_told_apart() {
    let mut cache: HotCache<u16> = HotCache::new(Policy::Lru);
    let alike: Vec<ChunkHash> = (0..40)
        .map(|end| {
            let mut bytes = [7; 32];
            bytes[31] = end;
            ChunkHash(bytes)
        })
        .collect();
    for (id, &hash) in alike.iter().enumerate() {
        let reserved = cache.reserve(IndexKey {
            namespace: NS,
            hash,
        });
        let Reserve::New(reservation) = reserved else {
            panic!("{id} is new")
        };
        cache.publish(reservation, id as u16);
    }
    let mut found = Vec::new();
    cache.longest_prefix(NS, &alike, Access::Use, |values| {
        found.extend(values.copied());
        found.len()
    });
    assert!(found.iter().copied().eq(0..40), "{found:?}");
}

#[test]
fn leased_entries_at_the_old_end_are_set_aside_and_come_back() {
    for policy in Policy::ALL {
        // MRU's old end is what was stored last.
        let leased = if policy == Policy::Mru {
            100..200
        } else {
            0..100
        };
        let mut cache = cache_of(policy, 0..200);
        let mut asked = 0;
        for _ in 0..100 {
            let victim = cache.evict(|id| {
                asked += 1;
                !leased.contains(id)
            });
            assert!(!leased.contains(&victim.expect("a hundred are free").value));
        }
        assert!(
            asked <= 100 + 100 * (1 + HELD_PROBES),
            "{policy:?}: {asked} questions for 100 victims"
        );
        let chosen = leased.start + 57;
        let victim = cache.evict(|id| *id == chosen).map(|victim| victim.value);
        assert_eq!(victim, Some(chosen), "{policy:?}");
    }
}

#[test]
fn a_held_chain_that_was_let_go_of_leaves_suffix_first() {
    for policy in Policy::ALL {
        let mut cache: HotCache<u16> = HotCache::new(policy);
        let chain: Vec<u16> = (0..9).collect();
        let others = 100..140;
        if policy == Policy::Mru {
            others.clone().for_each(|id| store(&mut cache, &[id]));
        }
        store(&mut cache, &chain);
        if policy != Policy::Mru {
            others.for_each(|id| store(&mut cache, &[id]));
        }
        cache.begin_batch();
        // The last of these asks in the middle of the chain.
        for _ in 0..5 {
            let victim = cache.evict(|id| *id >= 100);
            assert!(victim.expect("forty are free").value >= 100);
        }
        let order: Vec<u16> = std::iter::from_fn(|| evict(&mut cache))
            .filter(|id| *id < 100)
            .collect();
        assert!(order.is_sorted_by(|a, b| a > b), "{policy:?}: {order:?}");
    }
}

#[test]
fn what_a_batch_touched_is_passed_over_once_and_not_by_each_eviction() {
    for policy in Policy::ALL {
        let mut cache = cache_of(policy, 0..2000);
        let touched: Vec<u16> = if policy == Policy::Mru {
            (1000..2000).rev().collect()
        } else {
            (0..1000).rev().collect()
        };
        for &id in &touched {
            cache.touch(NS, &hashes(&[id]));
        }
        cache.begin_batch();
        for &id in &touched {
            cache.reserve(key(id));
        }
        for _ in 0..1000 {
            let victim = evict(&mut cache).expect("a thousand are free");
            assert!(!touched.contains(&victim), "{policy:?}");
        }
        assert_eq!(evict(&mut cache), None, "{policy:?}");
    }
}

#[test]
fn restored_victims_leave_again_in_the_same_order() {
    for policy in Policy::ALL {
        let mut cache = cache_of(policy, []);
        for chain in [&[1, 2, 3][..], &[1, 4], &[5, 6, 7], &[8]] {
            cache.begin_batch();
            store(&mut cache, chain);
        }
        lookup(&mut cache, &[5, 6]);
        cache.begin_batch();
        let taken: Vec<_> = std::iter::from_fn(|| cache.evict(|_| true))
            .take(5)
            .collect();
        let order: Vec<u16> = taken.iter().map(|victim| victim.value).collect();
        for victim in taken.into_iter().rev() {
            cache.restore(victim);
        }
        assert_eq!(drain(&mut cache)[..5], order, "{policy:?}");
    }
}

/// Chunks of a forest of prompts: chunk `n > 0` follows chunk `n / 3`, so that chains branch and share.
fn chain_to(last: u16) -> Vec<u16> {
    let mut chain: Vec<u16> =
        std::iter::successors(Some(last), |&at| (at > 2).then_some(at / 3)).collect();
    chain.reverse();
    chain
}

#[test]
fn a_prefix_outlives_its_suffix_under_every_policy() {
    for policy in Policy::ALL {
        let mut dice = Dice(11);
        let mut cache: HotCache<u16> = HotCache::new(policy);
        let mut removed = 0;
        for step in 0..60_000 {
            let chain = chain_to(1 + dice.below(400) as u16);
            match dice.below(10) {
                0..=3 => {
                    cache.begin_batch();
                    cache.touch(NS, &hashes(&chain));
                    // As much room as the store finds by evicting, chunk by chunk.
                    let mut reservations = Vec::new();
                    for &id in &chain {
                        if let Reserve::New(reservation) = cache.reserve(key(id)) {
                            if cache.len() > 60 && evict_checked(&mut cache, policy, step).is_none()
                            {
                                cache.abandon(reservation);
                                break;
                            }
                            reservations.push((reservation, id));
                        }
                    }
                    for (reservation, id) in reservations {
                        cache.publish(reservation, id);
                    }
                    cache.touch(NS, &hashes(&chain));
                }
                4..=7 => {
                    let access = [Access::Use, Access::Refresh][usize::from(dice.below(4) == 0)];
                    cache.longest_prefix(NS, &hashes(&chain), access, |values| values.len());
                }
                8 => {
                    cache.begin_batch();
                    for _ in 0..dice.below(4) {
                        removed += usize::from(evict_checked(&mut cache, policy, step).is_some());
                    }
                }
                _ => {
                    cache.begin_batch();
                    let victims: Vec<_> = (0..3).filter_map(|_| cache.evict(|_| true)).collect();
                    for victim in victims.into_iter().rev() {
                        cache.restore(victim);
                    }
                }
            }
        }
        assert!(removed > 1000, "{policy:?} evicted {removed} only");
    }
}

fn evict_checked(cache: &mut HotCache<u16>, policy: Policy, step: usize) -> Option<u16> {
    let victim = evict(cache)?;
    let orphan = cache
        .residents()
        .find(|(_, id)| chain_to(**id).contains(&victim));
    assert!(
        orphan.is_none(),
        "{policy:?}, step {step}: {victim} leaves before {orphan:?}"
    );
    Some(victim)
}

const NUM_STEPS: usize = 1_000_000;

/// One conformance test for all policies: whatever is asked, the index answers as the vectors do.
fn equals_the_naive_model(policy: Policy) {
    let mut dice = Dice(0x5eed + policy as u64);
    let mut cache: HotCache<u16> = HotCache::new(policy);
    let mut model = Model::new(policy);
    let mut leased: HashSet<u16> = HashSet::new();
    let mut pending: HashMap<u16, Reservation> = HashMap::new();
    let mut chain: Vec<u16> = Vec::new();
    let (mut hits, mut victims) = (0, 0);
    for step in 0..NUM_STEPS {
        // Mostly few entries, since rare states are small ones; now and then room for many.
        let room = [6, 20, 40][step / 1000 % 3];
        chain.clear();
        let len = dice.below(6);
        chain.extend((0..len).map(|_| dice.below(48) as u16));
        if dice.below(2) == 0 {
            chain = chain_to(1 + dice.below(47) as u16);
        }
        chain.retain(|id| !pending.contains_key(id));
        let id = dice.below(48) as u16;
        match dice.below(24) {
            0..=5 => {
                store(&mut cache, &chain);
                model.walk(&chain, Access::Refresh);
                chain.iter().for_each(|&id| model.put(id));
                model.walk(&chain, Access::Refresh);
            }
            6 if !pending.contains_key(&id) => {
                put(&mut cache, id);
                model.put(id);
            }
            7..=10 => {
                let access = [Access::Use, Access::Refresh][usize::from(dice.below(5) == 0)];
                let limit = dice.below(8);
                let found = cache.longest_prefix(NS, &hashes(&chain), access, |values| {
                    assert!(values.clone().eq(model.prefix(&chain)), "step {step}");
                    values.len().min(limit)
                });
                let prefix = model.prefix(&chain);
                let prefix = &prefix[..prefix.len().min(limit)];
                assert_eq!(found, prefix.len(), "step {step}");
                model.walk(prefix, access);
                hits += found;
            }
            11 => {
                cache.touch(NS, &hashes(&chain));
                model.walk(&chain, Access::Refresh);
            }
            12 => {
                assert_eq!(
                    cache.remove(&key(id)).is_some(),
                    model.remove(id),
                    "step {step}"
                );
            }
            13 if dice.below(50) == 0 => {
                let kept = dice.below(48) as u16;
                cache.retain(|_, id| *id <= kept, |_, _| ());
                for id in kept + 1..48 {
                    model.remove(id);
                }
            }
            14 if leased.remove(&id) => {}
            14 if leased.len() < 12 => {
                leased.insert(id);
            }
            15 => match pending.remove(&id) {
                Some(reservation) if dice.below(2) == 0 => cache.abandon(reservation),
                Some(reservation) => {
                    cache.publish(reservation, id);
                    model.put(id);
                }
                None => {
                    if let Reserve::New(reservation) = cache.reserve(key(id)) {
                        pending.insert(id, reservation);
                    } else {
                        model.put(id);
                    }
                }
            },
            16 => {
                let wanted = dice.below(5);
                let go = |id: &mut u16| !leased.contains(id);
                let taken: Vec<_> = (0..wanted).map_while(|_| cache.evict(go)).collect();
                let expected: Vec<_> = (0..wanted).map_while(|_| model.evict(&leased)).collect();
                let ids =
                    |victims: &[Victim<u16>]| victims.iter().map(|v| v.value).collect::<Vec<_>>();
                let expected_ids: Vec<u16> = expected.iter().map(|victim| victim.0).collect();
                assert_eq!(ids(&taken), expected_ids, "step {step}");
                taken
                    .into_iter()
                    .rev()
                    .for_each(|victim| cache.restore(victim));
                expected
                    .into_iter()
                    .rev()
                    .for_each(|victim| model.restore(victim));
            }
            17..=19 => {
                cache.begin_batch();
                model.begin_batch();
            }
            _ => {}
        }
        while model.len() > room {
            let victim = cache
                .evict(|id| !leased.contains(id))
                .map(|victim| victim.value);
            assert_eq!(
                victim,
                model.evict(&leased).map(|victim| victim.0),
                "step {step}"
            );
            if victim.is_none() {
                break;
            }
            victims += 1;
        }
        assert_eq!(cache.num_resident(), model.len(), "step {step}");
        assert_eq!(cache.len(), model.len() + pending.len(), "step {step}");
    }
    assert!(
        hits > NUM_STEPS / 20 && victims > NUM_STEPS / 20,
        "{hits} hits, {victims} victims"
    );
}

#[test]
fn lru_equals_the_naive_model() {
    equals_the_naive_model(Policy::Lru);
}

#[test]
fn lfu_equals_the_naive_model() {
    equals_the_naive_model(Policy::Lfu);
}

#[test]
fn fifo_equals_the_naive_model() {
    equals_the_naive_model(Policy::Fifo);
}

#[test]
fn mru_equals_the_naive_model() {
    equals_the_naive_model(Policy::Mru);
}

#[test]
fn s3_fifo_equals_the_naive_model() {
    equals_the_naive_model(Policy::S3Fifo);
}

#[test]
fn arc_equals_the_naive_model() {
    equals_the_naive_model(Policy::Arc);
}

#[test]
fn names_are_read_in_any_case_and_back() {
    for policy in Policy::ALL {
        assert_eq!(Policy::from_name(policy.name()), Some(policy));
        assert_eq!(
            Policy::from_name(&policy.name().to_lowercase()),
            Some(policy)
        );
    }
    assert_eq!(Policy::from_name("2Q"), None);
}

#[test]
fn an_entry_costs_at_most_128_bytes_of_index_with_its_ghost() {
    for policy in Policy::ALL {
        let mut cache: HotCache<std::sync::Arc<()>> = HotCache::new(policy);
        let value = std::sync::Arc::new(());
        let publish = |cache: &mut HotCache<_>, number: u64| {
            let mut bytes = [0; 32];
            bytes[..8].copy_from_slice(&number.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
            let (namespace, hash) = (NS, ChunkHash(bytes));
            if let Reserve::New(reservation) = cache.reserve(IndexKey { namespace, hash }) {
                cache.publish(reservation, value.clone());
            }
        };
        let num_entries = 60_000;
        for number in 1..=num_entries {
            publish(&mut cache, number);
        }
        for number in 1..=num_entries {
            cache.begin_batch();
            assert!(cache.evict(|_| true).is_some());
            publish(&mut cache, num_entries + number);
        }
        let per_entry = cache.heap_bytes() as f64 / num_entries as f64;
        println!("{policy:?}: {per_entry:.1} B of index an entry");
        assert!(per_entry <= 128.0, "{policy:?}: {per_entry}");
    }
}
