//! A cluster: the driver knows which node has which key, and follows keys that move.

use std::fmt;

use futures_util::future::try_join_all;
use parking_lot::Mutex;
use redis::cluster::{ClusterClient, ClusterClientBuilder};
use redis::cluster_async::ClusterConnection;
use redis::cluster_routing::{MultipleNodeRoutingInfo, RoutingInfo, SingleNodeRoutingInfo};
use redis::{Cmd, TlsCertificates, Value};

use super::address::{CONNECT_WITHIN, Nodes, plain_words, tcp_settings};
use super::refusals::{refusal, unexpected};
use super::{scan, scanned};
use crate::remote::client::Refusal;

/// Connections to each node for large values, which take turns.
const LANES: usize = 4;

/// Connections to all nodes: the first carries questions, the others large values.
pub(super) struct Cluster {
    client: ClusterClient,
    lanes: Vec<Lane>,
    next: Mutex<usize>,
}

#[derive(Default)]
struct Lane(tokio::sync::Mutex<Option<ClusterConnection>>);

impl fmt::Debug for Cluster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cluster").finish_non_exhaustive()
    }
}

/// Gives a lane's connection up unless its call came to an end.
struct Use<'a> {
    lane: &'a Lane,
    is_done: bool,
}

impl Drop for Use<'_> {
    fn drop(&mut self) {
        if !self.is_done
            && let Ok(mut connection) = self.lane.0.try_lock()
        {
            *connection = None;
        }
    }
}

impl Cluster {
    pub(super) fn new(nodes: Nodes, certificates: Option<TlsCertificates>) -> Result<Self, String> {
        let mut builder = ClusterClientBuilder::new(nodes.infos)
            .connection_timeout(CONNECT_WITHIN)
            .tcp_settings(tcp_settings())
            // A key that moves is followed; anything longer is the tier's to judge.
            .retries(3)
            .overall_response_timeout(None);
        if let Some(mode) = nodes.tls {
            builder = builder.tls(mode);
        }
        if let Some(certificates) = certificates {
            builder = builder.certs(certificates);
        }
        Ok(Self {
            client: builder.build().map_err(|error| plain_words(&error))?,
            lanes: (0..=LANES).map(|_| Lane::default()).collect(),
            next: Mutex::new(0),
        })
    }

    fn lane(&self, is_heavy: bool) -> &Lane {
        if !is_heavy {
            return &self.lanes[0];
        }
        let mut next = self.next.lock();
        *next = (*next + 1) % LANES;
        &self.lanes[1 + *next]
    }

    async fn connection(&self, lane: &Lane) -> Result<ClusterConnection, Refusal> {
        let mut place = lane.0.lock().await;
        if let Some(connection) = &*place {
            return Ok(connection.clone());
        }
        let made = self.client.get_async_connection().await;
        let made = made.map_err(|error| refusal(&error))?;
        Ok(place.insert(made).clone())
    }

    pub(super) async fn command(&self, cmd: &Cmd, is_heavy: bool) -> Result<Value, Refusal> {
        let lane = self.lane(is_heavy);
        let mut connection = self.connection(lane).await?;
        let mut in_use = Use {
            lane,
            is_done: false,
        };
        let outcome = cmd.query_async(&mut connection).await;
        let outcome = outcome.map_err(|error| refusal(&error));
        in_use.is_done = !outcome.as_ref().is_err_and(Refusal::is_outage);
        outcome
    }

    /// All at once: those for one node go out together.
    pub(super) async fn commands(&self, cmds: Vec<Cmd>) -> Result<Vec<Value>, Refusal> {
        let each = cmds.iter().map(|cmd| self.command(cmd, false));
        try_join_all(each).await
    }

    async fn routed(&self, cmd: &Cmd, to: RoutingInfo) -> Result<Value, Refusal> {
        let mut connection = self.connection(self.lane(false)).await?;
        let answer = connection.route_command(cmd.clone(), to).await;
        answer
            .and_then(Value::extract_error)
            .map_err(|error| refusal(&error))
    }

    pub(super) async fn of_any(&self, cmd: &Cmd) -> Result<Value, Refusal> {
        let any = RoutingInfo::SingleNode(SingleNodeRoutingInfo::RandomPrimary);
        self.routed(cmd, any).await
    }

    /// Addresses of the nodes that hold keys, in an order that stays.
    async fn primaries(&self) -> Result<Vec<String>, Refusal> {
        let all = RoutingInfo::MultiNode((MultipleNodeRoutingInfo::AllMasters, None));
        let found = self.routed(&redis::cmd("PING"), all).await?;
        let Value::Map(answers) = found else {
            return Err(unexpected("PING", &found));
        };
        let address = |(address, _): (Value, Value)| match address {
            Value::BulkString(bytes) => String::from_utf8(bytes).ok(),
            Value::SimpleString(text) => Some(text),
            _ => None,
        };
        let mut addresses: Vec<String> = answers.into_iter().filter_map(address).collect();
        addresses.sort();
        Ok(addresses)
    }

    /// One page of one node's keys; the cursor is the node's address and its own cursor.
    pub(super) async fn scan(
        &self,
        prefix: &str,
        cursor: Option<String>,
    ) -> Result<(Vec<String>, Option<String>), Refusal> {
        let primaries = self.primaries().await?;
        let (node, at) = match cursor.as_deref().and_then(|cursor| cursor.rsplit_once(' ')) {
            Some((node, at)) => (node.to_owned(), at.to_owned()),
            None => match primaries.first() {
                Some(first) => (first.clone(), "0".to_owned()),
                None => return Ok((Vec::new(), None)),
            },
        };
        let (host, port) = node
            .rsplit_once(':')
            .and_then(|(host, port)| Some((host.to_owned(), port.parse().ok()?)))
            .ok_or_else(|| Refusal::Protocol(format!("{node:?} is no address of a node")))?;
        let to = RoutingInfo::SingleNode(SingleNodeRoutingInfo::ByAddress { host, port });
        let (at, names) = scanned(self.routed(&scan(prefix, &at), to).await?)?;
        if at != "0" {
            return Ok((names, Some(format!("{node} {at}"))));
        }
        let next = primaries.into_iter().find(|primary| *primary > node);
        Ok((names, next.map(|next| format!("{next} 0"))))
    }
}
