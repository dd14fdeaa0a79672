//! `sha256_cbor`: SHA-256 over canonical CBOR (RFC 8949, section 4.2.1), the hash of vLLM's prefix cache.
//!
//! A chunk's hash is taken over the array `[parent, [token, …], extra]`. The two first parts are written by
//! an emitter of our own, since they are the hot path; `extra` is rare and arbitrary and goes through
//! `ciborium`, once per distinct value.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

use ciborium::value::Value;
use num_bigint::{BigInt, Sign};
use sha2::{Digest, Sha256};

/// The 32-byte SHA-256 that names a chunk and, through the chain, its whole prefix.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ChunkHash(pub [u8; 32]);

impl ChunkHash {
    /// Splits packed hashes (32 bytes each); `None` if the length is no multiple of 32.
    pub fn from_packed(packed: &[u8]) -> Option<Vec<Self>> {
        let (hashes, rest) = packed.as_chunks::<32>();
        rest.is_empty()
            .then(|| hashes.iter().map(|hash| Self(*hash)).collect())
    }

    /// 64 lower-case hexadecimal digits.
    pub fn to_hex(&self) -> String {
        self.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Reads 64 lower-case hexadecimal digits; anything else is `None`.
    pub fn from_hex(text: &str) -> Option<Self> {
        let digits = text.as_bytes();
        if digits.len() != 64 {
            return None;
        }
        let nibble = |digit: u8| match digit {
            b'0'..=b'9' => Some(digit - b'0'),
            b'a'..=b'f' => Some(digit - b'a' + 10),
            _ => None,
        };
        let mut hash = [0u8; 32];
        for (byte, pair) in hash.iter_mut().zip(digits.chunks_exact(2)) {
            *byte = nibble(pair[0])? << 4 | nibble(pair[1])?;
        }
        Some(Self(hash))
    }
}

impl fmt::Debug for ChunkHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.to_hex())
    }
}

/// Bytes this process has put through SHA-256 for chunks. "Hashed once" is checked against it.
static HASHED_BYTES: AtomicU64 = AtomicU64::new(0);

/// Total bytes of canonical CBOR hashed for chunks by this process so far.
pub fn hashed_bytes() -> u64 {
    HASHED_BYTES.load(Ordering::Relaxed)
}

/// A value that may enter a hash beside the tokens: the CBOR image of a Python object.
#[derive(Debug, Clone, PartialEq)]
pub enum ExtraValue {
    /// `None`.
    Null,
    /// `bool`.
    Bool(bool),
    /// `int` of any size.
    Int(BigInt),
    /// `float`, written in the shortest width that keeps its value.
    Float(f64),
    /// `str`.
    Text(String),
    /// `bytes`.
    Bytes(Vec<u8>),
    /// `list` or `tuple`; CBOR knows one kind.
    Array(Vec<ExtraValue>),
    /// `dict`; keys are sorted as canonical CBOR asks: shorter encodings first, then bytewise.
    Map(Vec<(ExtraValue, ExtraValue)>),
}

impl ExtraValue {
    /// Canonical CBOR of the value.
    pub fn to_cbor(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        ciborium::into_writer(&self.to_value(), &mut bytes)
            .expect("a Vec takes every byte, and Value has no failing serialiser");
        bytes
    }

    fn to_value(&self) -> Value {
        match self {
            Self::Null => Value::Null,
            Self::Bool(value) => Value::Bool(*value),
            Self::Int(value) => int_to_value(value),
            Self::Float(value) if value.is_nan() => Value::Float(f64::NAN),
            Self::Float(value) => Value::Float(*value),
            Self::Text(value) => Value::Text(value.clone()),
            Self::Bytes(value) => Value::Bytes(value.clone()),
            Self::Array(items) => Value::Array(items.iter().map(Self::to_value).collect()),
            Self::Map(pairs) => {
                let mut sorted: Vec<_> = pairs
                    .iter()
                    .map(|(key, value)| (key.to_cbor(), key, value))
                    .collect();
                sorted.sort_by(|a, b| (a.0.len(), &a.0).cmp(&(b.0.len(), &b.0)));
                let entry =
                    |(_, key, value): (Vec<u8>, &Self, &Self)| (key.to_value(), value.to_value());
                Value::Map(sorted.into_iter().map(entry).collect())
            }
        }
    }
}

/// Integers that fit CBOR's own 64 bits are written as such, larger ones as bignums (tags 2 and 3).
fn int_to_value(value: &BigInt) -> Value {
    let small = i128::try_from(value)
        .ok()
        .and_then(|small| ciborium::value::Integer::try_from(small).ok());
    if let Some(small) = small {
        return Value::Integer(small);
    }
    let (tag, magnitude) = match value.sign() {
        Sign::Minus => (3, -(value + 1u8)),
        Sign::NoSign | Sign::Plus => (2, value.clone()),
    };
    let (_, bytes) = magnitude.to_bytes_be();
    Value::Tag(tag, Box::new(Value::Bytes(bytes)))
}

/// SHA-256 of the canonical CBOR of any value: how vLLM derives `NONE_HASH` from its seed string.
pub fn sha256_cbor(value: &ExtraValue) -> ChunkHash {
    ChunkHash(Sha256::digest(value.to_cbor()).into())
}

/// The third part of a chunk's hash input, kept in its encoded form: what besides the tokens decides
/// the KV (adapter, salt, images), or nothing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExtraKeys(Box<[u8]>);

impl ExtraKeys {
    /// Nothing besides the tokens: CBOR null, as vLLM passes `None`.
    pub fn none() -> Self {
        Self(Box::new([0xf6]))
    }

    /// Encodes a value once, for use with any number of chunks.
    pub fn encode(value: &ExtraValue) -> Self {
        Self(value.to_cbor().into())
    }

    /// Takes canonical CBOR that [`ExtraKeys::as_cbor`] gave before.
    pub fn from_cbor(cbor: &[u8]) -> Self {
        Self(cbor.into())
    }

    /// The encoded form.
    pub fn as_cbor(&self) -> &[u8] {
        &self.0
    }
}

/// `sha256_cbor((parent, tokens, extra))`.
pub(crate) fn hash_chunk(parent: &ChunkHash, tokens: &[u32], extra: &ExtraKeys) -> ChunkHash {
    let mut sink = HashSink {
        sha: Sha256::new(),
        hashed_bytes: 0,
    };
    emit_chunk(parent, tokens, extra, &mut sink);
    HASHED_BYTES.fetch_add(sink.hashed_bytes, Ordering::Relaxed);
    ChunkHash(sink.sha.finalize().into())
}

/// Takes a chunk's CBOR, piece by piece.
trait Sink {
    fn take(&mut self, piece: &[u8]);
}

struct HashSink {
    sha: Sha256,
    hashed_bytes: u64,
}

impl Sink for HashSink {
    #[inline]
    fn take(&mut self, piece: &[u8]) {
        self.hashed_bytes += piece.len() as u64;
        self.sha.update(piece);
    }
}

/// The hash's own block: whole ones pass through it without being buffered again.
const SHA_BLOCK_BYTES: usize = 64;
/// Longest head of a token: one initial byte and four of payload.
const MAX_TOKEN_BYTES: usize = 5;
/// Tokens emitted before a block is handed on: a block's worth. The processor works on the block while
/// the next tokens are emitted, since neither needs the other; larger pieces would not overlap.
const GROUP_TOKENS: usize = 12;
/// Array of three, byte string of 32, array header of at most nine bytes.
const MAX_FRAME_BYTES: usize = 1 + 2 + 32 + 9;
/// Room for a block not yet full, a group behind it, and the eight bytes that each token is stored as.
const BUFFER_BYTES: usize = 256;
const _: () = assert!(
    MAX_FRAME_BYTES < SHA_BLOCK_BYTES
        && SHA_BLOCK_BYTES + GROUP_TOKENS * MAX_TOKEN_BYTES <= BUFFER_BYTES / 2
);

/// How an unsigned integer of `bits` significant bits is written, packed: the initial byte on top, the
/// left shift of its payload in bits 8 to 15, the length in bytes in bits 0 to 7. Values below 24 are
/// their own initial byte and never reach the table.
const TOKEN_FORMS: [u64; 33] = {
    let mut forms = [0u64; 33];
    let mut bits = 0;
    while bits <= 32 {
        let (initial, len) = match bits {
            0..=8 => (0x18, 2),
            9..=16 => (0x19, 3),
            _ => (0x1a, 5),
        };
        forms[bits] = initial << 56 | (64 - 8 * len) << 8 | len;
        bits += 1;
    }
    forms
};

/// A token's CBOR in the leading bytes of a big-endian word, and how many they are. What stands behind
/// them is overwritten by the next token.
#[inline]
fn token_form(token: u32) -> (u64, usize) {
    if token < 24 {
        return (u64::from(token) << 56, 1);
    }
    let form = TOKEN_FORMS[(32 - token.leading_zeros()) as usize];
    (
        form | u64::from(token) << (form >> 8 & 63),
        (form & 7) as usize,
    )
}

#[inline]
fn emit_chunk(parent: &ChunkHash, tokens: &[u32], extra: &ExtraKeys, sink: &mut impl Sink) {
    let mut cbor = [0u8; BUFFER_BYTES];
    cbor[0] = 0x83;
    cbor[1..3].copy_from_slice(&[0x58, 32]);
    cbor[3..35].copy_from_slice(&parent.0);
    let mut at = 35 + write_array_head(&mut cbor[35..44], tokens.len());
    let (groups, rest) = tokens.as_chunks::<GROUP_TOKENS>();
    for group in groups {
        for &token in group {
            at += write_token(&mut cbor, at, token);
        }
        if at >= SHA_BLOCK_BYTES {
            let (block, behind) = cbor.split_at_mut(SHA_BLOCK_BYTES);
            sink.take(block);
            // What is behind the block is shorter than one.
            block.copy_from_slice(&behind[..SHA_BLOCK_BYTES]);
            at -= SHA_BLOCK_BYTES;
        }
    }
    for &token in rest {
        at += write_token(&mut cbor, at, token);
    }
    sink.take(&cbor[..at]);
    sink.take(&extra.0);
}

#[inline]
fn write_token(cbor: &mut [u8; BUFFER_BYTES], at: usize, token: u32) -> usize {
    let (word, len) = token_form(token);
    // Never masks anything away; it lets the compiler see that the store is inside.
    let at = at & (BUFFER_BYTES / 2 - 1);
    cbor[at..at + 8].copy_from_slice(&word.to_be_bytes());
    len
}

fn write_array_head(out: &mut [u8], len: usize) -> usize {
    let len = len as u64;
    match len {
        0..24 => {
            out[0] = 0x80 | len as u8;
            1
        }
        24..0x100 => {
            out[..2].copy_from_slice(&[0x98, len as u8]);
            2
        }
        0x100..0x1_0000 => {
            out[0] = 0x99;
            out[1..3].copy_from_slice(&(len as u16).to_be_bytes());
            3
        }
        0x1_0000..0x1_0000_0000 => {
            out[0] = 0x9a;
            out[1..5].copy_from_slice(&(len as u32).to_be_bytes());
            5
        }
        _ => {
            out[0] = 0x9b;
            out[1..9].copy_from_slice(&len.to_be_bytes());
            9
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn slow_cbor(parent: &ChunkHash, tokens: &[u32], extra: &ExtraValue) -> Vec<u8> {
        let ints = tokens.iter().map(|&token| ExtraValue::Int(token.into()));
        ExtraValue::Array(vec![
            ExtraValue::Bytes(parent.0.to_vec()),
            ExtraValue::Array(ints.collect()),
            extra.clone(),
        ])
        .to_cbor()
    }

    impl Sink for Vec<u8> {
        fn take(&mut self, piece: &[u8]) {
            self.extend_from_slice(piece);
        }
    }

    fn fast_cbor(parent: &ChunkHash, tokens: &[u32], extra: &ExtraValue) -> Vec<u8> {
        let mut emitted = Vec::new();
        emit_chunk(parent, tokens, &ExtraKeys::encode(extra), &mut emitted);
        emitted
    }

    fn token() -> impl Strategy<Value = u32> {
        let edges = [
            0,
            1,
            23,
            24,
            25,
            31,
            32,
            255,
            256,
            257,
            65_535,
            65_536,
            65_537,
            u32::MAX - 1,
            u32::MAX,
        ];
        prop_oneof![
            proptest::sample::select(edges.to_vec()),
            0..200_000u32,
            any::<u32>()
        ]
    }

    proptest! {
        #[test]
        fn emitter_equals_ciborium(
            parent in any::<[u8; 32]>(),
            tokens in proptest::collection::vec(token(), 0..600),
            text in ".*",
        ) {
            let extra = ExtraValue::Array(vec![ExtraValue::Text(text), ExtraValue::Null]);
            let parent = ChunkHash(parent);
            prop_assert_eq!(
                fast_cbor(&parent, &tokens, &extra),
                slow_cbor(&parent, &tokens, &extra)
            );
        }

        #[test]
        fn hex_round_trips(bytes in any::<[u8; 32]>()) {
            let hash = ChunkHash(bytes);
            prop_assert_eq!(ChunkHash::from_hex(&hash.to_hex()), Some(hash));
        }
    }

    #[test]
    fn emitter_equals_ciborium_at_array_width_edges() {
        for len in [0, 1, 23, 24, 255, 256, 65_535, 65_536] {
            let tokens: Vec<u32> = (0..len).collect();
            let parent = ChunkHash([7; 32]);
            assert_eq!(
                fast_cbor(&parent, &tokens, &ExtraValue::Null),
                slow_cbor(&parent, &tokens, &ExtraValue::Null),
                "{len} tokens"
            );
        }
    }

    #[test]
    fn default_none_hash_is_that_of_vllm() {
        let seed = ExtraValue::Text("vllm-none-hash".into());
        assert_eq!(
            sha256_cbor(&seed).to_hex(),
            "9bd96a485ad84efdafb72ee48a1d7a69bcead0f8f0433173941b276b9581eef0"
        );
    }
}
