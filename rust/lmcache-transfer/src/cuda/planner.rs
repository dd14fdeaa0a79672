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

/// Costs of both ways over a grid of lengths and counts, for one direction of one device.
#[derive(Debug, Clone, PartialEq)]
pub struct CostTable {
    /// Lengths that were timed, ascending.
    lengths: Vec<usize>,
    /// Counts, ascending.
    counts: Vec<usize>,
    /// Nanoseconds, `[length][count]`, by the copy engines and by a kernel.
    engine: Vec<f64>,
    kernel: Vec<f64>,
}

impl CostTable {
    /// A table of samples that fill a grid: both ways at every length and count; `None` where one is missing.
    pub fn new(samples: &[Sample]) -> Option<Self> {
        let axis = |of: fn(&Sample) -> usize| {
            let mut values: Vec<usize> = samples.iter().map(of).collect();
            values.sort_unstable();
            values.dedup();
            (*values.first()? > 0).then_some(values)
        };
        let lengths = axis(|sample| sample.run_bytes)?;
        let counts = axis(|sample| sample.runs)?;
        let costs = |path| {
            let points = lengths
                .iter()
                .flat_map(|&length| counts.iter().map(move |&count| (length, count)));
            let cost = |(run_bytes, runs)| {
                let here = |sample: &&Sample| {
                    (sample.path, sample.run_bytes, sample.runs) == (path, run_bytes, runs)
                };
                let cost = samples.iter().find(here)?.nanoseconds;
                (cost > 0.0 && cost.is_finite()).then_some(cost)
            };
            points.map(cost).collect::<Option<Vec<f64>>>()
        };
        Some(Self {
            engine: costs(CopyPath::Engine)?,
            kernel: costs(CopyPath::Kernel)?,
            lengths,
            counts,
        })
    }

    /// The cheaper way for `runs` runs of `bytes` bytes together.
    pub fn choose(&self, runs: usize, bytes: usize) -> CopyPath {
        let run_bytes = bytes / runs.max(1);
        let cost = |path| self.nanoseconds(path, runs, run_bytes);
        if cost(CopyPath::Kernel) < cost(CopyPath::Engine) {
            CopyPath::Kernel
        } else {
            CopyPath::Engine
        }
    }

    /// What a copy is likely to take; beyond the grid its last lines go on.
    pub fn nanoseconds(&self, path: CopyPath, runs: usize, run_bytes: usize) -> f64 {
        let costs = match path {
            CopyPath::Engine => &self.engine,
            CopyPath::Kernel => &self.kernel,
        };
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

    /// The table as text, to be remembered under the device's identity and its driver's version.
    pub fn to_text(&self) -> String {
        let mut text = String::new();
        for (name, costs) in [("engine", &self.engine), ("kernel", &self.kernel)] {
            for (length, row) in self.lengths.iter().zip(costs.chunks(self.counts.len())) {
                for (count, cost) in self.counts.iter().zip(row) {
                    let _ = writeln!(text, "{name} {length} {count} {cost:.1}");
                }
            }
        }
        text
    }

    /// The table of a text; `None` for one that is cut short or of another kind.
    pub fn parse(text: &str) -> Option<Self> {
        let sample = |line: &str| {
            let mut words = line.split_whitespace();
            let path = match words.next()? {
                "engine" => CopyPath::Engine,
                "kernel" => CopyPath::Kernel,
                _ => return None,
            };
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
        let samples: Option<Vec<_>> = text.lines().map(sample).collect();
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

    /// A device: what a run costs to submit, a launch costs, and both ways' bandwidths in bytes a nanosecond.
    struct Model {
        submit: f64,
        launch: f64,
        engine: f64,
        kernel: f64,
    }

    const MODELS: [Model; 4] = [
        // PCIe 4, 5, a wide link, and an engine whose runs are cheap to submit.
        Model {
            submit: 500.0,
            launch: 6_000.0,
            engine: 25.0,
            kernel: 20.0,
        },
        Model {
            submit: 500.0,
            launch: 8_000.0,
            engine: 54.0,
            kernel: 48.0,
        },
        Model {
            submit: 700.0,
            launch: 5_000.0,
            engine: 210.0,
            kernel: 190.0,
        },
        Model {
            submit: 60.0,
            launch: 12_000.0,
            engine: 54.0,
            kernel: 30.0,
        },
    ];

    impl Model {
        fn nanoseconds(&self, path: CopyPath, runs: usize, run_bytes: usize) -> f64 {
            let bytes = (runs * run_bytes) as f64;
            match path {
                CopyPath::Engine => 3_000.0 + (runs as f64 * self.submit).max(bytes / self.engine),
                // Short runs waste a part of each packet on the link.
                CopyPath::Kernel => {
                    self.launch + bytes / self.kernel * (1.0 + 64.0 / run_bytes as f64)
                }
            }
        }

        fn table(&self) -> CostTable {
            let mut samples = Vec::new();
            for path in [CopyPath::Engine, CopyPath::Kernel] {
                for run_bytes in (7..22).map(|power| 1 << power) {
                    for runs in (0..15).map(|power| 1 << power) {
                        let nanoseconds = self.nanoseconds(path, runs, run_bytes);
                        samples.push(Sample {
                            path,
                            runs,
                            run_bytes,
                            nanoseconds,
                        });
                    }
                }
            }
            CostTable::new(&samples).expect("a full grid")
        }
    }

    #[test]
    fn the_choice_is_within_a_twentieth_of_the_best() {
        for (number, model) in MODELS.iter().enumerate() {
            let table = model.table();
            let mut both = [0, 0];
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
                both[usize::from(chosen == CopyPath::Kernel)] += 1;
                let cost = |path| model.nanoseconds(path, runs, run_bytes);
                let best = cost(CopyPath::Engine).min(cost(CopyPath::Kernel));
                assert!(
                    cost(chosen) <= 1.05 * best,
                    "model {number}: {chosen:?} for {runs} runs of {run_bytes} bytes: {} against {best}",
                    cost(chosen)
                );
            }
            assert!(
                both[0] > 0 && both[1] > 0,
                "model {number} never changes its way: {both:?}"
            );
        }
    }

    /// The ratio of both ways that others published for 8 KiB runs on an A30: the point of change moves with the
    /// number of runs.
    #[test]
    fn the_point_of_change_moves_with_the_number_of_runs() {
        let mut samples = Vec::new();
        for (runs, ratio) in [(16, 0.68), (128, 2.2), (4096, 4.17)] {
            let kernel = 5_000.0 + runs as f64 * 400.0;
            for (path, nanoseconds) in [
                (CopyPath::Kernel, kernel),
                (CopyPath::Engine, kernel * ratio),
            ] {
                samples.push(Sample {
                    path,
                    runs,
                    run_bytes: 8192,
                    nanoseconds,
                });
            }
        }
        let table = CostTable::new(&samples).expect("a grid of one length");
        let ways = [16, 128, 4096].map(|runs| table.choose(runs, runs * 8192));
        assert_eq!(ways, [CopyPath::Engine, CopyPath::Kernel, CopyPath::Kernel]);
    }

    #[test]
    fn a_table_reads_back_and_a_damaged_one_does_not() {
        let table = MODELS[1].table();
        let text = table.to_text();
        let again = CostTable::parse(&text).expect("its own text");
        for (runs, run_bytes) in [(1, 128), (77, 3_000), (16_384, 1 << 21)] {
            for path in [CopyPath::Engine, CopyPath::Kernel] {
                let [one, other] =
                    [&table, &again].map(|table| table.nanoseconds(path, runs, run_bytes));
                assert!((one / other - 1.0).abs() < 1e-3, "{one} and {other}");
            }
        }
        let cut = &text[..text.len() - 20];
        assert_eq!(CostTable::parse(cut), None);
        for damaged in [
            "",
            "engine 1 1 1\n",
            "engine 0 1 1\nkernel 0 1 1\n",
            "engine 8 1 -1\nkernel 8 1 1\n",
            "dma 8 1 1\n",
        ] {
            assert_eq!(CostTable::parse(damaged), None, "{damaged:?}");
        }
    }
}
