//! What each way costs on one GPU, and the small file it is remembered in.
//!
//! A file is for one GPU, one driver and one release of this crate. Its last line is a sum over all others, so that
//! one that was cut short or damaged is no table; whatever is wrong with it, it is measured anew.

use std::fmt::Write as _;
use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::process;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::cuda::kernels::Direction;
use crate::cuda::planner::CostTable;

const HEADER: &str = "lmcache_rs copy costs, form 1";
/// Far more than a grid of all ways takes.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// Whose costs they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Identity {
    /// The GPU.
    pub uuid: [u8; 16],
    /// The newest CUDA that its driver serves, 1000 × major + 10 × minor.
    pub driver: i32,
    /// Whether there were kernels to time.
    pub kernels: bool,
}

impl Identity {
    fn uuid_text(&self) -> String {
        self.uuid.iter().fold(String::new(), |mut text, byte| {
            let _ = write!(text, "{byte:02x}");
            text
        })
    }

    fn file_name(&self) -> String {
        let kernels = if self.kernels { "" } else { "-without-kernels" };
        format!("cuda-costs-{}-{}{kernels}", self.uuid_text(), self.driver)
    }

    fn text(&self) -> String {
        format!(
            "{HEADER}\nrelease {}\ngpu {}\ndriver {}\nkernels {}\n",
            env!("CARGO_PKG_VERSION"),
            self.uuid_text(),
            self.driver,
            self.kernels
        )
    }
}

/// What became of [`crate::cuda::executor::Executor::learn`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Learned {
    /// The costs of an earlier process are used, or those that this one has already learnt.
    Remembered,
    /// They were timed.
    Measured {
        /// Why the next process has to time them again, if it has to.
        unsaved: Option<String>,
    },
    /// Time ran out before every way had been timed; the rule of thumb stays.
    OutOfTime,
}

/// Costs of both directions.
#[derive(Debug, Clone, PartialEq)]
pub struct Costs {
    /// From the cache into chunks.
    pub store: CostTable,
    /// From chunks into the cache.
    pub load: CostTable,
}

impl Costs {
    /// Those of one direction.
    pub fn table(&self, direction: Direction) -> &CostTable {
        match direction {
            Direction::Gather => &self.store,
            Direction::Scatter => &self.load,
        }
    }

    /// The costs that an earlier process left in `folder` for this very GPU, driver and release.
    pub fn read(folder: &Path, identity: &Identity) -> Option<Self> {
        let path = folder.join(identity.file_name());
        let facts = fs::symlink_metadata(&path).ok()?;
        if !facts.is_file() || facts.len() > MAX_FILE_BYTES {
            return None;
        }
        Self::parse(&fs::read_to_string(path).ok()?, identity)
    }

    /// Leaves the costs in `folder`, readable by its owner alone; a reader sees the old file or the new one.
    pub fn write(&self, folder: &Path, identity: &Identity) -> io::Result<()> {
        static NUMBER: AtomicUsize = AtomicUsize::new(0);
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(folder)?;
        let name = identity.file_name();
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let unfinished = folder.join(format!(".{name}.{}-{number}", process::id()));
        // Left by a process of the same number that ended in the middle.
        let _ = fs::remove_file(&unfinished);
        let written = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&unfinished)
            .and_then(|mut file| file.write_all(self.to_text(identity).as_bytes()))
            .and_then(|()| fs::rename(&unfinished, folder.join(name)));
        if written.is_err() {
            let _ = fs::remove_file(&unfinished);
        }
        written
    }

    /// The file's text.
    pub fn to_text(&self, identity: &Identity) -> String {
        let mut text = identity.text();
        for (name, table) in [("store", &self.store), ("load", &self.load)] {
            for line in table.to_text().lines() {
                let _ = writeln!(text, "{name} {line}");
            }
        }
        let sum = sum_of(&text);
        let _ = writeln!(text, "sum {sum:016x}");
        text
    }

    /// The costs of a file's text; `None` for one that is damaged, of another form or release, or of another GPU,
    /// driver or set of kernels.
    pub fn parse(text: &str, identity: &Identity) -> Option<Self> {
        let (body, sum) = text.strip_suffix('\n')?.rsplit_once('\n')?;
        let body = &text[..body.len() + 1];
        if sum != format!("sum {:016x}", sum_of(body)) {
            return None;
        }
        let lines = body.strip_prefix(&identity.text())?;
        let table = |name: &str| {
            let own = lines.lines().filter_map(|line| line.strip_prefix(name));
            CostTable::parse(own)
        };
        Some(Self {
            store: table("store ")?,
            load: table("load ")?,
        })
    }
}

/// FNV-1a: against damage, not against an enemy, who could as well write a table of his own.
fn sum_of(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |sum, byte| {
        (sum ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

/// Where costs are remembered unless told otherwise: `lmcache_rs` in the user's cache folder, if there is one.
pub fn default_folder() -> Option<PathBuf> {
    #[expect(
        clippy::disallowed_methods,
        reason = "the system tells a user's folders through the environment"
    )]
    let named = |name| {
        std::env::var_os(name)
            .map(PathBuf::from)
            .filter(|path| path.is_absolute())
    };
    let cache = named("XDG_CACHE_HOME").or_else(|| Some(named("HOME")?.join(".cache")))?;
    Some(cache.join("lmcache_rs"))
}
