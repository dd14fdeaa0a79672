//! What each way costs on this GPU, timed once at a grid of lengths and counts.
//!
//! By the device's own clock, from a mark before the first call to one behind the last copy: a copy that is waited
//! for because its runs were slow to submit counts as slow. The smallest of some repetitions counts, for what
//! disturbs a copy only makes it longer.

use std::sync::Arc;
use std::time::{Duration, Instant};

use lmcache_memory::region::Region;

use crate::cuda::costs::Costs;
use crate::cuda::current::{Current, PAGE_LOCK_SLICE_BYTES};
use crate::cuda::descriptors::Descriptor;
use crate::cuda::error::CudaError;
use crate::cuda::executor::{CopyPath, Executor};
use crate::cuda::handles::{DeviceMemory, Event, PageLock};
use crate::cuda::kernels::{CopyKernel, Direction, LaunchShape, Layers, PagedCopy};
use crate::cuda::moves::{CopyList, Layer};
use crate::cuda::planner::{CostTable, Sample};
use crate::cuda::tables::Tables;

/// Bytes of a run. Around 28 KiB copy engines were seen to change their ways, so there the grid is finer.
pub(super) const LENGTHS: [usize; 16] = [
    256,
    512,
    1 << 10,
    2 << 10,
    4 << 10,
    8 << 10,
    16 << 10,
    24 << 10,
    28 << 10,
    32 << 10,
    64 << 10,
    128 << 10,
    256 << 10,
    512 << 10,
    1 << 20,
    2 << 20,
];
/// Runs of a copy.
pub(super) const COUNTS: [usize; 8] = [1, 4, 16, 32, 64, 256, 1024, 4096];
/// The largest copy that is timed, and the page-locked memory that it takes.
pub(super) const MAX_BYTES: usize = 8 << 20;
/// Between runs in the cache, so that no two become one.
const GAP: usize = 256;
/// A copy this slow is not tried with more runs.
const SLOW: Duration = Duration::from_millis(8);
/// Rounds over the whole grid, as far as there is time.
const ROUNDS: usize = 3;

/// Costs of both directions, or `None` where `limit` ran out before each had been timed once.
pub(super) fn costs(executor: &Executor, limit: Duration) -> Result<Option<Costs>, CudaError> {
    let began = Instant::now();
    let current = executor.context.enter()?;
    let mut bench = Bench::new(executor, &current)?;
    let mut grids =
        [Direction::Gather, Direction::Scatter].map(|direction| (direction, Vec::<Sample>::new()));
    for (direction, _) in &grids {
        for path in CopyPath::ALL {
            if bench.offers(path, *direction) {
                // The first launch of a kernel loads it.
                bench.time(*direction, path, COUNTS[1], LENGTHS[0])?;
            }
        }
    }
    for round in 0..ROUNDS {
        for (direction, samples) in &mut grids {
            for path in CopyPath::ALL {
                if !bench.offers(path, *direction) {
                    continue;
                }
                for run_bytes in LENGTHS {
                    for runs in COUNTS {
                        if runs * run_bytes > MAX_BYTES && runs > 1 {
                            break;
                        }
                        let here = |sample: &Sample| {
                            (sample.path, sample.run_bytes, sample.runs) == (path, run_bytes, runs)
                        };
                        let known = samples.iter().position(here);
                        if round > 0 && known.is_none() {
                            break;
                        }
                        if began.elapsed() >= limit {
                            return Ok(if round == 0 { None } else { tables(&grids) });
                        }
                        let nanoseconds = bench.time(*direction, path, runs, run_bytes)?;
                        match known {
                            Some(at) => {
                                let sample = &mut samples[at];
                                sample.nanoseconds = sample.nanoseconds.min(nanoseconds);
                            }
                            None => samples.push(Sample {
                                path,
                                runs,
                                run_bytes,
                                nanoseconds,
                            }),
                        }
                        if nanoseconds > SLOW.as_nanos() as f64 {
                            break;
                        }
                    }
                }
            }
        }
    }
    Ok(tables(&grids))
}

fn tables(grids: &[(Direction, Vec<Sample>); 2]) -> Option<Costs> {
    Some(Costs {
        store: CostTable::new(&grids[0].1)?,
        load: CostTable::new(&grids[1].1)?,
    })
}

/// Memory on both sides of the link, and two marks.
struct Bench<'a> {
    executor: &'a Executor,
    current: &'a Current,
    cache: DeviceMemory,
    host: Arc<Region>,
    tables: Tables,
    begin: Event,
    end: Event,
    _lock: PageLock,
}

impl<'a> Bench<'a> {
    fn new(executor: &'a Executor, current: &'a Current) -> Result<Self, CudaError> {
        let most_runs = COUNTS[COUNTS.len() - 1];
        let host = Region::new(MAX_BYTES as u64).map_err(|fault| CudaError::HostMemory {
            bytes: MAX_BYTES,
            reason: fault.to_string(),
        })?;
        let host = Arc::new(host);
        let base = host.base().as_ptr();
        // SAFETY: the region is mapped as long as the lock holds it.
        let lock = unsafe {
            current.page_lock(
                base,
                host.len(),
                PAGE_LOCK_SLICE_BYTES,
                Arc::clone(&host) as _,
            )
        }?;
        Ok(Self {
            executor,
            current,
            cache: current.device_memory(MAX_BYTES + most_runs * GAP)?,
            host,
            tables: Tables::new(current, 1 + most_runs)?,
            begin: current.timed_event()?,
            end: current.timed_event()?,
            _lock: lock,
        })
    }

    /// Whether there is such a way here, beside the others.
    fn offers(&self, path: CopyPath, direction: Direction) -> bool {
        match path {
            CopyPath::Engine => true,
            // Without batched copies the engines take runs singly anyway.
            CopyPath::Single => self.current.context().driver().has_batched_copies(),
            CopyPath::Kernel => self.executor.kernels.is_some(),
            CopyPath::Staged => {
                let staging = self.executor.staging(direction);
                let room = staging.bytes() >= MAX_BYTES && staging.memory(self.current).is_some();
                self.executor.kernels.is_some() && room
            }
        }
    }

    /// Nanoseconds of one copy, waited for.
    fn time(
        &mut self,
        direction: Direction,
        path: CopyPath,
        runs: usize,
        run_bytes: usize,
    ) -> Result<f64, CudaError> {
        let stream = self.executor.stream(direction);
        let staging = self.executor.staging(direction);
        let stored = self.host.base().as_ptr() as u64;
        let staged = staging.memory(self.current).map(DeviceMemory::address);
        let place = match (path, staged) {
            (CopyPath::Staged, Some(staged)) => staged,
            _ => stored,
        };
        let mut list = CopyList::new(match path {
            CopyPath::Staged => vec![Descriptor {
                paged: 0,
                stored,
                len: runs * run_bytes,
                layer_bytes: 0,
            }],
            _ => (0..runs)
                .map(|run| Descriptor {
                    paged: (run * (run_bytes + GAP)) as u64,
                    stored: stored + (run * run_bytes) as u64,
                    len: run_bytes,
                    layer_bytes: 0,
                })
                .collect(),
        });
        let layer = Layer {
            executor: self.executor,
            current: self.current,
            direction,
            base: self.cache.address(),
            index: 0,
        };
        let copy = PagedCopy {
            layers: self.cache.address(),
            chunks: self.tables.word(0),
            slots: self.tables.word(1),
            block_stride: (run_bytes + GAP) as u64,
            run_bytes: run_bytes as u64,
            num_tokens: runs as u32,
            chunk_tokens: runs as u32,
            block_tokens: 1,
            planes: 1,
            heads: 1,
            num_layers: 1,
            ..PagedCopy::default()
        };
        let kernel = CopyKernel {
            layers: Layers::One,
            direction,
            width: copy.vector_width([copy.layers, place]),
        };
        let turn = staging.turn();
        if path.needs_kernels() {
            let words: Vec<u64> = [place].into_iter().chain(0..runs as u64).collect();
            self.tables.fill(self.current, &words, stream)?;
            self.current.drain(stream)?;
        }
        let launch = || match (&self.executor.kernels, LaunchShape::of(&copy, kernel.width)) {
            // SAFETY: tables, cache, staging and page-locked memory of at least `runs` runs, all waited for below.
            (Some(kernels), Some(shape)) => unsafe {
                self.current.launch(kernels, kernel, shape, &copy, stream)
            },
            _ => Ok(()),
        };
        let single = matches!(path, CopyPath::Single | CopyPath::Staged);
        // SAFETY: the cache has room for the runs and the gaps between them, the region and the staging for the
        // runs; what is copied is nobody's, and waited for below.
        let mut copies = |base| unsafe { list.give(0..list.len(), &layer, base, single) };
        self.current.record(&self.begin, stream)?;
        let given = match (path, direction) {
            (CopyPath::Engine | CopyPath::Single, _) => copies(layer.base),
            (CopyPath::Kernel, _) => launch(),
            (CopyPath::Staged, Direction::Gather) => launch().and_then(|()| copies(place)),
            (CopyPath::Staged, Direction::Scatter) => copies(place).and_then(|()| launch()),
        };
        drop(turn);
        let marked = given.and_then(|()| self.current.record(&self.end, stream));
        // Memory of ours is in use until here, whatever failed.
        self.current.drain(stream)?;
        marked?;
        let milliseconds = self.current.milliseconds(&self.begin, &self.end)?;
        // The clock of events ticks twice a microsecond.
        Ok((f64::from(milliseconds) * 1e6).max(100.0))
    }
}

impl Drop for Bench<'_> {
    fn drop(&mut self) {
        // After an error copies may still be under way; a device that cannot even be waited for does none.
        for direction in [Direction::Gather, Direction::Scatter] {
            let _ = self.current.drain(self.executor.stream(direction));
        }
    }
}
