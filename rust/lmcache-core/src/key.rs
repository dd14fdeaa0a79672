//! What names a chunk: the namespace, in which every field is tagged, and the chain hash.
//!
//! One text form serves for index, logs, file names and remote keys alike:
//!
//! ```text
//! model=m%2Fx@world=1@worker=0@dtype=bfloat16@fact.chunk_size=256@tag.team=s:a@hash=<64 hex>[@layer=3]
//! ```
//!
//! Every value is percent-encoded outside `A-Z a-z 0-9 . _ -`, facts and tags are sorted by name, and
//! the reader accepts only what the writer would write; so the form is injective and parses back. A
//! namespace takes at most [`MAX_NAMESPACE_BYTES`]; a longer one is refused, never cut. Where a name of
//! fixed length is asked for, as in a folder, [`CacheEngineKey::digest`] stands for the text, which then
//! is part of what is stored.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt::Write as _;
use std::sync::Arc;

use sha2::{Digest as _, Sha256};

use crate::error::CoreError;
use crate::hash::ChunkHash;

/// The longest namespace in its text form: 300 characters of any script, and tags, with room to spare.
pub const MAX_NAMESPACE_BYTES: usize = 16 << 10;

/// The longest text form of a key: a namespace, a hash, a layer.
pub const MAX_KEY_BYTES: usize =
    MAX_NAMESPACE_BYTES + "@hash=".len() + 64 + "@layer=4294967295".len();

/// A namespace's number within one index. Numbers are never used twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct NamespaceId(pub u32);

/// The value of a request tag; kinds are told apart (`3` is not `"3"`).
#[derive(Debug, Clone, PartialEq)]
pub enum TagValue {
    /// `None`.
    Null,
    /// `bool`.
    Bool(bool),
    /// `int`.
    Int(i64),
    /// `float`, never NaN.
    Float(f64),
    /// `str`.
    Text(String),
}

/// Everything but the tokens that decides a chunk's bytes.
#[derive(Debug, Clone, PartialEq)]
pub struct Namespace {
    /// Name of the model.
    pub model_name: String,
    /// Ranks among which the KV is split.
    pub world_size: u32,
    /// The rank that holds this part.
    pub worker_id: u32,
    /// Resolved element type of the KV, never `auto`.
    pub kv_dtype: String,
    /// Further facts about model, engine and stored form, by name.
    pub facts: BTreeMap<String, String>,
    /// Tags of the request, by name.
    pub tags: BTreeMap<String, TagValue>,
}

impl Namespace {
    /// The canonical text form, without a hash.
    pub fn to_text(&self) -> String {
        let mut text = String::from("model=");
        encode(&mut text, &self.model_name);
        let _ = write!(
            text,
            "@world={}@worker={}@dtype=",
            self.world_size, self.worker_id
        );
        encode(&mut text, &self.kv_dtype);
        for (name, value) in &self.facts {
            text.push_str("@fact.");
            encode(&mut text, name);
            text.push('=');
            encode(&mut text, value);
        }
        for (name, value) in &self.tags {
            text.push_str("@tag.");
            encode(&mut text, name);
            text.push('=');
            match value {
                TagValue::Null => text.push('n'),
                TagValue::Bool(value) => text.push_str(if *value { "b:1" } else { "b:0" }),
                TagValue::Int(value) => {
                    let _ = write!(text, "i:{value}");
                }
                TagValue::Float(value) => {
                    let _ = write!(text, "f:{:016x}", value.to_bits());
                }
                TagValue::Text(value) => {
                    text.push_str("s:");
                    encode(&mut text, value);
                }
            }
        }
        text
    }

    /// The canonical text form, if it is short enough to be part of a key.
    pub fn bounded_text(&self) -> Result<String, CoreError> {
        let text = self.to_text();
        if text.len() <= MAX_NAMESPACE_BYTES {
            return Ok(text);
        }
        let longest = text.split('@').max_by_key(|field| field.len());
        let name = longest.and_then(|field| field.split_once('='));
        Err(CoreError::NamespaceTooLong {
            num_bytes: text.len(),
            limit: MAX_NAMESPACE_BYTES,
            longest: name.map_or("", |(name, _)| name).chars().take(80).collect(),
        })
    }
}

/// A chunk's whole key; with `layer_id`, an address into the chunk.
#[derive(Debug, Clone, PartialEq)]
pub struct CacheEngineKey {
    /// Everything but the tokens.
    pub namespace: Namespace,
    /// The tokens, and all tokens before them.
    pub chunk_hash: ChunkHash,
    /// The layer, for a key that names one layer of the chunk.
    pub layer_id: Option<u32>,
}

impl CacheEngineKey {
    /// The canonical text form.
    pub fn to_text(&self) -> String {
        let mut text = self.namespace.to_text();
        let _ = write!(text, "@hash={}", self.chunk_hash.to_hex());
        if let Some(layer) = self.layer_id {
            let _ = write!(text, "@layer={layer}");
        }
        text
    }

    /// SHA-256 of the canonical text form: a name of fixed length, safe in any folder and on any store.
    pub fn digest(&self) -> ChunkHash {
        ChunkHash(Sha256::digest(self.to_text()).into())
    }

    /// Reads the canonical text form; anything that [`CacheEngineKey::to_text`] would not write is an error.
    pub fn parse(text: &str) -> Result<Self, CoreError> {
        let fail = |reason| CoreError::KeySyntax {
            key: text.chars().take(120).collect(),
            reason,
        };
        if text.len() > MAX_KEY_BYTES {
            return Err(fail("it is longer than any key"));
        }
        let key = parse_fields(text).map_err(fail)?;
        if key.namespace.to_text().len() > MAX_NAMESPACE_BYTES {
            return Err(fail("its namespace is longer than any"));
        }
        if key.to_text() != text {
            return Err(fail("it is not in canonical form"));
        }
        Ok(key)
    }
}

fn parse_fields(text: &str) -> Result<CacheEngineKey, &'static str> {
    let mut fields = text
        .split('@')
        .map(|field| field.split_once('=').ok_or("a field has no '='"));
    let mut next = |tag: &str| match fields.next() {
        Some(Ok((found, value))) if found == tag => Ok(value),
        _ => Err("it must begin with model, world, worker, dtype"),
    };
    let model_name = decode(next("model")?)?;
    let world_size = number(next("world")?)?;
    let worker_id = number(next("worker")?)?;
    let kv_dtype = decode(next("dtype")?)?;
    let (mut facts, mut tags) = (BTreeMap::new(), BTreeMap::new());
    let (mut chunk_hash, mut layer_id) = (None, None);
    for field in fields {
        let (tag, value) = field?;
        if let Some(name) = tag.strip_prefix("fact.") {
            facts.insert(decode(name)?, decode(value)?);
        } else if let Some(name) = tag.strip_prefix("tag.") {
            tags.insert(decode(name)?, tag_value(value)?);
        } else if tag == "hash" {
            chunk_hash = Some(ChunkHash::from_hex(value).ok_or("hash is not 64 hex digits")?);
        } else if tag == "layer" {
            layer_id = Some(number(value)?);
        } else {
            return Err("a field is unknown");
        }
    }
    Ok(CacheEngineKey {
        namespace: Namespace {
            model_name,
            world_size,
            worker_id,
            kv_dtype,
            facts,
            tags,
        },
        chunk_hash: chunk_hash.ok_or("it has no hash")?,
        layer_id,
    })
}

fn tag_value(text: &str) -> Result<TagValue, &'static str> {
    let bad = "a tag's value is malformed";
    Ok(match text.split_once(':') {
        None if text == "n" => TagValue::Null,
        Some(("b", "1")) => TagValue::Bool(true),
        Some(("b", "0")) => TagValue::Bool(false),
        Some(("i", value)) => TagValue::Int(value.parse().map_err(|_| bad)?),
        Some(("f", bits)) => TagValue::Float(f64::from_bits(
            u64::from_str_radix(bits, 16).map_err(|_| bad)?,
        )),
        Some(("s", value)) => TagValue::Text(decode(value)?),
        _ => return Err(bad),
    })
}

fn number(text: &str) -> Result<u32, &'static str> {
    text.parse().map_err(|_| "a number is malformed")
}

fn encode(out: &mut String, value: &str) {
    for byte in value.bytes() {
        if byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-') {
            out.push(char::from(byte));
        } else {
            let _ = write!(out, "%{byte:02X}");
        }
    }
}

fn decode(text: &str) -> Result<String, &'static str> {
    let bad = "a percent escape is malformed";
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        let mut digit = || {
            rest.next()
                .and_then(|digit| char::from(digit).to_digit(16))
                .ok_or(bad)
        };
        bytes.push((digit()? * 16 + digit()?) as u8);
    }
    String::from_utf8(bytes).map_err(|_| "a value is not UTF-8")
}

/// Whether a namespace begins with `prefix`, a text that ends where one of its fields does: `model=a` begins
/// `model=a@world=1`, and not `model=ab@world=1`. Every namespace begins with the empty text.
pub fn begins_with(namespace: &str, prefix: &str) -> bool {
    namespace.strip_prefix(prefix).is_some_and(|rest| {
        let at_boundary = prefix.is_empty() || prefix.ends_with('@');
        at_boundary || rest.is_empty() || rest.starts_with('@')
    })
}

/// The namespace with other values in some of its fields, by their names in the text form (`worker`,
/// `fact.num_layers`). Fields that it does not have are not added.
pub fn with_fields(namespace: &str, fields: &BTreeMap<String, String>) -> String {
    let mut out = String::with_capacity(namespace.len() + 16);
    for field in namespace.split('@') {
        if !out.is_empty() {
            out.push('@');
        }
        match field
            .split_once('=')
            .map(|(name, _)| (name, fields.get(name)))
        {
            Some((name, Some(value))) => {
                out.push_str(name);
                out.push('=');
                encode(&mut out, value);
            }
            _ => out.push_str(field),
        }
    }
    out
}

/// Gives namespaces their numbers within one index.
#[derive(Debug, Default)]
pub struct Namespaces {
    ids: HashMap<Arc<str>, NamespaceId>,
    texts: HashMap<NamespaceId, Arc<str>>,
    next: u32,
    /// Survivors of the last sweep.
    kept: usize,
}

/// Namespaces kept before those without entries are forgotten.
const MAX_IDLE_NAMESPACES: usize = 4096;

impl Namespaces {
    /// The number of a namespace, if it has one.
    pub fn get(&self, text: &str) -> Option<NamespaceId> {
        self.ids.get(text).copied()
    }

    /// The number of a namespace, new if need be. `None` once all 2^32 have been given out.
    pub fn intern(&mut self, text: &str) -> Option<NamespaceId> {
        if let Some(id) = self.get(text) {
            return Some(id);
        }
        let id = NamespaceId(self.next);
        self.next = self.next.checked_add(1)?;
        let text: Arc<str> = text.into();
        self.texts.insert(id, Arc::clone(&text));
        self.ids.insert(text, id);
        Some(id)
    }

    /// The text of a namespace that is not forgotten.
    pub fn text(&self, id: NamespaceId) -> Option<&Arc<str>> {
        self.texts.get(&id)
    }

    /// The numbers of the namespaces whose text `chosen` chooses.
    pub fn choose(&self, chosen: impl Fn(&str) -> bool) -> impl Iterator<Item = NamespaceId> {
        let ids = self.ids.iter();
        ids.filter(move |(text, _)| chosen(text)).map(|(_, &id)| id)
    }

    /// Whether it is time for [`Namespaces::forget_all_but`]: requests may carry any number of tags.
    pub fn is_crowded(&self) -> bool {
        // A sweep walks every entry, so it waits until the namespaces have doubled: no put pays for it twice.
        self.ids.len() > MAX_IDLE_NAMESPACES.max(2 * self.kept)
    }

    /// Forgets every namespace that is not in use.
    pub fn forget_all_but(&mut self, in_use: &HashSet<NamespaceId>) {
        self.ids.retain(|_, id| in_use.contains(id));
        self.texts.retain(|id, _| in_use.contains(id));
        self.kept = self.ids.len();
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn tag() -> impl Strategy<Value = TagValue> {
        prop_oneof![
            Just(TagValue::Null),
            any::<bool>().prop_map(TagValue::Bool),
            any::<i64>().prop_map(TagValue::Int),
            any::<f64>()
                .prop_filter("NaN", |value| !value.is_nan())
                .prop_map(TagValue::Float),
            ".*".prop_map(TagValue::Text),
        ]
    }

    fn text() -> impl Strategy<Value = String> {
        prop_oneof![".*", "[/@%=:_.-]{0,8}", "[a-b%2F]{0,6}"]
    }

    prop_compose! {
        fn key()(
            model_name in text(), world_size in any::<u32>(), worker_id in any::<u32>(), kv_dtype in text(),
            facts in proptest::collection::btree_map(text(), text(), 0..4),
            tags in proptest::collection::btree_map(text(), tag(), 0..4),
            hash in any::<[u8; 32]>(), layer_id in any::<Option<u32>>(),
        ) -> CacheEngineKey {
            CacheEngineKey {
                namespace: Namespace { model_name, world_size, worker_id, kv_dtype, facts, tags },
                chunk_hash: ChunkHash(hash),
                layer_id,
            }
        }
    }

    proptest! {
        #[test]
        fn keys_round_trip(key in key()) {
            prop_assert_eq!(CacheEngineKey::parse(&key.to_text()), Ok(key));
        }

        #[test]
        fn different_keys_have_different_texts(a in key(), b in key()) {
            prop_assert_eq!(a == b, a.to_text() == b.to_text());
        }

        #[test]
        fn reading_any_text_never_panics_and_accepts_only_canonical_forms(text in ".*") {
            if let Ok(key) = CacheEngineKey::parse(&text) {
                prop_assert_eq!(key.to_text(), text);
            }
        }

        #[test]
        fn a_damaged_key_is_refused_or_another_key(key in key(), at in any::<usize>(), to in any::<char>()) {
            let text = key.to_text();
            let mut chars: Vec<char> = text.chars().collect();
            let at = at % chars.len();
            prop_assume!(chars[at] != to);
            chars[at] = to;
            let damaged: String = chars.into_iter().collect();
            prop_assert_ne!(CacheEngineKey::parse(&damaged).ok(), Some(key));
        }
    }

    #[test]
    fn long_and_strange_model_names_stay_apart() {
        let names = [
            "a/b",
            "a-b",
            "a%2Fb",
            "a--b",
            "a__b",
            "A/b",
            "a@b",
            "é",
            "e\u{301}",
            &"x".repeat(300),
        ];
        let texts: HashSet<String> = names.iter().map(|name| named(name).to_text()).collect();
        assert_eq!(texts.len(), names.len());
    }

    fn named(model_name: &str) -> Namespace {
        Namespace {
            model_name: model_name.into(),
            world_size: 1,
            worker_id: 0,
            kv_dtype: "float32".into(),
            facts: BTreeMap::new(),
            tags: BTreeMap::new(),
        }
    }

    #[test]
    fn a_name_of_300_characters_fits_and_one_that_is_too_long_is_named() {
        let longest = named(&"\u{10FFFF}".repeat(300));
        let key = CacheEngineKey {
            namespace: longest,
            chunk_hash: ChunkHash([7; 32]),
            layer_id: Some(u32::MAX),
        };
        assert!(key.namespace.bounded_text().is_ok());
        assert_eq!(CacheEngineKey::parse(&key.to_text()), Ok(key));

        let mut tagged = named("m");
        let rest = tagged.to_text().len() + "@tag.t=s:".len();
        for (num_bytes, fits) in [
            (MAX_NAMESPACE_BYTES, true),
            (MAX_NAMESPACE_BYTES + 1, false),
        ] {
            let value = TagValue::Text("x".repeat(num_bytes - rest));
            tagged.tags.insert("t".into(), value);
            let key = CacheEngineKey {
                namespace: tagged.clone(),
                chunk_hash: ChunkHash([7; 32]),
                layer_id: None,
            };
            assert_eq!(CacheEngineKey::parse(&key.to_text()).is_ok(), fits);
            assert_eq!(tagged.bounded_text().is_ok(), fits);
        }
        let refused = tagged.bounded_text();
        assert!(
            matches!(&refused, Err(CoreError::NamespaceTooLong { longest, .. }) if longest == "tag.t"),
            "{refused:?}"
        );
    }

    #[test]
    fn a_prefix_ends_where_a_field_ends() {
        let namespace = "model=a@world=1@tag.t=s:x";
        for prefix in [
            "",
            "model=a",
            "model=a@",
            "model=a@world=1",
            "model=a@world=1@tag.t=s:x",
        ] {
            assert!(begins_with(namespace, prefix), "{prefix}");
        }
        for prefix in [
            "m",
            "model=",
            "model=a@world=",
            "model=a@w",
            "world=1",
            "model=a@world=1@tag.t=s",
        ] {
            assert!(!begins_with(namespace, prefix), "{prefix}");
        }
        assert!(!begins_with("model=ab@world=1", "model=a"));
    }

    #[test]
    fn namespace_numbers_are_never_used_twice() {
        let mut namespaces = Namespaces::default();
        let first = namespaces.intern("a").expect("room");
        assert_eq!(namespaces.intern("a"), Some(first));
        assert_eq!(namespaces.text(first).map(|text| &**text), Some("a"));
        namespaces.forget_all_but(&HashSet::new());
        assert_eq!(namespaces.get("a"), None);
        assert_eq!(namespaces.text(first), None);
        assert_ne!(namespaces.intern("a"), Some(first));
    }

    #[test]
    fn namespaces_in_use_are_swept_a_few_times_not_at_each_new_one() {
        let mut namespaces = Namespaces::default();
        let mut in_use = HashSet::new();
        let mut sweeps = 0;
        for tenant in 0..100_000 {
            if namespaces.is_crowded() {
                sweeps += 1;
                namespaces.forget_all_but(&in_use);
            }
            in_use.insert(namespaces.intern(&tenant.to_string()).expect("room"));
        }
        assert!((1..=5).contains(&sweeps), "{sweeps} sweeps");
    }

    #[test]
    fn other_values_are_put_into_the_fields_that_are_meant_and_no_others() {
        let fields = [
            ("worker", "3"),
            ("fact.num_layers", "a@b"),
            ("fact.none", "1"),
        ]
        .map(|(name, value)| (name.to_owned(), value.to_owned()));
        let namespace = "model=m@world=4@worker=0@dtype=f@fact.num_layers=2@tag.worker=s:0";
        let changed = "model=m@world=4@worker=3@dtype=f@fact.num_layers=a%40b@tag.worker=s:0";
        assert_eq!(with_fields(namespace, &BTreeMap::from(fields)), changed);
        assert_eq!(with_fields(namespace, &BTreeMap::new()), namespace);
        assert_eq!(with_fields("", &BTreeMap::new()), "");
    }
}
