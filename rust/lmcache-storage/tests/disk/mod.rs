//! What the tests of the disk tier share: chunks whose bytes follow from their name, and a look at a folder
//! that asks nothing of the code under test.
#![allow(dead_code, reason = "each test takes what it needs")]

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use lmcache_core::hash::ChunkHash;
use lmcache_memory::local_cpu::LocalCpu;
use lmcache_memory::object::MemoryObj;
use lmcache_storage::local_disk::{Chunk, LocalDisk, Options};

pub(crate) mod faulty;

pub(crate) const NAMESPACE: &str = "model=m@world=1@worker=0@dtype=float32";
pub(crate) const LONG: Duration = Duration::from_secs(20);
pub(crate) const MIB: u64 = 1 << 20;

pub(crate) fn pool() -> LocalCpu {
    LocalCpu::new(2 * MIB, Duration::from_secs(1)).expect("memory")
}

pub(crate) fn hash(number: u32) -> ChunkHash {
    let mut hash = [0; 32];
    for (i, byte) in hash.iter_mut().enumerate() {
        *byte = (number.wrapping_mul(0x9e37_79b9).rotate_left(i as u32 * 5) >> 8) as u8;
    }
    hash[28..].copy_from_slice(&number.to_le_bytes());
    ChunkHash(hash)
}

pub(crate) fn hashes(numbers: impl IntoIterator<Item = u32>) -> Vec<ChunkHash> {
    numbers.into_iter().map(hash).collect()
}

/// The bytes of a chunk, which are those of no other.
pub(crate) fn payload(hash: ChunkHash, len: usize) -> Vec<u8> {
    let mut state = u64::from_le_bytes(*hash.0.last_chunk().expect("32 bytes")) | 1;
    let mut bytes = Vec::with_capacity(len);
    while bytes.len() < len {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        bytes.extend_from_slice(&(state >> 16).to_le_bytes()[..(len - bytes.len()).min(6)]);
    }
    bytes
}

pub(crate) fn chunk(pool: &LocalCpu, bytes: &[u8]) -> Chunk {
    let mut chunks = pool.allocate(&[bytes.len()]).expect("room");
    let mut chunk = chunks.pop().expect("one");
    chunk.bytes_mut().copy_from_slice(bytes);
    let object: MemoryObj = chunk.seal_unpublished();
    Chunk {
        object,
        form: None,
        num_tokens: 0,
    }
}

pub(crate) fn chunks(pool: &LocalCpu, hashes: &[ChunkHash], len: usize) -> Vec<Chunk> {
    hashes
        .iter()
        .map(|hash| chunk(pool, &payload(*hash, len)))
        .collect()
}

/// Which of the chunks come back; asserts that none comes back wrong.
pub(crate) fn come_back(disk: &LocalDisk, hashes: &[ChunkHash], len: usize) -> Vec<bool> {
    let came = |hash: &ChunkHash| {
        let mut arrivals = disk.get(NAMESPACE, &[*hash], LONG);
        let Some(mut arrival) = arrivals.pop() else {
            return false;
        };
        assert!(
            arrival.chunk.bytes_mut() == payload(*hash, len),
            "a wrong object"
        );
        true
    };
    hashes.iter().map(came).collect()
}

pub(crate) fn options(path: &Path) -> Options {
    let mut options = Options::new(path, 64 * MIB);
    options.threads = 4;
    options
}

/// The chunks' files below a folder, walked.
pub(crate) fn chunk_files(path: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for shard in 0..64 {
        let folder = path.join("lmcache_rs.v1").join(format!("{shard:02x}"));
        let entries = fs::read_dir(folder).into_iter().flatten();
        found.extend(entries.map(|entry| entry.expect("an entry").path()));
    }
    found
}

/// What the files of chunks are charged, walked.
pub(crate) fn charged(path: &Path) -> u64 {
    let bytes = |file: &PathBuf| fs::metadata(file).map_or(0, |about| about.len());
    chunk_files(path)
        .iter()
        .map(|file| bytes(file).next_multiple_of(4096) + 256)
        .sum()
}

pub(crate) fn temps(path: &Path) -> usize {
    fs::read_dir(path.join("lmcache_rs.v1/tmp")).map_or(0, Iterator::count)
}

/// Account, index and files agree, nothing is reserved, nothing is left over.
pub(crate) fn assert_books_balance(disk: &LocalDisk, path: &Path) {
    assert_eq!(
        disk.stats()["used_bytes"],
        charged(path),
        "bytes in the account"
    );
    assert_eq!(
        disk.stats()["chunks"],
        chunk_files(path).len() as u64,
        "chunks in the index"
    );
    assert_eq!(temps(path), 0, "temporary files");
}
