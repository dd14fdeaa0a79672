//! Any bytes are an object or a defect; what is read as one is written as it was.

#![no_main]

use libfuzzer_sys::fuzz_target;
use lmcache_storage::object_form::{Header, read};

fuzz_target!(|bytes: &[u8]| {
    if let Ok(header) = Header::parse(bytes) {
        // The parser takes what a writer could have written; only the sum makes it true.
        let key = header.description.key.clone();
        if let Ok((description, payload)) = read(bytes, &key) {
            let mut again = description.seal(payload).expect("it fitted before");
            again.extend_from_slice(payload);
            assert!(again == bytes);
        }
    }
});
