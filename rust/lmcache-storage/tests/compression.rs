//! What packing promises: every byte comes back, and nothing else passes for it.

mod damage;

use lmcache_storage::compression::{Sealed, pack, planes_of, seal, unpack};
use lmcache_storage::object_form::{
    Defect, Description, Form, Format, Header, PAGE_BYTES, Packing, read,
};
use proptest::prelude::*;

use damage::{Random, all_is_seen};

const KEY: &str = "model=m@world=1@worker=0@dtype=bfloat16@hash=0707070707070707070707070707070707070707070707070707070707070707";

fn described(payload: &[u8], dtype: &str) -> Description {
    Description {
        key: KEY.into(),
        payload_bytes: payload.len() as u64,
        num_tokens: 3,
        form: Some(Form {
            format: Format::KvT2d,
            num_layers: 3,
            hidden: 250,
            block_tokens: 1,
            dtype: dtype.into(),
        }),
        positions: Some(Box::new([5, 6, -7])),
    }
}

fn opened(object: &[u8], max_payload_bytes: u64) -> Result<Vec<u8>, Defect> {
    let sealed = Sealed::open(object, KEY, max_payload_bytes)?;
    let mut payload = vec![0xa5; sealed.description.payload_bytes as usize];
    sealed.unpack(&mut payload)?;
    Ok(payload)
}

/// Numbers of bfloat16 as KV has them: few exponents, any mantissa.
fn like_kv(num_bytes: usize) -> Vec<u8> {
    let mut random = Random(3);
    let bytes = (0..num_bytes).map(|at| match at % 2 {
        0 => random.below(256) as u8,
        _ => 0x3e + random.below(3) as u8 + 0x80 * random.below(2) as u8,
    });
    bytes.collect()
}

proptest! {
    #[test]
    fn what_is_packed_comes_back(
        payload in prop_oneof![
            prop::collection::vec(any::<u8>(), 0..5000),
            prop::collection::vec(0..3u8, 0..9000),
            (0..20_000usize).prop_map(|len| vec![0; len]),
            (0..20_000usize).prop_map(like_kv),
        ],
        planes in prop::sample::select(vec![1usize, 2, 4, 8]),
    ) {
        let packed = pack(&payload, planes).expect("there is memory");
        prop_assert_eq!(packed.packing.packed_bytes, packed.stored.len() as u64);
        prop_assert!(packed.stored.len() <= payload.len() + 8 * planes);
        let mut back = vec![0xa5; payload.len()];
        prop_assert_eq!(unpack(&packed.packing, &packed.stored, &mut back), Ok(()));
        prop_assert!(back == payload);
        // Into no other size.
        for len in [payload.len() + 1, payload.len().saturating_sub(1)] {
            if len != payload.len() {
                prop_assert!(unpack(&packed.packing, &packed.stored, &mut vec![0; len]).is_err());
            }
        }
    }

    #[test]
    fn any_stored_bytes_are_refused_and_nothing_panics(
        stored in prop::collection::vec(any::<u8>(), 0..300),
        lens in prop::collection::vec(0..300u64, 8),
        planes in prop::sample::select(vec![1u8, 2, 4, 8]),
        payload_bytes in 0..600usize,
        checksum in any::<u64>(),
    ) {
        let mut bytes: Vec<u8> =
            lens[..usize::from(planes)].iter().flat_map(|len| len.to_le_bytes()).collect();
        bytes.extend(stored);
        let packing = Packing { planes, packed_bytes: bytes.len() as u64, payload_checksum: checksum };
        prop_assert!(unpack(&packing, &bytes, &mut vec![0; payload_bytes]).is_err());
    }

    #[test]
    fn a_header_with_any_field_changed_is_refused(
        at in 0..200usize, to in prop::collection::vec(any::<u8>(), 1..8),
    ) {
        let payload = like_kv(3000);
        let whole = seal(&described(&payload, "bfloat16"), &payload).expect("it fits");
        let mut bytes = whole.clone();
        let end = (at + to.len()).min(200);
        bytes[at..end].copy_from_slice(&to[..end - at]);
        prop_assume!(bytes != whole);
        prop_assert!(opened(&bytes, 3000).is_err());
    }
}

#[test]
fn numbers_like_kv_get_smaller_and_noise_costs_a_table() {
    let payload = like_kv(1 << 20);
    for (planes, at_most) in [(1, 0.86), (2, 0.70)] {
        let packed = pack(&payload, planes).expect("there is memory");
        let ratio = packed.stored.len() as f64 / payload.len() as f64;
        assert!(ratio < at_most, "{planes} planes: {ratio}");
    }
    let mut random = Random(9);
    let noise: Vec<u8> = (0..70_001).map(|_| random.below(256) as u8).collect();
    let packed = pack(&noise, 4).expect("there is memory");
    assert_eq!(packed.stored.len(), noise.len() + 32);
}

#[test]
fn a_hundred_thousand_flips_cuts_and_swaps_are_all_seen() {
    let mut random = Random(7);
    let payload = like_kv(9001);
    let whole = seal(&described(&payload, "bfloat16"), &payload).expect("it fits");
    assert_eq!(opened(&whole, 9001).as_ref(), Ok(&payload));
    let told = [
        Defect::Truncated,
        Defect::Magic,
        Defect::Version,
        Defect::Packing,
        Defect::Foreign,
        Defect::Checksum,
        Defect::Malformed,
    ];
    all_is_seen(&whole, &mut random, |bytes| opened(bytes, 9001), &told);
}

/// Damage that the outer sum does not see, because whoever did it sealed it again.
#[test]
fn a_hundred_thousand_resealed_changes_of_the_stored_bytes_are_all_seen() {
    let mut random = Random(11);
    let payload = like_kv(2001);
    let description = described(&payload, "bfloat16");
    let packed = pack(&payload, 2).expect("there is memory");
    for _ in 0..100_000 {
        let mut stored = packed.stored.clone();
        for _ in 0..1 + random.below(3) {
            let at = random.below(stored.len());
            stored[at] = random.below(256) as u8;
        }
        let mut back = vec![0; payload.len()];
        if unpack(&packed.packing, &stored, &mut back).is_ok() {
            // A frame may be written in more ways than one; the payload may not.
            assert!(back == payload);
        }
    }
    let object = description.seal_packed(&packed.packing, &packed.stored);
    assert_eq!(
        opened(&[object.expect("it fits"), packed.stored].concat(), 2001),
        Ok(payload)
    );
}

#[test]
fn a_small_object_that_would_fill_memory_is_refused_before_anything_is_allocated() {
    let zeros = vec![0; 64 << 20];
    let object = seal(&described(&zeros, "bfloat16"), &zeros).expect("it fits");
    assert!(object.len() < 1 << 20);
    assert_eq!(opened(&object, 1 << 20), Err(Defect::Length));
    // One that says less than it unpacks to.
    let packed = pack(&zeros, 2).expect("there is memory");
    let description = described(&[0; 100], "bfloat16");
    let header = description.seal_packed(&packed.packing, &packed.stored);
    let lying = [header.expect("it fits"), packed.stored].concat();
    assert_eq!(opened(&lying, 1 << 20), Err(Defect::Malformed));
}

#[test]
fn each_reason_has_its_name() {
    let payload = like_kv(600);
    let description = described(&payload, "bfloat16");
    let packed = pack(&payload, 2).expect("there is memory");
    let sealed = |packing: &Packing, payload_bytes: u64| {
        let description = Description {
            payload_bytes,
            ..description.clone()
        };
        let header = description.seal_packed(packing, &packed.stored);
        [header.expect("it fits"), packed.stored.clone()].concat()
    };
    let whole = sealed(&packed.packing, 600);
    let changed = |at: usize, to: u8| {
        let mut bytes = whole.clone();
        bytes[at] = to;
        opened(&bytes, 600).expect_err("it is damaged").name()
    };
    assert_eq!(changed(0, b'X'), "magic");
    assert_eq!(changed(8, 1), "version");
    assert_eq!(changed(8, 3), "version");
    assert_eq!(changed(64, 2), "packing");
    assert_eq!(changed(65, 3), "packing");
    assert_eq!(changed(66, 1), "malformed");
    assert_eq!(changed(88, b'M'), "foreign");
    assert_eq!(changed(PAGE_BYTES + 20, 1), "checksum");
    assert_eq!(
        opened(&whole[..whole.len() - 1], 600),
        Err(Defect::Truncated)
    );
    assert_eq!(
        opened(&[&whole[..], b"d"].concat(), 600),
        Err(Defect::Length)
    );
    assert_eq!(opened(&whole, 599), Err(Defect::Length));
    let other = Packing {
        payload_checksum: 1,
        ..packed.packing
    };
    assert_eq!(opened(&sealed(&other, 600), 600), Err(Defect::Checksum));
    assert_eq!(
        opened(&sealed(&packed.packing, 601), 601),
        Err(Defect::Malformed)
    );
}

#[test]
fn who_does_not_unpack_takes_a_packed_object_for_another_version() {
    let payload = like_kv(600);
    let description = described(&payload, "bfloat16");
    let packed = seal(&description, &payload).expect("it fits");
    assert_eq!(read(&packed, KEY), Err(Defect::Version));
    assert_eq!(Header::bytes_of(&packed), Err(Defect::Version));
    let plain = [description.seal(&payload).expect("it fits"), payload].concat();
    assert_eq!(opened(&plain, 600), Err(Defect::Version));
    for object in [&plain, &packed] {
        let header = Header::parse_any(object).expect("either is read");
        assert_eq!(header.description, description);
        assert_eq!(header.stored_bytes() as usize + header.len(), object.len());
    }
}

#[test]
fn a_type_has_as_many_planes_as_bytes() {
    for (dtype, planes) in [
        ("bfloat16", 2),
        ("float16", 2),
        ("float32", 4),
        ("uint8", 1),
        ("float8_e4m3fn", 1),
        ("", 1),
    ] {
        assert_eq!(planes_of(dtype), planes, "{dtype}");
    }
}
