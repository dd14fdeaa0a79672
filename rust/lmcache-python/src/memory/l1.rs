//! L1 as Python sees it.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use lmcache_core::hot_cache::Policy;
use lmcache_memory::local_cpu;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use super::{LENT, MemoryObj, State, TWICE};
use crate::errors::NativeError;
use crate::gate::{Owned, caught, enter};
use crate::token::{chunk_hash, packed_hashes};

/// The L1 store.
#[pyclass(frozen, module = "lmcache_rs._native")]
pub(crate) struct LocalCpu(Owned<local_cpu::LocalCpu>);

impl LocalCpu {
    pub(crate) fn store(&self) -> Result<&local_cpu::LocalCpu, NativeError> {
        self.0.get()
    }
}

pub(crate) fn unknown_policy(found: &str) -> NativeError {
    let names = Policy::ALL.map(Policy::name).join(", ");
    NativeError::Argument(format!(
        "policy {found:?} is unknown; set it to one of {names}"
    ))
}

#[pymethods]
impl LocalCpu {
    /// Maps and touches `capacity_bytes`; a lookup leases for `lease_ms`; `policy` says which chunk leaves
    /// when memory is full; `num_readers` other processes read it, and share what a lookup leases.
    #[new]
    #[pyo3(signature = (capacity_bytes, lease_ms, policy = "LRU", num_readers = 0))]
    fn new(
        py: Python<'_>,
        capacity_bytes: u64,
        lease_ms: u64,
        policy: &str,
        num_readers: u32,
    ) -> PyResult<Self> {
        let lease = Duration::from_millis(lease_ms);
        let policy = Policy::from_name(policy).ok_or_else(|| unknown_policy(policy))?;
        let store = enter(py, || {
            local_cpu::LocalCpu::shared(capacity_bytes, lease, policy, num_readers)
        })?;
        Ok(Self(Owned::new(store)))
    }

    /// Bytes of the pool.
    #[getter]
    fn capacity_bytes(&self) -> PyResult<u64> {
        Ok(self.store()?.capacity_bytes())
    }

    /// Leases the longest stored prefix under `lookup_id`: `(hit_chunks, lease_ms)`.
    fn lookup(
        &self,
        py: Python<'_>,
        lookup_id: &str,
        namespace: &str,
        hashes: &[u8],
    ) -> PyResult<(usize, u64)> {
        let store = self.store()?;
        let hit = enter(py, || {
            packed_hashes(hashes).map(|hashes| store.lookup(lookup_id, namespace, &hashes))
        })?;
        Ok((hit.num_chunks, hit.lease.as_millis() as u64))
    }

    /// Gives back what `lookup_id` leases; whether it leased anything.
    fn release(&self, lookup_id: &str) -> PyResult<bool> {
        let store = self.store()?;
        Ok(caught(|| Ok::<_, NativeError>(store.release(lookup_id)))?)
    }

    /// Length of the longest stored prefix, in chunks; nothing is leased.
    fn longest_prefix(&self, py: Python<'_>, namespace: &str, hashes: &[u8]) -> PyResult<usize> {
        let store = self.store()?;
        enter(py, || {
            packed_hashes(hashes).map(|hashes| store.longest_prefix(namespace, &hashes))
        })
    }

    /// The stored objects of the longest stored prefix.
    fn get(&self, py: Python<'_>, namespace: &str, hashes: &[u8]) -> PyResult<Vec<MemoryObj>> {
        let store = self.store()?;
        let objects = enter(py, || {
            packed_hashes(hashes).map(|hashes| store.get(namespace, &hashes))
        })?;
        Ok(objects
            .into_iter()
            .map(|object| MemoryObj::new(State::Sealed(object)))
            .collect())
    }

    /// Writable memory of `lens` bytes each: all of it, or `None`.
    fn allocate(&self, py: Python<'_>, lens: Vec<usize>) -> PyResult<Option<Vec<MemoryObj>>> {
        let store = self.store()?;
        let chunks = enter(py, || Ok::<_, NativeError>(store.allocate(&lens)))?;
        Ok(chunks.map(|chunks| {
            chunks
                .into_iter()
                .map(|chunk| MemoryObj::new(State::Writable(chunk)))
                .collect()
        }))
    }

    /// Publishes memory that `allocate` gave and seals it; false if the key was known already. `num_tokens`
    /// is for whoever hears of the chunk.
    #[pyo3(signature = (namespace, hash, memory_obj, num_tokens = 0))]
    fn put(
        &self,
        namespace: &str,
        hash: &[u8],
        memory_obj: &MemoryObj,
        num_tokens: usize,
    ) -> PyResult<bool> {
        let store = self.store()?;
        let hash = chunk_hash(hash, "hash")?;
        memory_obj.require_puttable(store)?;
        let mut chunk = memory_obj.take_writable()?;
        chunk.set_num_tokens(num_tokens);
        let (stored, object) = caught(|| store.put_and_hold(namespace, hash, chunk))?;
        if let Some(object) = object {
            memory_obj.shared.seal(object);
        }
        Ok(stored)
    }

    /// Whether this pool gave the memory, which is writable or sealed.
    fn owns(&self, memory_obj: &MemoryObj) -> PyResult<bool> {
        let store = self.store()?;
        Ok(match &memory_obj.shared.at_rest()?.state {
            State::Writable(chunk) => store.owns(chunk),
            State::Sealed(object) => store.owns_sealed(object),
            State::Lent => return Err(NativeError::Spent(LENT).into()),
            State::Released => false,
        })
    }

    /// Raises what `put` would raise for any of these objects, or for one of them named twice.
    fn require_puttable(&self, memory_objs: Vec<PyRef<'_, MemoryObj>>) -> PyResult<()> {
        let store = self.store()?;
        let mut seen = HashSet::new();
        for memory_obj in &memory_objs {
            memory_obj.require_puttable(store)?;
            if !seen.insert(Arc::as_ptr(&memory_obj.shared)) {
                return Err(NativeError::Spent(TWICE).into());
            }
        }
        Ok(())
    }

    /// Removes one chunk; whether it was there.
    fn remove(&self, namespace: &str, hash: &[u8]) -> PyResult<bool> {
        let hash = chunk_hash(hash, "hash")?;
        let store = self.store()?;
        Ok(caught(|| {
            Ok::<_, NativeError>(store.remove(namespace, hash))
        })?)
    }

    /// Removes every chunk, or those whose namespace begins with `prefix`; how many there were.
    #[pyo3(signature = (prefix = None))]
    fn clear(&self, py: Python<'_>, prefix: Option<&str>) -> PyResult<usize> {
        let store = self.store()?;
        enter(py, || {
            Ok::<_, NativeError>(match prefix {
                Some(prefix) => store.clear_prefix(prefix),
                None => store.clear(),
            })
        })
    }

    /// Removes every chunk whose namespace does not begin with `prefix`; how many there were.
    fn retain(&self, py: Python<'_>, prefix: &str) -> PyResult<usize> {
        let store = self.store()?;
        enter(py, || Ok::<_, NativeError>(store.retain_prefix(prefix)))
    }

    /// Empties the store for good. Idempotent.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let store = self.store()?;
        enter(py, || {
            store.close();
            Ok::<_, NativeError>(())
        })
    }

    /// The books' sums as they stand, at a cost that does not grow with what is stored.
    fn usage<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let store = self.store()?;
        let usage = caught(|| Ok::<_, NativeError>(store.usage()))?;
        let sums = PyDict::new(py);
        sums.set_item("capacity_bytes", usage.capacity_bytes)?;
        sums.set_item("held_bytes", usage.held_bytes)?;
        sums.set_item("leased_bytes", usage.leased_bytes)?;
        sums.set_item("chunks", usage.num_chunks)?;
        sums.set_item("evicted_chunks", usage.evicted_chunks)?;
        Ok(sums)
    }

    /// `(namespace, hash)` of every stored chunk.
    fn chunks<'py>(&self, py: Python<'py>) -> PyResult<Vec<(String, Bound<'py, PyBytes>)>> {
        let store = self.store()?;
        let chunks = enter(py, || Ok::<_, NativeError>(store.chunks()))?;
        let named = chunks
            .into_iter()
            .map(|(namespace, hash)| (namespace.to_string(), PyBytes::new(py, &hash.0)));
        Ok(named.collect())
    }

    /// The books, walked entry by entry.
    fn audit<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let store = self.store()?;
        let audit = enter(py, || Ok::<_, NativeError>(store.audit()))?;
        let books = PyDict::new(py);
        books.set_item("capacity_bytes", audit.capacity_bytes)?;
        books.set_item("free_bytes", audit.free_bytes)?;
        books.set_item("cached_bytes", audit.cached_bytes)?;
        books.set_item("reserved_bytes", audit.reserved_bytes)?;
        books.set_item("leased_bytes", audit.leased_bytes)?;
        books.set_item("leases", audit.num_leases)?;
        books.set_item("chunks", audit.num_chunks)?;
        books.set_item("evicted_chunks", audit.evicted_chunks)?;
        Ok(books)
    }
}
