//! Rotary position embedding of keys that move: from the positions they were stored at to other ones.
//!
//! # Formula
//!
//! RoFormer (Su et al., [arXiv:2104.09864](https://arxiv.org/abs/2104.09864), section 3.2.2) turns the j-th
//! pair `(a, b)` of a key at position `m` by the angle `m · w[j]`:
//!
//! ```text
//! a' = a · cos(m · w[j]) − b · sin(m · w[j])
//! b' = b · cos(m · w[j]) + a · sin(m · w[j])
//! ```
//!
//! with the inverse frequencies `w[j] = base^(−2j/d)`, or a scaled table of them (Llama 3.1, YaRN). Turns of a
//! plane add up, so a key stored at `m` becomes the key at `n` by a turn of `(n − m) · w[j]` more:
//! `R(n) k = R(n − m) R(m) k`. A factor that the engine's cosines and sines carry (YaRN's attention scaling)
//! is in the stored key already and stays as it is: the shift is a pure rotation.
//!
//! # Rounding
//!
//! Angle, cosine and sine are computed in double precision. f16, bf16 and f32 are turned in single precision
//! and rounded once to the nearest, ties to even; f64 is turned in double. With `u` half a unit in the last
//! place of the element type, `|error| ≤ u·|result| + 3·2⁻²⁴·(|a| + |b|)` (f64: `2⁻⁵²` for `3·2⁻²⁴`, and the
//! angle's own rounding, `2⁻⁵²·|n − m|·w[j]·(|a| + |b|)`). A shift by zero changes no bit.

use std::collections::HashMap;
use std::ops::{Add, Mul, Range, Sub};

use half::bf16;
use half::f16;
use half::slice::HalfFloatSliceExt;

use crate::error::TransferError;

/// Which elements of a head make a pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pairing {
    /// Element j of the first half with element j of the second (GPT-NeoX, Llama, Qwen).
    Halves,
    /// Elements 2j and 2j + 1 (GPT-J, DeepSeek).
    Neighbours,
}

/// Element types that can be rotated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Element {
    /// IEEE half precision.
    F16,
    /// The upper half of a single.
    BF16,
    /// IEEE single precision.
    F32,
    /// IEEE double precision.
    F64,
}

impl Element {
    /// Size in bytes.
    pub fn size(self) -> usize {
        match self {
            Self::F16 | Self::BF16 => 2,
            Self::F32 => 4,
            Self::F64 => 8,
        }
    }
}

/// Where the keys lie in rows of one token each; distances and sizes in elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rows {
    /// Element type.
    pub element: Element,
    /// Elements of a row: K and V of all heads, or a latent vector. The keys come first.
    pub row_elements: usize,
    /// Heads, one after another.
    pub heads: usize,
    /// Elements of a head.
    pub head_size: usize,
    /// First rotated element of a head.
    pub offset: usize,
}

/// A shift of a range of tokens, planned once and applied to any layer that has the same frequencies.
#[derive(Debug, Clone)]
pub struct Shift {
    pairing: Pairing,
    rows: Rows,
    num_pairs: usize,
    num_rows: usize,
    // Rows that move by one and the same number of positions; those that stay are in none.
    runs: Vec<(Range<usize>, usize)>,
    turns: Turns,
}

/// For each distinct shift, `num_pairs` cosines and then as many sines.
#[derive(Debug, Clone)]
enum Turns {
    Single(Vec<f32>),
    Double(Vec<f64>),
}

impl Shift {
    /// Plans the shift of one row a position, from `old` to `new`.
    pub fn plan(
        pairing: Pairing,
        inv_freq: &[f64],
        rows: Rows,
        old: &[i64],
        new: &[i64],
    ) -> Result<Self, TransferError> {
        require_rows(inv_freq, &rows)?;
        if old.len() != new.len() {
            return Err(refused(format!(
                "{} stored and {} new positions; give one of each a token",
                old.len(),
                new.len()
            )));
        }
        let mut runs: Vec<(Range<usize>, usize)> = Vec::new();
        let mut turn_of: HashMap<i64, usize> = HashMap::new();
        let mut turns = Vec::new();
        for (row, (&old, &new)) in old.iter().zip(new).enumerate() {
            let shift = new.checked_sub(old).ok_or_else(|| {
                refused(format!(
                    "positions {old} and {new} are too far from each other"
                ))
            })?;
            if shift == 0 {
                continue;
            }
            let turn = *turn_of.entry(shift).or_insert_with(|| {
                let angles = || inv_freq.iter().map(|inv_freq| shift as f64 * inv_freq);
                turns.extend(angles().map(f64::cos));
                turns.extend(angles().map(f64::sin));
                turns.len() / (2 * inv_freq.len()) - 1
            });
            match runs.last_mut() {
                Some((run, of)) if run.end == row && *of == turn => run.end += 1,
                _ => runs.push((row..row + 1, turn)),
            }
        }
        Ok(Self {
            pairing,
            rows,
            num_pairs: inv_freq.len(),
            num_rows: old.len(),
            runs,
            turns: match rows.element {
                Element::F64 => Turns::Double(turns),
                _ => Turns::Single(turns.iter().map(|&turn| turn as f32).collect()),
            },
        })
    }

    /// Rows that [`Shift::apply`] takes.
    pub fn num_rows(&self) -> usize {
        self.num_rows
    }

    /// Turns the keys of one layer in place: `bytes` are the rows, one after another.
    pub fn apply(&self, bytes: &mut [u8]) -> Result<(), TransferError> {
        let expected = self.num_rows * self.rows.row_elements * self.rows.element.size();
        if bytes.len() != expected {
            return Err(refused(format!(
                "{} bytes for {} tokens, which take {expected}",
                bytes.len(),
                self.num_rows
            )));
        }
        match (&self.turns, self.rows.element) {
            (Turns::Double(turns), _) => self.turn::<f64>(turns, bytes),
            (Turns::Single(turns), Element::F16) => self.turn::<f16>(turns, bytes),
            (Turns::Single(turns), Element::BF16) => self.turn::<bf16>(turns, bytes),
            (Turns::Single(turns), _) => self.turn::<f32>(turns, bytes),
        }
        Ok(())
    }

    fn turn<N: Number>(&self, turns: &[N::Wide], bytes: &mut [u8]) {
        let Rows {
            row_elements,
            heads,
            head_size,
            offset,
            ..
        } = self.rows;
        let size = size_of::<N>();
        let mut wide = vec![N::Wide::default(); 2 * self.num_pairs];
        for (run, turn) in &self.runs {
            let start = turn * 2 * self.num_pairs;
            let (cos, sin) = turns[start..start + 2 * self.num_pairs].split_at(self.num_pairs);
            let rows = &mut bytes[run.start * row_elements * size..run.end * row_elements * size];
            for row in rows.chunks_exact_mut(row_elements * size) {
                for head in row.chunks_exact_mut(head_size * size).take(heads) {
                    let rotated = &mut head[offset * size..(offset + wide.len()) * size];
                    N::widen(rotated, &mut wide);
                    match self.pairing {
                        Pairing::Halves => turn_halves(&mut wide, cos, sin),
                        Pairing::Neighbours => turn_neighbours(&mut wide, cos, sin),
                    }
                    N::narrow(&wide, rotated);
                }
            }
        }
    }
}

/// Refuses rows and frequencies that do not belong together.
pub(crate) fn require_rows(inv_freq: &[f64], rows: &Rows) -> Result<(), TransferError> {
    let rotated = 2 * inv_freq.len();
    if rotated == 0 || inv_freq.iter().any(|inv_freq| !inv_freq.is_finite()) {
        return Err(refused(format!(
            "{} inverse frequencies, which must be finite and at least one",
            inv_freq.len()
        )));
    }
    let within = |end: usize| end <= rows.head_size;
    if !rows.offset.checked_add(rotated).is_some_and(within) {
        return Err(refused(format!(
            "{rotated} rotated elements from element {} on do not fit a head of {}",
            rows.offset, rows.head_size
        )));
    }
    let keys = rows.heads.checked_mul(rows.head_size);
    if rows.heads == 0 || keys.is_none_or(|keys| keys > rows.row_elements) {
        return Err(refused(format!(
            "{} heads of {} elements do not fit a row of {}",
            rows.heads, rows.head_size, rows.row_elements
        )));
    }
    Ok(())
}

pub(crate) fn refused(reason: String) -> TransferError {
    TransferError::Rope { reason }
}

fn turn_halves<W: Real>(pairs: &mut [W], cos: &[W], sin: &[W]) {
    let (first, second) = pairs.split_at_mut(cos.len());
    for ((a, b), (&cos, &sin)) in first.iter_mut().zip(second).zip(cos.iter().zip(sin)) {
        (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
    }
}

fn turn_neighbours<W: Real>(pairs: &mut [W], cos: &[W], sin: &[W]) {
    for (pair, (&cos, &sin)) in pairs.chunks_exact_mut(2).zip(cos.iter().zip(sin)) {
        let (a, b) = (pair[0], pair[1]);
        (pair[0], pair[1]) = (a * cos - b * sin, b * cos + a * sin);
    }
}

trait Real: Copy + Default + Add<Output = Self> + Sub<Output = Self> + Mul<Output = Self> {}
impl Real for f32 {}
impl Real for f64 {}

/// An element as it is stored, and the type it is turned in.
trait Number: Sized {
    type Wide: Real;
    fn widen(bytes: &[u8], wide: &mut [Self::Wide]);
    fn narrow(wide: &[Self::Wide], bytes: &mut [u8]);
}

macro_rules! number {
    ($($number:ty, $wide:ty, $widen:expr, $narrow:expr;)*) => {$(
        impl Number for $number {
            type Wide = $wide;

            fn widen(bytes: &[u8], wide: &mut [$wide]) {
                let (elements, _) = bytes.as_chunks::<{ size_of::<$number>() }>();
                for (wide, &element) in wide.iter_mut().zip(elements) {
                    *wide = $widen(<$number>::from_ne_bytes(element));
                }
            }

            fn narrow(wide: &[$wide], bytes: &mut [u8]) {
                let (elements, _) = bytes.as_chunks_mut::<{ size_of::<$number>() }>();
                for (&wide, element) in wide.iter().zip(elements) {
                    *element = <$number>::to_ne_bytes($narrow(wide));
                }
            }
        }
    )*};
}

number! {
    bf16, f32, wide_of_bf16, bf16_of_wide;
    f32, f32, |element| element, |wide| wide;
    f64, f64, |element| element, |wide| wide;
}

fn wide_of_bf16(element: bf16) -> f32 {
    f32::from_bits(u32::from(element.to_bits()) << 16)
}

/// As `bf16::from_f32`, without its branches: the compiler turns a loop of it into vector instructions.
fn bf16_of_wide(wide: f32) -> bf16 {
    let bits = wide.to_bits();
    let is_nan = bits & 0x7FFF_FFFF > 0x7F80_0000;
    let quiet = bits >> 16 | 0x0040;
    let rounded = bits.wrapping_add(0x7FFF + (bits >> 16 & 1)) >> 16;
    bf16::from_bits(if is_nan { quiet } else { rounded } as u16)
}

/// Elements that are converted together, so that the processor's own instruction can be used.
const LANES: usize = 64;

impl Number for f16 {
    type Wide = f32;

    fn widen(bytes: &[u8], wide: &mut [f32]) {
        let mut halves = [f16::ZERO; LANES];
        for (bytes, wide) in bytes.chunks(2 * LANES).zip(wide.chunks_mut(LANES)) {
            let halves = &mut halves[..wide.len()];
            for (half, &element) in halves.iter_mut().zip(bytes.as_chunks().0) {
                *half = f16::from_ne_bytes(element);
            }
            halves.convert_to_f32_slice(wide);
        }
    }

    fn narrow(wide: &[f32], bytes: &mut [u8]) {
        let mut halves = [f16::ZERO; LANES];
        for (wide, bytes) in wide.chunks(LANES).zip(bytes.chunks_mut(2 * LANES)) {
            let halves = &mut halves[..wide.len()];
            halves.convert_from_f32_slice(wide);
            for (half, element) in halves.iter().zip(bytes.as_chunks_mut().0) {
                *element = half.to_ne_bytes();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const ELEMENTS: [Element; 4] = [Element::F16, Element::BF16, Element::F32, Element::F64];

    fn read(element: Element, bytes: &[u8]) -> f64 {
        match element {
            Element::F16 => f16::from_ne_bytes([bytes[0], bytes[1]]).to_f64(),
            Element::BF16 => bf16::from_ne_bytes([bytes[0], bytes[1]]).to_f64(),
            Element::F32 => f32::from_ne_bytes(bytes.try_into().unwrap()).into(),
            Element::F64 => f64::from_ne_bytes(bytes.try_into().unwrap()),
        }
    }

    fn write(element: Element, value: f64) -> Vec<u8> {
        match element {
            Element::F16 => f16::from_f64(value).to_ne_bytes().to_vec(),
            Element::BF16 => bf16::from_f64(value).to_ne_bytes().to_vec(),
            Element::F32 => (value as f32).to_ne_bytes().to_vec(),
            Element::F64 => value.to_ne_bytes().to_vec(),
        }
    }

    /// Half a unit in the last place of values around 1, and of the smallest ones.
    fn half_units(element: Element) -> (f64, f64) {
        match element {
            Element::F16 => (2f64.powi(-11), 2f64.powi(-25)),
            Element::BF16 => (2f64.powi(-8), 2f64.powi(-134)),
            Element::F32 => (2f64.powi(-24), 2f64.powi(-150)),
            Element::F64 => (2f64.powi(-53), 0.0),
        }
    }

    fn frequencies(pairs: usize) -> Vec<f64> {
        let exponent = |pair: usize| -(pair as f64) / pairs as f64;
        (0..pairs)
            .map(|pair| 10_000f64.powf(exponent(pair)))
            .collect()
    }

    /// Where element `at` of a head's rotated part has its partner, and whether it comes first.
    fn partner(pairing: Pairing, pairs: usize, at: usize) -> (usize, bool, usize) {
        match pairing {
            Pairing::Halves if at < pairs => (at + pairs, true, at),
            Pairing::Halves => (at - pairs, false, at - pairs),
            Pairing::Neighbours => (at ^ 1, at.is_multiple_of(2), at / 2),
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(400))]
        #[test]
        fn a_shift_equals_the_double_precision_loop_and_touches_nothing_else(
            element in proptest::sample::select(&ELEMENTS), neighbours in any::<bool>(),
            pairs in 1usize..40, offset in 0usize..5, after in 0usize..5, heads in 1usize..4,
            values in 0usize..9, old in proptest::collection::vec(-5i64..1_000_000, 1..12),
            shifts in proptest::collection::vec(prop_oneof![Just(0i64), -700i64..=700, -1_000_000i64..=1_000_000], 12),
            seed in any::<u64>(),
        ) {
            let pairing = if neighbours { Pairing::Neighbours } else { Pairing::Halves };
            let head_size = offset + 2 * pairs + after;
            let row_elements = heads * head_size + values;
            let rows = Rows { element, row_elements, heads, head_size, offset };
            let new: Vec<_> = old.iter().zip(&shifts).map(|(old, shift)| old + shift).collect();
            let mut state = seed;
            let mut random = || {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (state >> 33) as f64 / 2f64.powi(30) - 1.0
            };
            let size = element.size();
            let before: Vec<u8> = (0..old.len() * row_elements)
                .flat_map(|_| write(element, random()))
                .collect();
            let inv_freq = frequencies(pairs);
            let mut after_shift = before.clone();
            let shift = Shift::plan(pairing, &inv_freq, rows, &old, &new).unwrap();
            shift.apply(&mut after_shift).unwrap();
            let at = |bytes: &[u8], index: usize| read(element, &bytes[index * size..(index + 1) * size]);
            let (unit, smallest) = half_units(element);
            for (row, (old, new)) in old.iter().zip(&new).enumerate() {
                for column in 0..row_elements {
                    let index = row * row_elements + column;
                    let (value, found) = (at(&before, index), at(&after_shift, index));
                    let in_head = column % head_size;
                    let keys = column < heads * head_size;
                    let rotated = keys && in_head >= offset && in_head < offset + 2 * pairs;
                    if !rotated || old == new {
                        prop_assert_eq!(value.to_bits(), found.to_bits());
                        continue;
                    }
                    let (other, first, pair) = partner(pairing, pairs, in_head - offset);
                    let other = at(&before, index - (in_head - offset) + other);
                    let angle = (new - old) as f64 * inv_freq[pair];
                    let sign = if first { -1.0 } else { 1.0 };
                    let wanted = value * angle.cos() + sign * other * angle.sin();
                    let size = value.abs() + other.abs();
                    let arithmetic = match element {
                        Element::F64 => 2f64.powi(-52) * (1.0 + angle.abs()) * size,
                        _ => 3.0 * 2f64.powi(-24) * size,
                    };
                    let tolerance = unit * wanted.abs() * (1.0 + 1e-6) + smallest + arithmetic;
                    prop_assert!((found - wanted).abs() <= tolerance,
                        "{found} for {wanted}, off by {} of {tolerance}", (found - wanted).abs());
                }
            }
        }
    }

    #[test]
    fn ties_are_rounded_to_even() {
        // A quarter turn moves b to a exactly, up to a cosine of 6e-17: only the sum's rounding is seen.
        let turn = std::f64::consts::FRAC_PI_2;
        let rows = |element| Rows {
            element,
            row_elements: 2,
            heads: 1,
            head_size: 2,
            offset: 0,
        };
        for (element, one) in [(Element::F16, 1.0), (Element::BF16, 1.0)] {
            let mut bytes = [write(element, 0.0), write(element, one)].concat();
            let plan = Shift::plan(Pairing::Halves, &[turn], rows(element), &[0], &[1]).unwrap();
            plan.apply(&mut bytes).unwrap();
            assert_eq!(read(element, &bytes[..2]), -1.0);
        }
        let mut halves = [0u8; 4];
        f16::narrow(
            &[1.0 + 2f32.powi(-11), 1.0 + 3.0 * 2f32.powi(-11)],
            &mut halves,
        );
        assert_eq!(read(Element::F16, &halves[..2]), 1.0);
        assert_eq!(read(Element::F16, &halves[2..]), 1.0 + 2f64.powi(-9));
        bf16::narrow(
            &[1.0 + 2f32.powi(-8), 1.0 + 3.0 * 2f32.powi(-8)],
            &mut halves,
        );
        assert_eq!(read(Element::BF16, &halves[..2]), 1.0);
        assert_eq!(read(Element::BF16, &halves[2..]), 1.0 + 2f64.powi(-6));
    }

    #[test]
    fn a_shift_by_zero_changes_no_bit() {
        // Negative zeros beside negative numbers, and signalling not-a-numbers: a turn by zero changes both.
        let bits = [0x8000u16, 0xBF80, 0x7F81, 0xFC01];
        let before: Vec<u8> = bits.iter().flat_map(|bits| bits.to_ne_bytes()).collect();
        for element in [Element::F16, Element::BF16, Element::F32] {
            let row_elements = 8 / element.size();
            let rows = Rows {
                element,
                row_elements,
                heads: 1,
                head_size: row_elements,
                offset: 0,
            };
            let shift = Shift::plan(Pairing::Neighbours, &[1.0], rows, &[7], &[7]).unwrap();
            let mut after = before.clone();
            shift.apply(&mut after).unwrap();
            assert_eq!(after, before);
        }
    }

    #[test]
    fn bf16_is_rounded_as_by_the_crate_that_knows_it() {
        let mut bits = 0u32;
        for _ in 0..200_000 {
            bits = bits.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            for bits in [
                bits,
                bits | 0x7F80_0000,
                bits & 0x807F_FFFF,
                bits & 0xFFFF_8000,
            ] {
                let wide = f32::from_bits(bits);
                assert_eq!(
                    bf16_of_wide(wide).to_bits(),
                    bf16::from_f32(wide).to_bits(),
                    "{bits:x}"
                );
                let half = bf16::from_bits((bits >> 16) as u16);
                let widened = wide_of_bf16(half);
                assert!(widened == half.to_f32() || widened.is_nan() && half.is_nan());
            }
        }
    }

    #[test]
    fn what_does_not_fit_is_refused_by_name() {
        let rows = Rows {
            element: Element::F32,
            row_elements: 16,
            heads: 2,
            head_size: 8,
            offset: 0,
        };
        let plan = |rows, inv_freq: &[f64], old: &[i64], new: &[i64]| {
            let text = Shift::plan(Pairing::Halves, inv_freq, rows, old, new)
                .unwrap_err()
                .to_string();
            assert!(text.starts_with("keys cannot be shifted: "), "{text}");
            text
        };
        assert!(plan(rows, &[], &[0], &[1]).contains("0 inverse frequencies"));
        assert!(plan(rows, &[f64::NAN], &[0], &[1]).contains("finite"));
        assert!(plan(rows, &[1.0; 5], &[0], &[1]).contains("do not fit a head of 8"));
        assert!(plan(Rows { offset: 7, ..rows }, &[1.0], &[0], &[1]).contains("from element 7 on"));
        assert!(
            plan(Rows { heads: 3, ..rows }, &[1.0], &[0], &[1]).contains("do not fit a row of 16")
        );
        assert!(plan(rows, &[1.0], &[0], &[1, 2]).contains("1 stored and 2 new"));
        assert!(plan(rows, &[1.0], &[i64::MIN], &[1]).contains("too far"));
        let shift = Shift::plan(Pairing::Halves, &[1.0], rows, &[0], &[1]).unwrap();
        assert!(shift.apply(&mut [0; 60]).is_err());
    }
}
