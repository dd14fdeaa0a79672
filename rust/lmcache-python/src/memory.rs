//! Objects in host memory, as Python sees them, and L1, which has a file of its own. The buffer export is the only
//! unsafe code.

mod l1;

use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread;
use std::time::Duration;

use lmcache_memory::error::MemoryError;
use lmcache_memory::local_cpu;
use lmcache_memory::mapped::Mapped;
use lmcache_memory::object::{self, ChunkMut};
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

pub(crate) use self::l1::{LocalCpu, unknown_policy};
use crate::errors::NativeError;
use crate::gate::{Owned, caught};

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
pub(crate) struct MemoryObj {
    shared: Arc<Shared>,
    /// References that this handle took besides its own; changed under the lock of what it shares.
    num_extra: AtomicUsize,
}

struct Memory {
    state: State,
    /// References that the handles took besides their own: clones of sealed memory, and mere places for them
    /// as long as it is writable, when it has one owner.
    extra: Vec<Option<object::MemoryObj>>,
    /// The loan that copies on a GPU share, while there is one.
    on_device: Option<Weak<Loan>>,
}

struct Shared {
    memory: Owned<Mutex<Memory>>,
    /// Buffers that Python holds on a writable piece; it cannot be sealed under them.
    writers: Mutex<usize>,
}

impl Shared {
    fn try_lock(&self) -> Result<MutexGuard<'_, Memory>, NativeError> {
        Ok(self
            .memory
            .get()?
            .lock()
            .unwrap_or_else(PoisonError::into_inner))
    }

    /// As `try_lock`, once copies on a GPU that are under way have given the memory back.
    fn at_rest(&self) -> Result<MutexGuard<'_, Memory>, NativeError> {
        loop {
            let memory = self.try_lock()?;
            if !matches!(memory.state, State::Lent) || memory.on_device.is_none() {
                return Ok(memory);
            }
            drop(memory);
            // Whoever gives it back does without the interpreter, but others may need it meanwhile.
            Python::attach(|py| py.detach(|| thread::sleep(LANDING_PAUSE)));
        }
    }

    fn lock(&self) -> MutexGuard<'_, Memory> {
        self.try_lock()
            .expect("the caller has used the handle in this process before")
    }

    fn seal(&self, object: object::MemoryObj) {
        let mut memory = self.lock();
        memory.extra.fill(Some(object.clone()));
        memory.state = State::Sealed(object);
    }

    fn writers(&self) -> MutexGuard<'_, usize> {
        self.writers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A writable piece on loan to a copy; it goes home when dropped, whatever happens to the copy.
pub(crate) struct Loan {
    home: Arc<Shared>,
    chunk: Option<ChunkMut>,
    /// Of its first byte.
    address: usize,
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
            let mut memory = self.home.lock();
            memory.state = State::Writable(chunk);
            memory.on_device = None;
        }
    }
}

/// Where a pool's bytes are, and what keeps them there: for copies that go on when the call has returned.
pub(crate) struct Lasting {
    pub(crate) address: usize,
    pub(crate) len: usize,
    pub(crate) pool: Mapped,
    pub(crate) keep: Keep,
}

/// Holds memory for copies under way.
#[derive(Clone)]
#[expect(dead_code, reason = "held, not read")]
pub(crate) enum Keep {
    Loan(Arc<Loan>),
    Sealed(object::MemoryObj),
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

/// Between two looks whether a copy on a GPU is done.
const LANDING_PAUSE: Duration = Duration::from_micros(20);

pub(crate) const LENT: &str =
    "memory is in use by a copy, or named twice in this call; use each object once at a time";
const TWICE: &str = "memory is named twice in this call; allocate one object a key";
const UNSEALED: &str =
    "memory is not sealed; put it with StorageManager.batched_put, or seal() it first";
const SPENT: &str = "memory was put or released before; allocate anew";
const SURPLUS: &str = "this handle took no reference that it could give back; call ref_count_up once for each \
    ref_count_down, and drop the handle itself to end its own reference";

/// What the handle took ends with it. In a fork nothing is touched: it is all the parent's.
impl Drop for MemoryObj {
    fn drop(&mut self) {
        let num_extra = *self.num_extra.get_mut();
        if num_extra > 0
            && let Ok(mut memory) = self.shared.try_lock()
        {
            let kept = memory.extra.len().saturating_sub(num_extra);
            let given_back = memory.extra.split_off(kept);
            drop(memory);
            drop(given_back);
        }
    }
}

impl MemoryObj {
    fn new(state: State) -> Self {
        let extra = Vec::new();
        Self::of(Arc::new(Shared {
            memory: Owned::new(Mutex::new(Memory {
                state,
                extra,
                on_device: None,
            })),
            writers: Mutex::new(0),
        }))
    }

    /// Memory that was written for Python to have.
    pub(crate) fn writable(chunk: ChunkMut) -> Self {
        Self::new(State::Writable(chunk))
    }

    /// The sealed memory.
    pub(crate) fn sealed_object(&self) -> Result<object::MemoryObj, NativeError> {
        match &self.shared.try_lock()?.state {
            State::Sealed(object) => Ok(object.clone()),
            _ => Err(NativeError::Argument(UNSEALED.into())),
        }
    }

    fn of(shared: Arc<Shared>) -> Self {
        let num_extra = AtomicUsize::new(0);
        Self { shared, num_extra }
    }

    fn require_no_writer(&self) -> PyResult<()> {
        if *self.shared.writers() > 0 {
            return Err(PyBufferError::new_err(
                "memory is still exported for writing; release every memoryview and tensor of it before it is put",
            ));
        }
        Ok(())
    }

    /// Leaves the handle as it is, so that a refused put costs nothing.
    fn require_puttable(&self, store: &local_cpu::LocalCpu) -> PyResult<()> {
        match &self.shared.at_rest()?.state {
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
        let mut memory = self.shared.at_rest()?;
        match std::mem::replace(&mut memory.state, by) {
            State::Writable(chunk) => Ok(chunk),
            other => {
                let lent = matches!(other, State::Lent);
                memory.state = other;
                Err(NativeError::Spent(if lent { LENT } else { SPENT }).into())
            }
        }
    }

    /// The memory, to be written by a copy.
    pub(crate) fn lend(&self) -> PyResult<Loan> {
        let mut chunk = self.replace_writable(State::Lent)?;
        let address = chunk.bytes_mut().as_mut_ptr() as usize;
        Ok(Loan {
            home: Arc::clone(&self.shared),
            chunk: Some(chunk),
            address,
        })
    }

    /// Whether both are handles of the same memory.
    pub(crate) fn is_same_memory(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.shared, &other.shared)
    }

    /// Writable memory for copies on a GPU, which may share it: each part has one writer at a time by their order.
    pub(crate) fn lend_lasting(&self) -> PyResult<Lasting> {
        let loan = loop {
            let memory = self.shared.try_lock()?;
            match (&memory.state, &memory.on_device) {
                (State::Lent, Some(shared)) => {
                    if let Some(loan) = shared.upgrade() {
                        break loan;
                    }
                    // Its last holder is about to give it back, and needs the lock for that and nothing else.
                    drop(memory);
                    thread::yield_now();
                }
                _ => {
                    drop(memory);
                    let loan = Arc::new(self.lend()?);
                    self.shared.try_lock()?.on_device = Some(Arc::downgrade(&loan));
                    break loan;
                }
            }
        };
        let chunk = loan.chunk.as_ref().expect("only the drop takes it");
        Ok(Lasting {
            address: loan.address,
            len: chunk.len(),
            pool: chunk.mapped(),
            keep: Keep::Loan(loan),
        })
    }

    /// The memory, to be read by copies on a GPU.
    pub(crate) fn source_lasting(&self) -> PyResult<Lasting> {
        if let State::Sealed(object) = &self.shared.try_lock()?.state {
            return Ok(Lasting {
                address: object.bytes().as_ptr() as usize,
                len: object.len(),
                pool: object.mapped(),
                keep: Keep::Sealed(object.clone()),
            });
        }
        self.lend_lasting()
    }

    /// The memory, to be read by a copy.
    pub(crate) fn source(&self) -> PyResult<Source> {
        if let State::Sealed(object) = &self.shared.at_rest()?.state {
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
        Self::of(Arc::clone(&of.shared))
    }

    /// Size in bytes; 0 once released.
    #[getter]
    fn nbytes(&self) -> PyResult<usize> {
        Ok(match &self.shared.at_rest()?.state {
            State::Writable(chunk) => chunk.len(),
            State::Sealed(object) => object.len(),
            State::Lent => return Err(NativeError::Spent(LENT).into()),
            State::Released => 0,
        })
    }

    /// References to the memory, the store's own and those of `ref_count_up` included; 0 once released.
    #[getter]
    fn ref_count(&self) -> PyResult<usize> {
        let memory = self.shared.at_rest()?;
        Ok(match &memory.state {
            State::Writable(_) | State::Lent => 1 + memory.extra.len(),
            State::Sealed(object) => object.ref_count(),
            State::Released => 0,
        })
    }

    /// Takes one more reference, which this handle gives back with `ref_count_down` or as it ends.
    fn ref_count_up(&self) -> PyResult<()> {
        let mut memory = self.shared.at_rest()?;
        let clone = match &memory.state {
            State::Sealed(object) => Some(object.clone()),
            State::Writable(_) | State::Lent => None,
            State::Released => return Err(NativeError::Spent(SPENT).into()),
        };
        memory.extra.push(clone);
        self.num_extra.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// Gives back one reference that this handle took with `ref_count_up`.
    fn ref_count_down(&self) -> PyResult<()> {
        let mut memory = self.shared.at_rest()?;
        if self.num_extra.load(Ordering::Relaxed) == 0 {
            return Err(NativeError::Spent(SURPLUS).into());
        }
        self.num_extra.fetch_sub(1, Ordering::Relaxed);
        let given_back = memory.extra.pop();
        drop(memory);
        drop(given_back);
        Ok(())
    }

    /// Seals the memory without publishing it: readable from here on, and found under no key.
    fn seal(&self) -> PyResult<()> {
        let chunk = self.take_writable()?;
        let object = caught(|| Ok::<_, NativeError>(chunk.seal_unpublished()))?;
        self.shared.seal(object);
        Ok(())
    }

    /// Positions of the chunk's tokens in their prompt, as native int64 end to end; `None` if nobody set them.
    #[getter]
    fn positions<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let memory = self.shared.at_rest()?;
        let positions = match &memory.state {
            State::Writable(chunk) => chunk.positions(),
            State::Sealed(object) => object.positions(),
            State::Lent => return Err(NativeError::Spent(LENT).into()),
            State::Released => None,
        };
        Ok(positions.map(|positions| {
            let bytes: Vec<u8> = positions.iter().flat_map(|p| p.to_ne_bytes()).collect();
            PyBytes::new(py, &bytes)
        }))
    }

    /// Sets the positions of writable memory, which then stay with the chunk.
    fn set_positions(&self, positions: Vec<i64>) -> PyResult<()> {
        match &mut self.shared.at_rest()?.state {
            State::Writable(chunk) => {
                chunk.set_positions(positions.into());
                Ok(())
            }
            State::Lent => Err(NativeError::Spent(LENT).into()),
            State::Sealed(_) | State::Released => Err(NativeError::Spent(SPENT).into()),
        }
    }

    /// Whether it is sealed: written for good and readable by all.
    #[getter]
    fn sealed(&self) -> PyResult<bool> {
        Ok(matches!(self.shared.at_rest()?.state, State::Sealed(_)))
    }

    /// A copy of the bytes.
    fn to_bytes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        match &mut self.shared.at_rest()?.state {
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
        let (address, len, readonly) = match &mut this.shared.at_rest()?.state {
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
            *this.shared.writers() += 1;
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
            *self.shared.writers() -= 1;
        }
    }
}
