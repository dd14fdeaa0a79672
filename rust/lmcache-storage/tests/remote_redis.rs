//! The remote tier on a real `redis-server`; what it does under faults is held in `tests/conformance`.
#![cfg(feature = "redis")]

mod remote_memory;

use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use lmcache_storage::remote::{Credentials, Options, RemoteTier, connect};

use remote_memory::{chain, chunks, filled, pool, wait_until};

const WITHIN: Duration = Duration::from_secs(30);

struct Redis {
    process: Child,
    port: u16,
}

impl Drop for Redis {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// A server on a free port; `None` where none is installed.
#[expect(
    clippy::disallowed_methods,
    reason = "whether a skip is allowed is no setting"
)]
fn redis() -> Option<Redis> {
    let port = TcpListener::bind("127.0.0.1:0")
        .expect("a port")
        .local_addr()
        .expect("bound")
        .port();
    let spawned = Command::new("redis-server")
        .args(["--port", &port.to_string(), "--bind", "127.0.0.1"])
        .args(["--save", "", "--appendonly", "no"])
        .stdout(Stdio::null())
        .spawn();
    match spawned {
        Ok(process) => Some(Redis { process, port }),
        Err(error) => {
            assert!(std::env::var_os("CI").is_none(), "redis-server: {error}");
            eprintln!("skipped: redis-server is not installed ({error})");
            None
        }
    }
}

#[test]
fn chunks_come_back_from_a_real_server() {
    let Some(server) = redis() else { return };
    let url = format!("redis://127.0.0.1:{}/?prefix=team-a:", server.port);
    let found = connect(&url, 4, &Credentials::new()).expect("a right URL");
    let options = Options {
        key_prefix: found.key_prefix,
        ttl: Some(Duration::from_secs(100)),
        ..Options::default()
    };
    let tier = RemoteTier::open(found.client, options, pool(64)).expect("two threads");
    let hashes = chain(1..10);
    wait_until("the server answers", || {
        tier.put("model=m", &hashes, chunks(&hashes));
        assert!(tier.flush(WITHIN));
        tier.contains_prefix("model=m", &hashes) == 9
    });
    let ids: Vec<u8> = (1..10).collect();
    assert_eq!(filled(tier.get("model=m", &hashes, WITHIN)), ids);
    assert!(tier.remove("model=m", hashes[4]));
    assert_eq!(tier.contains_prefix("model=m", &hashes), 4);
    let page = tier.list_page(None, WITHIN).expect("listed");
    assert_eq!(page.names.len(), 8);
    let name = &page.names[0].0;
    assert!(name.starts_with("team-a:lmcache_rs.v1/"), "{name}");
    assert!(page.names.iter().all(|(_, bytes)| *bytes == 8192));
    let findings = tier.health(WITHIN);
    assert!(
        findings
            .iter()
            .any(|found| found.what == "rights" && found.ok),
        "{findings:?}"
    );
    assert!(
        findings
            .iter()
            .any(|found| found.what == "memory" && !found.ok),
        "{findings:?}"
    );
    assert_eq!(tier.clear(Some("model=m")), 8);
    assert_eq!(tier.contains_prefix("model=m", &hashes), 0);
}
