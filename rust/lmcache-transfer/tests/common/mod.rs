//! C++ of the tests, compiled as they run: the crate itself links none of it.

#![allow(dead_code, reason = "each test file uses its part")]

pub(crate) mod engine;
pub(crate) mod fake;
pub(crate) mod round_trip;

use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;

pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// A folder of the build's own for this test.
pub(crate) fn scratch(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    fs::create_dir_all(&folder).expect("the build's folder can be written");
    folder
}

/// Compiles `sources`, or answers what was compiled of the very same texts before. A test without a compiler proves
/// nothing, so there must be one.
pub(crate) fn compile(sources: &[PathBuf], output: &Path, flags: &[&str]) -> PathBuf {
    let always = [
        "-std=c++17",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-Wno-unknown-pragmas",
        "-pthread",
        // Kernels read a buffer by vectors of any width, as a device does.
        "-fno-strict-aliasing",
    ];
    let name = output.file_name().expect("a file").to_string_lossy();
    let built = output.with_file_name(format!("{:016x}-{name}", digest(sources, flags)));
    if built.exists() {
        return built;
    }
    let unfinished = built.with_extension(std::process::id().to_string());
    let done = Command::new("g++")
        .args(always)
        .args(flags)
        .args(sources)
        .arg("-o")
        .arg(&unfinished)
        .output()
        .expect("g++ is installed: these tests run the kernels on the host");
    let said = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success(), "g++ failed:\n{said}");
    fs::rename(&unfinished, &built).expect("scratch space");
    built
}

/// Of the flags and of all C++ beside the sources and one folder up, where their headers are.
fn digest(sources: &[PathBuf], flags: &[&str]) -> u64 {
    let mut hasher = DefaultHasher::new();
    flags.hash(&mut hasher);
    for source in sources {
        for folder in source.ancestors().skip(1).take(2) {
            let mut files: Vec<_> = fs::read_dir(folder)
                .expect("a folder")
                .map(|entry| entry.expect("a file").path())
                .filter(|path| {
                    path.extension()
                        .is_some_and(|kind| kind == "cpp" || kind == "cu" || kind == "h")
                })
                .collect();
            files.sort();
            for file in files {
                fs::read(file).expect("a source").hash(&mut hasher);
            }
        }
    }
    hasher.finish()
}

/// Numbers that look random and are the same on every run.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 16
    }

    pub(crate) fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }

    pub(crate) fn between(&mut self, low: usize, high: usize) -> usize {
        low + self.below(high - low + 1)
    }

    pub(crate) fn chance(&mut self, one_in: usize) -> bool {
        self.below(one_in) == 0
    }

    pub(crate) fn shuffle<T>(&mut self, items: &mut [T]) {
        for at in (1..items.len()).rev() {
            items.swap(at, self.below(at + 1));
        }
    }

    pub(crate) fn bytes(&mut self, len: usize) -> Vec<u8> {
        (0..len).map(|_| self.next() as u8).collect()
    }
}
