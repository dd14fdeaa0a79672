//! Which chunk, which key, which bytes, which victim.
//!
//! Everything here is a pure decision: no I/O, no threads, no clock, no unsafe code. The crates above
//! supply memory, time and locks, and act on what this one decides.
#![forbid(unsafe_code)]

pub mod error;
pub mod extent;
pub mod hash;
pub mod hot_cache;
pub mod key;
pub mod layout;
pub mod token;
