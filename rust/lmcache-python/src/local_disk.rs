//! The tier on local disks, as Python sees it.

use std::collections::BTreeMap;
use std::path::PathBuf;

use lmcache_core::hot_cache::Policy;
use lmcache_storage::compression;
use lmcache_storage::local_disk::{self, Options};
use lmcache_storage::object_form::{self, Description, Form, Format, crc64};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::chunks::{Arrived, Given, arrived, given, seconds};
use crate::errors::NativeError;
use crate::gate::{Owned, enter};
use crate::memory::{LocalCpu, unknown_policy};
use crate::token::{chunk_hash, packed_hashes};

/// Key, payload bytes, tokens, defect.
type Inspected = (Option<String>, Option<u64>, Option<u32>, Option<String>);

/// Chunks in folders on local disks.
#[pyclass(frozen, module = "lmcache_rs._native")]
pub(crate) struct LocalDisk(Owned<local_disk::LocalDisk>);

#[pymethods]
impl LocalDisk {
    /// Opens the folders `paths`, which together take at most `limit_bytes`; chunks are read into `pool`.
    #[new]
    #[pyo3(signature = (
        paths, limit_bytes, pool, policy = "LRU", *, threads = 8, max_queued_bytes = 1 << 30, direct = true,
        sync = false, delete_on_close = false
    ))]
    #[expect(clippy::too_many_arguments, reason = "settings by name")]
    fn new(
        py: Python<'_>,
        paths: Vec<PathBuf>,
        limit_bytes: u64,
        pool: &LocalCpu,
        policy: &str,
        threads: usize,
        max_queued_bytes: u64,
        direct: bool,
        sync: bool,
        delete_on_close: bool,
    ) -> PyResult<Self> {
        let options = Options {
            paths,
            limit_bytes,
            policy: Policy::from_name(policy).ok_or_else(|| unknown_policy(policy))?,
            threads,
            max_queued_bytes,
            direct,
            sync,
            delete_on_close,
        };
        let pool = pool.store()?.clone();
        let disk = enter(py, || {
            local_disk::LocalDisk::open(options, pool)
                .map_err(|trouble| NativeError::Disk(trouble.to_string()))
        })?;
        Ok(Self(Owned::new(disk)))
    }

    /// Takes sealed chunks in, as far as the queue has room; how many are new. Of each: its memory, its form and
    /// its tokens, if they are known.
    fn put(
        &self,
        py: Python<'_>,
        namespace: &str,
        hashes: &[u8],
        chunks: Vec<Given<'_>>,
    ) -> PyResult<usize> {
        let disk = self.0.get()?;
        let (hashes, given) = (packed_hashes(hashes)?, given(chunks)?);
        enter(py, || {
            Ok::<_, NativeError>(disk.put(namespace, &hashes, given))
        })
    }

    /// How many chunks of the chain are stored, up to the first gap.
    fn longest_prefix(&self, py: Python<'_>, namespace: &str, hashes: &[u8]) -> PyResult<usize> {
        let disk = self.0.get()?;
        enter(py, || {
            packed_hashes(hashes).map(|hashes| disk.contains_prefix(namespace, &hashes))
        })
    }

    /// Reads chunks up to the first gap, into memory of `pool` or, without one, of the tier's own; what came within
    /// `within_s` seconds. Of each: writable memory, its form and its tokens.
    #[pyo3(signature = (namespace, hashes, within_s, pool = None))]
    fn get(
        &self,
        py: Python<'_>,
        namespace: &str,
        hashes: &[u8],
        within_s: f64,
        pool: Option<&LocalCpu>,
    ) -> PyResult<Vec<Arrived>> {
        let disk = self.0.get()?;
        let pool = pool.map(LocalCpu::store).transpose()?;
        let arrivals = enter(py, || {
            let (hashes, within) = (packed_hashes(hashes)?, seconds(within_s));
            Ok::<_, NativeError>(match pool {
                None => disk.get(namespace, &hashes, within),
                Some(pool) => disk.get_into(pool, namespace, &hashes, within),
            })
        })?;
        Ok(arrived(arrivals))
    }

    /// Forgets a chunk; whether it was there.
    fn remove(&self, py: Python<'_>, namespace: &str, hash: &[u8]) -> PyResult<bool> {
        let disk = self.0.get()?;
        let hash = chunk_hash(hash, "hash")?;
        enter(py, || Ok::<_, NativeError>(disk.remove(namespace, hash)))
    }

    /// Removes every chunk, or those whose namespace begins with `prefix`; how many.
    #[pyo3(signature = (prefix = None))]
    fn clear(&self, py: Python<'_>, prefix: Option<&str>) -> PyResult<usize> {
        let disk = self.0.get()?;
        enter(py, || Ok::<_, NativeError>(disk.clear(prefix)))
    }

    /// Removes every chunk whose namespace does not begin with `prefix`; how many.
    fn retain(&self, py: Python<'_>, prefix: &str) -> PyResult<usize> {
        let disk = self.0.get()?;
        enter(py, || Ok::<_, NativeError>(disk.retain(prefix)))
    }

    /// Waits until every put taken in before is done; false if the time ran out.
    fn flush(&self, py: Python<'_>, within_s: f64) -> PyResult<bool> {
        let disk = self.0.get()?;
        enter(py, || Ok::<_, NativeError>(disk.flush(seconds(within_s))))
    }

    /// Ends the tier, pending puts done first; false if the time ran out. Idempotent.
    fn close(&self, py: Python<'_>, within_s: f64) -> PyResult<bool> {
        let disk = self.0.get()?;
        enter(py, || Ok::<_, NativeError>(disk.close(seconds(within_s))))
    }

    /// Where a chunk's file is, or would be.
    fn path_of(&self, namespace: &str, hash: &[u8]) -> PyResult<PathBuf> {
        let disk = self.0.get()?;
        Ok(disk.path_of(namespace, chunk_hash(hash, "hash")?))
    }

    /// Counters by name.
    fn stats(&self, py: Python<'_>) -> PyResult<BTreeMap<String, u64>> {
        let disk = self.0.get()?;
        enter(py, || Ok::<_, NativeError>(disk.stats()))
    }
}

/// What an object of a tier says of itself, given all its bytes: `(key, payload bytes, tokens, defect)`. The
/// defect is `None` for one that is whole; the key and numbers are `None` where they cannot be read.
#[pyfunction]
#[pyo3(signature = (object))]
pub(crate) fn inspect_object(py: Python<'_>, object: &[u8]) -> PyResult<Inspected> {
    enter(py, || {
        Ok::<_, NativeError>(match object_form::Header::parse_any(object) {
            Err(defect) => (None, None, None, Some(defect.name().to_owned())),
            Ok(header) => {
                let begin = header.len();
                // A file's last page is filled up with zeros.
                let end = usize::try_from(header.stored_bytes())
                    .ok()
                    .and_then(|bytes| begin.checked_add(bytes))
                    .map_or(object.len(), |end| end.min(object.len()));
                let (payload, padding) = object[begin..].split_at(end - begin);
                let defect = if padding.len() >= object_form::PAGE_BYTES {
                    Some(object_form::Defect::Length)
                } else if padding.iter().any(|byte| *byte != 0) {
                    Some(object_form::Defect::Checksum)
                } else {
                    let verified = header.verify(payload);
                    verified
                        .and_then(|()| compression::verify(&header, payload))
                        .err()
                };
                let description = header.description;
                (
                    Some(description.key),
                    Some(description.payload_bytes),
                    Some(description.num_tokens),
                    defect.map(|defect| defect.name().to_owned()),
                )
            }
        })
    })
}

/// A payload of numbers of a type, as the packed object of no chunk in particular: to measure with.
#[pyfunction]
pub(crate) fn pack_object<'py>(
    py: Python<'py>,
    payload: &[u8],
    dtype: &str,
) -> PyResult<Bound<'py, PyBytes>> {
    let packed = enter(py, || {
        let form = Form {
            format: Format::KvT2d,
            num_layers: 0,
            hidden: 0,
            block_tokens: 1,
            dtype: dtype.to_owned(),
        };
        let description = Description {
            key: "model=(none)".to_owned(),
            payload_bytes: payload.len() as u64,
            num_tokens: 0,
            form: Some(form),
            positions: None,
        };
        compression::seal(&description, payload)
            .ok_or_else(|| NativeError::Argument(format!("dtype {dtype:?} has too long a name")))
    })?;
    Ok(PyBytes::new(py, &packed))
}

/// The CRC-64/NVME of any bytes.
#[pyfunction]
pub(crate) fn checksum(py: Python<'_>, data: &[u8]) -> PyResult<u64> {
    enter(py, || Ok::<_, NativeError>(crc64(data)))
}
