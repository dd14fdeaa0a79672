//! The prefix chain against SHA-256 alone over the very bytes that the chain hashes.

use std::hint::black_box;

use lmcache_core::hash::{ChunkHash, ExtraKeys};
use lmcache_core::token::Chain;
use sha2::{Digest, Sha256};

use crate::sample::{Case, Numbers, timed};

const CHUNK: usize = 256;
const NUM_CHUNKS: usize = 512;
const TURN_TOKENS: usize = 512;
const NUM_TURNS: usize = 64;
const NONE_HASH: ChunkHash = ChunkHash([7; 32]);

pub(crate) fn run(quick: bool) {
    let (pairs, repeats) = if quick { (7, 4) } else { (31, 16) };
    for vocabulary in [32_000, 128_256] {
        chain(vocabulary, pairs, repeats);
    }
    turns(pairs);
}

fn tokens(count: usize, vocabulary: usize, seed: u64) -> Vec<u32> {
    let mut numbers = Numbers(seed);
    (0..count)
        .map(|_| numbers.below(vocabulary) as u32)
        .collect()
}

fn chain_of(tokens: &[u32]) -> Chain {
    let mut chain = Chain::new(CHUNK, NONE_HASH).expect("256 tokens a chunk");
    chain.extend(tokens, &ExtraKeys::none());
    chain
}

fn chain(vocabulary: usize, pairs: usize, repeats: usize) {
    let tokens = tokens(NUM_CHUNKS * CHUNK, vocabulary, 1);
    let hashes = chain_of(&tokens).hashes().to_vec();
    let inputs: Vec<Vec<u8>> = (0..NUM_CHUNKS)
        .map(|index| {
            let parent = if index == 0 {
                NONE_HASH
            } else {
                hashes[index - 1]
            };
            cbor(&parent, &tokens[index * CHUNK..][..CHUNK])
        })
        .collect();
    for (input, hash) in inputs.iter().zip(&hashes) {
        assert_eq!(
            Sha256::digest(input).as_slice(),
            hash.0,
            "the limit hashes other bytes than the chain"
        );
    }
    let (mut ours, mut sha) = (Vec::new(), Vec::new());
    for pair in 0..=pairs {
        let chain_time =
            || timed(|| (0..repeats).for_each(|_| drop(black_box(chain_of(black_box(&tokens)))))).0;
        let sha_time = || {
            timed(|| {
                for input in (0..repeats).flat_map(|_| &inputs) {
                    black_box(Sha256::digest(black_box(input)));
                }
            })
            .0
        };
        let (a, b) = if pair % 2 == 0 {
            let a = chain_time();
            (a, sha_time())
        } else {
            let b = sha_time();
            (chain_time(), b)
        };
        // The first pair warms up.
        if pair > 0 {
            ours.push(a);
            sha.push(b);
        }
    }
    let bytes: usize = inputs.iter().map(Vec::len).sum();
    Case::new(&format!("hash_chain/vocabulary={vocabulary}"))
        .samples("ours", &ours)
        .samples("sha2", &sha)
        .fact("chunks", (NUM_CHUNKS * repeats) as f64)
        .fact("bytes", (bytes * repeats) as f64)
        .print();
}

/// 64 turns of 512 tokens behind 128 thousand, against the same turns from nothing.
fn turns(pairs: usize) {
    let history = tokens(NUM_CHUNKS * CHUNK, 32_000, 2);
    let new = tokens(NUM_TURNS * TURN_TOKENS, 32_000, 3);
    let (mut long, mut short) = (Vec::new(), Vec::new());
    for _ in 0..pairs {
        for (history, times) in [(&history[..], &mut long), (&[][..], &mut short)] {
            let mut chain = chain_of(history);
            let (time, ()) = timed(|| {
                for turn in new.chunks_exact(TURN_TOKENS) {
                    chain.extend(black_box(turn), &ExtraKeys::none());
                }
            });
            black_box(chain);
            times.push(time);
        }
    }
    Case::new("appended_turn")
        .samples("ours", &long)
        .samples("from_nothing", &short)
        .print();
}

/// `[parent, [token, …], null]` in canonical CBOR, written as plainly as can be.
fn cbor(parent: &ChunkHash, tokens: &[u32]) -> Vec<u8> {
    let mut bytes = vec![0x83, 0x58, 32];
    bytes.extend(parent.0);
    bytes.push(0x99);
    bytes.extend((tokens.len() as u16).to_be_bytes());
    for &token in tokens {
        match token {
            0..24 => bytes.push(token as u8),
            24..0x100 => bytes.extend([0x18, token as u8]),
            0x100..0x1_0000 => {
                bytes.push(0x19);
                bytes.extend((token as u16).to_be_bytes());
            }
            _ => {
                bytes.push(0x1a);
                bytes.extend(token.to_be_bytes());
            }
        }
    }
    bytes.push(0xf6);
    bytes
}
