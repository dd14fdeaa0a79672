//! Tiers behind one trait, and both ends of the lookup.
//!
//! [`backend`] says what a tier is, [`object_form`] what a chunk looks like in a tier below host memory,
//! [`compression`] how its bytes are packed where that is asked for, and [`local_disk`] and [`remote`] keep chunks in a
//! folder and on a server. [`lookup_server`] answers, without Python, how much of a prompt is stored, and
//! [`lookup_client`] asks the servers of all ranks; [`lookup_reader`] reads another rank's pool, held for it by that
//! rank's server. [`wire`] is what they speak, message by message.
#![forbid(unsafe_code)]

pub mod backend;
pub mod compression;
pub mod error;
pub mod local_disk;
pub mod lookup_client;
mod lookup_conversation;
pub mod lookup_reader;
pub mod lookup_server;
pub mod object_form;
pub mod remote;
mod socket_file;
pub mod wire;
mod zmtp;
