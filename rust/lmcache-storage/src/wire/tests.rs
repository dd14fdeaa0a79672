use proptest::prelude::*;

use super::*;

fn refusal(message: &[u8]) -> Refusal {
    decode_request(message).expect_err("the message is bad")
}

/// A request of which one thing is wrong.
fn request(num_fields: u32, version: u64, kind: u64, packed: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    write_array_len(&mut out, num_fields).expect(WRITABLE);
    put_uint(&mut out, version);
    put_uint(&mut out, 77);
    put_uint(&mut out, kind);
    write_str(&mut out, "").expect(WRITABLE);
    write_str(&mut out, "").expect(WRITABLE);
    write_bin(&mut out, packed).expect(WRITABLE);
    out
}

fn refused(status: Status) -> Refusal {
    Refusal {
        message_id: 77,
        status,
    }
}

#[test]
fn a_lookup_has_the_documented_bytes() {
    let message = encode_lookup(300, "r1", "ns", &[7; 32]);
    let mut expected = b"\x96\x01\xcd\x01\x2c\x01\xa2r1\xa2ns\xc4\x20".to_vec();
    expected.extend([7; 32]);
    assert_eq!(message, expected);
}

#[test]
fn an_answer_has_the_documented_bytes() {
    let answer = Answer {
        message_id: 300,
        status: Status::Ok,
        hit_chunks: 512,
        lease_ms: 10_000,
    };
    let message = encode_answer(&answer);
    assert_eq!(message, b"\x95\x01\xcd\x01\x2c\x00\xcd\x02\x00\xcd\x27\x10");
    assert_eq!(decode_answer(&message), Ok(answer));
}

#[test]
fn places_have_the_documented_bytes() {
    let place = Place {
        offset: 4096,
        len: 300,
    };
    let message = encode_places(300, [place].into_iter());
    let mut expected = b"\x93\x01\xcd\x01\x2c\xc4\x10".to_vec();
    expected.extend([0, 0, 0, 0, 0, 0, 0x10, 0, 0, 0, 0, 0, 0, 0, 1, 44]);
    assert_eq!(message, expected);
    assert_eq!(decode_places(&message), Ok((300, vec![place])));
    for cut in 0..message.len() {
        assert!(decode_places(&message[..cut]).is_err(), "{cut}");
    }
    let longer = [&message[..], &[0]].concat();
    assert!(decode_places(&longer).is_err());
    // A refusal is no list of places.
    let refusal = encode_answer(&Answer {
        message_id: 1,
        status: Status::UnknownKind,
        hit_chunks: 0,
        lease_ms: 0,
    });
    assert!(decode_places(&refusal).is_err());
}

#[test]
fn what_is_refused_is_refused_by_its_id() {
    assert_eq!(
        refusal(&request(6, 2, LOOKUP, &[])),
        refused(Status::ForeignVersion)
    );
    assert_eq!(
        refusal(&request(9, 2, LOOKUP, &[])),
        refused(Status::ForeignVersion)
    );
    assert_eq!(
        refusal(&request(6, 1, 9, &[])),
        refused(Status::UnknownKind)
    );
    assert_eq!(
        refusal(&request(7, 1, LOOKUP, &[])),
        refused(Status::Malformed)
    );
    assert_eq!(
        refusal(&request(6, 1, LOOKUP, &[0; 33])),
        refused(Status::Malformed)
    );
    assert_eq!(
        refusal(&request(6, 1, PING, &[0; 32])),
        refused(Status::Malformed)
    );
    assert_eq!(
        refusal(&request(6, 1, CLEAR, &[0; 32])),
        refused(Status::Malformed)
    );
    for kind in [RELEASE, DONE, MAP] {
        assert_eq!(
            refusal(&request(6, 1, kind, &[0; 32])),
            refused(Status::Malformed)
        );
    }
    let mut longer = encode_ping(77);
    longer.push(0);
    assert_eq!(refusal(&longer), refused(Status::Malformed));
}

#[test]
fn what_has_no_readable_id_is_refused_as_message_0() {
    let unreadable = Refusal {
        message_id: 0,
        status: Status::Malformed,
    };
    for message in [
        &b""[..],
        b"\x96",
        b"\x96\x01",
        b"\xc0",
        b"\x96\x01\xff",
        b"hello",
        b"\x80",
    ] {
        assert_eq!(refusal(message), unreadable);
    }
}

#[test]
fn a_stated_length_reserves_nothing() {
    let mut message = encode_ping(77);
    message.truncate(message.len() - 2);
    message.extend(b"\xc6\xff\xff\xff\xff");
    assert_eq!(refusal(&message), refused(Status::Malformed));
}

#[test]
fn an_answer_of_another_version_says_which() {
    let message = b"\x95\x07\x01\x00\x00\x00";
    assert_eq!(
        decode_answer(message),
        Err(WireError::ForeignVersion { found: 7 })
    );
}

#[test]
fn an_unknown_status_is_malformed() {
    let message = b"\x95\x01\x01\x63\x00\x00";
    assert_eq!(
        decode_answer(message),
        Err(WireError::Malformed { num_bytes: 6 })
    );
}

prop_compose! {
    fn lookup()(
        message_id in any::<u64>(), lookup_id in ".{0,40}", namespace in ".{0,300}",
        hashes in proptest::collection::vec(any::<[u8; 32]>(), 0..20),
    ) -> (u64, String, String, Vec<[u8; 32]>) {
        (message_id, lookup_id, namespace, hashes)
    }
}

proptest! {
    #[test]
    fn requests_round_trip((message_id, lookup_id, namespace, hashes) in lookup()) {
        let message = encode_lookup(message_id, &lookup_id, &namespace, &hashes.concat());
        let locate = encode_locate(message_id, &lookup_id, &namespace, &hashes.concat());
        let hashes = hashes.into_iter().map(ChunkHash).collect();
        let hashes: Vec<_> = hashes;
        let request = Request::Lookup {
            message_id, lookup_id: &lookup_id, namespace: &namespace, hashes: hashes.clone(),
        };
        prop_assert_eq!(decode_request(&message), Ok(request));
        let request = Request::Locate {
            message_id, lookup_id: &lookup_id, namespace: &namespace, hashes,
        };
        prop_assert_eq!(decode_request(&locate), Ok(request));
        let message = encode_release(message_id, &lookup_id);
        let request = Request::Release { message_id, lookup_id: &lookup_id };
        prop_assert_eq!(decode_request(&message), Ok(request));
        let message = encode_ping(message_id);
        prop_assert_eq!(decode_request(&message), Ok(Request::Ping { message_id }));
        let message = encode_clear(message_id);
        prop_assert_eq!(decode_request(&message), Ok(Request::Clear { message_id }));
        let message = encode_map(message_id);
        prop_assert_eq!(decode_request(&message), Ok(Request::Map { message_id }));
        let message = encode_done(message_id, &lookup_id);
        let request = Request::Done { message_id, lookup_id: &lookup_id };
        prop_assert_eq!(decode_request(&message), Ok(request));
    }

    #[test]
    fn places_round_trip(
        message_id in any::<u64>(),
        places in proptest::collection::vec(any::<(u64, u64)>(), 0..20),
    ) {
        let places: Vec<Place> =
            places.into_iter().map(|(offset, len)| Place { offset, len }).collect();
        let message = encode_places(message_id, places.iter().copied());
        prop_assert_eq!(decode_places(&message), Ok((message_id, places)));
    }

    #[test]
    fn any_bytes_are_read_or_refused(message in proptest::collection::vec(any::<u8>(), 0..400)) {
        let _ = decode_request(&message);
        let _ = decode_answer(&message);
        let _ = decode_places(&message);
    }

    #[test]
    fn a_cut_message_is_refused(
        (message_id, lookup_id, namespace, hashes) in lookup(), cut in any::<prop::sample::Index>(),
    ) {
        let message = encode_lookup(message_id, &lookup_id, &namespace, &hashes.concat());
        let refusal = decode_request(&message[..cut.index(message.len())]);
        prop_assert_eq!(refusal.map_err(|refusal| refusal.status), Err(Status::Malformed));
    }

    #[test]
    fn a_mutated_message_is_read_or_refused(
        (message_id, lookup_id, namespace, hashes) in lookup(),
        mutations in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
    ) {
        let mut message = encode_lookup(message_id, &lookup_id, &namespace, &hashes.concat());
        for (at, to) in mutations {
            let at = at.index(message.len());
            message[at] = to;
        }
        let _ = decode_request(&message);
    }
}
