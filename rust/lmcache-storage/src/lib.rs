//! Tiers behind one trait, and the lookup server.
//!
//! [`backend`] says what a tier is. [`lookup_server`] answers, without Python, how much of a prompt is
//! stored; [`wire`] is what it speaks, message by message.
#![forbid(unsafe_code)]

pub mod backend;
pub mod error;
pub mod lookup_server;
mod socket_file;
pub mod wire;
mod zmtp;
