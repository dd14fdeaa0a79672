//! Chunks on their way into a native tier and out of it, as Python gives and gets them.

use std::time::Duration;

use lmcache_storage::backend::{Arrival, Chunk};
use lmcache_storage::object_form::{Form, Format};
use pyo3::prelude::*;

use crate::errors::NativeError;
use crate::memory::MemoryObj;

/// Format, layers, hidden, dtype, tokens of a block.
type FormParts = (String, u32, u64, String, u32);

/// Sealed memory, its form and its tokens, if they are known.
pub(crate) type Given<'py> = (PyRef<'py, MemoryObj>, Option<FormParts>, u32);

/// Writable memory, its form and its tokens.
pub(crate) type Arrived = (MemoryObj, Option<FormParts>, u32);

/// Chunks for a tier to take in.
pub(crate) fn given(chunks: Vec<Given<'_>>) -> Result<Vec<Chunk>, NativeError> {
    let each = chunks.into_iter().map(|(memory_obj, form, num_tokens)| {
        Ok(Chunk {
            object: memory_obj.sealed_object()?,
            form: form.map(form_of).transpose()?,
            num_tokens,
        })
    });
    each.collect()
}

/// Chunks that a tier has read.
pub(crate) fn arrived(arrivals: Vec<Arrival>) -> Vec<Arrived> {
    let each = arrivals.into_iter().map(|Arrival { chunk, description }| {
        let form = description.form.map(parts_of);
        (MemoryObj::writable(chunk), form, description.num_tokens)
    });
    each.collect()
}

fn form_of(parts: FormParts) -> Result<Form, NativeError> {
    let (format, num_layers, hidden, dtype, block_tokens) = parts;
    let unknown =
        || NativeError::Argument(format!("format {format:?} is none of the stored forms"));
    Ok(Form {
        format: Format::from_name(&format).ok_or_else(unknown)?,
        num_layers,
        hidden,
        block_tokens,
        dtype,
    })
}

fn parts_of(form: Form) -> FormParts {
    let name = form.format.name().to_owned();
    (
        name,
        form.num_layers,
        form.hidden,
        form.dtype,
        form.block_tokens,
    )
}

pub(crate) fn seconds(within_s: f64) -> Duration {
    Duration::try_from_secs_f64(within_s.max(0.0)).unwrap_or(Duration::MAX)
}
