//! The remote tier on a real `redis-server`; what it does under faults is held in `tests/conformance`.
#![cfg(feature = "redis")]

mod remote_memory;

use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use bytes::Bytes;
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
fn redis(settings: &[&str]) -> Option<Redis> {
    let port = TcpListener::bind("127.0.0.1:0")
        .expect("a port")
        .local_addr()
        .expect("bound")
        .port();
    let spawned = Command::new("redis-server")
        .args(["--port", &port.to_string(), "--bind", "127.0.0.1"])
        .args(["--save", "", "--appendonly", "no"])
        .args(settings)
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
    let Some(server) = redis(&[]) else { return };
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

#[test]
fn a_user_of_one_prefix_alone_has_a_sound_server() {
    let user = "--user team on >pw ~team-a:* +set +getrange +exists +unlink +scan +strlen +info";
    let user: Vec<&str> = user.split(' ').collect();
    let Some(server) = redis(&user) else { return };
    let findings = |query: &str| {
        let url = format!("redis://team:pw@127.0.0.1:{}/{query}", server.port);
        let found = connect(&url, 4, &Credentials::new()).expect("a right URL");
        let tier = RemoteTier::open(found.client, Options::default(), pool(1));
        tier.expect("two threads").health(WITHIN)
    };
    wait_until("it is reached and permits all", || {
        let found = findings("?prefix=team-a:");
        let is_ok = |what| found.iter().any(|found| found.what == what && found.ok);
        is_ok("reach") && is_ok("rights")
    });
    assert!(!findings("")[0].ok, "names of others are refused");
}

#[test]
fn a_value_that_the_server_does_not_take_is_too_large_and_no_outage() {
    let Some(server) = redis(&["--proto-max-bulk-len", "1mb"]) else {
        return;
    };
    let url = format!("redis://127.0.0.1:{}/", server.port);
    let found = connect(&url, 4, &Credentials::new()).expect("a right URL");
    let runtime = tokio::runtime::Runtime::new().expect("threads");
    let put = |bytes: usize| {
        let value = vec![Bytes::from(vec![1; bytes])];
        runtime.block_on(found.client.put("name", value, None))
    };
    wait_until("it answers", || put(1000).is_ok());
    for _ in 0..8 {
        let refusal = put(32 << 20).expect_err("more than it takes");
        assert_eq!(refusal.name(), "too_large", "{refusal}");
    }
    assert_eq!(put(1000), Ok(()));
}
