//! What a tier is, and the first of them: L1 in host memory.

use std::fmt;
use std::os::fd::OwnedFd;
use std::time::Duration;

use lmcache_core::hash::ChunkHash;
use lmcache_memory::local_cpu::LocalCpu;
use lmcache_memory::object::{ChunkMut, MemoryObj};

use crate::lookup_server::{LookupAnswer, LookupIndex};
use crate::object_form::{Description, Form, key_text};

/// One tier: a place where chunks are kept.
///
/// # Contract
///
/// A chunk is named by its namespace and hash. Equal names mean equal bytes, so a tier that is given a
/// known name may keep what it has.
///
/// An implementer MUST
/// - give back exactly the bytes that were put, or nothing: a chunk that is truncated, damaged or of an
///   older format is a miss, and so is one behind a server or a file that is gone;
/// - make a chunk visible only when it is whole;
/// - never fail: what cannot be stored is not stored, what cannot be read is not there. Faults are counted
///   and logged by the tier itself;
/// - accept calls from several threads at once;
/// - let [`Backend::get_blocking`] disagree with an earlier [`Backend::contains_prefix`]: chunks come and
///   go between the two, and only a held [`MemoryObj`] is a promise.
///
/// The caller guarantees that `hashes` is one chain in order, or a single chunk, and that no engine lock is
/// held: any verb but [`Backend::submit_put`] may wait for a device.
///
/// A tier written in Python has the same contract (`lmcache_rs.storage.StorageBackend`), made easier in two
/// points: it is called from one thread of its own, and what it gives back or raises is checked, counted and
/// logged for it.
pub trait Backend: fmt::Debug + Send + Sync {
    /// The tier's name in settings, logs and metrics, e.g. `local_cpu`.
    fn name(&self) -> &'static str;

    /// Takes chunks in, first to last, as far as there is room. Does not wait for them to be stored; the
    /// objects are held until they are.
    fn submit_put(&self, namespace: &str, hashes: &[ChunkHash], objects: &[MemoryObj]);

    /// How many chunks of the chain are stored, counted from its first to the first gap.
    fn contains_prefix(&self, namespace: &str, hashes: &[ChunkHash]) -> usize;

    /// Reads chunks, from the first to the first gap.
    fn get_blocking(&self, namespace: &str, hashes: &[ChunkHash]) -> Vec<MemoryObj>;

    /// Forgets a chunk, e.g. because it could not be loaded. Whether it was there.
    fn remove(&self, namespace: &str, hash: ChunkHash) -> bool;

    /// Whether one chunk is stored.
    fn contains(&self, namespace: &str, hash: ChunkHash) -> bool {
        self.contains_prefix(namespace, &[hash]) == 1
    }
}

/// A chunk on its way in.
#[derive(Debug, Clone)]
pub struct Chunk {
    /// Its bytes; held until they are written.
    pub object: MemoryObj,
    /// How they are to be looked at, if that is known.
    pub form: Option<Form>,
    /// Its tokens; 0 if nobody said.
    pub num_tokens: u32,
}

impl From<&MemoryObj> for Chunk {
    /// Mere bytes.
    fn from(object: &MemoryObj) -> Self {
        Self {
            object: object.clone(),
            form: None,
            num_tokens: 0,
        }
    }
}

/// What an object says of a chunk in memory. Where its positions are known there is one a token.
pub(crate) fn described(
    namespace: &str,
    hash: ChunkHash,
    object: &MemoryObj,
    form: Option<&Form>,
    num_tokens: u32,
) -> Description {
    let positions = object.positions();
    Description {
        key: key_text(namespace, hash),
        payload_bytes: object.len() as u64,
        num_tokens: positions.map_or(num_tokens, |positions| positions.len() as u32),
        form: form.cloned(),
        positions: positions.map(Into::into),
    }
}

/// A chunk that was read and verified, in memory that nobody else knows yet.
#[derive(Debug)]
pub struct Arrival {
    /// Its bytes, with their positions where those were put.
    pub chunk: ChunkMut,
    /// What its header says; the positions have gone to the chunk.
    pub description: Description,
}

impl From<Arrival> for MemoryObj {
    /// Its bytes, sealed and not published.
    fn from(arrival: Arrival) -> Self {
        arrival.chunk.seal_unpublished()
    }
}

impl Backend for LocalCpu {
    fn name(&self) -> &'static str {
        "local_cpu"
    }

    /// Copies the bytes into the pool before it returns, unless they are there already.
    fn submit_put(&self, namespace: &str, hashes: &[ChunkHash], objects: &[MemoryObj]) {
        let hashes = &hashes[..hashes.len().min(objects.len())];
        let mut reserved = self.reserve(namespace, hashes, 0, |position| objects[position].len());
        for (position, chunk) in &mut reserved.chunks {
            chunk
                .bytes_mut()
                .copy_from_slice(objects[*position].bytes());
        }
        let chunks = reserved
            .chunks
            .into_iter()
            .map(|(_, chunk)| chunk)
            .collect();
        self.commit(namespace, hashes, chunks);
    }

    fn contains_prefix(&self, namespace: &str, hashes: &[ChunkHash]) -> usize {
        self.longest_prefix(namespace, hashes)
    }

    fn get_blocking(&self, namespace: &str, hashes: &[ChunkHash]) -> Vec<MemoryObj> {
        self.get(namespace, hashes)
    }

    fn remove(&self, namespace: &str, hash: ChunkHash) -> bool {
        LocalCpu::remove(self, namespace, hash)
    }
}

impl LookupIndex for LocalCpu {
    fn lookup(&self, lookup_id: &str, namespace: &str, hashes: &[ChunkHash]) -> LookupAnswer {
        let hit = LocalCpu::lookup(self, lookup_id, namespace, hashes);
        LookupAnswer {
            hit_chunks: hit
                .num_chunks
                .try_into()
                .expect("a message holds fewer than 2^32 hashes"),
            lease_ms: whole_millis(hit.lease),
        }
    }

    fn release(&self, lookup_id: &str) {
        LocalCpu::release(self, lookup_id);
    }

    fn clear(&self) {
        LocalCpu::clear(self);
    }

    fn locate(&self, lookup_id: &str, namespace: &str, hashes: &[ChunkHash]) -> Vec<MemoryObj> {
        self.take_part(hashes, lookup_id, namespace)
    }

    fn descriptor(&self) -> Option<OwnedFd> {
        LocalCpu::descriptor(self)
    }
}

/// Rounded down: an answer never says that a lease holds for longer than it does.
fn whole_millis(lease: Duration) -> u32 {
    u32::try_from(lease.as_millis()).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEASE: Duration = Duration::from_millis(4_321);
    const CHUNK_BYTES: usize = 4096;

    fn pool(num_chunks: u64) -> LocalCpu {
        LocalCpu::new(num_chunks * CHUNK_BYTES as u64, LEASE).expect("a few pages")
    }

    fn chain(ids: impl IntoIterator<Item = u8>) -> Vec<ChunkHash> {
        ids.into_iter().map(|id| ChunkHash([id; 32])).collect()
    }

    /// Objects of another pool, each filled with the first byte of its hash.
    fn objects(hashes: &[ChunkHash]) -> Vec<MemoryObj> {
        let source = pool(hashes.len() as u64);
        let mut reserved = source.reserve("source", hashes, 0, |_| CHUNK_BYTES);
        for (position, chunk) in &mut reserved.chunks {
            chunk.bytes_mut().fill(hashes[*position].0[0]);
        }
        let chunks = reserved
            .chunks
            .into_iter()
            .map(|(_, chunk)| chunk)
            .collect();
        source.commit("source", hashes, chunks);
        source.get("source", hashes)
    }

    fn filled(objects: &[MemoryObj]) -> Vec<u8> {
        let fill = |object: &MemoryObj| {
            assert!(object.bytes().iter().all(|byte| *byte == object.bytes()[0]));
            object.bytes()[0]
        };
        objects.iter().map(fill).collect()
    }

    #[test]
    fn what_is_put_comes_back_up_to_the_first_gap() {
        let pool = pool(8);
        let tier: &dyn Backend = &pool;
        let stored = chain([1, 2, 4]);
        tier.submit_put("ns", &stored, &objects(&stored));
        let asked = chain([1, 2, 3, 4]);
        assert_eq!(tier.contains_prefix("ns", &asked), 2);
        assert_eq!(filled(&tier.get_blocking("ns", &asked)), [1, 2]);
        assert!(tier.contains("ns", asked[3]));
        assert!(!tier.contains("other", asked[0]));
        assert!(tier.get_blocking("other", &asked).is_empty());
    }

    #[test]
    fn a_known_chunk_keeps_its_bytes() {
        let tier = pool(4);
        let one = chain([1]);
        tier.submit_put("ns", &one, &objects(&one));
        tier.submit_put("ns", &one, &objects(&chain([9])));
        assert_eq!(filled(&tier.get_blocking("ns", &one)), [1]);
    }

    #[test]
    fn what_does_not_fit_is_left_out_from_the_tail() {
        let tier = pool(2);
        let hashes = chain([1, 2, 3]);
        tier.submit_put("ns", &hashes, &objects(&hashes));
        assert_eq!(tier.contains_prefix("ns", &hashes), 2);
    }

    #[test]
    fn a_removed_chunk_is_a_miss() {
        let tier = pool(4);
        let hashes = chain([1, 2]);
        tier.submit_put("ns", &hashes, &objects(&hashes));
        assert!(Backend::remove(&tier, "ns", hashes[0]));
        assert!(!Backend::remove(&tier, "ns", hashes[0]));
        assert_eq!(tier.contains_prefix("ns", &hashes), 0);
    }

    #[test]
    fn the_index_says_how_long_its_lease_holds() {
        let index = pool(4);
        let hashes = chain([1, 2, 3]);
        index.submit_put("ns", &hashes[..2], &objects(&hashes[..2]));
        let answer = LookupIndex::lookup(&index, "r1", "ns", &hashes);
        assert_eq!(
            answer,
            LookupAnswer {
                hit_chunks: 2,
                lease_ms: 4_321
            }
        );
        assert_eq!(index.audit().num_leases, 1);
        LookupIndex::release(&index, "r1");
        assert_eq!(index.audit().num_leases, 0);
        let miss = LookupIndex::lookup(&index, "r1", "ns", &chain([7]));
        assert_eq!(
            miss,
            LookupAnswer {
                hit_chunks: 0,
                lease_ms: 0
            }
        );
    }
}
