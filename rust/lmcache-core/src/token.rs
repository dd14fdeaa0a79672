//! From tokens to chunks: the split, the prefix chain, the tail rule and the mask rule.

use crate::error::CoreError;
use crate::hash::{ChunkHash, ChunkHasher, ExtraKeys};

/// One chunk of a token sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// First token of the chunk.
    pub start: usize,
    /// One past its last token.
    pub end: usize,
    /// Names the tokens `0..end` and everything that entered the chain with them.
    pub hash: ChunkHash,
}

/// The prefix chain of one growing token sequence: `h_i = H((h_{i-1}, tokens_i, extra_i))`.
///
/// Tokens may come in pieces of any size; each is hashed once. The hash is vLLM's `hash_block_tokens` with
/// `sha256_cbor` for a block of `chunk_size` tokens, byte for byte.
#[derive(Debug, Clone)]
pub struct Chain {
    chunk_size: usize,
    none_hash: ChunkHash,
    hashes: Vec<ChunkHash>,
    tail: Vec<u32>,
}

impl Chain {
    /// An empty chain; `none_hash` is the parent of the first chunk.
    pub fn new(chunk_size: usize, none_hash: ChunkHash) -> Result<Self, CoreError> {
        if chunk_size == 0 {
            return Err(CoreError::ZeroChunkSize);
        }
        Ok(Self {
            chunk_size,
            none_hash,
            hashes: Vec::new(),
            tail: Vec::new(),
        })
    }

    /// Appends tokens; chunks they complete are hashed with `extra`. Returns the number of full chunks.
    pub fn extend(&mut self, tokens: &[u32], extra: &ExtraKeys) -> usize {
        self.extend_with(tokens, |_| extra)
    }

    /// Like [`Chain::extend`], with an `extra` of its own for each chunk, asked for by chunk index.
    pub fn extend_with<'e>(
        &mut self,
        mut tokens: &[u32],
        mut extra_of: impl FnMut(usize) -> &'e ExtraKeys,
    ) -> usize {
        if self.tail.len() + tokens.len() < self.chunk_size {
            self.tail.extend_from_slice(tokens);
            return self.hashes.len();
        }
        let mut hasher = ChunkHasher::new();
        if !self.tail.is_empty() {
            let missing = self.chunk_size - self.tail.len();
            let (head, rest) = tokens.split_at(missing);
            self.tail.extend_from_slice(head);
            tokens = rest;
            let chunk = std::mem::take(&mut self.tail);
            self.push_chunk(&mut hasher, &chunk, &mut extra_of);
            self.tail = chunk;
            self.tail.clear();
        }
        let mut chunks = tokens.chunks_exact(self.chunk_size);
        for chunk in &mut chunks {
            self.push_chunk(&mut hasher, chunk, &mut extra_of);
        }
        self.tail.extend_from_slice(chunks.remainder());
        self.hashes.len()
    }

    fn push_chunk<'e>(
        &mut self,
        hasher: &mut ChunkHasher,
        chunk: &[u32],
        extra_of: &mut impl FnMut(usize) -> &'e ExtraKeys,
    ) {
        let extra = extra_of(self.hashes.len());
        let hash = hasher.hash(&self.parent(), chunk, extra);
        self.hashes.push(hash);
    }

    fn parent(&self) -> ChunkHash {
        self.hashes.last().copied().unwrap_or(self.none_hash)
    }

    /// Tokens in a chunk.
    pub fn chunk_size(&self) -> usize {
        self.chunk_size
    }

    /// Tokens taken in so far.
    pub fn num_tokens(&self) -> usize {
        self.hashes.len() * self.chunk_size + self.tail.len()
    }

    /// Hashes of the full chunks, in order.
    pub fn hashes(&self) -> &[ChunkHash] {
        &self.hashes
    }

    /// The chunks whose start is at or after `skip` tokens; with `extra` also the unfull tail, hashed anew
    /// at each call since it still grows.
    pub fn spans(&self, skip: usize, tail_extra: Option<&ExtraKeys>) -> Vec<Span> {
        let size = self.chunk_size;
        let full = self.hashes.iter().enumerate().map(|(index, hash)| Span {
            start: index * size,
            end: (index + 1) * size,
            hash: *hash,
        });
        let mut spans: Vec<Span> = full.filter(|span| span.start >= skip).collect();
        if let Some(extra) = tail_extra
            && !self.tail.is_empty()
        {
            let start = self.hashes.len() * size;
            let hash = ChunkHasher::new().hash(&self.parent(), &self.tail, extra);
            if start >= skip {
                spans.push(Span {
                    start,
                    end: start + self.tail.len(),
                    hash,
                });
            }
        }
        spans
    }
}

/// Length of the leading run of `false`, for a mask of the form false…true over `num_tokens` tokens.
pub fn leading_false(mask: &[bool], num_tokens: usize) -> Result<usize, CoreError> {
    if mask.len() != num_tokens {
        return Err(CoreError::MaskLength {
            mask_len: mask.len(),
            num_tokens,
        });
    }
    let first_true = mask.iter().position(|&set| set).unwrap_or(mask.len());
    match mask[first_true..].iter().position(|&set| !set) {
        None => Ok(first_true),
        Some(behind) => Err(CoreError::MaskNotPrefix {
            first_true,
            false_at: first_true + behind,
        }),
    }
}

/// Refuses a count of leading `false` entries that ends inside a chunk.
pub fn chunk_aligned(num_false: usize, chunk_size: usize) -> Result<usize, CoreError> {
    let floor = num_false - num_false % chunk_size;
    if floor == num_false {
        return Ok(num_false);
    }
    Err(CoreError::MaskNotChunkAligned {
        num_false,
        chunk_size,
        floor,
        ceil: floor + chunk_size,
    })
}

#[cfg(test)]
mod tests {
    use num_bigint::BigInt;
    use proptest::prelude::*;
    use serde_json::Value as Json;

    use super::*;
    use crate::hash::ExtraValue;

    fn extra_value(json: &Json) -> ExtraValue {
        match json {
            Json::Null => ExtraValue::Null,
            Json::Bool(value) => ExtraValue::Bool(*value),
            Json::String(text) => ExtraValue::Text(text.clone()),
            Json::Number(number) if number.is_f64() => {
                ExtraValue::Float(number.as_f64().expect("checked"))
            }
            Json::Number(number) => ExtraValue::Int(
                BigInt::parse_bytes(number.to_string().as_bytes(), 10).expect("an integer"),
            ),
            Json::Array(items) => ExtraValue::Array(items.iter().map(extra_value).collect()),
            Json::Object(tagged) => {
                if let Some(Json::Array(items)) = tagged.get("t") {
                    ExtraValue::Array(items.iter().map(extra_value).collect())
                } else if let Some(Json::String(hex)) = tagged.get("b") {
                    let pairs = (0..hex.len()).step_by(2);
                    ExtraValue::Bytes(
                        pairs
                            .map(|at| u8::from_str_radix(&hex[at..at + 2], 16).expect("hex"))
                            .collect(),
                    )
                } else {
                    panic!("unknown tag in the vectors: {tagged:?}")
                }
            }
        }
    }

    struct Vector {
        chunk_size: usize,
        none_hash: ChunkHash,
        tokens: Vec<u32>,
        extra: ExtraKeys,
        chain: Vec<ChunkHash>,
    }

    fn vectors() -> Vec<Vector> {
        let text = include_str!("../../../tests/vectors/prefix_hash.json");
        let json: Json = serde_json::from_str(text).expect("valid JSON");
        let hash = |json: &Json| ChunkHash::from_hex(json.as_str().expect("text")).expect("hex");
        let cases = json["cases"].as_array().expect("cases");
        cases
            .iter()
            .map(|case| Vector {
                chunk_size: case["chunk_size"].as_u64().expect("number") as usize,
                none_hash: hash(&case["none_hash"]),
                tokens: serde_json::from_value(case["tokens"].clone()).expect("token ids"),
                extra: ExtraKeys::encode(&extra_value(&case["extra_keys"])),
                chain: case["chain"]
                    .as_array()
                    .expect("chain")
                    .iter()
                    .map(hash)
                    .collect(),
            })
            .collect()
    }

    fn hashes_with_tail(chain: &Chain, extra: &ExtraKeys) -> Vec<ChunkHash> {
        chain
            .spans(0, Some(extra))
            .iter()
            .map(|span| span.hash)
            .collect()
    }

    #[test]
    fn chains_of_vllm_come_out_in_one_go() {
        let vectors = vectors();
        assert_eq!(vectors.len(), 60);
        for vector in &vectors {
            let mut chain = Chain::new(vector.chunk_size, vector.none_hash).expect("size > 0");
            chain.extend(&vector.tokens, &vector.extra);
            assert_eq!(hashes_with_tail(&chain, &vector.extra), vector.chain);
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn chains_of_vllm_come_out_in_random_pieces(cuts in proptest::collection::vec(0..400usize, 1..40)) {
            for vector in vectors() {
                let mut chain = Chain::new(vector.chunk_size, vector.none_hash).expect("size > 0");
                let mut rest = &vector.tokens[..];
                for &cut in cuts.iter().cycle() {
                    if rest.is_empty() {
                        break;
                    }
                    let (piece, behind) = rest.split_at(cut.clamp(1, rest.len()));
                    chain.extend(piece, &vector.extra);
                    rest = behind;
                }
                prop_assert_eq!(hashes_with_tail(&chain, &vector.extra), vector.chain);
            }
        }

        #[test]
        fn mask_is_accepted_only_as_false_then_true(mask in proptest::collection::vec(any::<bool>(), 0..12)) {
            let ordered = mask.is_sorted();
            let num_false = mask.iter().filter(|set| !**set).count();
            match leading_false(&mask, mask.len()) {
                Ok(found) => prop_assert!(ordered && found == num_false),
                Err(_) => prop_assert!(!ordered),
            }
        }
    }

    #[test]
    fn each_chunk_takes_the_extra_of_its_index() {
        let none = ChunkHash([0; 32]);
        let salt = ExtraKeys::encode(&ExtraValue::Text("salt".into()));
        let plain = ExtraKeys::none();
        let mut mixed = Chain::new(4, none).expect("size > 0");
        mixed.extend_with(&[1, 2, 3, 4, 5, 6, 7, 8], |index| {
            if index == 0 { &salt } else { &plain }
        });
        let mut by_hand = Chain::new(4, none).expect("size > 0");
        by_hand.extend(&[1, 2, 3, 4], &salt);
        by_hand.extend(&[5, 6, 7, 8], &plain);
        assert_eq!(mixed.hashes(), by_hand.hashes());
        let mut all_plain = Chain::new(4, none).expect("size > 0");
        all_plain.extend(&[1, 2, 3, 4, 5, 6, 7, 8], &plain);
        assert_ne!(
            mixed.hashes()[1],
            all_plain.hashes()[1],
            "the salt reaches the second chunk"
        );
    }

    #[test]
    fn skipped_chunks_are_hashed_but_not_yielded() {
        let mut chain = Chain::new(2, ChunkHash([0; 32])).expect("size > 0");
        chain.extend(&[1, 2, 3, 4, 5], &ExtraKeys::none());
        let all = chain.spans(0, Some(&ExtraKeys::none()));
        assert_eq!(chain.spans(2, Some(&ExtraKeys::none())), all[1..]);
        assert_eq!(chain.spans(0, None), all[..2]);
    }

    #[test]
    fn misaligned_mask_names_the_nearest_counts() {
        assert_eq!(chunk_aligned(512, 256), Ok(512));
        assert_eq!(
            chunk_aligned(300, 256),
            Err(CoreError::MaskNotChunkAligned {
                num_false: 300,
                chunk_size: 256,
                floor: 256,
                ceil: 512
            })
        );
    }
}
