//! The key parser under texts made and mangled for 20 seconds; fuzz/ has a target for longer runs.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use lmcache_core::hash::ChunkHash;
use lmcache_core::key::{CacheEngineKey, Namespace, TagValue};

const RUN: Duration = Duration::from_secs(20);

/// xorshift64*: reproducible, and of no further use.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    fn below(&mut self, end: usize) -> usize {
        (self.next() % end.max(1) as u64) as usize
    }

    fn pick<'a>(&mut self, from: &[&'a str]) -> &'a str {
        from[self.below(from.len())]
    }

    fn text(&mut self) -> String {
        const PIECES: [&str; 18] = [
            "a",
            "B",
            "7",
            "-",
            "_",
            ".",
            "/",
            "@",
            "%",
            "=",
            ":",
            "%2F",
            "hash",
            "tag.",
            "fact.",
            "é",
            "e\u{301}",
            "\u{10FFFF}",
        ];
        (0..self.below(8)).map(|_| self.pick(&PIECES)).collect()
    }

    fn tag(&mut self) -> TagValue {
        match self.below(5) {
            0 => TagValue::Null,
            1 => TagValue::Bool(self.next() & 1 == 1),
            2 => TagValue::Int(self.next().cast_signed() >> self.below(64)),
            3 => match f64::from_bits(self.next()) {
                value if value.is_nan() => TagValue::Float(0.5),
                value => TagValue::Float(value),
            },
            _ => TagValue::Text(self.text()),
        }
    }

    fn key(&mut self) -> CacheEngineKey {
        let facts: BTreeMap<_, _> = (0..self.below(4))
            .map(|_| (self.text(), self.text()))
            .collect();
        let tags: BTreeMap<_, _> = (0..self.below(4))
            .map(|_| (self.text(), self.tag()))
            .collect();
        CacheEngineKey {
            namespace: Namespace {
                model_name: self.text(),
                world_size: self.next() as u32 >> self.below(32),
                worker_id: self.next() as u32 >> self.below(32),
                kv_dtype: self.text(),
                facts,
                tags,
            },
            chunk_hash: ChunkHash([self.next() as u8; 32]),
            layer_id: (self.next() & 1 == 1).then_some(self.next() as u32 >> self.below(32)),
        }
    }

    /// The text with something done to it that a reader might overlook.
    fn mangle(&mut self, text: &str) -> String {
        let mut fields: Vec<String> = text.split('@').map(String::from).collect();
        let at = self.below(fields.len());
        match self.below(8) {
            0 => fields.swap(at, 0),
            1 => fields.push(fields[at].clone()),
            2 => drop(fields.remove(at)),
            3 => fields[at] = fields[at].to_uppercase(),
            4 => fields[at] = fields[at].replacen('=', "=0", 1),
            5 => fields[at] = fields[at].replacen("=", "=+", 1),
            6 => fields[at] = fields[at].replacen('a', "%61", 1),
            _ => {
                let mut chars: Vec<char> = text.chars().collect();
                for _ in 0..=self.below(3) {
                    let at = self.below(chars.len());
                    let other = self.pick(&["@", "%", "=", ":", "0", "f", "F", " ", "\0", "é"]);
                    match self.below(3) {
                        0 if !chars.is_empty() => drop(chars.remove(at)),
                        1 if !chars.is_empty() => chars[at] = other.chars().next().unwrap_or('x'),
                        _ => chars.insert(at, other.chars().next().unwrap_or('x')),
                    }
                }
                return chars.into_iter().collect();
            }
        }
        fields.join("@")
    }
}

#[test]
fn any_text_is_the_one_way_to_write_a_key_or_an_error() {
    let until = Instant::now() + RUN;
    let mut random = Random(0x9E37_79B9_7F4A_7C15);
    let mut num_read = 0_u64;
    while Instant::now() < until {
        let key = random.key();
        let text = key.to_text();
        assert_eq!(CacheEngineKey::parse(&text).as_ref(), Ok(&key), "{text}");
        let mut mangled = text.clone();
        for _ in 0..4 {
            mangled = random.mangle(&mangled);
            if let Ok(read) = CacheEngineKey::parse(&mangled) {
                assert_eq!(read.to_text(), mangled);
                assert_eq!(read == key, mangled == text, "{mangled}");
                num_read += 1;
            }
        }
    }
    assert!(
        num_read > 0,
        "nothing mangled was read: the test sees one side only"
    );
}
