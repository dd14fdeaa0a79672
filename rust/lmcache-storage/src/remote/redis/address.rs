//! The form of a URL of ours: which servers, who we are to them, and by which certificates.

use std::fs;
use std::time::Duration;

use percent_encoding::percent_decode_str;
use redis::io::tcp::TcpSettings;
use redis::io::tcp::socket2::TcpKeepalive;
use redis::{
    ClientTlsConfig, ConnectionAddr, ConnectionInfo, IntoConnectionInfo as _, ProtocolVersion,
    RedisConnectionInfo, RedisError, TlsCertificates, TlsMode,
};

/// How long a connection may take to be made.
pub(super) const CONNECT_WITHIN: Duration = Duration::from_secs(3);
/// How long a server may acknowledge nothing before the system closes the connection.
const SILENT_WITHIN: Duration = Duration::from_secs(10);
/// How often the system asks for a sign of life where nothing is sent.
const ASKED_EACH: Duration = Duration::from_secs(5);
const DEFAULT_PORT: u16 = 6379;
const DEFAULT_SENTINEL_PORT: u16 = 26379;

/// What a URL says.
pub(super) struct Address {
    /// Without credentials.
    pub(super) shown: String,
    pub(super) servers: Servers,
    pub(super) certificates: Option<TlsCertificates>,
    pub(super) key_prefix: String,
}

/// Whom it leads to.
pub(super) enum Servers {
    One(Box<ConnectionInfo>),
    Cluster(Nodes),
    Sentinels(Sentinels),
}

pub(super) struct Nodes {
    pub(super) infos: Vec<ConnectionInfo>,
    pub(super) tls: Option<TlsMode>,
}

pub(super) struct Sentinels {
    pub(super) addresses: Vec<ConnectionAddr>,
    pub(super) service: String,
    pub(super) db: i64,
    pub(super) username: Option<String>,
    pub(super) password: Option<String>,
    pub(super) tls: Option<TlsMode>,
}

/// What the query of a URL may hold.
#[derive(Default)]
struct Query {
    prefix: String,
    db: Option<i64>,
    user: Option<String>,
    pass: Option<String>,
    ca: Option<String>,
    cert: Option<String>,
    key: Option<String>,
    insecure: bool,
}

/// An error of the driver about what it was given.
pub(super) fn plain_words(error: &RedisError) -> String {
    format!("the Redis client refuses the settings: {error}")
}

/// What all connections have in common: one whose other end vanished without a word is closed.
pub(super) fn tcp_settings() -> TcpSettings {
    let keepalive = TcpKeepalive::new()
        .with_time(SILENT_WITHIN)
        .with_interval(ASKED_EACH);
    TcpSettings::default()
        .set_nodelay(true)
        .set_keepalive(keepalive)
        .set_user_timeout(SILENT_WITHIN)
}

fn decoded(text: &str) -> Result<String, String> {
    let text = percent_decode_str(text).decode_utf8();
    text.map(String::from)
        .map_err(|_| "a percent escape of the URL is no UTF-8".into())
}

impl Query {
    fn parse(text: &str) -> Result<Self, String> {
        let mut query = Self::default();
        for pair in text.split('&').filter(|pair| !pair.is_empty()) {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            let value = decoded(value)?;
            match name {
                "prefix" => query.prefix = value,
                "db" => query.db = Some(database(&value)?),
                "user" => query.user = Some(value),
                "pass" => query.pass = Some(value),
                "ca" => query.ca = Some(value),
                "cert" => query.cert = Some(value),
                "key" => query.key = Some(value),
                "insecure" => {
                    query.insecure = match &*value {
                        "true" | "1" => true,
                        "false" | "0" => false,
                        _ => return Err("insecure needs true or false".into()),
                    }
                }
                // Not repeated: it may be what stands behind a ? or & of a password.
                _ => {
                    return Err(
                        "one of the URL's parameters is unknown; there are prefix, db, user, pass, ca, cert, key and \
                         insecure, and ?, & and @ in a password are written %3F, %26 and %40"
                            .into(),
                    );
                }
            }
        }
        if query.cert.is_some() != query.key.is_some() {
            return Err("a client's certificate needs its key: give cert and key together".into());
        }
        Ok(query)
    }

    fn certificates(&self) -> Result<Option<TlsCertificates>, String> {
        if self.ca.is_none() && self.cert.is_none() {
            return Ok(None);
        }
        let read = |path: &String| {
            fs::read(path)
                .map_err(|error| format!("the certificate file {path} cannot be read: {error}"))
        };
        let client_tls = match (&self.cert, &self.key) {
            (Some(cert), Some(key)) => Some(ClientTlsConfig {
                client_cert: read(cert)?,
                client_key: read(key)?,
            }),
            _ => None,
        };
        Ok(Some(TlsCertificates {
            client_tls,
            root_cert: self.ca.as_ref().map(read).transpose()?,
        }))
    }
}

fn database(text: &str) -> Result<i64, String> {
    let number: Option<i64> = text.parse().ok().filter(|number| *number >= 0);
    // Without its host, a URL has a part of the password here.
    number.ok_or_else(|| "a database is a number, as in redis://host:6379/0".into())
}

impl Address {
    /// Reads a URL; credentials that it does not hold come from `environ`.
    pub(super) fn parse(
        url: &str,
        environ: impl Fn(&str) -> Option<String>,
    ) -> Result<Self, String> {
        let (scheme, rest) = url
            .split_once("://")
            .ok_or("a URL begins with a scheme and ://")?;
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let query = Query::parse(query)?;
        // A password may hold an @ that nobody escaped, a path none.
        let slash = rest.rfind('@').unwrap_or(0);
        let slash = rest[slash..].find('/').map(|at| at + slash);
        let (authority, path) = slash.map_or((rest, ""), |at| rest.split_at(at));
        let (who, hosts) = match authority.rsplit_once('@') {
            Some((who, hosts)) => (Some(who), hosts),
            None => (None, authority),
        };
        let (user, pass) = who.map_or((None, None), |who| match who.split_once(':') {
            Some((user, pass)) => (Some(user), Some(pass)),
            None => (Some(who), None),
        });
        let not_empty = |text: &String| !text.is_empty();
        let user = user.map(decoded).transpose()?.filter(not_empty);
        let pass = pass.map(decoded).transpose()?.filter(not_empty);
        let from = |names: &[&str]| {
            names
                .iter()
                .find_map(|name| environ(name))
                .filter(not_empty)
        };
        let password = pass
            .or_else(|| query.pass.clone())
            .or_else(|| from(&["REDIS_PASSWORD", "REDISCLI_AUTH"]));
        let username = user
            .or_else(|| query.user.clone())
            .or_else(|| from(&["REDIS_USERNAME"]))
            // A name without a password is nobody's.
            .filter(|_| password.is_some());
        let is_tls = scheme.starts_with("rediss") || scheme.starts_with("valkeys");
        let tls = is_tls.then_some(if query.insecure {
            TlsMode::Insecure
        } else {
            TlsMode::Secure
        });
        if !is_tls && (query.insecure || query.ca.is_some() || query.cert.is_some()) {
            return Err(format!(
                "{scheme}:// is not encrypted, so ca, cert, key and insecure have no meaning; use rediss://"
            ));
        }
        let who = Identity {
            username,
            password,
            tls,
        };
        let servers = Self::servers(scheme, hosts, path, &query, who)?;
        Ok(Self {
            shown: format!("{scheme}://{hosts}{path}"),
            servers,
            certificates: query.certificates()?,
            key_prefix: query.prefix,
        })
    }

    fn servers(
        scheme: &str,
        hosts: &str,
        path: &str,
        query: &Query,
        who: Identity,
    ) -> Result<Servers, String> {
        if scheme.ends_with("unix") {
            if path.is_empty() || !hosts.is_empty() {
                return Err(format!(
                    "{scheme}:// needs the absolute path of a socket, as in {scheme}:///run/redis.sock"
                ));
            }
            let address = ConnectionAddr::Unix(decoded(path)?.into());
            let db = query.db.unwrap_or(0);
            return Ok(Servers::One(Box::new(who.at(address, db)?)));
        }
        let is_sentinel = scheme.ends_with("-sentinel");
        let port = if is_sentinel {
            DEFAULT_SENTINEL_PORT
        } else {
            DEFAULT_PORT
        };
        let addresses: Vec<ConnectionAddr> = hosts
            .split(',')
            .map(|host| who.address(host, port))
            .collect::<Result<_, _>>()?;
        let path = path.trim_matches('/');
        if is_sentinel {
            let (service, db) = path.split_once('/').unwrap_or((path, ""));
            if service.is_empty() {
                return Err(format!(
                    "{scheme}:// needs the name of a service, as in {scheme}://host:26379/mymaster"
                ));
            }
            let db = if db.is_empty() {
                None
            } else {
                Some(database(db)?)
            };
            return Ok(Servers::Sentinels(Sentinels {
                addresses,
                service: decoded(service)?,
                db: db.or(query.db).unwrap_or(0),
                username: who.username,
                password: who.password,
                tls: who.tls,
            }));
        }
        let db = if path.is_empty() {
            None
        } else {
            Some(database(path)?)
        };
        let db = db.or(query.db).unwrap_or(0);
        if scheme.ends_with("-cluster") {
            let infos = addresses.into_iter().map(|address| who.at(address, db));
            return Ok(Servers::Cluster(Nodes {
                infos: infos.collect::<Result<_, _>>()?,
                tls: who.tls,
            }));
        }
        let [address] = <[ConnectionAddr; 1]>::try_from(addresses).map_err(|_| {
            format!("{scheme}:// names one host; several are a cluster ({scheme}-cluster://) or sentinels ({scheme}-sentinel://)")
        })?;
        Ok(Servers::One(Box::new(who.at(address, db)?)))
    }
}

/// Who we are to a server.
struct Identity {
    username: Option<String>,
    password: Option<String>,
    tls: Option<TlsMode>,
}

impl Identity {
    fn address(&self, host: &str, default_port: u16) -> Result<ConnectionAddr, String> {
        let (name, port) = match host.rsplit_once(':') {
            Some((name, port)) if !port.contains(']') => {
                // Without its host, a URL has the password here.
                let port = port.parse().map_err(|_| {
                    "what stands behind the host is no port; credentials stand before an @, as in \
                     redis://user:password@host:6379"
                })?;
                (name, port)
            }
            _ => (host, default_port),
        };
        let name = name.trim_start_matches('[').trim_end_matches(']');
        if name.is_empty() {
            return Err("the URL names no host".into());
        }
        let host = name.to_owned();
        Ok(match self.tls {
            None => ConnectionAddr::Tcp(host, port),
            Some(mode) => ConnectionAddr::TcpTls {
                host,
                port,
                insecure: mode == TlsMode::Insecure,
                tls_params: None,
            },
        })
    }

    fn at(&self, address: ConnectionAddr, db: i64) -> Result<ConnectionInfo, String> {
        let mut settings = RedisConnectionInfo::default()
            .set_db(db)
            .set_protocol(ProtocolVersion::RESP2);
        if let Some(username) = &self.username {
            settings = settings.set_username(username);
        }
        if let Some(password) = &self.password {
            settings = settings.set_password(password);
        }
        let info = address.into_connection_info();
        info.map(|info| {
            let info = info.set_redis_settings(settings);
            info.set_tcp_settings(tcp_settings())
        })
        .map_err(|error| plain_words(&error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(url: &str) -> Result<Address, String> {
        Address::parse(url, |_| None)
    }

    fn one(url: &str) -> ConnectionInfo {
        match parse(url).expect(url).servers {
            Servers::One(info) => *info,
            _ => panic!("{url} names more than one"),
        }
    }

    #[test]
    fn urls_say_where_and_who() {
        let info = one("redis://h");
        assert_eq!(info.addr(), &ConnectionAddr::Tcp("h".into(), 6379));
        assert_eq!(info.redis_settings().username(), None);
        let info = one("redis://u:p%40ss@h:7000/3");
        assert_eq!(info.addr(), &ConnectionAddr::Tcp("h".into(), 7000));
        assert_eq!(info.redis_settings().username(), Some("u"));
        assert_eq!(info.redis_settings().password(), Some("p@ss"));
        assert_eq!(info.redis_settings().db(), 3);
        let info = one("redis://:a/b@c@[::1]:7000");
        assert_eq!(info.addr(), &ConnectionAddr::Tcp("::1".into(), 7000));
        assert_eq!(info.redis_settings().password(), Some("a/b@c"));
        let info = one("unix:///run/redis.sock?db=2&pass=x");
        assert_eq!(info.addr(), &ConnectionAddr::Unix("/run/redis.sock".into()));
        assert_eq!(info.redis_settings().password(), Some("x"));
        assert_eq!(
            parse("redis://h?prefix=team%2F").expect("right").key_prefix,
            "team/"
        );
    }

    #[test]
    fn certificates_are_checked_unless_somebody_says_not_to() {
        let is_insecure = |url: &str| match one(url).addr() {
            ConnectionAddr::TcpTls { insecure, .. } => *insecure,
            _ => panic!("{url} is not encrypted"),
        };
        assert!(!is_insecure("rediss://h"));
        assert!(!is_insecure("valkeys://h?insecure=false"));
        assert!(is_insecure("rediss://h?insecure=true"));
    }

    #[test]
    fn a_cluster_and_sentinels_have_several_hosts() {
        let nodes = match parse("redis-cluster://:p@a:1,b:2").expect("right").servers {
            Servers::Cluster(nodes) => nodes,
            _ => panic!("a cluster"),
        };
        assert_eq!(nodes.infos.len(), 2);
        assert_eq!(nodes.infos[1].redis_settings().password(), Some("p"));
        let found = parse("redis-sentinel://a,b:5/mymaster/2").expect("right");
        let Servers::Sentinels(sentinels) = found.servers else {
            panic!("sentinels");
        };
        assert_eq!(
            sentinels.addresses[0],
            ConnectionAddr::Tcp("a".into(), 26379)
        );
        assert_eq!((&*sentinels.service, sentinels.db), ("mymaster", 2));
    }

    #[test]
    fn what_a_url_does_not_hold_comes_from_the_environment() {
        let environ = |name: &str| match name {
            "REDISCLI_AUTH" => Some("secret".to_owned()),
            "REDIS_USERNAME" => Some("me".to_owned()),
            _ => None,
        };
        let found = Address::parse("redis://h", environ).expect("right");
        let Servers::One(info) = found.servers else {
            panic!("one");
        };
        assert_eq!(info.redis_settings().password(), Some("secret"));
        assert_eq!(info.redis_settings().username(), Some("me"));
        let found = Address::parse("redis://:own@h", environ).expect("right");
        let Servers::One(info) = found.servers else {
            panic!("one");
        };
        assert_eq!(info.redis_settings().password(), Some("own"));
    }

    #[test]
    fn nothing_that_is_shown_holds_a_password() {
        let url = "redis://user:hunter2@h:1/0?pass=hunter2";
        assert!(!parse(url).expect("right").shown.contains("hunter2"));
        for wrong in [
            "redis://user:hunter2@h:port",
            "redis://user:hunter2@h/x",
            "redis://user:hunter2@",
            "redis://user:hunter2@h?what=1",
            "redis://user:hunter2@a,b",
            "redis://user:hunter2@h?ca=/x",
            "rediss://user:hunter2@h?cert=/x",
            "rediss://user:hunter2@h?ca=/no/such/file",
            "redis-sentinel://user:hunter2@h",
            "redis+unix://user:hunter2@h",
            // Escapes that somebody forgot, and hosts.
            "redis://:pa?hunter2@h:6379",
            "redis://:pa?hunter2=x@h:6379",
            "redis://h?pass=a&hunter2",
            "redis://h?pass=a&hunter2=b",
            "redis://user:hunter2",
            "redis://user:hunter2/0",
            "redis://user:1/hunter2",
            "redis-cluster://a:1,user:hunter2",
            "redis-sentinel://h/mine/hunter2",
            "redis://h?db=hunter2",
        ] {
            let said = parse(wrong).err().expect(wrong);
            assert!(!said.contains("hunter2"), "{said}");
        }
    }
}
