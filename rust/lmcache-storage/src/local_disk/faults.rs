//! What went wrong, by reason: counted, said now and then, never raised.

use std::fmt;
use std::io::{self, ErrorKind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::object_form::Defect;

/// Why a chunk was not stored, or not found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fault {
    /// What is stored is not what was put.
    Defect(Defect),
    /// The file is gone.
    Gone,
    /// The system does not let us.
    Access,
    /// The device is full, whatever the limit.
    NoSpace,
    /// Any other error of the system.
    Io,
    /// Another process kept the folder's lock for too long.
    Locked,
    /// No room within the limit.
    Full,
    /// No room in host memory for what was read.
    NoMemory,
    /// No answer in time.
    Deadline,
    /// A bug of ours.
    Panicked,
    /// The chunk was cleared or removed while it was written: no fault.
    Withdrawn,
}

const REST: [Fault; 11] = [
    Fault::Gone,
    Fault::Access,
    Fault::NoSpace,
    Fault::Io,
    Fault::Locked,
    Fault::Full,
    Fault::NoMemory,
    Fault::Deadline,
    Fault::Panicked,
    Fault::Withdrawn,
    Fault::Defect(Defect::Truncated),
];
const NUM_REASONS: usize = Defect::ALL.len() + REST.len() - 1;
const LOG_EVERY: Duration = Duration::from_secs(10);

impl Fault {
    /// One word, for counters and logs.
    pub fn name(self) -> &'static str {
        match self {
            Self::Defect(defect) => defect.name(),
            Self::Gone => "gone",
            Self::Access => "access",
            Self::NoSpace => "no_space",
            Self::Io => "io",
            Self::Locked => "locked",
            Self::Full => "full",
            Self::NoMemory => "no_memory",
            Self::Deadline => "deadline",
            Self::Panicked => "panicked",
            Self::Withdrawn => "withdrawn",
        }
    }

    fn all() -> impl Iterator<Item = Self> {
        let defects = Defect::ALL.into_iter().map(Self::Defect);
        defects.chain(REST.into_iter().take(REST.len() - 1))
    }

    fn at(self) -> usize {
        Self::all()
            .position(|fault| fault == self)
            .expect("all() has all")
    }
}

impl From<Defect> for Fault {
    fn from(defect: Defect) -> Self {
        Self::Defect(defect)
    }
}

/// A fault with what was found.
#[derive(Debug)]
pub struct Trouble {
    /// Its kind.
    pub fault: Fault,
    /// In words.
    pub found: String,
}

impl Trouble {
    pub(crate) fn new(fault: impl Into<Fault>, found: impl Into<String>) -> Self {
        Self {
            fault: fault.into(),
            found: found.into(),
        }
    }

    /// An error of the system, met at `what`.
    pub(crate) fn system(what: &str, error: &io::Error) -> Self {
        let fault = match error.kind() {
            ErrorKind::NotFound => Fault::Gone,
            ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem => Fault::Access,
            ErrorKind::StorageFull | ErrorKind::QuotaExceeded | ErrorKind::FileTooLarge => {
                Fault::NoSpace
            }
            _ => Fault::Io,
        };
        Self::new(fault, format!("{what}: {error}"))
    }
}

impl fmt::Display for Trouble {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.fault.name(), self.found)
    }
}

impl std::error::Error for Trouble {}

/// Counts of one tier.
#[derive(Debug, Default)]
pub struct Faults {
    counts: [AtomicU64; NUM_REASONS],
    said: Mutex<[Option<Instant>; NUM_REASONS]>,
}

impl Faults {
    /// Counts a fault; logs it, at most once per reason and 10 seconds.
    pub fn note(&self, verb: &str, trouble: &Trouble) {
        let at = trouble.fault.at();
        let count = self.counts[at].fetch_add(1, Ordering::Relaxed) + 1;
        if trouble.fault == Fault::Withdrawn {
            return;
        }
        let mut said = self.said.lock();
        if said[at].is_none_or(|at| at.elapsed() >= LOG_EVERY) {
            said[at] = Some(Instant::now());
            drop(said);
            tracing::warn!(verb, count, "local disk, taken as a miss: {trouble}");
        }
    }

    /// How often each reason was met, where it was.
    pub fn counts(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let counted = Fault::all().map(|fault| (fault.name(), self.count(fault)));
        counted.filter(|(_, count)| *count > 0)
    }

    /// How often one reason was met.
    pub fn count(&self, fault: Fault) -> u64 {
        self.counts[fault.at()].load(Ordering::Relaxed)
    }
}
