//! From which sizes on a copy passes the caches by, and is shared out to threads.

use std::fs;
use std::path::Path;

/// More threads than this fill no memory channel better.
const MAX_THREADS: usize = 4;
/// Where the system does not say how large its last cache is.
const USUAL_CACHE_BYTES: usize = 32 << 20;
/// Waking a thread takes some 20 to 60 µs; one thread moves this much in 500 and more.
const SHARED_FROM: usize = 16 << 20;

/// Sizes in bytes of one call, over all chunks and layers that it moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Tuning {
    /// Gathers from here on write past the caches.
    pub(super) stream_gather_from: usize,
    /// Scatters from here on write past the caches.
    pub(super) stream_scatter_from: usize,
    /// Copies from here on are shared out to threads.
    pub(super) shared_from: usize,
    /// The caller's own thread included.
    pub(super) max_threads: usize,
    /// Whether to wake threads even where no processor is idle.
    pub(super) even_if_busy: bool,
    /// Whether to use wide instructions where the processor has them.
    pub(super) wide: bool,
}

impl Tuning {
    /// For this machine.
    ///
    /// What a gather writes is read by nobody soon, and its copy alone is faster past the caches from a
    /// MiB on (measured: 23 against 21 GB/s, and 20 against 17 where the source was not in a cache either).
    /// A small one may stay: a tier below reads it next. What a scatter writes the engine reads in the same
    /// step: copy and reading together are faster through the caches up to about half of the last one
    /// (measured on 32 MiB: 14.3 against 12.7 GB/s for 16 MiB, 11.3 against 12.1 for 32 MiB).
    pub(super) fn measured() -> Self {
        let cache_bytes = last_cache_bytes(Path::new("/sys/devices/system/cpu/cpu0/cache"))
            .unwrap_or(USUAL_CACHE_BYTES);
        Self {
            stream_gather_from: cache_bytes / 16,
            stream_scatter_from: cache_bytes / 2,
            shared_from: SHARED_FROM,
            max_threads: MAX_THREADS,
            even_if_busy: false,
            wide: true,
        }
    }
}

/// The largest cache that a processor's folder in sysfs tells of.
fn last_cache_bytes(caches: &Path) -> Option<usize> {
    let sizes = fs::read_dir(caches).ok()?.filter_map(|cache| {
        let size = fs::read_to_string(cache.ok()?.path().join("size")).ok()?;
        let (number, unit) = size
            .trim()
            .split_at_checked(size.trim().len().checked_sub(1)?)?;
        let unit = match unit {
            "K" => 1 << 10,
            "M" => 1 << 20,
            _ => return None,
        };
        number.parse::<usize>().ok()?.checked_mul(unit)
    });
    sizes.max()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_cache_counts() {
        let root = std::env::temp_dir().join(format!("lmcache-caches-{}", std::process::id()));
        for (name, size) in [
            ("index0", "48K\n"),
            ("index3", "32768K\n"),
            ("index2", "1M\n"),
            ("index4", "?"),
        ] {
            fs::create_dir_all(root.join(name)).expect("a folder");
            fs::write(root.join(name).join("size"), size).expect("a file");
        }
        assert_eq!(last_cache_bytes(&root), Some(32 << 20));
        fs::remove_dir_all(&root).expect("it is ours");
        assert_eq!(last_cache_bytes(&root), None);
    }
}
