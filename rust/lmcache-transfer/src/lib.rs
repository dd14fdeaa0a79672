//! The only code that moves KV bytes.
//!
//! [`copy_job::CopyJob`] pairs chunks with their plans and is stepped a layer at a time; [`host`] does the
//! copies in host memory. [`flow`] is the walk of a request's chunks into the store and out of it.
//! [`layer_copy`] moves one layer of memory that the caller brings, and [`rope`] turns keys to other positions.

pub mod copy_job;
pub mod error;
pub mod flow;
pub mod host;
pub mod layer_copy;
pub mod rope;
