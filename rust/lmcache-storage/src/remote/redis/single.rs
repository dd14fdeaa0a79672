//! One server, or the one that sentinels name: connections that each carry one call at a time.

use std::fmt;
use std::time::{Duration, Instant};

use bytes::Bytes;
use parking_lot::Mutex;
use redis::aio::MultiplexedConnection;
use redis::sentinel::{SentinelClient, SentinelClientBuilder, SentinelServerType};
use redis::{
    AsyncConnectionConfig, Client, Cmd, ConnectionAddr, Pipeline, RedisError, TlsCertificates,
    Value,
};

use super::address::{CONNECT_WITHIN, Servers, plain_words, tcp_settings};
use super::refusals::refusal;
use super::wire::{Destination, Failure, Reply, Wire};
use crate::remote::client::Refusal;

/// A call that is dropped sooner says nothing of the server: nobody wanted its answer any more.
const PATIENCE: Duration = Duration::from_millis(250);

enum Finder {
    Fixed(Client),
    /// Asked for each connection, so that a failover is followed.
    Sentinel(tokio::sync::Mutex<SentinelClient>),
}

/// A pool of connections.
pub(super) struct Single {
    finder: Finder,
    /// Whether the server is spoken to without the driver, as only a plain socket is.
    is_plain: bool,
    idle: Mutex<Vec<MultiplexedConnection>>,
    idle_wires: Mutex<Vec<Wire>>,
    max_idle: usize,
}

impl fmt::Debug for Single {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Single").finish_non_exhaustive()
    }
}

/// Closes what lies idle if a call was dropped that had waited: where one connection died without a word, so did
/// those beside it, and each would cost another call all its time.
struct Use<'a> {
    single: &'a Single,
    began: Instant,
    is_done: bool,
}

impl Use<'_> {
    fn end<T>(mut self, outcome: Result<T, Refusal>) -> Result<T, Refusal> {
        self.is_done = true;
        if outcome.as_ref().is_err_and(Refusal::is_outage) {
            self.single.close_idle();
        }
        outcome
    }
}

impl Drop for Use<'_> {
    fn drop(&mut self) {
        if !self.is_done && self.began.elapsed() >= PATIENCE {
            self.single.close_idle();
        }
    }
}

enum Call<'a> {
    One(&'a Cmd),
    Many(&'a Pipeline),
}

impl Single {
    pub(super) fn new(
        servers: Servers,
        certificates: Option<TlsCertificates>,
        operations: usize,
    ) -> Result<Self, String> {
        let is_plain = match &servers {
            Servers::One(info) => !matches!(info.addr(), ConnectionAddr::TcpTls { .. }),
            Servers::Sentinels(sentinels) => sentinels.tls.is_none(),
            Servers::Cluster(_) => false,
        };
        let finder = match servers {
            Servers::One(info) => Finder::Fixed(
                match certificates {
                    None => Client::open(*info),
                    Some(certificates) => Client::build_with_tls(*info, certificates),
                }
                .map_err(|error| plain_words(&error))?,
            ),
            Servers::Sentinels(sentinels) => {
                let build = || -> Result<SentinelClient, RedisError> {
                    let of = SentinelClientBuilder::new(
                        sentinels.addresses,
                        &sentinels.service,
                        SentinelServerType::Master,
                    )?;
                    let mut of = of
                        .set_client_to_redis_db(sentinels.db)
                        .set_client_to_redis_tcp_settings(tcp_settings())
                        .set_client_to_sentinel_tcp_settings(tcp_settings());
                    if let Some(username) = &sentinels.username {
                        of = of.set_client_to_redis_username(username);
                    }
                    if let Some(password) = &sentinels.password {
                        of = of.set_client_to_redis_password(password);
                    }
                    if let Some(mode) = sentinels.tls {
                        of = of
                            .set_client_to_redis_tls_mode(mode)
                            .set_client_to_sentinel_tls_mode(mode);
                    }
                    if let Some(certificates) = certificates {
                        of = of
                            .set_client_to_redis_certificates(certificates.clone())
                            .set_client_to_sentinel_certificates(certificates);
                    }
                    of.build()
                };
                let client = build().map_err(|error| plain_words(&error))?;
                Finder::Sentinel(tokio::sync::Mutex::new(client))
            }
            Servers::Cluster(_) => return Err("a cluster is no single server".into()),
        };
        Ok(Self {
            finder,
            is_plain,
            idle: Mutex::default(),
            idle_wires: Mutex::default(),
            max_idle: operations * 2,
        })
    }

    pub(super) async fn command(&self, cmd: &Cmd) -> Result<Value, Refusal> {
        let mut answers = self.call(Call::One(cmd)).await?;
        Ok(answers.pop().unwrap_or(Value::Nil))
    }

    pub(super) async fn pipeline(&self, pipeline: &Pipeline) -> Result<Vec<Value>, Refusal> {
        self.call(Call::Many(pipeline)).await
    }

    /// What a server must permit besides, so that it is found.
    pub(super) fn rights(&self) -> &'static str {
        match &self.finder {
            Finder::Fixed(_) => "",
            Finder::Sentinel(_) => ", and ROLE or INFO",
        }
    }

    fn in_use(&self) -> Use<'_> {
        Use {
            single: self,
            began: Instant::now(),
            is_done: false,
        }
    }

    fn close_idle(&self) {
        self.idle.lock().clear();
        self.idle_wires.lock().clear();
    }

    async fn call(&self, call: Call<'_>) -> Result<Vec<Value>, Refusal> {
        let in_use = self.in_use();
        let outcome = self.call_over_any(call).await;
        in_use.end(outcome)
    }

    async fn call_over_any(&self, call: Call<'_>) -> Result<Vec<Value>, Refusal> {
        loop {
            let idle = self.idle.lock().pop();
            let is_used = idle.is_some();
            let mut connection = match idle {
                Some(connection) => connection,
                None => self.connect().await?,
            };
            // Not put back if this call is dropped here: an answer may still be on its way.
            let outcome = match &call {
                Call::One(cmd) => cmd
                    .query_async::<Value>(&mut connection)
                    .await
                    .map(|value| vec![value]),
                Call::Many(pipeline) => pipeline.query_async(&mut connection).await,
            };
            match outcome {
                Ok(answers) => {
                    self.put_back(connection);
                    return Ok(answers);
                }
                // The server went away while it was idle: so did all of them.
                Err(error) if is_used && is_broken(&error) => self.close_idle(),
                Err(error) => {
                    if !is_broken(&error) {
                        self.put_back(connection);
                    }
                    return Err(refusal(&error));
                }
            }
        }
    }

    /// One command with a large value in it or in its answer, past the driver; `None` where only the driver gets
    /// there.
    pub(super) async fn heavy(
        &self,
        arguments: &[Vec<Bytes>],
        into: Destination<'_>,
    ) -> Option<Result<Reply, Refusal>> {
        if !self.is_plain {
            return None;
        }
        let in_use = self.in_use();
        let outcome = self.heavy_over_any(arguments, into).await;
        Some(in_use.end(outcome))
    }

    async fn heavy_over_any(
        &self,
        arguments: &[Vec<Bytes>],
        mut into: Destination<'_>,
    ) -> Result<Reply, Refusal> {
        loop {
            let idle = self.idle_wires.lock().pop();
            let is_used = idle.is_some();
            let mut wire = match idle {
                Some(wire) => wire,
                None => {
                    let client = self.client().await?;
                    Wire::open(client.get_connection_info()).await?
                }
            };
            // As with the driver's: not put back if this call is dropped here.
            match wire.command(arguments, into.again()).await {
                Ok(reply) => {
                    self.put_back_wire(wire);
                    return Ok(reply);
                }
                Err(Failure::Broken(_)) if is_used => self.close_idle(),
                Err(failure) => {
                    // After a failover a server may only be read from: the next connection finds another.
                    if let Failure::Refused { refusal, is_sound } = &failure
                        && *is_sound
                        && !matches!(refusal, Refusal::Denied(_))
                    {
                        self.put_back_wire(wire);
                    }
                    return Err(failure.into_refusal());
                }
            }
        }
    }

    fn put_back_wire(&self, wire: Wire) {
        if wire.is_spent {
            return;
        }
        let mut idle = self.idle_wires.lock();
        if idle.len() < self.max_idle {
            idle.push(wire);
        }
    }

    fn put_back(&self, connection: MultiplexedConnection) {
        let mut idle = self.idle.lock();
        if idle.len() < self.max_idle {
            idle.push(connection);
        }
    }

    async fn client(&self) -> Result<Client, Refusal> {
        match &self.finder {
            Finder::Fixed(client) => Ok(client.clone()),
            Finder::Sentinel(sentinels) => {
                let found = sentinels.lock().await.async_get_client().await;
                found.map_err(|error| refusal(&error))
            }
        }
    }

    async fn connect(&self) -> Result<MultiplexedConnection, Refusal> {
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(CONNECT_WITHIN))
            // The tier has the deadline.
            .set_response_timeout(None);
        let made = self.client().await?;
        let made = made.get_multiplexed_async_connection_with_config(&config);
        made.await.map_err(|error| refusal(&error))
    }
}

/// Whether a connection is of no more use.
fn is_broken(error: &RedisError) -> bool {
    error.is_io_error()
        || error.is_unrecoverable_error()
        || matches!(error.kind(), redis::ErrorKind::Parse)
        // After a failover this one is a replica: the next connection finds the new primary.
        || matches!(
            error.kind(),
            redis::ErrorKind::Server(redis::ServerErrorKind::ReadOnly)
        )
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use futures_util::future::join_all;
    use redis::IntoConnectionInfo as _;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;
    use tokio::time::timeout;

    use super::*;

    /// Answers each command by OK, but none that comes over the first `deaf` connections.
    async fn serve(listener: TcpListener, made: Arc<AtomicUsize>, deaf: Arc<AtomicUsize>) {
        loop {
            let (mut socket, _) = listener.accept().await.expect("a client");
            let number = made.fetch_add(1, Ordering::SeqCst);
            let deaf = Arc::clone(&deaf);
            tokio::spawn(async move {
                let mut read = vec![0; 4096];
                while let Ok(len @ 1..) = socket.read(&mut read).await {
                    let lines = read[..len].split(|byte| *byte == b'\n');
                    let commands = lines.filter(|line| line.starts_with(b"*")).count();
                    if number >= deaf.load(Ordering::SeqCst) {
                        let answer = b"+OK\r\n".repeat(commands);
                        socket.write_all(&answer).await.expect("a client");
                    }
                }
            });
        }
    }

    #[test]
    fn where_one_connection_died_in_silence_none_beside_it_is_used() {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("a runtime");
        runtime.block_on(async {
            let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
            let port = listener.local_addr().expect("bound").port();
            let (made, deaf) = (Arc::new(AtomicUsize::new(0)), Arc::default());
            tokio::spawn(serve(listener, Arc::clone(&made), Arc::clone(&deaf)));
            let info = format!("redis://127.0.0.1:{port}").into_connection_info();
            let info = Box::new(info.expect("a URL"));
            let single = Single::new(Servers::One(info), None, 4).expect("right settings");
            let ping = redis::cmd("PING");
            let set = ["SET", "name", "value"].map(|word| vec![Bytes::from(word)]);
            let heavy = || async {
                single
                    .heavy(&set, Destination::Nothing)
                    .await
                    .expect("a plain socket")
            };
            for outcome in join_all((0..3).map(|_| single.command(&ping))).await {
                outcome.expect("answered");
            }
            for outcome in join_all((0..3).map(|_| heavy())).await {
                outcome.expect("answered");
            }
            let num_idle = || (single.idle.lock().len(), single.idle_wires.lock().len());
            assert_eq!(num_idle(), (3, 3));
            deaf.store(made.load(Ordering::SeqCst), Ordering::SeqCst);
            let dropped = timeout(PATIENCE * 2, single.command(&ping)).await;
            assert!(dropped.is_err(), "nobody answers");
            let within = Duration::from_secs(60);
            let answered = timeout(within, heavy()).await.expect("a fresh one");
            answered.expect("answered");
            let answered = timeout(within, single.command(&ping)).await;
            answered.expect("a fresh one").expect("answered");
        });
    }
}
