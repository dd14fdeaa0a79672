//! Any bytes are a packed object or a defect; whatever they say, no more memory is taken than the reader allows.

#![no_main]

use libfuzzer_sys::fuzz_target;
use lmcache_storage::compression::{Sealed, unpack};
use lmcache_storage::object_form::Header;

const MAX_PAYLOAD_BYTES: u64 = 1 << 20;

fuzz_target!(|bytes: &[u8]| {
    let Ok(header) = Header::parse_packed(bytes) else {
        return;
    };
    let payload_bytes = header.description.payload_bytes.min(MAX_PAYLOAD_BYTES);
    let mut payload = vec![0; payload_bytes as usize];
    // Past the outer sum, which hardly any of these bytes pass.
    if let Some(packing) = &header.packing {
        let _ = unpack(packing, &bytes[header.len()..], &mut payload);
    }
    let key = header.description.key.clone();
    if let Ok(sealed) = Sealed::open(bytes, &key, MAX_PAYLOAD_BYTES) {
        let _ = sealed.unpack(&mut payload);
    }
});
