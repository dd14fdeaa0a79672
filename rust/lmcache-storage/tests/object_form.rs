//! What an object's form promises: what was written comes back, and nothing else passes for it.

mod damage;

use lmcache_storage::compression;
use lmcache_storage::object_form::{
    Defect, Description, Form, Format, Header, MAGIC, PAGE_BYTES, read,
};
use proptest::prelude::*;

use damage::{Random, all_is_seen};

const KEY: &str = "model=m@world=1@worker=0@dtype=bfloat16@hash=0707070707070707070707070707070707070707070707070707070707070707";

fn form() -> impl Strategy<Value = Form> {
    let format = prop_oneof![
        Just(Format::KvT2d),
        Just(Format::KvMla),
        Just(Format::Opaque)
    ];
    (
        format,
        any::<u32>(),
        any::<u64>(),
        any::<u32>(),
        "[a-z0-9_]{0,20}",
    )
        .prop_map(|(format, num_layers, hidden, block_tokens, dtype)| Form {
            format,
            num_layers,
            hidden,
            block_tokens,
            dtype,
        })
}

prop_compose! {
    fn object()(
        key in prop_oneof![Just(KEY.to_owned()), ".{0,80}", "[a-z@=%]{0,6000}"],
        payload in prop::collection::vec(any::<u8>(), 0..9000),
        form in prop::option::of(form()),
        positions in prop::option::of(prop::collection::vec(any::<i64>(), 1..700)),
        num_tokens in 0..2000u32,
    ) -> (Description, Vec<u8>) {
        let positions = positions.map(Vec::into_boxed_slice);
        let num_tokens = positions.as_ref().map_or(num_tokens, |positions| positions.len() as u32);
        let payload_bytes = payload.len() as u64;
        (Description { key, payload_bytes, num_tokens, form, positions }, payload)
    }
}

fn sealed(description: &Description, payload: &[u8]) -> Vec<u8> {
    let mut bytes = description.seal(payload).expect("it fits a header");
    bytes.extend_from_slice(payload);
    bytes
}

proptest! {
    #[test]
    fn what_is_sealed_is_read((description, payload) in object()) {
        let bytes = sealed(&description, &payload);
        prop_assert_eq!((bytes.len() - payload.len()) % PAGE_BYTES, 0);
        prop_assert_eq!(read(&bytes, &description.key), Ok((description.clone(), &payload[..])));
        prop_assert_eq!(Header::bytes_of(&bytes[..PAGE_BYTES]), Ok(bytes.len() - payload.len()));
    }

    #[test]
    fn any_bytes_are_refused_and_nothing_panics(bytes in prop::collection::vec(any::<u8>(), 0..300), begins in any::<bool>()) {
        let mut bytes = bytes;
        if begins {
            bytes.splice(0..0, MAGIC.into_iter().chain([1, 0, 0, 0, 0, 16, 0, 0]));
        }
        bytes.resize(bytes.len() + PAGE_BYTES, 0);
        prop_assert!(read(&bytes, KEY).is_err());
    }

    #[test]
    fn a_header_with_any_field_changed_is_refused(
        (description, payload) in object(), at in 0..64usize, to in prop::collection::vec(any::<u8>(), 1..8),
    ) {
        let mut bytes = sealed(&description, &payload);
        let before = bytes.clone();
        let end = (at + to.len()).min(64);
        bytes[at..end].copy_from_slice(&to[..end - at]);
        prop_assume!(bytes != before);
        prop_assert!(read(&bytes, &description.key).is_err());
    }
}

#[test]
fn a_hundred_thousand_flips_cuts_and_swaps_are_all_seen() {
    let mut random = Random(7);
    let payload: Vec<u8> = (0..9001).map(|_| random.below(256) as u8).collect();
    let description = Description {
        key: KEY.into(),
        payload_bytes: payload.len() as u64,
        num_tokens: 3,
        form: Some(Form {
            format: Format::KvT2d,
            num_layers: 3,
            hidden: 250,
            block_tokens: 1,
            dtype: "bfloat16".into(),
        }),
        positions: Some(Box::new([5, 6, -7])),
    };
    let whole = sealed(&description, &payload);
    let told = [
        Defect::Truncated,
        Defect::Magic,
        Defect::Version,
        Defect::Foreign,
        Defect::Checksum,
        Defect::Malformed,
    ];
    all_is_seen(
        &whole,
        &mut random,
        |bytes| read(bytes, KEY).map(drop),
        &told,
    );
}

#[test]
fn each_reason_has_its_name() {
    let description = Description {
        key: KEY.into(),
        payload_bytes: 3,
        num_tokens: 0,
        form: None,
        positions: None,
    };
    let whole = sealed(&description, b"abc");
    let changed = |at: usize, to: u8| {
        let mut bytes = whole.clone();
        bytes[at] = to;
        read(&bytes, KEY).expect_err("it is damaged").name()
    };
    assert_eq!(changed(0, b'X'), "magic");
    assert_eq!(changed(8, 2), "version");
    assert_eq!(changed(64, b'M'), "foreign");
    assert_eq!(changed(46, 1), "malformed");
    assert_eq!(changed(PAGE_BYTES, b'b'), "checksum");
    assert_eq!(read(&whole[..PAGE_BYTES + 2], KEY), Err(Defect::Truncated));
    assert_eq!(read(&[&whole[..], b"d"].concat(), KEY), Err(Defect::Length));
    assert_eq!(
        read(&whole, &KEY.replace("model=m", "model=n")),
        Err(Defect::Foreign)
    );
    assert_eq!(read(&[], KEY), Err(Defect::Truncated));
}

#[test]
fn what_no_header_holds_is_not_sealed() {
    let description = Description {
        key: "k".repeat(lmcache_core::key::MAX_KEY_BYTES + 1),
        payload_bytes: 0,
        num_tokens: 0,
        form: None,
        positions: None,
    };
    assert_eq!(description.seal(&[]), None);
    let positions = Some(vec![1, 2].into_boxed_slice());
    assert_eq!(
        Description {
            key: "k".into(),
            num_tokens: 3,
            positions,
            ..description
        }
        .seal(&[]),
        None
    );
}

#[test]
fn objects_of_every_version_that_is_read_are_read_and_written_alike() {
    let folder = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../tests/vectors/object_form"
    );
    let mut seen = 0;
    for entry in std::fs::read_dir(folder).expect("the golden files") {
        let path = entry.expect("an entry").path();
        let bytes = std::fs::read(&path).expect("a golden file");
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if name.starts_with("v2-") {
            assert_eq!(Header::parse(&bytes).err(), Some(Defect::Version));
            let header = Header::parse_packed(&bytes).expect("a whole header");
            let (stored, packing) = (
                &bytes[header.len()..],
                header.packing.expect("it is packed"),
            );
            assert_eq!(header.verify(stored), Ok(()));
            assert_eq!(compression::verify(&header, stored), Ok(()));
            // Another zstd may pack otherwise; the header has one form.
            let again = header.description.seal_packed(&packing, stored);
            assert!(again.expect("it fits") == bytes[..header.len()]);
            seen += 1;
            continue;
        }
        let header = Header::parse(&bytes).expect("a whole header");
        let key = header.description.key.clone();
        let (description, payload) = read(&bytes, &key).expect("a whole object");
        assert!(sealed(&description, payload) == bytes);
        seen += 1;
    }
    assert_eq!(seen, 8);
}
