//! One layer at a time on a GPU: planned copies of it, the buffer it is staged in, and the turn of its keys. Handing
//! over addresses of memory that is held is the only unsafe code.

use std::any::Any;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use lmcache_memory::local_cpu::LocalCpu;
use lmcache_memory::object::ChunkMut;
use lmcache_transfer::cuda::device::Device;
use lmcache_transfer::cuda::handles::StreamId;
use lmcache_transfer::cuda::layer_copy::{DeviceLayerCopy, Piece};
use lmcache_transfer::cuda::staging::{DeviceBuffer, DeviceTurn};
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::{PyBufferError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::device::{CudaCache, CudaDevice, direction, piece};
use crate::errors::NativeError;
use crate::gate::{Owned, enter, lock};
use crate::layer_copy::{Piece as Given, outside, place};
use crate::memory::{Keep, LENT, MemoryObj};
use crate::rope;
use crate::transfer::{int64s, spans};

/// Copies between one layer of an engine's cache on a GPU and memory of the caller's, planned once for all layers
/// and one direction.
#[pyclass(frozen, module = "lmcache_rs._native")]
pub(crate) struct CudaLayerCopy(Owned<DeviceLayerCopy>);

#[pymethods]
impl CudaLayerCopy {
    /// Plans the tokens `starts[i]..ends[i]` of `slots`, against the engine's `stream`; a slot of -1 is skipped.
    #[new]
    #[pyo3(signature = (paged, starts, ends, slots, *, stream, storing))]
    fn new(
        py: Python<'_>,
        paged: &CudaCache,
        starts: Vec<usize>,
        ends: Vec<usize>,
        slots: &Bound<'_, PyAny>,
        stream: usize,
        storing: bool,
    ) -> PyResult<Self> {
        let here = paged.cache()?;
        let slots = int64s(py, slots, "slot_mapping")?;
        let spans = spans(starts.len(), &starts, &ends, &slots)?;
        let copy = enter(py, || {
            let (device, cache, stream) = (&here.device, &here.cache, StreamId(stream));
            DeviceLayerCopy::plan(device, cache, stream, direction(storing), spans)
        })?;
        Ok(Self(Owned::new(copy)))
    }

    /// Bytes that each span takes in one layer.
    #[getter]
    fn layer_bytes(&self) -> PyResult<Vec<usize>> {
        Ok(self.0.get()?.layer_bytes().collect())
    }

    /// Has one layer copied out of the cache into one piece a span: bytes moved.
    ///
    /// Pieces of memory objects and buffers are written by the time that `finish` returns, others by the time that
    /// this does.
    fn gather(&self, py: Python<'_>, layer: usize, pieces: Vec<Given<'_>>) -> PyResult<usize> {
        self.copy(py, layer, pieces, true)
    }

    /// Has one piece a span copied into one layer of the cache, before anything that the engine's stream is given
    /// from now on: bytes moved.
    fn scatter(&self, py: Python<'_>, layer: usize, pieces: Vec<Given<'_>>) -> PyResult<usize> {
        self.copy(py, layer, pieces, false)
    }

    /// Returns once everything copied so far is done; what it held is given back.
    fn finish(&self, py: Python<'_>) -> PyResult<()> {
        let copy = self.0.get()?;
        enter(py, || {
            copy.fence()?;
            copy.device().drain(copy.direction())?;
            copy.device().settle();
            Ok::<_, NativeError>(())
        })
    }
}

impl CudaLayerCopy {
    fn copy(
        &self,
        py: Python<'_>,
        layer: usize,
        pieces: Vec<Given<'_>>,
        storing: bool,
    ) -> PyResult<usize> {
        let copy = self.0.get()?;
        if direction(storing) != copy.direction() {
            let error = "these copies were planned for the other direction; plan others";
            return Err(NativeError::Argument(error.into()).into());
        }
        let mut reached = Reached::take(py, copy.device(), pieces, storing)?;
        let (pieces, keep) = (reached.pieces(), reached.keep());
        let must_wait = storing && reached.is_bounced();
        let moved = enter(py, || {
            // SAFETY: pieces of pools or of buffers on the device that `keep` holds: written ones are lent to such
            // copies alone, which follow each other in one stream.
            let moved = unsafe { copy.layer(layer, &pieces, keep) }?;
            if must_wait {
                copy.device().drain(copy.direction())?;
            }
            Ok::<_, NativeError>(moved)
        })?;
        if must_wait {
            reached.give_back(py)?;
        }
        Ok(moved)
    }
}

/// Memory on a GPU that one layer of some tokens is staged in, row by row in the stored form, for one direction.
///
/// What is in it before the first write is anything; builds with debug assertions make it noise.
#[pyclass(frozen, module = "lmcache_rs._native")]
pub(crate) struct CudaLayerBuffer(Owned<DeviceBuffer>);

#[pymethods]
impl CudaLayerBuffer {
    #[new]
    #[pyo3(signature = (device, nbytes, *, storing))]
    fn new(py: Python<'_>, device: &CudaDevice, nbytes: usize, storing: bool) -> PyResult<Self> {
        let device = device.device()?;
        let buffer = enter(py, || DeviceBuffer::new(device, direction(storing), nbytes))?;
        Ok(Self(Owned::new(buffer)))
    }

    /// Size in bytes.
    #[getter]
    fn nbytes(&self) -> PyResult<usize> {
        Ok(self.0.get()?.len())
    }

    /// Has the i-th piece copied to `offsets[i]`: bytes moved. It returns before that is done.
    fn load(&self, py: Python<'_>, pieces: Vec<Given<'_>>, offsets: Vec<usize>) -> PyResult<usize> {
        self.exchange(py, pieces, &offsets, true)
    }

    /// Has what is at `offsets[i]` copied to the i-th piece: bytes moved. Memory objects are written once
    /// `CudaLayerCopy.finish` has returned, other memory when this has.
    fn unload(
        &self,
        py: Python<'_>,
        pieces: Vec<Given<'_>>,
        offsets: Vec<usize>,
    ) -> PyResult<usize> {
        self.exchange(py, pieces, &offsets, false)
    }

    /// Fills the bytes of each `(start, end)` with zeros.
    fn zero(&self, py: Python<'_>, ranges: Vec<(usize, usize)>) -> PyResult<()> {
        let buffer = self.0.get()?;
        let nbytes = buffer.len();
        if let Some((start, end)) = ranges
            .iter()
            .find(|(start, end)| start > end || *end > nbytes)
        {
            return Err(PyValueError::new_err(format!(
                "bytes {start} to {end} are not within a buffer of {nbytes}"
            )));
        }
        enter(py, || buffer.zero(&ranges))
    }

    /// Turns the keys in the buffer to the positions that `shift` leads to.
    fn rotate(&self, py: Python<'_>, shift: &CudaRopeShift) -> PyResult<()> {
        let (buffer, turn) = (self.0.get()?, shift.0.get()?);
        enter(py, || buffer.rotate(turn))
    }

    /// A copy of the bytes, once all that was asked before is done.
    fn to_bytes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let buffer = self.0.get()?;
        let bounce = enter(py, || {
            let bounce = Bounced::new(buffer.device(), &vec![0; buffer.len()])?;
            let places = [(bounce.piece(), 0)];
            // SAFETY: memory of its own, which is held.
            unsafe { buffer.exchange(false, &places, Box::new(bounce.clone())) }?;
            buffer.device().drain(buffer.direction())?;
            Ok::<_, NativeError>(bounce)
        })?;
        Ok(PyBytes::new(py, &bounce.bytes()))
    }
}

impl CudaLayerBuffer {
    fn exchange(
        &self,
        py: Python<'_>,
        pieces: Vec<Given<'_>>,
        offsets: &[usize],
        is_load: bool,
    ) -> PyResult<usize> {
        let buffer = self.0.get()?;
        if pieces.len() != offsets.len() {
            return Err(PyValueError::new_err(format!(
                "{} pieces and {} offsets; give one offset a piece",
                pieces.len(),
                offsets.len()
            )));
        }
        for (&Given(_, _, nbytes), &offset) in pieces.iter().zip(offsets) {
            if place(offset, nbytes, buffer.len()).is_none() {
                return Err(outside(offset, nbytes, buffer.len()));
            }
        }
        let mut reached = Reached::take(py, buffer.device(), pieces, !is_load)?;
        let places: Vec<_> = reached
            .pieces()
            .into_iter()
            .zip(offsets.iter().copied())
            .collect();
        let keep = reached.keep();
        let must_wait = !is_load && reached.is_bounced();
        let moved = enter(py, || {
            // SAFETY: as in `CudaLayerCopy::copy`; the places were checked.
            let moved = unsafe { buffer.exchange(is_load, &places, keep) }?;
            if must_wait {
                buffer.device().drain(buffer.direction())?;
            }
            Ok::<_, NativeError>(moved)
        })?;
        if must_wait {
            reached.give_back(py)?;
        }
        Ok(moved)
    }
}

/// A shift of one row a token from the positions `old` to `new` on a GPU, for layers of the same frequencies.
#[pyclass(frozen, module = "lmcache_rs._native")]
pub(crate) struct CudaRopeShift(Owned<DeviceTurn>);

#[pymethods]
impl CudaRopeShift {
    /// As `RopeShift`, for a device.
    #[new]
    #[pyo3(signature = (device, inv_freq, old, new, *, interleaved, dtype, row_elements, heads, head_size, offset))]
    #[expect(clippy::too_many_arguments, reason = "the row's numbers, one each")]
    fn new(
        py: Python<'_>,
        device: &CudaDevice,
        inv_freq: Vec<f64>,
        old: &Bound<'_, PyAny>,
        new: &Bound<'_, PyAny>,
        interleaved: bool,
        dtype: &str,
        row_elements: usize,
        heads: usize,
        head_size: usize,
        offset: usize,
    ) -> PyResult<Self> {
        let rows = rope::rows(dtype, row_elements, heads, head_size, offset)?;
        let pairing = rope::pairing(interleaved);
        let old = int64s(py, old, "stored positions")?;
        let new = int64s(py, new, "new positions")?;
        let device = device.device()?;
        let turn = enter(py, || {
            DeviceTurn::plan(device, pairing, &inv_freq, rows, &old, &new)
        })?;
        Ok(Self(Owned::new(turn)))
    }
}

/// A page-locked copy of bytes that lie elsewhere.
#[derive(Clone)]
struct Bounced {
    chunk: Arc<Mutex<ChunkMut>>,
    piece: Piece,
}

impl Bounced {
    fn new(device: &Device, bytes: &[u8]) -> Result<Self, NativeError> {
        // One piece with room for the pool's own rounding; page-locking makes this the slow way.
        let pool = LocalCpu::new(bytes.len() as u64 + (1 << 16), Duration::ZERO)?;
        let chunk = pool.allocate(&[bytes.len()]).and_then(|mut all| all.pop());
        let mut chunk = chunk.ok_or(NativeError::Spent("a pool of its own has no room"))?;
        chunk.bytes_mut().copy_from_slice(bytes);
        let piece = Piece {
            address: chunk.bytes_mut().as_mut_ptr() as u64,
            len: bytes.len(),
            reach: device.reach(&chunk.mapped()),
        };
        let chunk = Arc::new(Mutex::new(chunk));
        Ok(Self { chunk, piece })
    }

    fn piece(&self) -> Piece {
        self.piece
    }

    /// What is in it, once the copies are done.
    fn bytes(&self) -> Vec<u8> {
        let mut chunk = lock(&self.chunk);
        chunk.bytes_mut().to_vec()
    }
}

/// Pieces that the device reaches, and what holds them.
struct Reached {
    taken: Vec<(Piece, Taken)>,
}

enum Taken {
    Pool(Keep),
    Buffer(Box<dyn Any + Send>),
    /// Of the buffer, these bytes.
    Elsewhere(Bounced, PyBuffer<u8>, Range<usize>),
}

impl Reached {
    fn take(
        py: Python<'_>,
        device: &Arc<Device>,
        given: Vec<Given<'_>>,
        writing: bool,
    ) -> PyResult<Self> {
        let mut objects: Vec<Bound<'_, MemoryObj>> = Vec::new();
        let mut taken = Vec::new();
        for Given(memory, offset, nbytes) in given {
            if let Ok(object) = memory.cast::<MemoryObj>() {
                let again = |other: &Bound<'_, MemoryObj>| other.get().is_same_memory(object.get());
                let lasting = if writing {
                    object.get().lend_lasting()
                } else {
                    object.get().source_lasting()
                }?;
                let is_writable = matches!(lasting.keep, Keep::Loan(_));
                if is_writable && objects.iter().any(again) {
                    return Err(NativeError::Spent(LENT).into());
                }
                if place(offset, nbytes, lasting.len).is_none() {
                    return Err(outside(offset, nbytes, lasting.len));
                }
                let piece = piece(device, &lasting, offset, nbytes);
                taken.push((piece, Taken::Pool(lasting.keep)));
                objects.push(object.clone());
            } else if let Ok(buffer) = memory.cast::<CudaLayerBuffer>() {
                let buffer = buffer.get().0.get()?;
                if place(offset, nbytes, buffer.len()).is_none() {
                    return Err(outside(offset, nbytes, buffer.len()));
                }
                let (mut piece, keep) = buffer.piece();
                piece.address += offset as u64;
                piece.len = nbytes;
                taken.push((piece, Taken::Buffer(keep)));
            } else {
                taken.push(elsewhere(py, device, &memory, offset, nbytes, writing)?);
            }
        }
        Ok(Self { taken })
    }

    fn pieces(&self) -> Vec<Piece> {
        self.taken.iter().map(|&(piece, _)| piece).collect()
    }

    /// What the copies need until they are done.
    fn keep(&mut self) -> Box<dyn Any + Send> {
        let mut kept: Vec<Box<dyn Any + Send>> = Vec::new();
        for (_, taken) in &mut self.taken {
            match taken {
                Taken::Pool(keep) => kept.push(Box::new(keep.clone())),
                Taken::Buffer(keep) => kept.push(std::mem::replace(keep, Box::new(()))),
                Taken::Elsewhere(bounced, ..) => kept.push(Box::new(bounced.clone())),
            }
        }
        Box::new(kept)
    }

    fn is_bounced(&self) -> bool {
        let is_bounced = |(_, taken): &(Piece, Taken)| matches!(taken, Taken::Elsewhere(..));
        self.taken.iter().any(is_bounced)
    }

    /// Writes what was copied to where it belongs.
    fn give_back(&self, py: Python<'_>) -> PyResult<()> {
        for (_, taken) in &self.taken {
            if let Taken::Elsewhere(bounced, home, place) = taken {
                let mut all = home.to_vec(py)?;
                all[place.clone()].copy_from_slice(&bounced.bytes());
                home.copy_from_slice(py, &all)?;
            }
        }
        Ok(())
    }
}

/// Memory outside our pools, which may be neither page-locked nor kept: through a copy that is.
fn elsewhere(
    py: Python<'_>,
    device: &Arc<Device>,
    memory: &Bound<'_, PyAny>,
    offset: usize,
    nbytes: usize,
    writing: bool,
) -> PyResult<(Piece, Taken)> {
    let home = PyBuffer::<u8>::get(memory).map_err(|error| {
        PyTypeError::new_err(format!(
            "memory must be a MemoryObj, a CudaLayerBuffer or a buffer of bytes: {error}"
        ))
    })?;
    if writing && home.readonly() {
        return Err(PyBufferError::new_err(
            "memory is read-only and cannot be filled; give writable memory",
        ));
    }
    let all = home.to_vec(py)?;
    let place = place(offset, nbytes, all.len());
    let place = place.ok_or_else(|| outside(offset, nbytes, all.len()))?;
    let bounced = enter(py, || Bounced::new(device, &all[place.clone()]))?;
    Ok((bounced.piece(), Taken::Elsewhere(bounced, home, place)))
}
