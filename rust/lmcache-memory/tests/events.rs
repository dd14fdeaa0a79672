//! Whoever replays the events has exactly the chunks that are stored.
#![cfg(not(lmcache_loom))]
#![allow(missing_docs)]

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use lmcache_core::hash::ChunkHash;
use lmcache_memory::events::{Drained, EventSink, LOCAL_CPU};
use lmcache_memory::local_cpu::LocalCpu;
use lmcache_memory::object::ChunkMut;
use lmcache_memory::region::PAGE_BYTES;

const NAMESPACES: [&str; 2] = ["model=a@world=1", "model=b@world=1"];
const NUM_HASHES: u8 = 24;
const POOL_CHUNKS: u64 = 10;
const TOKENS: usize = 16;

/// A consumer of its own, which knows nothing but events.
#[derive(Default)]
struct Replay {
    chunks: HashMap<(String, String, ChunkHash), (u64, u32)>,
    times_anew: u32,
}

impl Replay {
    fn take_in(&mut self, drained: Drained) {
        if drained.is_anew {
            self.chunks.clear();
            self.times_anew += 1;
        }
        for event in drained.events {
            let key = (
                event.tier.to_string(),
                event.namespace.to_string(),
                event.hash,
            );
            let value = (event.bytes, event.tokens);
            let before = if event.is_stored {
                self.chunks.insert(key, value)
            } else {
                assert_eq!(self.chunks.remove(&key), Some(value), "what goes was there");
                None
            };
            assert_eq!(before, None, "what comes was not there");
        }
    }

    fn assert_equals(&self, cpu: &LocalCpu) {
        let mut stored = 0;
        for namespace in NAMESPACES {
            for number in 0..NUM_HASHES {
                let is_there = !cpu.get(namespace, &[hash(number)]).is_empty();
                let key = (LOCAL_CPU.into(), namespace.into(), hash(number));
                assert_eq!(self.chunks.contains_key(&key), is_there, "{key:?}");
                stored += usize::from(is_there);
            }
        }
        let told = self.chunks.keys().filter(|(tier, ..)| tier == LOCAL_CPU);
        assert_eq!(told.count(), stored);
        assert_eq!(cpu.audit().num_chunks, stored);
    }
}

fn hash(number: u8) -> ChunkHash {
    ChunkHash([number; 32])
}

fn pool() -> LocalCpu {
    let capacity = POOL_CHUNKS * PAGE_BYTES as u64;
    LocalCpu::new(capacity, Duration::from_secs(60)).expect("memory")
}

/// A source of choices; the same ones in each run.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (self.0 >> 33) % sides
    }
}

/// Something that changes what is stored, or might have.
fn change(cpu: &LocalCpu, sink: &EventSink, dice: &mut Dice) {
    let namespace = NAMESPACES[dice.roll(2) as usize];
    let first = dice.roll(u64::from(NUM_HASHES)) as u8;
    let len = 1 + dice.roll(4) as u8;
    let chain: Vec<_> = (first..NUM_HASHES.min(first + len)).map(hash).collect();
    match dice.roll(20) {
        0 => drop(cpu.clear()),
        1 => drop(cpu.clear_prefix("model=a")),
        2 => drop(cpu.retain_prefix("model=a")),
        3..5 => drop(cpu.remove(namespace, chain[0])),
        5 => sink.stored("disk", namespace, chain[0], 5, 1),
        6 => sink.removed("disk", namespace, chain[0]),
        7..10 => {
            if let Some(mut given) = cpu.allocate(&[PAGE_BYTES / 2]) {
                let chunk = given.remove(0);
                let _ = cpu.put(namespace, chain[0], chunk);
            }
        }
        what => {
            let reserved = cpu.reserve(namespace, &chain, 0, |_| PAGE_BYTES);
            let written = reserved.chunks.into_iter().map(|(_, mut chunk)| {
                chunk.set_num_tokens(TOKENS);
                chunk
            });
            let mut written: Vec<ChunkMut> = written.collect();
            if what == 19 {
                // Never written.
                written.pop();
            }
            let lookup = dice.roll(3).to_string();
            cpu.lookup(&lookup, namespace, &chain);
            cpu.commit(namespace, &chain, written);
        }
    }
}

#[test]
fn a_replay_equals_the_store_after_each_drain_with_a_line_long_or_short() {
    for capacity in [1, 3, 8, 1000] {
        let cpu = pool();
        let mut dice = Dice(capacity as u64);
        let mut replay = Replay::default();
        // Stored before anybody listened.
        let chain = [hash(1), hash(2)];
        let reserved = cpu.reserve(NAMESPACES[0], &chain, 0, |_| PAGE_BYTES);
        let chunks = reserved.chunks.into_iter().map(|(_, chunk)| chunk);
        cpu.commit(NAMESPACES[0], &chain, chunks.collect());
        assert_eq!(cpu.drain_events(), Drained::default());
        let sink = cpu.listen(capacity);
        for _ in 0..600 {
            for _ in 0..dice.roll(6) {
                change(&cpu, &sink, &mut dice);
            }
            replay.take_in(cpu.drain_events());
            replay.assert_equals(&cpu);
        }
        assert_eq!(replay.times_anew > 1, capacity < 1000, "{capacity}");
        assert_eq!(u64::from(replay.times_anew), 1 + sink.times_lost());
        assert!(cpu.audit().evicted_chunks > 100);
        cpu.close();
        replay.take_in(cpu.drain_events());
        assert!(replay.chunks.keys().all(|(tier, ..)| tier == "disk"));
    }
}

#[test]
fn a_replay_equals_the_store_that_many_threads_change() {
    for capacity in [16, 100_000] {
        let cpu = pool();
        let sink = cpu.listen(capacity);
        let done = AtomicBool::new(false);
        let mut replay = Replay::default();
        replay.take_in(cpu.drain_events());
        thread::scope(|scope| {
            let threads: Vec<_> = (1..5)
                .map(|seed| {
                    let (cpu, sink) = (&cpu, &sink);
                    scope.spawn(move || {
                        let mut dice = Dice(seed);
                        for _ in 0..3000 {
                            change(cpu, sink, &mut dice);
                        }
                    })
                })
                .collect();
            let listener = scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    replay.take_in(cpu.drain_events());
                    thread::yield_now();
                }
            });
            for thread in threads {
                thread.join().expect("no panic");
            }
            done.store(true, Ordering::Relaxed);
            listener
                .join()
                .expect("every event follows from those before");
        });
        replay.take_in(cpu.drain_events());
        replay.assert_equals(&cpu);
    }
}

#[test]
fn events_tell_bytes_and_tokens_and_the_namespace_of_whom_was_evicted() {
    let cpu = pool();
    cpu.listen(100);
    let mut replay = Replay::default();
    for namespace in NAMESPACES {
        let chain: Vec<_> = (0..POOL_CHUNKS as u8).map(hash).collect();
        let reserved = cpu.reserve(namespace, &chain, 0, |_| PAGE_BYTES - 1);
        let chunks = reserved.chunks.into_iter().map(|(at, mut chunk)| {
            chunk.set_num_tokens(at + 1);
            chunk
        });
        cpu.commit(namespace, &chain, chunks.collect());
        replay.take_in(cpu.drain_events());
        let told = |(key, value): (&(String, String, ChunkHash), &(u64, u32))| {
            (key.1.clone(), key.2, value.0, value.1)
        };
        let mut told: Vec<_> = replay.chunks.iter().map(told).collect();
        told.sort_by_key(|told| told.3);
        let bytes = PAGE_BYTES as u64 - 1;
        let due = chain.iter().zip(1..);
        let due = due.map(|(&hash, tokens)| (namespace.to_owned(), hash, bytes, tokens));
        assert_eq!(told, due.collect::<Vec<_>>());
    }
}
