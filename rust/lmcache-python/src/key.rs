//! The text form of cache keys.

use std::collections::BTreeMap;

use lmcache_core::key::{CacheEngineKey, Namespace, TagValue, begins_with, with_fields};
use pyo3::IntoPyObjectExt;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyBytes, PyFloat, PyInt, PyString};

use crate::errors::NativeError;
use crate::token::chunk_hash;

fn tag_value(name: &str, value: &Bound<'_, PyAny>) -> PyResult<TagValue> {
    if value.is_none() {
        Ok(TagValue::Null)
    } else if let Ok(value) = value.cast::<PyBool>() {
        Ok(TagValue::Bool(value.is_true()))
    } else if value.is_instance_of::<PyInt>() {
        let number = value.extract().map_err(|_| {
            PyValueError::new_err(format!(
                "tag {name:?} is {value}, which does not fit 64 bits; give it as str"
            ))
        })?;
        Ok(TagValue::Int(number))
    } else if let Ok(value) = value.cast::<PyFloat>() {
        match value.value() {
            number if number.is_nan() => Err(PyValueError::new_err(format!(
                "tag {name:?} is NaN, which equals nothing"
            ))),
            number => Ok(TagValue::Float(number)),
        }
    } else if let Ok(value) = value.cast::<PyString>() {
        Ok(TagValue::Text(value.to_cow()?.into_owned()))
    } else {
        let found = value.get_type().name()?.to_string();
        Err(PyTypeError::new_err(format!(
            "tag {name:?} is of type {found}; tags are None, bool, int, float or str"
        )))
    }
}

/// Whether a namespace begins with `prefix`, a text that ends where one of its fields does.
#[pyfunction]
pub(crate) fn namespace_begins_with(namespace: &str, prefix: &str) -> bool {
    begins_with(namespace, prefix)
}

/// The namespace with other values in some of its fields; fields that it does not have are not added.
#[pyfunction]
pub(crate) fn namespace_with_fields(namespace: &str, fields: BTreeMap<String, String>) -> String {
    with_fields(namespace, &fields)
}

/// Canonical text of a namespace, of a chunk's key (with `chunk_hash`), or of a layer's (with both).
#[pyfunction]
#[pyo3(signature = (model_name, world_size, worker_id, kv_dtype, facts, tags, chunk_hash=None, layer_id=None))]
#[expect(clippy::too_many_arguments, reason = "the key's fields, one each")]
pub(crate) fn encode_key(
    model_name: String,
    world_size: u32,
    worker_id: u32,
    kv_dtype: String,
    facts: BTreeMap<String, String>,
    tags: BTreeMap<String, Bound<'_, PyAny>>,
    chunk_hash: Option<&[u8]>,
    layer_id: Option<u32>,
) -> PyResult<String> {
    let tags = tags
        .iter()
        .map(|(name, value)| Ok((name.clone(), tag_value(name, value)?)));
    let tags = tags.collect::<PyResult<_>>()?;
    let namespace = Namespace {
        model_name,
        world_size,
        worker_id,
        kv_dtype,
        facts,
        tags,
    };
    let text = namespace.bounded_text().map_err(NativeError::from)?;
    let Some(bytes) = chunk_hash else {
        return Ok(text);
    };
    let chunk_hash = self::chunk_hash(bytes, "chunk_hash")?;
    Ok(CacheEngineKey {
        namespace,
        chunk_hash,
        layer_id,
    }
    .to_text())
}

/// `(model_name, world_size, worker_id, kv_dtype, facts, tags, chunk_hash, layer_id)` of a key's text.
#[pyfunction]
#[expect(clippy::type_complexity, reason = "the key's fields, one each")]
pub(crate) fn parse_key<'py>(
    py: Python<'py>,
    text: &str,
) -> PyResult<(
    String,
    u32,
    u32,
    String,
    BTreeMap<String, String>,
    BTreeMap<String, Bound<'py, PyAny>>,
    Bound<'py, PyBytes>,
    Option<u32>,
)> {
    let CacheEngineKey {
        namespace,
        chunk_hash,
        layer_id,
    } = CacheEngineKey::parse(text).map_err(NativeError::from)?;
    let tag = |value| match value {
        TagValue::Null => Ok(py.None().into_bound(py)),
        TagValue::Bool(value) => value.into_bound_py_any(py),
        TagValue::Int(value) => value.into_bound_py_any(py),
        TagValue::Float(value) => value.into_bound_py_any(py),
        TagValue::Text(value) => value.into_bound_py_any(py),
    };
    let tags = namespace
        .tags
        .into_iter()
        .map(|(name, value)| Ok((name, tag(value)?)));
    Ok((
        namespace.model_name,
        namespace.world_size,
        namespace.worker_id,
        namespace.kv_dtype,
        namespace.facts,
        tags.collect::<PyResult<_>>()?,
        PyBytes::new(py, &chunk_hash.0),
        layer_id,
    ))
}
