//! L1 and its objects, as Python sees them. The buffer export is the only unsafe code.

use std::collections::HashSet;
use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use lmcache_core::hot_cache::Policy;
use lmcache_memory::error::MemoryError;
use lmcache_memory::local_cpu;
use lmcache_memory::object::{self, ChunkMut};
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

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

fn unknown_policy(found: &str) -> NativeError {
    let names = Policy::ALL.map(Policy::name).join(", ");
    NativeError::Argument(format!(
        "policy {found:?} is unknown; set it to one of {names}"
    ))
}

#[pymethods]
impl LocalCpu {
    /// Maps and touches `capacity_bytes`; a lookup leases for `lease_ms`; `policy` says which chunk leaves
    /// when memory is full.
    #[new]
    #[pyo3(signature = (capacity_bytes, lease_ms, policy = "LRU"))]
    fn new(py: Python<'_>, capacity_bytes: u64, lease_ms: u64, policy: &str) -> PyResult<Self> {
        let lease = Duration::from_millis(lease_ms);
        let policy = Policy::from_name(policy).ok_or_else(|| unknown_policy(policy))?;
        let store = enter(py, || {
            local_cpu::LocalCpu::with_policy(capacity_bytes, lease, policy)
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

    /// Publishes memory that `allocate` gave and seals it; false if the key was known already.
    fn put(&self, namespace: &str, hash: &[u8], memory_obj: &MemoryObj) -> PyResult<bool> {
        let store = self.store()?;
        let hash = chunk_hash(hash, "hash")?;
        memory_obj.require_puttable(store)?;
        let chunk = memory_obj.take_writable()?;
        let stored = caught(|| store.put(namespace, hash, chunk))?;
        let published = caught(|| Ok::<_, NativeError>(store.get(namespace, &[hash])))?;
        if let Some(object) = published.into_iter().next() {
            *memory_obj.0.lock() = State::Sealed(object);
        }
        Ok(stored)
    }

    /// Raises what `put` would raise for any of these objects, or for one of them named twice.
    fn require_puttable(&self, memory_objs: Vec<PyRef<'_, MemoryObj>>) -> PyResult<()> {
        let store = self.store()?;
        let mut seen = HashSet::new();
        for memory_obj in &memory_objs {
            memory_obj.require_puttable(store)?;
            if !seen.insert(Arc::as_ptr(&memory_obj.0)) {
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

    /// Removes every chunk; how many there were.
    fn clear(&self, py: Python<'_>) -> PyResult<usize> {
        let store = self.store()?;
        enter(py, || Ok::<_, NativeError>(store.clear()))
    }

    /// Empties the store for good. Idempotent.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let store = self.store()?;
        enter(py, || {
            store.close();
            Ok::<_, NativeError>(())
        })
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

enum State {
    Writable(ChunkMut),
    Sealed(object::MemoryObj),
    /// Writable, and away while a copy runs into or out of it.
    Lent,
    Released,
}

/// A piece of host memory: writable until it is put, immutable from then on.
///
/// Python's subclass puts shape and element type on top; it shares the memory of the handle it is made from.
#[pyclass(frozen, subclass, module = "lmcache_rs._native")]
pub(crate) struct MemoryObj(Arc<Shared>);

struct Shared {
    state: Owned<Mutex<State>>,
    /// Buffers that Python holds on a writable piece; it cannot be sealed under them.
    writers: Mutex<usize>,
}

impl Shared {
    fn try_lock(&self) -> Result<MutexGuard<'_, State>, NativeError> {
        Ok(self
            .state
            .get()?
            .lock()
            .unwrap_or_else(PoisonError::into_inner))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.try_lock()
            .expect("the caller has used the handle in this process before")
    }

    fn writers(&self) -> MutexGuard<'_, usize> {
        self.writers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A writable piece on loan to a copy; it goes home when dropped, whatever happens to the copy.
pub(crate) struct Loan {
    home: Arc<Shared>,
    chunk: Option<ChunkMut>,
}

impl Loan {
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        let chunk = self.chunk.as_mut();
        chunk.expect("only the drop takes it").bytes_mut()
    }
}

impl Drop for Loan {
    fn drop(&mut self) {
        if let Some(chunk) = self.chunk.take() {
            *self.home.lock() = State::Writable(chunk);
        }
    }
}

/// What a copy reads from.
pub(crate) enum Source {
    Writable(Loan),
    Sealed(object::MemoryObj),
}

impl Source {
    pub(crate) fn bytes(&mut self) -> &[u8] {
        match self {
            Self::Writable(loan) => loan.bytes_mut(),
            Self::Sealed(object) => object.bytes(),
        }
    }
}

const LENT: &str =
    "memory is in use by a copy, or named twice in this call; use each object once at a time";
const TWICE: &str = "memory is named twice in this call; allocate one object a key";
const SPENT: &str = "memory was put or released before; allocate anew";

impl MemoryObj {
    fn new(state: State) -> Self {
        Self(Arc::new(Shared {
            state: Owned::new(Mutex::new(state)),
            writers: Mutex::new(0),
        }))
    }

    fn require_no_writer(&self) -> PyResult<()> {
        if *self.0.writers() > 0 {
            return Err(PyBufferError::new_err(
                "memory is still exported for writing; release every memoryview and tensor of it before it is put",
            ));
        }
        Ok(())
    }

    /// Leaves the handle as it is, so that a refused put costs nothing.
    fn require_puttable(&self, store: &local_cpu::LocalCpu) -> PyResult<()> {
        match &*self.0.try_lock()? {
            State::Writable(chunk) if store.owns(chunk) => {}
            State::Writable(_) => {
                return Err(NativeError::from(MemoryError::ForeignMemory).into());
            }
            State::Lent => return Err(NativeError::Spent(LENT).into()),
            State::Sealed(_) | State::Released => return Err(NativeError::Spent(SPENT).into()),
        }
        self.require_no_writer()
    }

    fn take_writable(&self) -> PyResult<ChunkMut> {
        self.require_no_writer()?;
        self.replace_writable(State::Released)
    }

    fn replace_writable(&self, by: State) -> PyResult<ChunkMut> {
        let mut state = self.0.try_lock()?;
        match std::mem::replace(&mut *state, by) {
            State::Writable(chunk) => Ok(chunk),
            other => {
                let lent = matches!(other, State::Lent);
                *state = other;
                Err(NativeError::Spent(if lent { LENT } else { SPENT }).into())
            }
        }
    }

    /// The memory, to be written by a copy.
    pub(crate) fn lend(&self) -> PyResult<Loan> {
        let chunk = Some(self.replace_writable(State::Lent)?);
        let home = Arc::clone(&self.0);
        Ok(Loan { home, chunk })
    }

    /// The memory, to be read by a copy.
    pub(crate) fn source(&self) -> PyResult<Source> {
        if let State::Sealed(object) = &*self.0.try_lock()? {
            return Ok(Source::Sealed(object.clone()));
        }
        self.lend().map(Source::Writable)
    }
}

#[pymethods]
impl MemoryObj {
    /// Another handle of the same memory and state.
    #[new]
    fn share(of: &MemoryObj) -> Self {
        Self(Arc::clone(&of.0))
    }

    /// Size in bytes; 0 once released.
    #[getter]
    fn nbytes(&self) -> PyResult<usize> {
        Ok(match &*self.0.try_lock()? {
            State::Writable(chunk) => chunk.len(),
            State::Sealed(object) => object.len(),
            State::Lent => return Err(NativeError::Spent(LENT).into()),
            State::Released => 0,
        })
    }

    /// Handles that share the memory, the store's own included; 0 once released.
    #[getter]
    fn ref_count(&self) -> PyResult<usize> {
        Ok(match &*self.0.try_lock()? {
            State::Writable(_) | State::Lent => 1,
            State::Sealed(object) => object.ref_count(),
            State::Released => 0,
        })
    }

    /// Whether it is sealed: written for good and readable by all.
    #[getter]
    fn sealed(&self) -> PyResult<bool> {
        Ok(matches!(*self.0.try_lock()?, State::Sealed(_)))
    }

    /// A copy of the bytes.
    fn to_bytes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        match &mut *self.0.try_lock()? {
            State::Writable(chunk) => Ok(PyBytes::new(py, chunk.bytes_mut())),
            State::Sealed(object) => Ok(PyBytes::new(py, object.bytes())),
            State::Lent => Err(NativeError::Spent(LENT).into()),
            State::Released => Err(NativeError::Spent("memory was released").into()),
        }
    }

    /// # Safety
    /// Called by the interpreter with a valid `view`, or null where the protocol allows it.
    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        let this = slf.get();
        let (address, len, readonly) = match &mut *this.0.try_lock()? {
            State::Writable(chunk) => {
                let bytes = chunk.bytes_mut();
                (bytes.as_mut_ptr(), bytes.len(), false)
            }
            State::Sealed(object) => (object.bytes().as_ptr().cast_mut(), object.len(), true),
            State::Lent => return Err(PyBufferError::new_err(LENT)),
            State::Released => return Err(PyBufferError::new_err("memory was released")),
        };
        // SAFETY: `view` is the interpreter's. The view owns a reference to this object, which keeps the
        // memory; sealed bytes are exported read-only, and writable ones can neither be sealed nor given
        // back while `writers` counts the view, so a write through it reaches nobody else.
        let outcome = unsafe {
            ffi::PyBuffer_FillInfo(
                view,
                slf.as_ptr(),
                address.cast::<c_void>(),
                len as ffi::Py_ssize_t,
                c_int::from(readonly),
                flags,
            )
        };
        if outcome != 0 {
            return Err(PyErr::fetch(slf.py()));
        }
        if !readonly {
            *this.0.writers() += 1;
        }
        // SAFETY: filled just now; `internal` is ours to use and tells the two kinds of view apart.
        unsafe {
            (*view).internal = if readonly {
                ptr::null_mut()
            } else {
                ptr::dangling_mut::<u8>().cast()
            }
        };
        Ok(())
    }

    /// # Safety
    /// Called by the interpreter with a view that `__getbuffer__` filled.
    unsafe fn __releasebuffer__(&self, view: *mut ffi::Py_buffer) {
        // SAFETY: the view is one of ours, see `__getbuffer__`.
        if unsafe { !(*view).internal.is_null() } {
            *self.0.writers() -= 1;
        }
    }
}
