//! The only code that moves KV bytes.
//!
//! [`copy_job::CopyJob`] pairs chunks with their plans and is stepped a layer at a time; [`host`] does the
//! copies in host memory, [`cuda`] those of a GPU. [`flow`] is the walk of a request's chunks into the store and out of it.

pub mod copy_job;
pub mod cuda;
pub mod error;
pub mod flow;
pub mod host;
