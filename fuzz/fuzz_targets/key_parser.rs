//! Any text is a key or an error; a text that is read is the one that the key is written as.

#![no_main]

use libfuzzer_sys::fuzz_target;
use lmcache_core::key::CacheEngineKey;

fuzz_target!(|text: &str| {
    if let Ok(key) = CacheEngineKey::parse(text) {
        assert_eq!(key.to_text(), text);
    }
});
