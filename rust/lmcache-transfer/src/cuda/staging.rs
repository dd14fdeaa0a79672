//! A layer of some tokens in a buffer on the GPU: loaded, turned, zeroed, unloaded.

use std::any::Any;
use std::sync::{Arc, Mutex, PoisonError};

use crate::cuda::device::{Device, Reach};
use crate::cuda::error::CudaError;
use crate::cuda::handles::{DeviceMemory, Kernels};
use crate::cuda::kernels::{Direction, LaunchShape, RopeShift, ShiftKernel};
use crate::cuda::layer_copy::{LentTables, Piece};
use crate::error::TransferError;
use crate::rope::{self, Element, Pairing, Rows};

/// Device memory that one layer is staged in, for one direction: all that is asked of it is done in the order of
/// that direction's stream.
#[derive(Debug)]
pub struct DeviceBuffer {
    device: Arc<Device>,
    direction: Direction,
    /// There until the drop; `None` for no bytes.
    memory: Option<Arc<DeviceMemory>>,
    len: usize,
    /// Where its gaps were when many were last zeroed: they are the same in every layer.
    gaps: Mutex<Option<Gaps>>,
}

/// So many gaps are zeroed by one kernel; fewer by a fill each, which needs no table.
const MANY_GAPS: usize = 4;

/// Parts of a buffer that a kernel zeroes, in rows of one length.
#[derive(Debug)]
struct Gaps {
    ranges: Vec<(usize, usize)>,
    /// A word for each row, negative where it is in a gap.
    tables: Arc<LentTables>,
    num_rows: u32,
    row_bytes: usize,
}

impl DeviceBuffer {
    /// Room for `len` bytes. What is in it before the first write is anything; builds with debug assertions make
    /// it noise.
    pub fn new(device: &Arc<Device>, direction: Direction, len: usize) -> Result<Self, CudaError> {
        let current = device.enter()?;
        let memory = match len {
            0 => None,
            _ => Some(Arc::new(current.device_memory(len)?)),
        };
        let buffer = Self {
            device: Arc::clone(device),
            direction,
            memory,
            len,
            gaps: Mutex::new(None),
        };
        if cfg!(debug_assertions) && len > 0 {
            let stream = device.executor().stream(direction);
            // SAFETY: memory of its own.
            unsafe { current.fill(buffer.address(), 0xA5, len, stream) }?;
        }
        Ok(buffer)
    }

    /// Its bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The device it is on.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// The direction it is for.
    pub fn direction(&self) -> Direction {
        self.direction
    }

    /// All of it, for a copy to or from the cache, and what keeps it.
    pub fn piece(&self) -> (Piece, Box<dyn Any + Send>) {
        let piece = Piece {
            address: self.address(),
            len: self.len,
            reach: Reach::OnDevice,
        };
        (piece, Box::new(self.memory.clone()))
    }

    fn address(&self) -> u64 {
        self.memory.as_ref().map_or(0, |memory| memory.address())
    }

    /// Has each piece copied to its offset, or from there to the piece; `held` is kept until that is done.
    ///
    /// # Safety
    /// The places must be within the buffer, and the pieces host memory of their bytes as long as `held` lives,
    /// which nobody touches meanwhile but by work ordered behind this.
    pub unsafe fn exchange(
        &self,
        is_load: bool,
        places: &[(Piece, usize)],
        held: Box<dyn Any + Send>,
    ) -> Result<usize, CudaError> {
        let current = self.device.enter()?;
        let stream = self.device.executor().stream(self.direction);
        let mut moved = 0;
        let given = places.iter().try_for_each(|&(piece, offset)| {
            debug_assert!(offset + piece.len <= self.len, "checked by the caller");
            if piece.len == 0 {
                return Ok(());
            }
            let here = self.address() + offset as u64;
            let (to, from) = if is_load {
                (here, piece.address)
            } else {
                (piece.address, here)
            };
            moved += piece.len;
            // SAFETY: by the caller's promise.
            unsafe { current.copy(to, from, piece.len, stream) }
        });
        drop(current);
        // Whatever came of it, a part may be under way.
        self.device
            .hold(self.direction, Box::new((held, self.memory.clone())))?;
        given.map(|()| moved)
    }

    /// Has the bytes of each `(start, end)` zeroed; they must be within the buffer.
    pub fn zero(&self, ranges: &[(usize, usize)]) -> Result<(), CudaError> {
        let ranges: Vec<_> = ranges
            .iter()
            .copied()
            .filter(|(start, end)| start < end)
            .collect();
        let is_within = |&(_, end): &(usize, usize)| end <= self.len;
        assert!(ranges.iter().all(is_within), "checked by the caller");
        let executor = self.device.executor();
        if ranges.len() >= MANY_GAPS
            && let Some(kernels) = &executor.kernels
            && let Some(num_rows) = self.rows_of(&ranges)
        {
            return self.zero_rows(ranges, num_rows, kernels);
        }
        let current = self.device.enter()?;
        for (start, end) in ranges {
            let address = self.address() + start as u64;
            let stream = executor.stream(self.direction);
            // SAFETY: within the buffer, which goes only behind this stream's work.
            unsafe { current.fill(address, 0, end - start, stream) }?;
        }
        Ok(())
    }

    /// How many rows of equal length the buffer has if every gap is of whole ones; `None` where there are more of
    /// them than a table is worth.
    fn rows_of(&self, ranges: &[(usize, usize)]) -> Option<u32> {
        let bounds = ranges.iter().flat_map(|&(start, end)| [start, end]);
        let row_bytes = bounds.fold(self.len, greatest_divisor);
        let num_rows = self.len / row_bytes;
        // A row is worth its word.
        (row_bytes >= 64).then_some(u32::try_from(num_rows).ok()?)
    }

    fn zero_rows(
        &self,
        ranges: Vec<(usize, usize)>,
        num_rows: u32,
        kernels: &Kernels,
    ) -> Result<(), CudaError> {
        let mut gaps = self.gaps.lock().unwrap_or_else(PoisonError::into_inner);
        if gaps.as_ref().is_none_or(|gaps| gaps.ranges != ranges) {
            *gaps = None;
            *gaps = Some(self.plan_gaps(ranges, num_rows)?);
        }
        let gaps = gaps.as_ref().expect("planned just now");
        let shift = RopeShift {
            stored: gaps.tables.word(0),
            token_stride: gaps.row_bytes as u64,
            rows: self.address(),
            row_bytes: gaps.row_bytes as u64,
            num_tokens: gaps.num_rows,
            ..RopeShift::default()
        };
        let kernel = ShiftKernel::ZeroGaps(shift.vector_width());
        let Some(shape) = LaunchShape::of_shift(&shift, kernel) else {
            return Ok(());
        };
        let stream = self.device.executor().stream(self.direction);
        let current = self.device.enter()?;
        // SAFETY: the rows fill the buffer, which goes only behind this stream's work, and so do the tables.
        unsafe { current.launch_shift(kernels, kernel, shape, &shift, stream) }?;
        drop(current);
        self.device
            .hold(self.direction, Box::new(Arc::clone(&gaps.tables)))
    }

    fn plan_gaps(&self, ranges: Vec<(usize, usize)>, num_rows: u32) -> Result<Gaps, CudaError> {
        let row_bytes = self.len / num_rows as usize;
        let mut words = vec![0; num_rows as usize];
        for &(start, end) in &ranges {
            words[start / row_bytes..end / row_bytes].fill(-1i64 as u64);
        }
        Ok(Gaps {
            tables: filled(&self.device, self.direction, &words)?,
            ranges,
            num_rows,
            row_bytes,
        })
    }

    /// Has the keys in the buffer turned to the positions that `turn` leads to.
    pub fn rotate(&self, turn: &DeviceTurn) -> Result<(), CudaError> {
        let found = turn.num_rows * turn.row_bytes;
        if found != self.len {
            return Err(rope::refused(format!(
                "{} rows of {} bytes for a buffer of {}",
                turn.num_rows, turn.row_bytes, self.len
            ))
            .into());
        }
        let Some(tables) = &turn.tables else {
            return Ok(());
        };
        let Some(kernels) = &self.device.executor().kernels else {
            let refused = self.device.executor().without_kernels();
            return Err(refused.cloned().unwrap_or(CudaError::NoKernels {
                reason: "none were loaded",
            }));
        };
        let shift = RopeShift {
            keys: self.address() + turn.offset,
            stored: tables.word(0),
            wanted: tables.word(turn.num_rows),
            half_turns: tables.word(2 * turn.num_rows),
            rows: self.address(),
            ..turn.shift
        };
        let Some(shape) = LaunchShape::of_shift(&shift, turn.kernel) else {
            return Ok(());
        };
        assert_eq!(
            self.direction,
            Direction::Scatter,
            "positions come with the loads"
        );
        let stream = self.device.executor().stream(self.direction);
        let current = self.device.enter()?;
        // SAFETY: the rows fill the buffer, which goes only behind this stream's work, and so do the tables.
        unsafe { current.launch_shift(kernels, turn.kernel, shape, &shift, stream) }?;
        drop(current);
        self.device
            .hold(self.direction, Box::new(Arc::clone(tables)))
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        // Not freed under what is under way, nor waited for here. Refused means waited for, or a forked child.
        let _ = self
            .device
            .hold(self.direction, Box::new(self.memory.take()));
    }
}

/// A turn of one row a token from the positions `old` to `new`: what [`rope::Shift`] is for host memory.
///
/// The angle is formed in 64 bits by the kernel; keys of 64 bits are not turned on a GPU.
#[derive(Debug)]
pub struct DeviceTurn {
    tables: Option<Arc<LentTables>>,
    kernel: ShiftKernel,
    /// But for addresses.
    shift: RopeShift,
    num_rows: usize,
    row_bytes: usize,
    /// Bytes from a row's begin to its first rotated element.
    offset: u64,
}

impl DeviceTurn {
    /// Plans the turn and brings its positions to the device.
    pub fn plan(
        device: &Arc<Device>,
        pairing: Pairing,
        inv_freq: &[f64],
        rows: Rows,
        old: &[i64],
        new: &[i64],
    ) -> Result<Self, CudaError> {
        rope::require_rows(inv_freq, &rows)?;
        let kernel = match rows.element {
            Element::F32 => ShiftKernel::RotateF32,
            Element::F16 => ShiftKernel::RotateF16,
            Element::BF16 => ShiftKernel::RotateBf16,
            Element::F64 => {
                return Err(refused("keys of 64 bits are not turned on a GPU"));
            }
        };
        if old.len() != new.len() {
            return Err(refused(&format!(
                "{} stored and {} new positions; give one of each a token",
                old.len(),
                new.len()
            )));
        }
        for (&old, &new) in old.iter().zip(new) {
            if new.checked_sub(old).is_none() {
                return Err(refused(&format!(
                    "positions {old} and {new} are too far from each other"
                )));
            }
            // What is negative is a gap for the kernel.
            if old < 0 {
                return Err(refused(&format!(
                    "stored position {old}; positions count from 0"
                )));
            }
        }
        let count = |value: usize| {
            u32::try_from(value)
                .map_err(|_| refused(&format!("{value} are more than one launch counts")))
        };
        let size = rows.element.size();
        let shift = RopeShift {
            token_stride: (rows.row_elements * size) as u64,
            head_stride: (rows.head_size * size) as u64,
            num_tokens: count(old.len())?,
            heads: count(rows.heads)?,
            rotary_dim: count(2 * inv_freq.len())?,
            interleaved: u32::from(pairing == Pairing::Neighbours),
            ..RopeShift::default()
        };
        let stays = old == new;
        let tables = if stays {
            None
        } else {
            let positions = old.iter().chain(new).map(|&position| position as u64);
            let half_turns = RopeShift::half_turns(inv_freq);
            let words: Vec<u64> = positions
                .chain(half_turns.iter().map(|value| value.to_bits()))
                .collect();
            Some(filled(device, Direction::Scatter, &words)?)
        };
        Ok(Self {
            tables,
            kernel,
            shift,
            num_rows: old.len(),
            row_bytes: rows.row_elements * size,
            offset: (rows.offset * size) as u64,
        })
    }
}

/// Tables with `words` in them, for what a direction's stream is given from now on.
fn filled(
    device: &Arc<Device>,
    direction: Direction,
    words: &[u64],
) -> Result<Arc<LentTables>, CudaError> {
    let current = device.enter()?;
    let executor = device.executor();
    let tables = Arc::new(LentTables::of(executor, &current, words.len())?);
    let given = tables.fill(&current, words, executor.stream(direction));
    drop(current);
    // Whatever came of it, a part may be under way.
    device.hold(direction, Box::new(Arc::clone(&tables)))?;
    given.map(|()| tables)
}

fn greatest_divisor(one: usize, other: usize) -> usize {
    let (mut one, mut other) = (one, other);
    while other != 0 {
        (one, other) = (other, one % other);
    }
    one
}

fn refused(reason: &str) -> CudaError {
    TransferError::Rope {
        reason: reason.into(),
    }
    .into()
}
