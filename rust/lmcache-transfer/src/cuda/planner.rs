//! Which way a copy takes, by what it cost on this very device.
//!
//! The best way depends on the device, the direction, the length of runs and their number, and the point where
//! one way overtakes the other moves with all of them: no constant is right. So each way is timed once at a few
//! lengths and counts, and costs between them are read off lines.
//!
//! A copy takes a fixed time, then the longer of submitting its runs and moving its bytes. At one length that is
//! a line over the count; at one count it is two lines over the length, with a bend where the link begins to be
//! what takes the time.

use std::fmt::Write as _;

use crate::cuda::executor::CopyPath;

/// What a copy of `runs` runs of `run_bytes` bytes took.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sample {
    /// The way it took.
    pub path: CopyPath,
    /// How many runs.
    pub runs: usize,
    /// Bytes of each.
    pub run_bytes: usize,
    /// From the first call to the end of the copy.
    pub nanoseconds: f64,
}

/// Costs of each way over a grid of lengths and counts, for one direction of one device.
#[derive(Debug, Clone, PartialEq)]
pub struct CostTable {
    /// Lengths that were timed, ascending.
    lengths: Vec<usize>,
    /// Counts, ascending.
    counts: Vec<usize>,
    /// Nanoseconds, `[length][count]`, by each way that was timed.
    ways: Vec<(CopyPath, Vec<f64>)>,
}

impl CostTable {
    /// A table of samples: every way at every length, from the smallest count on. Counts that would have taken too
    /// long may be missing at the end; costs go on there as the last two counts say. `None` for any other gap.
    pub fn new(samples: &[Sample]) -> Option<Self> {
        let axis = |of: fn(&Sample) -> usize| {
            let mut values: Vec<usize> = samples.iter().map(of).collect();
            values.sort_unstable();
            values.dedup();
            (*values.first()? > 0).then_some(values)
        };
        let lengths = axis(|sample| sample.run_bytes)?;
        let counts = axis(|sample| sample.runs)?;
        let row = |path, run_bytes| {
            let cost = |&runs: &usize| {
                let here = |sample: &&Sample| {
                    (sample.path, sample.run_bytes, sample.runs) == (path, run_bytes, runs)
                };
                Some(samples.iter().find(here)?.nanoseconds)
            };
            let mut costs: Vec<f64> = counts.iter().map_while(cost).collect();
            let whole = costs.iter().all(|cost| *cost > 0.0 && cost.is_finite());
            let later = counts[costs.len()..]
                .iter()
                .any(|count| cost(count).is_some());
            if costs.is_empty() || !whole || later {
                return None;
            }
            let timed = costs.len();
            for &count in &counts[timed..] {
                let known = if timed == 1 {
                    costs[0] * count as f64 / counts[0] as f64
                } else {
                    line(&counts[..timed], |at| costs[at], timed - 2, count)
                };
                // Noise in the last two must not make more of it cheaper.
                costs.push(known.max(costs[timed - 1]));
            }
            Some(costs)
        };
        let is_there = |path: &CopyPath| samples.iter().any(|sample| sample.path == *path);
        let ways = CopyPath::ALL.into_iter().filter(is_there).map(|path| {
            let rows = lengths.iter().map(|&length| row(path, length));
            Some((path, rows.collect::<Option<Vec<_>>>()?.concat()))
        });
        Some(Self {
            ways: ways.collect::<Option<_>>()?,
            lengths,
            counts,
        })
    }

    /// The cheapest way for `runs` runs of `bytes` bytes together.
    pub fn choose(&self, runs: usize, bytes: usize) -> CopyPath {
        self.choose_among(runs, bytes, |_| true)
    }

    /// The same of those that are `offered` at present.
    pub fn choose_among(
        &self,
        runs: usize,
        bytes: usize,
        offered: impl Fn(CopyPath) -> bool,
    ) -> CopyPath {
        let run_bytes = bytes / runs.max(1);
        let offered = self.ways.iter().filter(|(path, _)| offered(*path));
        let costs = offered.map(|(path, costs)| {
            let cost = self.interpolate(costs, runs, run_bytes);
            (*path, cost)
        });
        let cheapest = costs.reduce(|best, other| if other.1 < best.1 { other } else { best });
        cheapest.map_or(CopyPath::Engine, |(path, _)| path)
    }

    /// What a copy is likely to take; `None` for a way that was not timed.
    pub fn nanoseconds(&self, path: CopyPath, runs: usize, run_bytes: usize) -> Option<f64> {
        let (_, costs) = self.ways.iter().find(|(way, _)| *way == path)?;
        Some(self.interpolate(costs, runs, run_bytes))
    }

    /// Beyond the grid its last lines go on.
    fn interpolate(&self, costs: &[f64], runs: usize, run_bytes: usize) -> f64 {
        let row = |length: usize| &costs[length * self.counts.len()..][..self.counts.len()];
        let across = segment(&self.counts, runs);
        let at_length = |length| line(&self.counts, |count| row(length)[count], across, runs);
        let along = |segment| line(&self.lengths, at_length, segment, run_bytes);
        let here = segment(&self.lengths, run_bytes);
        let chord = along(here);
        let (first, last) = (self.lengths[0], self.lengths[self.lengths.len() - 1]);
        let neighbours = here > 0 && here + 2 < self.lengths.len();
        let cost = if neighbours && (first..=last).contains(&run_bytes) {
            // Where the neighbours' lines lead: on a straight piece all three agree, at a bend the truth is the
            // higher of the two, and never above the chord.
            let floor = at_length(here).min(at_length(here + 1)).min(chord);
            along(here - 1).max(along(here + 1)).clamp(floor, chord)
        } else {
            chord
        };
        cost.max(1.0)
    }

    /// One line for each way, length and count: its name, the bytes of a run, the runs, nanoseconds.
    pub fn to_text(&self) -> String {
        let mut text = String::new();
        for (path, costs) in &self.ways {
            for (length, row) in self.lengths.iter().zip(costs.chunks(self.counts.len())) {
                for (count, cost) in self.counts.iter().zip(row) {
                    let _ = writeln!(text, "{} {length} {count} {cost:.1}", path.name());
                }
            }
        }
        text
    }

    /// The table of such lines; `None` where one is of another kind or missing.
    pub fn parse<'a>(lines: impl Iterator<Item = &'a str>) -> Option<Self> {
        let sample = |line: &str| {
            let mut words = line.split_whitespace();
            let name = words.next()?;
            let path = CopyPath::ALL.into_iter().find(|path| path.name() == name)?;
            let run_bytes = words.next()?.parse().ok()?;
            let runs = words.next()?.parse().ok()?;
            let nanoseconds = words.next()?.parse().ok()?;
            words.next().is_none().then_some(Sample {
                path,
                runs,
                run_bytes,
                nanoseconds,
            })
        };
        let samples: Option<Vec<_>> = lines.map(sample).collect();
        Self::new(&samples?)
    }
}

/// The segment of an axis that a value lies in, or the nearest one.
fn segment(axis: &[usize], value: usize) -> usize {
    let before = axis.partition_point(|&point| point <= value);
    before.saturating_sub(1).min(axis.len().saturating_sub(2))
}

/// The line through a segment's ends, read at `place`; of an axis with one point, that point's value.
fn line(axis: &[usize], value: impl Fn(usize) -> f64, segment: usize, place: usize) -> f64 {
    let begin = value(segment);
    let Some(&next) = axis.get(segment + 1) else {
        return begin;
    };
    let width = (next - axis[segment]) as f64;
    begin + (value(segment + 1) - begin) * (place as f64 - axis[segment] as f64) / width
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::measure::{COUNTS, LENGTHS, MAX_BYTES};

    /// A device: what a run costs to submit in a batch and alone, a launch costs, and bandwidths in bytes a
    /// nanosecond of the engines, of a kernel over the link, and of one in device memory.
    struct Model {
        submit: f64,
        call: f64,
        launch: f64,
        engine: f64,
        kernel: f64,
        device: f64,
    }

    const MODELS: [Model; 5] = [
        // PCIe 4, 5, a wide link, an engine whose runs are cheap to submit, and a link that kernels are slow on.
        Model {
            submit: 500.0,
            call: 2_300.0,
            launch: 6_000.0,
            engine: 25.0,
            kernel: 20.0,
            device: 400.0,
        },
        Model {
            submit: 500.0,
            call: 1_800.0,
            launch: 8_000.0,
            engine: 54.0,
            kernel: 48.0,
            device: 1_200.0,
        },
        Model {
            submit: 700.0,
            call: 2_000.0,
            launch: 5_000.0,
            engine: 210.0,
            kernel: 190.0,
            device: 3_000.0,
        },
        Model {
            submit: 60.0,
            call: 1_500.0,
            launch: 12_000.0,
            engine: 54.0,
            kernel: 30.0,
            device: 1_200.0,
        },
        Model {
            submit: 500.0,
            call: 2_300.0,
            launch: 6_000.0,
            engine: 25.0,
            kernel: 2.0,
            device: 800.0,
        },
    ];

    impl Model {
        fn nanoseconds(&self, path: CopyPath, runs: usize, run_bytes: usize) -> f64 {
            let (count, bytes) = (runs as f64, (runs * run_bytes) as f64);
            // Short runs waste a part of each packet on the link.
            let packets = 1.0 + 64.0 / run_bytes as f64;
            match path {
                CopyPath::Engine => 3_000.0 + (count * self.submit).max(bytes / self.engine),
                CopyPath::Single => 1_500.0 + (count * self.call).max(bytes / self.engine),
                CopyPath::Kernel => self.launch + bytes / self.kernel * packets,
                CopyPath::Staged => {
                    self.launch + 2_000.0 + bytes / self.device + bytes / self.engine
                }
            }
        }

        /// As a device is timed.
        fn table(&self) -> CostTable {
            let mut samples = Vec::new();
            for path in CopyPath::ALL {
                for run_bytes in LENGTHS {
                    let timed = |runs: &usize| *runs == 1 || runs * run_bytes <= MAX_BYTES;
                    samples.extend(COUNTS.into_iter().take_while(timed).map(|runs| Sample {
                        path,
                        runs,
                        run_bytes,
                        nanoseconds: self.nanoseconds(path, runs, run_bytes),
                    }));
                }
            }
            CostTable::new(&samples).expect("no gaps")
        }
    }

    #[test]
    fn the_choice_is_within_a_twentieth_of_the_best() {
        let mut chosen_at_all = [0; 4];
        for (number, model) in MODELS.iter().enumerate() {
            let table = model.table();
            let mut ways = [0; 4];
            let mut state = 7u64;
            for _ in 0..20_000 {
                let mut random = |low: f64, high: f64| {
                    state = state
                        .wrapping_mul(6_364_136_223_846_793_005)
                        .wrapping_add(1);
                    let part = (state >> 11) as f64 / (1u64 << 53) as f64;
                    (low.ln() + part * (high.ln() - low.ln())).exp() as usize
                };
                let (runs, run_bytes) = (random(1.0, 20_000.0), random(128.0, 3e6));
                let chosen = table.choose(runs, runs * run_bytes);
                let place = CopyPath::ALL.iter().position(|path| *path == chosen);
                ways[place.expect("one of them")] += 1;
                let cost = |path| model.nanoseconds(path, runs, run_bytes);
                let best = CopyPath::ALL.map(cost).into_iter().fold(f64::MAX, f64::min);
                assert!(
                    cost(chosen) <= 1.05 * best,
                    "model {number}: {chosen:?} for {runs} runs of {run_bytes} bytes: {} against {best}",
                    cost(chosen)
                );
            }
            let taken = ways.iter().filter(|count| **count > 0).count();
            assert!(taken > 1, "model {number} never changes its way: {ways:?}");
            chosen_at_all
                .iter_mut()
                .zip(ways)
                .for_each(|(all, count)| *all += count);
        }
        assert!(
            chosen_at_all.iter().all(|count| *count > 0),
            "{chosen_at_all:?}"
        );
    }

    /// Time of batched copies over that of a kernel, loads of N runs on an A30 (PCIe 4), as published in
    /// <https://github.com/vllm-project/vllm/issues/57555>.
    const A30_COUNTS: [usize; 7] = [16, 32, 64, 128, 256, 1024, 4096];
    const A30: [(usize, [f64; 7]); 5] = [
        (1 << 10, [0.49, 0.66, 0.92, 1.36, 2.02, 3.43, 4.23]),
        (4 << 10, [0.57, 0.81, 1.19, 1.80, 2.68, 4.17, 4.47]),
        (8 << 10, [0.68, 0.99, 1.48, 2.20, 3.09, 3.73, 4.17]),
        (16 << 10, [0.86, 1.20, 1.81, 2.49, 2.99, 3.24, 3.73]),
        (24 << 10, [0.99, 1.44, 1.82, 2.44, 2.60, 3.02, 3.56]),
    ];

    /// The published ratios with a kernel's time that such a link allows; `timed` says which counts are known.
    fn a30(timed: &[usize]) -> CostTable {
        let mut samples = Vec::new();
        for (run_bytes, ratios) in A30 {
            for (runs, ratio) in A30_COUNTS.into_iter().zip(ratios) {
                let kernel = 9_000.0 + (runs * run_bytes) as f64 / 22.0;
                let both = [(CopyPath::Kernel, 1.0), (CopyPath::Engine, ratio)];
                let both = both.map(|(path, times)| Sample {
                    path,
                    runs,
                    run_bytes,
                    nanoseconds: kernel * times,
                });
                samples.extend(both.into_iter().filter(|_| timed.contains(&runs)));
            }
        }
        CostTable::new(&samples).expect("no gaps")
    }

    #[test]
    fn published_figures_of_an_a30_are_followed_within_a_twentieth() {
        // All counts known, then every second one: those between are read off lines.
        for timed in [&A30_COUNTS[..], &[16, 64, 256, 4096]] {
            let table = a30(timed);
            for (run_bytes, ratios) in A30 {
                for (runs, ratio) in A30_COUNTS.into_iter().zip(ratios) {
                    let loss = match table.choose(runs, runs * run_bytes) {
                        CopyPath::Engine => ratio.max(1.0),
                        _ => (1.0 / ratio).max(1.0),
                    };
                    assert!(
                        loss <= 1.05,
                        "{runs} runs of {run_bytes}: {loss} of the best"
                    );
                }
            }
        }
    }

    #[test]
    fn costs_go_on_where_a_copy_was_too_slow_to_time() {
        let sample = |path, run_bytes, runs, nanoseconds| Sample {
            path,
            runs,
            run_bytes,
            nanoseconds,
        };
        let samples = [
            sample(CopyPath::Engine, 64, 1, 100.0),
            sample(CopyPath::Engine, 64, 2, 150.0),
            sample(CopyPath::Engine, 64, 10, 500.0),
            sample(CopyPath::Kernel, 64, 1, 300.0),
            sample(CopyPath::Kernel, 64, 2, 310.0),
        ];
        let table = CostTable::new(&samples).expect("the end may be missing");
        assert_eq!(table.nanoseconds(CopyPath::Kernel, 10, 64), Some(390.0));
        assert_eq!(table.nanoseconds(CopyPath::Single, 10, 64), None);
        assert_eq!(table.choose(10, 640), CopyPath::Kernel);
        // The first one and one between must be there.
        assert_eq!(CostTable::new(&samples[1..]), None);
        assert_eq!(
            CostTable::new(&[&samples[..1], &samples[2..]].concat()),
            None
        );
    }

    #[test]
    fn a_table_reads_back_and_a_damaged_one_does_not() {
        let table = MODELS[1].table();
        let text = table.to_text();
        let again = CostTable::parse(text.lines()).expect("its own text");
        for (runs, run_bytes) in [(1, 128), (77, 3_000), (16_384, 1 << 21)] {
            for path in CopyPath::ALL {
                let costs = [&table, &again].map(|table| table.nanoseconds(path, runs, run_bytes));
                let [one, other] = costs.map(|cost| cost.expect("timed"));
                assert!((one / other - 1.0).abs() < 1e-3, "{one} and {other}");
            }
        }
        for damaged in [
            "",
            "engine 0 1 1\nkernel 0 1 1\n",
            "engine 8 1 -1\nkernel 8 1 1\n",
            "engine 8 1 NaN\nkernel 8 1 1\n",
            "engine 8 1 1 1\nkernel 8 1 1\n",
            "engine 8 2 1\nkernel 8 1 1\n",
            "dma 8 1 1\n",
        ] {
            assert_eq!(CostTable::parse(damaged.lines()), None, "{damaged:?}");
        }
    }
}
