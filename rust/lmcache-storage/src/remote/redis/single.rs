//! One server, or the one that sentinels name: connections that each carry one call at a time.

use std::fmt;

use bytes::Bytes;
use parking_lot::Mutex;
use redis::aio::MultiplexedConnection;
use redis::sentinel::{SentinelClient, SentinelClientBuilder, SentinelServerType};
use redis::{AsyncConnectionConfig, Client, Cmd, Pipeline, RedisError, TlsCertificates, Value};

use super::super::buffers::Buffers;
use super::address::{CONNECT_WITHIN, Servers, plain_words};
use super::refusals::refusal;
use super::wire::{Failure, Reply, Wire, is_plain};
use crate::remote::client::Refusal;

enum Finder {
    Fixed(Client),
    /// Asked for each connection, so that a failover is followed.
    Sentinel(tokio::sync::Mutex<SentinelClient>),
}

/// A pool of connections.
pub(super) struct Single {
    finder: Finder,
    idle: Mutex<Vec<MultiplexedConnection>>,
    idle_wires: Mutex<Vec<Wire>>,
    buffers: Buffers,
    max_idle: usize,
}

impl fmt::Debug for Single {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Single").finish_non_exhaustive()
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
                    let mut of = of.set_client_to_redis_db(sentinels.db);
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
            idle: Mutex::default(),
            idle_wires: Mutex::default(),
            buffers: Buffers::default(),
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

    async fn call(&self, call: Call<'_>) -> Result<Vec<Value>, Refusal> {
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
                Err(error) if is_used && is_broken(&error) => self.idle.lock().clear(),
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
        max_bytes: u64,
    ) -> Option<Result<Reply, Refusal>> {
        loop {
            let idle = self.idle_wires.lock().pop();
            let is_used = idle.is_some();
            let mut wire = match idle {
                Some(wire) => wire,
                None => {
                    let client = match self.client().await {
                        Ok(client) => client,
                        Err(refusal) => return Some(Err(refusal)),
                    };
                    let info = client.get_connection_info();
                    if !is_plain(info) {
                        return None;
                    }
                    match Wire::open(info, self.buffers.clone()).await {
                        Ok(wire) => wire,
                        Err(refusal) => return Some(Err(refusal)),
                    }
                }
            };
            // As with the driver's: not put back if this call is dropped here.
            match wire.command(arguments, max_bytes).await {
                Ok(reply) => {
                    self.put_back_wire(wire);
                    return Some(Ok(reply));
                }
                Err(Failure::Broken(_)) if is_used => self.idle_wires.lock().clear(),
                Err(failure) => {
                    // After a failover a server may only be read from: the next connection finds another.
                    if let Failure::Refused { refusal, is_sound } = &failure
                        && *is_sound
                        && !matches!(refusal, Refusal::Denied(_))
                    {
                        self.put_back_wire(wire);
                    }
                    return Some(Err(failure.into_refusal()));
                }
            }
        }
    }

    fn put_back_wire(&self, wire: Wire) {
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
