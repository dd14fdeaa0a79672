//! Tokens in, hashes out.

use std::sync::{Mutex, MutexGuard, PoisonError};

use lmcache_core::hash::{self, ChunkHash, ExtraKeys, ExtraValue};
use lmcache_core::token;
use num_bigint::BigInt;
use pyo3::buffer::{Element, PyBuffer, PyUntypedBuffer};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyBytes, PyDict, PyFloat, PyInt, PyList, PyString, PyTuple};

use crate::errors::NativeError;
use crate::gate::enter;

const MAX_DEPTH: usize = 32;

/// Reads a 32-byte hash.
pub(crate) fn chunk_hash(bytes: &[u8], what: &str) -> Result<ChunkHash, NativeError> {
    let hash: [u8; 32] = bytes.try_into().map_err(|_| {
        NativeError::Argument(format!("{what} must be 32 bytes, got {}", bytes.len()))
    })?;
    Ok(ChunkHash(hash))
}

/// Reads packed hashes of 32 bytes each.
pub(crate) fn packed_hashes(bytes: &[u8]) -> Result<Vec<ChunkHash>, NativeError> {
    ChunkHash::from_packed(bytes).ok_or_else(|| {
        NativeError::Argument(format!(
            "hashes must be packed 32 bytes each, got {} bytes",
            bytes.len()
        ))
    })
}

fn token_ids(tokens: &Bound<'_, PyAny>) -> PyResult<Vec<u32>> {
    if tokens.cast::<PyList>().is_err() {
        require_native_order(tokens, "tokens")?;
        if let Ok(buffer) = PyBuffer::<i64>::get(tokens) {
            return from_buffer(tokens.py(), &buffer);
        }
        if let Ok(buffer) = PyBuffer::<i32>::get(tokens) {
            return from_buffer(tokens.py(), &buffer);
        }
        if let Ok(buffer) = PyBuffer::<u32>::get(tokens) {
            return from_buffer(tokens.py(), &buffer);
        }
    }
    tokens.extract::<Vec<u32>>().map_err(|error| {
        let hint =
            "tokens must be a sequence or a buffer (int32, int64) of ids from 0 to 4294967295";
        match error.is_instance_of::<PyTypeError>(tokens.py()) {
            true => PyTypeError::new_err(format!("{hint}: {error}")),
            false => PyValueError::new_err(format!("{hint}: {error}")),
        }
    })
}

/// Refuses a buffer of the other byte order, which would be read with its bytes swapped.
pub(crate) fn require_native_order(buffer: &Bound<'_, PyAny>, what: &str) -> PyResult<()> {
    let Ok(buffer) = PyUntypedBuffer::get(buffer) else {
        return Ok(());
    };
    let foreign: &[u8] = match cfg!(target_endian = "little") {
        true => b">!",
        false => b"<",
    };
    match buffer.format().to_bytes().first() {
        Some(order) if foreign.contains(order) => Err(PyValueError::new_err(format!(
            "{what} is in the byte order of another machine (format {:?}); convert it to this one's, \
             e.g. array.astype(array.dtype.newbyteorder(\"=\"))",
            buffer.format()
        ))),
        _ => Ok(()),
    }
}

/// Copies a buffer's ids while the interpreter is held: nobody else's code runs meanwhile, so that the ids
/// that are checked are those that are hashed.
fn from_buffer<T: TokenId>(py: Python<'_>, buffer: &PyBuffer<T>) -> PyResult<Vec<u32>> {
    if buffer.dimensions() != 1 {
        let dimensions = buffer.dimensions();
        return Err(PyValueError::new_err(format!(
            "tokens must have one dimension, got {dimensions}"
        )));
    }
    T::narrow(buffer.to_vec(py)?).map_err(|ids| {
        let wrong = ids
            .into_iter()
            .enumerate()
            .find(|(_, id)| TryInto::<u32>::try_into(*id).is_err());
        let (at, id) = wrong.map_or((0, String::new()), |(at, id)| (at, id.to_string()));
        PyValueError::new_err(format!(
            "token id {id} at position {at} is not from 0 to 4294967295"
        ))
    })
}

/// An element that a buffer of token ids may have.
trait TokenId: Element + TryInto<u32> + Copy + std::fmt::Display {
    /// The ids as they are hashed, or the input if one of them is out of range. The range is checked for all
    /// at once, which the compiler turns into vector instructions.
    fn narrow(ids: Vec<Self>) -> Result<Vec<u32>, Vec<Self>>;
}

impl TokenId for u32 {
    fn narrow(ids: Vec<Self>) -> Result<Vec<u32>, Vec<Self>> {
        Ok(ids)
    }
}

impl TokenId for i32 {
    fn narrow(ids: Vec<Self>) -> Result<Vec<u32>, Vec<Self>> {
        match ids.iter().fold(0, |all, &id| all | id) {
            0.. => Ok(ids.into_iter().map(Self::cast_unsigned).collect()),
            _ => Err(ids),
        }
    }
}

impl TokenId for i64 {
    fn narrow(ids: Vec<Self>) -> Result<Vec<u32>, Vec<Self>> {
        let mut all = 0;
        let narrowed = ids
            .iter()
            .map(|&id| {
                all |= id;
                id as u32
            })
            .collect();
        match all >> 32 {
            0 => Ok(narrowed),
            _ => Err(ids),
        }
    }
}

fn extra_value(value: &Bound<'_, PyAny>, depth: usize) -> PyResult<ExtraValue> {
    if depth > MAX_DEPTH {
        let error = format!("extra_keys are nested deeper than {MAX_DEPTH} levels");
        return Err(PyValueError::new_err(error));
    }
    let all = |items: Bound<'_, PyAny>| -> PyResult<ExtraValue> {
        let items = items.try_iter()?.map(|item| extra_value(&item?, depth + 1));
        Ok(ExtraValue::Array(items.collect::<PyResult<_>>()?))
    };
    if value.is_none() {
        Ok(ExtraValue::Null)
    } else if let Ok(value) = value.cast::<PyBool>() {
        Ok(ExtraValue::Bool(value.is_true()))
    } else if value.is_instance_of::<PyInt>() {
        Ok(ExtraValue::Int(value.extract::<BigInt>()?))
    } else if let Ok(value) = value.cast::<PyFloat>() {
        Ok(ExtraValue::Float(value.value()))
    } else if let Ok(value) = value.cast::<PyString>() {
        Ok(ExtraValue::Text(value.to_cow()?.into_owned()))
    } else if let Ok(value) = value.cast::<PyBytes>() {
        Ok(ExtraValue::Bytes(value.as_bytes().to_vec()))
    } else if value.is_instance_of::<PyTuple>() || value.is_instance_of::<PyList>() {
        all(value.clone())
    } else if let Ok(pairs) = value.cast::<PyDict>() {
        let pair = |(key, value): (Bound<'_, PyAny>, Bound<'_, PyAny>)| {
            Ok((
                extra_value(&key, depth + 1)?,
                extra_value(&value, depth + 1)?,
            ))
        };
        Ok(ExtraValue::Map(
            pairs.iter().map(pair).collect::<PyResult<_>>()?,
        ))
    } else {
        Err(PyTypeError::new_err(format!(
            "extra_keys may hold None, bool, int, float, str, bytes, tuple, list and dict, got {}",
            value.get_type().name()?
        )))
    }
}

/// Canonical CBOR of any plain value, to be passed as `extra_keys` of a chunk.
#[pyfunction]
pub(crate) fn encode_extra_keys<'py>(value: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyBytes>> {
    Ok(PyBytes::new(value.py(), &extra_value(value, 0)?.to_cbor()))
}

/// SHA-256 of a plain value's canonical CBOR.
#[pyfunction]
pub(crate) fn sha256_cbor<'py>(value: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyBytes>> {
    Ok(PyBytes::new(
        value.py(),
        &hash::sha256_cbor(&extra_value(value, 0)?).0,
    ))
}

/// Bytes of chunk CBOR that this process has put through SHA-256.
#[pyfunction]
pub(crate) fn hashed_bytes() -> u64 {
    hash::hashed_bytes()
}

/// Length of the leading run of zero bytes of a 0…1 mask over `num_tokens` tokens.
#[pyfunction]
pub(crate) fn leading_false(mask: &[u8], num_tokens: usize) -> PyResult<usize> {
    let mask: Vec<bool> = mask.iter().map(|&byte| byte != 0).collect();
    Ok(token::leading_false(&mask, num_tokens).map_err(NativeError::from)?)
}

/// `num_false`, if it is a multiple of `chunk_size`.
#[pyfunction]
pub(crate) fn chunk_aligned(num_false: usize, chunk_size: usize) -> PyResult<usize> {
    Ok(token::chunk_aligned(num_false, chunk_size).map_err(NativeError::from)?)
}

/// The prefix chain of one growing token sequence.
#[pyclass(frozen, module = "lmcache_rs._native")]
pub(crate) struct Chain(Mutex<token::Chain>);

impl Chain {
    fn lock(&self) -> MutexGuard<'_, token::Chain> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What besides the tokens enters the chunks that one call completes.
enum Extras {
    Same(ExtraKeys),
    PerChunk {
        first: usize,
        extras: Vec<ExtraKeys>,
    },
}

impl Extras {
    fn read(extra_keys: Option<&Bound<'_, PyAny>>, first: usize, count: usize) -> PyResult<Self> {
        let one = |cbor: Option<Bound<'_, PyBytes>>| {
            cbor.map_or_else(ExtraKeys::none, |cbor| {
                ExtraKeys::from_cbor(cbor.as_bytes())
            })
        };
        let Some(extra_keys) = extra_keys else {
            return Ok(Self::Same(ExtraKeys::none()));
        };
        if let Ok(cbor) = extra_keys.cast::<PyBytes>() {
            return Ok(Self::Same(ExtraKeys::from_cbor(cbor.as_bytes())));
        }
        let list: Vec<Option<Bound<'_, PyBytes>>> = extra_keys.extract()?;
        if list.len() != count {
            return Err(PyValueError::new_err(format!(
                "{} extra_keys for {count} chunks that these tokens complete; give one a chunk",
                list.len()
            )));
        }
        Ok(Self::PerChunk {
            first,
            extras: list.into_iter().map(one).collect(),
        })
    }

    fn of(&self, chunk: usize) -> &ExtraKeys {
        match self {
            Self::Same(extra) => extra,
            Self::PerChunk { first, extras } => &extras[chunk - first],
        }
    }
}

#[pymethods]
impl Chain {
    #[new]
    fn new(chunk_size: usize, none_hash: &[u8]) -> PyResult<Self> {
        let none_hash = chunk_hash(none_hash, "none_hash")?;
        let chain = token::Chain::new(chunk_size, none_hash).map_err(NativeError::from)?;
        Ok(Self(Mutex::new(chain)))
    }

    /// Appends tokens and returns the number of full chunks.
    #[pyo3(signature = (tokens, extra_keys=None))]
    fn extend(
        &self,
        py: Python<'_>,
        tokens: &Bound<'_, PyAny>,
        extra_keys: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<usize> {
        let tokens = token_ids(tokens)?;
        let (first, count) = {
            let chain = self.lock();
            let first = chain.hashes().len();
            (
                first,
                (chain.num_tokens() + tokens.len()) / chain.chunk_size() - first,
            )
        };
        let extras = Extras::read(extra_keys, first, count)?;
        enter(py, || {
            if self.0.is_poisoned() {
                let error = "an earlier extend of this chain failed half-way; make a new one";
                return Err(NativeError::Argument(error.into()));
            }
            let mut chain = self.lock();
            if chain.hashes().len() != first {
                return Err(NativeError::Argument(
                    "another thread extends this chain".into(),
                ));
            }
            Ok(chain.extend_with(&tokens, |chunk| extras.of(chunk)))
        })
    }

    /// Tokens taken in so far.
    #[getter]
    fn num_tokens(&self) -> usize {
        self.lock().num_tokens()
    }

    /// Full chunks so far.
    #[getter]
    fn num_chunks(&self) -> usize {
        self.lock().hashes().len()
    }

    /// Packed hashes of the first `num_chunks` full chunks, all of them if not given.
    #[pyo3(signature = (num_chunks=None))]
    fn hashes<'py>(&self, py: Python<'py>, num_chunks: Option<usize>) -> Bound<'py, PyBytes> {
        let chain = self.lock();
        let hashes = chain.hashes();
        let count = num_chunks.map_or(hashes.len(), |count| count.min(hashes.len()));
        let packed: Vec<u8> = hashes[..count].iter().flat_map(|hash| hash.0).collect();
        PyBytes::new(py, &packed)
    }

    /// `(start, end, hash)` of the chunks that start at or after `skip`, the unfull one too if `with_tail`.
    #[pyo3(signature = (skip=0, with_tail=false, extra_keys=None))]
    fn spans<'py>(
        &self,
        py: Python<'py>,
        skip: usize,
        with_tail: bool,
        extra_keys: Option<&[u8]>,
    ) -> Vec<(usize, usize, Bound<'py, PyBytes>)> {
        let tail = with_tail.then(|| extra_keys.map_or_else(ExtraKeys::none, ExtraKeys::from_cbor));
        let spans = self.lock().spans(skip, tail.as_ref());
        spans
            .iter()
            .map(|span| (span.start, span.end, PyBytes::new(py, &span.hash.0)))
            .collect()
    }
}
