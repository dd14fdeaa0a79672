//! The shift of keys to other positions, as Python sees it.

use lmcache_transfer::rope::{Element, Pairing, Rows, Shift};
use pyo3::prelude::*;

use crate::errors::NativeError;
use crate::gate::{Owned, enter};
use crate::transfer::int64s;

/// A shift of one row a token from the positions `old` to `new`, for layers of the same frequencies.
#[pyclass(frozen, module = "lmcache_rs._native")]
pub(crate) struct RopeShift(Owned<Shift>);

impl RopeShift {
    pub(crate) fn planned(&self) -> PyResult<&Shift> {
        Ok(self.0.get()?)
    }
}

#[pymethods]
impl RopeShift {
    /// `row_elements`: elements of a token's row, whose first `heads * head_size` are its keys.
    #[new]
    #[pyo3(signature = (inv_freq, old, new, *, interleaved, dtype, row_elements, heads, head_size, offset))]
    #[expect(clippy::too_many_arguments, reason = "the row's numbers, one each")]
    fn new(
        py: Python<'_>,
        inv_freq: Vec<f64>,
        old: &Bound<'_, PyAny>,
        new: &Bound<'_, PyAny>,
        interleaved: bool,
        dtype: &str,
        row_elements: usize,
        heads: usize,
        head_size: usize,
        offset: usize,
    ) -> PyResult<Self> {
        let rows = rows(dtype, row_elements, heads, head_size, offset)?;
        let pairing = pairing(interleaved);
        let old = int64s(py, old, "stored positions")?;
        let new = int64s(py, new, "new positions")?;
        let shift = enter(py, || Shift::plan(pairing, &inv_freq, rows, &old, &new))?;
        Ok(Self(Owned::new(shift)))
    }
}

/// Where the keys lie in rows of these element types.
pub(crate) fn rows(
    dtype: &str,
    row_elements: usize,
    heads: usize,
    head_size: usize,
    offset: usize,
) -> Result<Rows, NativeError> {
    let element = match dtype {
        "float16" => Element::F16,
        "bfloat16" => Element::BF16,
        "float32" => Element::F32,
        "float64" => Element::F64,
        other => {
            return Err(NativeError::Argument(format!(
                "keys of type {other} cannot be shifted; only float16, bfloat16, float32 and float64 can"
            )));
        }
    };
    Ok(Rows {
        element,
        row_elements,
        heads,
        head_size,
        offset,
    })
}

pub(crate) fn pairing(interleaved: bool) -> Pairing {
    if interleaved {
        Pairing::Neighbours
    } else {
        Pairing::Halves
    }
}
