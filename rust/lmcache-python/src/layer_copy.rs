//! One layer at a time: planned copies of it, and the buffer it is staged in.

use std::ops::Range;
use std::sync::{Arc, Mutex};

use lmcache_transfer::layer_copy;
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::{PyBufferError, PyMemoryError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::errors::NativeError;
use crate::gate::{Owned, enter, lock};
use crate::memory::{MemoryObj, Source};
use crate::rope::RopeShift;
use crate::transfer::{PagedCache, int64s, spans};

/// Copies between one layer of an engine's cache and memory of the caller's, planned once for all layers.
#[pyclass(frozen, module = "lmcache_rs._native")]
pub(crate) struct LayerCopy(Owned<layer_copy::LayerCopy>);

#[pymethods]
impl LayerCopy {
    /// Plans the tokens `starts[i]..ends[i]` of `slots`; a slot of -1 is skipped.
    #[new]
    fn new(
        py: Python<'_>,
        paged: &PagedCache,
        starts: Vec<usize>,
        ends: Vec<usize>,
        slots: &Bound<'_, PyAny>,
    ) -> PyResult<Self> {
        let paged = paged.cache()?;
        let slots = int64s(py, slots, "slot_mapping")?;
        let spans = spans(starts.len(), &starts, &ends, &slots)?;
        let copy = enter(py, || layer_copy::LayerCopy::plan(paged, spans))?;
        Ok(Self(Owned::new(copy)))
    }

    /// Bytes that each span takes in one layer.
    #[getter]
    fn layer_bytes(&self) -> PyResult<Vec<usize>> {
        Ok(self.0.get()?.layer_bytes().collect())
    }

    /// Copies one layer out of the cache into one piece a span: bytes moved.
    fn gather(&self, py: Python<'_>, layer: usize, pieces: Vec<Piece<'_>>) -> PyResult<usize> {
        let copy = self.0.get()?;
        let mut pieces = held(py, pieces, Held::for_writing)?;
        let moved = {
            let mut targets: Vec<_> = pieces.iter_mut().map(HeldPiece::bytes_mut).collect();
            enter(py, || copy.gather(layer, &mut targets))?
        };
        pieces
            .iter()
            .try_for_each(|piece| piece.held.give_back(py))?;
        Ok(moved)
    }

    /// Copies one piece a span into one layer of the cache: bytes moved.
    fn scatter(&self, py: Python<'_>, layer: usize, pieces: Vec<Piece<'_>>) -> PyResult<usize> {
        let copy = self.0.get()?;
        let mut pieces = held(py, pieces, Held::for_reading)?;
        let sources: Vec<_> = pieces.iter_mut().map(HeldPiece::bytes).collect();
        enter(py, || copy.scatter(layer, &sources))
    }
}

/// Host memory that one layer of some tokens is staged in, row by row in the stored form.
///
/// What is in it before the first write is anything; builds with debug assertions make it noise.
#[pyclass(frozen, module = "lmcache_rs._native")]
pub(crate) struct LayerBuffer {
    // Empty while a call uses the memory.
    home: Owned<Arc<Mutex<Option<Vec<u8>>>>>,
    nbytes: usize,
}

const UNWRITTEN: u8 = if cfg!(debug_assertions) { 0xA5 } else { 0 };

#[pymethods]
impl LayerBuffer {
    #[new]
    fn new(py: Python<'_>, nbytes: usize) -> PyResult<Self> {
        let memory = enter(py, || {
            let mut memory = Vec::new();
            let enough = memory.try_reserve_exact(nbytes).is_ok();
            if enough {
                memory.resize(nbytes, UNWRITTEN);
            }
            Ok::<_, NativeError>(enough.then_some(memory))
        })?;
        let memory = memory.ok_or_else(|| {
            PyMemoryError::new_err(format!(
                "no {nbytes} bytes to stage a layer in; move fewer tokens at once, or without staging"
            ))
        })?;
        let home = Owned::new(Arc::new(Mutex::new(Some(memory))));
        Ok(Self { home, nbytes })
    }

    /// Size in bytes.
    #[getter]
    fn nbytes(&self) -> usize {
        self.nbytes
    }

    /// Copies the i-th piece to `offsets[i]`: bytes moved.
    fn load(&self, py: Python<'_>, pieces: Vec<Piece<'_>>, offsets: Vec<usize>) -> PyResult<usize> {
        let mut staged = self.lend()?;
        let places = self.places(&pieces, &offsets)?;
        let mut pieces = held(py, pieces, Held::for_reading)?;
        let sources: Vec<_> = pieces.iter_mut().map(HeldPiece::bytes).collect();
        enter(py, || {
            let memory = staged.bytes_mut();
            let copies = places.into_iter().zip(sources);
            let moved = copies.map(|(place, source)| {
                memory[place].copy_from_slice(source);
                source.len()
            });
            Ok::<_, NativeError>(moved.sum())
        })
    }

    /// Copies what is at `offsets[i]` to the i-th piece: bytes moved.
    fn unload(
        &self,
        py: Python<'_>,
        pieces: Vec<Piece<'_>>,
        offsets: Vec<usize>,
    ) -> PyResult<usize> {
        let mut staged = self.lend()?;
        let places = self.places(&pieces, &offsets)?;
        let mut pieces = held(py, pieces, Held::for_writing)?;
        let moved = {
            let targets: Vec<_> = pieces.iter_mut().map(HeldPiece::bytes_mut).collect();
            enter(py, || {
                let memory = staged.bytes_mut();
                let copies = places.into_iter().zip(targets);
                let moved = copies.map(|(place, target)| {
                    target.copy_from_slice(&memory[place]);
                    target.len()
                });
                Ok::<_, NativeError>(moved.sum())
            })?
        };
        pieces
            .iter()
            .try_for_each(|piece| piece.held.give_back(py))?;
        Ok(moved)
    }

    /// Fills the bytes of each `(start, end)` with zeros.
    fn zero(&self, py: Python<'_>, ranges: Vec<(usize, usize)>) -> PyResult<()> {
        let mut staged = self.lend()?;
        let nbytes = self.nbytes;
        if let Some((start, end)) = ranges
            .iter()
            .find(|(start, end)| start > end || *end > nbytes)
        {
            return Err(PyValueError::new_err(format!(
                "bytes {start} to {end} are not within a buffer of {nbytes}"
            )));
        }
        enter(py, || {
            let memory = staged.bytes_mut();
            ranges
                .into_iter()
                .for_each(|(start, end)| memory[start..end].fill(0));
            Ok::<_, NativeError>(())
        })
    }

    /// Turns the keys in the buffer to the positions that `shift` leads to.
    fn rotate(&self, py: Python<'_>, shift: &RopeShift) -> PyResult<()> {
        let shift = shift.planned()?;
        let mut staged = self.lend()?;
        enter(py, || shift.apply(staged.bytes_mut()))
    }

    /// A copy of the bytes.
    fn to_bytes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        Ok(PyBytes::new(py, self.lend()?.bytes_mut()))
    }
}

impl LayerBuffer {
    fn lend(&self) -> PyResult<Staged> {
        let home = Arc::clone(self.home.get()?);
        let memory = lock(&home).take();
        let memory = memory.ok_or(NativeError::Spent(
            "this buffer is in use by another call; give each pipeline buffers of its own",
        ))?;
        Ok(Staged { home, memory })
    }

    /// Where in the buffer each piece has its place.
    fn places(&self, pieces: &[Piece<'_>], offsets: &[usize]) -> PyResult<Vec<Range<usize>>> {
        if pieces.len() != offsets.len() {
            return Err(PyValueError::new_err(format!(
                "{} pieces and {} offsets; give one offset a piece",
                pieces.len(),
                offsets.len()
            )));
        }
        let pairs = pieces.iter().zip(offsets);
        let places = pairs.map(|(&Piece(_, _, nbytes), &offset)| {
            let place = place(offset, nbytes, self.nbytes);
            place.ok_or_else(|| outside(offset, nbytes, self.nbytes))
        });
        places.collect()
    }
}

/// A buffer's memory while a call uses it; it goes home when dropped.
struct Staged {
    home: Arc<Mutex<Option<Vec<u8>>>>,
    memory: Vec<u8>,
}

impl Staged {
    fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.memory
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        let memory = std::mem::take(&mut self.memory);
        *lock(&self.home) = Some(memory);
    }
}

/// `(memory, offset, nbytes)`: a part of a memory object, of a layer buffer, or of any other buffer of bytes.
#[derive(FromPyObject)]
pub(crate) struct Piece<'py>(
    pub(crate) Bound<'py, PyAny>,
    pub(crate) usize,
    pub(crate) usize,
);

/// A piece's memory while a call uses it.
enum Held {
    Object(Source),
    Staged(Staged),
    /// A copy: what is outside our pools may change under a call that does not hold the interpreter.
    Copied(Vec<u8>, PyBuffer<u8>),
}

impl Held {
    fn for_reading(py: Python<'_>, memory: &Bound<'_, PyAny>) -> PyResult<Self> {
        match memory.cast::<MemoryObj>() {
            Ok(object) => object.get().source().map(Self::Object),
            Err(_) => Self::of_buffer(py, memory),
        }
    }

    fn for_writing(py: Python<'_>, memory: &Bound<'_, PyAny>) -> PyResult<Self> {
        if let Ok(object) = memory.cast::<MemoryObj>() {
            let loan = object.get().lend()?;
            return Ok(Self::Object(Source::Writable(loan)));
        }
        let held = Self::of_buffer(py, memory)?;
        match &held {
            Self::Copied(_, home) if home.readonly() => Err(PyBufferError::new_err(
                "memory is read-only and cannot be filled; give writable memory",
            )),
            _ => Ok(held),
        }
    }

    fn of_buffer(py: Python<'_>, memory: &Bound<'_, PyAny>) -> PyResult<Self> {
        if let Ok(staged) = memory.cast::<LayerBuffer>() {
            return staged.get().lend().map(Self::Staged);
        }
        let home = PyBuffer::<u8>::get(memory).map_err(|error| {
            PyTypeError::new_err(format!(
                "memory must be a MemoryObj, a LayerBuffer or a buffer of bytes: {error}"
            ))
        })?;
        Ok(Self::Copied(home.to_vec(py)?, home))
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        match self {
            Self::Object(Source::Writable(loan)) => loan.bytes_mut(),
            Self::Object(Source::Sealed(_)) => unreachable!("`for_writing` lends"),
            Self::Staged(staged) => staged.bytes_mut(),
            Self::Copied(bytes, _) => bytes,
        }
    }

    fn bytes(&mut self) -> &[u8] {
        match self {
            Self::Object(source) => source.bytes(),
            Self::Staged(staged) => staged.bytes_mut(),
            Self::Copied(bytes, _) => bytes,
        }
    }

    /// Writes a copy back to where it came from.
    fn give_back(&self, py: Python<'_>) -> PyResult<()> {
        match self {
            Self::Copied(bytes, home) => home.copy_from_slice(py, bytes),
            _ => Ok(()),
        }
    }
}

struct HeldPiece {
    held: Held,
    place: Range<usize>,
}

impl HeldPiece {
    fn bytes(&mut self) -> &[u8] {
        &self.held.bytes()[self.place.clone()]
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.held.bytes_mut()[self.place.clone()]
    }
}

fn held(
    py: Python<'_>,
    pieces: Vec<Piece<'_>>,
    take: fn(Python<'_>, &Bound<'_, PyAny>) -> PyResult<Held>,
) -> PyResult<Vec<HeldPiece>> {
    let held = pieces.into_iter().map(|Piece(memory, offset, nbytes)| {
        let mut held = take(py, &memory)?;
        let available = held.bytes().len();
        let place = place(offset, nbytes, available);
        let place = place.ok_or_else(|| outside(offset, nbytes, available))?;
        Ok(HeldPiece { held, place })
    });
    held.collect()
}

pub(crate) fn place(offset: usize, nbytes: usize, available: usize) -> Option<Range<usize>> {
    let end = offset.checked_add(nbytes)?;
    (end <= available).then_some(offset..end)
}

pub(crate) fn outside(offset: usize, nbytes: usize, available: usize) -> PyErr {
    PyValueError::new_err(format!(
        "{nbytes} bytes from byte {offset} on are not within memory of {available} bytes"
    ))
}
