//! Our figures and their limits, measured side by side in one process.
//!
//! `lmcache-bench <what> [--quick]` prints one JSON object a line: the case, and what was measured,
//! sample by sample, in nanoseconds. `benches/run.py` judges; nothing is judged here.

use std::process::ExitCode;

mod copies;
mod descriptors;
mod hash;
mod heap;
mod index;
mod sample;

#[global_allocator]
static HEAP: heap::Counting = heap::Counting;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let quick = arguments.iter().any(|argument| argument == "--quick");
    match arguments.first().map(String::as_str) {
        Some("hash") => hash::run(quick),
        Some("lookup") => index::lookup(quick),
        Some("churn") => index::churn(quick),
        Some("bytes") => index::bytes(quick),
        Some("blocks") => copies::blocks(quick),
        Some("runs") => copies::runs(quick),
        Some("descriptors") => descriptors::run(quick),
        other => {
            eprintln!(
                "lmcache-bench: {other:?} is none of hash, lookup, churn, bytes, blocks, runs, descriptors"
            );
            return ExitCode::from(2);
        }
    }
    ExitCode::SUCCESS
}
