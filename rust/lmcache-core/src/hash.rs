//! `sha256_cbor`: SHA-256 over canonical CBOR (RFC 8949, section 4.2.1), the hash of vLLM's prefix cache.
//!
//! A chunk's hash is taken over the array `[parent, [token, …], extra]`. The two first parts are written by
//! an emitter of our own, since they are the hot path; `extra` is rare and arbitrary and goes through
//! `ciborium`, once per distinct value.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

use ciborium::value::Value;
use num_bigint::{BigInt, Sign};
use sha2::block_api::compress256;
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

/// Hashes chunks one after the other, in one buffer.
///
/// SHA-256 works through a block in a chain of operations that each wait for the one before, and leaves much
/// of the processor idle. So the blocks that are full are hashed behind the emission of the next few tokens,
/// which waits for nothing: the processor does both at once.
pub(crate) struct ChunkHasher {
    /// SHA-256's state; meaningless between two chunks.
    state: [u32; 8],
    /// A piece of the message, begun anew for each [`SEGMENT_TOKENS`].
    cbor: [u8; BUFFER_BYTES],
    /// How much of `cbor` is hashed; whole blocks.
    hashed: usize,
    /// How much of `cbor` is written.
    written: usize,
    /// Bytes of this message that were hashed and are no longer in `cbor`.
    bytes_before: u64,
    /// Bytes of all messages, not yet in [`HASHED_BYTES`].
    total_bytes: u64,
}

/// SHA-256's state before the first block (FIPS 180-4, section 5.3.3).
const SHA_START: [u32; 8] = [
    0x6a09_e667,
    0xbb67_ae85,
    0x3c6e_f372,
    0xa54f_f53a,
    0x510e_527f,
    0x9b05_688c,
    0x1f83_d9ab,
    0x5be0_cd19,
];
const SHA_BLOCK_BYTES: usize = 64;
/// The end of a message: one byte of 0x80, zeros, and the number of bits in eight bytes.
const SHA_LENGTH_BYTES: usize = 8;
/// Longest head of a token: one initial byte and four of payload.
const MAX_TOKEN_BYTES: usize = 5;
/// Tokens emitted before the blocks behind them are hashed: about a block's worth.
const GROUP_TOKENS: usize = 16;
/// Tokens after which what is left of the message moves to the buffer's front.
const SEGMENT_TOKENS: usize = 256;
/// Array of three, byte string of 32, array header of at most nine bytes.
const MAX_FRAME_BYTES: usize = 1 + 2 + 32 + 9;
/// Room for a segment behind a frame or a block not yet full, for the window that a group's last tokens are
/// written through, and for the end of the message.
const BUFFER_BYTES: usize = 1536;
const _: () = assert!(
    SHA_BLOCK_BYTES + SEGMENT_TOKENS * MAX_TOKEN_BYTES + QUAD_WINDOW_BYTES + 2 * SHA_BLOCK_BYTES
        <= BUFFER_BYTES
        && MAX_FRAME_BYTES < SHA_BLOCK_BYTES
);

impl ChunkHasher {
    pub(crate) fn new() -> Self {
        Self {
            state: SHA_START,
            cbor: [0; BUFFER_BYTES],
            hashed: 0,
            written: 0,
            bytes_before: 0,
            total_bytes: 0,
        }
    }

    /// `sha256_cbor((parent, tokens, extra))`.
    pub(crate) fn hash(
        &mut self,
        parent: &ChunkHash,
        tokens: &[u32],
        extra: &ExtraKeys,
    ) -> ChunkHash {
        self.state = SHA_START;
        (self.hashed, self.bytes_before) = (0, 0);
        self.cbor[0] = 0x83;
        self.cbor[1..3].copy_from_slice(&[0x58, 32]);
        self.cbor[3..35].copy_from_slice(&parent.0);
        self.written = 35 + write_array_head(&mut self.cbor[35..44], tokens.len());
        for segment in tokens.chunks(SEGMENT_TOKENS) {
            self.make_room();
            let (groups, rest) = segment.as_chunks::<GROUP_TOKENS>();
            for group in groups {
                let full = self.written / SHA_BLOCK_BYTES * SHA_BLOCK_BYTES;
                self.written = write_group(&mut self.cbor, self.written, group);
                self.hash_until(full);
            }
            for &token in rest {
                self.written = write_four(&mut self.cbor, self.written, &[token], any_form);
            }
        }
        for piece in extra.0.chunks(SHA_BLOCK_BYTES) {
            if self.written + piece.len() > BUFFER_BYTES - 2 * SHA_BLOCK_BYTES {
                self.make_room();
            }
            self.cbor[self.written..][..piece.len()].copy_from_slice(piece);
            self.written += piece.len();
        }
        self.finish()
    }

    /// Hashes the whole blocks before `end`, a multiple of their size.
    #[inline]
    fn hash_until(&mut self, end: usize) {
        if end > self.hashed {
            let (blocks, _) = self.cbor[self.hashed..end].as_chunks();
            compress256(&mut self.state, blocks);
            self.hashed = end;
        }
    }

    /// Hashes all whole blocks, and moves the rest to the front.
    fn make_room(&mut self) {
        let full = self.written / SHA_BLOCK_BYTES * SHA_BLOCK_BYTES;
        if full == 0 {
            return;
        }
        self.hash_until(full);
        self.cbor.copy_within(full..full + SHA_BLOCK_BYTES, 0);
        self.bytes_before += full as u64;
        self.written -= full;
        self.hashed = 0;
    }

    fn finish(&mut self) -> ChunkHash {
        let num_bytes = self.bytes_before + self.written as u64;
        let end = (self.written + 1 + SHA_LENGTH_BYTES).next_multiple_of(SHA_BLOCK_BYTES);
        let padding = &mut self.cbor[self.written..end];
        padding.fill(0);
        padding[0] = 0x80;
        self.cbor[end - SHA_LENGTH_BYTES..end].copy_from_slice(&(8 * num_bytes).to_be_bytes());
        self.hash_until(end);
        self.total_bytes += num_bytes;
        let mut hash = [0; 32];
        for (bytes, word) in hash.as_chunks_mut().0.iter_mut().zip(self.state) {
            *bytes = word.to_be_bytes();
        }
        ChunkHash(hash)
    }
}

impl Drop for ChunkHasher {
    fn drop(&mut self) {
        HASHED_BYTES.fetch_add(self.total_bytes, Ordering::Relaxed);
    }
}

/// How an unsigned integer is written, by the place of its highest bit, packed: the initial byte on top, the
/// left shift of the payload behind it in bits 8 to 15, the length in bytes in bits 0 to 7. Values below 24
/// are their own initial byte: the entries before the fifth.
const TOKEN_FORMS: [u64; 32] = {
    let mut forms = [0u64; 32];
    let mut bit = 0;
    while bit < 32 {
        let (initial, len) = match bit {
            0..=4 => (0, 1),
            5..=7 => (0x18, 2),
            8..=15 => (0x19, 3),
            _ => (0x1a, 5),
        };
        forms[bit] = initial << 56 | (64 - 8 * len) << 8 | len;
        bit += 1;
    }
    forms
};

/// A token's CBOR in the leading bytes of a big-endian word, and how many they are. What stands behind
/// them is overwritten by the next token. Without a branch, which the processor would often guess wrong.
#[inline(always)]
fn any_form(token: u32) -> (u64, usize) {
    // 24 to 31 are moved up to those that follow; 0 gets a highest bit.
    form(token, token | token.wrapping_add(8) & 32 | 1)
}

/// As [`any_form`], for tokens from 24 on.
#[inline(always)]
fn large_form(token: u32) -> (u64, usize) {
    form(token, token | 32)
}

#[inline(always)]
fn form(token: u32, shape: u32) -> (u64, usize) {
    let form = TOKEN_FORMS[shape.ilog2() as usize];
    (
        form | u64::from(token) << (form >> 8 & 63),
        (form & 7) as usize,
    )
}

/// Writes a group at `at`; where it ends. The two tests hold for most groups of a vocabulary or for few, so
/// they are guessed right; one for each token would not be.
#[inline(always)]
fn write_group(cbor: &mut [u8; BUFFER_BYTES], mut at: usize, group: &[u32; GROUP_TOKENS]) -> usize {
    // Above 65,535 in the one or the other means that the token, or a token, is not from 256 to 65,535.
    let seen = group
        .iter()
        .fold(0, |seen, &token| seen | token | token.wrapping_sub(256));
    if seen < 0x1_0000 {
        for eight in group.as_chunks().0 {
            at = write_eight_of_three_bytes(cbor, at, eight);
        }
        return at;
    }
    let below = group
        .iter()
        .fold(0, |below, &token| below | token.wrapping_sub(24));
    for four in group.as_chunks::<4>().0 {
        at = match below >> 31 {
            0 => write_four(cbor, at, four, large_form),
            _ => write_four(cbor, at, four, any_form),
        };
    }
    at
}

/// Four tokens of at most seven bytes each, as their lengths say, and the eight that the last is stored as.
const QUAD_WINDOW_BYTES: usize = 3 * 7 + 8;

/// Writes up to four tokens. The compiler sees that they fit the window: one check for all of them.
#[inline(always)]
fn write_four<const N: usize>(
    cbor: &mut [u8; BUFFER_BYTES],
    at: usize,
    tokens: &[u32; N],
    form: impl Fn(u32) -> (u64, usize),
) -> usize {
    const { assert!(N <= 4) };
    let window: &mut [u8; QUAD_WINDOW_BYTES] = cbor[at..]
        .first_chunk_mut()
        .expect("a segment fits the buffer");
    let mut end = 0usize;
    for &token in tokens {
        let (word, len) = form(token);
        window[end..end + 8].copy_from_slice(&word.to_be_bytes());
        end = end.wrapping_add(len);
    }
    at + end
}

/// Writes eight tokens from 256 to 65,535, which take three bytes each, in three words.
#[inline(always)]
fn write_eight_of_three_bytes(
    cbor: &mut [u8; BUFFER_BYTES],
    at: usize,
    tokens: &[u32; 8],
) -> usize {
    let t = tokens.map(|token| 0x19_0000 | u64::from(token));
    let words = [
        t[0] << 40 | t[1] << 16 | t[2] >> 8,
        t[2] << 56 | t[3] << 32 | t[4] << 8 | t[5] >> 16,
        t[5] << 48 | t[6] << 24 | t[7],
    ];
    let out: &mut [u8; 24] = cbor[at..]
        .first_chunk_mut()
        .expect("a segment fits the buffer");
    for (bytes, word) in out.as_chunks_mut().0.iter_mut().zip(words) {
        *bytes = word.to_be_bytes();
    }
    at + 24
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

    fn slow_hash(parent: &ChunkHash, tokens: &[u32], extra: &ExtraValue) -> ChunkHash {
        ChunkHash(Sha256::digest(slow_cbor(parent, tokens, extra)).into())
    }

    fn fast_hash(parent: &ChunkHash, tokens: &[u32], extra: &ExtraValue) -> ChunkHash {
        ChunkHasher::new().hash(parent, tokens, &ExtraKeys::encode(extra))
    }

    /// Around each change of the form, and of the highest bit.
    fn edges() -> Vec<u32> {
        let edges = [
            1,
            16,
            24,
            32,
            248,
            256,
            280,
            65_528,
            65_536,
            65_792,
            1 << 31,
        ];
        let around = edges.iter().flat_map(|&edge| edge - 1..=edge + 1);
        around.chain([u32::MAX - 1, u32::MAX]).collect()
    }

    /// Runs of tokens of one kind, so that whole groups are of it, and of all kinds.
    fn tokens() -> impl Strategy<Value = Vec<u32>> {
        let kind = prop_oneof![
            Just((0, 24)),
            Just((256, 65_536)),
            Just((24, 200_000)),
            Just((65_536, u32::MAX)),
            Just((0, u32::MAX)),
        ];
        let of_kind = |(low, high)| proptest::collection::vec(low..high, 0..120);
        let edge = proptest::collection::vec(proptest::sample::select(edges()), 0..60);
        let runs = prop_oneof![kind.prop_flat_map(of_kind), edge];
        proptest::collection::vec(runs, 0..9).prop_map(|runs| runs.concat())
    }

    proptest! {
        #[test]
        fn hash_equals_ciborium_and_sha256(
            parent in any::<[u8; 32]>(),
            tokens in tokens(),
            text in ".*",
        ) {
            let extra = ExtraValue::Array(vec![ExtraValue::Text(text), ExtraValue::Null]);
            let parent = ChunkHash(parent);
            prop_assert_eq!(
                fast_hash(&parent, &tokens, &extra),
                slow_hash(&parent, &tokens, &extra)
            );
        }

        #[test]
        fn hex_round_trips(bytes in any::<[u8; 32]>()) {
            let hash = ChunkHash(bytes);
            prop_assert_eq!(ChunkHash::from_hex(&hash.to_hex()), Some(hash));
        }
    }

    #[test]
    fn one_odd_token_in_a_group_is_written_as_it_is() {
        let parent = ChunkHash([7; 32]);
        for usual in [23, 300, 70_000] {
            for odd in edges() {
                for at in 0..2 * GROUP_TOKENS {
                    let mut tokens = [usual; 2 * GROUP_TOKENS];
                    tokens[at] = odd;
                    assert_eq!(
                        fast_hash(&parent, &tokens, &ExtraValue::Null),
                        slow_hash(&parent, &tokens, &ExtraValue::Null),
                        "{odd} at {at} among {usual}"
                    );
                }
            }
        }
    }

    #[test]
    fn messages_of_every_length_are_hashed_whole() {
        let parent = ChunkHash([7; 32]);
        let mut hasher = ChunkHasher::new();
        for len in (0..400).chain([1535, 1536, 1537, 5000]) {
            let extra = ExtraValue::Bytes((0..len).map(|at| at as u8).collect());
            for tokens in [&[][..], &[70_000; 256], &[70_000; 600]] {
                assert_eq!(
                    hasher.hash(&parent, tokens, &ExtraKeys::encode(&extra)),
                    slow_hash(&parent, tokens, &extra),
                    "{} tokens, {len} bytes of extra",
                    tokens.len()
                );
            }
        }
    }

    #[test]
    fn hash_equals_ciborium_at_array_width_edges() {
        for len in [0, 1, 23, 24, 255, 256, 65_535, 65_536] {
            let tokens: Vec<u32> = (0..len).collect();
            let parent = ChunkHash([7; 32]);
            assert_eq!(
                fast_hash(&parent, &tokens, &ExtraValue::Null),
                slow_hash(&parent, &tokens, &ExtraValue::Null),
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
