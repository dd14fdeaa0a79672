//! Follows a plan: which bytes in which order, and with which instructions.

use std::ptr;

use lmcache_core::layout::CopyPlan;

/// A cache line.
const LINE: usize = 64;
/// Shorter runs that do not fill whole lines are written through the caches: the lines at both ends would be
/// most of them.
const STREAMED_UNALIGNED_FROM: usize = 1024;
/// Longer runs are gathered a head at a time, so that the engine's memory is read in order (measured: 18
/// against 15 GB/s at 1 KiB); shorter ones a token at a time (14 against 11 at 128 bytes).
const HEAD_BY_HEAD_FROM: usize = 256;

/// How to write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Style {
    /// Past the caches, where the processor can.
    pub(super) stream: bool,
    /// With the widest instructions we know, where the processor has them.
    pub(super) wide: bool,
}

/// Copies what `plan` names between a layer of the paged cache and the layer of a chunk, out of the cache if
/// `GATHER`; all of it is written when this returns, for other threads too.
///
/// # Safety
/// Every byte that the plan names must lie in memory that is valid at `paged` and `chunk` (for reads on the
/// side that is read, for writes on the other), the two sides must not overlap, and nobody else may write
/// either or read the written side meanwhile.
pub(super) unsafe fn walk<const GATHER: bool>(
    plan: &CopyPlan,
    paged: *mut u8,
    chunk: *mut u8,
    style: Style,
) {
    #[cfg(target_arch = "x86_64")]
    if style.wide && is_x86_feature_detected!("avx") {
        // SAFETY: the processor has AVX; the rest is the caller's promise.
        return unsafe { wide::walk::<GATHER>(plan, paged, chunk, style.stream) };
    }
    let _ = style;
    // SAFETY: the caller's promise.
    unsafe { each_run::<_, GATHER>(plan, paged, chunk, |len| Plain { len }) }
}

/// Copies runs of one length.
trait Mover: Copy {
    /// # Safety
    /// As for `copy_nonoverlapping` of the mover's length.
    unsafe fn run(self, from: *const u8, to: *mut u8);
}

/// memcpy.
#[derive(Clone, Copy)]
struct Plain {
    len: usize,
}

impl Mover for Plain {
    #[inline(always)]
    unsafe fn run(self, from: *const u8, to: *mut u8) {
        // SAFETY: the caller's promise.
        unsafe { ptr::copy_nonoverlapping(from, to, self.len) }
    }
}

/// Each run of the plan by the mover that `mover` gives for its length.
///
/// # Safety
/// As for [`walk`].
#[inline(always)]
unsafe fn each_run<M: Mover, const GATHER: bool>(
    plan: &CopyPlan,
    paged: *mut u8,
    chunk: *mut u8,
    mover: impl Fn(usize) -> M,
) {
    let grid = *plan.grid();
    let (outer, inner) = (grid.outer, grid.inner);
    if grid.is_dense() {
        for stretch in plan.stretches() {
            let mover = mover(stretch.rows * grid.run_bytes);
            let (paged, chunk) = (
                paged.wrapping_add(stretch.paged),
                chunk.wrapping_add(stretch.chunk),
            );
            // SAFETY: a stretch of the plan, so inside by the caller's promise.
            unsafe { step::<M, GATHER>(mover, paged, chunk) };
        }
        return;
    }
    let (mover, row_bytes) = (mover(grid.run_bytes), grid.row_bytes());
    for stretch in plan.stretches() {
        let mut paged = paged.wrapping_add(stretch.paged);
        let mut chunk = chunk.wrapping_add(stretch.chunk);
        if GATHER && grid.run_bytes >= HEAD_BY_HEAD_FROM {
            for _ in 0..outer.count {
                let mut of_head = paged;
                for _ in 0..inner.count {
                    let (mut from, mut to) = (of_head, chunk);
                    for _ in 0..stretch.rows {
                        // SAFETY: a run of the plan, so inside by the caller's promise.
                        unsafe { step::<M, GATHER>(mover, from, to) };
                        from = from.wrapping_add(grid.row_stride);
                        to = to.wrapping_add(row_bytes);
                    }
                    of_head = of_head.wrapping_add(inner.stride);
                    chunk = chunk.wrapping_add(grid.run_bytes);
                }
                paged = paged.wrapping_add(outer.stride);
            }
            continue;
        }
        for _ in 0..stretch.rows {
            let mut of_plane = paged;
            for _ in 0..outer.count {
                let mut of_head = of_plane;
                for _ in 0..inner.count {
                    // SAFETY: a run of the plan, so inside by the caller's promise.
                    unsafe { step::<M, GATHER>(mover, of_head, chunk) };
                    of_head = of_head.wrapping_add(inner.stride);
                    chunk = chunk.wrapping_add(grid.run_bytes);
                }
                of_plane = of_plane.wrapping_add(outer.stride);
            }
            paged = paged.wrapping_add(grid.row_stride);
        }
    }
}

/// # Safety
/// As for the mover.
#[inline(always)]
unsafe fn step<M: Mover, const GATHER: bool>(mover: M, paged: *mut u8, chunk: *mut u8) {
    let (from, to) = if GATHER {
        (paged, chunk)
    } else {
        (chunk, paged)
    };
    // SAFETY: the caller's promise.
    unsafe { mover.run(from, to) }
}

#[cfg(target_arch = "x86_64")]
mod wide {
    use std::arch::x86_64::{
        __m256i, _mm_sfence, _mm256_loadu_si256, _mm256_storeu_si256, _mm256_stream_si256,
    };
    use std::ptr;

    use lmcache_core::layout::CopyPlan;

    use super::{LINE, Mover, Plain, STREAMED_UNALIGNED_FROM, each_run};

    /// `LINES` lines through the caches, at any alignment.
    #[derive(Clone, Copy)]
    struct Fixed<const LINES: usize>;

    /// `LINES` lines past the caches; targets are aligned to a line.
    #[derive(Clone, Copy)]
    struct FixedStreamed<const LINES: usize>;

    /// Any length past the caches, but for what does not fill a line at both ends.
    #[derive(Clone, Copy)]
    struct Streamed {
        len: usize,
    }

    impl<const LINES: usize> Mover for Fixed<LINES> {
        #[inline(always)]
        unsafe fn run(self, from: *const u8, to: *mut u8) {
            for at in 0..LINES {
                let (from, to) = (from.wrapping_add(at * LINE), to.wrapping_add(at * LINE));
                // SAFETY: a line of the run; `walk` runs with AVX.
                unsafe {
                    let line = load(from);
                    _mm256_storeu_si256(to.cast(), line[0]);
                    _mm256_storeu_si256(to.add(32).cast(), line[1]);
                }
            }
        }
    }

    impl<const LINES: usize> Mover for FixedStreamed<LINES> {
        #[inline(always)]
        unsafe fn run(self, from: *const u8, to: *mut u8) {
            for at in 0..LINES {
                // SAFETY: a line of the run, its target aligned.
                unsafe { stream(from.wrapping_add(at * LINE), to.wrapping_add(at * LINE)) };
            }
        }
    }

    impl Mover for Streamed {
        #[inline(always)]
        unsafe fn run(self, mut from: *const u8, mut to: *mut u8) {
            let head = to.addr().wrapping_neg() % LINE;
            let head = head.min(self.len);
            let (lines, tail) = ((self.len - head) / LINE, (self.len - head) % LINE);
            // SAFETY: head, lines and tail are the run, one behind the other; the lines are aligned to the
            // target, and `walk` runs with AVX.
            unsafe {
                ptr::copy_nonoverlapping(from, to, head);
                (from, to) = (from.add(head), to.add(head));
                for _ in 0..lines / 2 {
                    stream(from, to);
                    stream(from.add(LINE), to.add(LINE));
                    (from, to) = (from.add(2 * LINE), to.add(2 * LINE));
                }
                if lines % 2 == 1 {
                    stream(from, to);
                    (from, to) = (from.add(LINE), to.add(LINE));
                }
                ptr::copy_nonoverlapping(from, to, tail);
            }
        }
    }

    /// # Safety
    /// A line must be readable, and the caller be inlined where AVX is on.
    #[inline(always)]
    unsafe fn load(from: *const u8) -> [__m256i; 2] {
        // SAFETY: the caller's promise.
        unsafe {
            [
                _mm256_loadu_si256(from.cast()),
                _mm256_loadu_si256(from.add(32).cast()),
            ]
        }
    }

    /// # Safety
    /// As for [`load`]; a line must be writable, and aligned to one.
    #[inline(always)]
    unsafe fn stream(from: *const u8, to: *mut u8) {
        debug_assert!(to.addr().is_multiple_of(LINE));
        // SAFETY: the caller's promise.
        unsafe {
            let line = load(from);
            _mm256_stream_si256(to.cast(), line[0]);
            _mm256_stream_si256(to.add(32).cast(), line[1]);
        }
    }

    /// # Safety
    /// As for [`super::walk`], on a processor with AVX.
    #[target_feature(enable = "avx")]
    pub(super) unsafe fn walk<const GATHER: bool>(
        plan: &CopyPlan,
        paged: *mut u8,
        chunk: *mut u8,
        stream: bool,
    ) {
        let grid = plan.grid();
        let target = if GATHER { chunk } else { paged };
        let lines = match grid.run_bytes {
            _ if grid.is_dense() => 0,
            bytes if bytes % LINE == 0 => bytes / LINE,
            _ => 0,
        };
        /// The mover of a fixed length, or else the one for any.
        macro_rules! by_length {
            ($fixed:ident, $any:expr) => {
                // SAFETY: the caller's promise; streamed lines are aligned, as asked below.
                unsafe {
                    match lines {
                        1 => each_run::<_, GATHER>(plan, paged, chunk, |_| $fixed::<1>),
                        2 => each_run::<_, GATHER>(plan, paged, chunk, |_| $fixed::<2>),
                        4 => each_run::<_, GATHER>(plan, paged, chunk, |_| $fixed::<4>),
                        8 => each_run::<_, GATHER>(plan, paged, chunk, |_| $fixed::<8>),
                        16 => each_run::<_, GATHER>(plan, paged, chunk, |_| $fixed::<16>),
                        _ => each_run::<_, GATHER>(plan, paged, chunk, $any),
                    }
                }
            };
        }
        if stream && lines > 0 && runs_begin_lines::<GATHER>(plan, target) {
            by_length!(FixedStreamed, |len| Streamed { len });
        } else if stream && (grid.is_dense() || grid.run_bytes >= STREAMED_UNALIGNED_FROM) {
            // SAFETY: the caller's promise.
            unsafe { each_run::<_, GATHER>(plan, paged, chunk, |len| Streamed { len }) };
        } else {
            by_length!(Fixed, |len| Plain { len });
            return;
        }
        // Whoever learns of the copy's end, by whatever store or lock, sees its bytes.
        _mm_sfence();
    }

    /// Whether every run's target is aligned to a line; runs are whole lines.
    fn runs_begin_lines<const GATHER: bool>(plan: &CopyPlan, target: *const u8) -> bool {
        let mut bits = target.addr();
        if !GATHER {
            // In the chunk, runs lie one behind the other.
            let grid = plan.grid();
            bits |= grid.row_stride | grid.outer.stride | grid.inner.stride;
            bits |= plan
                .stretches()
                .iter()
                .fold(0, |bits, stretch| bits | stretch.paged);
        }
        bits.is_multiple_of(LINE)
    }
}
