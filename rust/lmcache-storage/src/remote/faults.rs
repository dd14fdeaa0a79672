//! What went wrong with a server, by reason: counted, said now and then, never raised.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

const LOG_EVERY: Duration = Duration::from_secs(10);
/// Lines that wait for somebody to log them.
const MAX_LINES: usize = 64;

/// Counts of one tier.
#[derive(Debug, Default)]
pub(super) struct Faults(Mutex<Counts>);

#[derive(Debug, Default)]
struct Counts {
    by_reason: BTreeMap<&'static str, (u64, Option<Instant>)>,
    lines: Vec<String>,
}

impl Faults {
    /// Counts a fault; says it, at most once per reason and 10 seconds.
    pub(super) fn note(&self, verb: &str, reason: &'static str, found: &str) {
        let mut counts = self.0.lock();
        let (count, said) = counts.by_reason.entry(reason).or_default();
        *count += 1;
        if said.is_some_and(|at| at.elapsed() < LOG_EVERY) {
            return;
        }
        *said = Some(Instant::now());
        let line = format!("fault {count} of kind '{reason}', {verb}, taken as a miss: {found}");
        tracing::warn!("remote tier: {line}");
        if counts.lines.len() < MAX_LINES {
            counts.lines.push(line);
        }
    }

    /// How often each reason was met.
    pub(super) fn counts(&self) -> Vec<(&'static str, u64)> {
        let counts = self.0.lock();
        let pairs = counts.by_reason.iter();
        pairs
            .map(|(reason, (count, _))| (*reason, *count))
            .collect()
    }

    /// What there is to log since the last call.
    pub(super) fn take_lines(&self) -> Vec<String> {
        std::mem::take(&mut self.0.lock().lines)
    }
}
