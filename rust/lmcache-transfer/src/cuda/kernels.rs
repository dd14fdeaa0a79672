//! What a launch is told, which kernel and which shape it takes, and the kernels as they were built.
//!
//! The `#[repr(C)]` structs are the twins of those in `csrc/paged_copy.h`.

use std::hint;
use std::mem::offset_of;

use lmcache_core::layout::{CopyPlan, PagedLayout, Placement};

use crate::cuda::error::CudaError;

/// How the kernels of this build came about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KernelBuild {
    /// Release of the nvcc that compiled them, or empty: this build has none.
    pub nvcc: &'static str,
    /// Compute capabilities × 10 with code of their own.
    pub architectures: &'static [u32],
    /// Compute capabilities × 10 whose PTX is there for GPUs that no code fits.
    pub ptx: &'static [u32],
    /// Why there are none, or empty.
    pub absent_because: &'static str,
}

/// How the kernels of this build came about.
pub const KERNEL_BUILD: KernelBuild = include!(concat!(env!("OUT_DIR"), "/kernel_build.rs"));

/// A driver reads whole words of it.
#[repr(C, align(16))]
struct Aligned<T: ?Sized>(T);

static FATBIN: &Aligned<[u8]> =
    &Aligned(*include_bytes!(concat!(env!("OUT_DIR"), "/kernels.fatbin")));

/// Bytes of the compiled kernels as they are in this very binary; 0 where there are none.
pub fn image_bytes() -> usize {
    // Not foldable into a number: what is counted must be there.
    hint::black_box(&FATBIN.0).len()
}

/// The compiled kernels, for any GPU from compute capability 7.5 on.
pub fn image() -> Result<&'static [u8], CudaError> {
    if KERNEL_BUILD.nvcc.is_empty() {
        return Err(CudaError::NoKernels {
            reason: KERNEL_BUILD.absent_because,
        });
    }
    Ok(&FATBIN.0)
}

/// `lmc_paged_copy`: tokens of a request and where they lie; see there.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[expect(missing_docs, reason = "csrc/paged_copy.h says what each field is")]
pub struct PagedCopy {
    pub layers: u64,
    pub chunks: u64,
    pub slots: u64,
    pub block_stride: u64,
    pub token_stride: u64,
    pub plane_stride: u64,
    pub head_stride: u64,
    pub run_bytes: u64,
    pub num_tokens: u32,
    pub chunk_tokens: u32,
    pub skip: u32,
    pub block_tokens: u32,
    pub planes: u32,
    pub heads: u32,
    pub first_layer: u32,
    pub num_layers: u32,
    pub chunk_layer: u32,
    pub reserved: u32,
}

const _: () = {
    assert!(size_of::<PagedCopy>() == 104);
    assert!(offset_of!(PagedCopy, layers) == 0);
    assert!(offset_of!(PagedCopy, chunks) == 8);
    assert!(offset_of!(PagedCopy, slots) == 16);
    assert!(offset_of!(PagedCopy, block_stride) == 24);
    assert!(offset_of!(PagedCopy, token_stride) == 32);
    assert!(offset_of!(PagedCopy, plane_stride) == 40);
    assert!(offset_of!(PagedCopy, head_stride) == 48);
    assert!(offset_of!(PagedCopy, run_bytes) == 56);
    assert!(offset_of!(PagedCopy, num_tokens) == 64);
    assert!(offset_of!(PagedCopy, chunk_tokens) == 68);
    assert!(offset_of!(PagedCopy, skip) == 72);
    assert!(offset_of!(PagedCopy, block_tokens) == 76);
    assert!(offset_of!(PagedCopy, planes) == 80);
    assert!(offset_of!(PagedCopy, heads) == 84);
    assert!(offset_of!(PagedCopy, first_layer) == 88);
    assert!(offset_of!(PagedCopy, num_layers) == 92);
    assert!(offset_of!(PagedCopy, chunk_layer) == 96);
    assert!(offset_of!(PagedCopy, reserved) == 100);
};

/// `lmc_rope_shift`: keys that are to be turned from the positions they were made for; see there.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[expect(missing_docs, reason = "csrc/paged_copy.h says what each field is")]
pub struct RopeShift {
    pub keys: u64,
    pub stored: u64,
    pub wanted: u64,
    pub half_turns: u64,
    pub token_stride: u64,
    pub head_stride: u64,
    pub rows: u64,
    pub row_bytes: u64,
    pub num_tokens: u32,
    pub heads: u32,
    pub rotary_dim: u32,
    pub interleaved: u32,
}

const _: () = {
    assert!(size_of::<RopeShift>() == 80);
    assert!(offset_of!(RopeShift, keys) == 0);
    assert!(offset_of!(RopeShift, stored) == 8);
    assert!(offset_of!(RopeShift, wanted) == 16);
    assert!(offset_of!(RopeShift, half_turns) == 24);
    assert!(offset_of!(RopeShift, token_stride) == 32);
    assert!(offset_of!(RopeShift, head_stride) == 40);
    assert!(offset_of!(RopeShift, rows) == 48);
    assert!(offset_of!(RopeShift, row_bytes) == 56);
    assert!(offset_of!(RopeShift, num_tokens) == 64);
    assert!(offset_of!(RopeShift, heads) == 68);
    assert!(offset_of!(RopeShift, rotary_dim) == 72);
    assert!(offset_of!(RopeShift, interleaved) == 76);
};

/// Which way bytes go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// From the cache into chunks (a store).
    Gather,
    /// From chunks into the cache (a load).
    Scatter,
}

/// How a launch names the layers it moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layers {
    /// By a table of their addresses.
    Many,
    /// One, by its address.
    One,
}

/// Bytes that the kernels can move at once; for each there is one of every kind.
pub const VECTOR_WIDTHS: [u64; 5] = [16, 8, 4, 2, 1];

/// A copy kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CopyKernel {
    /// How layers are named.
    pub layers: Layers,
    /// Which way bytes go.
    pub direction: Direction,
    /// One of [`VECTOR_WIDTHS`].
    pub width: u64,
}

impl CopyKernel {
    /// Every copy kernel there is; [`CopyKernel::index`] counts along it.
    pub fn all() -> impl Iterator<Item = Self> {
        [Layers::Many, Layers::One].into_iter().flat_map(|layers| {
            [Direction::Gather, Direction::Scatter]
                .into_iter()
                .flat_map(move |direction| {
                    VECTOR_WIDTHS.into_iter().map(move |width| Self {
                        layers,
                        direction,
                        width,
                    })
                })
        })
    }

    /// Its place among [`CopyKernel::all`].
    pub fn index(&self) -> usize {
        let kind = match (self.layers, self.direction) {
            (Layers::Many, Direction::Gather) => 0,
            (Layers::Many, Direction::Scatter) => 1,
            (Layers::One, Direction::Gather) => 2,
            (Layers::One, Direction::Scatter) => 3,
        };
        kind * VECTOR_WIDTHS.len() + 4 - self.width.trailing_zeros() as usize
    }

    /// Its name in the compiled module.
    pub fn name(&self) -> String {
        let layers = match self.layers {
            Layers::Many => "multi",
            Layers::One => "single",
        };
        let direction = match self.direction {
            Direction::Gather => "gather",
            Direction::Scatter => "scatter",
        };
        format!("{layers}_layer_kv_transfer_{direction}_{}", self.width)
    }
}

/// A kernel that works on stored keys in a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ShiftKernel {
    /// Rotates keys of 32-bit floats.
    RotateF32,
    /// Rotates keys of 16-bit floats.
    RotateF16,
    /// Rotates keys of bfloat16.
    RotateBf16,
    /// Zeroes the rows of gaps, one of [`VECTOR_WIDTHS`] bytes at once.
    ZeroGaps(u64),
}

impl ShiftKernel {
    /// Every one there is; [`ShiftKernel::index`] counts along it.
    pub fn all() -> impl Iterator<Item = Self> {
        let rotations = [Self::RotateF32, Self::RotateF16, Self::RotateBf16];
        let zeroings = VECTOR_WIDTHS.into_iter().map(Self::ZeroGaps);
        rotations.into_iter().chain(zeroings)
    }

    /// Its place among [`ShiftKernel::all`].
    pub fn index(&self) -> usize {
        match self {
            Self::RotateF32 => 0,
            Self::RotateF16 => 1,
            Self::RotateBf16 => 2,
            Self::ZeroGaps(width) => 7 - width.trailing_zeros() as usize,
        }
    }

    /// Its name in the compiled module.
    pub fn name(&self) -> String {
        match self {
            Self::RotateF32 => "rope_shift_f32".into(),
            Self::RotateF16 => "rope_shift_f16".into(),
            Self::RotateBf16 => "rope_shift_bf16".into(),
            Self::ZeroGaps(width) => format!("zero_gaps_{width}"),
        }
    }
}

impl RopeShift {
    /// What the kernel multiplies distances by, for inverse frequencies in radians a position.
    pub fn half_turns(inverse_frequencies: &[f64]) -> Vec<f64> {
        let half_turn = std::f64::consts::PI;
        inverse_frequencies
            .iter()
            .map(|frequency| frequency / half_turn)
            .collect()
    }

    /// The widest vector that zeroes a row.
    pub fn vector_width(&self) -> u64 {
        let bits = self.rows | self.row_bytes | self.token_stride | VECTOR_WIDTHS[0];
        1 << bits.trailing_zeros()
    }
}

impl PagedCopy {
    /// What can be said before anything has an address: `num_tokens` tokens in chunks of `chunk_tokens`, of which
    /// the first `skip` stay where they are.
    ///
    /// Opaque blocks are counted as tokens, so that their slots are block numbers; see [`unit_slots`].
    pub fn new(
        layout: &PagedLayout,
        num_tokens: usize,
        chunk_tokens: usize,
        skip: usize,
    ) -> Result<Self, CudaError> {
        // Whole blocks where there must be; sizes that an address can name.
        for tokens in [num_tokens, chunk_tokens, skip] {
            layout.layer_bytes(tokens)?;
        }
        let mut copy = Self::default();
        let unit_tokens = match *layout {
            PagedLayout::Opaque {
                block_tokens,
                block_bytes,
                block_stride,
            } => {
                copy.block_stride = block_stride as u64;
                copy.run_bytes = block_bytes as u64;
                (copy.block_tokens, copy.planes, copy.heads) = (1, 1, 1);
                block_tokens
            }
            PagedLayout::Tokens {
                block_tokens,
                block_stride,
                token_stride,
                planes,
                plane_stride,
                heads,
                head_stride,
                run_bytes,
            } => {
                copy.block_stride = block_stride as u64;
                copy.token_stride = token_stride as u64;
                copy.plane_stride = plane_stride as u64;
                copy.head_stride = head_stride as u64;
                copy.run_bytes = run_bytes as u64;
                copy.block_tokens = self::count(block_tokens, num_tokens, planes * heads)?;
                copy.planes = self::count(planes, num_tokens, planes * heads)?;
                copy.heads = self::count(heads, num_tokens, planes * heads)?;
                1
            }
        };
        let runs = copy.planes as usize * copy.heads as usize;
        self::count(
            (num_tokens / unit_tokens).saturating_mul(runs),
            num_tokens,
            runs,
        )?;
        copy.num_tokens = self::count(num_tokens / unit_tokens, num_tokens, runs)?;
        copy.chunk_tokens = self::count(chunk_tokens / unit_tokens, num_tokens, runs)?;
        copy.skip = self::count(skip / unit_tokens, num_tokens, runs)?;
        Ok(copy)
    }

    /// The widest vector that divides every distance and every one of `addresses`.
    pub fn vector_width(&self, addresses: impl IntoIterator<Item = u64>) -> u64 {
        let mut bits = self.run_bytes | self.block_stride | VECTOR_WIDTHS[0];
        for (count, stride) in [
            (self.block_tokens, self.token_stride),
            (self.planes, self.plane_stride),
            (self.heads, self.head_stride),
        ] {
            if count > 1 {
                bits |= stride;
            }
        }
        bits = addresses
            .into_iter()
            .fold(bits, |bits, address| bits | address);
        1 << bits.trailing_zeros()
    }
}

fn count(value: usize, num_tokens: usize, runs: usize) -> Result<u32, CudaError> {
    u32::try_from(value).map_err(|_| CudaError::TooManyRuns { num_tokens, runs })
}

/// One slot for each token the kernels count: the tokens' own, or the blocks of an opaque layout.
///
/// `placement` covers the tokens from the first on; everything is checked as [`CopyPlan::build`] checks it.
pub fn unit_slots(
    layout: &PagedLayout,
    num_blocks: usize,
    num_tokens: usize,
    placement: Placement<'_>,
) -> Result<Vec<i64>, CudaError> {
    CopyPlan::build(layout, num_blocks, num_tokens, 0, placement)?;
    let block_tokens = layout.block_tokens();
    let by_blocks = matches!(layout, PagedLayout::Opaque { .. });
    Ok(match placement {
        Placement::Blocks(blocks) if by_blocks => blocks[..num_tokens / block_tokens]
            .iter()
            .map(|&block| i64::from(block))
            .collect(),
        Placement::Blocks(blocks) => (0..num_tokens)
            .map(|token| {
                let block = i64::from(blocks[token / block_tokens]);
                block * block_tokens as i64 + (token % block_tokens) as i64
            })
            .collect(),
        Placement::Slots(slots) if by_blocks => slots[..num_tokens]
            .iter()
            .step_by(block_tokens)
            .map(|&slot| slot.div_euclid(block_tokens as i64))
            .collect(),
        Placement::Slots(slots) => slots[..num_tokens].to_vec(),
    })
}

/// Blocks in a launch and threads in a block, by axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LaunchShape {
    /// Blocks.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub block: [u32; 3],
}

const MAX_THREADS: u64 = 256;
/// The limit of every device for the second and third axis of a grid.
const MAX_GRID_YZ: u64 = 65_535;
/// Vectors that a thread moves of a long run before another block takes over.
const VECTORS_A_THREAD: u64 = 4;

impl LaunchShape {
    /// The shape for `copy` at `width` bytes at once, or `None` where nothing is to be moved.
    ///
    /// Threads lie along a run first, so that neighbours touch neighbouring bytes.
    pub fn of(copy: &PagedCopy, width: u64) -> Option<Self> {
        let runs = u64::from(copy.planes) * u64::from(copy.heads);
        let items = u64::from(copy.num_tokens.saturating_sub(copy.skip)) * runs;
        if items == 0 || copy.num_layers == 0 {
            return None;
        }
        let vectors = (copy.run_bytes / width).max(1);
        let along = vectors.next_power_of_two().min(MAX_THREADS);
        let across = MAX_THREADS / along;
        let depth = vectors.div_ceil(along * VECTORS_A_THREAD);
        Some(Self {
            // Below 2^32, as items are; a device's own limit is 2^31 - 1.
            grid: [
                items.div_ceil(across).min(i32::MAX as u64) as u32,
                u64::from(copy.num_layers).min(MAX_GRID_YZ) as u32,
                depth.min(MAX_GRID_YZ) as u32,
            ],
            block: [along as u32, across as u32, 1],
        })
    }

    /// The shape for `kernel`, or `None` where nothing is to be done: along a row first, then across tokens.
    pub fn of_shift(shift: &RopeShift, kernel: ShiftKernel) -> Option<Self> {
        let row = match kernel {
            ShiftKernel::ZeroGaps(width) => shift.row_bytes / width,
            _ => u64::from(shift.heads) * u64::from(shift.rotary_dim / 2),
        };
        if row == 0 || shift.num_tokens == 0 {
            return None;
        }
        let along = row.next_power_of_two().min(MAX_THREADS);
        let across = MAX_THREADS / along;
        let tokens = u64::from(shift.num_tokens).div_ceil(across);
        Some(Self {
            grid: [
                row.div_ceil(along).min(i32::MAX as u64) as u32,
                tokens.min(MAX_GRID_YZ) as u32,
                1,
            ],
            block: [along as u32, across as u32, 1],
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OPAQUE: PagedLayout = PagedLayout::Opaque {
        block_tokens: 16,
        block_bytes: 4096,
        block_stride: 8192,
    };

    #[test]
    fn kernels_are_counted_in_order() {
        for (at, kernel) in CopyKernel::all().enumerate() {
            assert_eq!(kernel.index(), at, "{}", kernel.name());
        }
        assert_eq!(CopyKernel::all().count(), 20);
        for (at, kernel) in ShiftKernel::all().enumerate() {
            assert_eq!(kernel.index(), at, "{}", kernel.name());
        }
    }

    #[test]
    fn opaque_blocks_are_counted_as_tokens() {
        let copy = PagedCopy::new(&OPAQUE, 64, 32, 16).expect("whole blocks");
        assert_eq!((copy.num_tokens, copy.chunk_tokens, copy.skip), (4, 2, 1));
        assert!(PagedCopy::new(&OPAQUE, 63, 32, 16).is_err());
        let slots: Vec<i64> = (32..48).chain([-1; 16]).chain(0..16).collect();
        let units = unit_slots(&OPAQUE, 3, 48, Placement::Slots(&slots)).expect("inside");
        assert_eq!(units, [2, -1, 0]);
        let by_table = unit_slots(&OPAQUE, 3, 32, Placement::Blocks(&[2, 1])).expect("inside");
        assert_eq!(by_table, [2, 1]);
        assert!(unit_slots(&OPAQUE, 2, 48, Placement::Slots(&slots)).is_err());
    }

    #[test]
    fn more_runs_than_a_launch_counts_are_refused() {
        let mla = PagedLayout::Tokens {
            block_tokens: 64,
            block_stride: 64,
            token_stride: 1,
            planes: 1,
            plane_stride: 0,
            heads: 1 << 20,
            head_stride: 1,
            run_bytes: 1,
        };
        let fault = PagedCopy::new(&mla, 1 << 12, 256, 0).expect_err("2^32 runs");
        assert!(matches!(fault, CudaError::TooManyRuns { .. }), "{fault}");
        assert!(PagedCopy::new(&mla, (1 << 12) - 1, 256, 0).is_ok());
    }

    #[test]
    fn the_vector_divides_every_distance_and_address() {
        let copy = PagedCopy {
            run_bytes: 96,
            block_stride: 960,
            token_stride: 8,
            block_tokens: 1,
            planes: 1,
            heads: 1,
            ..PagedCopy::default()
        };
        assert_eq!(copy.vector_width([64, 0]), 16);
        assert_eq!(copy.vector_width([64, 68]), 4);
        assert_eq!(copy.vector_width([64, 67]), 1);
        let apart = PagedCopy {
            block_tokens: 2,
            ..copy
        };
        assert_eq!(apart.vector_width([64]), 8);
    }

    #[test]
    fn a_shape_keeps_to_a_devices_limits() {
        let copy = PagedCopy {
            run_bytes: 1 << 40,
            num_tokens: u32::MAX,
            planes: 1,
            heads: 1,
            num_layers: 1 << 20,
            ..PagedCopy::default()
        };
        let shape = LaunchShape::of(&copy, 1).expect("something to move");
        assert_eq!(shape.grid, [i32::MAX as u32, 65_535, 65_535]);
        assert_eq!(shape.block, [256, 1, 1]);
        let short = PagedCopy {
            run_bytes: 128,
            ..copy
        };
        assert_eq!(
            LaunchShape::of(&short, 16).expect("so too").block,
            [8, 32, 1]
        );
        let skipped = PagedCopy {
            skip: u32::MAX,
            ..copy
        };
        assert_eq!(LaunchShape::of(&skipped, 1), None);
    }
}
