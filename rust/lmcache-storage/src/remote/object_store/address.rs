//! URLs of object stores.

use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::azure::MicrosoftAzureBuilder;
use object_store::client::Certificate;
use object_store::gcp::GoogleCloudStorageBuilder;
use object_store::{BackoffConfig, ClientOptions, RetryConfig};
use url::Url;

use super::super::Credentials;
use super::{MAX_HEADS, Objects};

const CONNECT_WITHIN: Duration = Duration::from_secs(2);
/// An idle connection is closed before a load balancer does it.
const IDLE_FOR: Duration = Duration::from_secs(50);
const RETRY_WITHIN: Duration = Duration::from_secs(2);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    S3,
    Google,
    Azure,
}

/// Where a bucket is, and what of it is ours.
#[derive(Debug, Clone)]
pub(super) struct Address {
    kind: Kind,
    bucket: String,
    endpoint: Option<String>,
    region: Option<String>,
    is_virtual_hosted: bool,
    is_signed: bool,
    /// What all names begin with: empty, or with a slash at its end.
    pub(super) key_prefix: String,
    /// In words, for logs.
    pub(super) shown: String,
}

impl Address {
    /// # Errors
    /// What is wrong with the URL, in words without what might be credentials.
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        let url = Url::parse(text).map_err(|error| format!("the URL cannot be read: {error}"))?;
        let kind = match url.scheme() {
            "gs" => Kind::Google,
            "az" | "azure" => Kind::Azure,
            _ => Kind::S3,
        };
        let scheme = url.scheme();
        if !url.username().is_empty() || url.password().is_some() {
            return Err(format!(
                "a {scheme} URL holds no credentials: give them in the environment ({})",
                kind.credentials()
            ));
        }
        let bucket = url.host_str().unwrap_or_default().to_owned();
        if bucket.is_empty() || url.port().is_some() {
            return Err(format!(
                "the URL names no bucket: write {scheme}://BUCKET/PREFIX, and the server as ?endpoint=http://HOST:PORT"
            ));
        }
        let path = url.path().trim_matches('/');
        let is_safe = |part: &str| {
            let mut bytes = part.bytes();
            !matches!(part, "" | "." | "..")
                && bytes.all(|byte| byte.is_ascii_alphanumeric() || b"-_.=".contains(&byte))
        };
        if !path.is_empty() && !path.split('/').all(is_safe) {
            return Err(
                "the URL's prefix may have letters, digits, and - _ . = between its slashes"
                    .to_owned(),
            );
        }
        let mut address = Self {
            kind,
            shown: format!("{scheme}://{bucket}/{path}"),
            bucket,
            endpoint: None,
            region: None,
            is_virtual_hosted: false,
            is_signed: true,
            key_prefix: if path.is_empty() {
                String::new()
            } else {
                format!("{path}/")
            },
        };
        for (name, value) in url.query_pairs() {
            address.set(&name, &value)?;
        }
        if let Some(endpoint) = &address.endpoint {
            address.shown = format!("{} at {endpoint}", address.shown);
        }
        Ok(address)
    }

    fn set(&mut self, name: &str, value: &str) -> Result<(), String> {
        match (name, self.kind) {
            ("endpoint", Kind::S3) => {
                let endpoint = Url::parse(value).ok().filter(|url| {
                    matches!(url.scheme(), "http" | "https")
                        && url.host_str().is_some()
                        && url.username().is_empty()
                        && url.password().is_none()
                        && url.query().is_none()
                });
                if endpoint.is_none() {
                    return Err("endpoint is to be http://HOST:PORT or https://HOST:PORT, without credentials".to_owned());
                }
                self.endpoint = Some(value.trim_end_matches('/').to_owned());
            }
            ("region", Kind::S3) => self.region = Some(value.to_owned()),
            ("addressing", Kind::S3) if matches!(value, "path" | "virtual") => {
                self.is_virtual_hosted = value == "virtual";
            }
            ("signature", Kind::S3) if value == "none" => self.is_signed = false,
            ("signature", Kind::S3) => return Err("signature may only be none".to_owned()),
            ("addressing", Kind::S3) => {
                return Err("addressing is to be path or virtual".to_owned());
            }
            _ => {
                let words = match self.kind {
                    Kind::S3 => "endpoint, region, addressing and signature",
                    _ => "none",
                };
                // Of the value nothing is said: it may be a secret.
                return Err(format!(
                    "the URL has the option {name:?}; there are {words}"
                ));
            }
        }
        Ok(())
    }

    /// # Errors
    /// What the environment lacks, in words without credentials.
    pub(super) fn open(&self, credentials: &Credentials) -> Result<Arc<dyn Objects>, String> {
        let failed = |error: object_store::Error| {
            // The crate's words name settings, and quote the endpoint at most.
            let words = error.to_string();
            let words = words.rsplit(": ").next().unwrap_or_default().to_owned();
            format!("{} cannot be used: {words}", self.shown)
        };
        let options = options(credentials.get("AWS_CA_BUNDLE"))?;
        Ok(match self.kind {
            Kind::S3 => Arc::new(self.s3(credentials, options).build().map_err(failed)?),
            Kind::Google => {
                let mut builder = GoogleCloudStorageBuilder::new();
                for (key, value) in settings(credentials, "GOOGLE_") {
                    builder = builder.with_config(key, value);
                }
                let builder = builder.with_bucket_name(&self.bucket);
                let builder = builder.with_client_options(options);
                Arc::new(builder.with_retry(retries()).build().map_err(failed)?)
            }
            Kind::Azure => {
                let mut builder = MicrosoftAzureBuilder::new();
                for (key, value) in settings(credentials, "AZURE_") {
                    builder = builder.with_config(key, value);
                }
                let builder = builder.with_container_name(&self.bucket);
                let builder = builder.with_client_options(options);
                Arc::new(builder.with_retry(retries()).build().map_err(failed)?)
            }
        })
    }

    fn s3(&self, credentials: &Credentials, options: ClientOptions) -> AmazonS3Builder {
        let mut builder = AmazonS3Builder::new();
        for (key, value) in settings(credentials, "AWS_") {
            builder = builder.with_config(key, value);
        }
        builder = builder.with_bucket_name(&self.bucket);
        if let Some(endpoint) = &self.endpoint {
            // The one that goes before every other.
            builder = builder.with_config(AmazonS3ConfigKey::S3Endpoint, endpoint);
        }
        if let Some(region) = &self.region {
            builder = builder.with_region(region);
        }
        let endpoint = [AmazonS3ConfigKey::S3Endpoint, AmazonS3ConfigKey::Endpoint]
            .iter()
            .find_map(|key| builder.get_config_value(key));
        let is_plain = endpoint.is_some_and(|endpoint| endpoint.starts_with("http://"));
        builder
            .with_virtual_hosted_style_request(self.is_virtual_hosted)
            .with_skip_signature(!self.is_signed)
            // TLS guards the wire, and each object has its own sum: no second one over the whole payload.
            .with_unsigned_payload(true)
            .with_client_options(options.with_allow_http(is_plain))
            .with_retry(retries())
    }
}

/// The variables that the crate knows of a kind of store.
fn settings<'a, K: FromStr>(
    credentials: &'a Credentials,
    prefix: &'a str,
) -> impl Iterator<Item = (K, &'a str)> {
    let ours = credentials
        .iter()
        .filter(move |(name, _)| name.starts_with(prefix));
    ours.filter_map(|(name, value)| Some((name.to_ascii_lowercase().parse().ok()?, value.as_str())))
}

impl Kind {
    fn credentials(self) -> &'static str {
        match self {
            Self::S3 => "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
            Self::Google => "GOOGLE_SERVICE_ACCOUNT",
            Self::Azure => "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
        }
    }
}

/// Whatever the environment says, certificates are checked, and nothing is sent in the clear. `authorities` is a file of
/// more to trust.
fn options(authorities: Option<&String>) -> Result<ClientOptions, String> {
    let mut options = ClientOptions::new()
        .with_allow_http(false)
        .with_connect_timeout(CONNECT_WITHIN)
        // The tier has the deadlines.
        .with_timeout_disabled()
        .with_pool_idle_timeout(IDLE_FOR)
        .with_pool_max_idle_per_host(MAX_HEADS);
    if let Some(path) = authorities {
        let unusable = |error: String| format!("AWS_CA_BUNDLE {path} cannot be used: {error}");
        let pem = std::fs::read(path).map_err(|error| unusable(error.to_string()))?;
        let certificates = Certificate::from_pem_bundle(&pem)
            .map_err(|_| unusable("it is no PEM file".to_owned()))?;
        for certificate in certificates {
            options = options.with_root_certificate(certificate);
        }
    }
    Ok(options)
}

fn retries() -> RetryConfig {
    RetryConfig {
        backoff: BackoffConfig {
            init_backoff: Duration::from_millis(50),
            max_backoff: Duration::from_millis(500),
            base: 2.0,
        },
        max_retries: 2,
        retry_timeout: RETRY_WITHIN,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_says_where_and_what_is_ours() {
        let address = Address::parse(
            "s3://Bucket-1/team/a/?endpoint=http://127.0.0.1:9000/&region=eu-west-1&addressing=path",
        )
        .expect("it is right");
        assert_eq!(address.bucket, "Bucket-1");
        assert_eq!(address.key_prefix, "team/a/");
        assert_eq!(address.endpoint.as_deref(), Some("http://127.0.0.1:9000"));
        assert_eq!(address.region.as_deref(), Some("eu-west-1"));
        assert_eq!(
            address.shown,
            "s3://Bucket-1/team/a at http://127.0.0.1:9000"
        );
        let bare = Address::parse("s3://b").expect("it is right");
        assert_eq!(bare.key_prefix, "");
        assert!(Address::parse("gs://b/p").is_ok());
        assert!(Address::parse("az://c/p").is_ok());
    }

    #[test]
    fn what_is_wrong_is_said_without_the_secret() {
        for (url, said) in [
            ("s3://KEY:hunter2@bucket/p", "environment"),
            (
                "s3://bucket/p?secret_access_key=hunter2",
                "secret_access_key",
            ),
            ("s3:///p", "names no bucket"),
            ("s3://bucket:9000/p", "names no bucket"),
            ("s3://bucket/a//b", "prefix"),
            ("s3://bucket/a b", "prefix"),
            ("s3://b/p?endpoint=127.0.0.1:9000", "http://HOST:PORT"),
            (
                "s3://b/p?endpoint=http://u:hunter2@h",
                "without credentials",
            ),
            ("s3://b/p?addressing=hunter2", "path or virtual"),
            ("gs://b/p?endpoint=http://h", "none"),
        ] {
            let words = Address::parse(url).expect_err(url);
            assert!(words.contains(said), "{url}: {words}");
            assert!(!words.contains("hunter2"), "{words}");
        }
    }
}
